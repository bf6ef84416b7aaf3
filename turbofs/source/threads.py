"""Blocking client calls in threads, such that a cancelled act leaks nothing and writes nowhere.

A thread cannot be stopped. So a cancelled act either abandons its thread (which then keeps its place in the limiter
until the call returns, and whose result is disposed of), or waits for it where the thread has the caller's buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import trio

from turbofs.errors import TurboError

T = TypeVar("T")


async def abandonable(
    limiter: trio.CapacityLimiter, function: Callable[[], T], *, dispose: Callable[[T], object] | None = None
) -> T:
    """Run *function* in a thread; a cancellation returns at once and leaves the thread behind.

    *dispose* is called with the result of an abandoned call (from either thread), so that no descriptor is lost.
    """
    lock = threading.Lock()
    abandoned = False
    results: list[T] = []

    def work() -> T:
        result = function()
        with lock:
            if not abandoned:
                results.append(result)
                return result
        if dispose is not None:
            dispose(result)
        return result

    try:
        return await trio.to_thread.run_sync(work, limiter=limiter, abandon_on_cancel=True)
    except trio.Cancelled:
        with lock:
            abandoned = True
        if dispose is not None:
            for result in results:  # it had finished, and the cancellation overtook its answer
                dispose(result)
        raise


async def to_the_end(limiter: trio.CapacityLimiter, function: Callable[[], T]) -> T:
    """Run *function* in a thread and wait for it even when cancelled: it uses memory that belongs to the caller."""
    return await trio.to_thread.run_sync(function, limiter=limiter, abandon_on_cancel=False)


class Shared(Generic[T]):
    """Something that threads use and that is disposed of when it is closed and its last user is done.

    Closing a descriptor while a thread reads from it would let the read end up in whatever file gets that number next.
    """

    def __init__(self, value: T, dispose: Callable[[T], object], what: str) -> None:
        self._value = value
        self._dispose = dispose
        self._what = what
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False

    @contextmanager
    def use(self) -> Iterator[T]:
        """Hold the value. Raises TurboError once it is closed."""
        with self._lock:
            if self._closed:
                raise TurboError(f"{self._what} is closed", advice="this is a fault of TurboFS; please report it")
            self._users += 1
        try:
            yield self._value
        finally:
            with self._lock:
                self._users -= 1
                last = self._closed and not self._users
            if last:
                self._dispose(self._value)

    def close(self) -> None:
        """Let nobody else in, and dispose of the value as soon as nobody uses it. Closing twice does nothing."""
        with self._lock:
            idle = not self._closed and not self._users
            self._closed = True
        if idle:
            self._dispose(self._value)
