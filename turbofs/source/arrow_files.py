"""Open objects, uploads and listings of an object store (see `arrow`)."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import IO, TYPE_CHECKING

import trio

from turbofs.errors import IsADirectoryTurboError, NotFoundError, ShortReadError, StaleFileError, TurboError
from turbofs.model import Change, DirectoryEntry, FileVersion
from turbofs.source.arrow_errors import translated
from turbofs.source.base import Listing, SourceFile, SourceWriter
from turbofs.source.checks import require_range
from turbofs.source.threads import Shared, abandonable, to_the_end

if TYPE_CHECKING:
    from pyarrow import NativeFile

BATCH_ENTRIES = 1000
SPOOL_MEMORY_BYTES = 8 << 20
UPLOAD_BYTES = 8 << 20


class ArrowFile(SourceFile):
    """One object. pyarrow's reads name no version, so the object's version is asked for again after each read.

    Reads that end together share one such request: what counts is that it began after their bytes had come.
    """

    def __init__(
        self,
        file: NativeFile,
        version: FileVersion,
        path: str,
        limiter: trio.CapacityLimiter,
        version_now: Callable[[], Awaitable[FileVersion]],
    ) -> None:
        self.version = version
        self._path = path
        self._limiter = limiter
        self._shared = Shared(file, type(file).close, path)
        self._version_now = version_now
        self._checking = trio.Lock()
        self._begun = 0
        self._passed = 0

    async def read_into(self, offset: int, buffer: memoryview) -> int:
        wanted = require_range(offset, len(buffer), self.version.size)
        if not wanted:
            await trio.lowlevel.checkpoint()
            return 0
        try:
            data = await abandonable(self._limiter, partial(self._read, offset, wanted))
        except TurboError:
            await self._check()  # an object that was replaced by a shorter one fails in strange ways
            raise
        await self._check()
        if len(data) < wanted:
            raise ShortReadError(f"{self._path} ended at {offset + len(data)} of {self.version.size} bytes")
        buffer[:wanted] = data
        return wanted

    async def refresh(self) -> FileVersion:
        await self._check()
        return self.version

    async def aclose(self) -> None:
        self._shared.close()
        await trio.lowlevel.checkpoint()

    def _read(self, offset: int, length: int) -> bytes:
        with self._shared.use() as file, translated("read", self._path):
            return bytes(file.read_at(length, offset))  # type: ignore[call-arg] # the stubs forget the offset

    async def _check(self) -> None:
        """Raises StaleFileError unless the object is still this version at a moment after this call."""
        ticket = self._begun
        async with self._checking:
            if self._passed > ticket:
                return
            self._begun += 1
            number = self._begun
            try:
                now = await self._version_now()
            except (NotFoundError, IsADirectoryTurboError) as error:
                raise StaleFileError(f"{self._path} was deleted while it was open") from error
            if self.version.compare(now) is not Change.SAME:
                raise StaleFileError(f"{self._path} was replaced while it was open")
            self._passed = number


class ArrowWriter(SourceWriter):
    """One object, spooled here and uploaded whole when it is complete.

    pyarrow cannot abandon an upload that has begun (dropping the stream completes it), and half an object must never
    appear; so nothing is sent before the last byte is here.
    """

    def __init__(self, path: str, limiter: trio.CapacityLimiter, open_upload: Callable[[], NativeFile]) -> None:
        self._path = path
        self._limiter = limiter
        self._open_upload = open_upload
        # The spool lives as long as the writer.
        spool: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=SPOOL_MEMORY_BYTES)  # noqa: SIM115
        self._shared = Shared(spool, lambda file: file.close(), path)
        self._lock = threading.Lock()
        self._complete = False

    async def write(self, data: memoryview) -> None:
        await to_the_end(self._limiter, partial(self._spool, data))

    async def aclose(self) -> None:
        if not self._complete:
            await abandonable(self._limiter, self._upload)
        self._shared.close()

    async def abort(self) -> None:
        self._shared.close()
        await trio.lowlevel.checkpoint()

    def _spool(self, data: memoryview) -> None:
        with self._lock, self._shared.use() as spool, translated("keep what is written to", self._path):
            spool.write(data)

    def _upload(self) -> None:
        # A second call comes when the first one's answer was too late: it waits here, and has nothing left to do.
        with self._lock, self._shared.use() as spool, translated("upload", self._path):
            if self._complete:
                return
            spool.seek(0)
            with self._open_upload() as upload:
                while data := spool.read(UPLOAD_BYTES):
                    upload.write(data)
            self._complete = True


class ArrowListing(Listing):
    """Given from memory: pyarrow lists a whole directory at once."""

    def __init__(self, entries: Sequence[DirectoryEntry]) -> None:
        self._entries = entries

    async def next_batch(self) -> Sequence[DirectoryEntry]:
        await trio.lowlevel.checkpoint()
        batch, self._entries = self._entries[:BATCH_ENTRIES], self._entries[BATCH_ENTRIES:]
        return batch

    async def aclose(self) -> None:
        self._entries = ()
        await trio.lowlevel.checkpoint()
