"""One staged file while threads write it, the source is slow, and bytes are let go of or parked meanwhile."""

from __future__ import annotations

import threading

import pytest
import trio
import trio.testing

from turbofs.errors import OutOfSpaceError, StaleFileError
from turbofs.model import FileVersion
from turbofs.testing.conformance_base import content
from turbofs.write import staged_file as module
from turbofs.write.staged_file import StagedFile
from turbofs.write.staging import StagingArea

MIB = 1 << 20
BYTES = content(2 * MIB, seed=1)


class Origin:
    """The base of a file on a source that waits at each read for as long as `gate` is closed."""

    def __init__(self, data):
        self.data = data
        self.version = FileVersion(len(data), 1, "base", "1")
        self.gate = trio.Event()
        self.gate.set()
        self.asked = 0

    async def open(self, _path):
        return self

    async def read_into(self, start, buffer):
        self.asked += 1
        data = self.data[start : start + len(buffer)]
        await self.gate.wait()
        buffer[: len(data)] = data
        return len(data)

    async def aclose(self):
        await trio.lowlevel.checkpoint()


@pytest.fixture
def area(tmp_path):
    area = StagingArea.open(tmp_path / "staging", limit_bytes=8 * MIB, stall_s=0.01)
    area.on_tmpfs = False
    yield area
    area.close()


@pytest.fixture
def origin():
    return Origin(BYTES)


def make(area, number=1):
    return StagedFile.create(area, number, "/file", mode=0o644, owner=None, group=None)


@pytest.fixture
def updated(area, origin):
    """A file opened for update, none of whose bytes are here."""
    file = make(area)
    file.update_of(origin.version, "/file", origin.open)
    yield file
    file.close()


@pytest.fixture
def slow_disk(monkeypatch):
    """Local writes wait in their thread until the event is set; `begun` is released as each arrives."""
    real, go, begun = module.write_all, threading.Event(), threading.Semaphore(0)

    def write_all(fd, data, offset):
        if threading.current_thread() is not threading.main_thread():
            begun.release()
            assert go.wait(30)
        real(fd, data, offset)

    monkeypatch.setattr(module, "write_all", write_all)
    yield go, begun
    go.set()


async def test_nothing_is_let_go_while_a_write_is_on_its_way_to_the_disk(area, origin, slow_disk):
    go, begun = slow_disk
    go.set()
    file = make(area)
    await file.write(0, BYTES)
    go.clear()
    begun.acquire()
    new = b"n" * 100
    async with trio.open_nursery() as nursery:
        nursery.start_soon(file.write, 5000, new)
        await trio.to_thread.run_sync(begun.acquire)
        generation, file.changed_from = file.generation, 1 << 63  # an upload begins, and takes what is there
        assert await file.let_go(len(BYTES), "/temporary", origin.open) == 0
        go.set()
    assert file.generation > generation
    assert file.changed_from == 5000, "the upload has to send it again"
    expected = BYTES[:5000] + new + BYTES[5100:]
    assert await file.read(0, len(BYTES)) == expected
    file.changed_from = 1 << 63
    origin.data = expected
    assert await file.let_go(len(BYTES), "/temporary", origin.open) == len(BYTES)
    assert await file.read(4096, 4096) == expected[4096:8192]
    file.close()


async def test_what_is_fetched_never_lands_on_what_was_written_meanwhile(updated, origin):
    origin.gate = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(updated.read, 0, 100)
        await trio.testing.wait_all_tasks_blocked()
        await updated.write(10, b"new")
        await updated.truncate(MIB // 2)
        origin.gate.set()
    assert await updated.read(0, 20) == BYTES[:10] + b"new" + BYTES[13:20]
    await updated.truncate(MIB)
    assert await updated.read(MIB // 2, MIB) == bytes(MIB // 2), "what was cut off does not come back"


async def test_a_read_through_the_source_sees_what_is_let_go_of_meanwhile(area, updated, origin):
    await updated.write(MIB, BYTES[MIB:])
    area.adopt(8 * MIB - area.used_bytes)  # nothing that is fetched can be kept
    origin.gate = trio.Event()
    read = []

    async def reader():
        read.append(await updated.read(0, 2 * MIB))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader)
        await trio.testing.wait_all_tasks_blocked()
        updated.changed_from = 1 << 63
        assert await updated.let_go(2 * MIB, "/temporary", origin.open) == MIB
        origin.gate.set()
    assert read == [BYTES]


async def test_a_full_disk_is_said_and_sent_again(area, monkeypatch):
    file = make(area)
    await file.write(0, BYTES)
    file.changed_from = 1 << 63

    def full(_fd, _data, _offset):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_all", full)
    with pytest.raises(OutOfSpaceError, match="No space left"):
        await file.write(100, b"x")
    assert file.changed_from == 100
    assert file.size == len(BYTES)
    file.close()


async def test_holes_of_an_earlier_mount_take_no_room(area):
    file = make(area)
    await file.truncate(4 * MIB)
    await file.write(3 * MIB, b"x")
    assert area.used_bytes == file.staged_bytes == 4096
    file.close()
    area.release(area.used_bytes)
    again = StagedFile.adopt(area, 1, "/file", 4 * MIB, mode=0o644, owner=None, group=None)
    assert area.used_bytes == again.staged_bytes == 4096
    await again.discard()
    assert area.used_bytes == 0


async def test_parked_bytes_stay_as_they_are_and_their_room_is_counted_once(area):
    file = make(area)
    await file.write(0, BYTES)
    area.keep_parked(1, file.hand_over_room())
    file.error = StaleFileError("somebody else wrote it")
    with pytest.raises(StaleFileError, match="somebody else"):
        await file.write(0, b"x")
    with pytest.raises(StaleFileError, match="somebody else"):
        await file.truncate(0)
    assert await file.read(0, len(BYTES)) == BYTES
    assert area.used_bytes == len(BYTES)
    file.close()
    area.drop_parked(1)
    assert area.used_bytes == 0
