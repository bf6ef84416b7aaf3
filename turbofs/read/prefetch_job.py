"""A hint's prefetch: fetch given ranges of one open file now, in the background, within the memory budget."""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from copy import copy

import trio

from turbofs.errors import TurboError
from turbofs.model import ByteRange, Change
from turbofs.read.extent_cache import Extent, ExtentState
from turbofs.read.fetcher import Fetcher
from turbofs.read.file_reader import FileReader
from turbofs.read.streams import buddy_chunk

_OUTSTANDING = 16
"""Fetches that one job keeps queued or running: enough to keep every slot busy, few enough to cancel quickly."""
_serials = itertools.count(1)


class JobState(enum.StrEnum):
    RUNNING = "running"
    DONE = "done"
    PARTIAL = "partial"
    """The memory budget is full of bytes that nobody has read yet: more would only throw those out."""
    FAILED = "failed"
    CANCELLED = "cancelled"


class PrefetchJob:
    """Progress of one prefetch. `done_bytes` counts wanted bytes that are in memory, also those found there."""

    def __init__(self, path: str, owner_uid: int, ranges: Sequence[ByteRange]) -> None:
        self.id = next(_serials)
        self.path = path
        self.owner_uid = owner_uid
        self.ranges = tuple(ranges)
        self.wanted_bytes = sum(wanted.length for wanted in self.ranges)
        self.done_bytes = 0
        self.state = JobState.RUNNING
        self.error: str | None = None
        self._ended = trio.Event()
        self._scope = trio.CancelScope()

    async def wait(self) -> None:
        """Wait until the job ended, however it did; `state` says how."""
        await self._ended.wait()

    def cancel(self) -> None:
        """End the job; what was fetched stays cached."""
        self._scope.cancel()

    def as_dict(self) -> dict[str, object]:
        return {
            "id": self.id,
            "path": self.path,
            "state": self.state.value,
            "wanted_bytes": self.wanted_bytes,
            "done_bytes": self.done_bytes,
            "error": self.error,
        }

    async def run(self, reader: FileReader, fetcher: Fetcher, largest_bytes: int) -> None:
        """Fetch all ranges through *fetcher* in extents of at most *largest_bytes* (a power of two).

        Raises no TurboError: `state` and `error` tell.
        """
        try:
            with self._scope:
                await self._run(reader, fetcher, largest_bytes)
            if self._scope.cancelled_caught:
                self.state = JobState.CANCELLED
        except TurboError as error:
            self.state = JobState.FAILED
            self.error = str(error)
        except trio.Cancelled:
            self.state = JobState.CANCELLED
            raise
        except BaseException as error:
            self.state = JobState.FAILED
            self.error = f"a defect of TurboFS, see the daemon's log: {error!r}"
            raise
        finally:
            self._ended.set()

    async def _run(self, reader: FileReader, fetcher: Fetcher, largest_bytes: int) -> None:
        outstanding: deque[tuple[Extent, int]] = deque()
        version = reader.version
        for piece in self._pieces(largest_bytes, reader.version.size):
            gaps = list(reader.cached.gaps(piece.start, piece.stop))
            self.done_bytes += piece.length - sum(gap.length for gap in gaps)
            for gap in gaps:
                while len(outstanding) >= _OUTSTANDING:
                    if not await self._settle(outstanding.popleft()):
                        return
                extent = fetcher.enqueue(reader.source_file, reader.cached, gap.start, gap.stop)
                fetcher.cache.keep(extent)
                outstanding.append((extent, gap.length))
        while outstanding:
            if not await self._settle(outstanding.popleft()):
                return
        if reader.version.compare(version) is Change.REPLACED:
            self.state, self.error = JobState.PARTIAL, "the file changed meanwhile"
            return
        self.state = JobState.DONE

    async def _settle(self, item: tuple[Extent, int]) -> bool:
        extent, length = item
        await extent.settled.wait()
        if extent.error is not None:
            raise copy(extent.error)  # raised as it is, it would hold this frame, and the frame the extent
        if extent.state is ExtentState.FAILED:
            self.state = JobState.PARTIAL
            self.error = "the memory budget is full of bytes that were not read yet: raise --memory, or read them"
            return False
        self.done_bytes += length
        return True

    def _pieces(self, largest_bytes: int, size: int) -> Iterator[ByteRange]:
        for wanted in self.ranges:
            position = wanted.start
            while position < wanted.stop:
                piece = buddy_chunk(position, largest_bytes, size)
                yield ByteRange(position, min(piece.stop, wanted.stop))
                position = piece.stop
