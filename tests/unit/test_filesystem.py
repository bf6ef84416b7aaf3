"""The file system without FUSE, where others act while the source is asked; and what it tells to whom."""

from __future__ import annotations

import json
import os
from functools import partial

import pytest
import trio

from turbofs.config import Config, FsConfig, MountConfig, ReadConfig, SourceConfig
from turbofs.errors import AccessDeniedError, NotFoundError, NotSupportedError, SourceUnavailableError
from turbofs.fs.filesystem import FileSystem
from turbofs.fs.hint_store import HintStore
from turbofs.fs.inodes import ROOT_NUMBER, Inode, InodeTable
from turbofs.metrics import Metrics
from turbofs.model import Caller
from turbofs.source.file import FileSource
from turbofs.source.memory import MemorySource
from turbofs.testing.faulty import Fault, FaultySource
from turbofs.testing.slow import SlowSource

ME = Caller(os.getuid(), os.getgid(), os.getpid())
MIB = 1 << 20


class Mounted:
    """A file system over a source whose acts can be held."""

    def __init__(self, nursery: trio.Nursery, tmp_path) -> None:
        self.memory = MemorySource()
        self.folder = tmp_path
        self.source = SlowSource(self.memory)
        self._nursery = nursery
        self._config = Config(
            MountConfig("memory:", tmp_path),
            read=ReadConfig(memory_bytes=16 * MIB, extent_bytes=MIB),
            fs=FsConfig(attribute_timeout_s=0),
        )

    async def start(self) -> FileSystem:
        await self.source.connect()
        root = await self.source.stat("/")
        return FileSystem(self.source, self._config, root, nursery=self._nursery, metrics=Metrics(), hints=HintStore())


@pytest.fixture
def mounted(nursery, tmp_path):
    return Mounted(nursery, tmp_path)


async def test_an_inode_that_the_kernel_forgets_during_a_lookup_is_known_after_it(mounted):
    mounted.memory.put("/f", b"1234")
    fs = await mounted.start()
    known = await fs.lookup(ROOT_NUMBER, b"f", ME)
    opened = await fs.open(known.number, os.O_RDONLY, ME)
    mounted.memory.modify("/f", 4, b"5", size=5)
    await mounted.source.hold({"refresh"})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fs.lookup, ROOT_NUMBER, b"f", ME)
        await mounted.source.wait_held()
        await fs.release(opened.handle)
        fs.forget([(known.number, 1)])
        await mounted.source.release()
    inode = fs.tree.table.get(known.number)
    assert (inode.lookups, inode.attributes.size) == (1, 5)


async def test_what_left_the_table_does_not_take_the_name_from_its_next_inode(mounted):
    attributes = await mounted.source.stat("/")
    table = InodeTable(attributes)
    old = table.add(table.root, "f", attributes)
    assert table.drop_unused(old)
    new = table.add(table.root, "f", attributes)
    table.detach(old)
    assert table.child(table.root, "f") is new


async def test_an_open_that_loses_a_race_does_not_get_a_reader_that_is_closed(mounted):
    (mounted.folder / "f").write_bytes(b"1234")
    mounted.source = SlowSource(FileSource(mounted.folder.as_uri(), SourceConfig(), trio.CapacityLimiter(8)))
    fs = await mounted.start()
    inode = await fs.lookup(ROOT_NUMBER, b"f", ME)
    await mounted.source.hold({"open"})
    async with trio.open_nursery() as nursery:

        async def open_read_close() -> None:
            opened = await fs.open(inode.number, os.O_RDONLY, ME)
            assert bytes(await fs.read(opened.handle, 0, 4)) == b"1234"
            await fs.release(opened.handle)

        for _ in range(8):
            nursery.start_soon(open_read_close)
        await mounted.source.wait_held(8)
        await mounted.source.release()
    assert inode.reader is None
    assert inode.open_handles == 0
    await mounted.source.aclose()


async def test_a_listing_whose_batch_failed_goes_on_where_it_was(mounted):
    for number in range(2500):
        mounted.memory.put(f"/{number:04}", b"")
    faulty = FaultySource(mounted.memory, Fault(acts=frozenset({"next_batch"}), nth=frozenset({2})))
    mounted.source = faulty
    fs = await mounted.start()
    handle = await fs.opendir(ROOT_NUMBER, ME)
    names, offsets = [], [0]

    def emit(name: bytes, _inode: Inode, offset: int) -> bool:
        names.append(name)
        offsets.append(offset)
        return True

    with pytest.raises(SourceUnavailableError):
        await fs.readdir(handle, 0, emit)
    assert len(names) == 1002
    await fs.readdir(handle, offsets[-1], emit)
    assert names[2:] == [b"%04d" % number for number in range(2500)]


async def test_the_status_of_a_file_whose_path_is_long_fits_into_an_attribute(mounted):
    path = "/".join(["", *(["ü" * 100] * 15)])
    for depth in range(2, 16):
        await mounted.memory.make_directory("/".join(path.split("/")[:depth]))
    mounted.memory.put(path, b"x")
    fs = await mounted.start()
    for _ in range(8):
        await (await fs.start_prefetch(path, None, ME)).wait()
    number = ROOT_NUMBER
    for name in path.split("/")[1:]:
        number = (await fs.lookup(number, name.encode(), ME)).number
    document = json.loads(await fs.getxattr(number, b"user.turbofs.status", ME))
    assert document["path"] == path
    assert len(document["prefetches"]) == 8


async def test_the_status_of_the_mount_shows_paths_to_whom_they_concern(mounted):
    mounted.memory.put("/f", b"x" * MIB)
    fs = await mounted.start()
    await mounted.source.hold({"read"})
    job = await fs.start_prefetch("/f", None, ME)
    stranger = Caller(ME.uid + 1, ME.gid + 1, 1)
    told = {caller: fs.status(caller)["prefetches"][0] for caller in (ME, Caller(0, 0, 1), stranger, None)}
    assert [document.get("path") for document in told.values()] == ["/f", "/f", None, None]
    await mounted.source.release()
    await job.wait()


async def test_a_hint_that_is_refused_does_not_hold(mounted):
    mounted.memory.put("/f", b"x")
    mounted.source = faulty = FaultySource(
        mounted.memory, Fault(acts=frozenset({"open"}), error=partial(AccessDeniedError, "not readable on the source"))
    )
    fs = await mounted.start()
    inode = await fs.lookup(ROOT_NUMBER, b"f", ME)
    with pytest.raises(AccessDeniedError):
        await fs.setxattr(inode.number, b"user.turbofs.prefetch", b"all", ME)
    faulty.faults.clear()
    assert await fs.listxattr(inode.number, ME) == []
    assert b"not readable" in await fs.getxattr(inode.number, b"user.turbofs.last_error", ME)


async def test_refused_names_do_not_fill_the_metrics(mounted):
    mounted.memory.put("/f", b"x")
    fs = await mounted.start()
    inode = await fs.lookup(ROOT_NUMBER, b"f", ME)
    with pytest.raises(NotSupportedError):
        await fs.setxattr(inode.number, b"user.turbofs.nonsense", b"1", ME)
    text = fs.metrics.render().decode()
    assert "nonsense" not in text
    assert 'turbofs_hints_total{name="other",outcome="refused"} 1.0' in text


async def test_prefetches_of_hints_are_found_by_number_and_forgotten_in_the_end(mounted):
    mounted.memory.put("/f", b"1234")
    fs = await mounted.start()
    inode = await fs.lookup(ROOT_NUMBER, b"f", ME)
    await fs.setxattr(inode.number, b"user.turbofs.prefetch", b"all", ME)
    numbers = [job["id"] for job in (await fs.file_status("/f", ME))["prefetches"]]
    job = fs.prefetch_job(numbers[0])
    await job.wait()
    for _ in range(300):
        await (await fs.start_prefetch("/f", None, ME)).wait()
    with pytest.raises(NotFoundError):
        fs.prefetch_job(job.id)
