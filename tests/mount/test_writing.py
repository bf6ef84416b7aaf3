"""What is written through a mount is what every reader gets, here at once and on the source after close."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import random
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from turbofs.testing.children import Child, in_child
from turbofs.testing.conformance_base import content
from turbofs.testing.mounts import workplace
from turbofs.testing.reading import read_at
from turbofs.testing.waiting import eventually
from turbofs.testing.writing import temporaries, write_all, write_fd

pytestmark = pytest.mark.mount

MIB = 1 << 20
OLD, NEW = content(3 * MIB + 77, seed=1), content(2 * MIB + 5, seed=2)
BIG = content(20 * MIB + 12345, seed=3)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)


@pytest.fixture(scope="module")
def mount():
    """A mount whose requests are counted; each test makes files of its own."""
    with workplace() as place, place.direct("memory=256MiB") as made:
        yield made


@pytest.fixture
def corner(mount, request):
    """A new directory of this test: (in the source, in the mount)."""
    name = request.node.name.replace("[", "-").replace("]", "").replace(" ", "_")
    (mount.place.source / name).mkdir()
    return mount.place.source / name, mount.path / name


def same(source, shown, expected):
    """The file has these bytes and this length for a reader of the mount and for one of the source."""
    assert (source.stat().st_size, shown.stat().st_size) == (len(expected), len(expected))
    assert source.read_bytes() == expected
    assert shown.read_bytes() == expected
    fd = os.open(shown, os.O_RDONLY | os.O_DIRECT)  # past the kernel's own copy
    assert read_at(fd, 0, len(expected) // 4096 * 4096 + 8192) == expected
    os.close(fd)


@pytest.mark.parametrize(
    ("size", "step"), [(0, 1), (1, 1), (5000, 7), (len(BIG), 4093), (len(BIG), MIB), (len(BIG), -1)]
)
def test_sequential_write_gives_the_source_the_same_bytes(corner, size, step):
    source, shown = corner
    write_all(shown / "file", BIG[:size], step=step if step > 0 else len(BIG))
    same(source / "file", shown / "file", BIG[:size])
    assert os.listdir(source) == ["file"]


@pytest.mark.parametrize("kind", ["new", "existing"])
@pytest.mark.parametrize("seed", range(3))
def test_random_writes_are_those_of_any_file_system(corner, kind, seed):
    """Writes, truncations, reads and closes in any order, against a bytearray."""
    source, shown = corner
    chance = random.Random(seed)
    model = bytearray()
    if kind == "existing":
        (source / "file").write_bytes(OLD)
        model[:] = OLD
    fd = os.open(shown / "file", os.O_RDWR | os.O_CREAT, 0o644)
    for _ in range(250):
        offset = chance.choice([0, len(model), chance.randrange(4 * MIB), chance.randrange(len(model) + 1)])
        match chance.randrange(12):
            case 0:
                os.ftruncate(fd, offset)
                model[offset:] = bytes(max(0, offset - len(model)))
            case 1 if chance.random() < 0.3:
                os.close(fd)
                assert (source / "file").read_bytes() == model
                fd = os.open(shown / "file", os.O_RDWR)
            case 2:
                os.fsync(fd)
                assert (source / "file").read_bytes() == model
            case 3 | 4:
                assert os.pread(fd, 100_000, offset) == model[offset : offset + 100_000]
            case _:
                data = chance.randbytes(chance.choice([1, 100, 4096, 70_000]))
                assert os.pwrite(fd, data, offset) == len(data)
                model[len(model) : offset] = bytes(max(0, offset - len(model)))
                model[offset : offset + len(data)] = data
        assert os.fstat(fd).st_size == len(model)
    os.close(fd)
    same(source / "file", shown / "file", bytes(model))


@pytest.mark.parametrize("kind", ["new", "existing"])
def test_holes_read_as_zeros(corner, kind):
    source, shown = corner
    expected = bytearray(12 * MIB + 3)
    if kind == "existing":
        (source / "file").write_bytes(OLD)
        expected[: len(OLD)] = OLD
    fd = os.open(shown / "file", os.O_RDWR | os.O_CREAT, 0o644)
    for offset in (12 * MIB, 7 * MIB + 1):
        os.pwrite(fd, b"end", offset)
        expected[offset : offset + 3] = b"end"
    assert os.pread(fd, 13 * MIB, 0) == expected
    os.close(fd)
    same(source / "file", shown / "file", bytes(expected))


@pytest.mark.parametrize("how", ["path", "descriptor"])
@pytest.mark.parametrize("kind", ["new", "existing"])
def test_truncation_shrinks_and_extends(corner, kind, how):
    source, shown = corner
    if kind == "existing":
        (source / "file").write_bytes(OLD)
    else:
        write_all(shown / "file", OLD)
    expected = OLD
    for size in (MIB + 1, 5 * MIB, 4096, 4097, 0, 10):
        expected = expected[:size] + bytes(max(0, size - len(expected)))
        if how == "path":
            os.truncate(shown / "file", size)
        else:
            fd = os.open(shown / "file", os.O_RDWR)
            os.ftruncate(fd, size)
            assert os.fstat(fd).st_size == size
            assert os.pread(fd, 6 * MIB, 0) == expected
            os.close(fd)
        same(source / "file", shown / "file", expected)


def test_a_file_that_is_being_written_is_truncated_by_its_name(corner):
    source, shown = corner
    fd = os.open(shown / "file", os.O_RDWR | os.O_CREAT, 0o644)
    write_fd(fd, NEW)
    os.truncate(shown / "file", 1000)
    assert os.fstat(fd).st_size == 1000
    os.pwrite(fd, b"tail", 2000)
    os.close(fd)
    same(source / "file", shown / "file", NEW[:1000] + bytes(1000) + b"tail")


@pytest.mark.parametrize("kind", ["new", "existing"])
def test_appends_go_to_the_end_whoever_writes(corner, kind):
    """Four processes append records to one file through descriptors of their own: each is there once, and whole."""
    source, shown = corner
    before = b""
    if kind == "existing":
        before = b"%-15s\n" % b"before" * 10
        (source / "file").write_bytes(before)

    def append(number):
        fd = os.open(shown / "file", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for turn in range(50):
            os.write(fd, b"%-15s\n" % (b"%d-%d" % (number, turn)))
        os.close(fd)
        return True

    writers = [Child(lambda number=number: append(number)) for number in range(4)]
    for writer in writers:
        with writer:
            assert writer.result()
    written = (source / "file").read_bytes()
    assert written.startswith(before)
    records = written[len(before) :].split(b"\n")
    assert records.pop() == b""
    assert sorted(records) == sorted(
        b"%-15s" % (b"%d-%d" % (number, turn)) for number in range(4) for turn in range(50)
    )
    for number in range(4):
        own = [int(record.split(b"-")[1]) for record in records if record.startswith(b"%d-" % number)]
        assert own == list(range(50)), "each writer's records are in its order"
    same(source / "file", shown / "file", written)


def test_truncating_open_empties_the_file(corner):
    source, shown = corner
    (source / "file").write_bytes(OLD)
    fd = os.open(shown / "file", os.O_WRONLY | os.O_TRUNC)
    assert (shown / "file").stat().st_size == 0
    os.write(fd, b"new")
    os.close(fd)
    same(source / "file", shown / "file", b"new")
    os.close(os.open(shown / "file", os.O_RDWR | os.O_TRUNC))
    same(source / "file", shown / "file", b"")


def test_exclusive_create_has_one_winner(corner):
    source, shown = corner
    (source / "there").write_bytes(b"theirs")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with pytest.raises(FileExistsError):
        os.open(shown / "there", flags)
    assert (source / "there").read_bytes() == b"theirs"

    def create(number):
        try:
            fd = os.open(shown / "lock", flags, 0o644)
        except FileExistsError:
            return None
        os.write(fd, b"%d" % number)
        os.close(fd)
        return number

    children = [Child(lambda number=number: create(number)) for number in range(8)]
    winners = []
    for child in children:
        with child:
            winners.append(child.result())
    (winner,) = [number for number in winners if number is not None]
    same(source / "lock", shown / "lock", b"%d" % winner)


@pytest.mark.parametrize("kind", ["new", "existing"])
def test_shared_mapping_writes_to_the_file(corner, kind):
    """As safetensors and NumPy write: the file is extended, mapped, and filled through memory."""
    source, shown = corner
    expected = bytearray(5 * MIB + 123)
    if kind == "existing":
        (source / "file").write_bytes(OLD)
        expected[: len(OLD)] = OLD
    chance = random.Random(7)
    patches = [(5 * MIB + 120, b"end")]
    for _ in range(100):
        data = chance.randbytes(chance.choice([1, 4096, 70_000]))
        patches.append((chance.randrange(len(expected) - 70_000), data))
    fd = os.open(shown / "file", os.O_RDWR | os.O_CREAT, 0o644)

    def fill():
        faulthandler.disable()  # a page that cannot be had is SIGBUS, and ends the child
        os.ftruncate(fd, len(expected))
        with mmap.mmap(fd, len(expected)) as mapped:
            before = mapped[:]
            for start, piece in patches:
                mapped[start : start + len(piece)] = piece
            mapped.flush()
            flushed = (shown / "file").read_bytes()
            mapped[:5] = b"begin"
        return before, flushed

    before, flushed = in_child(fill)
    assert before == expected
    for start, piece in patches:
        expected[start : start + len(piece)] = piece
    assert flushed == expected
    expected[:5] = b"begin"
    os.close(fd)
    same(source / "file", shown / "file", bytes(expected))


def test_mapping_that_outlives_its_descriptor_reaches_the_source(corner):
    source, shown = corner
    (source / "file").write_bytes(OLD)

    def change():
        faulthandler.disable()
        fd = os.open(shown / "file", os.O_RDWR)
        mapping = _libc.mmap(None, len(OLD), mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        os.close(fd)  # Python's own mappings keep a duplicate
        ctypes.memmove(mapping + 1000, b"late", 4)
        assert _libc.munmap(ctypes.c_void_p(mapping), ctypes.c_size_t(len(OLD))) == 0

    in_child(change)
    expected = OLD[:1000] + b"late" + OLD[1004:]
    eventually(lambda: (source / "file").read_bytes() == expected, "the mapping's pages reach the source")
    same(source / "file", shown / "file", expected)


def test_direct_writes_reach_the_source(corner):
    source, shown = corner
    fd = os.open(shown / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o644)
    size = len(BIG) - len(BIG) % 4096
    with mmap.mmap(-1, MIB) as buffer:
        for start in range(0, size, MIB):
            piece = BIG[start : min(start + MIB, size)]
            buffer[: len(piece)] = piece
            with memoryview(buffer)[: len(piece)] as view:
                assert os.pwritev(fd, [view], start) == len(piece)
    assert read_at(fd, 5 * MIB, 4096) == BIG[5 * MIB : 5 * MIB + 4096]
    os.close(fd)
    same(source / "file", shown / "file", BIG[:size])


def test_own_writes_are_seen_at_once_by_every_process_of_the_node(corner):
    source, shown = corner
    (source / "old").write_bytes(OLD)
    for name, before in (("new", b""), ("old", OLD)):
        writing = os.open(shown / name, os.O_RDWR | os.O_CREAT, 0o644)
        another = os.open(shown / name, os.O_RDONLY)
        expected = bytearray(before)
        for offset, data in ((0, b"first"), (MIB, NEW), (5, b"second"), (len(expected) + 3 * MIB, b"tail")):
            os.pwrite(writing, data, offset)
            expected[len(expected) : offset] = bytes(max(0, offset - len(expected)))
            expected[offset : offset + len(data)] = data
            assert os.pread(writing, len(expected) + 1, 0) == expected
            assert os.pread(another, len(expected) + 1, 0) == expected
            assert in_child((shown / name).read_bytes) == expected
            assert in_child(lambda fd=another: os.pread(fd, 8 * MIB, 0)) == expected
            assert (shown / name).stat().st_size == os.fstat(another).st_size == len(expected)
        os.ftruncate(writing, 10)
        assert os.pread(another, 100, 0) == expected[:10]
        assert in_child((shown / name).read_bytes) == expected[:10]
        os.close(writing)
        assert os.pread(another, 100, 0) == expected[:10]
        os.close(another)
        same(source / name, shown / name, bytes(expected[:10]))


def test_own_writes_keep_the_inode_number(corner):
    source, shown = corner
    (source / "old").write_bytes(OLD)
    for name in ("old", "new"):
        fd = os.open(shown / name, os.O_RDWR | os.O_CREAT, 0o644)
        number = os.fstat(fd).st_ino
        for turn in range(4):
            os.pwrite(fd, b"changed", 1000 * turn)
            if turn == 2:
                os.fsync(fd)
            assert os.fstat(fd).st_ino == (shown / name).stat().st_ino == number
        os.close(fd)
        assert (shown / name).stat().st_ino == number
        write_all(shown / name, NEW)
        assert (shown / name).stat().st_ino == number
        os.truncate(shown / name, 5)
        assert (shown / name).stat().st_ino == number
        with (shown / name).open("rb") as opened:
            assert os.fstat(opened.fileno()).st_ino == number
            assert opened.read() == NEW[:5]


def test_stat_follows_writes(corner):
    source, shown = corner
    (source / "file").write_bytes(OLD)
    os.utime(source / "file", (1_500_000_000, 1_500_000_000))
    fd = os.open(shown / "file", os.O_RDWR)
    os.pread(fd, 10, 0)
    assert os.fstat(fd).st_mtime == 1_500_000_000
    os.pwrite(fd, b"x", len(OLD))
    written = os.fstat(fd)
    assert written.st_size == len(OLD) + 1
    assert written.st_blocks * 512 >= len(OLD)
    assert written.st_mtime > 1_600_000_000
    os.close(fd)
    eventually(lambda: (shown / "file").stat().st_mtime_ns == (source / "file").stat().st_mtime_ns, "one time for all")
    assert stat.S_ISREG((shown / "file").stat().st_mode)


def test_updating_a_file_fetches_only_what_it_needs(mount, corner):
    source, shown = corner
    (source / "file").write_bytes(BIG)
    mount.source.forget_requests()
    fd = os.open(shown / "file", os.O_RDWR)
    os.pwrite(fd, b"x" * 8192, 10 * MIB)
    os.pwrite(fd, b"y" * 10, 5 * MIB + 1)
    fetched = mount.source.requests("read", f"/{shown.name}/file")
    assert sum(each.stop - each.start for each in fetched) <= 2 * MIB
    expected = bytearray(BIG)
    expected[10 * MIB : 10 * MIB + 8192] = b"x" * 8192
    expected[5 * MIB + 1 : 5 * MIB + 11] = b"y" * 10
    assert os.pread(fd, 30_000, 10 * MIB - 5000) == expected[10 * MIB - 5000 : 10 * MIB + 25_000]
    os.close(fd)
    same(source / "file", shown / "file", bytes(expected))


def test_large_files_upload_while_they_are_written(corner):
    source, shown = corner
    fd = os.open(shown / "file", os.O_WRONLY | os.O_CREAT, 0o644)
    write_fd(fd, BIG)
    sizes = eventually(lambda: [path.stat().st_size for path in temporaries(source)], "the upload has begun")
    assert len(sizes) == 1
    eventually(lambda: temporaries(source)[0].stat().st_size >= 8 * MIB, "the upload goes on while the file is open")
    assert not (source / "file").exists()
    os.pwrite(fd, b"header", 0)  # and what was uploaded may still change
    os.close(fd)
    same(source / "file", shown / "file", b"header" + BIG[6:])
    assert os.listdir(source) == ["file"]


def test_threads_write_through_one_descriptor(corner):
    source, shown = corner
    fd = os.open(shown / "file", os.O_RDWR | os.O_CREAT, 0o644)
    step = 100_001
    with ThreadPoolExecutor(8) as threads:
        offsets = list(range(0, len(BIG), step))
        random.Random(5).shuffle(offsets)
        counts = list(threads.map(lambda offset: os.pwrite(fd, BIG[offset : offset + step], offset), offsets))
    assert sum(counts) == len(BIG)
    os.close(fd)
    same(source / "file", shown / "file", BIG)


def test_many_files_are_written_at_once(corner):
    source, shown = corner

    def write(number):
        for turn in range(3):
            write_all(shown / f"{number}-{turn}", BIG[number : number + 100_000 * turn + number], step=33_333)

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(write, range(16)))
    assert (
        sorted(os.listdir(source))
        == sorted(os.listdir(shown))
        == sorted(f"{n}-{t}" for n in range(16) for t in range(3))
    )
    for number in range(16):
        for turn in range(3):
            same(
                source / f"{number}-{turn}", shown / f"{number}-{turn}", BIG[number : number + 100_000 * turn + number]
            )


def test_common_tools_write(corner, tmp_path):
    source, shown = corner
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "big").write_bytes(BIG)
    (tmp_path / "tree" / "deep" / "script").write_bytes(b"#!/bin/sh\n")
    (tmp_path / "tree" / "deep" / "script").chmod(0o750)
    (tmp_path / "tree" / "deep" / "link").symlink_to("script")
    os.utime(tmp_path / "tree" / "big", ns=(10**18 + 7, 10**18 + 9))
    commands = [
        ["cp", "-a", tmp_path / "tree", shown / "copied"],
        ["tar", "-C", tmp_path, "-cf", shown / "tree.tar", "tree"],
        ["sh", "-c", f"mkdir {shown}/untarred && tar -C {shown}/untarred -xf {shown}/tree.tar"],
        ["dd", f"if={tmp_path}/tree/big", f"of={shown}/dd", "bs=64k", "conv=fsync"],
        ["sh", "-c", f"echo one >> {shown}/log; echo two >> {shown}/log; sed -i s/one/1/ {shown}/log"],
        ["mv", tmp_path / "tree" / "deep" / "script", shown / "moved"],
    ]
    for command in commands:
        subprocess.run(command, check=True, timeout=60, capture_output=True)
    for root in (shown, source):
        assert (root / "copied" / "big").read_bytes() == (root / "untarred/tree/big").read_bytes() == BIG
        assert (root / "copied" / "big").stat().st_mtime_ns == 10**18 + 9
        assert stat.S_IMODE((root / "untarred/tree/deep/script").stat().st_mode) == 0o750
        assert os.readlink(root / "copied" / "deep" / "link") == "script"
        assert (root / "dd").read_bytes() == BIG
        assert (root / "log").read_text() == "1\ntwo\n"
        assert (root / "moved").read_bytes() == b"#!/bin/sh\n"
    assert sorted(os.listdir(source)) == sorted(os.listdir(shown))
    assert temporaries(source) == []
