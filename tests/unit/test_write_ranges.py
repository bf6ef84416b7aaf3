"""The set of bytes of a staged file, against a plain set of integers."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbofs.model import ByteRange
from turbofs.write.ranges import RangeSet

_LIMIT = 40
_bounds = st.tuples(st.integers(0, _LIMIT), st.integers(0, _LIMIT)).map(sorted)
_steps = st.lists(st.tuples(st.sampled_from(["add", "remove", "truncate"]), _bounds), max_size=30)


def _runs(positions: set[int]) -> list[ByteRange]:
    edges = [p for p in range(_LIMIT + 2) if (p in positions) != (p - 1 in positions)]
    return [ByteRange(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


@given(_steps, _bounds)
def test_it_is_a_set_of_bytes(steps: list[tuple[str, list[int]]], asked: list[int]) -> None:
    ranges, model = RangeSet(), set[int]()
    for act, (start, stop) in steps:
        if act == "add":
            ranges.add(start, stop)
            model |= set(range(start, stop))
        elif act == "remove":
            ranges.remove(start, stop)
            model -= set(range(start, stop))
        else:
            ranges.truncate(start)
            model = {position for position in model if position < start}
        assert ranges.ranges() == _runs(model)
        assert ranges.total == len(model)
        assert bool(ranges) == bool(model)
    wanted = set(range(*asked))
    assert ranges.covers(*asked) == (wanted <= model)
    assert ranges.gaps(*asked) == _runs(wanted - model)
    assert ranges.overlapping(*asked) == _runs(wanted & model)


def test_ranges_that_meet_are_one() -> None:
    ranges = RangeSet()
    ranges.add(0, 4)
    ranges.add(8, 12)
    ranges.add(4, 8)
    assert repr(ranges) == "RangeSet([0, 12))"


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (5, 4)])
def test_bounds_that_make_no_range_are_refused(start: int, stop: int) -> None:
    for method in (RangeSet().add, RangeSet().remove, RangeSet().covers, RangeSet().gaps):
        with pytest.raises(ValueError, match="not a byte range"):
            method(start, stop)


def test_appending_costs_the_same_however_much_there_is() -> None:
    """A hundred thousand appends behind as many separate ranges: moving a list at each would take minutes."""
    ranges = RangeSet()
    for position in range(0, 200_000, 2):
        ranges.add(position, position + 1)
    begun = time.perf_counter()
    for position in range(200_000, 300_000):
        ranges.add(position, position + 1)
    assert time.perf_counter() - begun < 2
    assert ranges.total == 200_000
