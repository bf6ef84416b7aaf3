"""One staged file on its way to the source: front to back, through one writer."""

from __future__ import annotations

from collections.abc import Callable

import outcome
import trio
from blake3 import blake3

from turbofs.model import Attributes, FileVersion, join
from turbofs.source.base import SourceWriter
from turbofs.source.orphans import temporary_name
from turbofs.write.staged_file import StagedFile


class Slots:
    """How many uploads hold pieces in memory at a time: *count*, each two of at most *piece_bytes*."""

    def __init__(self, count: int, piece_bytes: int) -> None:
        self.piece_bytes = piece_bytes
        self.free = trio.Semaphore(count)


class _Sending:
    """One piece on its way. Its error is kept, so that it comes out as what it is, and not in a group."""

    def __init__(self, writer: SourceWriter, piece: bytes) -> None:
        self._writer = writer
        self._piece = piece
        self._outcome: outcome.Outcome[None] | None = None

    async def run(self) -> None:
        # A view of all of a bytes object is sent without another copy.
        self._outcome = await outcome.acapture(self._writer.write, memoryview(self._piece))

    def check(self) -> None:
        assert self._outcome is not None
        self._outcome.unwrap()


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
            piece = await self._piece(stop, slots)
            while piece:
                # The next piece is read and hashed while this one is sent.
                async with trio.open_nursery() as nursery:
                    sending = _Sending(self._writer, piece)
                    nursery.start_soon(sending.run)
                    following = await outcome.acapture(self._piece, stop, slots, len(piece))
                sending.check()
                self.position += len(piece)
                progress(len(piece))
                piece = following.unwrap()

    async def _piece(self, stop: int, slots: Slots, ahead: int = 0) -> bytes:
        """The piece after the *ahead* bytes that are being sent; empty at *stop*, or where nobody wants it any more."""
        start = self.position + ahead
        length = min(slots.piece_bytes, stop - start)
        if not length or self.file.unlinked:
            return b""
        return await self.file.read_piece(start, length, self._hasher)

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
