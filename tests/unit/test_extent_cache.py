"""The extent cache: no overlap, one fetch, bounded memory, what goes first, and files that change."""

from __future__ import annotations

import gc
import weakref

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from turbofs.errors import ShortReadError
from turbofs.model import ByteRange, FileVersion
from turbofs.read.extent_cache import CachedFile, Extent, ExtentCache, ExtentState
from turbofs.read.memory_budget import MemoryBudget

MIB = 1 << 20
VERSION = FileVersion(64 * MIB, 1, "id", append_only=True)


def _cache(limit: int = 16 * MIB) -> ExtentCache:
    return ExtentCache(MemoryBudget(limit, MIB))


def _ready(cache: ExtentCache, file: CachedFile, start: int, stop: int, *, demanded: bool = True) -> Extent:
    extent = cache.add(file, start, stop, demanded=demanded)
    extent.state = ExtentState.FETCHING
    assert cache.allocate_nowait(extent)
    cache.settle(extent)
    return extent


def test_gaps_and_found_extents_tile_a_range() -> None:
    cache, file = _cache(), CachedFile(VERSION)
    _ready(cache, file, MIB, 2 * MIB)
    _ready(cache, file, 3 * MIB, 4 * MIB)
    assert list(file.gaps(0, 5 * MIB)) == [
        ByteRange(0, MIB),
        ByteRange(2 * MIB, 3 * MIB),
        ByteRange(4 * MIB, 5 * MIB),
    ]
    assert list(file.gaps(MIB, 2 * MIB)) == []
    assert list(file.gaps(MIB + 5, 2 * MIB + 5)) == [ByteRange(2 * MIB, 2 * MIB + 5)]
    assert file.find(MIB) is not None
    assert file.find(2 * MIB) is None


def test_adjacent_extents_are_told_as_one_range() -> None:
    cache, file = _cache(), CachedFile(VERSION)
    _ready(cache, file, 0, MIB)
    _ready(cache, file, MIB, 2 * MIB)
    assert file.ready_ranges() == [ByteRange(0, 2 * MIB)]


def test_what_was_read_once_goes_before_what_was_read_twice() -> None:
    cache, file = _cache(), CachedFile(VERSION)
    loved = _ready(cache, file, 0, MIB)
    cache.touch(loved, 0, MIB, kernel_caches=False)
    cache.touch(loved, 0, MIB, kernel_caches=False)
    for index in range(1, 40):
        scanned = _ready(cache, file, index * MIB, (index + 1) * MIB)
        cache.touch(scanned, scanned.start, scanned.stop, kernel_caches=False)
    assert loved.state is ExtentState.READY
    assert cache.budget.resident_bytes <= cache.budget.limit_bytes


def test_read_ahead_never_evicts_unread_extents_and_a_demanded_read_may() -> None:
    cache, file = _cache(), CachedFile(VERSION)
    unread = [_ready(cache, file, index * MIB, (index + 1) * MIB, demanded=False) for index in range(16)]
    ahead = cache.add(file, 20 * MIB, 21 * MIB, demanded=False)
    assert not cache.allocate_nowait(ahead)
    demanded = cache.add(file, 30 * MIB, 31 * MIB, demanded=True)
    assert cache.allocate_nowait(demanded)
    assert unread[0].state is ExtentState.FAILED
    assert cache.statistics()["unread_evictions"] == 1


def test_what_a_closed_file_leaves_unread_makes_room_for_read_ahead_and_hinted_bytes_do_not() -> None:
    cache, file = _cache(), CachedFile(VERSION)
    left = [_ready(cache, file, index * MIB, (index + 1) * MIB, demanded=False) for index in range(14)]
    cache.keep(left[0])
    fetching = cache.add(file, 14 * MIB, 15 * MIB, demanded=True)
    fetching.state = ExtentState.FETCHING
    assert cache.allocate_nowait(fetching)
    queued = cache.add(file, 15 * MIB, 16 * MIB, demanded=False)
    cache.let_go(file)
    cache.settle(fetching)
    assert queued.state is ExtentState.FAILED
    other = CachedFile(VERSION)
    ahead = [cache.add(other, index * MIB, (index + 1) * MIB, demanded=False) for index in range(15)]
    assert all(cache.allocate_nowait(extent) for extent in ahead)
    assert not cache.allocate_nowait(cache.add(other, 20 * MIB, 21 * MIB, demanded=False))
    assert left[0].state is ExtentState.READY
    assert not file.unread
    assert not {extent for extent in other.unread if extent.state is ExtentState.FAILED}


def test_a_pinned_extent_stays_in_place() -> None:
    cache, file = _cache(), CachedFile(VERSION)
    extents = [_ready(cache, file, index * MIB, (index + 1) * MIB) for index in range(16)]
    for extent in extents:
        cache.touch(extent, extent.start, extent.stop, kernel_caches=False)
    cache.pin(extents[0])
    assert cache.allocate_nowait(cache.add(file, 20 * MIB, 21 * MIB, demanded=True))
    assert extents[0].state is ExtentState.READY
    assert extents[1].state is ExtentState.FAILED


def test_a_file_that_changed_is_forgotten_also_where_it_is_being_fetched() -> None:
    cache, file = _cache(), CachedFile(VERSION)
    _ready(cache, file, 0, MIB)
    fetching = cache.add(file, MIB, 2 * MIB, demanded=True)
    fetching.state = ExtentState.FETCHING
    assert cache.allocate_nowait(fetching)
    cache.advance(file, FileVersion(64 * MIB, 2, "id", append_only=True))
    assert file.extents() == ()
    assert fetching.settled.is_set()
    held = cache.budget.used_bytes
    cache.settle(fetching)  # the fetch ends later: only now may its memory be used again
    assert fetching.state is ExtentState.FAILED
    assert cache.budget.used_bytes == held - MIB == 0


def test_a_file_that_a_writer_extends_keeps_its_bytes() -> None:
    cache, file = _cache(), CachedFile(FileVersion(MIB, 1, "id", append_only=True))
    extent = _ready(cache, file, 0, MIB)
    cache.advance(file, FileVersion(3 * MIB, 1, "id", append_only=True))
    assert file.find(0) is extent
    assert list(file.gaps(0, 3 * MIB)) == [ByteRange(MIB, 3 * MIB)]


async def test_a_demanded_fetch_waits_for_memory_that_is_being_filled(autojump_clock: trio.testing.MockClock) -> None:
    cache, file = _cache(), CachedFile(VERSION)
    filling = [cache.add(file, index * MIB, (index + 1) * MIB, demanded=True) for index in range(16)]
    for extent in filling:
        extent.state = ExtentState.FETCHING
        assert cache.allocate_nowait(extent)
    waiting = cache.add(file, 20 * MIB, 21 * MIB, demanded=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cache.allocate, waiting)
        await trio.testing.wait_all_tasks_blocked()
        assert waiting.buffer is None
        cache.settle(filling[0])
        cache.touch(filling[0], 0, MIB, kernel_caches=True)
    assert waiting.buffer is not None


async def test_a_demanded_fetch_takes_the_memory_of_bytes_that_nobody_reads(
    autojump_clock: trio.testing.MockClock,
) -> None:
    cache, file = _cache(), CachedFile(VERSION)
    ahead = [cache.add(file, index * MIB, (index + 1) * MIB, demanded=False) for index in range(16)]
    for extent in ahead:
        extent.state = ExtentState.FETCHING
        assert cache.allocate_nowait(extent)
    waiting = cache.add(file, 20 * MIB, 21 * MIB, demanded=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cache.allocate, waiting)
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(1):
            cache.settle(ahead[0])  # its reader is gone: nobody will ever touch it
            await trio.testing.wait_all_tasks_blocked()
            assert waiting.buffer is not None


def test_overlapping_extents_are_a_defect() -> None:
    cache, file = _cache(), CachedFile(VERSION)
    cache.add(file, 0, MIB, demanded=True)
    with pytest.raises(AssertionError):
        cache.add(file, MIB - 1, 2 * MIB, demanded=True)


@given(st.lists(st.tuples(st.integers(0, 63), st.booleans(), st.booleans(), st.booleans()), max_size=300))
def test_the_budget_and_the_order_hold_for_any_use(steps: list[tuple[int, bool, bool, bool]]) -> None:
    cache, file = _cache(8 * MIB), CachedFile(VERSION)
    for index, demanded, whole, kernel in steps:
        start = index * MIB
        extent = file.find(start)
        if extent is None:
            extent = cache.add(file, start, start + MIB, demanded=demanded)
            extent.state = ExtentState.FETCHING
            if not cache.allocate_nowait(extent):
                cache.drop(extent)
                continue
            cache.settle(extent)
        cache.touch(extent, start, start + (MIB if whole else 4096), kernel_caches=kernel)
        assert cache.budget.resident_bytes <= cache.budget.limit_bytes
        starts = [each.start for each in file.extents()]
        assert starts == sorted(set(starts))
    statistics = cache.statistics()
    assert statistics["extents"] == len(file.extents())


class _Local:
    """Lives as long as the frame that holds it."""


def test_an_extent_that_failed_is_gone_without_the_collector() -> None:
    """Else its buffer outlives it, beyond the budget: the daemon's collector seldom runs."""
    cache, file = _cache(), CachedFile(VERSION)

    def fetch() -> weakref.ref[_Local]:
        extent = cache.add(file, 0, MIB, demanded=True)
        extent.state = ExtentState.FETCHING
        assert cache.allocate_nowait(extent)
        try:
            raise ShortReadError("nothing came")
        except ShortReadError as error:
            local = _Local()
            cache.settle(extent, error)
            assert isinstance(extent.error, ShortReadError)
            assert str(extent.error) == "nothing came"
            return weakref.ref(local)

    gc.disable()
    try:
        assert fetch()() is None
    finally:
        gc.enable()
