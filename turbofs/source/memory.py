"""`memory:`: a tree in this process's memory, with every capability that does not need other machines.

For tests, and for trying the mount out; the content is gone with the process. It runs in the event loop: the only
waiting is a checkpoint in each act, so that acts can be cancelled and interleave as with any other source.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from turbofs.config import SourceConfig
from turbofs.errors import (
    AlreadyExistsError,
    BusyError,
    InvalidRequestError,
    IsADirectoryTurboError,
    NotADirectoryTurboError,
    NotEmptyError,
    NotFoundError,
    NotSupportedError,
    StaleFileError,
    TurboError,
)
from turbofs.model import AttributeChange, Attributes, Change, DirectoryEntry, FileKind, FileVersion, Space, split
from turbofs.source.base import Capability, Listing, Source, SourceFile, SourceWriter
from turbofs.source.checks import components, require_range

BATCH_ENTRIES = 1000

_ids = itertools.count(1)
_changes = itertools.count(1)


@dataclass(eq=False)
class _Node:
    """One file, directory or link, under whatever name it has now."""

    kind: FileKind
    mode: int
    owner: str | int = field(default_factory=os.getuid)
    group: str | int = field(default_factory=os.getgid)
    data: bytearray = field(default_factory=bytearray)
    children: dict[str, _Node] = field(default_factory=dict)
    target: str = ""
    writers: int = 0
    number: int = field(default_factory=lambda: next(_ids))
    change: int = 0
    mtime_ns: int = 0
    atime_ns: int = field(default_factory=time.time_ns)
    ctime_ns: int = 0

    def __post_init__(self) -> None:
        self.touch_content()

    def touch_content(self) -> None:
        self.mtime_ns = self.ctime_ns = time.time_ns()
        self.change = next(_changes)

    def version(self) -> FileVersion:
        return FileVersion(
            size=len(self.data), mtime_ns=self.mtime_ns, file_id=f"memory:{self.number}", tag=str(self.change)
        )

    def attributes(self) -> Attributes:
        return Attributes(
            kind=self.kind,
            version=self.version(),
            mode=self.mode,
            owner=self.owner,
            group=self.group,
            atime_ns=self.atime_ns,
            ctime_ns=self.ctime_ns,
            link_count=2 if self.kind is FileKind.DIRECTORY else 1,
        )


class MemorySource(Source):
    """A tree in memory. Beside the contract it offers `put` and `modify`, which need no event loop, for tests."""

    capabilities = frozenset(Capability) - {Capability.REPLICATION, Capability.BLOCK_LOCATIONS}

    def __init__(
        self,
        uri: str = "memory:",
        config: SourceConfig | None = None,
        limiter: trio.CapacityLimiter | None = None,
    ) -> None:
        self.uri = uri
        self._root = _Node(FileKind.DIRECTORY, 0o755)

    # --- for tests: as somebody else would change the tree

    def put(self, path: str, data: bytes = b"", *, mode: int = 0o644) -> None:
        """Make *path* a new file of *data*, replacing what has the name and making its directories."""
        names = components(path)
        directory = self._root
        for name in names[:-1]:
            directory = directory.children.setdefault(name, _Node(FileKind.DIRECTORY, 0o755))
        directory.children[names[-1]] = _Node(FileKind.FILE, mode, data=bytearray(data))

    def modify(self, path: str, offset: int, data: bytes, *, size: int | None = None) -> None:
        """Write *data* in place at *offset*, then cut or extend the file to *size* bytes; it stays the same file."""
        node = self._file(path)
        if offset > len(node.data):
            node.data.extend(bytes(offset - len(node.data)))
        node.data[offset : offset + len(data)] = data
        if size is not None:
            node.data[size:] = bytes(max(0, size - len(node.data)))
        node.touch_content()

    # --- reading

    async def connect(self) -> None:
        await trio.lowlevel.checkpoint()

    async def stat(self, path: str) -> Attributes:
        await trio.lowlevel.checkpoint()
        return self._node(path).attributes()

    async def list(self, path: str) -> Listing:
        await trio.lowlevel.checkpoint()
        node = self._node(path)
        if node.kind is not FileKind.DIRECTORY:
            raise NotADirectoryTurboError(f"{path} is not a directory")
        return _MemoryListing(node)

    async def open(self, path: str) -> SourceFile:
        await trio.lowlevel.checkpoint()
        return _MemoryFile(self._file(path), path)

    async def readlink(self, path: str) -> str:
        await trio.lowlevel.checkpoint()
        node = self._node(path)
        if node.kind is not FileKind.SYMLINK:
            raise InvalidRequestError(f"{path} is not a link", advice="only links have a target")
        return node.target

    async def space(self) -> Space:
        await trio.lowlevel.checkpoint()
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        return Space(
            total_bytes=os.sysconf("SC_PHYS_PAGES") * page_bytes, free_bytes=os.sysconf("SC_AVPHYS_PAGES") * page_bytes
        )

    # --- writing

    async def create(self, path: str, *, mode: int = 0o644, replace: bool = False) -> SourceWriter:
        await trio.lowlevel.checkpoint()
        directory, name = self._place(path)
        existing = directory.children.get(name)
        if existing is not None and not replace:
            raise AlreadyExistsError(f"{path} exists")
        if existing is not None and existing.kind is FileKind.DIRECTORY:
            raise IsADirectoryTurboError(f"{path} is a directory")
        node = _Node(FileKind.FILE, mode)
        directory.children[name] = node
        directory.touch_content()
        return _MemoryWriter(node, path, new_as=(directory, name))

    async def being_written(self, path: str) -> bool:
        await trio.lowlevel.checkpoint()
        return self._file(path).writers > 0

    async def append(self, path: str) -> SourceWriter:
        await trio.lowlevel.checkpoint()
        return _MemoryWriter(self._file(path), path)

    async def rename(self, old: str, new: str, *, replace: bool, identity: FileVersion | None = None) -> None:
        await trio.lowlevel.checkpoint()
        source_directory, source_name = self._place(old)
        node = self._node(old)
        if new.startswith(old + "/"):
            raise InvalidRequestError(f"cannot rename {old} into itself, {new}", advice="choose a target outside it")
        directory, name = self._place(new)
        existing = directory.children.get(name)
        if existing is not None:
            if not replace:
                raise AlreadyExistsError(f"{new} exists")
            if existing is node:
                return
            _check_replaceable(node, existing, new)
        del source_directory.children[source_name]
        directory.children[name] = node
        node.ctime_ns = time.time_ns()
        source_directory.touch_content()
        directory.touch_content()

    async def delete(self, path: str) -> None:
        await trio.lowlevel.checkpoint()
        directory, name = self._place(path)
        if self._node(path).kind is FileKind.DIRECTORY:
            raise IsADirectoryTurboError(f"{path} is a directory")
        del directory.children[name]
        directory.touch_content()

    async def delete_directory(self, path: str) -> None:
        await trio.lowlevel.checkpoint()
        directory, name = self._place(path)
        node = self._node(path)
        if node.kind is not FileKind.DIRECTORY:
            raise NotADirectoryTurboError(f"{path} is not a directory")
        if node.children:
            raise NotEmptyError(f"{path} has {len(node.children)} entries")
        del directory.children[name]
        directory.touch_content()

    async def make_directory(self, path: str, *, mode: int = 0o755) -> None:
        await trio.lowlevel.checkpoint()
        self._add(path, _Node(FileKind.DIRECTORY, mode))

    async def make_symlink(self, path: str, target: str) -> None:
        await trio.lowlevel.checkpoint()
        self._add(path, _Node(FileKind.SYMLINK, 0o777, target=target))

    async def set_attributes(self, path: str, change: AttributeChange) -> None:
        await trio.lowlevel.checkpoint()
        node = self._node(path)
        if change.mode is not None and node.kind is FileKind.SYMLINK:
            raise NotSupportedError(f"{path} is a link: links have no mode of their own")
        node.mode = node.mode if change.mode is None else change.mode & 0o7777
        node.owner = node.owner if change.owner is None else change.owner
        node.group = node.group if change.group is None else change.group
        node.atime_ns = node.atime_ns if change.atime_ns is None else change.atime_ns
        node.mtime_ns = node.mtime_ns if change.mtime_ns is None else change.mtime_ns
        node.ctime_ns = time.time_ns()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()

    # --- names

    def _node(self, path: str) -> _Node:
        node = self._root
        for name in components(path):
            if node.kind is not FileKind.DIRECTORY:
                raise NotADirectoryTurboError(f"a component of {path} is not a directory")
            try:
                node = node.children[name]
            except KeyError:
                raise NotFoundError(f"no {path}") from None
        return node

    def _file(self, path: str) -> _Node:
        node = self._node(path)
        if node.kind is FileKind.DIRECTORY:
            raise IsADirectoryTurboError(f"{path} is a directory")
        if node.kind is not FileKind.FILE:
            raise InvalidRequestError(f"{path} is a link, not a file", advice="links are resolved by who follows them")
        return node

    def _place(self, path: str) -> tuple[_Node, str]:
        """The directory that has, or would have, *path*, and the name in it."""
        if not components(path):
            raise BusyError("the root cannot be created, renamed or deleted")
        parent, name = split(path)
        directory = self._node(parent)
        if directory.kind is not FileKind.DIRECTORY:
            raise NotADirectoryTurboError(f"{parent} is not a directory")
        return directory, name

    def _add(self, path: str, node: _Node) -> None:
        directory, name = self._place(path)
        if name in directory.children:
            raise AlreadyExistsError(f"{path} exists")
        directory.children[name] = node
        directory.touch_content()


def _check_replaceable(node: _Node, existing: _Node, path: str) -> None:
    if existing.kind is FileKind.DIRECTORY:
        if node.kind is not FileKind.DIRECTORY:
            raise IsADirectoryTurboError(f"{path} is a directory")
        if existing.children:
            raise NotEmptyError(f"{path} has {len(existing.children)} entries")
    elif node.kind is FileKind.DIRECTORY:
        raise NotADirectoryTurboError(f"{path} is not a directory")


class _MemoryFile(SourceFile):
    def __init__(self, node: _Node, path: str) -> None:
        self._node = node
        self._path = path
        self.version = node.version()

    async def read_into(self, offset: int, buffer: memoryview) -> int:
        wanted = require_range(offset, len(buffer), self.version.size)
        await trio.lowlevel.checkpoint()
        if self._node.version().tag != self.version.tag:
            raise StaleFileError(f"{self._path} changed while it was open")
        if not wanted:
            return 0
        buffer[:wanted] = self._node.data[offset : offset + wanted]
        return wanted

    async def refresh(self) -> FileVersion:
        await trio.lowlevel.checkpoint()
        self.version = self._look()
        return self.version

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()

    def _look(self) -> FileVersion:
        now = self._node.version()
        # The tag moves with every change of content and with nothing else.
        if now.tag != self.version.tag and self.version.compare(now) is not Change.GREW:
            raise StaleFileError(f"{self._path} changed while it was open")
        return now


class _MemoryWriter(SourceWriter):
    def __init__(self, node: _Node, path: str, *, new_as: tuple[_Node, str] | None = None) -> None:
        self._node = node
        self._path = path
        self._new_as = new_as
        self._pending = bytearray()
        self._open = True
        node.writers += 1

    async def write(self, data: memoryview) -> None:
        await trio.lowlevel.checkpoint()
        if not self._open:
            raise TurboError(f"{self._path} was completed already")
        self._pending += data

    async def sync(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._pending:
            self._node.data += self._pending
            self._node.touch_content()
            self._pending.clear()

    async def aclose(self) -> None:
        await self.sync()
        self._end()

    async def abort(self) -> None:
        was_open = self._end()
        self._pending.clear()
        if was_open and self._new_as is not None:
            directory, name = self._new_as
            if directory.children.get(name) is self._node:
                del directory.children[name]
                directory.touch_content()

    def _end(self) -> bool:
        """Nothing is written from now on; True the first time."""
        was_open, self._open = self._open, False
        self._node.writers -= was_open
        return was_open


class _MemoryListing(Listing):
    def __init__(self, directory: _Node) -> None:
        self._directory = directory
        self._names = sorted(directory.children)

    async def next_batch(self) -> Sequence[DirectoryEntry]:
        await trio.lowlevel.checkpoint()
        while self._names:
            names, self._names = self._names[:BATCH_ENTRIES], self._names[BATCH_ENTRIES:]
            nodes = ((name, self._directory.children.get(name)) for name in names)
            batch = [DirectoryEntry(name, node.attributes()) for name, node in nodes if node is not None]
            if batch:  # all of it may have been deleted meanwhile; an empty batch would mean the end
                return batch
        return ()

    async def aclose(self) -> None:
        self._names = []
