"""A source that writes down what it was asked, for tests that count requests instead of measuring time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from turbofs.model import ByteRange
from turbofs.source.base import Source
from turbofs.testing.delegating import DelegatingSource

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    act: str
    path: str
    range: ByteRange | None = None
    """What a read asked for."""


class CountingSource(DelegatingSource):
    """`requests` has every act in the order in which it began, failed ones too."""

    def __init__(self, inner: Source) -> None:
        super().__init__(inner)
        self.requests: list[Request] = []

    def count(self, act: str | None = None, path: str | None = None) -> int:
        """How many requests there were, of one act and on one path where these are given."""
        return sum(act in {None, r.act} and path in {None, r.path} for r in self.requests)

    def ranges(self, path: str) -> list[ByteRange]:
        """What was read of *path*, in order."""
        return [r.range for r in self.requests if r.path == path and r.range is not None]

    @property
    def read_bytes(self) -> int:
        return sum(r.range.length for r in self.requests if r.range is not None)

    def reset(self) -> None:
        self.requests.clear()

    async def around(self, act: str, path: str, call: Callable[[], Awaitable[T]]) -> T:
        self.requests.append(Request(act, path))
        return await call()

    async def around_read(self, path: str, offset: int, buffer: memoryview, call: Callable[[], Awaitable[int]]) -> int:
        self.requests.append(Request("read", path, ByteRange(max(0, offset), max(0, offset + len(buffer)))))
        return await call()
