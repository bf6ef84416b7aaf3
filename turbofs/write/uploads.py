"""Which upload a file goes on with: the one that is on its way, one that appends in place, or a fresh one.

Temporary files are in the directory of their target, so that taking the name is one rename within it. A file whose bytes
were let go here keeps the temporary file that has them until it is published.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import structlog
import trio

from turbofs.errors import NotFoundError, StaleFileError, TurboError
from turbofs.model import Change, split
from turbofs.source.base import Capability, Source, SourceWriter
from turbofs.write.acts import Publish
from turbofs.write.naming import Naming
from turbofs.write.pending import PendingAct, PendingActs
from turbofs.write.source_side import SourceSide
from turbofs.write.staged_file import StagedFile
from turbofs.write.upload import Upload, temporary_beside
from turbofs.write.view import LocalView, OnSource

_log = structlog.get_logger(__name__)


class Uploads:
    """Begins and ends uploads. Whoever calls holds the file's lock."""

    def __init__(self, source: Source, acts: PendingActs, view: LocalView[StagedFile], naming: Naming) -> None:
        self._source = source
        self._acts = acts
        self._view = view
        self._naming = naming
        self.noted: Callable[[StagedFile, SourceSide], None] = lambda _file, _side: None
        """Told before a temporary file is made: whoever finds the journal has to know of it."""

    async def usable(self, file: StagedFile, side: SourceSide, pending: PendingAct | None) -> Upload | None:
        """The upload that goes on, or a new one; None where there is no directory for it yet (and *pending* is None)."""
        low = min(file.changed_from, file.size)
        file.changed_from = 1 << 63
        side.lowest_change = min(side.lowest_change, low)
        upload = side.upload
        if upload is not None:
            if low >= upload.position and not (upload.complete and upload.position != file.size):
                return upload
            await self.drop(file, side)
        if pending is not None:
            side.upload = await self._append_in_place(file, side, pending)
        if side.upload is None:
            side.upload = await self._new_upload(file, side, pending)
        return side.upload

    async def resume(self, file: StagedFile, side: SourceSide, pending: PendingAct, path: str) -> None:
        """Go on with what an earlier mount had uploaded whole, or find that it has its name already."""
        assert side.resume is not None
        temporary, version, holds = side.resume
        try:
            now = (await self._source.stat_exact(temporary)).version
        except NotFoundError:
            await self._acts.ready(pending)  # after which whatever is above has been renamed
            if side.resume[0] != temporary:
                await self.resume(file, side, pending, path)
                return
            side.resume = None
            try:
                target = (await self._source.stat_exact(path)).version
            except NotFoundError:
                return
            if version.strong and target.file_id == version.file_id:
                side.named, side.version = True, target
                if await self._naming.is_being_written(path):
                    return  # by a writer that died: its last block shows to few, so the file is written anew
                same = min(version.size, file.size) if holds else 0
                if target.size >= file.size and await self._naming.begins(file, path, same, file.size):
                    side.generation, side.digest = file.generation, None
            elif (
                not version.strong and target.size == file.size and await self._naming.begins(file, path, 0, file.size)
            ):
                side.named, side.version, side.generation, side.digest = True, target, file.generation, None
            return
        replaced = not holds or version.compare(now) is Change.REPLACED or now.size != file.size
        with suppress(NotFoundError):  # renamed just now, with what is above
            replaced = replaced or await self._source.being_written(temporary)  # synced, and never completed
        (temporary, *_), side.resume = side.resume, None
        if replaced:
            side.retired.append(temporary)
            return
        side.upload = Upload(file, None, temporary, position=now.size, named=False)
        side.upload.version = now
        file.changed_from = 1 << 63

    async def recognise(self, file: StagedFile, side: SourceSide, path: str) -> None:
        """Find that an earlier mount had appended in place what it promised, and perhaps some of what followed."""
        known = side.version
        try:
            now = (await self._source.stat_exact(path)).version
        except NotFoundError:
            return
        if known is None or known.compare(now) is not Change.GREW or now.size < file.size:
            return
        if not await self._naming.is_being_written(path) and await self._naming.begins(file, path, 0, file.size):
            side.version, side.generation, side.digest = now, file.generation, None

    async def _append_in_place(self, file: StagedFile, side: SourceSide, pending: PendingAct) -> Upload | None:
        assert isinstance(pending.act, Publish)
        version = side.version
        if (
            version is None
            or not side.named
            or not version.size
            or side.recovered
            or file.size < version.size
            or side.lowest_change < version.size
            or Capability.APPEND not in self._source.capabilities
        ):
            return None
        path = pending.act.path
        await self._acts.ready(pending)
        writer = await self._source.append(path)
        try:
            now = (await self._source.stat_exact(path)).version
            other = version.strong and now.strong and now.file_id != version.file_id
            stale = other or now.size < version.size
            own = not stale and await self._naming.begins(file, path, version.size, now.size)
        except BaseException:
            with trio.CancelScope(shield=True):
                await writer.abort()
            raise
        if own:
            side.appended = True
            return Upload(file, writer, path, position=now.size, named=True)
        await writer.abort()
        if stale or not side.appended:
            raise StaleFileError(f"{path} was changed elsewhere while it was open for appending")
        if not file.whole and file.base_path == path:
            await file.rebase(path)  # it is changed, but by us
        return None  # what an append of ours left there has been changed here since: all of it goes anew

    async def _new_upload(self, file: StagedFile, side: SourceSide, pending: PendingAct | None) -> Upload | None:
        if Capability.RENAME not in self._source.capabilities:
            if pending is None:
                return None  # the name is certain only then
            assert isinstance(pending.act, Publish)
            await self._acts.ready(pending)
            if file.exclusive and not side.named:
                await self._naming.require_absent(pending.act.path)
            writer = await self._source.create(pending.act.path, mode=file.mode, replace=True)
            return Upload(file, writer, pending.act.path, named=True)
        directory = self._view.locate(split(file.path)[0])
        if not isinstance(directory, OnSource):
            if pending is None:
                return None
            assert isinstance(pending.act, Publish)
            await self._acts.ready(pending)  # after which the directory is there, under the name of the act
            directory = OnSource(split(pending.act.path)[0])
        if side.recovered:
            await self._delete_earlier(side, pending)
        try:
            writer = await self._create_beside(file, side, directory.path)
        except NotFoundError:
            if pending is None:
                return None
            assert isinstance(pending.act, Publish)
            await self._acts.ready(pending)  # the directory was renamed just now, or is gone
            writer = await self._create_beside(file, side, split(pending.act.path)[0])
        # As it is called now: what is above may have been renamed while the source made it.
        temporary = side.retired.pop()
        return Upload(file, writer, temporary, named=False)

    async def _create_beside(self, file: StagedFile, side: SourceSide, directory: str) -> SourceWriter:
        """A new temporary file in *directory*, whose path is the last of `side.retired` then."""
        side.retired.append(temporary_beside(directory))
        try:
            self.noted(file, side)
            return await self._source.create(side.retired[-1], mode=file.mode)
        except BaseException:
            side.retired.pop()
            raise

    async def drop(self, file: StagedFile, side: SourceSide) -> None:
        upload, side.upload = side.upload, None
        if upload is None:
            return
        side.appended = side.appended or upload.named
        side.lowest_change = min(side.lowest_change, upload.position if upload.named else 0)
        if upload.named or not file.whole:
            try:
                await upload.finish()
                if upload.named:
                    side.appended = True
                    await self._see_appended(upload, side)
            except TurboError as error:
                _log.info("a writer was given up", path=upload.path, error=str(error))
                await upload.abort() if upload.named else None
            if not upload.named:
                side.retired.append(upload.path)
        elif upload.complete:
            await self._delete(upload.path)
        else:
            await upload.abort()

    async def _see_appended(self, upload: Upload, side: SourceSide) -> None:
        """All that went through *upload* is under the name now: that is the version to go on from."""
        if side.version is not None and side.named:
            now = (await self._source.stat_exact(upload.path)).version
            if now.file_id == side.version.file_id and now.size == upload.position:
                side.version = now

    async def delete_retired(self, side: SourceSide) -> None:
        for path in side.retired:
            await self._delete(path)
        side.retired.clear()

    async def _delete_earlier(self, side: SourceSide, pending: PendingAct | None) -> None:
        """Delete the temporary file of an earlier mount before there is another: the journal knows one of each file."""
        while side.retired:
            path = side.retired[0]
            try:
                await self._source.delete(path)
            except NotFoundError:
                if pending is not None:
                    await self._acts.ready(pending)  # after which whatever is above has been renamed
            if side.retired[0] == path:
                side.retired.pop(0)

    async def _delete(self, path: str) -> None:
        try:
            await self._source.delete(path)
        except TurboError as error:
            if not isinstance(error, NotFoundError):
                _log.info("a temporary file stays until it is swept", path=path, error=str(error))
