"""What the mount means, without FUSE: every request of the kernel as a method, with inode and handle numbers.

The FUSE adapter turns requests into these calls and inodes into replies; it decides nothing. The meaning lives in files
of its own: names (`tree`, `names`), open files (`files`), listings (`listing`), extended attributes (`xattrs`), the
hidden tree (`hidden`), status (`reports`). Every method raises TurboError with the errno to answer, and is bounded by the
adapter's request deadline.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import trio

from turbofs.background import Background
from turbofs.config import Config
from turbofs.errors import (
    AlreadyExistsError,
    BadDescriptorError,
    NotADirectoryTurboError,
    NotPermittedError,
    NotSupportedError,
    ReadOnlyError,
)
from turbofs.fs.changes import NameChanges
from turbofs.fs.conflicts import Conflicts
from turbofs.fs.events import EventBus
from turbofs.fs.files import FileOpener
from turbofs.fs.handles import DirectoryHandle, HandleTable, ReadHandle, StagedHandle, VirtualHandle
from turbofs.fs.hidden import hidden_tree
from turbofs.fs.hint_store import HintStore
from turbofs.fs.inodes import Inode, InodeTable
from turbofs.fs.listing import Emit, emit_entries
from turbofs.fs.local_source import LocalSource
from turbofs.fs.names import NothingStaged
from turbofs.fs.owners import OwnerMap
from turbofs.fs.permissions import READ
from turbofs.fs.prefetches import Prefetches
from turbofs.fs.reports import Reports
from turbofs.fs.space import SpaceKeeper
from turbofs.fs.tree import Tree
from turbofs.fs.virtual import HintMirror, VirtualFile
from turbofs.fs.writing import Writing
from turbofs.fs.xattrs import ExtendedAttributes
from turbofs.limits import default_memory_bytes
from turbofs.metrics import Metrics
from turbofs.model import AttributeChange, Attributes, ByteRange, Caller, Space
from turbofs.read.extent_cache import ExtentCache
from turbofs.read.fetcher import Fetcher
from turbofs.read.memory_budget import MemoryBudget
from turbofs.read.prefetch_job import PrefetchJob
from turbofs.source.base import Source
from turbofs.write.opening import close_staging
from turbofs.write.recovery import delete_leftovers, recover
from turbofs.write.staged_file import StagedFile
from turbofs.write.staging import Staging
from turbofs.write.view import LocalView
from turbofs.write.writes import Writes


class Opened(NamedTuple):
    """An open file's handle number, and how the kernel may cache it."""

    handle: int
    keep_cache: bool
    direct_io: bool


class FileSystem:
    """One mount's file system over *source*. Background work lives in *nursery*.

    *root* is what the source says of its root (the mount has reached it already); *hints* what an earlier mount kept;
    *control_path* where the control socket is, for the hidden link to it; *staging* where written bytes wait: without it
    nothing can be written.
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
        staging: Staging | None = None,
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
        owners = OwnerMap(config.fs.owner_timeout_s)
        table = InodeTable(root)
        writes = None
        if staging is not None:
            writes = Writes(source, staging.area, staging.journal, config.write, self._background)
        view: LocalView[StagedFile] = LocalView() if writes is None else writes.view
        local = LocalSource(source, view, owners)
        self.writing = None if writes is None else Writing(local, table, owners, hints, writes)
        self.tree = Tree(local, config.fs, table, owners, self.writing or NothingStaged(), hidden, self._background)
        self.changes = None
        self._conflicts = None
        self._source = source
        self._staging = staging
        if self.writing is not None and staging is not None:
            self._conflicts = Conflicts(self.tree, self.writing)
            self.changes = NameChanges(self.tree, local, self.writing, hints)
            self.writing.writes.on_reverted = self._reverted
            self.writing.writes.on_durability = self._durability_moved
        self._durability_event = trio.Event()
        memory_bytes = config.read.memory_bytes or default_memory_bytes()
        cache = ExtentCache(MemoryBudget(memory_bytes, config.read.extent_bytes))
        fetcher = Fetcher(cache, config.read, self._background, metrics)
        self._files = FileOpener(local, self.tree.table, self.tree.names, fetcher, config.read, metrics)
        self._prefetches = Prefetches(
            self.tree, self._files, fetcher, self._background, metrics, self.events, config.read.extent_bytes
        )
        self.reports = Reports(
            source, config, self.tree, self._files, self._handles, cache, hints, self._prefetches, self._space, metrics
        )
        if self.writing is not None:
            self.reports.writing = self.writing.writes.report
        self._xattrs = ExtendedAttributes(
            self.tree, hints, self._prefetches, self.reports, metrics, self.writing.writes if self.writing else None
        )

    def start(self) -> None:
        """Begin the background work: first of all that which an earlier mount left undone."""
        if self.writing is not None and self._staging is not None:
            recovered = recover(self.writing.writes, self._staging.area, self._staging.journal)
            self._background.start_soon(delete_leftovers, self._source, recovered)
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
        inode = self.tree.table.get(number)
        writes = flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC
        if inode.virtual is not None:
            if writes:
                raise NotPermittedError("hidden files cannot be written", advice="see .turbofs/README")
            content = inode.virtual.render() if isinstance(inode.virtual, VirtualFile) else b""
            inode.open_handles += 1
            return Opened(self._handles.add(VirtualHandle(inode, content)), keep_cache=False, direct_io=True)
        if writes or (self.writing is not None and (inode.staged is not None or self.writing.file_at(inode.path))):
            handle = await self._writable().open(inode, flags, caller)
            return Opened(self._handles.add(handle), keep_cache=False, direct_io=not handle.caches)
        return await self._open_for_reading(inode, flags, caller)

    async def create(
        self, parent_number: int, name: bytes, mode: int, flags: int, caller: Caller
    ) -> tuple[Inode, Opened]:
        """Make a file and open it, or open what has the name (unless *flags* have O_EXCL); one lookup more of it."""
        writing = self._writable()
        parent, text = self.tree.table.get(parent_number), os.fsdecode(name)
        self._names().require_new(parent, text)
        try:
            handle = await writing.create(parent, text, mode, flags, caller)
        except AlreadyExistsError:
            if flags & os.O_EXCL:
                raise
            inode = await self.tree.lookup(parent_number, text, caller)
            return inode, await self.open(inode.number, flags, caller)
        handle.inode.lookups += 1
        opened = Opened(self._handles.add(handle), keep_cache=False, direct_io=not handle.caches)
        return handle.inode, opened

    async def mknod(self, parent_number: int, name: bytes, mode: int, caller: Caller) -> Inode:
        """mknod(2) of a regular file; the other kinds are not for a shared tree."""
        if not stat.S_ISREG(mode):
            raise NotSupportedError(
                "pipes, sockets and devices cannot be made here", advice="make them on a local disk"
            )
        inode, opened = await self.create(parent_number, name, mode, os.O_WRONLY | os.O_EXCL, caller)
        try:
            await self.flush(opened.handle)
        finally:
            await self.release(opened.handle)
        return inode

    async def read(self, handle_number: int, offset: int, length: int) -> memoryview | bytes:
        """Bytes of an open file; valid until the caller's next await."""
        handle = self._handles.file(handle_number)
        if isinstance(handle, VirtualHandle):
            return handle.content[offset : offset + length]
        if isinstance(handle, StagedHandle):
            return await handle.staged.read(offset, length)
        if handle.inode.staged is not None:
            return await handle.inode.staged.read(offset, length)
        before = handle.reader.version
        found = await handle.reader.read(handle.tracker, offset, length, kernel_caches=handle.kernel_caches)
        if handle.reader.version is not before and not before.keeps_bytes(handle.reader.version):
            self.pages_are_stale(handle.inode.number)
        return found

    async def write(self, handle_number: int, offset: int, data: bytes) -> int:
        """Write all of *data* to staging; returns how many bytes that are. Raises OutOfSpaceError."""
        await self._writable().write(self._staged_handle(handle_number), offset, data)
        self.metrics.bytes_written(len(data))
        return len(data)

    async def flush(self, handle_number: int) -> None:
        """A descriptor of the handle was closed."""
        handle = self._handles.file(handle_number)
        if isinstance(handle, StagedHandle):
            await self._writable().flush(handle)

    async def fsync(self, handle_number: int) -> None:
        handle = self._handles.file(handle_number)
        if isinstance(handle, StagedHandle):
            await self._writable().fsync(handle)

    async def release(self, handle_number: int) -> None:
        handle = self._handles.file(handle_number)
        self._handles.remove(handle_number)
        if isinstance(handle, StagedHandle):
            await self._writable().release(handle)
        elif isinstance(handle, ReadHandle):
            if handle.kernel_caches:
                handle.inode.caching_handles -= 1
            await self._files.close(handle)
            if self.writing is not None:
                await self.writing.settle(handle.inode)
        else:
            self.tree.give_back(handle.inode)

    def outstanding_bytes(self, handle_number: int) -> int:
        """What a close of this handle may have to carry to the source: it gets time for that."""
        handle = self._handles.file(handle_number)
        return handle.staged.size if isinstance(handle, StagedHandle) else 0

    # --- changes

    async def setattr(
        self, number: int, change: AttributeChange, size: int | None, handle_number: int | None, caller: Caller
    ) -> Inode:
        """Cut or extend to *size* bytes, then change attributes."""
        inode = self.tree.table.get(number)
        names = self._names()
        if inode.virtual is not None:
            raise NotPermittedError("hidden files keep their attributes", advice="see .turbofs/README")
        if size is not None:
            handle = self._handles.file(handle_number) if handle_number is not None else None
            if isinstance(handle, StagedHandle) and handle.writable:
                await self._writable().truncate(inode, handle.staged, size)
            else:
                await self._writable().truncate_by_name(inode, size, caller)
        if change != AttributeChange():
            await names.set_attributes(inode, change, caller)
        await self.tree.owners.resolve(inode.attributes.owner, inode.attributes.group)
        return inode

    async def mkdir(self, parent_number: int, name: bytes, mode: int, caller: Caller) -> Inode:
        inode = await self._names().mkdir(self.tree.table.get(parent_number), os.fsdecode(name), mode, caller)
        inode.lookups += 1
        return inode

    async def symlink(self, parent_number: int, name: bytes, target: bytes, caller: Caller) -> Inode:
        parent = self.tree.table.get(parent_number)
        inode = await self._names().symlink(parent, os.fsdecode(name), os.fsdecode(target), caller)
        inode.lookups += 1
        return inode

    async def unlink(self, parent_number: int, name: bytes) -> None:
        await self._names().unlink(self.tree.table.get(parent_number), os.fsdecode(name))
        self._background.start_soon(self._hints.flush)

    async def rmdir(self, parent_number: int, name: bytes) -> None:
        await self._names().rmdir(self.tree.table.get(parent_number), os.fsdecode(name))
        self._background.start_soon(self._hints.flush)

    async def rename(self, old_parent: int, old_name: bytes, new_parent: int, new_name: bytes, flags: int) -> None:
        table = self.tree.table
        await self._names().rename(
            table.get(old_parent), os.fsdecode(old_name), table.get(new_parent), os.fsdecode(new_name), flags
        )
        self._background.start_soon(self._hints.flush)

    async def link(self) -> None:
        self._names()
        raise NotSupportedError("no source of TurboFS shares a file between names", advice="copy it, or use a symlink")

    async def fsyncdir(self, handle_number: int, caller: Caller | None = None) -> None:
        """Return when what was done to names in the directory is on the source, unless that was acknowledged early."""
        handle = self._handles.directory(handle_number)
        if self.writing is not None and not handle.inode.detached and handle.inode.virtual is None:
            uid = caller.uid if caller is not None else 0
            if self.writing.early_for(handle.inode.path, uid) is None:
                await self.writing.writes.names_done(handle.inode.path)

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
        """How safe what was written at or below *path* is. Raises NotFoundError for what is neither there nor broken."""
        if self.writing is not None:
            level = self.writing.writes.durability(path)
            if level is not None:
                return level
        self.tree.give_back(await self.tree.resolve(path, caller))
        return "persisted"

    def durability_changed(self) -> trio.Event:
        """Set when the durability of something changes next."""
        return self._durability_event

    def broken_reason(self, path: str) -> str | None:
        return None if self.writing is None else self.writing.writes.broken_reason(path)

    async def conflicts(self, caller: Caller) -> list[dict[str, object]]:
        return [] if self._conflicts is None else await self._conflicts.list(caller)

    async def publish_conflict(self, conflict_id: int, to: str | None, caller: Caller) -> dict[str, object]:
        return await self._conflict_list().publish(conflict_id, to, caller)

    async def drop_conflict(self, conflict_id: int, caller: Caller) -> None:
        await self._conflict_list().drop(conflict_id, caller)

    async def local_descriptor(self, path: str, caller: Caller) -> int:
        return await self.reports.local_descriptor(path, caller)

    async def drain(self) -> int:
        """Bring what was acknowledged to the source, within `write.drain`; returns how many files are left."""
        if self.writing is None:
            return 0
        with trio.move_on_after(self.config.write.drain_s):
            await self.writing.writes.drain()
        return len(self.writing.writes.left())

    async def aclose(self) -> None:
        """After the kernel has let go: end prefetches and keep the hints."""
        self._prefetches.cancel_all()
        await self._hints.aclose()
        if self._staging is not None and self.writing is not None:
            close_staging(
                self._staging, empty=not self.writing.writes.left() and not self.writing.writes.parking.records()
            )

    # --- steps

    async def _open_for_reading(self, inode: Inode, flags: int, caller: Caller) -> Opened:
        handle, keep_pages = await self._files.open(inode)
        direct = bool(inode.direct_writers)
        handle.kernel_caches = not flags & os.O_DIRECT and not direct
        try:
            await self._xattrs.opened(handle, caller)
        except BaseException:
            await self._files.close(handle)
            raise
        if handle.kernel_caches:
            inode.caching_handles += 1
        return Opened(self._handles.add(handle), keep_cache=keep_pages and not direct, direct_io=direct)

    def _writable(self) -> Writing:
        if self.writing is None:
            raise ReadOnlyError("this mount only reads")
        return self.writing

    def _conflict_list(self) -> Conflicts:
        if self._conflicts is None:
            raise ReadOnlyError("this mount only reads: nothing is parked here")
        return self._conflicts

    def _names(self) -> NameChanges:
        if self.changes is None:
            raise ReadOnlyError("this mount only reads")
        return self.changes

    def _staged_handle(self, number: int) -> StagedHandle:
        handle = self._handles.file(number)
        if not isinstance(handle, StagedHandle):
            raise BadDescriptorError("the file is not open for writing")
        return handle

    def _reverted(self, paths: Iterable[str]) -> None:
        """Local names mean what the source says again: whoever has one looks it up anew."""
        for path in paths:
            inode: Inode | None = self.tree.table.root
            for name in filter(None, path.split("/")):
                inode = None if inode is None else self.tree.table.child(inode, name)
            if inode is not None and inode is not self.tree.table.root:
                self.tree.table.detach(inode)

    def _durability_moved(self) -> None:
        event, self._durability_event = self._durability_event, trio.Event()
        event.set()
