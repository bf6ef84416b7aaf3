"""Random reads, listings and changes underneath, against a plain dictionary: the file system without FUSE.

The machine plays three parts at once: the kernel (lookups that it counts and forgets, open files, listings), somebody
who changes the source behind the mount's back, and the judge, who knows every content that each file ever had. A read
may return bytes of one content that the file had since it was opened, or fail with ESTALE where the content was
rewritten; it may never return anything else. With an attribute timeout of zero, a fresh lookup and open see the present.
"""

from __future__ import annotations

import os
import random
import threading
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import trio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from turbofs.config import Config, FsConfig, MountConfig, ReadConfig, SourceConfig
from turbofs.errors import NotFoundError, StaleFileError
from turbofs.fs.filesystem import FileSystem
from turbofs.fs.hint_store import HintStore
from turbofs.metrics import Metrics
from turbofs.model import Caller, FileKind, split
from turbofs.source.file import FileSource
from turbofs.source.memory import MemorySource
from turbofs.source.retrying import RetryingSource
from turbofs.testing.faulty import Fault, FaultySource

ROOT_NUMBER = 1
KIB = 1 << 10
DIRECTORIES = ("/", "/d", "/d/e", "/empty")
PATHS = ("/a", "/b", "/d/a", "/d/b", "/d/e/a", "/d/e/\udcff")
READ = ReadConfig(
    memory_bytes=256 * KIB,  # less than a few files: extents are evicted all the time
    extent_bytes=64 * KIB,
    first_extent_bytes=4 * KIB,
    window_bytes=128 * KIB,
    streams_per_handle=4,
    fetches=4,
)
ME = Caller(os.getuid(), os.getgid(), os.getpid())
DEADLINE_S = 30

sizes = st.sampled_from([0, 1, 4095, 4096, 4097, 64 * KIB, 64 * KIB + 1, 200_000, 400_000])
seeds = st.integers(0, 9)
paths = st.sampled_from(PATHS)


def content_of(seed: int, size: int) -> bytes:
    """Bytes without any pattern, so that a shifted read shows."""
    return _block(seed)[:size]


@cache
def _block(seed: int) -> bytes:
    return random.Random(seed).randbytes(400_000)


class File:
    """One file, whatever its name: every content that it had, and how it came to change."""

    def __init__(self, content: bytes) -> None:
        self.history = [content]
        self.rewrites = 0
        self.moves = 0

    @property
    def content(self) -> bytes:
        return self.history[-1]

    def change(self, content: bytes, *, append: bool) -> None:
        self.history.append(content)
        self.rewrites += not append


class OpenFile:
    def __init__(self, inode_number: int, file: File, most_moves: float) -> None:
        self.inode_number = inode_number
        self.file = file
        self.since = len(file.history) - 1
        self.rewrites = file.rewrites
        self.most_moves = file.moves + most_moves

    @property
    def allowed(self) -> list[bytes]:
        return self.file.history[self.since :]

    @property
    def may_be_stale(self) -> bool:
        return self.file.rewrites != self.rewrites or self.file.moves > self.most_moves


class OpenDirectory:
    def __init__(self, path: str, names: set[str]) -> None:
        self.path = path
        self.offset = 0
        self.always = set(names)
        self.ever = set(names)
        self.listed: list[str] = []


class TrioThread:
    """An event loop beside the test, with one nursery; `run` is a call into it."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: trio.run(self._main), daemon=True)
        self._thread.start()
        self._ready.wait()

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._stop = trio.Event()
        async with trio.open_nursery() as self.nursery:
            self._ready.set()
            await self._stop.wait()
            self.nursery.cancel_scope.cancel()

    def run(self, function, *arguments):
        async def bounded():
            with trio.fail_after(DEADLINE_S):
                return await function(*arguments)

        return trio.from_thread.run(bounded, trio_token=self._token)

    def close(self) -> None:
        trio.from_thread.run_sync(self._stop.set, trio_token=self._token)
        self._thread.join()


class MemoryWorld:
    """The tree in memory, changed as somebody else would."""

    most_moves = float("inf")
    """How many renames an open file survives for certain."""

    def __init__(self, loop: TrioThread) -> None:
        self._loop = loop
        self.source = MemorySource()
        for path in DIRECTORIES[1:]:
            loop.run(self.source.make_directory, path)

    def put(self, path: str, content: bytes) -> None:
        self.source.put(path, content)

    def write(self, path: str, offset: int, data: bytes, size: int) -> None:
        self.source.modify(path, offset, data, size=size)

    def delete(self, path: str) -> None:
        self._loop.run(self.source.delete, path)

    def rename(self, old: str, new: str) -> None:
        async def rename() -> None:
            await self.source.rename(old, new, replace=True)

        self._loop.run(rename)

    def close(self) -> None:
        self._loop.run(self.source.aclose)


class FaultyWorld(MemoryWorld):
    """The same behind a source that fails a tenth of what it is asked and cuts reads short, and the retries for it.

    Nothing of it may show: the machine expects exactly what it expects of a healthy source.
    """

    def __init__(self, loop: TrioThread) -> None:
        super().__init__(loop)
        self._tree = self.source
        faulty = FaultySource(
            self._tree,
            Fault(acts=frozenset({"stat", "stat_exact", "list", "open", "read"}), probability=0.1),
            Fault(acts=frozenset({"read"}), probability=0.1, short_reads=True),
        )
        self.source = RetryingSource(faulty, SourceConfig(backoff_first_s=0.0001, backoff_limit_s=0.001))

    def put(self, path: str, content: bytes) -> None:
        self._tree.put(path, content)

    def write(self, path: str, offset: int, data: bytes, size: int) -> None:
        self._tree.modify(path, offset, data, size=size)


class LocalWorld:
    """A directory on a disk, changed with system calls.

    Every change waits until the kernel's clock gives it a time of its own: two changes within one tick of that clock
    cannot be told apart, and FileSource says so. Files that lost their name are kept open, so that the disk does not give
    their inode numbers again: a longer file with the number of a deleted one looks like growth, also to FileSource.
    """

    most_moves = 1  # away and back again: the ctime moved, and no new name explains it

    def __init__(self, loop: TrioThread) -> None:
        self._folder = TemporaryDirectory()
        self._top = Path(self._folder.name) / "tree"
        self._spare = Path(self._folder.name) / "spare"
        for path in DIRECTORIES:
            (self._top / path[1:]).mkdir()
        self._loop = loop
        self._last_ns = 0
        self._kept = ExitStack()
        self.source = FileSource(f"file://{self._top}", SourceConfig(), trio.CapacityLimiter(8))

    def put(self, path: str, content: bytes) -> None:
        self._spare.write_bytes(content)
        self._keep(path)
        self._spare.rename(self._place(path))
        self._settle(self._place(path))

    def write(self, path: str, offset: int, data: bytes, size: int) -> None:
        with self._place(path).open("r+b") as file:
            file.seek(offset)
            file.write(data)
            file.truncate(size)
        self._settle(self._place(path))

    def delete(self, path: str) -> None:
        self._keep(path)
        self._place(path).unlink()

    def rename(self, old: str, new: str) -> None:
        self._keep(new)
        self._place(old).rename(self._place(new))
        self._settle(self._place(new))

    def close(self) -> None:
        self._loop.run(self.source.aclose)
        self._kept.close()
        self._folder.cleanup()

    def _keep(self, path: str) -> None:
        if self._place(path).exists():
            self._kept.enter_context(self._place(path).open("rb"))

    def _place(self, path: str) -> Path:
        return self._top / path[1:]

    def _settle(self, place: Path) -> None:
        while (changed_ns := place.stat().st_ctime_ns) <= self._last_ns:
            place.chmod(0o644)
        self._last_ns = changed_ns


class FileSystemMachine(RuleBasedStateMachine):
    """Drives a FileSystem over `World`; subclasses say which."""

    World: type

    def __init__(self) -> None:
        super().__init__()
        self.loop = TrioThread()
        self.world = self.World(self.loop)
        self.files: dict[str, File] = {}
        self.kernel: dict[int, int] = {}  # inode number → lookups held
        self.seen: dict[str, tuple[int, File, int, int]] = {}  # path → number, file, its rewrites and moves then
        self.handles: dict[int, OpenFile] = {}
        self.listings: dict[int, OpenDirectory] = {}

    @initialize()
    def mount(self) -> None:
        config = Config(
            MountConfig("memory:", Path("/nowhere")), read=READ, fs=FsConfig(attribute_timeout_s=0, state_dir=None)
        )

        async def start() -> FileSystem:
            await self.world.source.connect()
            root = await self.world.source.stat("/")
            return FileSystem(
                self.world.source, config, root, nursery=self.loop.nursery, metrics=Metrics(), hints=HintStore()
            )

        self.fs = self.loop.run(start)

    # --- somebody else

    @rule(path=paths, seed=seeds, size=sizes)
    def replace(self, path, seed, size):
        self.world.put(path, content_of(seed, size))
        self.files[path] = File(content_of(seed, size))
        self._tell_listings(path, exists=True)

    @precondition(lambda self: self.files)
    @rule(data=st.data(), seed=seeds, length=st.sampled_from([1, 4096, 100_000]))
    def append(self, data, seed, length):
        path = data.draw(st.sampled_from(sorted(self.files)))
        file, more = self.files[path], content_of(seed, length)
        self.world.write(path, len(file.content), more, len(file.content) + length)
        file.change(file.content + more, append=True)

    @precondition(lambda self: any(file.content for file in self.files.values()))
    @rule(data=st.data(), seed=seeds, length=st.sampled_from([1, 5000, 100_000]))
    def overwrite(self, data, seed, length):
        path = data.draw(st.sampled_from(sorted(path for path, file in self.files.items() if file.content)))
        file, patch = self.files[path], content_of(seed, length)
        offset = data.draw(st.integers(0, len(file.content) - 1))
        new = file.content[:offset] + patch + file.content[offset + length :]
        self.world.write(path, offset, patch, len(new))
        file.change(new, append=False)

    @precondition(lambda self: self.files)
    @rule(data=st.data())
    def truncate(self, data):
        path = data.draw(st.sampled_from(sorted(self.files)))
        file = self.files[path]
        size = data.draw(st.integers(0, len(file.content)))
        self.world.write(path, 0, b"", size)
        file.change(file.content[:size], append=False)

    @precondition(lambda self: self.files)
    @rule(data=st.data())
    def delete(self, data):
        path = data.draw(st.sampled_from(sorted(self.files)))
        self.world.delete(path)
        del self.files[path]
        self._tell_listings(path, exists=False)

    @precondition(lambda self: self.files)
    @rule(data=st.data(), new=paths)
    def rename(self, data, new):
        old = data.draw(st.sampled_from(sorted(self.files)))
        if old != new:
            self.world.rename(old, new)
            file = self.files[new] = self.files.pop(old)
            file.moves += 1
            self._tell_listings(old, exists=False)
            self._tell_listings(new, exists=True)

    # --- the kernel: names

    @rule(path=paths)
    def look(self, path):
        number = self._walk(path)
        file = self.files.get(path)
        assert (number is None) == (file is None)
        if number is None or file is None:
            self.seen.pop(path, None)
            return
        inode = self.loop.run(self.fs.getattr, number)
        assert (inode.kind, inode.attributes.size) == (FileKind.FILE, len(file.content))
        if path in self.seen:
            before, known, rewrites, moves = self.seen[path]
            if known is not file:
                assert number != before, "another file must have another inode number"
            elif (rewrites, moves) == (file.rewrites, file.moves):
                assert number == before, "an unchanged or grown file keeps its inode number"
        self.seen[path] = (number, file, file.rewrites, file.moves)

    @precondition(lambda self: self.kernel)
    @rule(data=st.data())
    def forget(self, data):
        number = data.draw(st.sampled_from(list(self.kernel)))  # by age: the numbers differ from run to run
        self.fs_forget([(number, self.kernel.pop(number))])
        self.seen = {path: seen for path, seen in self.seen.items() if seen[0] != number}  # it may be given again

    # --- the kernel: files

    @precondition(lambda self: self.files and len(self.handles) < 8)
    @rule(data=st.data())
    def open(self, data):
        path = data.draw(st.sampled_from(sorted(self.files)))
        for last_try in (False, True):  # a name that moved on is looked up again, once
            number = self._walk(path)
            assert number is not None
            try:
                opened = self.loop.run(self.fs.open, number, os.O_RDONLY, ME)
                break
            except StaleFileError:
                assert not last_try
        self.handles[opened.handle] = OpenFile(number, self.files[path], self.world.most_moves)

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), length=st.sampled_from([0, 1, 4096, 70_000, 131_072]))
    def read(self, data, length):
        number = data.draw(st.sampled_from(sorted(self.handles)))
        handle = self.handles[number]
        largest = max(map(len, handle.allowed))
        offset = data.draw(st.integers(0, largest) | st.integers(0, largest // 4096).map(lambda page: page * 4096))
        try:
            found = self.loop.run(self._read, number, offset, length)
        except StaleFileError:
            assert handle.may_be_stale, "only a file that was rewritten may be stale"
            return
        assert any(found == content[offset : offset + length] for content in handle.allowed), (
            f"{len(found)} bytes at {offset} are of no content that the file had since it was opened"
        )

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def read_to_the_end(self, data):
        number = data.draw(st.sampled_from(sorted(self.handles)))
        handle = self.handles[number]
        found = b""
        try:
            while piece := self.loop.run(self._read, number, len(found), 64 * KIB):
                found += piece
        except StaleFileError:
            assert handle.may_be_stale
            return
        assert found in handle.allowed

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def stat_open_file(self, data):
        handle = self.handles[data.draw(st.sampled_from(sorted(self.handles)))]
        try:
            inode = self.loop.run(self.fs.getattr, handle.inode_number)
        except StaleFileError:
            assert handle.may_be_stale
            return
        assert inode.attributes.size in set(map(len, handle.allowed))

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def close(self, data):
        number = data.draw(st.sampled_from(sorted(self.handles)))
        self.loop.run(self.fs.release, number)
        del self.handles[number]

    # --- the kernel: directories

    @precondition(lambda self: len(self.listings) < 4)
    @rule(path=st.sampled_from(DIRECTORIES))
    def open_directory(self, path):
        number = self._walk(path)
        assert number is not None
        names = {split(each)[1] for each in (*self.files, *DIRECTORIES[1:]) if split(each)[0] == path}
        self.listings[self.loop.run(self.fs.opendir, number, ME)] = OpenDirectory(path, names)

    @precondition(lambda self: self.listings)
    @rule(data=st.data(), room=st.integers(1, 5))
    def list_some(self, data, room):
        number = data.draw(st.sampled_from(sorted(self.listings)))
        if self._list(number, room):
            self._end_listing(number)

    @precondition(lambda self: self.listings)
    @rule(data=st.data(), room=st.integers(1, 5))
    def list_to_the_end(self, data, room):
        number = data.draw(st.sampled_from(sorted(self.listings)))
        while not self._list(number, room):
            pass
        self._end_listing(number)

    # --- the end

    def teardown(self):
        try:
            if hasattr(self, "fs"):
                for number in self.handles:
                    self.loop.run(self.fs.release, number)
                for number in self.listings:
                    self.loop.run(self.fs.releasedir, number)
                self.fs_forget(list(self.kernel.items()))
                assert len(self.fs.tree.table) == 1, "only the root is left when the kernel has let go of everything"
                self.loop.run(self.fs.aclose)
            self.world.close()
        finally:
            self.loop.close()

    # --- parts

    def fs_forget(self, counts):
        async def forget():
            self.fs.forget(counts)

        self.loop.run(forget)

    async def _read(self, number: int, offset: int, length: int) -> bytes:
        return bytes(await self.fs.read(number, offset, length))

    def _walk(self, path: str) -> int | None:
        """Look every component up, as the kernel does; the last one's number, or None where it is not there."""
        number = ROOT_NUMBER
        for name in filter(None, path.split("/")):
            try:
                number = self.loop.run(self.fs.lookup, number, os.fsencode(name), ME).number
            except NotFoundError:
                return None
            self.kernel[number] = self.kernel.get(number, 0) + 1
        return number

    def _list(self, number: int, room: int) -> bool:
        """Take up to *room* entries; says whether the directory has ended."""
        listing = self.listings[number]
        taken = 0

        def emit(name, inode, offset):
            nonlocal taken
            if taken == room:
                return False
            taken += 1
            listing.offset = offset
            if name not in (b".", b".."):
                listing.listed.append(os.fsdecode(name))
                self.kernel[inode.number] = self.kernel.get(inode.number, 0) + 1
            return True

        self.loop.run(self.fs.readdir, number, listing.offset, emit)
        return taken == 0

    def _end_listing(self, number: int) -> None:
        self.loop.run(self.fs.releasedir, number)
        listing = self.listings.pop(number)
        assert set(listing.listed) <= listing.ever
        assert [name for name in listing.always if listing.listed.count(name) != 1] == []

    def _tell_listings(self, path: str, *, exists: bool) -> None:
        parent, name = split(path)
        for listing in self.listings.values():
            if listing.path == parent:
                listing.ever |= {name} if exists else set()
                listing.always -= set() if exists else {name}


class MemoryMachine(FileSystemMachine):
    World = MemoryWorld


class FaultyMachine(FileSystemMachine):
    World = FaultyWorld


class LocalMachine(FileSystemMachine):
    World = LocalWorld


QUICK = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
LONG = settings(QUICK, max_examples=600, stateful_step_count=80)

TestMemory = MemoryMachine.TestCase
TestMemory.settings = QUICK
TestFaulty = FaultyMachine.TestCase
TestFaulty.settings = QUICK
TestLocal = LocalMachine.TestCase
TestLocal.settings = QUICK


@pytest.mark.long
class TestMemoryAtLength(MemoryMachine.TestCase):
    settings = LONG


@pytest.mark.long
class TestLocalAtLength(LocalMachine.TestCase):
    settings = LONG


@pytest.mark.long
class TestFaultyAtLength(FaultyMachine.TestCase):
    settings = LONG
