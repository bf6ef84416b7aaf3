"""What the tests of the HDFS source share."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio

from turbofs.source.hdfs import HdfsSource


@pytest.fixture
def connected(hdfs, hdfs_dir, hdfs_config):
    """`async with connected() as source`: this test's directory; keyword arguments change the configuration."""

    @asynccontextmanager
    async def connect(path="", **changes):
        source = HdfsSource(f"{hdfs.uri}{hdfs_dir}{path}", replace(hdfs_config, **changes), trio.CapacityLimiter(16))
        await source.connect()
        try:
            yield source
        finally:
            await source.aclose()

    return connect
