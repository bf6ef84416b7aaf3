"""One staged file on its way to the source: front to back, through one writer."""

from __future__ import annotations

from collections.abc import Callable

import trio
from blake3 import blake3

from turbofs.model import Attributes, FileVersion, join
from turbofs.source.base import SourceWriter
from turbofs.source.orphans import temporary_name
from turbofs.write.staged_file import StagedFile


class Slots:
    """How many uploads hold a piece in memory at a time: *count* of at most *piece_bytes* each."""

    def __init__(self, count: int, piece_bytes: int) -> None:
        self.piece_bytes = piece_bytes
        self.free = trio.Semaphore(count)


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
        """What the source said of the temporary file, right before it took its name or when it was complete."""
        self.attributes: Attributes | None = None
        """The same, with all that goes with it."""
        self._hasher = blake3() if not position else None

    @property
    def digest(self) -> str | None:
        """BLAKE3 of all that was uploaded, where it began at the file's beginning."""
        return self._hasher.hexdigest() if self._hasher is not None else None

    async def advance(self, stop: int, slots: Slots, progress: Callable[[int], None]) -> None:
        """Send bytes up to *stop*. After an error the upload is spoiled: how much arrived is not known."""
        if self.position >= stop or self._writer is None:
            return
        async with slots.free:
            while self.position < stop and not self.file.unlinked:
                length = min(slots.piece_bytes, stop - self.position)
                piece = await self.file.read_piece(self.position, length, self._hasher)
                await self._writer.write(memoryview(piece))  # a view of all of it is sent without another copy
                self.position += length
                progress(length)

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
