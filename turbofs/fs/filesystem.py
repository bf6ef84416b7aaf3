"""What the mount means, without FUSE: every request of the kernel as a method, with inode and handle numbers.

The FUSE adapter turns requests into these calls and inodes into replies; it decides nothing. The meaning lives in files
of its own: names (`tree`, `names`), open files (`files`), listings (`listing`), extended attributes (`xattrs`), the
hidden tree (`hidden`), status (`reports`). Every method raises TurboError with the errno to answer, and is bounded by the
adapter's request deadline.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import trio

from turbofs.background import Background
from turbofs.config import Config
from turbofs.errors import NotADirectoryTurboError, ReadOnlyError
from turbofs.fs.events import EventBus
from turbofs.fs.files import FileOpener
from turbofs.fs.handles import DirectoryHandle, HandleTable, ReadHandle, VirtualHandle
from turbofs.fs.hidden import hidden_tree
from turbofs.fs.hint_store import HintStore
from turbofs.fs.inodes import Inode
from turbofs.fs.listing import Emit, emit_entries
from turbofs.fs.permissions import READ
from turbofs.fs.prefetches import Prefetches
from turbofs.fs.reports import Reports
from turbofs.fs.space import SpaceKeeper
from turbofs.fs.tree import Tree
from turbofs.fs.virtual import HintMirror, VirtualFile
from turbofs.fs.xattrs import ExtendedAttributes
from turbofs.limits import default_memory_bytes
from turbofs.metrics import Metrics
from turbofs.model import Attributes, ByteRange, Caller, Space
from turbofs.read.extent_cache import ExtentCache
from turbofs.read.fetcher import Fetcher
from turbofs.read.memory_budget import MemoryBudget
from turbofs.read.prefetch_job import PrefetchJob
from turbofs.source.base import Source


class Opened(NamedTuple):
    """An open file's handle number, and how the kernel may cache it."""

    handle: int
    keep_cache: bool
    direct_io: bool


class FileSystem:
    """One mount's file system over *source*. Background work lives in *nursery*.

    *root* is what the source says of its root (the mount has reached it already); *hints* what an earlier mount kept;
    *control_path* where the control socket is, for the hidden link to it.
    """

    def __init__(
        self,
        source: Source,
        config: Config,
        root: Attributes,
        *,
        nursery: trio.Nursery,
        metrics: Metrics,
        hints: HintStore,
        control_path: Path | None = None,
    ) -> None:
        self.config = config
        self.metrics = metrics
        self.events = EventBus()
        self.pages_are_stale: Callable[[int], None] = lambda _number: None
        """Told of an open file whose content changed, so that the kernel drops the pages it keeps; never waits."""
        self._background = Background(nursery)
        self._hints = hints
        self._space = SpaceKeeper(source, config.fs.space_refresh_s)
        self._handles = HandleTable()
        hidden = hidden_tree(
            lambda: self.reports.stats(),  # noqa: PLW0108  the reports are made after the tree that shows them
            lambda: json.dumps(self.status(), indent=1).encode() + b"\n",
            lambda: str(control_path or "/nonexistent"),
        )
        self.tree = Tree(source, config.fs, root, hidden, self._background)
        memory_bytes = config.read.memory_bytes or default_memory_bytes()
        cache = ExtentCache(MemoryBudget(memory_bytes, config.read.extent_bytes))
        fetcher = Fetcher(cache, config.read, self._background, metrics)
        self._files = FileOpener(source, self.tree.table, self.tree.names, fetcher, config.read, metrics)
        self._prefetches = Prefetches(
            self.tree, self._files, fetcher, self._background, metrics, self.events, config.read.extent_bytes
        )
        self.reports = Reports(
            source, config, self.tree, self._files, self._handles, cache, hints, self._prefetches, self._space, metrics
        )
        self._xattrs = ExtendedAttributes(self.tree, hints, self._prefetches, self.reports, metrics)

    def start(self) -> None:
        """Begin the background work."""
        self._background.start_soon(self._space.keep_fresh)

    # --- names

    async def lookup(self, parent_number: int, name: bytes, caller: Caller) -> Inode:
        """The inode of a name; the kernel then holds one lookup more of it."""
        return await self.tree.lookup(parent_number, os.fsdecode(name), caller)

    def forget(self, counts: Sequence[tuple[int, int]]) -> None:
        self.tree.forget(counts)

    async def getattr(self, number: int) -> Inode:
        return await self.tree.getattr(number)

    async def readlink(self, number: int) -> bytes:
        return os.fsencode(await self.tree.readlink(number))

    # --- files

    async def open(self, number: int, flags: int, caller: Caller) -> Opened:
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            raise ReadOnlyError("this mount only reads")
        inode = self.tree.table.get(number)
        if inode.virtual is not None:
            content = inode.virtual.render() if isinstance(inode.virtual, VirtualFile) else b""
            inode.open_handles += 1
            return Opened(self._handles.add(VirtualHandle(inode, content)), keep_cache=False, direct_io=True)
        handle, keep_pages = await self._files.open(inode)
        handle.kernel_caches = not flags & os.O_DIRECT
        try:
            await self._xattrs.opened(handle, caller)
        except BaseException:
            await self._files.close(handle)
            raise
        return Opened(self._handles.add(handle), keep_cache=keep_pages, direct_io=False)

    async def read(self, handle_number: int, offset: int, length: int) -> memoryview | bytes:
        """Bytes of an open file; valid until the caller's next await."""
        handle = self._handles.file(handle_number)
        if isinstance(handle, ReadHandle):
            before = handle.reader.version
            found = await handle.reader.read(handle.tracker, offset, length, kernel_caches=handle.kernel_caches)
            if handle.reader.version is not before and not before.keeps_bytes(handle.reader.version):
                self.pages_are_stale(handle.inode.number)
            return found
        return handle.content[offset : offset + length]

    async def release(self, handle_number: int) -> None:
        handle = self._handles.file(handle_number)
        self._handles.remove(handle_number)
        if isinstance(handle, ReadHandle):
            await self._files.close(handle)
        else:
            self.tree.give_back(handle.inode)

    # --- directories

    async def opendir(self, number: int, caller: Caller) -> int:
        inode = self.tree.table.get(number)
        if not inode.is_directory:
            raise NotADirectoryTurboError(f"{inode.path} is not a directory")
        fixed = None
        if isinstance(inode.virtual, HintMirror):
            await self.tree.check_mirror(inode.virtual, caller, READ)
        elif inode.virtual is not None:
            fixed = self.tree.hidden.entries(inode)
        inode.open_handles += 1
        return self._handles.add(DirectoryHandle(inode, fixed))

    async def readdir(self, handle_number: int, offset: int, emit: Emit) -> None:
        """Hand entries from *offset* on to *emit* until it is full; each accepted one is a lookup that the kernel holds."""
        handle = self._handles.directory(handle_number)
        async with handle.lock:
            await emit_entries(self.tree, handle, offset, emit)

    async def releasedir(self, handle_number: int) -> None:
        handle = self._handles.directory(handle_number)
        self._handles.remove(handle_number)
        try:
            await handle.aclose()
        finally:
            self.tree.give_back(handle.inode)

    # --- extended attributes

    async def setxattr(self, number: int, name: bytes, value: bytes, caller: Caller) -> None:
        await self._xattrs.set(self.tree.table.get(number), os.fsdecode(name), value, caller)

    async def getxattr(self, number: int, name: bytes, caller: Caller) -> bytes:
        return await self._xattrs.get(self.tree.table.get(number), os.fsdecode(name), caller)

    async def listxattr(self, number: int, caller: Caller) -> list[bytes]:
        return [os.fsencode(name) for name in self._xattrs.list(self.tree.table.get(number), caller)]

    async def removexattr(self, number: int, name: bytes, caller: Caller) -> None:
        await self._xattrs.remove(self.tree.table.get(number), os.fsdecode(name), caller)

    # --- the mount as a whole

    def statfs(self) -> Space:
        """From memory: `df` works while the source is down."""
        return self._space.latest

    def status(self, caller: Caller | None = None) -> dict[str, object]:
        """What *caller* may know of the mount; without one, what anybody may."""
        return self.reports.mount(caller.uid if caller is not None else None)

    async def file_status(self, path: str, caller: Caller) -> dict[str, object]:
        return await self.reports.file(path, caller)

    async def set_hint(self, path: str, name: str, value: bytes, caller: Caller) -> None:
        """A hint given over the control socket: the caller's own, as on `.turbofs/hints/`."""
        await self._xattrs.set_own(path, name, value, caller)

    async def start_prefetch(self, path: str, ranges: Sequence[ByteRange] | None, caller: Caller) -> PrefetchJob:
        return await self._prefetches.start(path, ranges, caller)

    def prefetch_job(self, job_id: int) -> PrefetchJob:
        return self._prefetches.job(job_id)

    async def durability(self, path: str, caller: Caller) -> str:
        """What is there was written elsewhere and is on the source: `persisted`. Raises NotFoundError."""
        self.tree.give_back(await self.tree.resolve(path, caller))
        return "persisted"

    async def local_descriptor(self, path: str, caller: Caller) -> int:
        return await self.reports.local_descriptor(path, caller)

    async def aclose(self) -> None:
        """After the kernel has let go: end prefetches and keep the hints."""
        self._prefetches.cancel_all()
        await self._hints.aclose()
