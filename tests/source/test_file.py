"""Local trees."""

from contextlib import asynccontextmanager

import pytest
import trio

from turbofs.config import SourceConfig
from turbofs.source.file import FileSource
from turbofs.testing.conformance import SourceConformance


@asynccontextmanager
async def connected(root):
    source = FileSource(root.as_uri(), SourceConfig(), trio.CapacityLimiter(8))
    await source.connect()
    try:
        yield source
    finally:
        await source.aclose()


class TestFileSource(SourceConformance):
    @pytest.fixture(autouse=True)
    def _root(self, tmp_path):
        self.root = tmp_path

    def make_source(self):
        return connected(self.root)
