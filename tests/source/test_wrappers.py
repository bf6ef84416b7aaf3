"""The wrappers that tests put around a source."""

import pytest
import trio

from turbofs.errors import OutOfSpaceError, SourceUnavailableError
from turbofs.model import ByteRange
from turbofs.source.memory import MemorySource
from turbofs.testing.conformance_base import content, exists, read_file
from turbofs.testing.counting import CountingSource, Request
from turbofs.testing.faulty import Fault, FaultySource
from turbofs.testing.slow import SlowSource
from turbofs.testing.throttled import ThrottledSource


@pytest.fixture
def memory():
    source = MemorySource()
    source.put("/f", content(1000))
    return source


async def test_the_nth_act_fails_before_it_takes_effect(memory):
    source = FaultySource(memory, Fault(acts=frozenset({"delete"}), nth=frozenset({1})))
    with pytest.raises(SourceUnavailableError):
        await source.delete("/f")
    assert await exists(memory, "/f")
    await source.delete("/f")
    assert not await exists(memory, "/f")
    assert (source.faults[0].seen, source.faults[0].fired) == (2, 1)


async def test_or_after_it_took_effect(memory):
    source = FaultySource(
        memory, Fault(acts=frozenset({"delete"}), after=True, error=lambda: OutOfSpaceError("full"), path="/f")
    )
    with pytest.raises(OutOfSpaceError):
        await source.delete("/f")
    assert not await exists(memory, "/f")


async def test_chance_comes_from_the_seed(memory):
    def pattern(seed):
        fault = Fault(probability=0.5)
        source = FaultySource(memory, fault, seed=seed)
        return [fault.fires("stat", "/f", source._chance) for _ in range(50)]

    assert pattern(1) == pattern(1)
    assert pattern(1) != pattern(2)
    assert 10 < sum(pattern(1)) < 40


async def test_reads_come_short_or_wrong(memory):
    reads = frozenset({"read"})
    source = FaultySource(memory, Fault(acts=reads, nth=frozenset({1}), short_reads=True))
    source.faults.append(Fault(acts=reads, nth=frozenset({2}), flips=True))
    file = await source.open("/f")
    buffer = bytearray(1000)
    assert await file.read_into(0, memoryview(buffer)) == 500
    assert buffer[:500] == content(1000)[:500]
    assert not any(buffer[500:])
    assert await file.read_into(0, memoryview(buffer)) == 1000
    wrong = int.from_bytes(buffer, "big") ^ int.from_bytes(content(1000), "big")
    assert wrong.bit_count() == 1
    assert await file.read_into(0, memoryview(buffer)) == 1000
    assert buffer == content(1000)


@pytest.mark.parametrize("more", [{"acts": frozenset({"reed"})}, {"flips": True}])
def test_a_fault_that_could_never_fire_is_refused(more):
    with pytest.raises(ValueError):
        Fault(**more)


async def test_held_acts_wait_for_their_release(memory):
    source = SlowSource(memory)
    await source.hold({"read"})
    assert (await source.stat("/f")).size == 1000
    results = []

    async def read():
        results.append(await read_file(source, "/f"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        nursery.start_soon(read)
        await source.wait_held(2)
        assert not results
        await source.release()
    assert results == [content(1000)] * 2


async def test_latency_is_per_act_and_in_parallel(memory, autojump_clock):
    source = SlowSource(memory, latency_s=0.1)
    begin = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(source.stat, "/f")
    assert trio.current_time() - begin == pytest.approx(0.1)


async def test_reads_share_the_link(memory, autojump_clock):
    source = ThrottledSource(memory, bytes_per_s=1000)
    file = await source.open("/f")
    begin = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(file.read_into, 0, memoryview(bytearray(1000)))
    assert trio.current_time() - begin == pytest.approx(3.0)


async def test_requests_are_counted(memory):
    source = CountingSource(memory)
    await read_file(source, "/f")
    await source.stat("/")
    file = await source.open("/f")
    await file.read_into(10, memoryview(bytearray(20)))
    assert source.count() == 5
    assert source.count("open") == source.count(path="/f") - 2 == 2
    assert source.ranges("/f") == [ByteRange(0, 1000), ByteRange(10, 30)]
    assert source.read_bytes == 1020
    assert source.requests[2] == Request("stat", "/")
    source.reset()
    assert source.count() == 0
