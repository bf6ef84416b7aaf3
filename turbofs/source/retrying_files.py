"""Open files, writers and listings of the retrying source."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio

from turbofs.errors import (
    DeadlineExceededError,
    IsADirectoryTurboError,
    NotADirectoryTurboError,
    NotFoundError,
    ShortReadError,
    SourceUnavailableError,
    StaleFileError,
    TurboError,
)
from turbofs.model import Change, DirectoryEntry, FileVersion
from turbofs.source.base import Listing, SourceFile, SourceWriter
from turbofs.source.checks import require_range
from turbofs.source.retries import SLOWEST_BYTES_PER_S, Retrier

SHORT_READS = 5
"""A file whose source ends early this many times in one read is damaged, not late."""
GOODBYE_S = 5.0
"""Closing is courtesy to the source: it may take this long, whatever the source does."""


class RetryingFile(SourceFile):
    """Reads again where that may help: first through the same handle, then through one opened anew by path.

    The new handle counts only if it proves to be the same version; else the file is stale.
    """

    def __init__(
        self, file: SourceFile, path: str, retrier: Retrier, reopen: Callable[[], Awaitable[SourceFile]]
    ) -> None:
        self._handle = _Handle(file)
        self._path = path
        self._retrier = retrier
        self._reopen = reopen
        self._reopening = trio.Lock()
        self._closed = False
        self.version = file.version

    async def read_into(self, offset: int, buffer: memoryview) -> int:
        read = _Read(self, offset, buffer)
        try:
            return await self._retrier.run("read", self._path, read.attempt, carries_bytes=len(buffer))
        except DeadlineExceededError as error:
            if isinstance(error.__cause__, ShortReadError):
                raise error.__cause__ from None
            raise

    async def refresh(self) -> FileVersion:
        async def attempt() -> FileVersion:
            async with self._handle as file:
                return await file.refresh()

        self.version = await self._retrier.run("look at", self._path, attempt)
        return self.version

    async def aclose(self) -> None:
        self._closed = True
        await self._handle.retire()

    async def read_once(self, offset: int, buffer: memoryview) -> int:
        """One attempt; a count that leaves bytes out becomes ShortReadError."""
        expected = require_range(offset, len(buffer), self.version.size)
        async with self._handle as file:
            count = await file.read_into(offset, buffer)
        if count < expected:
            raise ShortReadError(f"{self._path} ended at {offset + count} of {self.version.size} bytes")
        return count

    @property
    def handle(self) -> _Handle:
        return self._handle

    async def replace_handle(self, broken: _Handle) -> None:
        """Open the file anew, unless somebody has done it since *broken* was in use. Raises StaleFileError."""
        async with self._reopening:
            if self._handle is not broken:
                return
            if self._closed:
                raise StaleFileError(f"{self._path} was closed while it was read")
            try:
                file = await self._reopen()
            except (NotFoundError, NotADirectoryTurboError, IsADirectoryTurboError) as error:
                raise StaleFileError(f"{self._path} is gone, and the handle that was open on it fails") from error
            if self._closed:  # by its owner, while read-ahead still failed: nobody would close what was opened now
                await _say_goodbye(file.aclose)
                raise StaleFileError(f"{self._path} was closed while it was read")
            if not self._is_same(file.version):
                await _say_goodbye(file.aclose)
                if self.version.strong and not file.version.strong:
                    raise SourceUnavailableError(f"the source cannot tell now whether {self._path} is the same file")
                raise StaleFileError(f"{self._path} is another version now, and the handle that was open on it fails")
            self._handle = _Handle(file)
        await broken.retire()

    def _is_same(self, version: FileVersion) -> bool:
        if self.version.strong and not version.strong:
            return False
        return self.version.compare(version) is Change.SAME or self.version.keeps_bytes(version)


class _Read:
    """The attempts of one read."""

    def __init__(self, file: RetryingFile, offset: int, buffer: memoryview) -> None:
        self._file = file
        self._offset = offset
        self._buffer = buffer
        self._failures = 0
        self._short = 0
        self._failed_on: _Handle | None = None

    async def attempt(self) -> int:
        if self._failures > 1 and self._failed_on is self._file.handle:
            await self._file.replace_handle(self._failed_on)
        self._failed_on = self._file.handle
        self._failures += 1  # counted before, so that an attempt that is cut off counts too
        try:
            return await self._file.read_once(self._offset, self._buffer)
        except ShortReadError as error:
            self._short += 1
            if self._short >= SHORT_READS:
                error.transient = False
            raise


class _Handle:
    """An open file of the source inside, closed when it is retired and its last reader has left."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._users = 0
        self._retired = False
        self._closed = False

    async def __aenter__(self) -> SourceFile:
        self._users += 1
        return self._file

    async def __aexit__(self, *_: object) -> None:
        self._users -= 1
        await self._close_if_idle()

    async def retire(self) -> None:
        self._retired = True
        await self._close_if_idle()

    async def _close_if_idle(self) -> None:
        if self._retired and not self._users and not self._closed:
            self._closed = True
            await _say_goodbye(self._file.aclose)


class RetryingWriter(SourceWriter):
    """Syncs and completes again where that may help. A write is never repeated: half of it may have arrived."""

    def __init__(self, writer: SourceWriter, path: str, retrier: Retrier) -> None:
        self._writer = writer
        self._path = path
        self._retrier = retrier
        self._failure: TurboError | None = None

    async def write(self, data: memoryview) -> None:
        self._check()
        until = self._retrier.deadline() + len(data) / SLOWEST_BYTES_PER_S
        self._failure = DeadlineExceededError(f"writing {self._path} was cut off: what arrived is not known")
        with trio.move_on_at(until):
            try:
                await self._writer.write(data)
                self._failure = None
            except TurboError as error:
                self._failure = error
                raise
        self._check()

    async def sync(self) -> None:
        self._check()
        await self._retrier.run("sync", self._path, self._writer.sync)

    async def aclose(self) -> None:
        self._check()
        await self._retrier.run("complete", self._path, self._writer.aclose)

    async def abort(self) -> None:
        await _say_goodbye(self._writer.abort)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


class RetryingListing(Listing):
    """Lists again from the start where a batch fails, and leaves out what it has given already."""

    def __init__(self, listing: Listing, path: str, retrier: Retrier, reopen: Callable[[], Awaitable[Listing]]) -> None:
        self._listing: Listing | None = listing
        self._path = path
        self._retrier = retrier
        self._reopen = reopen
        self._given: set[str] = set()
        self._again = False
        self._ended = False

    async def next_batch(self) -> Sequence[DirectoryEntry]:
        if self._ended:
            return ()
        batch = await self._retrier.run("list", self._path, self._attempt)
        self._ended = not batch
        self._given.update(entry.name for entry in batch)
        return batch

    async def aclose(self) -> None:
        self._ended = True
        await self._drop()

    async def _attempt(self) -> Sequence[DirectoryEntry]:
        if self._listing is None:
            self._listing = await self._reopen()
            self._again = True
        try:
            while batch := await self._listing.next_batch():
                fresh = [entry for entry in batch if entry.name not in self._given] if self._again else batch
                if fresh:
                    return fresh
        except (TurboError, trio.Cancelled):
            await self._drop()  # what it gave to an attempt that failed is lost with it
            raise
        return ()

    async def _drop(self) -> None:
        listing, self._listing = self._listing, None
        if listing is not None:
            await _say_goodbye(listing.aclose)


async def _say_goodbye(close: Callable[[], Awaitable[None]]) -> None:
    with trio.move_on_after(GOODBYE_S, shield=True):
        await close()
