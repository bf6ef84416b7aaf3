"""What readers of a mount see of a file that changes underneath, on a local tree."""

from __future__ import annotations

import errno
import mmap
import os
import time

import pytest

from turbofs.testing.children import Child, in_child
from turbofs.testing.conformance_base import content
from turbofs.testing.mounts import workplace
from turbofs.testing.waiting import eventually

pytestmark = pytest.mark.mount

MIB = 1 << 20
TIMEOUT_S = 0.2
TICK_S = 0.02
"""The kernel counts its timeouts in ticks of up to 10 ms."""
OLD, NEW = content(12 * MIB + 77, seed=1), content(12 * MIB + 77, seed=2)
FLAGS = pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDONLY | os.O_DIRECT], ids=["buffered", "direct"])


@pytest.fixture(scope="module")
def mount():
    with workplace() as place, place.mount(f"fs.attribute_timeout={TIMEOUT_S * 1000:g}ms", "memory=256MiB") as made:
        yield made


@pytest.fixture
def file(mount, request):
    """A file with the content OLD, in a directory of this test: (in the source, in the mount)."""
    name = request.node.name.replace("[", "-").replace("]", "")
    (mount.place.source / name).mkdir()
    (mount.place.source / name / "file").write_bytes(OLD)
    return mount.place.source / name / "file", mount.path / name / "file"


def replace(path, data):
    other = path.with_name("other")
    other.write_bytes(data)
    os.replace(other, path)


def rewrite(path, data):
    with path.open("r+b") as opened:
        opened.write(data)


def append(path, data):
    with path.open("ab") as opened:
        opened.write(data)


def read_at(fd, offset, length):
    """Up to *length* bytes at *offset*, or the errno. The buffer is aligned, as O_DIRECT wants it, and not of zeros."""
    with mmap.mmap(-1, length) as buffer:
        buffer[:] = b"\xaa" * length
        try:
            count = os.preadv(fd, [buffer], offset)
        except OSError as error:
            return error.errno
        return buffer[:count]


def passes(changed):
    """Yield until the attribute timeout has passed since *changed*, and once more."""
    last = False
    while not last:
        last = time.monotonic() > changed + TIMEOUT_S + TICK_S
        yield last


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda path: replace(path, NEW), NEW),
        (lambda path: rewrite(path, NEW), NEW),
        (lambda path: append(path, b"more"), OLD + b"more"),
        (lambda path: os.truncate(path, 5000), OLD[:5000]),
    ],
    ids=["replaced", "rewritten", "appended", "truncated"],
)
def test_open_after_a_change_elsewhere_sees_the_change(file, change, expected):
    source, shown = file
    assert shown.read_bytes() == OLD
    change(source)
    for last in passes(time.monotonic()):
        seen = shown.read_bytes()
        assert seen == expected or (not last and seen == OLD)
    assert shown.stat().st_size == len(expected)


@pytest.mark.parametrize("held", [False, True], ids=["closed", "open"])
def test_replaced_file_gets_a_new_inode(file, held):
    source, shown = file
    for turn in range(1, 4):
        fd = os.open(shown, os.O_RDONLY)
        before = os.fstat(fd).st_ino
        if not held:
            os.close(fd)  # the kernel may forget the old file before it sees the new one
        replace(source, NEW[turn:])
        eventually(lambda turn=turn: shown.stat().st_size == len(NEW) - turn, "the replacement shows")
        assert shown.stat().st_ino != before
        if held:
            assert os.fstat(fd).st_ino == before
            os.close(fd)


def test_file_changed_in_place_gets_a_new_inode(file):
    source, shown = file
    before = shown.stat().st_ino
    rewrite(source, NEW)
    eventually(lambda: shown.stat().st_mtime_ns == source.stat().st_mtime_ns, "the change shows")
    assert shown.stat().st_ino != before
    assert shown.read_bytes() == NEW


def test_grown_file_keeps_its_inode(file):
    source, shown = file
    before = shown.stat().st_ino
    expected = OLD
    for turn in range(3):
        if turn == 1:
            assert shown.read_bytes() == expected
        append(source, NEW[: 1000 + turn])
        expected += NEW[: 1000 + turn]
        eventually(lambda expected=expected: shown.stat().st_size == len(expected), "the growth shows")
        assert shown.stat().st_ino == before
    assert shown.read_bytes() == expected


def test_replacement_with_equal_length_and_time_is_noticed(file):
    source, shown = file
    assert shown.read_bytes() == OLD
    before = shown.stat().st_ino
    times = source.stat().st_atime_ns, source.stat().st_mtime_ns
    other = source.with_name("other")
    other.write_bytes(NEW)
    os.utime(other, ns=times)
    os.replace(other, source)
    for last in passes(time.monotonic()):
        seen = shown.read_bytes()
        assert seen == NEW or (not last and seen == OLD)
    assert shown.stat().st_ino != before
    rewrite(source, OLD)  # the same in place: only the time of the change of the inode tells
    os.utime(source, ns=times)
    for last in passes(time.monotonic()):
        seen = shown.read_bytes()
        assert seen == OLD or (not last and seen == NEW)


@FLAGS
@pytest.mark.parametrize("times", ["new times", "times put back"])
def test_one_descriptor_never_mixes_two_versions(file, flags, times):
    source, shown = file
    fd = os.open(shown, flags)
    assert read_at(fd, 0, 128 << 10) == OLD[: 128 << 10]
    stamp = source.stat()
    rewrite(source, NEW)
    if times == "times put back":
        os.utime(source, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    stale = 0
    for _ in range(2):
        for offset in range(0, len(OLD), 128 << 10):
            seen = read_at(fd, offset, 128 << 10)
            assert seen in {errno.ESTALE, OLD[offset : offset + (128 << 10)]}, f"{offset}: {str(seen)[:80]}"
            stale += seen == errno.ESTALE
    assert stale, "most of it was not read before the change: it cannot be there"
    os.close(fd)
    assert shown.read_bytes() == NEW


@FLAGS
@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_open_file_survives_replacement_and_deletion(file, flags, how):
    source, shown = file
    fd = os.open(shown, flags)
    assert read_at(fd, 0, 4096) == OLD[:4096]
    if how == "replaced":
        replace(source, NEW)
        assert shown.read_bytes() == NEW
    else:
        source.unlink()
        eventually(lambda: not shown.exists(), "the name is gone")
    for _ in passes(time.monotonic()):
        assert read_at(fd, 8 * MIB, 4096) == OLD[8 * MIB : 8 * MIB + 4096]
        assert os.fstat(fd).st_size == len(OLD)
    parts = [read_at(fd, offset, MIB) for offset in range(0, len(OLD), MIB)]
    assert b"".join(parts) == OLD
    os.close(fd)


@pytest.mark.parametrize("what", ["file", "directory"])
def test_open_file_survives_a_rename(file, what):
    source, shown = file
    fd = os.open(shown, os.O_RDONLY)
    assert read_at(fd, 0, 4096) == OLD[:4096]
    if what == "file":
        now = source.with_name("renamed")
        source.rename(now)
    else:
        now = source.parent.with_name("renamed-directory") / "file"
        source.parent.rename(now.parent)
    eventually(lambda: not shown.exists(), "the old name is gone")
    assert read_at(fd, 6 * MIB, MIB) == OLD[6 * MIB : 7 * MIB]
    assert os.fstat(fd).st_size == len(OLD)
    parts = [read_at(fd, offset, MIB) for offset in range(0, len(OLD), MIB)]
    assert b"".join(parts) == OLD
    os.close(fd)


@FLAGS
@pytest.mark.parametrize("then", ["stays short", "extended again"])
def test_file_truncated_while_open_never_reads_zeros(file, flags, then):
    source, shown = file
    fd = os.open(shown, flags)
    assert read_at(fd, 0, 4096) == OLD[:4096]
    os.truncate(source, 3 * MIB + 5)
    if then == "extended again":
        os.truncate(source, len(OLD))  # now there really are zeros, but not in the version that was opened
    failed = 0
    for _ in passes(time.monotonic()):
        for offset in (0, 3 * MIB, 6 * MIB, len(OLD) - len(OLD) % 4096 - 4096):
            seen = read_at(fd, offset, 8192)
            assert seen in {errno.ESTALE, errno.EIO, OLD[offset : offset + 8192]}, f"{offset}: {str(seen)[:80]}"
            failed += isinstance(seen, int)
    assert failed
    os.close(fd)


@FLAGS
def test_open_file_follows_growth(file, flags):
    source, shown = file
    fd = os.open(shown, flags)
    end = len(OLD) - len(OLD) % 4096
    assert read_at(fd, end, 4096) == OLD[end:]
    expected = OLD
    for turn in range(3):
        append(source, NEW[turn : turn + 3 * MIB])
        expected += NEW[turn : turn + 3 * MIB]
        start = len(expected) - 3 * MIB
        start -= start % 4096
        for last in passes(time.monotonic()):
            seen = read_at(fd, start, 4 * MIB)
            assert seen == expected[start:] or (not last and expected[start:].startswith(seen)), str(seen)[:80]
        assert os.fstat(fd).st_size == len(expected)
    parts = [read_at(fd, offset, MIB) for offset in range(0, len(expected), MIB)]
    assert b"".join(parts) == expected
    os.close(fd)


def test_open_of_a_name_that_moved_on_gets_the_new_file(place):
    folder = place.source / "folder"
    folder.mkdir()
    for name in ("replaced", "deleted"):
        (folder / name).write_bytes(b"old")
    shown = place.mountpoint / "folder"
    with place.mount("fs.attribute_timeout=60s"):  # the kernel believes what it knows all through this test

        def walk():
            for turn in range(5):
                assert (shown / "replaced").stat().st_size > 0
                replace(folder / "replaced", b"new" * (turn + 1))
                assert (shown / "replaced").read_bytes() == b"new" * (turn + 1)
            assert (shown / "deleted").exists()
            (folder / "deleted").unlink()
            with pytest.raises(FileNotFoundError):
                (shown / "deleted").read_bytes()
            folder.rename(place.source / "away")
            folder.mkdir()
            (folder / "replaced").write_bytes(b"of the new folder")
            assert (shown / "replaced").read_bytes() == b"of the new folder"

        in_child(walk)


def test_readers_at_the_end_of_a_growing_file_never_see_zeros(place):
    """The kernel's last page ends in zeros; told of a longer file, it must not hand those out (a race: many tries)."""
    data = bytes(1 + byte % 255 for byte in content(12 * MIB))  # none of them zero
    path, growths = place.source / "file", 250
    path.write_bytes(data[: 8 * MIB + 1])  # many pages before the last make the kernel's window long
    step = 5477

    def follow():
        fd = os.open(place.mountpoint / "file", os.O_RDONLY)
        os.pread(fd, MIB, 0)
        position = 8 * MIB - 4096
        deadline = time.monotonic() + 60
        while position < 8 * MIB + 1 + growths * step and time.monotonic() < deadline:
            found = os.pread(fd, 64 << 10, position)
            if found != data[position : position + len(found)]:
                return f"{found.count(0)} zeros in {len(found)} bytes at {position}"
            position += len(found)
        return position

    with place.mount("fs.attribute_timeout=10ms"):
        readers = [Child(follow) for _ in range(6)]
        try:
            with path.open("ab", buffering=0) as file:
                for growth in range(growths):
                    start = 8 * MIB + 1 + growth * step
                    file.write(data[start : start + step])
                    time.sleep(0.01)  # the pace of the writer is what is tried here
            assert [reader.result(60) for reader in readers] == [8 * MIB + 1 + growths * step] * len(readers)
        finally:
            for reader in readers:
                with reader:
                    pass
