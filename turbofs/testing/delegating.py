"""The base of the source wrappers: everything goes to the source inside, and past one hook on its way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from turbofs.model import AttributeChange, Attributes, BlockLocation, ByteRange, DirectoryEntry, FileVersion, Space
from turbofs.source.base import Listing, Source, SourceFile, SourceWriter

T = TypeVar("T")

ACTS = frozenset(
    {
        "connect", "stat", "stat_exact", "list", "next_batch", "open", "read", "refresh", "readlink", "space",
        "block_locations", "being_written", "create", "append", "write", "sync", "complete", "rename", "delete",
        "delete_directory", "make_directory", "make_symlink", "set_attributes", "set_replication",
    }
)  # fmt: skip
"""The names that `around` is called with; "complete" is the close of a writer."""


class DelegatingSource(Source):
    """Behaves as the source inside. A subclass overrides `around`, and `around_read` where it looks at the bytes."""

    def __init__(self, inner: Source) -> None:
        self.inner = inner
        self.uri = inner.uri
        self.capabilities = inner.capabilities

    async def around(self, act: str, path: str, call: Callable[[], Awaitable[T]]) -> T:
        """Every act passes here: *act* is one of ACTS, *call* does it on the source inside."""
        return await call()

    async def around_read(self, path: str, offset: int, buffer: memoryview, call: Callable[[], Awaitable[int]]) -> int:
        """Every `read_into` passes here instead; *call* fills *buffer* from *offset* and returns the count."""
        return await self.around("read", path, call)

    async def connect(self) -> None:
        await self.around("connect", "/", self.inner.connect)

    async def stat(self, path: str) -> Attributes:
        return await self.around("stat", path, lambda: self.inner.stat(path))

    async def stat_exact(self, path: str) -> Attributes:
        return await self.around("stat_exact", path, lambda: self.inner.stat_exact(path))

    async def list(self, path: str) -> Listing:
        return _DelegatingListing(self, path, await self.around("list", path, lambda: self.inner.list(path)))

    async def open(self, path: str) -> SourceFile:
        return _DelegatingFile(self, path, await self.around("open", path, lambda: self.inner.open(path)))

    async def readlink(self, path: str) -> str:
        return await self.around("readlink", path, lambda: self.inner.readlink(path))

    async def open_local(self, path: str, version: FileVersion) -> int:
        return await self.inner.open_local(path, version)

    async def space(self) -> Space:
        return await self.around("space", "/", self.inner.space)

    async def block_locations(self, path: str, wanted: ByteRange) -> Sequence[BlockLocation]:
        return await self.around("block_locations", path, lambda: self.inner.block_locations(path, wanted))

    async def create(self, path: str, *, mode: int = 0o644, replace: bool = False) -> SourceWriter:
        writer = await self.around("create", path, lambda: self.inner.create(path, mode=mode, replace=replace))
        return _DelegatingWriter(self, path, writer)

    def require_name(self, path: str) -> None:
        self.inner.require_name(path)

    async def being_written(self, path: str) -> bool:
        return await self.around("being_written", path, lambda: self.inner.being_written(path))

    async def append(self, path: str) -> SourceWriter:
        return _DelegatingWriter(self, path, await self.around("append", path, lambda: self.inner.append(path)))

    async def rename(self, old: str, new: str, *, replace: bool, identity: FileVersion | None = None) -> None:
        await self.around("rename", old, lambda: self.inner.rename(old, new, replace=replace))

    async def delete(self, path: str) -> None:
        await self.around("delete", path, lambda: self.inner.delete(path))

    async def delete_directory(self, path: str) -> None:
        await self.around("delete_directory", path, lambda: self.inner.delete_directory(path))

    async def make_directory(self, path: str, *, mode: int = 0o755) -> None:
        await self.around("make_directory", path, lambda: self.inner.make_directory(path, mode=mode))

    async def make_symlink(self, path: str, target: str) -> None:
        await self.around("make_symlink", path, lambda: self.inner.make_symlink(path, target))

    async def set_attributes(self, path: str, change: AttributeChange) -> None:
        await self.around("set_attributes", path, lambda: self.inner.set_attributes(path, change))

    async def set_replication(self, path: str, copies: int) -> None:
        await self.around("set_replication", path, lambda: self.inner.set_replication(path, copies))

    def describe(self) -> dict[str, object]:
        return self.inner.describe()

    async def aclose(self) -> None:
        await self.inner.aclose()


class _DelegatingFile(SourceFile):
    def __init__(self, source: DelegatingSource, path: str, inner: SourceFile) -> None:
        self._source = source
        self._path = path
        self._inner = inner
        self.version = inner.version

    async def read_into(self, offset: int, buffer: memoryview) -> int:
        return await self._source.around_read(self._path, offset, buffer, lambda: self._inner.read_into(offset, buffer))

    async def refresh(self) -> FileVersion:
        self.version = await self._source.around("refresh", self._path, self._inner.refresh)
        return self.version

    async def aclose(self) -> None:
        await self._inner.aclose()


class _DelegatingWriter(SourceWriter):
    def __init__(self, source: DelegatingSource, path: str, inner: SourceWriter) -> None:
        self._source = source
        self._path = path
        self._inner = inner

    async def write(self, data: memoryview) -> None:
        await self._source.around("write", self._path, lambda: self._inner.write(data))

    async def sync(self) -> None:
        await self._source.around("sync", self._path, self._inner.sync)

    async def aclose(self) -> None:
        await self._source.around("complete", self._path, self._inner.aclose)

    async def abort(self) -> None:
        await self._inner.abort()


class _DelegatingListing(Listing):
    def __init__(self, source: DelegatingSource, path: str, inner: Listing) -> None:
        self._source = source
        self._path = path
        self._inner = inner

    async def next_batch(self) -> Sequence[DirectoryEntry]:
        return await self._source.around("next_batch", self._path, self._inner.next_batch)

    async def aclose(self) -> None:
        await self._inner.aclose()
