"""Changes of names: carried out on the source at once, or put behind what was acknowledged early before them.

An act that waits for nothing is done while its caller waits, and its error is the caller's. Behind an early
acknowledgement an act is deferred: it is written to the journal, shows locally, and is carried out in its turn, again
and again while the source does not answer. If it fails then, that is recorded, and the local names show what is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import structlog
import trio

from turbofs.errors import (
    BusyError,
    DeadlineExceededError,
    NotFoundError,
    StaleFileError,
    TurboError,
)
from turbofs.source.base import Source
from turbofs.write.acts import (
    Act,
    Delete,
    DeleteDirectory,
    MakeDirectory,
    MakeLink,
    Publish,
    Rename,
    SetAttributes,
    is_below,
    paths_of,
)
from turbofs.write.flusher import Flusher
from turbofs.write.journal import ActRecord, Journal
from turbofs.write.pending import PendingAct, PendingActs
from turbofs.write.staged_file import StagedFile
from turbofs.write.view import LocalView

_log = structlog.get_logger(__name__)

_PAUSE_FIRST_S, _PAUSE_LIMIT_S = 0.2, 15.0
"""Between tries of what was acknowledged: the retrying source has waited already."""

Before = Callable[[], Awaitable[bool]]
"""What has to happen right before an act is carried out; not remembered across a restart. True: the act is done by it."""


def may_pass(error: TurboError) -> bool:
    """Whether what failed with *error* is worth trying again later, without anybody changing anything."""
    return error.transient or isinstance(error, DeadlineExceededError | BusyError)


async def patiently(act: str, path: str, attempt: Callable[[], Awaitable[None]]) -> None:
    """Do *attempt* until it succeeds or fails for good; raises that error."""
    pause_s = _PAUSE_FIRST_S
    while True:
        try:
            await attempt()
            return
        except TurboError as error:
            if not may_pass(error):
                raise
            _log.warning("what was acknowledged still waits for the source", act=act, path=path, error=str(error))
        await trio.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_LIMIT_S)


def defect(act: str, path: str, error: Exception) -> TurboError:
    """What a defect of TurboFS, which ended *act* on *path*, is for whoever is told of it; its stack is in the log."""
    _log.exception("an act failed on a defect of TurboFS", act=act, path=path, exc_info=error)
    return TurboError(
        f"{act} of {path} failed on a defect of TurboFS: {error!r}", advice="report it with the mount's log"
    )


def forget(journal: Journal, pending: PendingAct) -> None:
    """Take a deferred act that has ended out of the journal. Never raises: recovery finds that it is done."""
    try:
        journal.remove_act(pending.sequence)
    except TurboError as error:
        _log.warning("the journal keeps an act that is done", error=str(error))


class Changes:
    """Acts other than publications."""

    def __init__(
        self,
        source: Source,
        acts: PendingActs,
        view: LocalView[StagedFile],
        journal: Journal,
        flusher: Flusher,
        spawn: Callable[..., None],
    ) -> None:
        self._source = source
        self._acts = acts
        self._view = view
        self._journal = journal
        self._flusher = flusher
        self._spawn = spawn
        self._moves: dict[Rename, trio.Event] = {}  # deferred, and being carried out now
        self.failed: Callable[[PendingAct, TurboError], None] = lambda _pending, _error: None
        """Told of each deferred act that failed, once it has ended."""
        self.done: Callable[[Act], None] = lambda _act: None
        """Told of each deferred act that is done."""

    def would_defer(self, act: Act) -> bool:
        """Whether *act* would have to wait for something that was acknowledged early."""
        return self._acts.would_defer(act)

    async def change(self, act: Act, before: Before | None = None) -> bool:
        """Carry *act* out, or defer it; says whether it is done. Raises as the source does where it was not deferred.

        Whoever issues an act that `would_defer` has checked in the local view that it can be done.
        """
        pending = self._acts.issue(act)
        if pending.deferred:
            try:
                self._journal.put(ActRecord(pending.sequence, act, early=False))
            except BaseException:
                self._acts.finish(pending)
                raise
            self._view.apply(act)
            self.carry_out_later(pending, before)
            return False
        try:
            await self._acts.ready(pending)
            if before is None or not await before():
                await self._execute(act)
        finally:
            self._acts.finish(pending)
        return True

    def carry_out_later(self, pending: PendingAct, before: Before | None = None, *, recovered: bool = False) -> None:
        """Start what is deferred. *recovered*: from an earlier mount, so it may have been done already."""
        self._spawn(self._carry_out, pending, before, recovered)

    async def _carry_out(self, pending: PendingAct, before: Before | None, recovered: bool) -> None:
        act, again = pending.act, recovered
        name, path = type(act).__name__, paths_of(act)[0]

        async def attempt() -> None:
            nonlocal again
            try:
                if again and await self._is_done(act):
                    return
                again = True
                if before is None or not await before():
                    await self._execute(act)
            except NotFoundError:
                if not isinstance(act, Delete | DeleteDirectory) and not await self._moves_nothing(act, recovered):
                    raise  # what was to go may be gone: its publication was given up when it lost its name

        error: TurboError | None = None
        try:
            await self._acts.ready(pending)
            with self._moving(act):
                await patiently(name, path, attempt)
                self._acts.finish(pending)
                self._view.done(act)
                self.done(act)
        except TurboError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001  whoever waits for the act must not wait for ever
            error = defect(name, path, failure)
        if error is not None:
            self._acts.finish(pending, error)
            self.failed(pending, error)
        forget(self._journal, pending)

    async def moved(self, path: str) -> None:
        """Return when no deferred rename of, or above, what the source has as *path* is being carried out."""
        for act, ended in tuple(self._moves.items()):
            if is_below(path, act.old):
                await ended.wait()

    @contextmanager
    def _moving(self, act: Act) -> Iterator[None]:
        if not isinstance(act, Rename):
            yield
            return
        ended = self._moves[act] = trio.Event()
        try:
            yield
        finally:
            self._moves.pop(act, None)
            ended.set()

    async def _execute(self, act: Act) -> None:
        source = self._source
        match act:
            case Rename(old=old, new=new, replace=replace):
                await source.rename(old, new, replace=replace)
                self._flusher.moved(old, new)
                self._flusher.given_up.discard(new)
            case Delete(path=path):
                await source.delete(path)
            case DeleteDirectory(path=path):
                await source.delete_directory(path)
            case MakeDirectory(path=path, mode=mode):
                await source.make_directory(path, mode=mode)
                self._flusher.given_up.discard(path)
                await self._flusher.naming.give_owner(path, act.owner, act.group)
            case MakeLink(path=path, target=target):
                await source.make_symlink(path, target)
                self._flusher.given_up.discard(path)
                await self._flusher.naming.give_owner(path, act.owner, act.group)
            case SetAttributes(path=path, change=change):
                await source.set_attributes(path, change)
            case Publish():
                raise ValueError("publications are the flusher's")

    async def _is_done(self, act: Act) -> bool:
        """Whether an act whose answer was lost with the mount that asked has happened. Raises StaleFileError.

        What has the name now may be somebody else's: it is told by its identity, where that was known.
        """
        match act:
            case Rename(old=old, new=new, identity=identity):
                if await self._has(old, identity, act):
                    return False
                await self._source.stat(new)
                return True
            case Delete(path=path, identity=identity) | DeleteDirectory(path=path, identity=identity):
                return not await self._has(path, identity, act)
            case MakeDirectory(path=path) | MakeLink(path=path):
                return await self._has(path, "", act)
            case _:
                return False

    async def _moves_nothing(self, act: Act, recovered: bool) -> bool:
        """Whether *act* is a rename of something whose publication was given up: it lost its name after that."""
        if not isinstance(act, Rename) or not (recovered or act.old in self._flusher.given_up):
            return False
        if await self._has(act.old, "", act):
            return False
        self._flusher.given_up.add(act.new)
        return True

    async def _has(self, path: str, identity: str, act: Act) -> bool:
        try:
            found = await self._source.stat_exact(path)
        except NotFoundError:
            return False
        if identity and found.version.file_id and found.version.file_id != identity:
            raise StaleFileError(f"{type(act).__name__} of {path}: it is another file now, which somebody else made")
        return True
