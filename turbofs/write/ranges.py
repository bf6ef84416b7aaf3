"""Which bytes of a file are here: a set of byte positions, kept as few half-open ranges. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from turbofs.model import ByteRange


class RangeSet:
    """A mutable set of bytes. Ranges are half-open; ranges that meet are one.

    Kept as two sorted lists (starts and stops), so that a look-up is a binary search, and appending at the end touches
    one element. Bounds that are negative or reversed raise ValueError; an empty range changes nothing.
    """

    __slots__ = ("_starts", "_stops", "total")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.total = 0
        """Bytes in the set."""

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __repr__(self) -> str:
        return f"RangeSet({', '.join(f'[{start}, {stop})' for start, stop in self._pairs())})"

    def add(self, start: int, stop: int) -> None:
        """Put the bytes [start, stop) into the set."""
        if _is_empty(start, stop):
            return
        if self._stops and self._stops[-1] == start:  # the usual case: a file written front to back
            self._stops[-1] = stop
            self.total += stop - start
            return
        first = bisect_left(self._stops, start)  # the first range that reaches to *start* or beyond
        last = bisect_right(self._starts, stop)  # one past the last range that begins at *stop* or before
        if first < last:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[last - 1])
        self._replace(first, last, [start], [stop])

    def remove(self, start: int, stop: int) -> None:
        """Take the bytes [start, stop) out of the set."""
        if _is_empty(start, stop):
            return
        first = bisect_right(self._stops, start)  # the first range with a byte at *start* or after
        last = bisect_left(self._starts, stop)  # one past the last range with a byte before *stop*
        if first >= last:
            return
        starts, stops = [], []
        if self._starts[first] < start:
            starts.append(self._starts[first])
            stops.append(start)
        if self._stops[last - 1] > stop:
            starts.append(stop)
            stops.append(self._stops[last - 1])
        self._replace(first, last, starts, stops)

    def truncate(self, size: int) -> None:
        """Take everything from byte *size* on out of the set."""
        if self._stops and self._stops[-1] > size:
            self.remove(size, self._stops[-1])

    def covers(self, start: int, stop: int) -> bool:
        """Whether all bytes [start, stop) are in the set; an empty range always is."""
        if _is_empty(start, stop):
            return True
        at = bisect_right(self._starts, start) - 1
        return at >= 0 and self._stops[at] >= stop

    def gaps(self, start: int, stop: int) -> list[ByteRange]:
        """What of [start, stop) is not in the set, in order."""
        if _is_empty(start, stop):
            return []
        found = []
        at = bisect_right(self._stops, start)
        while at < len(self._starts) and self._starts[at] < stop:
            if self._starts[at] > start:
                found.append(ByteRange(start, self._starts[at]))
            start = self._stops[at]
            at += 1
        if start < stop:
            found.append(ByteRange(start, stop))
        return found

    def overlapping(self, start: int, stop: int) -> list[ByteRange]:
        """What of [start, stop) is in the set, in order."""
        if _is_empty(start, stop):
            return []
        found = []
        at = bisect_right(self._stops, start)
        while at < len(self._starts) and self._starts[at] < stop:
            found.append(ByteRange(max(start, self._starts[at]), min(stop, self._stops[at])))
            at += 1
        return found

    def ranges(self) -> list[ByteRange]:
        """The bytes in the set, as disjoint ranges in order."""
        return [ByteRange(start, stop) for start, stop in self._pairs()]

    def _pairs(self) -> zip[tuple[int, int]]:
        return zip(self._starts, self._stops, strict=True)

    def _replace(self, first: int, last: int, starts: list[int], stops: list[int]) -> None:
        self.total += sum(stops) - sum(starts) + sum(self._starts[first:last]) - sum(self._stops[first:last])
        self._starts[first:last] = starts
        self._stops[first:last] = stops


def _is_empty(start: int, stop: int) -> bool:
    if not 0 <= start <= stop:
        raise ValueError(f"not a byte range: [{start}, {stop})")
    return start == stop
