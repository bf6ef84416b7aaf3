"""Reads of one open file where the awaits of several tasks interleave: growth, closing, other opens."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from turbofs.background import Background
from turbofs.config import ReadConfig, SourceConfig
from turbofs.metrics import Metrics
from turbofs.read.extent_cache import CachedFile, ExtentCache
from turbofs.read.fetcher import Fetcher
from turbofs.read.file_reader import FileReader
from turbofs.read.memory_budget import MemoryBudget
from turbofs.read.streams import StreamTracker
from turbofs.source.file import FileSource
from turbofs.source.memory import MemorySource
from turbofs.testing.slow import SlowSource

KIB = 1 << 10
CONFIG = ReadConfig(extent_bytes=64 * KIB, first_extent_bytes=4 * KIB, window_bytes=64 * KIB, fetches=1)


@pytest.fixture
def fetcher(nursery):
    cache = ExtentCache(MemoryBudget(1024 * KIB, CONFIG.extent_bytes))
    return Fetcher(cache, CONFIG, Background(nursery), Metrics())


async def test_the_parts_of_one_read_are_of_one_version(fetcher):
    memory = MemorySource()
    memory.put("/f", b"a" * 64 * KIB)
    source = SlowSource(memory)
    file = await source.open("/f")
    reader = FileReader(file, CachedFile(file.version), fetcher, Metrics())
    assert await reader.read(StreamTracker(CONFIG), 0, 4 * KIB) == b"a" * 4 * KIB
    await source.hold({"read"})
    found = []

    async def read():
        found.append(bytes(await reader.read(StreamTracker(CONFIG), 0, 8 * KIB)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await source.wait_held()
        memory.modify("/f", 0, b"b" * 65 * KIB, size=65 * KIB)
        reader.advance(await file.refresh())  # as a getattr or another open does meanwhile
        await source.release()
    assert found == [b"b" * 8 * KIB]


async def test_read_ahead_of_an_open_that_was_closed_does_not_fail_the_next_one(fetcher, tmp_path):
    (tmp_path / "f").write_bytes(b"a" * 128 * KIB)
    source = SlowSource(FileSource(tmp_path.as_uri(), SourceConfig(), trio.CapacityLimiter(4)))
    await source.connect()
    first, second = await source.open("/f"), await source.open("/f")
    cached = CachedFile(first.version)
    await source.hold({"read"})
    fetcher.enqueue(first, cached, 0, 64 * KIB)
    fetcher.enqueue(first, cached, 64 * KIB, 128 * KIB)  # waits for the only slot
    await source.wait_held()
    await first.aclose()
    await source.release()
    reader = FileReader(second, cached, fetcher, Metrics())
    tracker = StreamTracker(CONFIG)
    for offset in (64 * KIB, 0):
        assert await reader.read(tracker, offset, 4 * KIB) == b"a" * 4 * KIB
    await second.aclose()
    await source.aclose()
