"""The memory budget: never above its limit, slabs used again, small buffers counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbofs.read.memory_budget import Buffer, MemoryBudget

MIB = 1 << 20


def test_buffers_have_the_asked_length_and_are_writable() -> None:
    budget = MemoryBudget(32 * MIB, 4 * MIB)
    for length in (1, 4096, 100_000, 3 * MIB, 4 * MIB):
        buffer = budget.allocate_nowait(length)
        assert buffer is not None
        assert len(buffer.view) == length
        buffer.view[-1] = 7


def test_a_freed_slab_is_handed_out_again() -> None:
    budget = MemoryBudget(32 * MIB, 4 * MIB)
    first = budget.allocate_nowait(4 * MIB)
    assert first is not None
    budget.free(first)
    second = budget.allocate_nowait(4 * MIB)
    assert second is not None
    assert second.memory is first.memory


def test_small_buffers_may_use_what_free_slabs_hold() -> None:
    budget = MemoryBudget(16 * MIB, 4 * MIB)
    slabs = [budget.allocate_nowait(4 * MIB) for _ in range(4)]
    assert budget.allocate_nowait(4096) is None
    assert slabs[0] is not None
    budget.free(slabs[0])
    assert budget.allocate_nowait(4096) is not None
    assert budget.resident_bytes <= budget.limit_bytes


def test_a_budget_below_four_extents_is_refused() -> None:
    with pytest.raises(ValueError, match="below four extents"):
        MemoryBudget(15 * MIB, 4 * MIB)


@given(st.lists(st.one_of(st.integers(1, 256 * 1024), st.just(-1)), max_size=200))
def test_the_limit_holds_whatever_is_asked(steps: list[int]) -> None:
    budget = MemoryBudget(MIB, 256 * 1024)
    held: list[Buffer] = []
    for step in steps:
        if step < 0:
            if held:
                budget.free(held.pop(0))
            continue
        buffer = budget.allocate_nowait(step)
        if buffer is not None:
            held.append(buffer)
        assert budget.resident_bytes <= budget.limit_bytes
        assert sum(each.charged_bytes for each in held) == budget.used_bytes
    for each in held:
        budget.free(each)
    assert budget.used_bytes == 0


def test_a_freed_buffer_gives_its_memory_back_though_somebody_still_refers_to_it() -> None:
    budget = MemoryBudget(32 * MIB, 4 * MIB)
    buffer = budget.allocate_nowait(MIB)
    assert buffer is not None
    buffer.view[:] = b"x" * MIB
    view = buffer.view[:100]  # as in the traceback of a read that failed
    budget.free(buffer)
    assert bytes(view) == bytes(100)  # the kernel took the pages
