"""Random writes, renames, deletions, closes and crashes, against a dictionary: the file system without FUSE.

The machine plays the kernel (lookups, open files, FLUSH and RELEASE) and keeps what every file has to hold. Two jobs
save: below `/late` a close waits for the source, below `/early` it is acknowledged at once. What is read through the
file system is the model's bytes, always. The source has them when a late close returns, and all of them once nothing
waits any more; in between, its tracker file names no checkpoint that is not there. A crash drops the file system with
whatever it is doing; the next one finds the staging area and goes on.
"""

from __future__ import annotations

import os
import random
import threading
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import trio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from turbofs.config import Config, FsConfig, MountConfig, ReadConfig, SourceConfig, WriteConfig
from turbofs.errors import NotEmptyError, NotFoundError
from turbofs.fs.filesystem import FileSystem
from turbofs.fs.hint_catalogue import Attribute
from turbofs.fs.hint_store import HintStore
from turbofs.metrics import Metrics
from turbofs.model import AttributeChange, Caller, FileKind, join, split
from turbofs.source.memory import MemorySource
from turbofs.source.orphans import is_temporary_name
from turbofs.source.retrying import RetryingSource
from turbofs.testing.conformance_base import names_in, read_file
from turbofs.testing.faulty import Fault, FaultySource
from turbofs.testing.slow import SlowSource
from turbofs.testing.waiting import eventually
from turbofs.write.opening import open_staging

ROOT_NUMBER = 1
KIB = 1 << 10
MODEL, TRACKER = "/ranked/step/model", "/ranked/latest"
EARLY = ("/early/step", "/early/moved", "/early/other", "/ranked/step")
DIRECTORIES = ("/late", "/late/d", "/early", "/early/step", "/early/other", "/ranked", "/ranked/step")
NAMES = ("/late/a", "/late/b", "/late/d/a", "/early/step/a", "/early/step/b", "/early/other/a", "/early/a")
MOVED = "/early/moved"
READ = ReadConfig(memory_bytes=768 * KIB, extent_bytes=64 * KIB, first_extent_bytes=4 * KIB, window_bytes=128 * KIB)
WRITE = WriteConfig(
    staging_size_bytes=64 << 20, stream_from_bytes=100 * KIB, piece_bytes=16 * KIB, uploads=4, stall_s=5.0
)
ME = Caller(os.getuid(), os.getgid(), os.getpid())
DEADLINE_S = 30

paths = st.sampled_from(NAMES)
offsets = st.sampled_from([0, 1, 4095, 4096, 50_000, 150_000])
sizes = st.sampled_from([0, 1, 4096, 5000, 70_000, 200_000])
seeds = st.integers(0, 9)


def content_of(seed: int, size: int) -> bytes:
    """Bytes without any pattern, so that a shifted read shows."""
    return _block(seed)[:size]


@cache
def _block(seed: int) -> bytes:
    return random.Random(seed).randbytes(400_000)


def is_early(path: str) -> bool:
    return path.startswith("/early/")


class File:
    """What one file holds, whatever its name; `promised`: what the last close or fsync covered, None before the first."""

    def __init__(self) -> None:
        self.content = b""
        self.promised: bytes | None = None

    def write(self, offset: int, data: bytes) -> None:
        padded = self.content.ljust(offset, b"\0")
        self.content = padded[:offset] + data + padded[offset + len(data) :]

    def truncate(self, size: int) -> None:
        self.content = self.content[:size].ljust(size, b"\0")


class Daemon:
    """One life of the file system, on an event loop of its own, over a source that outlives it."""

    def __init__(self, source: MemorySource, staging: Path, faults: list[Fault]) -> None:
        self._source = source
        self._staging = staging
        self._faults = faults
        self._ready = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failed is not None:
            raise self._failed

    def _live(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:
            self._failed = error
        finally:
            self._ready.set()

    async def _main(self) -> None:
        slow = SlowSource(FaultySource(self._source, *self._faults), latency_s=0.0002)
        source = RetryingSource(slow, SourceConfig(backoff_first_s=0.0001, backoff_limit_s=0.001))
        await source.connect()
        hints = HintStore()
        for path in EARLY:
            hints.set(path, Attribute.ACK, "staged")
        config = Config(
            MountConfig("memory:", Path("/nowhere")),
            read=READ,
            write=WRITE,
            fs=FsConfig(attribute_timeout_s=0, state_dir=self._staging / "state"),
        )
        staging = open_staging(WRITE, self._staging / "staged", self._staging / "state")
        self._token = trio.lowlevel.current_trio_token()
        self._stop = trio.Event()
        try:
            async with trio.open_nursery() as nursery:
                self.fs = FileSystem(
                    source,
                    config,
                    await source.stat("/"),
                    nursery=nursery,
                    metrics=Metrics(),
                    hints=hints,
                    staging=staging,
                )
                self.fs.start()
                self._ready.set()
                await self._stop.wait()
                nursery.cancel_scope.cancel()
        finally:
            staging.journal.close()
            staging.area.close()

    def run(self, function, *arguments):
        async def bounded():
            with trio.fail_after(DEADLINE_S):
                return await function(*arguments)

        return trio.from_thread.run(bounded, trio_token=self._token)

    def kill(self) -> None:
        """Everything that it does ends where it is."""
        trio.from_thread.run_sync(self._stop.set, trio_token=self._token)
        self._thread.join()
        if self._failed is not None:
            raise self._failed


class WritesMachine(RuleBasedStateMachine):
    faults: tuple[Fault, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory(dir="/dev/shm")
        self.source = MemorySource()
        self.names: dict[str, File] = {}
        self.directories = set(DIRECTORIES)
        self.handles: dict[int, File] = {}
        self.readers: set[int] = set()
        self.saves = 0
        self.saved: dict[str, bytes] = {}

    @initialize()
    def mount(self) -> None:
        async def make() -> None:
            for path in DIRECTORIES:
                await self.source.make_directory(path)

        trio.run(make)
        self.begin()

    def begin(self) -> None:
        self.kernel: dict[int, int] = {}
        self.daemon = Daemon(self.source, Path(self.folder.name), list(self.faults))
        self.fs = self.daemon.fs
        self.run = self.daemon.run

    # --- files

    @precondition(lambda self: len(self.handles) < 6)
    @rule(path=paths, truncating=st.booleans(), writing=st.booleans())
    def open(self, path, truncating, writing):
        if split(path)[0] not in self.directories:
            return
        flags = os.O_RDWR if writing else os.O_RDONLY
        file = self.names.get(path)
        if file is None:
            writing, file = True, File()
            self.names[path] = file
            handle = self.create_or_open(path, os.O_RDWR | os.O_EXCL)
        else:
            flags |= os.O_TRUNC if truncating and writing else 0
            handle = self.create_or_open(path, flags)
            if flags & os.O_TRUNC:
                file.content = b""
        if not writing:
            self.readers.add(handle)
        self.handles[handle] = file

    @precondition(lambda self: self.handles.keys() - self.readers)
    @rule(data=st.data(), offset=offsets, seed=seeds, size=sizes)
    def write(self, data, offset, seed, size):
        handle = data.draw(st.sampled_from(sorted(self.handles.keys() - self.readers)))
        file, piece = self.handles[handle], content_of(seed, size)
        if data.draw(st.booleans()):
            offset = len(file.content)
        if piece:
            self.run(self.fs.write, handle, offset, piece)
            file.write(offset, piece)

    @precondition(lambda self: self.handles.keys() - self.readers)
    @rule(data=st.data(), size=sizes)
    def truncate(self, data, size):
        handle = data.draw(st.sampled_from(sorted(self.handles.keys() - self.readers)))
        file = self.handles[handle]
        number = self.run(self._inode_of, handle)
        self.run(self.fs.setattr, number, AttributeChange(), size, handle, ME)
        file.truncate(size)

    @precondition(lambda self: self.names)
    @rule(data=st.data(), size=sizes)
    def truncate_by_name(self, data, size):
        path = data.draw(st.sampled_from(sorted(self.names)))
        file = self.names[path]
        self.run(self.fs.setattr, self.walk(path), AttributeChange(), size, None, ME)
        file.truncate(size)
        if not self.writers(file):
            self.promise(path, file)

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), offset=offsets, size=sizes)
    def read(self, data, offset, size):
        handle = data.draw(st.sampled_from(sorted(self.handles)))
        file = self.handles[handle]
        assert self.run(self._read, handle, offset, size) == file.content[offset : offset + size]

    @precondition(lambda self: self.handles.keys() - self.readers)
    @rule(data=st.data())
    def fsync(self, data):
        handle = data.draw(st.sampled_from(sorted(self.handles.keys() - self.readers)))
        self.run(self.fs.fsync, handle)
        self.promise_handle(handle)

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def close(self, data):
        self.close_handle(data.draw(st.sampled_from(sorted(self.handles))))

    def close_handle(self, handle):
        file = self.handles[handle]
        self.run(self.fs.flush, handle)
        writing = handle not in self.readers
        if writing and self.writers(file) == {handle}:
            self.promise_handle(handle)
        self.run(self.fs.release, handle)
        self.readers.discard(handle)
        del self.handles[handle]

    # --- names

    @precondition(lambda self: self.names)
    @rule(data=st.data(), new=paths)
    def rename(self, data, new):
        old = data.draw(st.sampled_from(sorted(self.names)))
        if old == new or split(new)[0] not in self.directories:
            return
        if is_early(old) != is_early(new):
            return  # another promise would hold for it from then on
        (old_parent, old_name), (new_parent, new_name) = split(old), split(new)
        self.walk(old)
        self.walk(new)
        old_number, new_number = self.walk(old_parent), self.walk(new_parent)
        self.run(self.fs.rename, old_number, os.fsencode(old_name), new_number, os.fsencode(new_name), 0)
        self.names[new] = self.names.pop(old)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def unlink(self, data):
        path = data.draw(st.sampled_from(sorted(self.names)))
        parent, name = split(path)
        self.walk(path)
        self.run(self.fs.unlink, self.walk(parent), os.fsencode(name))
        del self.names[path]

    @rule()
    def move_the_checkpoint(self):
        """`step` → `moved`, with all that is in it, and back again."""
        old, new = ("/early/step", MOVED) if "/early/step" in self.directories else (MOVED, "/early/step")
        parent = self.walk("/early")
        self.walk(old)
        self.run(self.fs.rename, parent, os.fsencode(split(old)[1]), parent, os.fsencode(split(new)[1]), 0)
        self.directories = {new if path == old else path for path in self.directories}
        self.names = {
            (new + path[len(old) :] if path.startswith(f"{old}/") else path): file for path, file in self.names.items()
        }

    @rule(path=st.sampled_from(["/late/d", "/early/other", "/early/step"]))
    def remove_directory(self, path):
        if path not in self.directories:
            return
        full = any(name.startswith(f"{path}/") for name in self.names)
        parent, name = split(path)
        self.walk(path)
        if full:
            with pytest.raises(NotEmptyError):
                self.run(self.fs.rmdir, self.walk(parent), os.fsencode(name))
            return
        self.run(self.fs.rmdir, self.walk(parent), os.fsencode(name))
        assert self.walk(path) is None
        inode = self.run(self.fs.mkdir, self.walk(parent), os.fsencode(name), 0o755, ME)
        self.kernel[inode.number] = self.kernel.get(inode.number, 0) + 1

    @rule(size=sizes)
    def save_a_checkpoint(self, size):
        """A file of the checkpoint, then the tracker file that vouches for it: both begin with the save's number."""
        self.saves += 1
        stamp = b"%08d" % self.saves
        for path, content in ((MODEL, stamp + content_of(3, size)), (TRACKER, stamp)):
            handle = self.create_or_open(path, os.O_WRONLY | os.O_TRUNC)
            self.run(self.fs.write, handle, 0, content)
            self.run(self.fs.flush, handle)
            self.run(self.fs.release, handle)
            self.saved[path] = content

    @invariant()
    def no_tracker_overtakes_its_checkpoint(self):
        if not hasattr(self, "daemon"):
            return
        tracker = self.on_source(TRACKER)
        if tracker is not None:
            model = self.on_source(MODEL)
            assert model is not None
            assert int(model[:8]) >= int(tracker[:8])

    # --- looks

    @rule(path=paths)
    def look(self, path):
        number = self.walk(path)
        file = self.names.get(path)
        assert (number is None) == (file is None), path
        if number is None or file is None:
            return
        inode = self.run(self.fs.getattr, number)
        assert (inode.kind, inode.attributes.size) == (FileKind.FILE, len(file.content))
        opened = self.run(self.fs.open, number, os.O_RDONLY, ME)
        assert self.run(self._read, opened.handle, 0, 500_000) == file.content
        self.run(self.fs.flush, opened.handle)
        self.run(self.fs.release, opened.handle)

    @rule(path=st.sampled_from(["/late", "/late/d", "/early", "/early/step", "/early/other"]))
    def list(self, path):
        if path not in self.directories:
            return
        handle = self.run(self.fs.opendir, self.walk(path), ME)
        found = []

        def emit(name, inode, _offset):
            if name not in (b".", b".."):
                found.append(os.fsdecode(name))
                self.kernel[inode.number] = self.kernel.get(inode.number, 0) + 1
            return True

        self.run(self.fs.readdir, handle, 0, emit)
        self.run(self.fs.releasedir, handle)
        assert sorted(found) == sorted(
            split(each)[1] for each in (*self.names, *self.directories) if split(each)[0] == path
        )

    # --- lives

    @rule()
    def crash(self):
        """With every file closed, so that all of it is promised."""
        self.close_all()
        self.daemon.kill()
        self.begin()

    @rule()
    def settle(self):
        """Once nothing waits any more, the source has what is promised, and nothing else."""
        eventually(lambda: self.run(self._nothing_waits), "nothing waits")
        found = self.run(self._tree_of, "/")
        if self.handles:  # what is open may be uploaded while it is written
            found = {path: data for path, data in found.items() if not is_temporary_name(split(path)[1])}
        expected = dict(self.saved)
        for path, file in self.names.items():
            if file.promised is None or (file.promised != file.content and path in found):
                found.pop(path, None)  # what the source has of a file that nobody has promised yet is its own business
            else:
                expected[path] = file.promised
        assert found == expected
        assert self.run(self._broken) == []

    def teardown(self):
        try:
            if hasattr(self, "daemon"):
                self.close_all()
                self.settle()
                self.run(self._forget)
                self.daemon.kill()
        finally:
            self.folder.cleanup()

    # --- parts

    def writers(self, file):
        return {handle for handle, each in self.handles.items() if each is file and handle not in self.readers}

    def promise_handle(self, handle):
        file = self.handles[handle]
        path = next((path for path, each in self.names.items() if each is file), None)
        if path is not None:
            self.promise(path, file)

    def promise(self, path, file):
        file.promised = file.content
        if not any(path.startswith(f"{early}/") for early in EARLY) and not self.run(self._waits):
            assert self.on_source(path) == file.content, "the source has it when the call returns"

    def close_all(self):
        for handle in sorted(self.handles):
            self.close_handle(handle)

    def create_or_open(self, path, flags):
        """A handle of what has the name, or of a new file."""
        number = self.walk(path)
        if number is not None:
            return self.run(self.fs.open, number, flags, ME).handle
        parent, name = split(path)
        inode, opened = self.run(self.fs.create, self.walk(parent), os.fsencode(name), 0o644, flags, ME)
        self.kernel[inode.number] = self.kernel.get(inode.number, 0) + 1
        return opened.handle

    def walk(self, path):
        """Look every component up, as the kernel does; the last one's number, or None where it is not there."""
        number = ROOT_NUMBER
        for name in filter(None, path.split("/")):
            try:
                number = self.run(self.fs.lookup, number, os.fsencode(name), ME).number
            except NotFoundError:
                return None
            self.kernel[number] = self.kernel.get(number, 0) + 1
        return number

    def on_source(self, path):
        """What the source has under the name, whatever is going on; None where it is not there."""

        async def look():
            try:
                return await read_file(self.source, path)
            except NotFoundError:
                return None

        return self.run(look)

    async def _tree_of(self, top):
        found = {}
        for name in await names_in(self.source, top):
            path = join(top, name)
            if (await self.source.stat(path)).kind is FileKind.DIRECTORY:
                found |= await self._tree_of(path)
            else:
                found[path] = await read_file(self.source, path)
        return found

    async def _read(self, handle, offset, length):
        """Bytes of an open file; the kernel asks for no more than 1 MiB at a time."""
        return bytes(await self.fs.read(handle, offset, length))

    async def _inode_of(self, handle):
        return self.fs._handles.file(handle).inode.number

    async def _waits(self):
        return bool(self.fs.status(ME)["writing"]["acts"])

    async def _nothing_waits(self):
        writing = self.fs.status(ME)["writing"]
        return not writing["acts"] and not [each for each in writing["files"] if each["state"] != "open"]

    async def _broken(self):
        return self.fs.status(ME)["writing"]["broken"]

    async def _forget(self):
        self.fs.forget(list(self.kernel.items()))


class FaultyMachine(WritesMachine):
    """The same over a source that fails a tenth of what it is asked: nothing of it may show."""

    faults = (Fault(probability=0.1),)


QUICK = settings(
    max_examples=25,
    stateful_step_count=40,
    derandomize=True,  # the default suite tries the same histories each time; the long one searches
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
LONG = settings(QUICK, max_examples=400, stateful_step_count=80, derandomize=False)

TestWrites = WritesMachine.TestCase
TestWrites.settings = QUICK


@pytest.mark.long
class TestFaultyWrites(FaultyMachine.TestCase):
    settings = QUICK


@pytest.mark.long
class TestWritesAtLength(WritesMachine.TestCase):
    settings = LONG


@pytest.mark.long
class TestFaultyWritesAtLength(FaultyMachine.TestCase):
    settings = LONG
