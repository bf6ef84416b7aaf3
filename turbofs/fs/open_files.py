"""Open files by handle number: what the kernel asks of a file that is open, sent to whoever serves that kind of handle.

A file is read from the source through its cache, from staging while this mount writes it, or from memory where the mount
makes it. A handle that was opened for reading follows a file that is written afterwards: its inode says so.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import NamedTuple

import trio

from turbofs.errors import (
    AlreadyExistsError,
    BadDescriptorError,
    NotSupportedError,
    ReadOnlyError,
)
from turbofs.fs.files import FileOpener
from turbofs.fs.handles import HandleTable, LocalFileHandle, ReadHandle, StagedHandle, VirtualHandle
from turbofs.fs.inodes import Inode
from turbofs.fs.tree import Tree
from turbofs.fs.virtual import VirtualBytes, VirtualFile
from turbofs.fs.write_room import WriteRoom
from turbofs.fs.xattrs import ExtendedAttributes
from turbofs.metrics import Metrics
from turbofs.model import Caller


class Opened(NamedTuple):
    """An open file's handle number, and how the kernel may cache it."""

    handle: int
    keep_cache: bool
    direct_io: bool


class OpenFiles:
    """The files that are open. *room* is there where the mount writes."""

    def __init__(
        self,
        tree: Tree,
        opener: FileOpener,
        handles: HandleTable,
        xattrs: ExtendedAttributes,
        room: WriteRoom | None,
        metrics: Metrics,
        pages_are_stale: Callable[[int], None],
    ) -> None:
        self._tree = tree
        self._opener = opener
        self._handles = handles
        self._xattrs = xattrs
        self._room = room
        self._metrics = metrics
        self._pages_are_stale = pages_are_stale

    async def open(self, number: int, flags: int, caller: Caller) -> Opened:
        inode = self._tree.table.get(number)
        writes = flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC
        if inode.virtual is not None:
            if writes:
                raise ReadOnlyError("hidden files cannot be written", advice="see .turbofs/README")
            if isinstance(inode.virtual, VirtualBytes):
                local = LocalFileHandle(inode, inode.virtual.open())
                inode.open_handles += 1
                return Opened(self._handles.add(local), keep_cache=False, direct_io=False)
            content = inode.virtual.render() if isinstance(inode.virtual, VirtualFile) else b""
            inode.open_handles += 1
            return Opened(self._handles.add(VirtualHandle(inode, content)), keep_cache=False, direct_io=True)
        if writes or self._is_staged(inode):
            handle = await self._writable().writing.open(inode, flags, caller)
            return Opened(self._handles.add(handle), keep_cache=False, direct_io=handle.direct)
        return await self._open_for_reading(inode, flags, caller)

    async def create(
        self, parent_number: int, name: str, mode: int, flags: int, caller: Caller
    ) -> tuple[Inode, Opened]:
        """Make a file and open it, or open what has the name (unless *flags* have O_EXCL); one lookup more of it."""
        writing = self._writable().writing
        parent = self._tree.table.get(parent_number)
        self._writable().changes.require_new(parent, name)
        try:
            handle = await writing.create(parent, name, mode, flags, caller)
        except AlreadyExistsError:
            if flags & os.O_EXCL:
                raise
            inode = await self._tree.lookup(parent_number, name, caller)
            return inode, await self.open(inode.number, flags, caller)
        handle.inode.lookups += 1
        opened = Opened(self._handles.add(handle), keep_cache=False, direct_io=handle.direct)
        return handle.inode, opened

    async def mknod(self, parent_number: int, name: str, mode: int, caller: Caller) -> Inode:
        """mknod(2) of a regular file; the other kinds are not for a shared tree."""
        self._writable()
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
        if isinstance(handle, LocalFileHandle):
            return await trio.to_thread.run_sync(os.pread, handle.descriptor, length, offset)
        if isinstance(handle, StagedHandle):
            return await handle.staged.read(offset, length)
        if handle.inode.staged is not None:
            return await handle.inode.staged.read(offset, length)
        before = handle.reader.version
        found = await handle.reader.read(handle.tracker, offset, length, kernel_caches=handle.kernel_caches)
        if handle.reader.version is not before and not before.keeps_bytes(handle.reader.version):
            self._pages_are_stale(handle.inode.number)
        return found

    async def write(self, handle_number: int, offset: int, data: bytes) -> int:
        """Write all of *data* to staging; returns how many bytes that are. Raises OutOfSpaceError."""
        await self._writable().writing.write(self._staged_handle(handle_number), offset, data)
        self._metrics.bytes_written(len(data))
        return len(data)

    async def flush(self, handle_number: int) -> None:
        """A descriptor of the handle was closed."""
        handle = self._handles.file(handle_number)
        if isinstance(handle, StagedHandle):
            await self._writable().writing.flush(handle)

    async def fsync(self, handle_number: int) -> None:
        handle = self._handles.file(handle_number)
        if isinstance(handle, StagedHandle):
            await self._writable().writing.fsync(handle)

    async def release(self, handle_number: int) -> None:
        handle = self._handles.file(handle_number)
        self._handles.remove(handle_number)
        if isinstance(handle, StagedHandle):
            await self._writable().writing.release(handle)
        elif isinstance(handle, ReadHandle):
            if handle.kernel_caches:
                handle.inode.caching_handles -= 1
            await self._opener.close(handle)
            if self._room is not None:
                await self._room.writing.settle(handle.inode)
                self._room.forget_parked(handle.inode)
        else:
            if isinstance(handle, LocalFileHandle):
                os.close(handle.descriptor)
            self._tree.give_back(handle.inode)

    def outstanding_bytes(self, handle_number: int) -> int:
        """What a close of this handle may have to carry to the source: it gets time for that."""
        handle = self._handles.file(handle_number)
        if not isinstance(handle, StagedHandle) or self._room is None:
            return 0
        return handle.staged.size + self._room.writes.promised_bytes()

    async def truncate(self, inode: Inode, size: int, handle_number: int | None, caller: Caller) -> None:
        """ftruncate of a handle, or truncate by name where there is none that may write."""
        writing = self._writable().writing
        handle = self._handles.file(handle_number) if handle_number is not None else None
        if isinstance(handle, StagedHandle) and handle.writable:
            await writing.truncate(inode, handle.staged, size)
        else:
            await writing.truncate_by_name(inode, size, caller)

    # --- steps

    async def _open_for_reading(self, inode: Inode, flags: int, caller: Caller) -> Opened:
        handle, keep_pages = await self._opener.open(inode)
        handle.kernel_caches = not flags & os.O_DIRECT
        try:
            await self._xattrs.opened(handle, caller)
        except BaseException:
            await self._opener.close(handle)
            raise
        if handle.kernel_caches:
            inode.caching_handles += 1
        return Opened(self._handles.add(handle), keep_cache=keep_pages, direct_io=False)

    def _is_staged(self, inode: Inode) -> bool:
        room = self._room
        return room is not None and (inode.staged is not None or room.writing.file_at(inode.path) is not None)

    def _writable(self) -> WriteRoom:
        if self._room is None:
            raise ReadOnlyError("this mount only reads")
        return self._room

    def _staged_handle(self, number: int) -> StagedHandle:
        handle = self._handles.file(number)
        if not isinstance(handle, StagedHandle):
            raise BadDescriptorError("the file is not open for writing")
        return handle
