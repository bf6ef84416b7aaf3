"""The write room as the file system uses it: files being written, what their acknowledgement promises, what is left.

Two promises. `persisted`: close and fsync return when the bytes are on the source under their name. `staged`: they
return when every byte is in the staging area and the journal says so; the flusher brings it to the source afterwards, in
the order that `acts` describes, and whatever cannot be brought there is parked and reported.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from copy import copy

import structlog
import trio

from turbofs.background import Background
from turbofs.config import WriteConfig
from turbofs.errors import NotFoundError, TurboError
from turbofs.model import AttributeChange, Attributes, FileVersion, split
from turbofs.source.base import Source
from turbofs.write.acts import Act, Delete, Early, Publish, Rename, is_below, moved_path, paths_of
from turbofs.write.broken import BrokenPaths
from turbofs.write.changes import Before, Changes, defect
from turbofs.write.flusher import Flusher
from turbofs.write.journal import Journal
from turbofs.write.parking import Parking
from turbofs.write.pending import PendingAct, PendingActs
from turbofs.write.promises import Promises
from turbofs.write.reclaiming import Reclaimer
from turbofs.write.staged_file import StagedFile
from turbofs.write.staging import StagingArea
from turbofs.write.tasks import Outcome, Tasks
from turbofs.write.view import LocalView

_log = structlog.get_logger(__name__)

_COPIED_BYTES = 1 << 20


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
        self._tasks = Tasks(background)
        self.abandoning = Tasks(background)
        self.view: LocalView[StagedFile] = LocalView()
        self.acts = PendingActs(iter(journal.next_id, None))
        self.broken = BrokenPaths(journal)
        self.parking = Parking(area, journal)
        self.flusher = Flusher(source, self.acts, self.view, config)
        self.changes = Changes(source, self.acts, self.view, journal, self.flusher, self._tasks.start_soon)
        self.changes.failed, self.changes.done = self._act_failed, self.broken.past
        self.promises = Promises(
            self.acts,
            self.view,
            journal,
            self.flusher,
            self.parking,
            self.broken,
            self._tasks.start_soon,
            ended=self._promise_ended,
            reverted=self._rebuild,
        )
        self.draining = False
        self.on_released: Callable[[StagedFile], Awaitable[None]] = _nobody
        """Told when a file has one user less, but some."""
        self.on_reverted: Callable[[Iterable[str]], None] = lambda _paths: None
        """Told of local names that do not mean any more what they did."""
        self.on_durability: Callable[[], None] = lambda: None
        """Told when some file's durability may have changed."""
        self._reclaimer = Reclaimer(area, self._files, self.flusher, self.promises, background)

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

    def update(self, path: str, attributes: Attributes, source_path: str) -> StagedFile:
        """The file *path*, which the source has as *source_path*, to be changed. Raises OutOfSpaceError."""
        number = self._journal.next_id()
        file = StagedFile.create(
            self._area, number, path, mode=attributes.mode, owner=attributes.owner, group=attributes.group
        )
        file.mtime_ns, file.atime_ns, file.ctime_ns = attributes.mtime_ns, attributes.atime_ns, attributes.ctime_ns
        file.update_of(attributes.version, source_path, self._source.open)
        self._know(file)
        return file

    async def succeed(self, file: StagedFile, *, empty: bool) -> StagedFile:
        """A new file under the name of *file*, which is promised and not to change any more; *empty*: without its bytes.

        It is published after *file*. Raises OutOfSpaceError.
        """
        number = self._journal.next_id()
        new = StagedFile.create(self._area, number, file.path, mode=file.mode, owner=file.owner, group=file.group)
        self._know(new)
        try:
            for start in range(0, 0 if empty else file.size, _COPIED_BYTES):
                await new.write(start, await file.read(start, _COPIED_BYTES))
            await new.truncate(0 if empty else file.size)
        except BaseException:
            await self.release(new)
            raise
        new.mtime_ns, new.atime_ns, new.ctime_ns = file.mtime_ns, file.atime_ns, file.ctime_ns
        side, before = self.flusher.side(new), self.flusher.side(file)
        if self.promises.waiting(file) is None:
            side.version = before.version
        else:
            side.after = before
        side.named, side.lowest_change = True, 0
        new.path = file.path
        if not file.unlinked:
            self.view.put(new.path, new)
        return new

    def is_promised(self, file: StagedFile) -> bool:
        """Whether an early acknowledgement of *file* is still to be kept."""
        return self.promises.waiting(file) is not None

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
            and (file.size >= self._config.stream_from_bytes or self.flusher.pressed())
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
        return self.is_dirty(file) and file.generation > max(file.acknowledged_generation, file.failed_generation)

    async def publish(self, file: StagedFile, early: Early | None, *, final: bool) -> None:
        """Do what close (*final*) or fsync promise for *file*; *early*: acknowledge as soon as it is staged.

        Raises what keeps the promise from being kept. Cancelled, the publication goes on.
        """
        if file.error is not None:
            raise copy(file.error)
        if file.unlinked:
            return
        to_do = self.flusher.is_dirty(file) or (final and self.flusher.side(file).upload is not None)
        if not to_do and (early is not None or self.promises.waiting(file) is None):
            return
        if early is not None and await self.promises.stage(file):
            await self.acts.renamed(lambda: file.path)
            self.promises.make(file, early)
            self.on_durability()
            return
        await self.acts.renamed(lambda: file.path)
        outcome = Outcome()
        pending = self.acts.issue(Publish(file.path, file.number))
        file.users += 1
        self._tasks.start_soon(self._persist, file, pending, final, outcome)
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
        self._tasks.start_soon(publish)

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

    async def unlink_now(self, file: StagedFile) -> None:
        """*file* has lost its name here: whoever has it open keeps it, and nothing of it is published any more.

        What is on its way to the source is taken back before this returns, or behind it where that would wait.
        """
        if not file.unlinked:
            file.unlinked = True
            if self.view.file(file.path) is file:
                self.view.remove(file.path)
            if file.lock.locked():
                self.abandoning.start_soon(self.flusher.abandon, file)  # a hanging source must not hold up names
            else:
                await self.flusher.abandon(file)

    def set_attributes(self, file: StagedFile, change: AttributeChange) -> None:
        """Change what *file* shows; the source is told when it is published, or now where it has it already."""
        file.adopt_attributes(change)
        file.attributes_generation += 1
        self.promises.amend(file)

    def takes_over(self, file: StagedFile, version: FileVersion) -> None:
        """*file*, which the source does not have, gets a name under which the source has *version*."""
        side = self.flusher.side(file)
        side.named, side.version, file.base, file.exclusive = True, version, version, False
        side.lowest_change = 0
        self.changed(file)

    def promised_bytes(self) -> int:
        """Bytes that have to reach the source before what is issued now may."""
        return self.promises.bytes

    def is_now(self, file: StagedFile, version: FileVersion) -> None:
        """The attributes of *file* were changed on the source, which made it *version*."""
        if file in self._files:
            self.flusher.side(file).version = version
            file.base_is_now(version)

    def has_on_source(self, file: StagedFile) -> bool:
        """Whether the source has, or will have by what is pending, something under the name of *file*."""
        return self.flusher.side(file).named or self.is_promised(file) or self.acts.publishes(file.number)

    def move_files(self, old: str, new: str) -> None:
        """Staged files at and below *old* are called *new* now."""
        moved = [file for file in self._files if file.path and not file.unlinked and is_below(file.path, old)]
        for file in moved:
            path = moved_path(file.path, old, new)
            if self.view.file(file.path) is file:
                self.view.remove(file.path)
                self.view.put(path, file)
            file.path = path

    def files_below(self, directory: str) -> list[StagedFile]:
        """Staged files at and below *directory* that the source does not have as they are."""
        found = [each for each in self._files if not each.unlinked and is_below(each.path, directory)]
        return sorted(found, key=lambda each: each.path)

    # --- what was parked

    def drop_parked(self, number: int) -> None:
        """Delete parked bytes, and what was said of their path. Raises NotFoundError."""
        self.broken.heal(self.parking.record(number).path)
        self.parking.drop(number)
        self.on_durability()

    # --- names

    async def change(self, act: Act, before: Before | None = None) -> bool:
        """See `Changes.change`; staged files follow a rename in the same step in which it shows."""
        try:
            done = await self.changes.change(act, before)
        except NotFoundError:
            file = self.view.file(act.path) if isinstance(act, Delete) else None
            if file is None or self.has_on_source(file):
                raise
            done = True  # the publication that it waited for failed: there is nothing but what is here
        if done:
            self.broken.past(act)
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

    # --- the end

    async def drain(self) -> None:
        """Return when nothing that was acknowledged waits any more. Bound it by a deadline."""
        self.draining = True
        await self._tasks.wait_idle()

    async def stop(self) -> None:
        """End what is still on its way: the journal and the staged bytes are as a crash would leave them."""
        await self._tasks.stop()

    def recovered(self, file: StagedFile, pending: PendingAct) -> None:
        """*file*, which an earlier mount promised, is to be published by *pending*."""
        self._files.add(file)
        self.promises.keep(file, pending)

    # --- steps

    def _know(self, file: StagedFile) -> None:
        self._files.add(file)
        self.flusher.begin(file)
        file.users += 1

    async def _promise_ended(self, file: StagedFile) -> None:
        self._settle(file)
        self.on_durability()
        await self.release(file)

    async def _persist(self, file: StagedFile, pending: PendingAct, final: bool, outcome: Outcome) -> None:
        failure = None
        try:
            await self.promises.kept_before(file, pending)
            await self.flusher.publish(file, pending, final=final)
            outcome.error = None
        except TurboError as error:
            failure = error
        except Exception as error:  # noqa: BLE001  close must not say that it is published
            failure = defect("publish", file.path, error)
        finally:
            if failure is not None:
                outcome.error, file.failed_generation = failure, file.generation
                self.broken.mark(file.path, failure)
            elif outcome.error is None:
                self.broken.heal(file.path)
                self._settle(file)
            self.acts.finish(pending, failure)  # without one where this was cancelled: nothing falls with that
            outcome.ended.set()
            self.on_durability()
            await self.release(file)

    def _settle(self, file: StagedFile) -> None:
        """The view shows *file* as long as the source does not have it as it is."""
        if file in self._files and not self.flusher.is_dirty(file) and self.view.file(file.path) is file:
            self.view.remove(file.path)

    def _act_failed(self, pending: PendingAct, error: TurboError) -> None:
        self.broken.mark(paths_of(pending.act)[-1], error)
        self._rebuild(paths_of(pending.act))
        self.on_durability()

    def _rebuild(self, paths: Iterable[str]) -> None:
        """What was pending fell: show what is left."""
        files = {
            file.path: file
            for file in sorted(self._files, key=lambda each: each.number)
            if file.path and not file.unlinked and file.error is None and self.flusher.is_dirty(file)
        }
        self.view.rebuild([each.act for each in self.acts if each.deferred], files)
        self.on_reverted(paths)

    async def _drop(self, file: StagedFile) -> None:
        self._files.discard(file)
        if self.view.file(file.path) is file:
            self.view.remove(file.path)
            for earlier in self.promises.files():
                if earlier.path == file.path and not earlier.unlinked:
                    self.view.put(file.path, earlier)
            self.on_reverted([file.path])
        with trio.CancelScope(shield=True), trio.move_on_after(self._config.stall_s):
            await self.flusher.abandon(file)
        self.flusher.end(file)
        self.promises.forget(file)
        await file.discard()


async def _nobody(_file: StagedFile) -> None:
    await trio.lowlevel.checkpoint()
