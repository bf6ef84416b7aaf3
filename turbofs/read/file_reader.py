"""Reads of one open file version: from the cache where the bytes are, else as the plan says. Shared by all its handles."""

from __future__ import annotations

from copy import copy

from turbofs.errors import NotSupportedError, StaleFileError
from turbofs.metrics import Metrics
from turbofs.model import Change, FileVersion
from turbofs.read.extent_cache import CachedFile, Extent, ExtentState
from turbofs.read.fetcher import Fetcher
from turbofs.read.streams import PAGE_BYTES, ReadPlan, StreamTracker, buddy_chunk
from turbofs.source.base import SourceFile

_MOST_ADVANCES = 4
"""A file that grows again during each of so many tries of one read is answered ESTALE."""


class FileReader:
    """An open source file and what is cached of it. Holds no policy: `streams` plans, `fetcher` runs."""

    def __init__(self, source_file: SourceFile, cached: CachedFile, fetcher: Fetcher, metrics: Metrics) -> None:
        self.source_file = source_file
        self.cached = cached
        self._fetcher = fetcher
        self._cache = fetcher.cache
        self._metrics = metrics
        self.users = 0
        """Handles and jobs that hold this reader; the last one closes the source file."""

    @property
    def version(self) -> FileVersion:
        return self.cached.version

    def advance(self, version: FileVersion) -> None:
        """The open file grew, or was touched, and is *version* now."""
        self._cache.advance(self.cached, version)

    async def read(
        self, tracker: StreamTracker, offset: int, length: int, *, kernel_caches: bool = True
    ) -> memoryview | bytes:
        """Bytes [offset, offset + length) as far as the file goes; b"" at its end.

        *kernel_caches* says that the page cache keeps what is returned (no O_DIRECT).

        The result is valid until the caller's next await: it may be a view of the cache itself. Raises StaleFileError,
        ShortReadError, SourceUnavailableError, DeadlineExceededError as the source does.
        """
        for _ in range(_MOST_ADVANCES):
            if self.source_file.version != self.cached.version:
                await self._follow()  # another open of this file saw it grow
            try:
                return await self._read(tracker, offset, length, kernel_caches=kernel_caches)
            except StaleFileError:
                await self._follow()
        raise StaleFileError("the file changes faster than it can be read")

    async def _read(
        self, tracker: StreamTracker, offset: int, length: int, *, kernel_caches: bool
    ) -> memoryview | bytes:
        version = self.cached.version
        size = version.size
        stop = min(offset + length, size)
        if offset >= stop:
            return b""
        plan = tracker.observe(offset, length, size, window_limit_bytes=self._fetcher.window_limit_bytes())
        if plan.ahead:
            self._fetcher.note_sequential(tracker)
            self._schedule(plan)
        extent = self.cached.find(offset)
        if extent is None or extent.state is not ExtentState.READY:
            extent = await self._ready_extent(plan, offset)
            self._require_bytes_of(version)
            self._metrics.bytes_read("source", min(stop, extent.stop) - offset)
        else:
            self._metrics.bytes_read("cache", min(stop, extent.stop) - offset)
        if stop <= extent.stop:
            self._cache.touch(extent, offset, stop, kernel_caches=kernel_caches)
            return extent.view(offset, stop)
        return await self._join(plan, extent, offset, stop, kernel_caches)

    async def _follow(self) -> None:
        """Go on with what the open file is now, where it only grew; raises StaleFileError where it did not.

        What was read before may be of other bytes (only an append-only source vouches for them), so a read that met
        the change starts anew.
        """
        try:
            version = await self.source_file.refresh()
        except NotSupportedError as error:
            raise StaleFileError("the file changed while it was open") from error
        if self.cached.version.compare(version) is Change.GREW:
            self.advance(version)
        elif self.cached.version != version:
            raise StaleFileError("the file was rewritten, and another open of it has seen what this one has not")

    def _require_bytes_of(self, version: FileVersion) -> None:
        """Raises StaleFileError where somebody else saw the file change while a read of *version* waited."""
        if self.cached.version is not version and not version.keeps_bytes(self.cached.version):
            raise StaleFileError("the file changed while it was read")

    async def _join(self, plan: ReadPlan, extent: Extent, offset: int, stop: int, kernel_caches: bool) -> bytes:
        version = self.cached.version
        parts: list[bytes] = []
        position = offset
        while True:
            end = min(stop, extent.stop)
            self._cache.touch(extent, position, end, kernel_caches=kernel_caches)
            parts.append(bytes(extent.view(position, end)))
            position = end
            if position >= stop:
                return b"".join(parts)
            extent = await self._ready_extent(plan, position)
            self._require_bytes_of(version)  # else the parts would be of two versions

    def _schedule(self, plan: ReadPlan) -> None:
        """Start what the plan reads ahead; the chunk that the request itself waits for goes first and at once."""
        for chunk in plan.ahead:
            for gap in self.cached.gaps(chunk.start, chunk.stop):
                if gap.overlaps(plan.demand):
                    self._fetcher.start(self.source_file, self.cached, gap.start, gap.stop)
                else:
                    self._fetcher.enqueue(self.source_file, self.cached, gap.start, gap.stop)

    async def _ready_extent(self, plan: ReadPlan, position: int) -> Extent:
        """The extent that holds the byte at *position*, ready: found, waited for, or fetched now."""
        while True:
            if position >= self.cached.version.size:
                raise StaleFileError("the file became shorter while it was read")
            extent = self.cached.find(position)
            if extent is None:
                extent = await self._fetch_gap(plan, position)
            elif extent.state is not ExtentState.READY:
                self._fetcher.hurry(extent)
                await extent.settled.wait()
            if extent.state is ExtentState.READY:
                return extent
            if extent.error is not None and extent.fetched_through is self.source_file:
                raise copy(extent.error)  # raised as it is, it would hold this frame, and the frame the extent
            # Given up with the request that ran it, dropped for memory, of a version that is gone, or failed through
            # another open of the file, which may have been closed since: look again.

    async def _fetch_gap(self, plan: ReadPlan, position: int) -> Extent:
        stop = plan.demand.stop
        if plan.sequential:
            stop = max(stop, buddy_chunk(position, plan.chunk_bytes, self.cached.version.size).stop)
        gap = next(self.cached.gaps(position - position % PAGE_BYTES, min(stop, self.cached.version.size)))
        # The page before *position* may be covered by an extent that ends inside it (a file that grew).
        while gap.stop <= position:
            gap = next(self.cached.gaps(gap.stop, min(stop, self.cached.version.size)))
        start, stop = gap.start, min(gap.stop, gap.start + self._cache.budget.slab_bytes)
        return await self._fetcher.fetch(self.source_file, self.cached, start, stop)
