"""`file:///PATH`: a local tree through system calls in threads.

Names are bytes underneath (PEP 383). No path leaves the root and no link is followed: links are shown, and whoever
uses the mount resolves them. Versions are device, inode, size, mtime and ctime. Kernels before 6.13 stamp times with
a clock that ticks every 4 ms or so; there two changes within one tick look like one.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import trio

from turbofs.config import SourceConfig
from turbofs.errors import (
    InvalidRequestError,
    IsADirectoryTurboError,
    NotSupportedError,
    SourceUnavailableError,
    StaleFileError,
)
from turbofs.model import AttributeChange, Attributes, Change, FileVersion, Space
from turbofs.source.at_calls import parent_of, rename_no_replace, sync_directory
from turbofs.source.base import Capability, Listing, Source, SourceFile, SourceWriter
from turbofs.source.local_files import LocalFile, LocalListing, LocalTarget, LocalWriter, attributes_of, version_of
from turbofs.source.orphans import temporary_name
from turbofs.source.os_errors import translated
from turbofs.source.threads import abandonable
from turbofs.source.uri import parse_source_uri

T = TypeVar("T")

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_WRITE_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_LIST_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class FileSource(Source):
    """The tree under one directory of this machine."""

    capabilities = frozenset(Capability) - {Capability.REPLICATION, Capability.BLOCK_LOCATIONS}

    def __init__(
        self,
        uri: str,
        config: SourceConfig,
        limiter: trio.CapacityLimiter,
    ) -> None:
        self.uri = uri
        self._top = parse_source_uri(uri).path
        self._limiter = limiter
        self._root: int | None = None

    async def connect(self) -> None:
        if self._root is None:
            open_root = partial(os.open, self._top, os.O_PATH | os.O_DIRECTORY)
            self._root = await self._call("open the source's root", self._top, open_root, dispose=os.close)

    async def aclose(self) -> None:
        root, self._root = self._root, None
        if root is not None:
            os.close(root)
        await trio.lowlevel.checkpoint()

    # --- reading

    async def stat(self, path: str) -> Attributes:
        return attributes_of(await self._call("stat", path, partial(self._lstat, path)))

    async def list(self, path: str) -> Listing:
        return await self._call("list", path, partial(self._list, path), dispose=LocalListing.close)

    async def open(self, path: str) -> SourceFile:
        return await self._call("open", path, partial(self._open_file, path), dispose=LocalFile.close)

    async def open_local(self, path: str, version: FileVersion) -> int:
        return await self._call("open", path, partial(self._open_version, path, version), dispose=os.close)

    async def readlink(self, path: str) -> str:
        return await self._call("read the link", path, partial(self._readlink, path))

    async def space(self) -> Space:
        status = await self._call("ask for the space of", "/", lambda: os.fstatvfs(self._root_fd()))
        return Space(
            total_bytes=status.f_blocks * status.f_frsize,
            free_bytes=status.f_bavail * status.f_frsize,
            total_files=status.f_files or None,  # file systems without a fixed number of inodes say 0
            free_files=status.f_favail if status.f_files else None,
        )

    # --- writing

    async def create(self, path: str, *, mode: int = 0o644, replace: bool = False) -> SourceWriter:
        make = partial(self._create_anew if replace else self._create, path, mode)
        target = await self._call("create", path, make, dispose=LocalTarget.close)
        return LocalWriter(target, path, self._limiter, new=True)

    async def append(self, path: str) -> SourceWriter:
        target = await self._call("append to", path, partial(self._open_to_append, path), dispose=LocalTarget.close)
        return LocalWriter(target, path, self._limiter, new=False)

    async def rename(self, old: str, new: str, *, replace: bool, identity: FileVersion | None = None) -> None:
        await self._call(f"rename {old} to", new, partial(self._rename, old, new, replace=replace))

    async def delete(self, path: str) -> None:
        await self._call("delete", path, partial(self._delete, path))

    async def delete_directory(self, path: str) -> None:
        await self._call("delete the directory", path, partial(self._delete_directory, path))

    async def make_directory(self, path: str, *, mode: int = 0o755) -> None:
        await self._call("make the directory", path, partial(self._make_directory, path, mode))

    async def make_symlink(self, path: str, target: str) -> None:
        await self._call("make the link", path, partial(self._make_symlink, path, target))

    async def set_attributes(self, path: str, change: AttributeChange) -> None:
        await self._call("change the attributes of", path, partial(self._set_attributes, path, change))

    # --- the same in threads

    async def _call(
        self, act: str, path: str, function: Callable[[], T], *, dispose: Callable[[T], object] | None = None
    ) -> T:
        with translated(act, path):
            return await abandonable(self._limiter, function, dispose=dispose)

    def _root_fd(self) -> int:
        if self._root is None:
            raise SourceUnavailableError(f"{self.uri} is not connected", advice="connect() comes first")
        return self._root

    def _lstat(self, path: str) -> os.stat_result:
        with parent_of(self._root_fd(), path) as (parent, name):
            return os.stat(name, dir_fd=parent, follow_symlinks=False)

    def _list(self, path: str) -> LocalListing:
        with parent_of(self._root_fd(), path) as (parent, name):
            fd = os.open(name, _LIST_FLAGS, dir_fd=parent)
        try:
            entries = os.scandir(fd)
        except BaseException:
            os.close(fd)
            raise

        def close() -> None:
            entries.close()
            os.close(fd)  # scandir has its own duplicate, and looks entries up through this one

        return LocalListing(entries, close, path, self._limiter)

    def _open(self, path: str, flags: int) -> int:
        with parent_of(self._root_fd(), path) as (parent, name):
            return _open_at(parent, name, path, flags)

    def _open_to_append(self, path: str) -> LocalTarget:
        with parent_of(self._root_fd(), path) as (parent, name):
            return _target(_open_at(parent, name, path, _WRITE_FLAGS), parent, name)

    def _open_version(self, path: str, version: FileVersion) -> int:
        fd = self._open(path, _READ_FLAGS)
        try:
            if version.compare(version_of(os.fstat(fd))) is not Change.SAME:
                raise StaleFileError(f"{path} was changed or replaced just now")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _open_file(self, path: str) -> LocalFile:
        return LocalFile(self._open(path, _READ_FLAGS), path, self._limiter)

    def _readlink(self, path: str) -> str:
        with parent_of(self._root_fd(), path) as (parent, name):
            return os.readlink(name, dir_fd=parent)

    def _create(self, path: str, mode: int) -> LocalTarget:
        with parent_of(self._root_fd(), path) as (parent, name):
            return _target(_new_file(parent, name, mode), parent, name)

    def _create_anew(self, path: str, mode: int) -> LocalTarget:
        """A new inode takes the name in one step: whoever has the old file open keeps reading that one."""
        with parent_of(self._root_fd(), path) as (parent, name):
            temporary = temporary_name()
            fd = _new_file(parent, temporary, mode)
            try:
                os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
            except BaseException:
                os.close(fd)
                os.unlink(temporary, dir_fd=parent)
                raise
            return _target(fd, parent, name)

    def _rename(self, old: str, new: str, *, replace: bool) -> None:
        if new.startswith(old.rstrip("/") + "/"):
            raise InvalidRequestError(f"cannot rename {old} into itself, {new}", advice="choose a target outside it")
        root = self._root_fd()
        with parent_of(root, old) as (old_parent, old_name), parent_of(root, new) as (new_parent, new_name):
            if replace:
                os.rename(old_name, new_name, src_dir_fd=old_parent, dst_dir_fd=new_parent)
            else:
                try:
                    rename_no_replace(old_name, old_parent, new_name, new_parent)
                except OSError as error:
                    if error.errno == errno.EINVAL:
                        raise NotSupportedError(f"this file system cannot rename {old} without replacing") from error
                    raise
            sync_directory(new_parent)
            if not os.path.samestat(os.fstat(old_parent), os.fstat(new_parent)):
                sync_directory(old_parent)

    def _delete(self, path: str) -> None:
        with parent_of(self._root_fd(), path) as (parent, name):
            os.unlink(name, dir_fd=parent)

    def _delete_directory(self, path: str) -> None:
        with parent_of(self._root_fd(), path) as (parent, name):
            os.rmdir(name, dir_fd=parent)

    def _make_directory(self, path: str, mode: int) -> None:
        with parent_of(self._root_fd(), path) as (parent, name):
            os.mkdir(name, mode, dir_fd=parent)
            _change_mode(parent, name, mode)  # mkdir took the umask off
            sync_directory(parent)

    def _make_symlink(self, path: str, target: str) -> None:
        with parent_of(self._root_fd(), path) as (parent, name):
            os.symlink(target, name, dir_fd=parent)

    def _set_attributes(self, path: str, change: AttributeChange) -> None:
        with parent_of(self._root_fd(), path) as (parent, name):
            now = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if change.owner is not None or change.group is not None:
                uid = -1 if change.owner is None else _number(change.owner, _uid_of)
                gid = -1 if change.group is None else _number(change.group, _gid_of)
                os.chown(name, uid, gid, dir_fd=parent, follow_symlinks=False)
            if change.mode is not None:  # after chown, which takes set-user-id off
                if stat.S_ISLNK(now.st_mode):
                    raise NotSupportedError(f"{path} is a link: links have no mode of their own")
                _change_mode(parent, name, change.mode)
            if change.atime_ns is not None or change.mtime_ns is not None:
                atime_ns = now.st_atime_ns if change.atime_ns is None else change.atime_ns
                mtime_ns = now.st_mtime_ns if change.mtime_ns is None else change.mtime_ns
                os.utime(name, ns=(atime_ns, mtime_ns), dir_fd=parent, follow_symlinks=False)


def _open_at(parent: int, name: str, path: str, flags: int) -> int:
    # Opening a device or a pipe may do things; O_NONBLOCK only covers a change between these two calls.
    _require_file(os.stat(name, dir_fd=parent, follow_symlinks=False), path)
    fd = os.open(name, flags, dir_fd=parent)
    try:
        _require_file(os.fstat(fd), path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _target(fd: int, parent: int, name: str) -> LocalTarget:
    """Takes *fd* over, and a duplicate of *parent*."""
    try:
        return LocalTarget(fd, os.dup(parent), name)
    except BaseException:
        os.close(fd)
        raise


def _require_file(status: os.stat_result, path: str) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryTurboError(f"{path} is a directory")
    if stat.S_ISLNK(status.st_mode):
        raise InvalidRequestError(f"{path} is a link, not a file", advice="links are resolved by who follows them")
    raise NotSupportedError(
        f"{path} is a pipe, socket or device", advice="such files only mean something on the machine that has them"
    )


def _new_file(parent: int, name: str, mode: int) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    fd = os.open(name, flags, 0o600, dir_fd=parent)
    try:
        os.fchmod(fd, mode)  # exactly what was asked for: the umask was the caller's to apply
    except BaseException:
        os.close(fd)
        raise
    return fd


def _change_mode(parent: int, name: str, mode: int) -> None:
    # chmod without following links does not exist on Linux; a descriptor's name in /proc is the way around.
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{fd}", mode & 0o7777)
    finally:
        os.close(fd)


def _number(identity: str | int, look_up: Callable[[str], int]) -> int:
    if isinstance(identity, int):
        return identity
    try:
        return int(identity) if identity.isdecimal() else look_up(identity)
    except KeyError:
        raise InvalidRequestError(
            f"this machine knows no user or group {identity!r}", advice="give its number, or create it"
        ) from None


def _uid_of(name: str) -> int:
    return pwd.getpwnam(name).pw_uid


def _gid_of(name: str) -> int:
    return grp.getgrnam(name).gr_gid
