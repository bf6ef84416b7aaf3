"""Early acknowledgements: what was promised as soon as it was staged, and how the promise is kept.

The journal holds each promise before anybody is told of it. Its publication is an act that waits its turn and is tried
again while the source does not answer. If it fails for good, the bytes are parked, and the path is broken.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import structlog

from turbofs.errors import OutOfSpaceError, TurboError
from turbofs.model import FileVersion
from turbofs.write.acts import Early, Publish, Rename, paths_of
from turbofs.write.broken import BrokenPaths
from turbofs.write.changes import defect, patiently
from turbofs.write.flusher import Flusher
from turbofs.write.journal import ActRecord, FileRecord, Journal
from turbofs.write.parking import Parking
from turbofs.write.pending import PendingAct, PendingActs
from turbofs.write.source_side import SourceSide
from turbofs.write.staged_file import StagedFile
from turbofs.write.view import LocalView

_log = structlog.get_logger(__name__)


Spawn = Callable[..., None]
"""Starts a task that the end of the mount waits for."""


class Promises:
    """The early acknowledged publications that are still to come, by file.

    *ended* is told, before the file is given back, of each promise that has ended; *reverted* of names that do not mean
    any more what was promised.
    """

    def __init__(
        self,
        acts: PendingActs,
        view: LocalView[StagedFile],
        journal: Journal,
        flusher: Flusher,
        parking: Parking,
        broken: BrokenPaths,
        spawn: Spawn,
        *,
        ended: Callable[[StagedFile], Awaitable[None]],
        reverted: Callable[[Iterable[str]], None],
    ) -> None:
        self._acts = acts
        self._view = view
        self._journal = journal
        self._flusher = flusher
        self._parking = parking
        self._broken = broken
        self._spawn = spawn
        self._ended = ended
        self._reverted = reverted
        self.bytes = 0
        """Bytes that have to reach the source before what is issued now may."""
        self._sizes: dict[StagedFile, int] = {}  # which those are made of
        self._waiting: dict[StagedFile, dict[PendingAct, int]] = {}  # with the content (generation) that each promised
        flusher.uploads.noted = flusher.naming.noted = self._note
        flusher.naming.traced = flusher.promised = self._waiting.__contains__

    def waiting(self, file: StagedFile) -> PendingAct | None:
        """The newest promised publication of *file* that is still to come."""
        promised = self._waiting.get(file)
        return next(reversed(promised)) if promised else None

    def files(self) -> list[StagedFile]:
        """Files of which something is promised."""
        return list(self._waiting)

    async def stage(self, file: StagedFile) -> bool:
        """Have every byte of *file* here; False where it cannot be, so that only the source can vouch for it.

        Raises as the source does, for what has to come from there.
        """
        if file.let_go_bytes:
            return False
        if not file.whole:
            try:
                await file.fill_all()
            except OutOfSpaceError:
                return False
        return file.whole

    def make(self, file: StagedFile, early: Early) -> None:
        """Promise *file* as it is now: when this returns, a crash of this process does not lose it.

        Raises OutOfSpaceError where the journal takes no more; nothing is promised then.
        """
        before = file.acknowledged_size, file.acknowledged_generation
        file.acknowledged_size, file.acknowledged_generation = file.size, file.generation
        waiting = self.waiting(file)
        pending = None
        try:
            if waiting is not None and paths_of(waiting.act) == (file.path,) and not self._renamed_after(waiting):
                self._journal.put(self._record(file, early))
                self._waiting[file][waiting] = file.generation
                self._count(file, file.size)
                return
            act = Publish(file.path, file.number, early)
            pending = self._acts.issue(act, deferred=True)
            with self._journal.transaction():
                self._journal.put(self._record(file, early))
                self._journal.put(ActRecord(pending.sequence, act, early=True))
        except BaseException:
            file.acknowledged_size, file.acknowledged_generation = before
            if pending is not None:
                self._acts.finish(pending)
            raise
        self._view.apply(act)
        self.keep(file, pending)

    def keep(self, file: StagedFile, pending: PendingAct) -> None:
        """Publish *file*, which is promised, in its turn."""
        file.users += 1
        self._waiting.setdefault(file, {})[pending] = file.acknowledged_generation
        self._count(file, file.size)
        self._spawn(self._keep, file, pending)

    def amend(self, file: StagedFile) -> None:
        """The attributes of *file* changed: what is promised of it is published with those."""
        waiting = self.waiting(file)
        if waiting is not None and isinstance(waiting.act, Publish):
            self._journal.put(self._record(file, waiting.act.early))

    def forget(self, file: StagedFile) -> None:
        """*file* is let go: nothing of it is promised. Never raises."""
        try:
            self._journal.remove_file(file.number)
        except TurboError as error:
            _log.warning("the journal keeps a file that is gone", path=file.path, error=str(error))

    async def kept_before(self, file: StagedFile, pending: PendingAct) -> None:
        """Return when what was promised of *file* before *pending* has ended.

        A publication waits its turn with the file's lock in hand, so that another one must not come before it.
        """
        for earlier in tuple(self._waiting.get(file, ())):
            if earlier.sequence < pending.sequence:
                await earlier.ended.wait()

    async def _keep(self, file: StagedFile, pending: PendingAct) -> None:
        act = pending.act
        assert isinstance(act, Publish)

        async def attempt() -> None:
            side = self._flusher.side(file)
            while True:
                await self._flusher.publish(file, pending, final=file.writers <= file.closed_writers)
                saved = side.generation >= self._waiting[file][pending]
                shown = side.attributes_generation >= file.attributes_generation or self.waiting(file) is not pending
                # A close may have joined the promise of an fsync: then the file is not only to be synced, but completed.
                complete = side.upload is None or file.writers > file.closed_writers
                if file.unlinked or (saved and shown and complete):
                    return  # else it was changed again, and promised, while this was on its way

        error: TurboError | None = None
        await self.kept_before(file, pending)
        try:
            await patiently("publish", act.path, attempt)
        except TurboError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001  what waits behind the promise must not wait for ever
            error = defect("publish", act.path, failure)
        self._acts.finish(pending, error)
        del self._waiting[file][pending]
        if not self._waiting[file]:
            del self._waiting[file]
            self._count(file, 0)
        if error is None:
            self._view.done(act)
            self._broken.heal(act.path)
        else:
            self._break(file, act.path, error)
        self._forget_act(file, pending)
        await self._ended(file)

    def _break(self, file: StagedFile, path: str, error: TurboError) -> None:
        """Park the bytes, and say that *path* is broken for as long as it is true."""
        self._broken.mark(path, error)
        if not file.unlinked and file not in self._waiting:
            side = self._flusher.side(file)
            if side.generation != file.generation:
                side.digest = None  # that of what the source has, and not of what is parked
            self._parking.park(file, side, path, f"{error}; {error.advice}")
            file.error = error
        self._reverted([path])

    def _forget_act(self, file: StagedFile, pending: PendingAct) -> None:
        try:
            with self._journal.transaction():
                self._journal.remove_act(pending.sequence)
                if file not in self._waiting:
                    self._journal.remove_file(file.number)
                    for follower in self._flusher.hand_over(file):
                        self.amend(follower)
                else:
                    self.amend(file)  # what the source has by now is this file's own
        except TurboError as error:
            _log.warning("the journal keeps a publication that has ended", error=str(error))

    def _count(self, file: StagedFile, size_bytes: int) -> None:
        self.bytes += size_bytes - self._sizes.pop(file, 0)
        if size_bytes:
            self._sizes[file] = size_bytes

    def _renamed_after(self, waiting: PendingAct) -> bool:
        return any(waiting in each.waits and isinstance(each.act, Rename) for each in self._acts)

    def _note(self, file: StagedFile, side: SourceSide) -> None:
        waiting = self.waiting(file)
        early = waiting.act.early if waiting is not None and isinstance(waiting.act, Publish) else None
        self._journal.put(self._record(file, early, side))

    def _record(self, file: StagedFile, early: Early | None, side: SourceSide | None = None) -> FileRecord:
        side = side or self._flusher.side(file)
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
            holds=upload is not None and file.changed_from >= upload.position,
            ours=_ours(side),
            digest=side.digest,
        )


def _ours(side: SourceSide) -> FileVersion | None:
    """What the source has under the name, as far as this mount has seen to it."""
    upload, known = side.upload, side.version
    seen = upload.version if upload is not None and upload.named else None
    if seen is not None and (known is None or known.file_id != seen.file_id):
        return seen  # it has its name since just now
    return known if side.named else None
