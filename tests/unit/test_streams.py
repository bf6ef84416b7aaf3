"""Reading ahead: what a handle's reads say about the next ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from turbofs.config import ReadConfig
from turbofs.read.streams import StreamTracker, buddy_chunk

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CONFIG = ReadConfig()


def _observe(tracker: StreamTracker, offset: int, length: int, size: int = GIB, limit: int = GIB):
    return tracker.observe(offset, length, size, window_limit_bytes=limit)


def test_random_reads_fetch_what_they_ask_for() -> None:
    tracker = StreamTracker(CONFIG)
    for offset in (500 * MIB, 20 * MIB + 100, 900 * MIB, 3 * MIB + 5000):
        plan = _observe(tracker, offset, 4096)
        assert not plan.ahead
        assert plan.demand.start <= offset
        assert plan.demand.stop >= offset + 4096
        assert plan.demand.length <= 8192


def test_the_beginning_of_a_file_brings_a_header_and_no_more() -> None:
    plan = _observe(StreamTracker(CONFIG), 0, 4096)
    assert plan.demand.length == CONFIG.first_extent_bytes
    assert not plan.ahead


def test_a_small_file_is_fetched_whole() -> None:
    plan = _observe(StreamTracker(CONFIG), 0, 100, size=9000)
    assert (plan.demand.start, plan.demand.stop) == (0, 9000)


def test_a_sequential_reader_is_read_ahead_in_doubling_chunks_up_to_the_window() -> None:
    tracker = StreamTracker(CONFIG)
    lengths, furthest = [], 0
    for offset in range(0, 64 * MIB, 128 * KIB):
        plan = _observe(tracker, offset, 128 * KIB)
        lengths.extend(chunk.length for chunk in plan.ahead)
        furthest = max([furthest, *(chunk.stop for chunk in plan.ahead)])
        assert furthest <= offset + 128 * KIB + CONFIG.window_bytes + CONFIG.extent_bytes
    assert lengths == sorted(lengths)
    assert lengths[-1] == CONFIG.extent_bytes


def test_interleaved_streams_are_each_read_ahead() -> None:
    tracker = StreamTracker(CONFIG)
    ahead = [0, 0, 0]
    for step in range(20):
        for index, base in enumerate((0, 300 * MIB, 700 * MIB)):
            ahead[index] += len(_observe(tracker, base + step * 128 * KIB, 128 * KIB).ahead)
    assert all(ahead)


def test_requests_of_the_kernels_read_ahead_may_overtake_one_another() -> None:
    tracker = StreamTracker(CONFIG)
    for offset in (0, 1, 2, 3):
        _observe(tracker, offset * MIB, MIB)
    assert _observe(tracker, 5 * MIB, MIB).sequential
    assert _observe(tracker, 4 * MIB, MIB).sequential


def test_a_small_share_of_memory_keeps_the_window_small() -> None:
    tracker = StreamTracker(CONFIG)
    for offset in range(0, 32 * MIB, MIB):
        plan = _observe(tracker, offset, MIB, limit=2 * MIB)
        for chunk in plan.ahead:
            assert chunk.length <= 2 * MIB
            assert chunk.stop <= offset + MIB + 4 * MIB


@given(st.integers(0, GIB - 1), st.integers(12, 22), st.integers(1, GIB))
def test_chunks_end_on_multiples_of_their_size(position: int, power: int, size: int) -> None:
    if position >= size:
        return
    chunk = buddy_chunk(position, 1 << power, size)
    assert chunk.start == position
    assert 0 < chunk.length <= 1 << power
    assert chunk.stop == size or chunk.stop % (1 << power) == 0


@given(
    st.lists(st.tuples(st.integers(0, 10 * MIB - 1), st.integers(1, MIB)), min_size=1, max_size=60),
    st.integers(1, 64 * MIB),
)
def test_a_plan_covers_what_is_asked_and_stays_inside_the_file(reads: list[tuple[int, int]], limit: int) -> None:
    size = 10 * MIB - 123
    tracker = StreamTracker(CONFIG)
    for offset, length in reads:
        if offset >= size:
            continue
        plan = _observe(tracker, offset, length, size, limit)
        assert plan.demand.start <= offset
        assert plan.demand.stop >= min(offset + length, size)
        assert all(chunk.stop <= size and chunk.length for chunk in (plan.demand, *plan.ahead))
