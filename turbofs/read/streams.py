"""What one handle reads, and what it will read next: several interleaved sequential streams. Pure.

Each read either continues a stream or begins one. A stream that was continued is believed: what lies ahead is fetched in
chunks that double from `first_extent_bytes` to `extent_bytes`, as far ahead as a window that doubles too. Chunks end on
multiples of their own size (a buddy pattern), so that aligned reads do not straddle extents. A read that continues
nothing fetches what it asks for and no more: random reads of 4 KiB stay reads of 4 KiB.

The kernel splits its own read-ahead into requests that may arrive out of order; a believed stream therefore takes any
read from a little behind its position up to the end of what was planned for it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from turbofs.config import ReadConfig
from turbofs.model import ByteRange

PAGE_BYTES = 4096
_REORDER_BYTES = 4 << 20
"""The kernel's read-ahead, the distance within which its requests may overtake one another."""


@dataclass(slots=True)
class _Stream:
    position: int
    """The end of the furthest read so far."""
    planned: int
    """Everything before this was read or is planned to be fetched."""
    chunk_bytes: int
    window_bytes: int
    believed: bool = False


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """`demand` covers what was asked for, in whole pages; `ahead` is what to fetch besides, in order (the first chunks
    may cover the demand); a demanded gap of a sequential plan is worth a fetch of `chunk_bytes`.
    """

    demand: ByteRange
    ahead: tuple[ByteRange, ...] = ()
    chunk_bytes: int = 0
    sequential: bool = False


class StreamTracker:
    """The streams of one handle, the most recently continued last."""

    def __init__(self, config: ReadConfig) -> None:
        self._config = config
        self._streams: OrderedDict[int, _Stream] = OrderedDict()
        self._serial = 0

    def observe(self, offset: int, length: int, size: int, *, window_limit_bytes: int) -> ReadPlan:
        """Note a read of [offset, offset + length) of a file of *size* bytes; say what to fetch.

        *length* is positive and *offset* inside the file. *window_limit_bytes* is what the mount's memory allows this
        handle now.
        """
        stop = min(offset + length, size)
        stream = self._continued(offset, stop)
        if stream is None:
            return self._begin(offset, stop, size)
        if not stream.believed:
            stream.believed = True
        elif stop > stream.position:
            stream.window_bytes = min(stream.window_bytes * 2, self._config.window_bytes)
        stream.position = max(stream.position, stop)
        return self._plan(stream, offset, stop, size, window_limit_bytes)

    def _continued(self, offset: int, stop: int) -> _Stream | None:
        for key, stream in reversed(self._streams.items()):
            if stream.believed:
                near = stream.position - _REORDER_BYTES <= offset <= max(stream.planned, stream.position)
            else:
                near = offset <= stream.position < stop and offset > 0
            if near:
                self._streams.move_to_end(key)
                return stream
        return None

    def _begin(self, offset: int, stop: int, size: int) -> ReadPlan:
        first = self._config.first_extent_bytes
        start = offset - offset % PAGE_BYTES
        # A file's beginning is mostly followed by the rest; a small file is cheaper whole than in two requests.
        reach = first if offset == 0 else stop
        end = size if size - start <= first else min(max(_page_up(stop), reach), size)
        self._serial += 1
        self._streams[self._serial] = _Stream(stop, end, max(first, length_to_chunk(stop - offset)), 2 * first)
        if len(self._streams) > self._config.streams_per_handle:
            self._streams.popitem(last=False)
        return ReadPlan(ByteRange(start, max(end, stop)))

    def _plan(self, stream: _Stream, offset: int, stop: int, size: int, limit_bytes: int) -> ReadPlan:
        window = min(stream.window_bytes, max(limit_bytes, self._config.first_extent_bytes))
        largest_chunk = length_to_chunk(window)
        target = min(stream.position + window, size)
        start = offset - offset % PAGE_BYTES
        demand = ByteRange(start, min(_page_up(stop), size))
        ahead: list[ByteRange] = []
        position = max(stream.planned, demand.start)
        while position < target:
            stream.chunk_bytes = min(stream.chunk_bytes * 2, self._config.extent_bytes, largest_chunk)
            chunk = buddy_chunk(position, stream.chunk_bytes, size)
            ahead.append(chunk)
            position = chunk.stop
        stream.planned = max(stream.planned, position)
        return ReadPlan(demand, tuple(ahead), min(stream.chunk_bytes, largest_chunk), sequential=True)


def buddy_chunk(position: int, chunk_bytes: int, size: int) -> ByteRange:
    """The chunk of at most *chunk_bytes* (a power of two) at *position* that ends on a multiple of *chunk_bytes*."""
    stop = (position // chunk_bytes + 1) * chunk_bytes
    return ByteRange(position, min(stop, size))


def length_to_chunk(length: int) -> int:
    """The power of two at or below *length* (at least one page)."""
    return max(PAGE_BYTES, 1 << (length.bit_length() - 1)) if length > 0 else PAGE_BYTES


def _page_up(offset: int) -> int:
    return -(-offset // PAGE_BYTES) * PAGE_BYTES
