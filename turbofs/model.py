"""The vocabulary of TurboFS: frozen values that every room shares. No I/O, no policy.

What a listing makes by the hundred thousand is a named tuple, which takes a fifth of the time of a frozen dataclass.

Paths are absolute POSIX paths inside a source ("/" is the source's root), as `str`; names that are not UTF-8 carry
surrogate escapes (PEP 383). Ranges are half-open. Times are nanoseconds since the epoch.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

ROOT = "/"


def join(parent: str, name: str) -> str:
    """The path of *name* inside the directory *parent*."""
    return f"/{name}" if parent == ROOT else f"{parent}/{name}"


def split(path: str) -> tuple[str, str]:
    """The parent's path and the last name of *path*; the root's parent is the root, its name is empty."""
    parent, _, name = path.rpartition("/")
    return parent or ROOT, name


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """Bytes [start, stop) of a file. Raises ValueError where the bounds are negative or reversed."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"not a byte range: [{self.start}, {self.stop})")

    @property
    def length(self) -> int:
        return self.stop - self.start

    def clamp(self, size: int) -> ByteRange:
        """The part of this range that lies inside a file of *size* bytes."""
        return ByteRange(min(self.start, size), min(self.stop, size))

    def overlaps(self, other: ByteRange) -> bool:
        return self.start < other.stop and other.start < self.stop


class FileKind(enum.Enum):
    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    OTHER = "other"


class Change(enum.Enum):
    """What became of a file between two looks at it."""

    SAME = "same"
    GREW = "grew"
    """The same file, longer or only touched: what was read of it is still right only where `keeps_bytes` says so."""
    REPLACED = "replaced"
    """Another file, or the same one with other content: nothing known about it holds any more."""


class FileVersion(NamedTuple):
    """One content of one file. Two equal strong versions mean equal bytes.

    `file_id` identifies the file past renames (HDFS inode id, "device:inode" of a local file, empty where the source
    told none: then the version is weak and proves nothing). `tag` is what else the source offers against collisions
    (an object's ETag, a local file's ctime).
    """

    size: int
    mtime_ns: int
    file_id: str = ""
    tag: str = ""
    append_only: bool = False
    """The source never changes bytes in place without moving the modification time (HDFS)."""

    @property
    def strong(self) -> bool:
        return bool(self.file_id)

    def compare(self, newer: FileVersion) -> Change:
        """How *newer*, seen later under the same name, relates to this version.

        Weak versions can only be compared by size and time, which collide (a replacement followed by utimes), so
        callers that hold cached bytes must ask for a strong version first.
        """
        if self.file_id and newer.file_id and self.file_id != newer.file_id:
            return Change.REPLACED
        same_size_and_time = self.size == newer.size and self.mtime_ns == newer.mtime_ns
        if same_size_and_time and self._tags_agree(newer):
            return Change.SAME
        if newer.size > self.size and newer.mtime_ns >= self.mtime_ns:
            return Change.GREW
        if self.strong and newer.file_id == self.file_id and newer.size == self.size:
            if same_size_and_time:
                return Change.GREW  # only the ctime of a local file moved: chmod, link, rename
            if self.append_only:
                return Change.GREW  # HDFS closed a file that was synced to this length, or somebody set its times
        return Change.REPLACED

    def keeps_bytes(self, newer: FileVersion) -> bool:
        """Whether bytes read of this version are still the first bytes of *newer*.

        True for an unchanged file, and for an HDFS file that a writer extends: hsync moves the length and leaves the
        modification time, while truncation and re-opening move it.
        """
        if self.compare(newer) is Change.SAME:
            return True
        same_file = self.strong and self.file_id == newer.file_id
        return self.append_only and same_file and newer.size >= self.size and newer.mtime_ns == self.mtime_ns

    def _tags_agree(self, other: FileVersion) -> bool:
        return not self.tag or not other.tag or self.tag == other.tag

    def token(self) -> str:
        """A text that names this version in messages, manifests and status documents."""
        return f"{self.file_id or '-'}:{self.size}:{self.mtime_ns}:{self.tag or '-'}"


class Attributes(NamedTuple):
    """What a source says about one name. `owner` and `group` are names (HDFS) or numbers (a local tree)."""

    kind: FileKind
    version: FileVersion
    mode: int
    """Permission bits only (0o7777), without the file type."""
    owner: str | int
    group: str | int
    atime_ns: int = 0
    ctime_ns: int = 0
    link_count: int = 1
    replication: int = 0
    """Copies that the source keeps; 0 where it does not say."""
    block_size: int = 0

    @property
    def size(self) -> int:
        return self.version.size

    @property
    def mtime_ns(self) -> int:
        return self.version.mtime_ns

    def with_version(self, version: FileVersion) -> Attributes:
        return self._replace(version=version)


class DirectoryEntry(NamedTuple):
    name: str
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class BlockLocation:
    """Where one block of a file lives: the hosts that hold a replica of these bytes."""

    range: ByteRange
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Space:
    """A source's capacity, in bytes and names; None where the source has no such limit or does not tell."""

    total_bytes: int | None = None
    free_bytes: int | None = None
    total_files: int | None = None
    free_files: int | None = None


@dataclass(frozen=True, slots=True)
class AttributeChange:
    """What to set on a name; None leaves a field as it is. Times are nanoseconds since the epoch."""

    mode: int | None = None
    owner: str | int | None = None
    group: str | int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a request, as the kernel tells it."""

    uid: int
    gid: int
    pid: int
    groups: frozenset[int] = field(default_factory=frozenset)
