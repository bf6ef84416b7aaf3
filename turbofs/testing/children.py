"""File operations that may hang, done in a forked child: the test fails at its time limit, and the child is killed.

The child inherits open descriptors, as a forked data loader does. Fork while no other thread runs.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
_KILL_LIMIT_S = 10.0
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send *by* to this process when its parent ends, however that ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, by)


class Child(Generic[T]):
    """*function* in a child process, as the user *uid* (with a group of the same number) where one is given."""

    def __init__(self, function: Callable[[], T], *, uid: int | None = None) -> None:
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _be_child(function, uid, writing)
        os.close(writing)
        self._reading = reading
        self._received = bytearray()
        self._reaped = False

    def result(self, limit_s: float = 30.0) -> T:
        """What the function returned; raises what it raised, or TimeoutError after *limit_s* seconds."""
        deadline = time.monotonic() + limit_s
        while True:
            ready, _, _ = select.select([self._reading], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"child {self.pid} has not answered within {limit_s:g} s")
            data = os.read(self._reading, 1 << 20)
            if not data:
                break
            self._received += data
        self._reap(deadline)
        if not self._received:
            raise ChildProcessError(f"child {self.pid} ended without an answer")
        value, error = pickle.loads(bytes(self._received))
        if error is not None:
            raise error
        result: T = value
        return result

    def kill(self, limit_s: float = _KILL_LIMIT_S) -> None:
        """SIGKILL; returns when the child is gone. Raises TimeoutError where the kernel does not let go of it."""
        if not self._reaped:
            os.kill(self.pid, signal.SIGKILL)
            self._reap(time.monotonic() + limit_s)

    @property
    def gone(self) -> bool:
        """Whether it has ended."""
        if not self._reaped:
            self._reaped = os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return self._reaped

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()
        os.close(self._reading)

    def _reap(self, deadline: float) -> None:
        while not self.gone:
            if time.monotonic() > deadline:
                raise TimeoutError(f"child {self.pid} does not end")
            time.sleep(0.002)


def in_child(function: Callable[[], T], *, limit_s: float = 30.0, uid: int | None = None) -> T:
    """The result of *function*, called in a child that is killed after *limit_s* seconds. Raises as `Child.result`."""
    with Child(function, uid=uid) as child:
        return child.result(limit_s)


def _be_child(function: Callable[[], T], uid: int | None, writing: int) -> None:
    die_with_parent()
    try:
        if uid is not None:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        answer = pickle.dumps((function(), None))
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        error.add_note("".join(traceback.format_exception(error)))
        answer = pickle.dumps((None, error))
    try:
        view = memoryview(answer)
        while view:
            view = view[os.write(writing, view) :]
    finally:
        os._exit(0)
