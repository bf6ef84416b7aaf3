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
from dataclasses import replace
from pathlib import Path

import trio

from turbofs.background import Background
from turbofs.config import Config
from turbofs.errors import (
    NotADirectoryTurboError,
    NotFoundError,
    NotSupportedError,
    ReadOnlyError,
)
from turbofs.fs.conflicts import parked_nodes
from turbofs.fs.events import EventBus
from turbofs.fs.files import FileOpener
from turbofs.fs.handles import DirectoryHandle, HandleTable
from turbofs.fs.hidden import hidden_tree
from turbofs.fs.hint_store import HintStore, state_directory
from turbofs.fs.inodes import Inode, InodeTable
from turbofs.fs.listing import Emit, emit_entries
from turbofs.fs.local_source import LocalSource
from turbofs.fs.names import NothingStaged
from turbofs.fs.open_files import Opened, OpenFiles
from turbofs.fs.owners import OwnerMap
from turbofs.fs.permissions import READ, SEARCH
from turbofs.fs.prefetches import Prefetches
from turbofs.fs.reports import Reports
from turbofs.fs.space import SpaceKeeper
from turbofs.fs.tree import Tree
from turbofs.fs.virtual import HintMirror
from turbofs.fs.write_room import WriteRoom
from turbofs.fs.xattrs import ExtendedAttributes
from turbofs.limits import default_memory_bytes
from turbofs.metrics import Metrics
from turbofs.model import AttributeChange, Attributes, ByteRange, Caller, Space, split
from turbofs.read.extent_cache import ExtentCache
from turbofs.read.fetcher import Fetcher
from turbofs.read.memory_budget import MemoryBudget
from turbofs.read.prefetch_job import PrefetchJob
from turbofs.source.base import Source
from turbofs.write.staging import Staging
from turbofs.write.view import LocalView

_UPLOADS_SHARE = 4


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
            lambda: {} if self.room is None else parked_nodes(self.room.writing),
        )
        owners = OwnerMap(config.fs.owner_timeout_s)
        table = InodeTable(root)
        memory_bytes = config.read.memory_bytes or default_memory_bytes()
        self.room: WriteRoom | None = None
        local = LocalSource(source, LocalView(), owners)
        if staging is not None:
            state = state_directory(config.fs, config.mount.mountpoint)
            # Buffers of uploads are a share of the one budget for buffers.
            most = max(1, memory_bytes // _UPLOADS_SHARE // (2 * config.write.piece_bytes))
            write = replace(config.write, uploads=min(config.write.uploads, most))
            memory_bytes -= 2 * write.uploads * write.piece_bytes
            self.room = WriteRoom(source, staging, write, table, owners, hints, self._background, state)
            local = self.room.local
        staged = self.room.writing if self.room is not None else NothingStaged()
        self.tree = Tree(local, config.fs, table, owners, staged, hidden, self._background)
        if self.room is not None:
            self.room.join(self.tree)
        cache = ExtentCache(MemoryBudget(memory_bytes, config.read.extent_bytes))
        fetcher = Fetcher(cache, config.read, self._background, metrics)
        self._files = FileOpener(local, self.tree.table, self.tree.names, fetcher, config.read, metrics)
        self._prefetches = Prefetches(
            self.tree, self._files, fetcher, self._background, metrics, self.events, config.read.extent_bytes
        )
        self.reports = Reports(
            source, config, self.tree, self._files, self._handles, cache, hints, self._prefetches, self._space, metrics
        )
        overview = self.room.overview if self.room is not None else None
        if self.room is not None:
            self.reports.writing = self.room.report
            self.reports.digest_of = self.room.writing.digest_of
            self.reports.tell_more = self.room.tell
            self.room.writes.flusher.naming.denied_owner = self._owners_denied
        self._xattrs = ExtendedAttributes(self.tree, hints, self._prefetches, self.reports, metrics, overview)

        self._open_files = OpenFiles(
            self.tree, self._files, self._handles, self._xattrs, self.room, metrics, self._drop_pages
        )

    def start(self) -> None:
        """Begin the background work: first of all that which an earlier mount left undone."""
        if self.room is not None:
            self.room.start()
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
        return await self._open_files.open(number, flags, caller)

    async def create(
        self, parent_number: int, name: bytes, mode: int, flags: int, caller: Caller
    ) -> tuple[Inode, Opened]:
        """Make a file and open it, or open what has the name (unless *flags* have O_EXCL); one lookup more of it."""
        return await self._open_files.create(parent_number, os.fsdecode(name), mode, flags, caller)

    async def mknod(self, parent_number: int, name: bytes, mode: int, caller: Caller) -> Inode:
        return await self._open_files.mknod(parent_number, os.fsdecode(name), mode, caller)

    async def read(self, handle_number: int, offset: int, length: int) -> memoryview | bytes:
        """Bytes of an open file; valid until the caller's next await."""
        return await self._open_files.read(handle_number, offset, length)

    async def write(self, handle_number: int, offset: int, data: bytes) -> int:
        """Write all of *data* to staging; returns how many bytes that are. Raises OutOfSpaceError."""
        return await self._open_files.write(handle_number, offset, data)

    async def flush(self, handle_number: int) -> None:
        """A descriptor of the handle was closed."""
        await self._open_files.flush(handle_number)

    async def fsync(self, handle_number: int) -> None:
        await self._open_files.fsync(handle_number)

    async def release(self, handle_number: int) -> None:
        await self._open_files.release(handle_number)

    def outstanding_bytes(self, handle_number: int) -> int:
        """What a close of this handle may have to carry to the source: it gets time for that."""
        return self._open_files.outstanding_bytes(handle_number)

    # --- changes

    async def setattr(
        self, number: int, change: AttributeChange, size: int | None, handle_number: int | None, caller: Caller
    ) -> Inode:
        """Cut or extend to *size* bytes, then change attributes."""
        inode = self.tree.table.get(number)
        names = self._writable().changes
        if inode.virtual is not None:
            raise ReadOnlyError("hidden files keep their attributes", advice="see .turbofs/README")
        if size is not None:
            await self._open_files.truncate(inode, size, handle_number, caller)
        if change != AttributeChange():
            await names.set_attributes(inode, change, caller)
        await self.tree.owners.resolve(inode.attributes.owner, inode.attributes.group)
        return inode

    async def mkdir(self, parent_number: int, name: bytes, mode: int, caller: Caller) -> Inode:
        inode = await self._writable().changes.mkdir(
            self.tree.table.get(parent_number), os.fsdecode(name), mode, caller
        )
        inode.lookups += 1
        return inode

    async def symlink(self, parent_number: int, name: bytes, target: bytes, caller: Caller) -> Inode:
        parent = self.tree.table.get(parent_number)
        inode = await self._writable().changes.symlink(parent, os.fsdecode(name), os.fsdecode(target), caller)
        inode.lookups += 1
        return inode

    async def unlink(self, parent_number: int, name: bytes) -> None:
        await self._writable().changes.unlink(self.tree.table.get(parent_number), os.fsdecode(name))
        self._background.start_soon(self._hints.flush)

    async def rmdir(self, parent_number: int, name: bytes) -> None:
        await self._writable().changes.rmdir(self.tree.table.get(parent_number), os.fsdecode(name))
        self._background.start_soon(self._hints.flush)

    async def rename(self, old_parent: int, old_name: bytes, new_parent: int, new_name: bytes, flags: int) -> None:
        table = self.tree.table
        await self._writable().changes.rename(
            table.get(old_parent), os.fsdecode(old_name), table.get(new_parent), os.fsdecode(new_name), flags
        )
        self._background.start_soon(self._hints.flush)

    async def link(self) -> None:
        self._writable()
        raise NotSupportedError("no source of TurboFS shares a file between names", advice="copy it, or use a symlink")

    async def fsyncdir(self, handle_number: int, caller: Caller | None = None) -> None:
        """Return when what was done to names in the directory is on the source, unless that was acknowledged early."""
        handle = self._handles.directory(handle_number)
        if self.room is not None and not handle.inode.detached and handle.inode.virtual is None:
            uid = caller.uid if caller is not None else 0
            if self.room.writing.early_for(handle.inode.path, uid) is None:
                await self.room.writes.names_done(handle.inode.path)

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
        level = None if self.room is None else self.room.overview.durability(path)
        try:
            self.tree.give_back(await self.tree.resolve(path, caller))
        except NotFoundError:
            if level is None:
                raise
            # What failed may have lost its name with that; whoever may search the directory may know.
            self.tree.give_back(await self.tree.resolve(split(path)[0], caller, wanted=SEARCH))
        return level or "persisted"

    def durability_changed(self) -> trio.Event:
        """Set when the durability of something changes next."""
        return trio.Event() if self.room is None else self.room.durability_changed()

    def broken_reason(self, path: str) -> str | None:
        return None if self.room is None else self.room.overview.broken_reason(path)

    async def conflicts(self, caller: Caller) -> list[dict[str, object]]:
        return [] if self.room is None else await self.room.conflicts.list(caller)

    async def publish_conflict(self, conflict_id: int, to: str | None, caller: Caller) -> dict[str, object]:
        return await self._writable().conflicts.publish(conflict_id, to, caller)

    async def drop_conflict(self, conflict_id: int, caller: Caller) -> None:
        await self._writable().conflicts.drop(conflict_id, caller)

    async def local_descriptor(self, path: str, caller: Caller) -> int:
        return await self.reports.local_descriptor(path, caller)

    async def end_writing(self) -> None:
        """Bring to the source what was acknowledged, as far as there is time, and keep the rest for the next mount."""
        if self.room is not None:
            await self.room.end()

    async def aclose(self) -> None:
        """After the kernel has let go: end prefetches and keep the hints."""
        self._prefetches.cancel_all()
        await self._hints.aclose()

    # --- steps

    def _writable(self) -> WriteRoom:
        if self.room is None:
            raise ReadOnlyError("this mount only reads")
        return self.room

    def _owners_denied(self) -> None:
        self.reports.notes.append(
            "what users create belongs to the daemon's identity: the source does not let it give files to others"
        )

    def _drop_pages(self, number: int) -> None:
        self.pages_are_stale(number)
