"""One staged file on its way to the source: front to back, through one writer."""

from __future__ import annotations

from collections.abc import Callable

import trio
from blake3 import blake3

from turbofs.model import FileVersion, join
from turbofs.source.base import SourceWriter
from turbofs.source.orphans import temporary_name
from turbofs.write.staged_file import StagedFile


class Buffers:
    """Buffers for uploads, made when they are first needed and used again: at most *count* of *size_bytes* each."""

    def __init__(self, count: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._free = trio.Semaphore(count)
        self._idle: list[bytearray] = []

    async def take(self) -> bytearray:
        """A buffer, once one is free. Give it back."""
        await self._free.acquire()
        return self._idle.pop() if self._idle else bytearray(self.size_bytes)

    def give_back(self, buffer: bytearray) -> None:
        self._idle.append(buffer)
        self._free.release()


class Upload:
    """Bytes [0, `position`) of *file* have gone to *writer*, whose file is called `path` on the source now.

    `named`: that is the final name (an append, or after the first publication). A digest of what went through is kept
    as far as everything did. Without a *writer* it is complete already, from an earlier mount.
    """

    def __init__(
        self, file: StagedFile, writer: SourceWriter | None, path: str, *, position: int = 0, named: bool
    ) -> None:
        self.file = file
        self._writer = writer
        self.path = path
        self.position = position
        self.synced = position
        self.named = named
        self.complete = writer is None
        self.version: FileVersion | None = None
        """What the source says of a completed temporary file."""
        self._hasher = blake3() if not position else None

    @property
    def digest(self) -> str | None:
        """BLAKE3 of all that was uploaded, where it began at the file's beginning."""
        return self._hasher.hexdigest() if self._hasher is not None else None

    async def advance(self, stop: int, buffers: Buffers, progress: Callable[[int], None]) -> None:
        """Send bytes up to *stop*. After an error the upload is spoiled: how much arrived is not known."""
        if self.position >= stop or self._writer is None:
            return
        buffer = await buffers.take()
        try:
            while self.position < stop and not self.file.unlinked:
                piece = memoryview(buffer)[: min(len(buffer), stop - self.position)]
                await self.file.read_into(self.position, piece)
                if self._hasher is not None:
                    await trio.to_thread.run_sync(self._hasher.update, piece)
                await self._writer.write(piece)
                self.position += len(piece)
                progress(len(piece))
        finally:
            buffers.give_back(buffer)

    async def sync(self) -> None:
        """Make what was sent durable."""
        assert self._writer is not None, "a completed upload has nothing to sync"
        await self._writer.sync()
        self.synced = self.position

    async def finish(self) -> None:
        """Complete the file on the source; durable then."""
        if not self.complete and self._writer is not None:
            await self._writer.aclose()
            self.complete = True
            self.synced = self.position

    async def abort(self) -> None:
        """Give up. What has its final name keeps it; a temporary file goes. Never raises."""
        if not self.complete and self._writer is not None:
            await self._writer.abort()


def temporary_beside(directory: str) -> str:
    """The path of a fresh temporary file in *directory*."""
    return join(directory, temporary_name())
