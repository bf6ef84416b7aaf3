"""Writing to a real HDFS where it refuses, and what writers leave behind."""

from __future__ import annotations

import time

import hdfs_native
import httpx
import pytest

from turbofs.errors import AccessDeniedError, NotFoundError, QuotaExceededError
from turbofs.model import join
from turbofs.source.orphans import sweep, temporary_name
from turbofs.source.retrying import RetryingSource
from turbofs.testing.conformance_base import append_to_file, content, names_in, read_file, write_file

pytestmark = pytest.mark.hdfs

HOUR_NS = 3600 * 10**9


@pytest.fixture
def elsewhere(hdfs):
    """Another client of the same cluster."""
    return hdfs_native.Client(hdfs.uri)


@pytest.fixture
def set_quota(hdfs, hdfs_dir):
    """`set_quota("/q", storagespacequota=…)` on a directory of this test."""

    def act(path, op, **quota):
        reply = httpx.put(
            f"{hdfs.web}/webhdfs/v1{hdfs_dir}{path}",
            params={"op": op, "user.name": "root", **quota},
            trust_env=False,
        )
        assert reply.status_code == httpx.codes.OK, reply.text

    return act


async def write_and_complete(writer, data):
    await writer.write(memoryview(data))
    await writer.aclose()


# --- refusals


async def test_a_full_space_quota_is_named_and_leaves_nothing(connected, hdfs_dir, hdfs_config, elsewhere, set_quota):
    elsewhere.mkdirs(f"{hdfs_dir}/q", 0o777, True)
    set_quota("/q", "SETQUOTA", storagespacequota=1 << 20)
    async with connected() as inner:
        source = RetryingSource(inner, hdfs_config)
        for size_bytes in (100, 3 << 20):  # held here until it is completed; sent at once
            writer = await source.create("/q/f")
            with pytest.raises(QuotaExceededError) as caught:
                await write_and_complete(writer, content(size_bytes))
            assert not caught.value.transient
            await writer.abort()
            assert await names_in(source, "/q") == []
        writer = await source.create("/q/log")
        await writer.write(memoryview(b"x"))
        with pytest.raises(QuotaExceededError):
            await writer.sync()
        await writer.abort()
        assert source.describe()["retries"] == 0


async def test_a_full_name_quota_is_named(connected, hdfs_dir, elsewhere, set_quota):
    elsewhere.mkdirs(f"{hdfs_dir}/q", 0o777, True)
    set_quota("/q", "SETQUOTA", namespacequota=2)
    async with connected() as source:
        await write_file(source, "/q/one", b"x", replace=False)
        await write_file(source, "/other", b"x", replace=False)
        with pytest.raises(QuotaExceededError):
            await source.create("/q/two")
        with pytest.raises(QuotaExceededError):
            await source.rename("/other", "/q/two", replace=False)


async def test_who_may_not_write_is_told_so_at_each_act(connected, hdfs_dir, elsewhere):
    elsewhere.mkdirs(f"{hdfs_dir}/closed", 0o755, True)
    with elsewhere.create(f"{hdfs_dir}/closed/f") as writer:
        writer.write(b"x")
    async with connected(user="bob") as source:
        await write_file(source, "/own", b"x")
        for act in (
            lambda: source.create("/closed/new"),
            lambda: source.append("/closed/f"),
            lambda: source.rename("/own", "/closed/own", replace=False),
            lambda: source.rename("/own", "/closed/f", replace=True),
            lambda: source.rename("/closed/f", "/f", replace=False),
            lambda: source.delete("/closed/f"),
            lambda: source.make_directory("/closed/d"),
            lambda: write_file(source, "/closed/f", b"y"),
        ):
            with pytest.raises(AccessDeniedError):
                await act()
        assert await read_file(source, "/closed/f") == b"x"
        assert sorted(await names_in(source, "/closed")) == ["f"]


# --- what writers leave


async def test_temporaries_are_swept_once_nobody_has_a_lease_on_them(connected, hdfs_dir, elsewhere):
    held, left, young = (temporary_name() for _ in range(3))
    writers = [elsewhere.create(f"{hdfs_dir}/{name}") for name in (held, left)]
    for writer in writers:
        writer.write(b"half")
        writer.hsync()
    writers[1].close()
    for name in (held, left):
        elsewhere.set_times(f"{hdfs_dir}/{name}", 1000, 1000)
    async with connected() as source:
        await write_file(source, join("/", young), b"x", replace=False)
        now_ns = time.time_ns()
        assert await sweep(source, "/", older_than_s=3600, now_ns=now_ns) == [join("/", left)]
        assert sorted(await names_in(source, "/")) == sorted([held, young])
        writers[0].close()
        assert sorted(await sweep(source, "/", older_than_s=3600, now_ns=now_ns + 2 * HOUR_NS)) == sorted(
            [join("/", held), join("/", young)]
        )
        assert await names_in(source, "/") == []


async def test_a_small_file_costs_one_question_to_webhdfs(connected, hdfs_config, monkeypatch):
    """Create, write, close, look at it, name it: an HTTP call takes longer than all of the others together."""
    async with connected() as inner:
        source = RetryingSource(inner, hdfs_config)
        asked = []
        ask = inner._hdfs.web._ask

        async def counted(url, parameters, act, shown):
            asked.append(act)
            return await ask(url, parameters, act, shown)

        monkeypatch.setattr(inner._hdfs.web, "_ask", counted)
        temporary = join("/", temporary_name())
        writer = await source.create(temporary)
        await writer.write(memoryview(content(4096)))
        await writer.aclose()
        identity = (await source.stat_exact(temporary)).version
        assert identity.strong
        await source.rename(temporary, "/f", replace=False, identity=identity)
        assert asked == ["stat"]
        assert (await source.stat_exact("/f")).version == identity
        assert await read_file(source, "/f") == content(4096)


async def test_small_writes_and_large_ones_keep_their_order(connected):
    async with connected() as source:
        data = content(9 << 20)
        sizes = [1, 5000, 60_000, 70_000, 0, 65_536, 5 << 20, 3, 64 << 10, 1 << 20, 1000]
        writer = await source.create("/f")
        written = 0
        for number, size_bytes in enumerate(sizes):
            await writer.write(memoryview(data)[written : written + size_bytes])
            written += size_bytes
            if number % 4 == 3:
                await writer.sync()
                assert (await source.stat("/f")).size == written
        await writer.aclose()
        assert await read_file(source, "/f") == data[:written]
        await append_to_file(source, "/f", b"tail")
        assert await read_file(source, "/f") == data[:written] + b"tail"


async def test_a_file_that_is_deleted_while_it_is_written_does_not_come_back(connected, elsewhere, hdfs_dir):
    async with connected() as source:
        writer = await source.create("/f")
        await writer.write(memoryview(b"x"))
        elsewhere.delete(f"{hdfs_dir}/f")
        with pytest.raises(Exception) as caught:
            await writer.sync()
        await writer.abort()
        with pytest.raises(NotFoundError):
            await source.stat("/f")
        assert not caught.value.transient
