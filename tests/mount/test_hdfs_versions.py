"""What readers of a mount see of a file of HDFS that another client changes, replaces or deletes."""

from __future__ import annotations

import errno
import os
import time

import pytest

from turbofs.testing.children import in_child
from turbofs.testing.conformance_base import content
from turbofs.testing.elsewhere import Elsewhere
from turbofs.testing.hdfs_cluster import free_port
from turbofs.testing.mounts import workplace
from turbofs.testing.reading import read_or_errno
from turbofs.testing.waiting import eventually

pytestmark = [pytest.mark.hdfs, pytest.mark.mount]

MIB = 1 << 20
TIMEOUT_S = 0.2
TICK_S = 0.02
"""The kernel counts its timeouts in ticks of up to 10 ms."""
STEP = 128 << 10
OLD, NEW = content(12 * MIB + 77, seed=1), content(12 * MIB + 77, seed=2)
FLAGS = pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDONLY | os.O_DIRECT], ids=["buffered", "direct"])


@pytest.fixture(scope="module")
def elsewhere(hdfs):
    return Elsewhere(hdfs, "/mount-versions")


@pytest.fixture(scope="module")
def mount(elsewhere):
    options = (f"source.web_address={elsewhere.cluster.web}", f"fs.attribute_timeout={TIMEOUT_S * 1000:g}ms")
    with workplace() as place, place.mount(*options, "memory=256MiB", source=elsewhere.uri) as made:
        yield made


@pytest.fixture
def file(mount, elsewhere, request):
    """A file with the content OLD, in a directory of this test: (its name on HDFS, its path in the mount)."""
    name = f"{request.node.name.replace('[', '-').replace(']', '')}/file"
    elsewhere.put(name, OLD, block_bytes=4 * MIB)
    return name, mount.path / name


def passes(changed):
    """Yield until the attribute timeout has passed since *changed*, and once more."""
    last = False
    while not last:
        last = time.monotonic() > changed + TIMEOUT_S + TICK_S
        yield last


def old_or_stale(fd, offset, length):
    """Read the range: True where it is ESTALE from some byte on, False where all of it is there. Nothing else may come.

    The blocks of a file that is gone stay readable until the DataNodes have heard of it.
    """
    expected = OLD[offset : offset + length]
    while expected:
        seen = read_or_errno(fd, offset, len(expected))
        if seen == errno.ESTALE:
            return True
        assert isinstance(seen, bytes), errno.errorcode[seen]
        assert seen, f"an early end of file at {offset}"
        assert expected.startswith(seen), f"wrong bytes after {offset}: {str(seen)[:80]}"
        offset, expected = offset + len(seen), expected[len(seen) :]
    return False


def slurp(path):
    """All of a file, read in a child: a mount that hangs fails the test."""
    return in_child(path.read_bytes, limit_s=60)


def make_again(elsewhere, name):
    elsewhere.delete(name)
    elsewhere.put(name, NEW)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda elsewhere, name: elsewhere.put(name, NEW, replace=True), NEW),
        (make_again, NEW),
        (lambda elsewhere, name: elsewhere.append(name, b"more"), OLD + b"more"),
        (lambda elsewhere, name: elsewhere.truncate(name, 5 * MIB), OLD[: 5 * MIB]),
    ],
    ids=["replaced", "made again", "appended", "truncated"],
)
def test_open_after_a_close_elsewhere_sees_that_close(file, elsewhere, change, expected):
    name, shown = file
    assert slurp(shown) == OLD
    change(elsewhere, name)
    for last in passes(time.monotonic()):
        seen = slurp(shown)
        assert seen == expected or (not last and seen == OLD)
    assert shown.stat().st_size == len(expected)


@pytest.mark.parametrize("held", [False, True], ids=["closed", "open"])
def test_replaced_file_gets_a_new_inode(file, elsewhere, held):
    name, shown = file
    for turn in range(1, 4):
        fd = os.open(shown, os.O_RDONLY)
        before = os.fstat(fd).st_ino
        if not held:
            os.close(fd)  # the kernel may forget the old file before it sees the new one
        elsewhere.put(name, NEW[turn:], replace=True)
        eventually(lambda turn=turn: shown.stat().st_size == len(NEW) - turn, "the replacement shows")
        assert shown.stat().st_ino != before
        if held:
            assert os.fstat(fd).st_ino == before
            os.close(fd)


def test_appended_file_keeps_its_inode(file, elsewhere):
    name, shown = file
    before = shown.stat().st_ino
    expected = OLD
    for turn in range(3):
        if turn == 1:
            assert slurp(shown) == expected
        elsewhere.append(name, NEW[: 1000 + turn])
        expected += NEW[: 1000 + turn]
        eventually(lambda expected=expected: shown.stat().st_size == len(expected), "the growth shows")
        assert shown.stat().st_ino == before
    assert slurp(shown) == expected


def test_replacement_with_equal_length_and_time_is_noticed(file, elsewhere):
    name, shown = file
    assert slurp(shown) == OLD
    before = shown.stat()
    times = elsewhere.times(name)
    elsewhere.put(f"{name}.other", NEW)
    elsewhere.set_times(f"{name}.other", times)
    elsewhere.rename(f"{name}.other", name, replace=True)
    for last in passes(time.monotonic()):
        seen = slurp(shown)
        assert seen == NEW or (not last and seen == OLD)
    after = shown.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns), (
        "only the file id tells them apart"
    )
    assert after.st_ino != before.st_ino


def replaced(elsewhere, name):
    elsewhere.put(name, NEW, replace=True)


def rewritten(elsewhere, name):
    """The same file with other bytes, and shorter: its id stays, and so do the names of its first blocks."""
    elsewhere.truncate(name, 5 * MIB)
    elsewhere.append(name, NEW[5 * MIB : 10 * MIB])


@FLAGS
@pytest.mark.parametrize("change", [replaced, rewritten])
def test_one_descriptor_never_mixes_two_versions(file, elsewhere, flags, change):
    name, shown = file
    fd = os.open(shown, flags)
    assert read_or_errno(fd, 0, STEP) == OLD[:STEP]
    change(elsewhere, name)
    for last in passes(time.monotonic()):
        for offset in range(0, len(OLD), STEP):
            old_or_stale(fd, offset, STEP)
        if last:
            os.fstat(fd)  # asking for its length does not make it the other version either
    old_or_stale(fd, 6 * MIB, STEP)
    os.close(fd)
    assert slurp(shown) == (NEW if change is replaced else OLD[: 5 * MIB] + NEW[5 * MIB : 10 * MIB])


@FLAGS
@pytest.mark.parametrize("what", ["file", "directory"])
def test_open_file_survives_a_rename_elsewhere(file, elsewhere, flags, what):
    name, shown = file
    fd = os.open(shown, flags)
    assert read_or_errno(fd, 0, 4096) == OLD[:4096]
    if what == "file":
        elsewhere.rename(name, f"{name}-renamed")
        elsewhere.put(name, NEW)  # the name is another file's now
        eventually(lambda: slurp(shown) == NEW, "the new file of that name shows")
    else:
        folder = os.path.dirname(name)
        elsewhere.rename(folder, f"{folder}-renamed")
        eventually(lambda: not shown.exists(), "the old name is gone")
    for _ in passes(time.monotonic()):
        assert read_or_errno(fd, 6 * MIB, MIB) == OLD[6 * MIB : 7 * MIB]
        assert os.fstat(fd).st_size == len(OLD)
    parts = [read_or_errno(fd, offset, MIB) for offset in range(0, len(OLD), MIB)]
    assert b"".join(parts) == OLD
    os.close(fd)


@FLAGS
@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_read_of_a_deleted_open_file_is_stale(file, elsewhere, flags, how):
    name, shown = file
    fd = os.open(shown, flags)
    assert read_or_errno(fd, 0, STEP) == OLD[:STEP]
    if how == "deleted":
        elsewhere.delete(name)
        eventually(lambda: not shown.exists(), "the name is gone")
    else:
        replaced(elsewhere, name)
        eventually(lambda: slurp(shown) == NEW, "the replacement shows")
    offsets = iter(range(len(OLD) - len(OLD) % 4096, MIB, -16384))  # against read-ahead: none was read before

    eventually(lambda: old_or_stale(fd, next(offsets), 4096), "what is not cached is stale")
    assert all(old_or_stale(fd, next(offsets), 4096) for _ in range(20))
    if flags & os.O_DIRECT:
        assert read_or_errno(fd, 0, STEP) == OLD[:STEP], "what was read before is still there"
    os.close(fd)


@FLAGS
@pytest.mark.parametrize("then", ["stays short", "extended again"])
def test_file_truncated_while_open_never_reads_zeros(file, elsewhere, flags, then):
    name, shown = file
    fd = os.open(shown, flags)
    assert read_or_errno(fd, 0, 4096) == OLD[:4096]
    elsewhere.truncate(name, 3 * MIB + 5)
    now = OLD
    if then == "extended again":
        now = OLD[: 3 * MIB + 5] + NEW[3 * MIB + 5 :]
        elsewhere.append(name, NEW[3 * MIB + 5 :])  # as long as before: to HDFS it is the same file, touched
    for _ in passes(time.monotonic()):
        for offset in (0, 3 * MIB, 6 * MIB, len(OLD) - len(OLD) % 4096 - 4096):
            seen = read_or_errno(fd, offset, 8192)
            allowed = {errno.ESTALE, errno.EIO, OLD[offset : offset + 8192], now[offset : offset + 8192]}
            assert seen in allowed, f"{offset}: {str(seen)[:80]}"
    os.close(fd)
    assert slurp(shown) == (now if then == "extended again" else OLD[: 3 * MIB + 5])


@FLAGS
@pytest.mark.parametrize("how", ["closed each time", "synced"])
def test_open_file_follows_growth(file, elsewhere, flags, how):
    name, shown = file
    fd = os.open(shown, flags)
    end = len(OLD) - len(OLD) % 4096
    assert read_or_errno(fd, end, 4096) == OLD[end:]
    expected = OLD

    def follow(step):
        nonlocal expected
        before, expected = len(expected), expected + NEW[:step]
        start = before - before % 4096
        for last in passes(time.monotonic()):
            seen = read_or_errno(fd, start, 4 * MIB)
            assert seen == expected[start:] or (not last and expected[start:].startswith(seen)), str(seen)[:80]
        assert os.fstat(fd).st_size == len(expected)

    if how == "synced":
        with elsewhere.writing(name, append=True) as writer:
            for step in (100, 3 * MIB, 70_000):
                writer.write(NEW[:step])
                writer.hsync()
                follow(step)
    else:
        for step in (100, 3 * MIB, 70_000):
            elsewhere.append(name, NEW[:step])
            follow(step)
    parts = [read_or_errno(fd, offset, MIB) for offset in range(0, len(expected), MIB)]
    assert b"".join(parts) == expected
    os.close(fd)


def test_weak_versions_drop_caches_at_open_and_status_says_so(place, elsewhere):
    """The NameNode's HTTP port is out of reach: nothing tells a file from another of its length and time."""
    name = "weak/file"
    elsewhere.put(name, OLD)
    times = elsewhere.times(name)
    with place.mount(f"source.web_address=127.0.0.1:{free_port()}", source=elsewhere.uri) as mount:
        shown = mount.path / name
        assert slurp(shown) == OLD
        assert not mount.status(f"/{name}")["strong_version"]
        for turn in range(2):
            expected = (NEW, OLD)[turn]
            elsewhere.put(f"{name}.other", expected)
            elsewhere.set_times(f"{name}.other", times)
            elsewhere.rename(f"{name}.other", name, replace=True)
            assert slurp(shown) == expected, "an open trusts nothing that an earlier one read"
        source = mount.status()["source"]
        assert source["versions"].startswith("weak: ")
        assert "strong-versions" not in source["capabilities"]
        done = place.turbofs("doctor", str(mount.path))
        assert done.returncode == 1
        assert "versions are weak" in done.stdout
