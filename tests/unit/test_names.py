"""Names and inodes where the kernel forgets, and others open and close, while the source is asked."""

from __future__ import annotations

import os

import pytest
import trio

from turbofs.config import Config, FsConfig, MountConfig, ReadConfig, SourceConfig
from turbofs.fs.filesystem import FileSystem
from turbofs.fs.hint_store import HintStore
from turbofs.fs.inodes import ROOT_NUMBER, InodeTable
from turbofs.metrics import Metrics
from turbofs.model import Caller
from turbofs.source.file import FileSource
from turbofs.source.memory import MemorySource
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
