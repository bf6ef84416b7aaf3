"""Daemons that die or hang under the source. One cluster for the file; each test leaves it whole."""

from __future__ import annotations

import json
import time
from contextlib import asynccontextmanager

import hdfs_native
import pytest
import trio

from turbofs.config import SourceConfig
from turbofs.errors import DeadlineExceededError, SourceUnavailableError
from turbofs.source.hdfs import HdfsSource
from turbofs.source.retrying import RetryingSource
from turbofs.testing.conformance_base import content, names_in, read_file, write_file
from turbofs.testing.hdfs_cluster import HdfsCluster
from turbofs.testing.waiting import eventually

pytestmark = pytest.mark.hdfs

DATA = content(8 << 20)


@pytest.fixture(scope="module")
def fragile(tmp_path_factory):
    # One replica unless a test says more: else most pipelines of three DataNodes would contain the dead one.
    cluster = HdfsCluster(tmp_path_factory.mktemp("fragile"), settings={"dfs.replication": "1"})
    with cluster:
        client = hdfs_native.Client(cluster.uri)
        with client.create("/f", hdfs_native.WriteOptions(block_size=1 << 20, replication=2)) as writer:
            writer.write(DATA)
        yield cluster
    cluster.destroy()


@asynccontextmanager
async def connected(cluster, **options):
    config = SourceConfig(web_address=cluster.web, **{"operation_timeout_s": 5.0, **options})
    source = HdfsSource(f"{cluster.uri}/", config, trio.CapacityLimiter(4))
    await source.connect()
    try:
        yield source
    finally:
        await source.aclose()


async def read(file, offset, length):
    buffer = bytearray(length)
    count = await file.read_into(offset, memoryview(buffer))
    return bytes(buffer[:count])


def live_datanodes(cluster):
    """HOST:PORT of each DataNode that the NameNode believes in."""
    return set(json.loads(cluster.jmx("Hadoop:service=NameNode,name=NameNodeInfo").get("LiveNodes", "{}")))


async def until_back(cluster, index, before):
    """Start a killed DataNode again, and wait until its new ports have taken the place of the old ones (*before*)."""
    cluster.start_datanode(index)
    await trio.to_thread.run_sync(
        eventually,
        lambda: len(now := live_datanodes(cluster)) == cluster.datanodes and now != before,
        "DataNode is back",
    )


async def until_it_works(act, timeout_s=60.0):
    with trio.fail_after(timeout_s):
        while True:
            try:
                return await act()
            except SourceUnavailableError:
                await trio.sleep(0.1)


async def test_a_frozen_datanode_makes_reads_slower_and_not_wrong(fragile):
    async with connected(fragile) as source:
        file = await source.open("/f")
        assert await read(file, 0, 4096) == DATA[:4096]
        fragile.workers[0].freeze()
        try:
            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    pieces = {}

                    async def fetch(number):
                        pieces[number] = await until_it_works(lambda: read(file, number << 20, 1 << 20))

                    for number in range(8):
                        nursery.start_soon(fetch, number)
                    begun = trio.current_time()
                    await source.stat("/f")  # hung reads do not keep the others out
                    assert trio.current_time() - begun < 5
            assert b"".join(pieces[number] for number in range(8)) == DATA
            for number in range(8):  # small reads too
                offset = (number << 20) + 5
                assert await until_it_works(lambda o=offset: read(file, o, 100)) == DATA[offset : offset + 100]
        finally:
            fragile.workers[0].thaw()
        await file.aclose()


async def test_a_datanode_killed_mid_read_and_trap_7_a_pipeline_with_a_dead_datanode(fragile):
    async with connected(fragile) as source:
        file = await source.open("/f")
        assert await read(file, 0, 2 << 20) == DATA[: 2 << 20]
        before = live_datanodes(fragile)
        fragile.workers[1].kill()
        try:
            assert await read(file, 2 << 20, 6 << 20) == DATA[2 << 20 :]
            async with trio.open_nursery() as nursery:  # the NameNode still believes in the dead one
                for number in range(6):
                    nursery.start_soon(write_file, source, f"/new-{number}", b"%d" % number)
            for number in range(6):
                assert await read_file(source, f"/new-{number}") == b"%d" % number
        finally:
            await until_back(fragile, 1, before)


async def test_a_namenode_that_is_restarted(fragile):
    async with connected(fragile) as source:
        file = await source.open("/f")
        assert await read(file, 0, 100) == DATA[:100]
        fragile.namenode.kill()
        try:
            assert await read(file, 50, 100) == DATA[50:150], "an open reader needs no NameNode"
            for act in (source.stat, source.open, source.list, read_file_of(source), source.create):
                with pytest.raises(SourceUnavailableError):
                    await act("/f")
        finally:
            fragile.start_namenode(wait=False)
        await until_it_works(lambda: source.stat("/f"))
        await trio.to_thread.run_sync(fragile.wait_ready)
        assert (await source.open("/f")).version == file.version, "ids, and versions, outlive a restart"
        assert await read(file, 0, len(DATA)) == DATA


def read_file_of(source):
    async def act(path):
        return await read_file(source, path)

    return act


async def test_a_namenode_that_hangs(fragile):
    async with connected(fragile, operation_timeout_s=0.7) as source:
        fragile.namenode.freeze()
        try:
            begun = time.monotonic()
            for _ in range(6):  # more than the limiter has places
                with pytest.raises(SourceUnavailableError, match="no answer within"):
                    await source.stat("/f")
            assert time.monotonic() - begun < 10
            assert source.describe()["hung_calls"] == 6
        finally:
            fragile.namenode.thaw()
        await until_it_works(lambda: source.stat("/f"))
        with trio.fail_after(20):
            while source.describe()["hung_calls"]:
                await trio.sleep(0.05)


class LosesTheAnswer:
    """A native writer whose close never reaches the NameNode."""

    def __init__(self, writer):
        self._writer = writer

    def write(self, data):
        return self._writer.write(data)

    def hsync(self):
        return self._writer.hsync()

    def close(self):
        raise OSError("Connection reset by peer (os error 104)")


async def test_case_17_a_failed_close_leaves_no_lease(fragile):
    async with connected(fragile, operation_timeout_s=10) as source:
        writer = await source.create("/lost")
        writer._native = LosesTheAnswer(writer._native)
        await writer.write(memoryview(content(100_000)))
        await writer.sync()
        await writer.aclose()  # the NameNode is made to close it, and it holds everything that was written
        assert await read_file(source, "/lost") == content(100_000)
        appended = await source.append("/lost")
        await appended.write(memoryview(b"tail"))
        await appended.aclose()
        assert await read_file(source, "/lost") == content(100_000) + b"tail"


async def test_case_17_an_abandoned_append_leaves_no_lease(fragile):
    async with connected(fragile, operation_timeout_s=10) as source:
        await write_file(source, "/log", content(1000))
        for _ in range(2):
            writer = await source.append("/log")
            await writer.write(memoryview(b"more"))
            await writer.abort()
        assert (await read_file(source, "/log"))[:1000] == content(1000)


@asynccontextmanager
async def patient(cluster, **options):
    """The source as a mount uses it."""
    config = SourceConfig(web_address=cluster.web, backoff_limit_s=0.5, **{"operation_timeout_s": 20.0, **options})
    source = RetryingSource(HdfsSource(f"{cluster.uri}/", config, trio.CapacityLimiter(4)), config)
    await source.connect()
    try:
        yield source
    finally:
        await source.aclose()


async def until_restarted(cluster):
    cluster.start_namenode(wait=False)  # by this thread: daemons die with the one that started them
    await trio.to_thread.run_sync(cluster.wait_ready)


async def test_a_log_goes_on_when_the_namenode_is_restarted(fragile):
    async with patient(fragile) as source:
        writer = await source.create("/.new-log")
        await writer.write(memoryview(b"one "))
        await writer.sync()
        await source.rename("/.new-log", "/log-on", replace=False)
        fragile.namenode.kill()
        async with trio.open_nursery() as nursery:
            await writer.write(memoryview(b"two "))
            nursery.start_soon(writer.sync)
            await until_restarted(fragile)
        assert await read_file(source, "/log-on") == b"one two "
        await writer.write(memoryview(b"three"))
        await writer.aclose()
        assert await read_file(source, "/log-on") == b"one two three"
        assert not await source.being_written("/log-on")


async def test_a_file_that_is_completed_while_the_namenode_is_restarted(fragile):
    async with patient(fragile) as source:
        small, large = await source.create("/small"), await source.create("/large")
        await small.write(memoryview(b"small"))
        await large.write(memoryview(DATA))
        await large.sync()
        fragile.namenode.kill()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(small.aclose)
            nursery.start_soon(large.aclose)
            await until_restarted(fragile)
        assert await read_file(source, "/small") == b"small"
        assert await read_file(source, "/large") == DATA
        assert not await source.being_written("/large")
        assert not await source.being_written("/small")


async def test_what_is_written_while_the_namenode_is_away_fails_and_is_cleaned_up(fragile):
    async with patient(fragile, deadline_s=1.0) as source:
        writer = await source.create("/given-up")
        await writer.write(memoryview(DATA[:1000]))
        fragile.namenode.kill()
        try:
            with pytest.raises(DeadlineExceededError):
                await writer.aclose()
            with pytest.raises(DeadlineExceededError):
                await source.create("/not-begun")
        finally:
            await until_restarted(fragile)
        await writer.abort()
        assert "given-up" not in await names_in(source, "/")
        await write_file(source, "/given-up", b"next", replace=False)


async def test_safe_mode_is_waited_for(fragile):
    fragile.shell("-safemode", "enter", admin=True)
    try:
        async with patient(fragile, deadline_s=1.0) as source:
            with pytest.raises(SourceUnavailableError, match="safe mode"):
                await source.inner.create("/in-safe-mode")
            with pytest.raises(DeadlineExceededError, match="safe mode"):
                await source.rename("/f", "/g", replace=False)
        async with patient(fragile) as source, trio.open_nursery() as nursery:
            nursery.start_soon(write_file, source, "/in-safe-mode", b"x")
            nursery.start_soon(source.make_directory, "/dir-in-safe-mode")
            await trio.to_thread.run_sync(lambda: fragile.shell("-safemode", "leave", admin=True))
        async with patient(fragile) as source:
            assert await read_file(source, "/in-safe-mode") == b"x"
            await source.rename("/f", "/g", replace=False)
            await source.rename("/g", "/f", replace=False)
    finally:
        fragile.shell("-safemode", "leave", admin=True)


@pytest.mark.parametrize("synced", [False, True])
async def test_a_datanode_that_dies_after_the_file_was_renamed(fragile, synced):
    """The pipeline goes on with the DataNodes that are left, and nothing appears under the old name."""
    async with connected(fragile, operation_timeout_s=30) as source:
        writer = await source.create("/.mended")
        await source.set_replication("/.mended", 3)
        await writer.write(memoryview(DATA[: 2 << 20]))
        if synced:
            await writer.sync()
        await source.rename("/.mended", "/mended", replace=synced)
        before = live_datanodes(fragile)
        fragile.workers[0].kill()
        try:
            await writer.write(memoryview(DATA[2 << 20 :]))
            await writer.sync()
            await writer.aclose()
            assert await read_file(source, "/mended") == DATA
            names = await names_in(source, "/")
            assert "mended" in names
            assert ".mended" not in names
            await source.delete("/mended")
        finally:
            await until_back(fragile, 0, before)


async def test_trap_10_a_datanode_that_dies_mid_write(fragile):
    async with connected(fragile, operation_timeout_s=30) as source:
        writer = await source.create("/long")
        await source.set_replication("/long", 3)
        await writer.write(memoryview(DATA[: 1 << 20]))
        await writer.sync()
        before = live_datanodes(fragile)
        fragile.workers[2].kill()
        try:
            await writer.write(memoryview(DATA[1 << 20 :]))
            await writer.sync()
            await writer.aclose()
            assert await read_file(source, "/long") == DATA
        finally:
            await until_back(fragile, 2, before)
