"""The HDFS source on a real HDFS: the traps of hdfs-native, files that change elsewhere, identities, WebHDFS."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from contextlib import asynccontextmanager

import hdfs_native
import httpx
import pytest
import trio

from turbofs.config import SourceConfig
from turbofs.errors import (
    AccessDeniedError,
    BadNameError,
    BusyError,
    ConfigError,
    InvalidRequestError,
    NameTooLongError,
    NotADirectoryTurboError,
    NotFoundError,
    NotPermittedError,
    QuotaExceededError,
    SourceUnavailableError,
    StaleFileError,
)
from turbofs.model import AttributeChange, ByteRange, Change
from turbofs.source.base import Capability
from turbofs.source.hdfs import HdfsSource
from turbofs.testing.conformance_base import content, read_file, write_file
from turbofs.testing.hdfs_cluster import free_port

pytestmark = pytest.mark.hdfs

SMALL_BLOCKS = hdfs_native.WriteOptions(block_size=1 << 20)


@pytest.fixture
def elsewhere(hdfs):
    """Another client of the same cluster."""
    return hdfs_native.Client(hdfs.uri)


def put(client, path, data, options=None):
    with client.create(path, options) as writer:
        writer.write(data)


async def read(file, offset, length):
    buffer = bytearray(length)
    count = await file.read_into(offset, memoryview(buffer))
    return bytes(buffer[:count])


# --- reading


async def test_trap_1_ranges_are_clamped(connected, hdfs_dir, elsewhere):
    put(elsewhere, f"{hdfs_dir}/f", content(1000))
    async with connected() as source:
        file = await source.open("/f")
        for length in (100, 1 << 20):  # one call, and a stream
            assert await read(file, 990, length) == content(1000)[990:]
        assert await read(file, 5000, 10) == b""


def test_trap_2_a_fork_is_refused_and_does_not_hang(hdfs):
    script = f"""
        import os, trio
        from turbofs.config import SourceConfig
        from turbofs.errors import SourceUnavailableError
        from turbofs.source.hdfs import HdfsSource

        source = HdfsSource("{hdfs.uri}/", SourceConfig(web_address="{hdfs.web}"), trio.CapacityLimiter(4))
        trio.run(source.connect)
        child = os.fork()
        if child == 0:
            try:
                trio.run(source.stat, "/")
            except SourceUnavailableError as error:
                os._exit(7 if "fork" in str(error) else 1)
            os._exit(2)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        trio.run(source.stat, "/")
        trio.run(source.aclose)
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["7"]


async def test_trap_3_large_reads_span_blocks(connected, hdfs_dir, elsewhere):
    data = content(5 << 20)
    put(elsewhere, f"{hdfs_dir}/f", data, SMALL_BLOCKS)
    async with connected() as source:
        file = await source.open("/f")
        assert await read(file, 0, len(data)) == data
        assert await read(file, (1 << 20) - 10, 20) == data[(1 << 20) - 10 : (1 << 20) + 10]
        assert await read(file, 12345, 3 << 20) == data[12345 : 12345 + (3 << 20)]


async def test_trap_5_bytes_of_a_file_that_is_being_written(connected, hdfs_dir, elsewhere):
    writer = elsewhere.create(f"{hdfs_dir}/f")
    writer.write(content(100_000))
    writer.hsync()
    async with connected() as source:
        file = await source.open("/f")
        assert file.version.size == 100_000
        assert await read(file, 10, 99_990) == content(100_000)[10:]
        writer.write(content(50_000, seed=1))
        writer.hsync()
        before = file.version
        after = await file.refresh()
        assert after.size == 150_000
        assert before.keeps_bytes(after), "hsync moves the length and not the time"
        assert await read(file, 99_000, 51_000) == content(100_000)[99_000:] + content(50_000, seed=1)
        writer.close()
        await file.refresh()
        assert await read(file, 99_000, 51_000) == content(100_000)[99_000:] + content(50_000, seed=1)


async def test_trap_5_a_file_that_is_open_for_append_keeps_its_bytes(connected, hdfs_dir, elsewhere):
    put(elsewhere, f"{hdfs_dir}/f", content(70_000))
    async with connected() as source:
        writer = elsewhere.append(f"{hdfs_dir}/f")
        try:
            file = await source.open("/f")
            assert file.version.size == 70_000
            assert await read(file, 0, 70_000) == content(70_000)
        finally:
            writer.close()


async def test_trap_5_without_webhdfs_unfinished_bytes_are_an_error(connected, hdfs_dir, elsewhere):
    writer = elsewhere.create(f"{hdfs_dir}/f")
    writer.write(content(1000))
    writer.hsync()
    async with connected(web_address=f"127.0.0.1:{free_port()}") as source:
        file = await source.open("/f")
        with pytest.raises(SourceUnavailableError, match="WebHDFS"):
            await read(file, 0, 1000)
    writer.close()


async def test_trap_6_small_files_are_completed_side_by_side(connected):
    async with connected() as source:
        begun = trio.current_time()
        await write_file(source, "/alone", b"x")
        alone_s = trio.current_time() - begun
        begun = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(16):
                nursery.start_soon(write_file, source, f"/{number}", b"x")
        assert trio.current_time() - begun < max(16 * alone_s, 8.0)
        assert await read_file(source, "/7") == b"x"


async def test_trap_8_a_file_that_another_client_writes_is_never_overwritten(connected, hdfs_dir, elsewhere):
    writer = elsewhere.create(f"{hdfs_dir}/f")
    writer.write(b"theirs")
    writer.hsync()
    async with connected() as source:
        with pytest.raises(BusyError):
            await source.create("/f", replace=True)
        with pytest.raises(BusyError):
            await source.append("/f")
        ours = await source.create("/g", replace=True)
        await ours.write(memoryview(b"ours"))
        late = elsewhere.create(f"{hdfs_dir}/g")
        late.write(b"late")
        with pytest.raises(BusyError):
            await ours.aclose()
        await ours.abort()
        late.close()
        writer.close()
        assert await read_file(source, "/f") == b"theirs"
        assert await read_file(source, "/g") == b"late"
        assert sorted(status.path for status in elsewhere.list_status(hdfs_dir)) == [f"{hdfs_dir}/f", f"{hdfs_dir}/g"]


async def test_trap_9_many_readers_of_one_file_ask_for_locations_again(connected, hdfs_dir, elsewhere):
    data = content(4 << 20)
    put(elsewhere, f"{hdfs_dir}/f", data)
    async with connected() as source:
        file = await source.open("/f")
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(read, file, number << 20, 1 << 20)
        assert len(file._pool) > 1
        begun = [lease.born_s for lease in file._pool._leases]
        file._pool._clock = lambda: max(begun) + 31
        await read(file, 0, 4096)
        assert len(file._pool) == 1, "readers do not outlive their locations"


async def test_an_open_file_survives_its_rename(connected, hdfs_dir, elsewhere):
    put(elsewhere, f"{hdfs_dir}/f", content(5000))
    async with connected() as source:
        file = await source.open("/f")
        elsewhere.rename(f"{hdfs_dir}/f", f"{hdfs_dir}/g")
        put(elsewhere, f"{hdfs_dir}/f", content(5000, seed=1))
        assert await read(file, 0, 5000) == content(5000)
        assert (await file.refresh()).compare(file.version) is Change.SAME


@pytest.mark.parametrize("act", ["replace", "delete"])
async def test_a_file_that_is_gone_is_stale(connected, hdfs_dir, elsewhere, act):
    put(elsewhere, f"{hdfs_dir}/f", content(5000))
    async with connected() as source:
        file = await source.open("/f")
        if act == "replace":
            put(elsewhere, f"{hdfs_dir}/new", content(5000, seed=1))
            elsewhere.rename(f"{hdfs_dir}/new", f"{hdfs_dir}/f", overwrite=True)
        else:
            elsewhere.delete(f"{hdfs_dir}/f")
        with pytest.raises(StaleFileError):
            await read(file, 0, 5000)
        with pytest.raises(StaleFileError):
            await file.refresh()


async def test_a_file_that_is_truncated_elsewhere_is_stale(connected, hdfs, hdfs_dir, elsewhere):
    put(elsewhere, f"{hdfs_dir}/f", content(5000))
    async with connected() as source:
        file = await source.open("/f")
        reply = httpx.post(
            f"{hdfs.web}/webhdfs/v1{hdfs_dir}/f",
            params={"op": "TRUNCATE", "newlength": 100, "user.name": "root"},
            trust_env=False,
        )
        assert reply.status_code == 200

        async def until_recovered():  # the NameNode tells the old length until the last block is recovered
            with trio.fail_after(60):
                while True:
                    await file.refresh()
                    await trio.sleep(0.05)

        with pytest.raises(StaleFileError):
            await until_recovered()
        with pytest.raises(StaleFileError):
            await read(file, 0, 5000)
        assert file.version.size == 5000, "it stays the version that was opened"


async def test_an_append_elsewhere_is_seen_by_refresh(connected, hdfs_dir, elsewhere):
    put(elsewhere, f"{hdfs_dir}/f", content(5000))
    async with connected() as source:
        file = await source.open("/f")
        before = file.version
        assert await read(file, 0, 5000) == content(5000)
        with elsewhere.append(f"{hdfs_dir}/f") as writer:
            writer.write(b"tail")
        assert before.compare(await file.refresh()) is Change.GREW
        assert await read(file, 4990, 100) == content(5000)[4990:] + b"tail"


async def test_a_file_is_looked_at_again_after_a_while(connected, hdfs_dir, elsewhere):
    """A file that is truncated and written again in place keeps the names of its blocks, and has other bytes."""
    put(elsewhere, f"{hdfs_dir}/f", content(5000))
    async with connected() as source:
        file = await source.open("/f")
        assert await read(file, 0, 100) == content(5000)[:100]
        elsewhere.set_times(f"{hdfs_dir}/f", 1, 1)  # what a change in place shows
        file._looked_s -= 1
        with pytest.raises(StaleFileError):
            await read(file, 0, 100)


# --- names


async def test_a_directory_of_thousands_is_streamed(connected, hdfs_dir, elsewhere):
    async with connected() as source:
        async with trio.open_nursery() as nursery:
            for part in range(8):
                nursery.start_soon(
                    trio.to_thread.run_sync,
                    lambda part=part: [
                        elsewhere.mkdirs(f"{hdfs_dir}/d/{part}-{n:04}", 0o755, True) for n in range(400)
                    ],
                )
        async with await source.list("/d") as listing:
            batches = []
            while batch := await listing.next_batch():
                batches.append([entry.name for entry in batch])
        assert [len(batch) for batch in batches] == [1000, 1000, 1000, 200]
        names = [name for batch in batches for name in batch]
        assert names == sorted(names)
        assert len(set(names)) == 3200


async def test_names_that_hdfs_does_not_take(connected):
    async with connected() as source:
        for name in ("/a:b", "/caf\udce9"):
            with pytest.raises(NotFoundError):
                await source.stat(name)
            with pytest.raises(BadNameError):
                await source.create(name)
            with pytest.raises(BadNameError):
                await source.make_directory(name)
        with pytest.raises(NameTooLongError):
            await source.make_directory("/" + "x" * 256)
        with pytest.raises(NameTooLongError):
            await source.create("/" + "/".join(["x" * 250] * 40))


async def test_the_root_is_the_path_of_the_uri(connected, hdfs_dir, elsewhere):
    put(elsewhere, f"{hdfs_dir}/sub/f", b"x")
    async with connected("/sub") as source:
        assert (await source.stat("/f")).size == 1
        assert await read_file(source, "/f") == b"x"
    with pytest.raises(NotADirectoryTurboError):
        async with connected("/sub/f"):
            pass
    with pytest.raises(NotFoundError):
        async with connected("/none"):
            pass


async def test_replication_blocks_and_space(connected, hdfs_dir, elsewhere):
    put(elsewhere, f"{hdfs_dir}/f", content(3 << 20), SMALL_BLOCKS)
    async with connected() as source:
        locations = await source.block_locations("/f", ByteRange(0, 3 << 20))
        assert [location.range.start for location in locations] == [0, 1 << 20, 2 << 20]
        assert all(location.hosts for location in locations)
        await source.set_replication("/f", 3)
        assert (await source.stat("/f")).replication == 3
        for copies in (0, 600, 1 << 20):
            with pytest.raises(InvalidRequestError):
                await source.set_replication("/f", copies)
        with pytest.raises(NotFoundError):
            await source.set_replication("/none", 2)
        space = await source.space()
        assert 0 < space.free_bytes <= space.total_bytes


async def test_attributes(connected):
    async with connected() as source:
        await write_file(source, "/f", b"x")
        await source.set_attributes("/f", AttributeChange(mode=0o1640, owner="alice", group="staff"))
        attributes = await source.stat("/f")
        assert (attributes.mode, attributes.owner, attributes.group) == (0o1640, "alice", "staff")
        await source.set_attributes("/f", AttributeChange(atime_ns=10**18 + 999_999))
        assert (await source.stat("/f")).atime_ns == 10**18
        assert (await source.stat("/f")).mtime_ns == attributes.mtime_ns
        with pytest.raises(InvalidRequestError):
            await source.set_attributes("/f", AttributeChange(owner=1000))


# --- identities


async def test_another_user_is_refused_what_it_may_not_do(connected, hdfs_dir, elsewhere):
    put(elsewhere, f"{hdfs_dir}/secret", b"x", hdfs_native.WriteOptions(permission=0o600))
    elsewhere.mkdirs(f"{hdfs_dir}/closed", 0o700, True)
    async with connected(user="bob") as source:
        assert source.describe()["user"] == "bob"
        with pytest.raises(AccessDeniedError):
            await read_file(source, "/secret")
        with pytest.raises(AccessDeniedError):
            await source.list("/closed")
        with pytest.raises(AccessDeniedError):
            await source.create("/closed/f")
        with pytest.raises(NotPermittedError):
            await source.set_attributes("/secret", AttributeChange(mode=0o644))
        await write_file(source, "/own", b"x")
        assert (await source.stat("/own")).owner == "bob"
    async with connected() as source:
        assert (await source.stat_exact("/own")).owner == "bob"
        assert await read_file(source, "/secret") == b"x"


async def test_one_process_acts_as_one_user(connected):
    async with connected(user="bob"):
        with pytest.raises(ConfigError, match="acts on HDFS as bob"):
            async with connected(user="carol"):
                pass


async def test_a_quota_is_named(connected, hdfs, hdfs_dir, elsewhere):
    elsewhere.mkdirs(f"{hdfs_dir}/q", 0o777, True)
    reply = httpx.put(
        f"{hdfs.web}/webhdfs/v1{hdfs_dir}/q",
        params={"op": "SETQUOTA", "namespacequota": 2, "user.name": "root"},
        trust_env=False,
    )
    assert reply.status_code == 200, reply.text
    async with connected() as source:
        await source.make_directory("/q/one")
        with pytest.raises(QuotaExceededError):
            await source.make_directory("/q/two")


# --- WebHDFS that is not there


async def test_without_webhdfs_versions_are_weak_and_said_to_be(connected, hdfs_dir, elsewhere):
    put(elsewhere, f"{hdfs_dir}/f", content(5000))
    async with connected(web_address=f"127.0.0.1:{free_port()}") as source:
        assert Capability.STRONG_VERSIONS not in source.capabilities
        assert "weak: " in source.describe()["versions"]
        file = await source.open("/f")
        assert not file.version.strong
        assert await read(file, 0, 5000) == content(5000)
        elsewhere.delete(f"{hdfs_dir}/f")
        file._pool.clear()
        with pytest.raises(StaleFileError):
            await read(file, 0, 5000)
    async with connected() as source:
        assert Capability.STRONG_VERSIONS in source.capabilities
        assert source.describe()["versions"] == "strong"


async def test_without_webhdfs_the_namenode_is_asked_who_writes_by_an_append_that_it_refuses(
    connected, hdfs_dir, elsewhere
):
    writer = elsewhere.create(f"{hdfs_dir}/f")
    writer.write(b"theirs")
    writer.hsync()
    async with connected(web_address=f"127.0.0.1:{free_port()}") as source:
        assert Capability.KEEPS_OPEN not in source.capabilities
        assert await source.being_written("/f")
        with pytest.raises(BusyError):
            await source.create("/f", replace=True)
        writer.close()
        assert not await source.being_written("/f")
        assert await read_file(source, "/f") == b"theirs"
        await write_file(source, "/f", b"ours")
        assert await read_file(source, "/f") == b"ours"
        with pytest.raises(NotFoundError):
            await source.being_written("/none")


@asynccontextmanager
async def silent_server():
    """A port that takes connections and never answers."""
    connections = 0

    async def serve(stream):
        nonlocal connections
        connections += 1
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(
            lambda task_status: trio.serve_tcp(serve, 0, host="127.0.0.1", task_status=task_status)
        )
        yield listeners[0].socket.getsockname()[1], lambda: connections
        nursery.cancel_scope.cancel()


async def test_a_silent_webhdfs_is_not_asked_at_every_open(connected, hdfs_dir, elsewhere):
    put(elsewhere, f"{hdfs_dir}/f", b"x")
    async with (
        silent_server() as (port, connections),
        connected(web_address=f"127.0.0.1:{port}", operation_timeout_s=0.5) as source,
    ):
        asked = connections()
        for _ in range(20):
            assert await read_file(source, "/f") == b"x"
        assert connections() - asked <= 1


async def test_strong_versions_come_back_with_webhdfs(connected, hdfs, hdfs_dir, elsewhere):
    put(elsewhere, f"{hdfs_dir}/f", b"x")
    async with connected(web_address=f"127.0.0.1:{free_port()}") as source:
        source._hdfs.web._addresses = [hdfs.web]
        source._hdfs.web.forgive()
        assert (await source.open("/f")).version.strong
        assert Capability.STRONG_VERSIONS in source.capabilities


# --- wrong settings


@pytest.mark.parametrize(
    ("uri", "changes"),
    [
        ("hdfs://", {}),
        ("hdfs://a:b/", {}),
        ("hdfs://host:9000/", {"client": "webhdfs"}),
        ("hdfs://host:9000/", {"hadoop_conf_dir": "/no/such/folder"}),
        ("hdfs://host:9000/", {"web_address": "nonsense"}),
    ],
)
def test_wrong_settings_are_refused_at_once(uri, changes):
    with pytest.raises(ConfigError):
        HdfsSource(uri, SourceConfig(**changes), trio.CapacityLimiter(1))


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
async def test_a_namenode_that_is_not_there(host):
    source = HdfsSource(f"hdfs://{host}:{free_port()}/", SourceConfig(operation_timeout_s=5), trio.CapacityLimiter(4))
    with pytest.raises(SourceUnavailableError):
        await source.connect()
    await source.aclose()


async def test_missing_parts_of_libhdfs_are_named(monkeypatch):
    config = SourceConfig(client="libhdfs")
    for variable in ("JAVA_HOME", "CLASSPATH", "HADOOP_HOME", "ARROW_LIBHDFS_DIR"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigError, match="JAVA_HOME"):
        HdfsSource("hdfs://host:9000/", config, trio.CapacityLimiter(1))
