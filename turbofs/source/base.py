"""The contract between TurboFS and the place where bytes live.

A source names files by absolute paths ("/a/b", relative to its own root) and raises only `TurboError`s. What it can
do beyond reading is declared in `capabilities`; every other act raises NotSupportedError, never a weaker act under
the same name. `turbofs.testing.conformance` holds the suite that every source passes.

Deadlines: a source does not retry and may take long; `RetryingSource` around it bounds every act. All methods may be
cancelled; a cancelled act may still take effect on the server, but it never touches the caller's buffers any more.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from turbofs.errors import IsADirectoryTurboError, NotSupportedError
from turbofs.model import (
    AttributeChange,
    Attributes,
    BlockLocation,
    ByteRange,
    DirectoryEntry,
    FileKind,
    FileVersion,
    Space,
)
from turbofs.source.checks import require_utf8


class Capability(enum.Enum):
    """What a source can do beyond stat, list, open and read."""

    STRONG_VERSIONS = "strong-versions"  # versions carry an identity: equal versions mean equal bytes
    SYMLINKS = "symlinks"
    OWNERS = "owners"  # owner, group and mode are real, and can be set
    SET_ID_BITS = "set-id-bits"  # modes may hold set-user-id and set-group-id
    TIMES = "times"
    CREATE = "create"
    EXCLUSIVE_CREATE = "exclusive-create"  # create without replace is atomic
    APPEND = "append"
    SYNC = "sync"  # what a writer has synced is durable and visible before close
    RENAME = "rename"  # atomic; also of directories
    RENAME_REPLACE = "rename-replace"  # atomic, and replaces a file
    DELETE = "delete"
    DIRECTORIES = "directories"  # directories exist on their own, empty ones too
    KEEPS_OPEN = "keeps-open"  # an open file can be read to its end after its name was replaced or deleted
    REPLICATION = "replication"
    BLOCK_LOCATIONS = "block-locations"
    SPACE = "space"
    ARBITRARY_NAMES = "arbitrary-names"  # any bytes but "/" and NUL; else UTF-8 only


class SourceFile(ABC):
    """One version of one file, open for reading. Safe for concurrent `read_into` calls."""

    version: FileVersion

    @abstractmethod
    async def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill *buffer* with the bytes from *offset* on; returns how many were written, less only at the file's end.

        Reads stay inside `version.size`. Whatever happens, nothing writes to *buffer* after this returns or raises.
        Raises StaleFileError where the file is no longer this version, ShortReadError where the source ended early.
        """

    async def refresh(self) -> FileVersion:
        """The version of this very file now (not of whatever has its name); raises StaleFileError if it is gone.

        After growth (see `FileVersion.compare`) later reads may go up to the new size.
        """
        raise NotSupportedError(f"{type(self).__name__} cannot follow an open file")

    @abstractmethod
    async def aclose(self) -> None:
        """Release the file. Never raises for a file that is gone."""


class SourceWriter(ABC):
    """One file being written, front to back."""

    @abstractmethod
    async def write(self, data: memoryview) -> None:
        """Append all of *data*."""

    async def sync(self) -> None:
        """Make what was written durable and visible to readers. Needs Capability.SYNC."""
        raise NotSupportedError(f"{type(self).__name__} cannot sync before it is closed")

    @abstractmethod
    async def aclose(self) -> None:
        """Complete the file: when this returns, everything written is durable.

        May be called again after a transient error; after any other error it keeps raising.
        """

    @abstractmethod
    async def abort(self) -> None:
        """Give up: the file is removed where it was new, and no lease is left behind. Never raises.

        One that was renamed since it was created keeps what was synced: whoever named it has shown it.
        """


class Listing(ABC):
    """The entries of one directory, in batches, in the source's order (sorted by name on HDFS and object stores)."""

    @abstractmethod
    async def next_batch(self) -> Sequence[DirectoryEntry]:
        """The next entries; empty at the end."""

    @abstractmethod
    async def aclose(self) -> None:
        """Stop early. Never raises."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()


class Source(ABC):
    """A tree of files. `uri` is how a user names it; `capabilities` what it can do beyond reading."""

    uri: str
    capabilities: frozenset[Capability]

    @abstractmethod
    async def connect(self) -> None:
        """Reach the source and check that its root is a directory.

        Raises SourceUnavailableError, NotFoundError, AccessDeniedError or ConfigError with what is missing.
        """

    @abstractmethod
    async def stat(self, path: str) -> Attributes:
        """Attributes of *path* (of a link itself, where the source has links). The version may be weak."""

    async def stat_exact(self, path: str) -> Attributes:
        """As `stat`, with a strong version if the source can give one at all (one more round trip on HDFS)."""
        return await self.stat(path)

    @abstractmethod
    async def list(self, path: str) -> Listing:
        """Open the directory *path* for listing."""

    @abstractmethod
    async def open(self, path: str) -> SourceFile:
        """Open the file that has this name now. The version is as strong as the source can make it."""

    async def readlink(self, path: str) -> str:
        raise self._unsupported("links", path)

    async def open_local(self, path: str, version: FileVersion) -> int:
        """A read-only descriptor of the plain local file that *path* is, which the caller closes.

        Raises NotSupportedError where bytes live elsewhere, StaleFileError where the file is not *version* any more:
        whoever asks has checked permissions of that one.
        """
        raise self._unsupported("local descriptors", path)

    async def space(self) -> Space:
        raise self._unsupported("space", "/")

    async def block_locations(self, path: str, wanted: ByteRange) -> Sequence[BlockLocation]:
        raise self._unsupported("block locations", path)

    async def create(self, path: str, *, mode: int = 0o644, replace: bool = False) -> SourceWriter:
        """Create a file. Without *replace* an existing name raises AlreadyExistsError."""
        raise self._unsupported("creating files", path)

    def require_name(self, path: str) -> None:
        """Raises BadNameError where nothing on this source can be called *path*. Asks nobody."""
        if Capability.ARBITRARY_NAMES not in self.capabilities:
            require_utf8(path)

    async def being_written(self, path: str) -> bool:
        """Whether some client has the file *path* open for writing, so that replacing it would destroy what it writes.

        Always False where the source keeps no such record. Raises NotFoundError, IsADirectoryTurboError.
        """
        if (await self.stat(path)).kind is FileKind.DIRECTORY:
            raise IsADirectoryTurboError(f"{path} is a directory")
        return False

    async def append(self, path: str) -> SourceWriter:
        raise self._unsupported("appending", path)

    async def rename(self, old: str, new: str, *, replace: bool, identity: FileVersion | None = None) -> None:
        """Atomic rename. Without *replace* an existing target raises AlreadyExistsError.

        *identity* is what the caller knows *old* to be. It is no condition: it tells, after an answer was lost, whether
        the rename took effect, and saves the retrying source from asking before.
        """
        raise self._unsupported("renaming", old)

    async def delete(self, path: str) -> None:
        """Delete one file or link; a directory raises IsADirectoryTurboError."""
        raise self._unsupported("deleting", path)

    async def delete_directory(self, path: str) -> None:
        """Delete one empty directory; raises NotEmptyError otherwise."""
        raise self._unsupported("deleting directories", path)

    async def make_directory(self, path: str, *, mode: int = 0o755) -> None:
        raise self._unsupported("making directories", path)

    async def make_symlink(self, path: str, target: str) -> None:
        raise self._unsupported("making links", path)

    async def set_attributes(self, path: str, change: AttributeChange) -> None:
        raise self._unsupported("changing attributes", path)

    async def set_replication(self, path: str, copies: int) -> None:
        raise self._unsupported("changing replication", path)

    def describe(self) -> dict[str, object]:
        """What `turbofs status` and `turbofs doctor` show: the client, the identity, why versions are weak, …"""
        return {"uri": self.uri, "capabilities": sorted(c.value for c in self.capabilities)}

    @abstractmethod
    async def aclose(self) -> None:
        """Close connections. Never raises."""

    def _unsupported(self, what: str, path: str) -> NotSupportedError:
        return NotSupportedError(f"{self.uri} does not support {what} (asked for {path})")
