"""A source behind a narrow link: all reads together get so many bytes a second, one after another."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from turbofs.source.base import Source
from turbofs.testing.delegating import DelegatingSource


class ThrottledSource(DelegatingSource):
    """Reads share `bytes_per_s`; everything else is free. Works with trio's MockClock too."""

    def __init__(self, inner: Source, bytes_per_s: float) -> None:
        super().__init__(inner)
        self.bytes_per_s = bytes_per_s
        self._busy_until = 0.0

    async def around_read(self, path: str, offset: int, buffer: memoryview, call: Callable[[], Awaitable[int]]) -> int:
        self._busy_until = max(self._busy_until, trio.current_time()) + len(buffer) / self.bytes_per_s
        await trio.sleep_until(self._busy_until)
        return await call()
