"""What a hint says: one frozen class for each settable attribute, read from text and written back. Pure.

`parse` of each class raises InvalidRequestError with what is wrong, where, and an accepted example; `format` gives the
canonical text, and `parse(format())` the same hint. Which attributes exist, and which of them this version acts on, is
in `hint_catalogue`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

from turbofs.fs.hint_grammar import (
    Pairs,
    byte_ranges,
    duration_s,
    format_duration,
    format_fraction,
    format_ranges,
    fraction,
    glob,
    one_of,
    refusal,
    whole,
    word,
)
from turbofs.model import ByteRange

MOST_COPIES = 512
"""HDFS's own limit unless configured otherwise (dfs.replication.max)."""
MOST_READERS = 1_000_000
MOST_MEMBERS = 1_000_000
MOST_STEPS = 10**12
ACKNOWLEDGEMENTS = ("persisted", "replicated", "staged")


class Hint(ABC):
    """One parsed hint. `attribute` is its full name, `example` a value that is accepted."""

    __slots__ = ()
    attribute: ClassVar[str]
    example: ClassVar[str]

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Self:
        """Read *text*. Raises InvalidRequestError."""

    @abstractmethod
    def format(self) -> str:
        """The canonical text of this hint."""


@dataclass(frozen=True, slots=True)
class PrefetchHint(Hint):
    """Fetch now: all of the file, some ranges, or the tensors that match a pattern. Exactly one of the three."""

    attribute: ClassVar[str] = "user.turbofs.prefetch"
    example: ClassVar[str] = "all  (or: ranges=0+4MiB;64MiB+512KiB)"

    all: bool = False
    ranges: tuple[ByteRange, ...] = ()
    tensors: str | None = None

    def __post_init__(self) -> None:
        if self.all + bool(self.ranges) + (self.tensors is not None) != 1:
            raise ValueError("a prefetch names exactly one of: all, ranges, tensors")

    @classmethod
    def parse(cls, text: str) -> PrefetchHint:
        if text == "all":
            return cls(all=True)
        if "=" not in text:
            raise refusal(cls.attribute, f"{text[:60]!r} is neither `all` nor ranges=… nor tensors=…", cls.example)
        pairs = Pairs(cls.attribute, text, cls.example)
        ranges = pairs.optional("ranges", byte_ranges)
        tensors = pairs.optional("tensors", glob)
        pairs.finish()
        if ranges and tensors is not None:
            raise refusal(cls.attribute, "ranges and tensors exclude each other", cls.example)
        return cls(ranges=ranges or (), tensors=tensors)

    def format(self) -> str:
        if self.all:
            return "all"
        return f"ranges={format_ranges(self.ranges)}" if self.ranges else f"tensors={self.tensors}"

    def validate(self, size_bytes: int) -> None:
        """Check the ranges against a file of *size_bytes*. Raises InvalidRequestError where one ends after it."""
        for each in self.ranges:
            if each.stop > size_bytes:
                raise refusal(
                    self.attribute,
                    f"the range {format_ranges((each,))} ends at byte {each.stop}, but the file has {size_bytes}",
                    self.example,
                )

    def ranges_in(self, size_bytes: int) -> tuple[ByteRange, ...]:
        """What to fetch of a file of *size_bytes*: clipped to it, for the file may have changed since."""
        if self.all:
            return (ByteRange(0, size_bytes),) if size_bytes else ()
        clipped = (each.clamp(size_bytes) for each in self.ranges)
        return tuple(each for each in clipped if each.length)


@dataclass(frozen=True, slots=True)
class TensorsHint(Hint):
    """The tensors that readers below this directory will want."""

    attribute: ClassVar[str] = "user.turbofs.tensors"
    example: ClassVar[str] = "model.layers.*"

    pattern: str

    @classmethod
    def parse(cls, text: str) -> TensorsHint:
        try:
            return cls(glob(text))
        except ValueError as error:
            raise refusal(cls.attribute, str(error), cls.example) from None

    def format(self) -> str:
        return self.pattern


@dataclass(frozen=True, slots=True)
class ReplicasHint(Hint):
    """Raise the source's replication for `ttl_s` seconds: to `copies`, or to what `readers` readers need."""

    attribute: ClassVar[str] = "user.turbofs.replicas"
    example: ClassVar[str] = "copies=64,ttl=10m  (or: readers=2048,ttl=10m)"

    ttl_s: float
    copies: int | None = None
    readers: int | None = None

    def __post_init__(self) -> None:
        if (self.copies is None) == (self.readers is None):
            raise ValueError("replicas names exactly one of: copies, readers")

    @classmethod
    def parse(cls, text: str) -> ReplicasHint:
        pairs = Pairs(cls.attribute, text, cls.example)
        copies = pairs.optional("copies", whole(1, MOST_COPIES))
        readers = pairs.optional("readers", whole(1, MOST_READERS))
        ttl_s = pairs.required("ttl", duration_s)
        pairs.finish()
        if (copies is None) == (readers is None):
            raise refusal(cls.attribute, "give exactly one of copies and readers", cls.example)
        return cls(ttl_s, copies, readers)

    def format(self) -> str:
        return _joined(copies=self.copies, readers=self.readers, ttl=format_duration(self.ttl_s))


@dataclass(frozen=True, slots=True)
class ReplicateHint(Hint):
    """Copy each `every`-th new checkpoint below this directory to the site `to`; keep the newest `keep` there."""

    attribute: ClassVar[str] = "user.turbofs.replicate"
    example: ClassVar[str] = "to=evaluation,every=1000,select=profile,keep=3"

    to: str
    every: int
    select: str | None = None
    """A pattern of tensors, or `profile`: what readers there took of the previous ones. None: everything."""
    keep: int | None = None

    @classmethod
    def parse(cls, text: str) -> ReplicateHint:
        pairs = Pairs(cls.attribute, text, cls.example)
        to = pairs.required("to", word)
        every = pairs.required("every", whole(1, MOST_STEPS))
        select = pairs.optional("select", glob)
        keep = pairs.optional("keep", whole(1, MOST_STEPS))
        pairs.finish()
        return cls(to, every, select, keep)

    def format(self) -> str:
        return _joined(to=self.to, every=self.every, select=self.select, keep=self.keep)


@dataclass(frozen=True, slots=True)
class PriorityHint(Hint):
    """How urgent transfers for this path are, each part between 0 and 1."""

    attribute: ClassVar[str] = "user.turbofs.priority"
    example: ClassVar[str] = "scale=0.5,importance=1,severity=0.2"

    scale: float
    importance: float
    severity: float

    @classmethod
    def parse(cls, text: str) -> PriorityHint:
        pairs = Pairs(cls.attribute, text, cls.example)
        scale, importance, severity = (pairs.required(k, fraction) for k in ("scale", "importance", "severity"))
        pairs.finish()
        return cls(scale, importance, severity)

    def format(self) -> str:
        return _joined(
            scale=format_fraction(self.scale),
            importance=format_fraction(self.importance),
            severity=format_fraction(self.severity),
        )


@dataclass(frozen=True, slots=True)
class GroupHint(Hint):
    """The members that save or load the files below this directory together."""

    attribute: ClassVar[str] = "user.turbofs.group"
    example: ClassVar[str] = "id=step-1000,members=8,mode=write,copies=2"

    id: str
    """`auto`: the directory's own name."""
    members: int
    mode: str = "write"
    ack: str | None = None
    """None: what the `ack` attribute says, else `persisted`."""
    copies: int | None = None
    """Copies in memory, this node's included; None: the default of the mount."""
    layout: str = "plain"
    persist_every: int = 1
    """Every how many-th group goes to the source; 0: none does."""

    @classmethod
    def parse(cls, text: str) -> GroupHint:
        pairs = Pairs(cls.attribute, text, cls.example)
        hint = cls(
            id=pairs.required("id", word),
            members=pairs.required("members", whole(1, MOST_MEMBERS)),
            mode=pairs.optional("mode", one_of("write", "read")) or "write",
            ack=pairs.optional("ack", one_of(*ACKNOWLEDGEMENTS)),
            copies=pairs.optional("copies", whole(1, MOST_COPIES)),
            layout=pairs.optional("layout", one_of("plain", "packed")) or "plain",
            persist_every=_or(pairs.optional("persist", _persist_every), 1),
        )
        pairs.finish()
        return hint

    def format(self) -> str:
        persist = {0: "never", 1: None}.get(self.persist_every, f"every={self.persist_every}")
        return _joined(
            id=self.id,
            members=self.members,
            mode=None if self.mode == "write" else self.mode,
            ack=self.ack,
            copies=self.copies,
            layout=None if self.layout == "plain" else self.layout,
            persist=persist,
        )


@dataclass(frozen=True, slots=True)
class AckHint(Hint):
    """What close and fsync wait for."""

    attribute: ClassVar[str] = "user.turbofs.ack"
    example: ClassVar[str] = "persisted  (or: replicated, staged)"

    level: str

    @classmethod
    def parse(cls, text: str) -> AckHint:
        try:
            return cls(one_of(*ACKNOWLEDGEMENTS)(text))
        except ValueError as error:
            raise refusal(cls.attribute, str(error), cls.example) from None

    def format(self) -> str:
        return self.level


@dataclass(frozen=True, slots=True)
class DatasetHint(Hint):
    """Serve this directory's samples step by step, to `consumers` readers, `depth` steps ahead."""

    attribute: ClassVar[str] = "user.turbofs.dataset"
    example: ClassVar[str] = "name=clips,recipe=decode,consumers=64,depth=4"

    name: str
    recipe: str
    consumers: int
    depth: int = 4
    fallback: str = "client"

    @classmethod
    def parse(cls, text: str) -> DatasetHint:
        pairs = Pairs(cls.attribute, text, cls.example)
        hint = cls(
            name=pairs.required("name", word),
            recipe=pairs.required("recipe", word),
            consumers=pairs.required("consumers", whole(1, MOST_READERS)),
            depth=_or(pairs.optional("depth", whole(1, 1024)), 4),
            fallback=pairs.optional("fallback", one_of("client", "mount")) or "client",
        )
        pairs.finish()
        return hint

    def format(self) -> str:
        return _joined(
            name=self.name,
            recipe=self.recipe,
            consumers=self.consumers,
            depth=None if self.depth == 4 else self.depth,
            fallback=None if self.fallback == "client" else self.fallback,
        )


def _persist_every(text: str) -> int:
    if text in ("always", "never"):
        return int(text == "always")
    key, _, number = text.partition("=")
    if key != "every" or not number:
        raise ValueError(f"{text[:60]!r} is none of: always, never, every=N")
    return whole(1, MOST_STEPS)(number)


def _or(given: int | None, default: int) -> int:
    return default if given is None else given


def _joined(**pairs: object) -> str:
    return ",".join(f"{key}={value}" for key, value in pairs.items() if value is not None)
