"""Brings staged files to the source: uploads them, completes or syncs them, and gives them their names.

A file gets its name when all of it is there. Its bytes go to a hidden temporary file in the same directory, which is
completed (close) or synced (fsync of a file that stays open) and then renamed; later bytes of a file that stays open go
through the same writer, so that a log grows under its name. What was changed behind that point makes a new temporary
file, which replaces the old one at once. Only what was appended to a file that the source has already is appended in
place. A source without renames (an object store) shows an object when it is complete, which is the same to a reader.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import structlog
import trio

from turbofs.config import WriteConfig
from turbofs.errors import (
    NotFoundError,
    TurboError,
)
from turbofs.model import Attributes, split
from turbofs.source.base import Capability, Source
from turbofs.write.acts import Publish, moved_path, paths_of
from turbofs.write.naming import Naming
from turbofs.write.pending import PendingAct, PendingActs
from turbofs.write.source_side import SourceSide
from turbofs.write.staged_file import StagedFile
from turbofs.write.staging import PAGE_BYTES
from turbofs.write.upload import Slots, Upload
from turbofs.write.uploads import Uploads
from turbofs.write.view import LocalView

_log = structlog.get_logger(__name__)

_ATTEMPTS = 8
"""Uploads of one file for one publication: a write is never repeated, so each passing failure of one costs an upload."""
_PAUSE_FIRST_S, _PAUSE_LIMIT_S = 0.01, 1.0
_TORN = 8
"""How often an upload begins anew because somebody changes the file behind it; after that, what is there goes."""


class _UnlinkedError(TurboError):
    """The file lost its name while it was uploaded: nothing is to be published."""


class Flusher:
    """See the module. *acts* says what has to happen before a file may take its name."""

    def __init__(self, source: Source, acts: PendingActs, view: LocalView[StagedFile], config: WriteConfig) -> None:
        self._source = source
        self._acts = acts
        self._view = view
        self._config = config
        self._slots = Slots(config.uploads, config.piece_bytes)
        self._sides: dict[StagedFile, SourceSide] = {}
        self.naming = Naming(source)
        self.uploads = Uploads(source, acts, view, self.naming)
        self.uploaded_bytes = 0
        self.pressed: Callable[[], bool] = lambda: False
        """Whether writers wait for room in the staging area."""
        self.published: Callable[[StagedFile, Attributes], None] = lambda _file, _attributes: None
        """Told of each publication, with what the source says of the file then."""
        self.given_up: set[str] = set()
        """Paths of publications that were given up, because the file has no name here any more; as long as acts wait."""
        acts.idle = self.given_up.clear
        self.promised: Callable[[StagedFile], bool] = lambda _file: False
        """Whether anything is promised of a file: then its bytes stay here, where a crash finds them."""
        self.published_in: Callable[[str], None] = lambda _directory: None
        """Told of the directory of each publication, by its name on the source."""

    # --- what is known

    def begin(self, file: StagedFile) -> SourceSide:
        """From now on *file* is known here."""
        side = SourceSide(named=file.base is not None, version=file.base)
        self._sides[file] = side
        return side

    def side(self, file: StagedFile) -> SourceSide:
        return self._sides[file]

    def end(self, file: StagedFile) -> None:
        self._sides.pop(file, None)

    def hand_over(self, file: StagedFile) -> list[StagedFile]:
        """What is promised of *file* has ended: files that follow it under its name know what the source has there now."""
        side = self._sides[file]
        following = [(each, one) for each, one in self._sides.items() if one.after is side]
        for _, one in following:
            one.version, one.after = side.version, None
        return [each for each, _ in following]

    def is_dirty(self, file: StagedFile) -> bool:
        """Whether the source does not have under its name what *file* is now."""
        side = self._sides[file]
        return side.generation < file.generation or side.attributes_generation < file.attributes_generation

    def uploaded(self, file: StagedFile) -> int:
        """How many bytes the source has taken of what is not published yet."""
        upload = self._sides[file].upload
        return upload.position if upload is not None else 0

    def moved(self, old: str, new: str) -> None:
        """A directory or file was renamed on the source: temporaries under it went along."""
        for file, side in self._sides.items():
            upload, retired = side.upload, [moved_path(path, old, new) for path in side.retired]
            follows = retired != side.retired
            side.retired = retired
            if side.resume is not None:
                side.resume = (moved_path(side.resume[0], old, new), *side.resume[1:])
            file.base_path = moved_path(file.base_path, old, new)
            if upload is not None and upload.path != (path := moved_path(upload.path, old, new)):
                upload.path = path
                follows = follows or not upload.named
            if follows:
                try:
                    self.uploads.noted(file, side)
                except TurboError as error:
                    _log.warning(
                        "a crash would leave a temporary file", path=upload.path if upload else "", error=str(error)
                    )

    # --- publication

    async def publish(self, file: StagedFile, pending: PendingAct, *, final: bool) -> None:
        """Let the source have under its name what *file* is now; *final*: completed, not only synced.

        Raises what the source says, ConflictError, CancelledActError. Passing failures of an upload are met by another.
        """
        async with file.lock:
            side = self._sides[file]
            attempt = 0
            while not file.unlinked:
                attempt += 1
                try:
                    await self._bring(file, side, pending, final=final)
                    return
                except TurboError as error:
                    with trio.CancelScope(shield=True):
                        await self.uploads.drop(file, side)
                    if isinstance(error, _UnlinkedError):
                        break
                    if not error.transient or attempt == _ATTEMPTS:
                        raise
                    _log.info("upload begins anew", path=file.path, error=str(error))
                    await trio.sleep(min(_PAUSE_LIMIT_S, _PAUSE_FIRST_S * 2**attempt))
                except BaseException:
                    with trio.CancelScope(shield=True):
                        await self.uploads.drop(file, side)
                    raise
            if not side.named:
                self.given_up.update(paths_of(pending.act))

    async def stream(self, file: StagedFile) -> None:
        """Upload what there is of a file that is being written; ends when there is no whole piece left. Never raises."""
        side = self._sides[file]
        try:
            while not file.unlinked and file.size - self.uploaded(file) >= self._least():
                async with file.lock:
                    if not side.streams or file.unlinked or side.named:
                        return
                    upload = await self.uploads.usable(file, side, None)
                    if upload is None or upload.named:
                        return
                    stop = min(file.size, upload.position + self._config.piece_bytes)
                    await upload.advance(stop, self._slots, self._count)
                if self.pressed():
                    await self.let_go(file)
        except TurboError as error:
            _log.info("not uploaded while it is written", path=file.path, error=str(error))
            side.streams = False  # close tries again, and is told what comes of it
            async with file.lock:
                await self.uploads.drop(file, side)
        finally:
            side.streaming = False

    async def let_go(self, file: StagedFile) -> int:
        """Free what an upload has taken of a file that is still being written; returns bytes. Never raises."""
        side = self._sides[file]
        upload = side.upload
        if upload is None or upload.complete or Capability.SYNC not in self._source.capabilities:
            return 0
        async with file.lock:
            if side.upload is not upload or file.changed_from < upload.position or self.promised(file):
                return 0
            try:
                await upload.sync()
                if self.promised(file):
                    return 0
                return await file.let_go(upload.position, upload.path, self._source.open)
            except (TurboError, OSError) as error:
                _log.info("staged bytes stay", path=file.path, error=str(error))
                return 0

    async def abandon(self, file: StagedFile) -> None:
        """Nothing of *file* is to reach the source any more: take back what is on its way."""
        async with file.lock:
            side = self._sides.get(file)
            if side is not None:
                await self.uploads.drop(file, side)
                await self.uploads.delete_retired(side)

    # --- steps

    async def _bring(self, file: StagedFile, side: SourceSide, pending: PendingAct, *, final: bool) -> None:
        assert isinstance(pending.act, Publish)
        path = pending.act.path
        generation, attributes_generation = file.generation, file.attributes_generation
        if side.resume is not None:
            await self.uploads.resume(file, side, pending, path)
        elif side.recovered:
            await self.uploads.recognise(file, side, path)
        upload = side.upload
        grown = False
        if side.generation < generation:
            upload = await self._complete_or_sync(file, side, pending, final=final)
            await self._acts.ready(pending)
            grown = upload.named
            if not upload.named:
                if file.unlinked:
                    raise _UnlinkedError(f"{path} was deleted before it had its name")
                await self.naming.take_name(file, side, upload, path)
            if file.unlinked and not side.named:
                await self._take_back(path)
        else:
            await self._acts.ready(pending)
            if final and upload is not None:
                await upload.finish()
        side.named = True
        told = await self.naming.set_attributes(file, side, path)
        self.given_up.discard(path)
        side.generation, side.attributes_generation = generation, attributes_generation
        side.lowest_change = 1 << 63
        side.digest = upload.digest if upload is not None else side.digest
        if upload is not None and upload.complete:
            side.upload = None
        if not file.whole:
            await file.rebase(path)
        await self.uploads.delete_retired(side)
        side.recovered = False
        seen = upload.attributes if upload is not None and not told else None
        await self._tell(file, side, path, seen, grown=grown and upload is not None and not upload.complete)
        if upload is not None:
            upload.attributes = None

    async def _complete_or_sync(
        self, file: StagedFile, side: SourceSide, pending: PendingAct, *, final: bool
    ) -> Upload:
        assert isinstance(pending.act, Publish)
        capabilities = self._source.capabilities
        final = final or Capability.SYNC not in capabilities
        torn = 0
        while True:
            upload = await self.uploads.usable(file, side, pending)
            if upload is None:
                raise NotFoundError(f"the directory of {pending.act.path} is gone")
            torn += 1
            if not upload.complete:
                await upload.advance(file.size, self._slots, self._count)
            if file.unlinked:
                raise _UnlinkedError(f"{pending.act.path} was deleted while it was uploaded")
            if torn == _TORN or min(file.changed_from, file.size) >= upload.position:
                break
        if Capability.RENAME not in capabilities:
            await self._acts.ready(pending)  # what is complete has its name there
        if final or upload.complete:  # what was recovered whole has nothing to sync
            await upload.finish()
        else:
            await upload.sync()
        return upload

    async def _take_back(self, path: str) -> None:
        """A new file was unlinked while it took its name *path*: delete what nobody else is to delete or replace.

        Raises _UnlinkedError where it did.
        """
        if self._acts.replaces(path) or self._view.file(path) is not None:
            return
        with suppress(NotFoundError):
            await self._source.delete(path)
        raise _UnlinkedError(f"{path} was deleted while it took its name")

    async def _tell(
        self, file: StagedFile, side: SourceSide, path: str, seen: Attributes | None, *, grown: bool
    ) -> None:
        version = side.version
        if grown and version is not None and version.append_only and version.strong:
            # A sync moves the length on HDFS and nothing else: no question is needed, and logs sync often.
            size = side.upload.synced if side.upload is not None else file.size
            attributes = file.attributes().with_version(version._replace(size=size))
        elif seen is not None and seen.version.append_only and seen.version.strong:
            attributes = seen  # a rename changes nothing of a file on HDFS
        else:
            attributes = await self._source.stat_exact(path)
        side.version = attributes.version
        self.published(file, attributes)
        self.published_in(split(path)[0])

    def _least(self) -> int:
        """What is worth sending of a file that is still being written: a piece, or whatever gives room back."""
        return PAGE_BYTES if self.pressed() else self._config.piece_bytes

    def _count(self, count_bytes: int) -> None:
        self.uploaded_bytes += count_bytes
