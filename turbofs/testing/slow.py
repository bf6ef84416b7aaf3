"""A source that takes its time: a latency for every act, and acts that hang until they are released."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

import trio

from turbofs.source.base import Source
from turbofs.testing.delegating import ACTS, DelegatingSource

T = TypeVar("T")


class SlowSource(DelegatingSource):
    """Each act waits `latency_s` first, then while it is held. Tests wait for `wait_held`, never for a time."""

    def __init__(self, inner: Source, *, latency_s: float = 0.0) -> None:
        super().__init__(inner)
        self.latency_s = latency_s
        self.held: set[str] = set()
        self._passes: dict[str, int] = {}
        self._waiting = 0
        self._changed = trio.Condition()

    async def hold(self, acts: Collection[str] = ACTS, *, after: int = 0) -> None:
        """Once *after* more of each have passed, these acts hang until they are released."""
        async with self._changed:
            self.held |= set(acts)
            self._passes.update(dict.fromkeys(acts, after))

    async def release(self, acts: Collection[str] = ACTS) -> None:
        """Let these acts go on."""
        async with self._changed:
            self.held -= set(acts)
            self._changed.notify_all()

    async def wait_held(self, count: int = 1) -> None:
        """Return once *count* acts hang."""
        async with self._changed:
            while self._waiting < count:
                await self._changed.wait()

    async def around(self, act: str, path: str, call: Callable[[], Awaitable[T]]) -> T:
        if self.latency_s:
            await trio.sleep(self.latency_s)
        async with self._changed:
            if act in self.held:
                if self._passes.get(act):
                    self._passes[act] -= 1
                else:
                    await self._hang(act)
        return await call()

    async def _hang(self, act: str) -> None:
        self._waiting += 1
        try:
            self._changed.notify_all()
            while act in self.held:
                await self._changed.wait()
        finally:
            self._waiting -= 1
