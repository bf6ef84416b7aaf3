"""The write room as the file system uses it: files being written, what their acknowledgement promises, what is left.

Two promises. `persisted`: close and fsync return when the bytes are on the source under their name. `staged`: they
return when every byte is in the staging area and the journal says so; the flusher brings it to the source afterwards, in
the order that `acts` describes, and whatever cannot be brought there is parked and reported.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from copy import copy

import structlog
import trio

from turbofs.background import Background
from turbofs.config import WriteConfig
from turbofs.errors import OutOfSpaceError, TurboError
from turbofs.model import AttributeChange, Attributes, FileVersion, split
from turbofs.source.base import Source, SourceFile
from turbofs.write.acts import Act, Early, Publish, Rename, is_below, paths_of
from turbofs.write.changes import Before, Changes, patiently
from turbofs.write.flusher import Flusher, SourceSide
from turbofs.write.journal import ActRecord, BrokenRecord, FileRecord, Journal, ParkedRecord
from turbofs.write.parking import Parking
from turbofs.write.pending import PendingAct, PendingActs
from turbofs.write.staged_file import StagedFile
from turbofs.write.staging import StagingArea
from turbofs.write.view import LocalView

_log = structlog.get_logger(__name__)


class _Outcome:
    """How a publication ended, for who waits for it."""

    def __init__(self) -> None:
        self.ended = trio.Event()
        self.error: TurboError | None = None


class Writes:
    """All files that this mount writes, and all acts of it that are pending."""

    def __init__(
        self, source: Source, area: StagingArea, journal: Journal, config: WriteConfig, background: Background
    ) -> None:
        self._source = source
        self._area = area
        self._journal = journal
        self._config = config
        self._background = background
        self._files: set[StagedFile] = set()
        self._promised: dict[StagedFile, list[PendingAct]] = {}
        self._broken = {record.path: record for record in journal.broken()}
        self.view: LocalView[StagedFile] = LocalView()
        self.acts = PendingActs(iter(journal.next_id, None))
        self.flusher = Flusher(source, self.acts, self.view, config)
        self.flusher.noted = self._note
        self.flusher.published = self._published
        self.flusher.traced = lambda file: file in self._promised
        self.changes = Changes(source, self.acts, self.view, journal, self.flusher, background)
        self.changes.failed = self._act_failed
        self.parking = Parking(area, journal)
        self.draining = False
        self.on_published: Callable[[StagedFile, Attributes], None] = lambda _file, _attributes: None
        """Told of each publication, with what the source says of the file."""
        self.on_released: Callable[[StagedFile], Awaitable[None]] = _nobody
        """Told when a file has one user less, but some."""
        self.on_reverted: Callable[[Iterable[str]], None] = lambda _paths: None
        """Told of local names that do not mean any more what they did."""
        self.on_durability: Callable[[], None] = lambda: None
        """Told when some file's durability may have changed."""
        self._reclaiming = False
        area.wanted = self._reclaim_soon

    # --- files

    def file_at(self, path: str) -> StagedFile | None:
        """The staged file of that name, where the source does not have all of it."""
        return self.view.file(path)

    def create(self, path: str, *, mode: int, owner: str | int | None, group: str | int | None) -> StagedFile:
        """A new file, which nobody but this mount sees yet. Raises OutOfSpaceError."""
        file = StagedFile.create(self._area, self._journal.next_id(), path, mode=mode, owner=owner, group=group)
        self._know(file)
        self.view.put(path, file)
        return file

    def update(self, path: str, attributes: Attributes, open_source: Callable[[], Awaitable[SourceFile]]) -> StagedFile:
        """The file *path* as the source has it, to be changed. Raises OutOfSpaceError."""
        number = self._journal.next_id()
        file = StagedFile.create(
            self._area, number, path, mode=attributes.mode, owner=attributes.owner, group=attributes.group
        )
        file.mtime_ns, file.atime_ns, file.ctime_ns = attributes.mtime_ns, attributes.atime_ns, attributes.ctime_ns
        file.update_of(attributes.version, open_source)
        self._know(file)
        return file

    def changed(self, file: StagedFile, *, stream: bool = False) -> None:
        """*file* differs from the source now; *stream*: upload it while it is being written, where that pays."""
        if not file.unlinked and file.path and self.view.file(file.path) is not file:
            self.view.put(file.path, file)
        side = self.flusher.side(file)
        if (
            stream
            and side.streams
            and not side.streaming
            and not side.named
            and file.size >= self._config.stream_from_bytes
            and file.size - self.flusher.uploaded(file) >= self._config.piece_bytes
        ):
            side.streaming = True
            self._background.start_soon(self.flusher.stream, file)

    def is_dirty(self, file: StagedFile) -> bool:
        return file in self._files and not file.unlinked and self.flusher.is_dirty(file)

    def outstanding(self, file: StagedFile) -> bool:
        """Whether a close of *file* has anything to do."""
        if file not in self._files:
            return False
        return file.error is not None or self.flusher.is_dirty(file) or self.flusher.side(file).upload is not None

    def unpromised(self, file: StagedFile) -> bool:
        """Whether *file* holds bytes that neither the source has nor an acknowledgement covers."""
        return self.is_dirty(file) and file.generation > file.acknowledged_generation

    async def publish(self, file: StagedFile, early: Early | None, *, final: bool) -> None:
        """Do what close (*final*) or fsync promise for *file*; *early*: acknowledge as soon as it is staged.

        Raises what keeps the promise from being kept. Cancelled, the publication goes on.
        """
        if file.error is not None:
            raise copy(file.error)
        if file.unlinked:
            return
        if not self.flusher.is_dirty(file) and not (final and self.flusher.side(file).upload is not None):
            waiting = self._waiting(file)
            if waiting is None or early is not None:
                return
        if early is not None and await self._stage(file):
            self._acknowledge(file, early)
            return
        outcome = _Outcome()
        pending = self.acts.issue(Publish(file.path, file.number))
        file.users += 1
        self._background.start_soon(self._persist, file, pending, final, outcome)
        await outcome.ended.wait()
        if outcome.error is not None:
            raise outcome.error

    def publish_soon(self, file: StagedFile, early: Early | None) -> None:
        """Publish what nobody waits for any more: pages that were dirtied through a mapping after close."""

        async def publish() -> None:
            try:
                await self.publish(file, early, final=True)
            except TurboError as error:
                _log.warning("bytes written after close are lost", path=file.path, error=str(error))
            finally:
                await self.release(file)

        file.users += 1
        self._background.start_soon(publish)

    async def release(self, file: StagedFile) -> None:
        """One user of *file* less; the last one lets its bytes go, unless they are promised to the source."""
        file.users -= 1
        if file.users:
            await self.on_released(file)
            return
        if file not in self._files:
            return
        if file.error is None:
            await self._drop(file)
        else:
            self._files.discard(file)
            self.flusher.end(file)
            file.close()

    def unlink(self, file: StagedFile) -> None:
        """*file* has lost its name here: whoever has it open keeps it, and nothing of it is published any more."""
        if not file.unlinked:
            file.unlinked = True
            if self.view.file(file.path) is file:
                self.view.remove(file.path)
            self._background.start_soon(self.flusher.abandon, file)

    async def unlink_now(self, file: StagedFile) -> None:
        """As `unlink`, and the temporary file on the source is gone when this returns."""
        if not file.unlinked:
            file.unlinked = True
            if self.view.file(file.path) is file:
                self.view.remove(file.path)
            await self.flusher.abandon(file)

    def set_attributes(self, file: StagedFile, change: AttributeChange) -> None:
        """Change what *file* shows; the source is told when it is published, or now where it has it already."""
        file.adopt_attributes(change)
        file.attributes_generation += 1
        waiting = self._waiting(file)
        if waiting is not None and isinstance(waiting.act, Publish):
            self._journal.put(self._record(file, waiting.act.early))

    def takes_over(self, file: StagedFile, version: FileVersion) -> None:
        """*file*, which the source does not have, gets a name under which the source has *version*."""
        side = self.flusher.side(file)
        side.named, side.version, file.base, file.exclusive = True, version, version, False
        side.lowest_change = 0
        self.changed(file)

    def is_now(self, file: StagedFile, version: FileVersion) -> None:
        """The attributes of *file* were changed on the source, which made it *version*."""
        if file in self._files:
            self.flusher.side(file).version = version

    def has_on_source(self, file: StagedFile) -> bool:
        """Whether the source has, or will have by what is pending, something under the name of *file*."""
        return self.flusher.side(file).named or self._waiting(file) is not None

    def move_files(self, old: str, new: str) -> None:
        """Staged files at and below *old* are called *new* now."""
        moved = [file for file in self._files if file.path and not file.unlinked and is_below(file.path, old)]
        for file in moved:
            if self.view.file(file.path) is file:
                self.view.remove(file.path)
                self.view.put(new + file.path[len(old) :], file)
            file.path = new + file.path[len(old) :]

    def files_below(self, directory: str) -> list[StagedFile]:
        """Staged files at and below *directory* that the source does not have as they are."""
        return [each for each in self._files if not each.unlinked and is_below(each.path, directory)]

    # --- what was parked

    async def publish_parked(self, record: ParkedRecord, path: str, replaced: FileVersion | None) -> None:
        """Publish parked bytes as *path*, where the source has *replaced*. Raises as the source does; they stay parked."""
        file = StagedFile.adopt(
            self._area, record.id, path, record.size, mode=record.mode, owner=record.owner, group=record.group
        )
        try:
            side = self.flusher.begin(file)
            if replaced is not None:
                side.named, side.version, file.base = True, replaced, replaced
                side.lowest_change = 0
            pending = self.acts.issue(Publish(path, file.number))
            try:
                await self.flusher.publish(file, pending, final=True)
            finally:
                self.acts.finish(pending)
        finally:
            self.flusher.end(file)
            file.close()
            self._area.release(file.staged_bytes)  # counted as parked bytes all the while
        self.drop_parked(record.id)
        self._heal(path)

    def drop_parked(self, number: int) -> None:
        """Delete parked bytes, and what was said of their path. Raises NotFoundError."""
        self._heal(self.parking.record(number).path)
        self.parking.drop(number)
        self.on_durability()

    # --- names

    async def change(self, act: Act, before: Before | None = None) -> bool:
        """See `Changes.change`; staged files follow a rename in the same step in which it shows."""
        for path in paths_of(act):
            self._heal(path)
        deferred = self.changes.would_defer(act)
        if deferred and isinstance(act, Rename):
            done = await self.changes.change(act, before)
            self.move_files(act.old, act.new)
            return done
        done = await self.changes.change(act, before)
        if isinstance(act, Rename):
            self.move_files(act.old, act.new)
        return done

    async def names_done(self, directory: str) -> None:
        """Return when nothing that was deferred in *directory* is pending any more. Raises what went wrong with it."""
        for pending in self.acts:
            if pending.deferred and any(split(path)[0] == directory for path in paths_of(pending.act)):
                await pending.ended.wait()
                if pending.error is not None:
                    raise copy(pending.error)

    # --- what is known

    def durability(self, path: str) -> str | None:
        """`open`, `staged` or `broken` for what is at or below *path*; None where nothing is outstanding."""
        if any(is_below(each, path) for each in self._broken):
            return "broken"
        levels = {self._level(file) for file in self.files_below(path)}
        if "open" in levels:
            return "open"
        if "staged" in levels or any(
            each.deferred and any(is_below(one, path) or is_below(path, one) for one in paths_of(each.act))
            for each in self.acts
        ):
            return "staged"
        return None

    def broken_reason(self, path: str) -> str | None:
        """Why something at or below *path* is broken."""
        for each, record in self._broken.items():
            if is_below(each, path):
                return record.error if each == path else f"{each}: {record.error}"
        return None

    def broken(self) -> list[BrokenRecord]:
        return list(self._broken.values())

    def report(self) -> dict[str, object]:
        """What `turbofs status` shows of writing."""
        return {
            "staging": self._area.statistics(),
            "files": [
                {
                    "path": file.path,
                    "state": "broken" if file.error else ("waiting" if self._waiting(file) else "open"),
                    "size": file.size,
                    "uploaded_bytes": self.flusher.uploaded(file),
                    "error": str(file.error) if file.error else None,
                }
                for file in sorted(self._files, key=lambda each: each.path)
                if not file.unlinked and (self.flusher.is_dirty(file) or self._waiting(file) or file.error)
            ],
            "acts": [
                {
                    "act": type(each.act).__name__,
                    "path": paths_of(each.act)[0],
                    "to": each.act.new if isinstance(each.act, Rename) else None,
                    "waits_for": sum(not earlier.ended.is_set() for earlier in each.waits),
                }
                for each in self.acts
                if each.deferred
            ],
            "broken": [{"path": each.path, "error": each.error, "when": each.when_ns / 1e9} for each in self.broken()],
            "conflicts": len(self.parking.records()),
            "draining": self.draining,
        }

    def left(self) -> list[StagedFile]:
        """Files that were acknowledged and are not on the source."""
        return [file for file in self._files if self._waiting(file) is not None]

    async def drain(self) -> None:
        """Return when nothing that was acknowledged waits any more. Bound it by a deadline."""
        self.draining = True
        while len(self.acts):
            for pending in self.acts:
                await pending.ended.wait()

    def report_lost(self, path: str) -> None:
        """What was acknowledged as *path* is not in the staging area any more."""
        self._mark_broken(path, "the staged bytes are gone: the staging area was cleared before they were published")

    # --- steps

    def _know(self, file: StagedFile) -> None:
        self._files.add(file)
        self.flusher.begin(file)
        file.users += 1

    def _waiting(self, file: StagedFile) -> PendingAct | None:
        """The newest early acknowledged publication of *file* that is still to come."""
        promised = self._promised.get(file)
        return promised[-1] if promised else None

    async def _stage(self, file: StagedFile) -> bool:
        """Have every byte of *file* here; False where it cannot be, so that only the source can vouch for it."""
        if file.whole and not file.let_go_bytes:
            return True
        if file.let_go_bytes:
            return False
        try:
            await file.fill_all()
        except OutOfSpaceError:
            return False
        return file.whole

    def _acknowledge(self, file: StagedFile, early: Early) -> None:
        file.acknowledged_size, file.acknowledged_generation = file.size, file.generation
        waiting = self._waiting(file)
        if waiting is not None and paths_of(waiting.act) == (file.path,) and not self._touched_after(waiting):
            self._journal.put(self._record(file, early))
            return
        act = Publish(file.path, file.number, early)
        pending = self.acts.issue(act, deferred=True)
        try:
            with self._journal.transaction():
                self._journal.put(self._record(file, early))
                self._journal.put(ActRecord(pending.sequence, act, early=True))
        except BaseException:
            self.acts.finish(pending)
            raise
        self.view.apply(act)
        self.start_waiting(file, pending)
        self.on_durability()

    def start_waiting(self, file: StagedFile, pending: PendingAct) -> None:
        """Publish *file*, which was acknowledged early, in its turn."""
        file.users += 1
        self._files.add(file)
        self._promised.setdefault(file, []).append(pending)
        self._background.start_soon(self._publish_early, file, pending)

    def _touched_after(self, waiting: PendingAct) -> bool:
        return any(waiting in each.waits and isinstance(each.act, Rename) for each in self.acts)

    async def _publish_early(self, file: StagedFile, pending: PendingAct) -> None:
        async def attempt() -> None:
            await self.flusher.publish(file, pending, final=not file.writers)

        error: TurboError | None = None
        act = pending.act
        assert isinstance(act, Publish)
        try:
            await patiently("publish", act.path, attempt)
        except TurboError as failure:
            error = failure
        self.acts.finish(pending, error)
        self._promised[file].remove(pending)
        if not self._promised[file]:
            del self._promised[file]
        if error is None:
            self.view.done(act)
            self._settle(file)
        else:
            self._break(file, pending, error)
        self._forget_promise(file, pending)
        self.on_durability()
        await self.release(file)

    def _forget_promise(self, file: StagedFile, pending: PendingAct) -> None:
        try:
            with self._journal.transaction():
                self._journal.remove_act(pending.sequence)
                if file not in self._promised:
                    self._journal.remove_file(file.number)
        except TurboError as error:
            _log.warning("the journal keeps a publication that has ended", error=str(error))

    async def _persist(self, file: StagedFile, pending: PendingAct, final: bool, outcome: _Outcome) -> None:
        try:
            await self.flusher.publish(file, pending, final=final)
        except TurboError as error:
            outcome.error = error
            self._mark_broken(file.path or paths_of(pending.act)[0], f"{error}; {error.advice}")
        else:
            self._settle(file)
        finally:
            self.acts.finish(pending, outcome.error)
            outcome.ended.set()
            self.on_durability()
            await self.release(file)

    def _settle(self, file: StagedFile) -> None:
        """The source has *file* as it is, or not: the view shows it only in the latter case."""
        self._heal(file.path)
        if file in self._files and not self.flusher.is_dirty(file) and self.view.file(file.path) is file:
            self.view.remove(file.path)

    def _break(self, file: StagedFile, pending: PendingAct, error: TurboError) -> None:
        """Acknowledged bytes cannot be published: park them, and say so for as long as it is true."""
        path = paths_of(pending.act)[0]
        if file.unlinked or file in self._promised:
            self._mark_broken(path, f"{error}; {error.advice}")
        else:
            self.parking.park(file, self.flusher.side(file), path, f"{error}; {error.advice}")
            file.error = error
            self._mark_broken(path, f"{error}; {error.advice}")
        self._rebuild([path])

    def _act_failed(self, pending: PendingAct, error: TurboError) -> None:
        path = paths_of(pending.act)[-1]
        self._mark_broken(path, f"{type(pending.act).__name__} was not carried out: {error}; {error.advice}")
        self._rebuild(paths_of(pending.act))
        self.on_durability()

    def _rebuild(self, paths: Iterable[str]) -> None:
        """What was pending fell: show what is left."""
        files = {
            file.path: file
            for file in self._files
            if file.path and not file.unlinked and not file.error and self.flusher.is_dirty(file)
        }
        self.view.rebuild([each.act for each in self.acts if each.deferred], files)
        self.on_reverted(paths)

    def _mark_broken(self, path: str, error: str) -> None:
        record = BrokenRecord(path, error, time.time_ns())
        self._broken[path] = record
        self._journal.put(record)
        _log.error("broken", path=path, error=error)

    def _heal(self, path: str) -> None:
        """*path* was written, renamed or deleted with success, so that what was said of it is past."""
        if self._broken.pop(path, None) is not None:
            self._journal.remove_broken(path)

    def _level(self, file: StagedFile) -> str | None:
        if self._waiting(file) is not None:
            return "staged"
        return "open" if self.flusher.is_dirty(file) else None

    def _published(self, file: StagedFile, attributes: Attributes) -> None:
        self.on_published(file, attributes)

    def _note(self, file: StagedFile, side: SourceSide) -> None:
        waiting = self._waiting(file)
        early = waiting.act.early if waiting is not None and isinstance(waiting.act, Publish) else None
        self._journal.put(self._record(file, early, side))

    def _record(self, file: StagedFile, early: Early | None, side: SourceSide | None = None) -> FileRecord:
        side = side or self.flusher.side(file)
        upload = side.upload
        temporary = upload.path if upload is not None and not upload.named else None
        if temporary is None and side.retired:
            temporary = side.retired[-1]
        return FileRecord(
            id=file.number,
            path=file.path,
            base=file.base,
            exclusive=file.exclusive,
            mode=file.mode,
            owner=file.owner,
            group=file.group,
            mtime_ns=file.mtime_ns if file.times_set else None,
            atime_ns=file.atime_ns if file.times_set else None,
            size=file.acknowledged_size if early is not None else file.size,
            early=early,
            temporary=temporary,
            uploaded=upload.version if upload is not None else None,
            ours=side.version if side.named else None,
            digest=side.digest,
        )

    async def _drop(self, file: StagedFile) -> None:
        self._files.discard(file)
        if self.view.file(file.path) is file:
            self.view.remove(file.path)
            self.on_reverted([file.path])
        with trio.CancelScope(shield=True), trio.move_on_after(self._config.stall_s):
            await self.flusher.abandon(file)
        self.flusher.end(file)
        self._journal.remove_file(file.number)
        await file.discard()

    def _reclaim_soon(self) -> None:
        if not self._reclaiming:
            self._reclaiming = True
            self._background.start_soon(self._reclaim)

    async def _reclaim(self) -> None:
        """Free what uploads have taken, the largest first, until writers need not wait."""
        try:
            for file in sorted(self._files, key=self.flusher.uploaded, reverse=True):
                if self._area.used_bytes <= self._area.soft_bytes // 2:
                    return
                if file in self._files and self._waiting(file) is None and self.flusher.uploaded(file):
                    await self.flusher.let_go(file)
        finally:
            self._reclaiming = False


async def _nobody(_file: StagedFile) -> None:
    await trio.lowlevel.checkpoint()
