"""Handles: what an open file or directory is while it is open. A handle has one kind of use, so a wrong one is a type error."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import trio

from turbofs.background import Background
from turbofs.config import ReadConfig
from turbofs.errors import InvalidRequestError, StaleFileError, TurboError
from turbofs.fs.inodes import Inode
from turbofs.fs.virtual import HintMirror
from turbofs.model import Attributes, DirectoryEntry
from turbofs.read.file_reader import FileReader
from turbofs.read.streams import StreamTracker
from turbofs.source.base import Listing, Source
from turbofs.write.staged_file import StagedFile


class ReadHandle:
    """A file open for reading. Several handles share one reader; the streams are each handle's own."""

    __slots__ = ("inode", "kernel_caches", "reader", "tracker")

    def __init__(self, inode: Inode, reader: FileReader, config: ReadConfig, *, kernel_caches: bool = True) -> None:
        self.inode = inode
        self.kernel_caches = kernel_caches
        self.reader = reader
        self.tracker = StreamTracker(config)


class StagedHandle:
    """A file open for writing, or open for reading while it is in staging.

    *direct*: its writes pass the page cache by. *opener* is the process that
    opened it, where that is known; *uid* its user, whose hints hold. *early*: it was acknowledged early when it was opened.
    """

    # fmt: off
    __slots__ = (
        "append", "closed", "direct", "early", "inode", "may_publish", "opener", "sequential", "staged", "uid",
        "writable",
    )
    # fmt: on

    def __init__(
        self,
        inode: Inode,
        staged: StagedFile,
        *,
        writable: bool,
        append: bool,
        direct: bool,
        uid: int,
        opener: int | None,
        early: bool,
    ) -> None:
        self.inode = inode
        self.staged = staged
        self.writable = writable
        self.append = append
        self.direct = direct
        self.uid = uid
        self.opener = opener
        self.early = early
        self.may_publish = writable
        """Whether its close may have something to publish: a file that was made by it, too."""
        self.closed = False
        """The process that opened it has closed it."""
        self.sequential = True
        """Everything was written where the file ended."""


class VirtualHandle:
    """A hidden file's content, as it was when it was opened."""

    __slots__ = ("content", "inode")

    def __init__(self, inode: Inode, content: bytes) -> None:
        self.inode = inode
        self.content = content


class LocalFileHandle:
    """A hidden file whose bytes lie in a local one; *descriptor* is closed with the handle."""

    __slots__ = ("descriptor", "inode")

    def __init__(self, inode: Inode, descriptor: int) -> None:
        self.inode = inode
        self.descriptor = descriptor


class _NextBatch:
    """The batch after the one that is being handed out, fetched meanwhile in a task of *background*."""

    def __init__(self, listing: Listing, background: Background) -> None:
        self.asked_at = time.monotonic()
        self._entries: Sequence[DirectoryEntry] | None = None
        self.error: TurboError | None = None
        self._ended = trio.Event()
        self._scope = trio.CancelScope()
        background.start_soon(self._fetch, listing)

    async def _fetch(self, listing: Listing) -> None:
        try:
            with self._scope:
                self._entries = await listing.next_batch()
        except TurboError as error:
            self.error = error
        finally:
            self._ended.set()

    async def take(self) -> Sequence[DirectoryEntry]:
        await self._ended.wait()
        if self.error is not None:
            raise self.error
        if self._entries is None:
            raise TurboError("the listing was cut off")  # an empty batch would say that the directory ends here
        return self._entries

    async def aclose(self) -> None:
        self._scope.cancel()
        await self._ended.wait()


class DirectoryHandle:
    """A directory being listed. An entry's offset is its place in this handle's list, which only grows: offsets are
    stable whatever happens to the directory, and a listing always ends.

    Attributes of entries that were passed are let go; who seeks back to them has them looked up again.
    """

    def __init__(self, inode: Inode, fixed: Sequence[DirectoryEntry] | None = None) -> None:
        self.inode = inode
        self.lock = trio.Lock()
        """One readdir at a time: two would take the same batch."""
        self._names: list[str] = []
        self._attributes: list[Attributes | None] = []
        self._kept_from = 0
        self._listing: Listing | None = None
        self._next: _NextBatch | None = None
        self._complete = fixed is not None
        self.batch_at = 0.0
        """When the source was asked for the newest batch, on time.monotonic's clock."""
        for entry in fixed or ():
            self._names.append(entry.name)
            self._attributes.append(entry.attributes)

    async def rewind(self) -> None:
        """Start over: what is listed from the beginning again is the directory as it is now."""
        await self.aclose()
        self._names.clear()
        self._attributes.clear()
        self._kept_from = 0
        self._complete = False

    async def next_batch(self, source: Source, background: Background) -> Sequence[DirectoryEntry]:
        """Take the next batch from the source into the list, and ask for the one after it; empty at the end."""
        if self._complete:
            return ()
        if self._listing is None:
            mirror = self.inode.virtual
            path = mirror.path if isinstance(mirror, HintMirror) else self.inode.path
            self._listing = await source.list(path)
        if self._next is None:
            self._next = _NextBatch(self._listing, background)
        following = self._next
        try:
            batch = await following.take()
        except TurboError:
            if following.error is not None:
                self._next = None  # who tries again asks the source again
            raise
        self.batch_at = following.asked_at
        self._next = _NextBatch(self._listing, background) if batch else None
        if not batch:
            self._complete = True
            await self.aclose()
            return ()
        for index in range(self._kept_from, len(self._attributes)):
            self._attributes[index] = None
        self._kept_from = len(self._attributes)
        self._names.extend(entry.name for entry in batch)
        self._attributes.extend(entry.attributes for entry in batch)
        return batch

    def __len__(self) -> int:
        return len(self._names)

    def at(self, index: int) -> tuple[str, Attributes | None]:
        return self._names[index], self._attributes[index]

    async def aclose(self) -> None:
        if self._next is not None:
            await self._next.aclose()
            self._next = None
        if self._listing is not None:
            listing, self._listing = self._listing, None
            await listing.aclose()


FileHandle = ReadHandle | StagedHandle | VirtualHandle | LocalFileHandle
Handle = FileHandle | DirectoryHandle


class HandleTable:
    """Numbers for handles, as the kernel keeps them."""

    def __init__(self) -> None:
        self._handles: dict[int, Handle] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._handles)

    def add(self, handle: Handle) -> int:
        number = next(self._numbers)
        self._handles[number] = handle
        return number

    def open_on(self, inode: Inode) -> int:
        """How many handles *inode* has: its own count also holds whoever is just looking."""
        return sum(handle.inode is inode for handle in self._handles.values())

    def file(self, number: int) -> FileHandle:
        handle = self._get(number)
        if isinstance(handle, DirectoryHandle):
            raise InvalidRequestError(f"handle {number} is a directory")
        return handle

    def directory(self, number: int) -> DirectoryHandle:
        handle = self._get(number)
        if not isinstance(handle, DirectoryHandle):
            raise InvalidRequestError(f"handle {number} is not a directory")
        return handle

    def remove(self, number: int) -> Handle:
        handle = self._get(number)
        del self._handles[number]
        return handle

    def _get(self, number: int) -> Handle:
        try:
            return self._handles[number]
        except KeyError:
            raise StaleFileError(f"handle {number} is not open") from None
