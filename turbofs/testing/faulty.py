"""A source that fails on purpose: chosen acts, chosen errors, by count or by chance from a seed."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from turbofs.errors import SourceUnavailableError, TurboError
from turbofs.source.base import Source
from turbofs.testing.delegating import ACTS, DelegatingSource

T = TypeVar("T")


def unavailable() -> TurboError:
    """The usual transient error."""
    return SourceUnavailableError("the faulty source is away on purpose")


@dataclass
class Fault:
    """When and how acts fail. It counts the acts that it applies to, from 1."""

    acts: frozenset[str] = ACTS
    nth: frozenset[int] | None = None
    """Which of the acts fail; None: those that `probability` picks."""
    probability: float = 1.0
    error: Callable[[], TurboError] = unavailable
    after: bool = False
    """The act takes effect and its answer is lost."""
    short_reads: bool = False
    """Instead of an error, a read leaves out the second half of what was asked for, and says so in its count."""
    flips: bool = False
    """Instead of an error, one bit of what was read is wrong."""
    path: str | None = None
    """Only acts on this path; None: on all."""
    seen: int = field(default=0, init=False)
    fired: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        unknown = self.acts - ACTS
        if unknown:
            raise ValueError(f"no such acts: {sorted(unknown)}")
        if self.corrupts and self.acts != {"read"}:
            raise ValueError("short_reads and flips are about reads: say acts=frozenset({'read'})")

    @property
    def corrupts(self) -> bool:
        return self.short_reads or self.flips

    def fires(self, act: str, path: str, chance: random.Random) -> bool:
        if act not in self.acts or self.path not in {None, path}:
            return False
        self.seen += 1
        hit = self.seen in self.nth if self.nth is not None else chance.random() < self.probability
        self.fired += hit
        return hit


class FaultySource(DelegatingSource):
    """Applies each of `faults` to each act, in their order. Change `faults` at any time; [] heals it."""

    def __init__(self, inner: Source, *faults: Fault, seed: int = 0) -> None:
        super().__init__(inner)
        self.faults = list(faults)
        self._chance = random.Random(seed)

    async def around(self, act: str, path: str, call: Callable[[], Awaitable[T]]) -> T:
        for fault in self.faults:
            if not fault.corrupts and fault.fires(act, path, self._chance):
                if fault.after:
                    await call()
                raise fault.error()
        return await call()

    async def around_read(self, path: str, offset: int, buffer: memoryview, call: Callable[[], Awaitable[int]]) -> int:
        count = await self.around("read", path, call)
        for fault in self.faults:
            if count and fault.corrupts and fault.fires("read", path, self._chance):
                if fault.flips:
                    buffer[self._chance.randrange(count)] ^= 1 << self._chance.randrange(8)
                if fault.short_reads:
                    buffer[count // 2 : count] = bytes(count - count // 2)
                    count //= 2
        return count
