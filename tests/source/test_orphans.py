"""Temporary files of dead writers: what is recognised, what is swept, and what is left alone."""

from __future__ import annotations

import os
import time

import pytest
import trio

from turbofs.config import SourceConfig
from turbofs.errors import NotFoundError
from turbofs.source.file import FileSource
from turbofs.source.memory import MemorySource
from turbofs.source.orphans import is_temporary_name, sweep, temporary_name
from turbofs.testing.conformance_base import names_in
from turbofs.testing.counting import CountingSource

HOUR_NS = 3600 * 10**9
OLD, OTHER = ".turbofs-0123456789abcdef.tmp", ".turbofs-00000000000000ff.tmp"


def test_names():
    made = {temporary_name() for _ in range(100)}
    assert len(made) == 100
    assert all(map(is_temporary_name, made))
    for name in (
        "",
        "f",
        ".turbofs",
        ".turbofs-0123456789abcdef",
        ".turbofs-0123456789ABCDEF.tmp",
        ".turbofs-0123456789abcde.tmp",
        ".turbofs-0123456789abcdef0.tmp",
        f"{OLD}\n",
        f"d/{OLD}",
        f"x{OLD}",
    ):
        assert not is_temporary_name(name), name


async def test_only_old_temporaries_that_nobody_writes_go():
    source = MemorySource()
    await source.make_directory("/d")
    writer = await source.create(f"/d/{OTHER}")
    source.put(f"/d/{OLD}")
    kept, looks_like = temporary_name(), ".turbofs-backup.tmp"
    source.put(f"/d/{kept}")
    source.put(f"/d/{looks_like}")
    source.put(f"/d/sub/{OLD}")
    directory = temporary_name()
    await source.make_directory(f"/d/{directory}")
    keep = {f"/d/{kept}"}
    now_ns = time.time_ns()
    assert await sweep(source, "/d", older_than_s=3600, now_ns=now_ns, keep=keep) == []
    assert await sweep(source, "/d", older_than_s=3600, now_ns=now_ns + 2 * HOUR_NS, keep=keep) == [f"/d/{OLD}"]
    assert sorted(await names_in(source, "/d")) == sorted([OTHER, kept, looks_like, "sub", directory])
    assert await names_in(source, "/d/sub") == [OLD], "one directory, not what is below it"
    await writer.aclose()
    assert await sweep(source, "/d", older_than_s=3600, now_ns=now_ns + 2 * HOUR_NS, keep=keep) == [f"/d/{OTHER}"]


@pytest.mark.parametrize("moment", ["being_written", "delete"])
async def test_what_vanishes_meanwhile_is_no_error(moment):
    memory = MemorySource()
    memory.put(f"/{OLD}")
    memory.put(f"/{OTHER}")

    class Racing(CountingSource):
        async def around(self, act, path, call):
            if act == moment and path == f"/{OTHER}":
                await memory.delete(path)
            return await super().around(act, path, call)

    assert await sweep(Racing(memory), "/", older_than_s=0, now_ns=time.time_ns() + HOUR_NS) == [f"/{OLD}"]
    assert await names_in(memory, "/") == []


async def test_a_directory_that_is_not_there():
    with pytest.raises(NotFoundError):
        await sweep(MemorySource(), "/none", older_than_s=0, now_ns=0)


async def test_a_local_tree(tmp_path):
    (tmp_path / OLD).write_bytes(b"left behind")
    os.utime(tmp_path / OLD, ns=(1, 1))
    (tmp_path / OTHER).write_bytes(b"young")
    source = FileSource(f"file://{tmp_path}", SourceConfig(), trio.CapacityLimiter(4))
    await source.connect()
    assert await sweep(source, "/", older_than_s=60, now_ns=time.time_ns()) == [f"/{OLD}"]
    assert os.listdir(tmp_path) == [OTHER]
    await source.aclose()
