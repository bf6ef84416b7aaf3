"""A name service with two NameNodes: names, bytes and versions follow a failover."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import trio

from turbofs.config import SourceConfig
from turbofs.errors import SourceUnavailableError
from turbofs.source.hdfs import HdfsSource
from turbofs.testing.conformance_base import content, read_file, write_file

pytestmark = [pytest.mark.hdfs, pytest.mark.long]


def ha_cluster(root):
    # Test folders are no packages (importmode=importlib): a helper beside the test is loaded by its path.
    spec = importlib.util.spec_from_file_location("ha_cluster", Path(__file__).with_name("ha_cluster.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.HaCluster(root, datanodes=2)


async def until_it_works(act):
    with trio.fail_after(60):
        while True:
            try:
                return await act()
            except SourceUnavailableError:
                await trio.sleep(0.1)


async def test_a_failover_is_followed(tmp_path):
    root = tmp_path / "ha"
    root.mkdir()
    cluster = ha_cluster(root)
    try:
        await trio.to_thread.run_sync(cluster.start)
        config = SourceConfig(hadoop_conf_dir=str(cluster.conf_dir), operation_timeout_s=5)
        source = HdfsSource(f"{cluster.uri}/", config, trio.CapacityLimiter(4))
        await source.connect()
        assert len(source.describe()["namenodes"]) == 2
        await write_file(source, "/f", content(100_000))
        file = await source.open("/f")
        assert file.version.strong
        await trio.to_thread.run_sync(cluster.fail_over)
        assert (await until_it_works(lambda: source.stat("/f"))).size == 100_000
        buffer = bytearray(100_000)
        await until_it_works(lambda: file.read_into(0, memoryview(buffer)))
        assert buffer == content(100_000)
        again = await until_it_works(lambda: source.open("/f"))
        assert again.version == file.version, "WebHDFS is asked where it is active now"
        await until_it_works(lambda: write_file(source, "/g", b"after"))
        assert await read_file(source, "/g") == b"after"
        assert (await source.space()).total_bytes
        await source.aclose()
    finally:
        cluster.destroy()
