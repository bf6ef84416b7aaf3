"""The in-memory source, and the wrappers that hand everything through."""

from contextlib import asynccontextmanager

import pytest

from turbofs.config import SourceConfig
from turbofs.errors import StaleFileError
from turbofs.model import Change
from turbofs.source.memory import MemorySource
from turbofs.source.retrying import RetryingSource
from turbofs.testing.conformance import SourceConformance
from turbofs.testing.counting import CountingSource
from turbofs.testing.faulty import FaultySource


class TestMemorySource(SourceConformance):
    knows_writers = True

    @asynccontextmanager
    async def make_source(self):
        source = MemorySource()
        await source.connect()
        yield source
        await source.aclose()


class TestDelegatingSource(SourceConformance):
    knows_writers = True

    @asynccontextmanager
    async def make_source(self):
        source = CountingSource(FaultySource(MemorySource()))
        await source.connect()
        yield source
        await source.aclose()


class TestRetryingSource(SourceConformance):
    knows_writers = True

    @asynccontextmanager
    async def make_source(self):
        source = RetryingSource(MemorySource(), SourceConfig())
        await source.connect()
        yield source
        await source.aclose()


async def test_modify_changes_the_same_file_and_put_makes_another():
    source = MemorySource()
    source.put("/d/f", b"0123456789")
    first = (await source.stat("/d/f")).version
    file = await source.open("/d/f")
    source.modify("/d/f", 10, b"more")
    grown = (await source.stat("/d/f")).version
    assert first.compare(grown) is Change.GREW
    buffer = bytearray(10)
    assert (await file.refresh()).size == 14
    assert await file.read_into(0, memoryview(buffer)) == 10
    source.modify("/d/f", 2, b"xx")
    with pytest.raises(StaleFileError):
        await file.read_into(0, memoryview(buffer))
    source.modify("/d/f", 0, b"", size=3)
    assert (await source.stat("/d/f")).size == 3
    source.modify("/d/f", 5, b"y")
    file = await source.open("/d/f")
    assert await file.read_into(0, memoryview(buffer)) == 6
    assert buffer[:6] == b"01x\0\0y"
    source.put("/d/f", b"0123456789")
    assert first.compare((await source.stat("/d/f")).version) is Change.REPLACED
