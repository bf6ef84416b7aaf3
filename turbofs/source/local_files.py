"""Open files, writers and listings of a local tree (see `file`)."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import trio

from turbofs.errors import ShortReadError, StaleFileError, TurboError
from turbofs.model import Attributes, Change, DirectoryEntry, FileKind, FileVersion
from turbofs.source.at_calls import sync_directory
from turbofs.source.base import Listing, SourceFile, SourceWriter
from turbofs.source.checks import require_range
from turbofs.source.os_errors import translated
from turbofs.source.threads import Shared, abandonable, to_the_end

BATCH_ENTRIES = 1000
"""A batch costs one hop to a thread; a thousand lstat calls take about 2 ms."""

_KINDS = {stat.S_IFREG: FileKind.FILE, stat.S_IFDIR: FileKind.DIRECTORY, stat.S_IFLNK: FileKind.SYMLINK}


def version_of(status: os.stat_result) -> FileVersion:
    return FileVersion(
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        file_id=f"{status.st_dev}:{status.st_ino}",
        tag=str(status.st_ctime_ns),
    )


def attributes_of(status: os.stat_result) -> Attributes:
    return Attributes(
        kind=_KINDS.get(stat.S_IFMT(status.st_mode), FileKind.OTHER),
        version=version_of(status),
        mode=stat.S_IMODE(status.st_mode),
        owner=status.st_uid,
        group=status.st_gid,
        atime_ns=status.st_atime_ns,
        ctime_ns=status.st_ctime_ns,
        link_count=status.st_nlink,
        block_size=status.st_blksize,
    )


class LocalFile(SourceFile):
    """A descriptor. It reads the file that was opened, past renames and deletion, as long as its bytes stay.

    A change of the ctime alone is forgiven where a new mode, owner, link count or name explains it: nobody rewrites a
    file, sets its time back to the nanosecond and changes one of those by accident.
    """

    def __init__(self, fd: int, path: str, limiter: trio.CapacityLimiter) -> None:
        self._path = path
        self._limiter = limiter
        self._lock = threading.Lock()
        self._seen = os.fstat(fd)
        self._seen_name = _name_of(fd)
        self._shared = Shared(fd, os.close, path)
        self.version = version_of(self._seen)

    async def read_into(self, offset: int, buffer: memoryview) -> int:
        wanted = require_range(offset, len(buffer), self.version.size)
        if not wanted:
            await trio.lowlevel.checkpoint()
            return 0
        # Not abandonable: the thread writes to the caller's buffer. A local read ends, or the machine has a problem.
        await to_the_end(self._limiter, partial(self._read, offset, buffer[:wanted], self.version.size))
        return wanted

    async def refresh(self) -> FileVersion:
        now = await abandonable(self._limiter, self._look)
        if now.st_size > self.version.size:
            self.version = version_of(now)
        return self.version

    def close(self) -> None:
        self._shared.close()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def _read(self, offset: int, buffer: memoryview, size: int) -> None:
        done = 0
        with self._shared.use() as fd, translated("read", self._path):
            while done < len(buffer):
                count = os.preadv(fd, [buffer[done:]], offset + done)
                if not count:
                    break
                done += count
            if self._check(fd).st_size != size:
                # Grown, and perhaps rewritten: what was read may be of either version. `refresh` goes on with the new.
                raise StaleFileError(f"{self._path} grew while it was open")
        if done < len(buffer):
            raise ShortReadError(
                f"{self._path} ended at {offset + done} of {self.version.size} bytes",
                advice="the file system under the source gave less than the file's size; check its disk",
            )

    def _look(self) -> os.stat_result:
        with self._shared.use() as fd, translated("stat", self._path):
            return self._check(fd)

    def _check(self, fd: int) -> os.stat_result:
        """Compare with the last look, so that a change after a growth is seen too. Raises StaleFileError."""
        with self._lock:
            now, seen = os.fstat(fd), self._seen
            change = version_of(seen).compare(version_of(now))
            touched = change is Change.GREW and now.st_size == seen.st_size
            if change is Change.REPLACED or (touched and not self._explained(fd, now)):
                raise StaleFileError(f"{self._path} changed while it was open")
            if change is not Change.SAME:
                self._seen, self._seen_name = now, _name_of(fd)
            return now

    def _explained(self, fd: int, now: os.stat_result) -> bool:
        seen = self._seen
        same = (seen.st_mode, seen.st_uid, seen.st_gid, seen.st_nlink) == (
            now.st_mode,
            now.st_uid,
            now.st_gid,
            now.st_nlink,
        )
        return not same or _name_of(fd) != self._seen_name


def _name_of(fd: int) -> str:
    """The name that the kernel knows a descriptor by, which follows renames; empty where it is too long to be told."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


class LocalTarget(NamedTuple):
    """What a writer holds: the file, open for appending, and the directory and name that it had when it was opened.

    A descriptor of the directory stays right when something above it is renamed.
    """

    fd: int
    directory: int
    name: str

    def close(self) -> None:
        os.close(self.fd)
        os.close(self.directory)

    def sync(self, *, name_too: bool) -> None:
        os.fsync(self.fd)
        if name_too:
            sync_directory(self.directory)

    def remove(self) -> None:
        """Unlink the file, where it still has its name. Raises OSError where that is gone."""
        there = os.stat(self.name, dir_fd=self.directory, follow_symlinks=False)
        if os.path.samestat(os.fstat(self.fd), there):
            os.unlink(self.name, dir_fd=self.directory)


class LocalWriter(SourceWriter):
    """Appends to a file. After a failed sync it keeps failing: the kernel has dropped those pages."""

    def __init__(self, target: LocalTarget, path: str, limiter: trio.CapacityLimiter, *, new: bool) -> None:
        self._path = path
        self._limiter = limiter
        self._shared = Shared(target, LocalTarget.close, path)
        self._new = new
        self._named = False
        self._failure: TurboError | None = None
        self._complete = False

    async def write(self, data: memoryview) -> None:
        await to_the_end(self._limiter, partial(self._guarded, partial(self._write, data)))

    async def sync(self) -> None:
        await to_the_end(self._limiter, partial(self._guarded, self._sync))

    async def aclose(self) -> None:
        if self._complete:
            return
        try:
            await self.sync()
        finally:
            self._shared.close()
        self._complete = True

    async def abort(self) -> None:
        with trio.CancelScope(shield=True):
            if not self._complete and self._new:
                await to_the_end(self._limiter, self._take_back)
            self._shared.close()

    def _guarded(self, act: Callable[[LocalTarget], None]) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            with self._shared.use() as target, translated("write", self._path):
                act(target)
        except TurboError as error:
            self._failure = error
            raise

    def _write(self, data: memoryview, target: LocalTarget) -> None:
        done = 0
        while done < len(data):
            done += os.write(target.fd, data[done:])

    def _sync(self, target: LocalTarget) -> None:
        target.sync(name_too=not self._named)
        self._named = True

    def _take_back(self) -> None:
        try:
            with self._shared.use() as target:
                target.remove()
        except (OSError, TurboError):
            return  # the name is gone already, or is another file's now: there is nothing of ours to take back


class LocalListing(Listing):
    """os.scandir in batches. Entries that vanish between their name and their attributes are left out."""

    def __init__(
        self, entries: Iterator[os.DirEntry[str]], close: Callable[[], None], path: str, limiter: trio.CapacityLimiter
    ) -> None:
        self._path = path
        self._limiter = limiter
        self._shared = Shared(entries, lambda _: close(), path)

    async def next_batch(self) -> Sequence[DirectoryEntry]:
        return await abandonable(self._limiter, self._next)

    def close(self) -> None:
        self._shared.close()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def _next(self) -> list[DirectoryEntry]:
        batch: list[DirectoryEntry] = []
        with self._shared.use() as entries, translated("list", self._path):
            while not batch:
                chunk = list(islice(entries, BATCH_ENTRIES))
                if not chunk:
                    break
                for entry in chunk:
                    try:
                        batch.append(DirectoryEntry(entry.name, attributes_of(entry.stat(follow_symlinks=False))))
                    except FileNotFoundError:
                        continue
        return batch
