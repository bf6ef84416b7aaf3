"""Runs the fetches that plans ask for: demanded ones at once, read-ahead through a bounded queue that they overtake.

Nothing is decided here. A demanded fetch runs in the task of the request that needs it and dies with it; whoever else
waits for it then starts it again. Read-ahead runs in tasks of the mount's nursery; its errors stay with the extent,
because nobody may be waiting: a read that needs these bytes fetches them itself and then sees the error, if it is still
one.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict

from turbofs.background import Background
from turbofs.config import ReadConfig
from turbofs.errors import ShortReadError, TurboError
from turbofs.metrics import Metrics
from turbofs.read.extent_cache import CachedFile, Extent, ExtentCache, ExtentState
from turbofs.read.streams import StreamTracker
from turbofs.source.base import SourceFile


class Fetcher:
    """Executes fetches into *cache*; read-ahead runs in *background*."""

    def __init__(self, cache: ExtentCache, config: ReadConfig, background: Background, metrics: Metrics) -> None:
        self.cache = cache
        self._config = config
        self._background = background
        self._metrics = metrics
        self._queue: OrderedDict[Extent, SourceFile] = OrderedDict()
        self._ahead_in_flight = 0
        self._sequential: weakref.WeakSet[StreamTracker] = weakref.WeakSet()

    def note_sequential(self, tracker: StreamTracker) -> None:
        """Count *tracker*'s handle among those that share the memory for read-ahead, until it is closed."""
        self._sequential.add(tracker)

    def forget_sequential(self, tracker: StreamTracker) -> None:
        self._sequential.discard(tracker)

    def window_limit_bytes(self) -> int:
        """How much one sequential handle may read ahead now: half the budget in equal shares."""
        return self.cache.budget.limit_bytes // 2 // max(1, len(self._sequential))

    def enqueue(self, source_file: SourceFile, file: CachedFile, start: int, stop: int) -> Extent:
        """Fetch [start, stop), a gap of *file*, once there is a slot and memory for it."""
        extent = self.cache.add(file, start, stop, demanded=False)
        self._queue[extent] = source_file
        self._pump()
        return extent

    def start(self, source_file: SourceFile, file: CachedFile, start: int, stop: int) -> Extent:
        """Fetch [start, stop), a gap of *file*, now, in a task of its own: a request waits for it."""
        extent = self.cache.add(file, start, stop, demanded=True)
        extent.state = ExtentState.FETCHING
        self._background.start_soon(self._fetch_quietly, source_file, extent)
        return extent

    async def fetch(self, source_file: SourceFile, file: CachedFile, start: int, stop: int) -> Extent:
        """Fetch [start, stop), a gap of *file*, in the caller's task; raises what the source raises."""
        extent = self.cache.add(file, start, stop, demanded=True)
        extent.state = ExtentState.FETCHING
        await self._fetch(source_file, extent)
        return extent

    def hurry(self, extent: Extent) -> None:
        """A request waits for *extent*: if it is still in the queue, fetch it now."""
        extent.demanded = True
        source_file = self._queue.pop(extent, None)
        if source_file is not None and extent.state is ExtentState.QUEUED:
            extent.state = ExtentState.FETCHING
            self._background.start_soon(self._fetch_quietly, source_file, extent)

    def _pump(self) -> None:
        while self._queue and self._ahead_in_flight < self._config.fetches:
            extent, source_file = self._queue.popitem(last=False)
            if extent.state is not ExtentState.QUEUED:
                continue
            if not self.cache.allocate_nowait(extent):
                # All memory is in use or waits to be read: reading ahead now would only throw that out.
                self.cache.drop(extent)
                continue
            extent.state = ExtentState.FETCHING
            self._ahead_in_flight += 1
            self._background.start_soon(self._fetch_ahead, source_file, extent)

    async def _fetch_ahead(self, source_file: SourceFile, extent: Extent) -> None:
        try:
            await self._fetch_quietly(source_file, extent)
        finally:
            self._ahead_in_flight -= 1
            self._pump()

    async def _fetch_quietly(self, source_file: SourceFile, extent: Extent) -> None:
        try:
            await self._fetch(source_file, extent)
        except TurboError:
            # Kept in `extent.error`; a reader that waits raises it from there.
            return

    async def _fetch(self, source_file: SourceFile, extent: Extent) -> None:
        extent.fetched_through = source_file
        try:
            if extent.buffer is None:
                await self.cache.allocate(extent)
            assert extent.buffer is not None
            self._metrics.fetch_began()
            count = 0
            try:
                count = await source_file.read_into(extent.start, extent.buffer.view)
            finally:
                self._metrics.fetch_ended(count)
            if count != extent.length:
                raise ShortReadError(f"got {count} of {extent.length} bytes at offset {extent.start}")
        except BaseException as error:
            self.cache.settle(extent, error)
            raise
        self.cache.settle(extent)
