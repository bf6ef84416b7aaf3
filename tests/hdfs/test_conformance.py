"""The conformance suite over a real HDFS."""

from __future__ import annotations

import secrets
from contextlib import asynccontextmanager

import hdfs_native
import pytest
import trio

from turbofs.source.hdfs import HdfsSource
from turbofs.testing.conformance import SourceConformance

pytestmark = pytest.mark.hdfs


class TestHdfsSource(SourceConformance):
    knows_writers = True

    @pytest.fixture(autouse=True)
    def _cluster(self, hdfs, hdfs_config):
        self.hdfs = hdfs
        self.config = hdfs_config

    @asynccontextmanager
    async def make_source(self):
        path = f"/conformance-{secrets.token_hex(6)}"
        hdfs_native.Client(self.hdfs.uri).mkdirs(path, 0o777, True)
        source = HdfsSource(f"{self.hdfs.uri}{path}", self.config, trio.CapacityLimiter(16))
        await source.connect()
        try:
            yield source
        finally:
            await source.aclose()
