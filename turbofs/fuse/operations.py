"""The FUSE adapter: a request of the kernel becomes a call of the file system, its outcome a reply. It decides nothing.

Every request is bounded by the request deadline, every error becomes an errno, and nothing else ever leaves a method:
an exception that reached pyfuse3 would end the mount. pyfuse3 copies the result of `read` to the kernel before any other
task runs (no await lies between), so a view of the cache is safe to return.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyfuse3
import structlog
import trio

from turbofs.errors import TurboError
from turbofs.fs.filesystem import FileSystem
from turbofs.fs.inodes import Inode
from turbofs.fuse.replies import attribute_change, entry_attributes, statfs_data
from turbofs.model import Caller
from turbofs.source.retries import SLOWEST_BYTES_PER_S

_log = structlog.get_logger(__name__)
_P = ParamSpec("_P")
_R = TypeVar("_R")
_Method = Callable[Concatenate["Operations", _P], Coroutine[Any, Any, _R]]

# Answers that programs provoke all the time: not worth a line in the log.
# fmt: off
_ORDINARY = frozenset({
    errno.ENOENT, errno.ENODATA, errno.ENOTSUP, errno.EROFS, errno.ESTALE, errno.EACCES, errno.ENAMETOOLONG, errno.EEXIST,
    errno.ENOTEMPTY, errno.EPERM, errno.EXDEV, errno.EISDIR, errno.ENOTDIR, errno.EINVAL,
})
# fmt: on


def request(op: str, *, carries_bytes: bool = False) -> Callable[[_Method[_P, _R]], _Method[_P, _R]]:
    """Bound a request by the deadline, count it, and turn whatever it raises into an errno.

    One that *carries_bytes* of its handle (its first argument) to the source gets time for them on top.
    """

    def decorate(method: _Method[_P, _R]) -> _Method[_P, _R]:
        @wraps(method)
        async def run(self: Operations, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            started = time.perf_counter()
            code = 0
            try:
                deadline_s = self.deadline_s
                if carries_bytes:
                    deadline_s += self.filesystem.outstanding_bytes(args[0]) / SLOWEST_BYTES_PER_S  # type: ignore[arg-type]
                with trio.fail_after(deadline_s):
                    return await method(self, *args, **kwargs)
            except trio.TooSlowError as error:
                code = errno.ETIMEDOUT
                _log.warning("request timed out", op=op, deadline_s=round(deadline_s, 1))
                raise pyfuse3.FUSEError(code) from error
            except pyfuse3.FUSEError as error:
                code = error.errno
                raise
            except TurboError as error:
                code = error.errno
                if code not in _ORDINARY:
                    _log.warning("request failed", op=op, errno=errno.errorcode.get(code, code), error=str(error))
                raise pyfuse3.FUSEError(code) from error
            except Exception as error:
                code = errno.EIO
                _log.exception("request failed on a defect of TurboFS", op=op)
                raise pyfuse3.FUSEError(code) from error
            finally:
                self.filesystem.metrics.request_done(op, code, time.perf_counter() - started)

        return run

    return decorate


class Operations(pyfuse3.Operations):
    """pyfuse3's callbacks over *filesystem*."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, filesystem: FileSystem) -> None:
        super().__init__()
        self.filesystem = filesystem
        self.deadline_s = filesystem.config.fs.request_deadline_s
        self._timeout_s = filesystem.config.fs.attribute_timeout_s
        self.initialized = trio.Event()
        """Set while the kernel's INIT request is answered, before anything else can be asked."""

    def init(self) -> None:
        self.initialized.set()

    # --- names

    @request("lookup")
    async def lookup(
        self, parent_inode: pyfuse3.InodeT, name: pyfuse3.FileNameT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._entry(await self.filesystem.lookup(parent_inode, name, _caller(ctx)))

    async def forget(self, inode_list: Sequence[tuple[pyfuse3.InodeT, int]]) -> None:
        try:
            self.filesystem.forget(inode_list)
        except Exception:  # noqa: BLE001  there is no reply that could carry it, and pyfuse3 would end the mount
            _log.exception("forget failed on a defect of TurboFS")

    @request("getattr")
    async def getattr(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return self._entry(await self.filesystem.getattr(inode))

    @request("readlink")
    async def readlink(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> pyfuse3.FileNameT:
        return pyfuse3.FileNameT(await self.filesystem.readlink(inode))

    # --- files

    @request("open")
    async def open(self, inode: pyfuse3.InodeT, flags: pyfuse3.FlagT, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        opened = await self.filesystem.open(inode, flags, _caller(ctx))
        return pyfuse3.FileInfo(
            fh=pyfuse3.FileHandleT(opened.handle), direct_io=opened.direct_io, keep_cache=opened.keep_cache
        )

    @request("read")
    async def read(self, fh: pyfuse3.FileHandleT, off: int, size: int) -> bytes:
        # pyfuse3 takes any contiguous buffer, though it names bytes.
        return await self.filesystem.read(fh, off, size)  # type: ignore[return-value]

    @request("write")
    async def write(self, fh: pyfuse3.FileHandleT, off: int, buf: bytes) -> int:
        return await self.filesystem.write(fh, off, buf)

    @request("flush", carries_bytes=True)
    async def flush(self, fh: pyfuse3.FileHandleT) -> None:
        await self.filesystem.flush(fh)

    @request("release")
    async def release(self, fh: pyfuse3.FileHandleT) -> None:
        await self.filesystem.release(fh)

    @request("fsync", carries_bytes=True)
    async def fsync(self, fh: pyfuse3.FileHandleT, datasync: bool) -> None:
        await self.filesystem.fsync(fh)

    # --- changes

    @request("create")
    async def create(
        self,
        parent_inode: pyfuse3.InodeT,
        name: pyfuse3.FileNameT,
        mode: pyfuse3.ModeT,
        flags: pyfuse3.FlagT,
        ctx: pyfuse3.RequestContext,
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        inode, opened = await self.filesystem.create(parent_inode, name, mode, flags, _caller(ctx))
        info = pyfuse3.FileInfo(
            fh=pyfuse3.FileHandleT(opened.handle), direct_io=opened.direct_io, keep_cache=opened.keep_cache
        )
        return info, self._entry(inode)

    @request("mknod")
    async def mknod(
        self,
        parent_inode: pyfuse3.InodeT,
        name: pyfuse3.FileNameT,
        mode: pyfuse3.ModeT,
        rdev: int,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        return self._entry(await self.filesystem.mknod(parent_inode, name, mode, _caller(ctx)))

    @request("mkdir")
    async def mkdir(
        self,
        parent_inode: pyfuse3.InodeT,
        name: pyfuse3.FileNameT,
        mode: pyfuse3.ModeT,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        return self._entry(await self.filesystem.mkdir(parent_inode, name, mode, _caller(ctx)))

    @request("symlink")
    async def symlink(
        self,
        parent_inode: pyfuse3.InodeT,
        name: pyfuse3.FileNameT,
        target: pyfuse3.FileNameT,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        return self._entry(await self.filesystem.symlink(parent_inode, name, target, _caller(ctx)))

    @request("link")
    async def link(
        self,
        inode: pyfuse3.InodeT,
        new_parent_inode: pyfuse3.InodeT,
        new_name: pyfuse3.FileNameT,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        await self.filesystem.link()
        return self._entry(await self.filesystem.getattr(inode))

    @request("unlink")
    async def unlink(self, parent_inode: pyfuse3.InodeT, name: pyfuse3.FileNameT, ctx: pyfuse3.RequestContext) -> None:
        await self.filesystem.unlink(parent_inode, name)

    @request("rmdir")
    async def rmdir(self, parent_inode: pyfuse3.InodeT, name: pyfuse3.FileNameT, ctx: pyfuse3.RequestContext) -> None:
        await self.filesystem.rmdir(parent_inode, name)

    @request("rename")
    async def rename(
        self,
        parent_inode_old: pyfuse3.InodeT,
        name_old: pyfuse3.FileNameT,
        parent_inode_new: pyfuse3.InodeT,
        name_new: pyfuse3.FileNameT,
        flags: pyfuse3.FlagT,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        await self.filesystem.rename(parent_inode_old, name_old, parent_inode_new, name_new, flags)

    @request("setattr")
    async def setattr(
        self,
        inode: pyfuse3.InodeT,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: pyfuse3.FileHandleT | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        size = attr.st_size if fields.update_size else None
        found = await self.filesystem.setattr(inode, attribute_change(attr, fields), size, fh, _caller(ctx))
        return self._entry(found)

    # --- directories

    @request("opendir")
    async def opendir(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> pyfuse3.FileHandleT:
        return pyfuse3.FileHandleT(await self.filesystem.opendir(inode, _caller(ctx)))

    @request("readdir")
    async def readdir(self, fh: pyfuse3.FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        entry = pyfuse3.EntryAttributes()
        owners: dict[tuple[str | int, str | int], tuple[int, int]] = {}  # few in one directory, however long it is

        def emit(name: bytes, inode: Inode, next_id: int) -> bool:
            attributes = inode.attributes
            key = (attributes.owner, attributes.group)
            ids = owners.get(key)
            if ids is None:
                ids = owners[key] = self.filesystem.tree.owner_of(attributes)
            entry_attributes(inode, ids[0], ids[1], self._timeout_s, entry)
            return pyfuse3.readdir_reply(token, name, entry, next_id)

        await self.filesystem.readdir(fh, start_id, emit)

    @request("releasedir")
    async def releasedir(self, fh: pyfuse3.FileHandleT) -> None:
        await self.filesystem.releasedir(fh)

    @request("fsyncdir")
    async def fsyncdir(self, fh: pyfuse3.FileHandleT, datasync: bool) -> None:
        await self.filesystem.fsyncdir(fh)

    # --- extended attributes

    @request("setxattr")
    async def setxattr(
        self, inode: pyfuse3.InodeT, name: pyfuse3.XAttrNameT, value: bytes, ctx: pyfuse3.RequestContext
    ) -> None:
        await self.filesystem.setxattr(inode, name, value, _caller(ctx))

    @request("getxattr")
    async def getxattr(self, inode: pyfuse3.InodeT, name: pyfuse3.XAttrNameT, ctx: pyfuse3.RequestContext) -> bytes:
        return await self.filesystem.getxattr(inode, name, _caller(ctx))

    @request("listxattr")
    async def listxattr(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> Sequence[pyfuse3.XAttrNameT]:
        names = await self.filesystem.listxattr(inode, _caller(ctx))
        return [pyfuse3.XAttrNameT(name) for name in names]

    @request("removexattr")
    async def removexattr(self, inode: pyfuse3.InodeT, name: pyfuse3.XAttrNameT, ctx: pyfuse3.RequestContext) -> None:
        await self.filesystem.removexattr(inode, name, _caller(ctx))

    # --- the mount as a whole

    @request("statfs")
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        return statfs_data(self.filesystem.statfs())

    def _entry(self, inode: Inode) -> pyfuse3.EntryAttributes:
        uid, gid = self.filesystem.tree.owner_of(inode.attributes)
        return entry_attributes(inode, uid, gid, self._timeout_s)


def _caller(ctx: pyfuse3.RequestContext) -> Caller:
    return Caller(ctx.uid, ctx.gid, ctx.pid)
