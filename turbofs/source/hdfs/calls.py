"""Blocking calls of a client that has no time-outs: bounded, cancellable, and never in possession of the limiter.

hdfs-native waits for ever on a NameNode or DataNode that stopped answering, and a thread cannot be stopped. A call
that takes too long is therefore left behind: its place in the limiter is given back, and how many such threads there
may be is bounded, so that a hung server costs memory, never the calls to the healthy ones.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import trio
from outcome import Outcome

from turbofs.errors import SourceUnavailableError

T = TypeVar("T")


class StalledError(SourceUnavailableError):
    """A call was left behind because it took too long."""


_HUNG_LIMIT = 512
"""Threads left behind at most: each holds about 100 KiB and a socket."""
_SETTLE_POLL_S = 0.01


class BlockingCalls:
    """Runs blocking functions in threads, at most *limiter*'s number at once, each for *timeout_s* at most."""

    def __init__(self, limiter: trio.CapacityLimiter, timeout_s: float, hung_limit: int = _HUNG_LIMIT) -> None:
        self.timeout_s = timeout_s
        self._limiter = limiter
        self._hung_limit = hung_limit
        self._lock = threading.Lock()
        self._hung = 0

    @property
    def hung(self) -> int:
        """Threads that were left behind and still wait."""
        return self._hung

    async def run(
        self,
        what: str,
        function: Callable[[], T],
        *,
        timeout_s: float | None = None,
        watch: StallWatch | None = None,
        dispose: Callable[[T], object] | None = None,
    ) -> T:
        """The result of *function*, run in a thread.

        *what* names the act in messages. With *watch*, *timeout_s* counts from the last `watch.touch()`. *dispose*
        gets (in a thread) the result of a call that nobody waits for any more.
        Raises StalledError where it took too long, SourceUnavailableError where too many earlier calls still hang.
        """
        if self._hung >= self._hung_limit:
            raise SourceUnavailableError(f"cannot {what}: {self._hung} earlier calls still wait for servers that hang")
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        call = _Call(function, self, dispose)
        try:
            self._limiter.acquire_on_behalf_of_nowait(call)
        except trio.WouldBlock:
            await self._limiter.acquire_on_behalf_of(call)
        try:
            with trio.move_on_after(limit_s) as scope:
                if watch is not None:
                    watch.begin(scope, limit_s)
                result = await _in_thread(call)
                call.delivered = True
                return result
        finally:
            self._limiter.release_on_behalf_of(call)
            self._leave(call)
        raise StalledError(f"cannot {what}: no answer within {limit_s:g} s")

    def _leave(self, call: _Call[T]) -> None:
        """Nobody waits for *call* from now on."""
        with self._lock:
            if not call.finished:
                call.abandoned = True
                self._hung += 1
                return
        if call.results and not call.delivered and call.dispose is not None:
            # It had ended, and a cancellation overtook its answer.
            trio.lowlevel.start_thread_soon(partial(call.dispose, call.results[0]), lambda _: None)

    async def settle(self, limit_s: float) -> None:
        """Wait for the calls that were left behind, *limit_s* seconds at most.

        To be done before the process ends: a thread that comes back from native code while the interpreter is being
        finalised is torn out of it, and a frame of Rust's on its stack makes that an abort of the whole process.
        """
        with trio.move_on_after(limit_s):
            while self._hung:  # noqa: ASYNC110 - threads count it, and know no event of trio's
                await trio.sleep(_SETTLE_POLL_S)


async def _in_thread(function: Callable[[], T]) -> T:
    """The result of *function*, run in one of trio's threads; left behind where the caller is cancelled.

    As `trio.to_thread.run_sync`, without a limiter of its own: that one takes a turn of the event loop before the thread
    starts, a tenth of the time of a small read.
    """
    token = trio.lowlevel.current_trio_token()
    waiting: list[trio.lowlevel.Task] = [trio.lowlevel.current_task()]

    def report(result: Outcome[T]) -> None:
        if waiting:
            trio.lowlevel.reschedule(waiting.pop(), result)

    def deliver(result: Outcome[T]) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            token.run_sync_soon(report, result)

    def abort(_: object) -> trio.lowlevel.Abort:
        waiting.clear()
        return trio.lowlevel.Abort.SUCCEEDED

    trio.lowlevel.start_thread_soon(function, deliver)
    result: T = await trio.lowlevel.wait_task_rescheduled(abort)
    return result


class _Call(Generic[T]):
    def __init__(self, function: Callable[[], T], owner: BlockingCalls, dispose: Callable[[T], object] | None) -> None:
        self._function = function
        self._owner = owner
        self.dispose = dispose
        self.results: list[T] = []
        self.finished = self.abandoned = self.delivered = False

    def __call__(self) -> T:
        try:
            result = self._function()
            self.results.append(result)
            if self._end() and self.dispose is not None:
                self.dispose(result)
            return result
        finally:
            self._end()

    def _end(self) -> bool:
        """Note that the function returned; True if nobody waits for it."""
        owner = self._owner
        with owner._lock:  # noqa: SLF001  one class in two objects: a call and where it is counted
            if not self.finished:
                self.finished = True
                if self.abandoned:
                    owner._hung -= 1  # noqa: SLF001
            return self.abandoned


class StallWatch:
    """Lets a long transfer go on for as long as it makes progress. `touch` is called in the transfer's thread."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._scope: trio.CancelScope | None = None
        self._limit_s = math.inf
        self._touched = self._extended = 0.0
        self.longest_s = 0.0
        """The longest time without progress so far."""

    def begin(self, scope: trio.CancelScope, limit_s: float) -> None:
        self._scope = scope
        self._limit_s = limit_s
        self._touched = self._extended = time.monotonic()

    def touch(self) -> None:
        now = time.monotonic()
        self.longest_s = max(self.longest_s, now - self._touched)
        self._touched = now
        if now - self._extended > self._limit_s / 8:  # often enough for the deadline, too seldom to cost anything
            self._extended = now
            self._token.run_sync_soon(self._extend)

    def _extend(self) -> None:
        if self._scope is not None:
            self._scope.deadline = trio.current_time() + self._limit_s


class Sink:
    """A caller's buffer on loan to a thread, until `close` takes it back. Filled from the front."""

    def __init__(self, target: memoryview) -> None:
        self._target: memoryview | None = target
        self._lock = threading.Lock()
        self._filled = 0

    def feed(self, piece: bytes) -> bool:
        """Append *piece*; False once the buffer was taken back or is full: the thread stops then."""
        with self._lock:
            if self._target is None:
                return False
            end = self._filled + len(piece)
            if end > len(self._target):
                return False
            self._target[self._filled : end] = piece
            self._filled = end
            return True

    def close(self) -> int:
        """Take the buffer back; how many bytes were filled. Nothing writes to it from now on."""
        with self._lock:
            self._target = None
            return self._filled
