"""The in-memory source."""

from contextlib import asynccontextmanager

from turbofs.source.memory import MemorySource
from turbofs.testing.conformance import SourceConformance


class TestMemorySource(SourceConformance):
    @asynccontextmanager
    async def make_source(self):
        source = MemorySource()
        await source.connect()
        yield source
        await source.aclose()
