"""What is read through a mount is what the source holds, with few requests, within the memory budget."""

from __future__ import annotations

import mmap
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from turbofs.testing.children import Child, in_child
from turbofs.testing.conformance_base import content
from turbofs.testing.mounts import workplace
from turbofs.testing.waiting import eventually

pytestmark = pytest.mark.mount

MIB = 1 << 20
BIG = content(24 * MIB + 12345, seed=1)
ODD = content(3 * MIB + 1, seed=2)


@pytest.fixture(scope="module")
def plain():
    """A mount of files that nobody changes."""
    with workplace() as place:
        for name, data in (("big", BIG), ("odd", ODD), ("small", b"a few bytes"), ("empty", b"")):
            (place.source / name).write_bytes(data)
        with place.mount("memory=256MiB") as mount:
            yield mount


@pytest.fixture(scope="module")
def counted():
    """A mount whose requests are counted; each test makes files of its own in its source."""
    with workplace() as place, place.direct("memory=256MiB") as mount:
        yield mount


def put(mount, name, size, seed=0):
    """A new file in the source of *mount*; its path in the mount, and its content."""
    data = content(size, seed)
    (mount.place.source / name).write_bytes(data)
    return mount.path / name, data


def fetched(mount, name):
    """The lengths of all reads of *name* so far, once no fetch is under way."""

    def idle():
        stats = (mount.path / ".turbofs" / "stats").read_text()
        return "\nturbofs_fetches_in_flight 0.0\n" in stats

    eventually(idle, "no fetch is under way")
    return [each.stop - each.start for each in mount.source.requests("read", f"/{name}")]


def read_direct(fd, offset, length):
    """Up to *length* bytes, past the kernel's page cache."""
    with mmap.mmap(-1, length) as buffer:  # O_DIRECT wants memory that is aligned to pages
        return buffer[: os.preadv(fd, [buffer], offset)]


# --- bytes


@pytest.mark.parametrize("step", [4093, 128 << 10, 5 * MIB, -1])
def test_sequential_read_returns_the_files_bytes(plain, step):
    with open(plain.path / "big", "rb", buffering=0) as file:
        parts = []
        while part := file.read(step):
            parts.append(part)
    assert b"".join(parts) == BIG


def test_random_reads_return_exactly_their_range(plain):
    chance = random.Random(3)
    fd = os.open(plain.path / "big", os.O_RDONLY)
    try:
        for _ in range(400):
            offset = chance.randrange(len(BIG))
            length = chance.choice([1, 2, 511, 4096, 4097, 65536, MIB + 7, 6 * MIB])
            assert os.pread(fd, length, offset) == BIG[offset : offset + length]
        for border in range(4 * MIB, len(BIG), 4 * MIB):  # where extents meet
            assert os.pread(fd, 3, border - 2) == BIG[border - 2 : border + 1]
    finally:
        os.close(fd)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDONLY | os.O_DIRECT], ids=["buffered", "direct"])
def test_reads_at_and_past_the_end(plain, flags):
    fd = os.open(plain.path / "odd", flags)
    try:
        size = len(ODD)
        page = size - size % 4096
        for offset in (page + 4096, page + MIB, 1 << 40):
            assert read_direct(fd, offset, 4096) == b""
        assert read_direct(fd, page, 8192) == ODD[page:]
        if not flags & os.O_DIRECT:
            assert os.pread(fd, 1, size) == b""
            assert os.pread(fd, 100, size - 10) == ODD[-10:]
            assert os.pread(fd, 1, size - 1) == ODD[-1:]
    finally:
        os.close(fd)


def test_empty_file_reads_empty(plain):
    assert (plain.path / "empty").stat().st_size == 0
    assert (plain.path / "empty").read_bytes() == b""
    fd = os.open(plain.path / "empty", os.O_RDONLY)
    assert os.pread(fd, 100, 50) == b""
    os.close(fd)


def test_parallel_readers_of_one_descriptor_get_their_own_bytes(plain):
    def whole():
        return (plain.path / "big").read_bytes() == BIG

    readers = [Child(whole) for _ in range(4)]
    for reader in readers:
        with reader:
            assert reader.result(60)

    fd = os.open(plain.path / "big", os.O_RDONLY)

    def right(seed):
        chance = random.Random(seed)
        offsets = [chance.randrange(len(BIG)) for _ in range(50)]
        return all(os.pread(fd, 30000, offset) == BIG[offset : offset + 30000] for offset in offsets)

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(right, range(16)))
    os.close(fd)


def test_mapped_file_shows_the_files_bytes(plain):
    with open(plain.path / "big", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[-5000:] == BIG[-5000:]
        assert mapped[7 * MIB + 1 : 9 * MIB] == BIG[7 * MIB + 1 : 9 * MIB]
        assert mapped[:] == BIG


def test_direct_read_returns_the_files_bytes(plain):
    fd = os.open(plain.path / "big", os.O_RDONLY | os.O_DIRECT)
    try:
        step = 3 * MIB
        parts = [read_direct(fd, offset, step) for offset in range(0, len(BIG), step)]
        assert b"".join(parts) == BIG
        assert read_direct(fd, 5 * MIB, 4096) == BIG[5 * MIB : 5 * MIB + 4096]
    finally:
        os.close(fd)


# --- read-ahead, counted in requests


@pytest.mark.parametrize("order", ["forward", "shuffled"])
def test_page_faults_are_filled_by_large_fetches(counted, order):
    size = 32 * MIB
    blocks = list(range(0, size, 4 * MIB))  # tensors come in the order of the model, not of the file
    if order == "shuffled":
        random.Random(5).shuffle(blocks)
    path, data = put(counted, f"mapped-{order}", size)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        for block in blocks:
            for offset in range(block, block + 4 * MIB, 4096):
                assert mapped[offset] == data[offset]
    lengths = fetched(counted, path.name)
    assert len(lengths) <= size / MIB, "more than one request for each MiB"
    assert sum(lengths) <= 1.25 * size


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDONLY | os.O_DIRECT], ids=["buffered", "direct"])
def test_interleaved_streams_on_one_descriptor_are_both_read_ahead(counted, flags):
    size, step = 16 * MIB, 128 << 10
    path, data = put(counted, f"interleaved-{flags}", 2 * size)
    fd = os.open(path, flags)
    for offset in range(0, size, step):
        for start in (offset, size + offset):
            assert read_direct(fd, start, step) == data[start : start + step]
    os.close(fd)
    lengths = fetched(counted, path.name)
    assert len(lengths) <= 2 * size / MIB, "more than one request for each MiB"
    assert sum(lengths) <= 1.25 * 2 * size


def test_header_read_fetches_little(counted):
    path, data = put(counted, "headed", 32 * MIB)
    with open(path, "rb") as file:
        assert file.read(8) == data[:8]
        assert file.read(20_000) == data[8:20_008]
    assert sum(fetched(counted, path.name)) <= MIB


def test_readers_of_the_same_bytes_share_one_fetch(counted):
    path, data = put(counted, "shared", MIB // 8)

    def read():
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)  # each asks the daemon: the kernel shares nothing of it
        return read_direct(fd, 0, MIB // 8) == data

    counted.source.hold(["read"])
    readers = [Child(read) for _ in range(8)]
    try:
        counted.source.wait_held()
        eventually(lambda: counted.status("/shared")["open_handles"] == 8, "all have the file open")
        counted.source.release()
        assert all(reader.result() for reader in readers)
    finally:
        counted.source.release()
        for reader in readers:
            with reader:
                pass
    assert fetched(counted, path.name) == [MIB // 8]


def test_second_open_of_an_unchanged_file_fetches_nothing(counted):
    path, data = put(counted, "twice", 9 * MIB)
    assert path.read_bytes() == data
    assert sum(fetched(counted, path.name)) == len(data)
    counted.source.forget_requests()
    assert path.read_bytes() == data
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    assert read_direct(fd, 0, 9 * MIB) == data
    os.close(fd)
    assert fetched(counted, path.name) == []


# --- memory


def test_memory_budget_is_held_under_64_readers(place):
    budget, readers, size = 64 * MIB, 64, 4 * MIB
    data = content(size + readers, seed=7)
    for number in range(readers):
        (place.source / f"{number}").write_bytes(data[number : number + size])

    def read(number):
        with open(mount.path / f"{number}", "rb", buffering=0) as file:
            for offset in range(0, size, 256 << 10):
                assert file.read(256 << 10) == data[number + offset : min(number + offset + (256 << 10), number + size)]
        return True

    with place.mount("memory=64MiB") as mount:
        before = mount.peak_resident_bytes()
        with ThreadPoolExecutor(readers) as threads:
            results = [threads.submit(read, number) for number in range(readers)]
            while not all(result.done() for result in results):
                cache = mount.cache()
                assert cache["resident_bytes"] <= cache["limit_bytes"] <= budget
            assert all(result.result() for result in results)
        # Besides the buffers: threads, replies on their way, Python's own objects. A leak would be 256 MiB.
        assert mount.peak_resident_bytes() - before <= budget + 96 * MIB


# --- processes


def test_forked_children_read_through_inherited_descriptors(plain):
    fd = os.open(plain.path / "big", os.O_RDONLY)
    assert os.pread(fd, 100, 0) == BIG[:100]

    def right(number):
        chance = random.Random(number)
        for offset in [chance.randrange(len(BIG)) for _ in range(100)]:
            assert os.pread(fd, 20_000, offset) == BIG[offset : offset + 20_000]
        os.close(fd)
        return True

    children = [Child(lambda number=number: right(number)) for number in range(4)]
    for child in children:
        with child:
            assert child.result()
    assert os.pread(fd, 100, MIB) == BIG[MIB : MIB + 100]
    os.close(fd)


def test_closing_a_duplicate_leaves_the_others_working(plain):
    fd = os.open(plain.path / "odd", os.O_RDONLY)
    others = [os.dup(fd) for _ in range(3)]
    in_child(lambda: os.close(fd))
    os.close(others[0])
    os.close(fd)
    assert os.pread(others[1], 5000, MIB) == ODD[MIB : MIB + 5000]
    os.close(others[1])
    assert os.read(others[2], 5000) == ODD[:5000]
    os.close(others[2])
