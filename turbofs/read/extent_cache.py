"""The extent cache: byte ranges of file versions in memory, under one budget, one fetch for each range.

An extent is first queued, then being fetched, then ready; whoever wants its bytes waits for the same fetch. Extents of
one file never overlap. The policy resists scans: an extent enters on probation and is protected only when it is read a
second time, as in the segmented LRU of Karedla, Love and Wherry ("Caching strategies to improve disk system
performance", 1994). Bytes that were read to the end through the kernel's page cache are there a second time; of those
only the last `_BEHIND_BYTES` are kept, and their memory is used again before fresh memory is touched (a fresh GiB costs
up to a second of page faults on a virtual machine). What was read ahead and not used yet is never evicted by more
read-ahead, only by a demanded read that has no other way, for as long as its file is open or a hint asked for it.

All methods run on the event loop and none awaits but `allocate`: no invariant spans an await.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from copy import copy

import trio

from turbofs.errors import TurboError
from turbofs.model import ByteRange, FileVersion
from turbofs.read.memory_budget import Buffer, MemoryBudget
from turbofs.source.base import SourceFile

_PROTECTED_SHARE = 0.5
"""Of the budget: the other half is always there for streams."""
_BEHIND_BYTES = 32 << 20
"""Kept of what the kernel caches as well: enough for readers that follow one another closely."""


class ExtentState(enum.Enum):
    QUEUED = "queued"
    FETCHING = "fetching"
    READY = "ready"
    FAILED = "failed"
    """Out of the cache: its fetch failed, was given up, or its file changed."""


class Extent:
    """Bytes [start, stop) of one file version. `settled` is set once it is ready or failed (`error` says why)."""

    __slots__ = (
        "abandoned",
        "buffer",
        "demanded",
        "error",
        "fetched_through",
        "file",
        "pins",
        "queue",
        "settled",
        "start",
        "state",
        "stop",
        "unread",
    )

    def __init__(self, file: CachedFile, start: int, stop: int, demanded: bool) -> None:
        self.file = file
        self.start = start
        self.stop = stop
        self.demanded = demanded
        self.state = ExtentState.QUEUED
        self.buffer: Buffer | None = None
        self.error: TurboError | None = None
        self.fetched_through: SourceFile | None = None
        """Whose error `error` is: one of another open of the same file need not be ours."""
        self.settled = trio.Event()
        self.unread = stop - start
        """Its length less all that was read of it: negative where something was read again."""
        self.abandoned = False
        """Its file was closed while it was being fetched."""
        self.pins = 0
        self.queue: OrderedDict[Extent, None] | None = None

    @property
    def length(self) -> int:
        return self.stop - self.start

    def view(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of the file, which must lie inside a ready extent. Valid until the next await."""
        assert self.buffer is not None
        return self.buffer.view[start - self.start : stop - self.start]


class CachedFile:
    """What is cached of one version of one file, ordered by offset."""

    __slots__ = ("_extents", "_starts", "digest", "hint", "unread", "version")

    def __init__(self, version: FileVersion) -> None:
        self.version = version
        self.digest: bytes | None = None
        self.hint: str | None = None
        """The prefetch hint that was acted upon for this content."""
        self.unread: dict[Extent, None] = {}
        """Extents that wait for those who have the file open now: not read to their end, and asked for by no hint."""
        self._starts: list[int] = []
        self._extents: list[Extent] = []

    def find(self, offset: int) -> Extent | None:
        """The extent that holds the byte at *offset*, whatever its state."""
        index = bisect_right(self._starts, offset) - 1
        if index < 0:
            return None
        extent = self._extents[index]
        return extent if offset < extent.stop else None

    def gaps(self, start: int, stop: int) -> Iterator[ByteRange]:
        """The parts of [start, stop) that no extent covers, in order."""
        index = max(bisect_right(self._starts, start) - 1, 0)
        position = start
        for extent in self._extents[index:]:
            if extent.start >= stop:
                break
            if extent.start > position:
                yield ByteRange(position, extent.start)
            position = max(position, extent.stop)
        if position < stop:
            yield ByteRange(position, stop)

    def ready_ranges(self) -> list[ByteRange]:
        """What is in memory, adjacent extents joined."""
        joined: list[ByteRange] = []
        for extent in self._extents:
            if extent.state is not ExtentState.READY:
                continue
            if joined and joined[-1].stop == extent.start:
                joined[-1] = ByteRange(joined[-1].start, extent.stop)
            else:
                joined.append(ByteRange(extent.start, extent.stop))
        return joined

    def extents(self) -> tuple[Extent, ...]:
        return tuple(self._extents)

    def _insert(self, extent: Extent) -> None:
        index = bisect_right(self._starts, extent.start)
        assert index == 0 or self._extents[index - 1].stop <= extent.start
        assert index == len(self._extents) or extent.stop <= self._starts[index]
        self._starts.insert(index, extent.start)
        self._extents.insert(index, extent)

    def _remove(self, extent: Extent) -> None:
        index = bisect_right(self._starts, extent.start) - 1
        if index >= 0 and self._extents[index] is extent:
            del self._starts[index]
            del self._extents[index]


class ExtentCache:
    """All cached files of a mount. Raises nothing but trio.Cancelled."""

    def __init__(self, budget: MemoryBudget) -> None:
        self.budget = budget
        self._unread: OrderedDict[Extent, None] = OrderedDict()
        self._behind: OrderedDict[Extent, None] = OrderedDict()
        self._behind_bytes = 0
        self._used: OrderedDict[Extent, None] = OrderedDict()
        self._protected: OrderedDict[Extent, None] = OrderedDict()
        self._protected_bytes = 0
        self._waiting_for_memory = trio.lowlevel.ParkingLot()
        self.evictions = 0
        self.unread_evictions = 0

    def add(self, file: CachedFile, start: int, stop: int, *, demanded: bool) -> Extent:
        """Announce a fetch of [start, stop), which must be a gap of *file*."""
        extent = Extent(file, start, stop, demanded)
        file._insert(extent)  # noqa: SLF001  the cache is the only writer of a file's extents
        file.unread[extent] = None
        return extent

    async def allocate(self, extent: Extent) -> None:
        """Give a demanded extent its buffer, waiting for memory where all of it is being filled."""
        while not self.allocate_nowait(extent):
            await self._waiting_for_memory.park()

    def allocate_nowait(self, extent: Extent) -> bool:
        """Give an extent its buffer, evicting what may go for it; False where nothing may."""
        while self._behind_bytes > _BEHIND_BYTES and self._evict_first((self._behind,)):
            pass
        while True:
            buffer = self.budget.allocate_nowait(extent.length)
            if buffer is not None:
                extent.buffer = buffer
                return True
            queues: tuple[OrderedDict[Extent, None], ...] = (self._behind, self._used)
            if extent.demanded:
                queues = (*queues, self._protected, self._unread)
            if not self._evict_first(queues):
                return False

    def settle(self, extent: Extent, error: BaseException | None = None) -> None:
        """The fetch of *extent* ended: its bytes are there, or it leaves the cache with *error*."""
        if extent.state is ExtentState.FAILED:  # its file changed while it was being fetched
            self._release(extent)
            return
        if error is None:
            extent.state = ExtentState.READY
            self._enqueue(extent, self._used if extent.abandoned else self._unread)
            self._wake()  # a demanded fetch may take its memory, though nobody reads it
        else:
            # A copy, which has no traceback: the frames there hold this extent, its buffer and views of it, and such a
            # cycle would keep their memory, beyond the budget, until the collector next runs.
            extent.error = copy(error) if isinstance(error, TurboError) else None
            self.drop(extent)
            self._release(extent)
        extent.settled.set()

    def drop(self, extent: Extent) -> None:
        """Take *extent* out. One that is still being fetched keeps its buffer until `settle`."""
        extent.file._remove(extent)  # noqa: SLF001
        extent.file.unread.pop(extent, None)
        fetching = extent.state is ExtentState.FETCHING
        extent.state = ExtentState.FAILED
        self._dequeue(extent)
        extent.settled.set()
        if not fetching:
            self._release(extent)

    def drop_file(self, file: CachedFile) -> None:
        """Forget all that is cached of *file*; fetches under way end in nothing."""
        for extent in file.extents():
            self.drop(extent)
        file.digest = None

    def keep(self, extent: Extent) -> None:
        """A hint asked for *extent*: it waits for a reader who may not have opened the file yet."""
        extent.file.unread.pop(extent, None)

    def let_go(self, file: CachedFile) -> None:
        """Nobody has *file* open any more: what its readers left unread may go as if it had been read.

        Else the heads of many files would in the end leave no memory to read ahead with.
        """
        for extent in tuple(file.unread):
            if extent.state is ExtentState.QUEUED:
                self.drop(extent)
            elif extent.queue is self._unread:
                self._enqueue(extent, self._used)
            else:
                extent.abandoned = True

    def advance(self, file: CachedFile, version: FileVersion) -> None:
        """*file* became *version*: keep its bytes where they are still its first bytes, else forget them."""
        if not file.version.keeps_bytes(version):
            self.drop_file(file)
        file.version = version
        file.digest = None
        file.hint = None

    def touch(self, extent: Extent, start: int, stop: int, *, kernel_caches: bool) -> None:
        """Note that [start, stop) of a ready extent is read now, through the page cache if *kernel_caches*."""
        queue = extent.queue
        if queue is self._protected:
            self._protected.move_to_end(extent)
            return
        extent.unread -= stop - start
        if queue is self._unread:
            # The last parts may never be asked for (the kernel has those pages), and the end may come before the middle
            # (its requests overtake one another): both count as read.
            if stop >= extent.stop or extent.unread <= extent.length // 4:
                self._enqueue(extent, self._behind if kernel_caches else self._used)
                self._wake()
        elif extent.unread <= -extent.length // 2:
            self._protect(extent)

    def pin(self, extent: Extent) -> None:
        """Keep a ready extent's bytes in place while another thread reads them."""
        extent.pins += 1

    def unpin(self, extent: Extent) -> None:
        extent.pins -= 1
        if extent.pins:
            return
        if extent.state is ExtentState.FAILED:
            self._release(extent)
        else:
            self._wake()

    def statistics(self) -> dict[str, int]:
        return {
            "limit_bytes": self.budget.limit_bytes,
            "used_bytes": self.budget.used_bytes,
            "resident_bytes": self.budget.resident_bytes,
            "extents": len(self._unread) + len(self._behind) + len(self._used) + len(self._protected),
            "unread_extents": len(self._unread),
            "protected_bytes": self._protected_bytes,
            "evictions": self.evictions,
            "unread_evictions": self.unread_evictions,
        }

    def _evict_first(self, queues: Sequence[OrderedDict[Extent, None]]) -> bool:
        """Evict the oldest extent of the first queue that has one to spare."""
        for queue in queues:
            victim = next((extent for extent in queue if not extent.pins), None)
            if victim is not None:
                self.evictions += 1
                self.unread_evictions += queue is self._unread
                self.drop(victim)
                return True
        return False

    def _protect(self, extent: Extent) -> None:
        self._enqueue(extent, self._protected)
        while self._protected_bytes > self.budget.limit_bytes * _PROTECTED_SHARE:
            oldest = next(iter(self._protected))
            if oldest is extent:
                break
            self._enqueue(oldest, self._used)

    def _enqueue(self, extent: Extent, queue: OrderedDict[Extent, None]) -> None:
        self._dequeue(extent)
        if queue is not self._unread:
            extent.file.unread.pop(extent, None)
        queue[extent] = None
        extent.queue = queue
        self._count(extent, 1)

    def _dequeue(self, extent: Extent) -> None:
        if extent.queue is not None:
            del extent.queue[extent]
            self._count(extent, -1)
            extent.queue = None

    def _count(self, extent: Extent, sign: int) -> None:
        if extent.queue is self._protected:
            self._protected_bytes += sign * extent.length
        elif extent.queue is self._behind:
            self._behind_bytes += sign * extent.length

    def _release(self, extent: Extent) -> None:
        if extent.buffer is not None and not extent.pins:
            self.budget.free(extent.buffer)
            extent.buffer = None
            self._wake()

    def _wake(self) -> None:
        if self._waiting_for_memory:
            self._waiting_for_memory.unpark_all()
