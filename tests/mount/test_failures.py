"""Sources that are silent, fail, refuse or change while a mount is in use: no wrong bytes, no hang."""

from __future__ import annotations

import errno
import mmap
import os
import random
import stat
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from turbofs.testing.children import Child, in_child
from turbofs.testing.conformance_base import content
from turbofs.testing.waiting import eventually

pytestmark = pytest.mark.mount

MIB = 1 << 20
SLACK_S = 10.0
"""For a machine that has other things to do."""
QUICK_RETRIES = ("source.backoff_first=1ms", "source.backoff_limit=5ms")


def outcome(act):
    """(errno or None, seconds)."""
    started = time.monotonic()
    try:
        act()
    except OSError as error:
        return error.errno, time.monotonic() - started
    return None, time.monotonic() - started


def read_direct(fd, offset, length):
    with mmap.mmap(-1, length) as buffer:
        return buffer[: os.preadv(fd, [buffer], offset)]


def put(place, name, size, seed=0):
    data = content(size, seed)
    (place.source / name).write_bytes(data)
    return data


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDONLY | os.O_DIRECT], ids=["buffered", "direct"])
def test_short_read_is_retried_then_eio(place, flags):
    data = put(place, "passing", 3 * MIB)
    put(place, "lasting", 3 * MIB)
    with place.direct(*QUICK_RETRIES) as mount:
        fd = os.open(mount.path / "passing", flags)
        mount.source.fail(["read"], times=2, short_reads=True)
        assert read_direct(fd, 0, MIB) == data[:MIB]
        assert len(mount.source.requests("read", "/passing")) > 2
        os.close(fd)
        fd = os.open(mount.path / "lasting", flags)
        mount.source.fail(["read"], short_reads=True)
        for offset in (0, 2 * MIB + 65536, 3 * MIB - 8192):
            assert outcome(partial(read_direct, fd, offset, 65536))[0] == errno.EIO
        mount.source.heal()
        assert b"".join(read_direct(fd, offset, MIB) for offset in range(0, 3 * MIB, MIB)) == data
        os.close(fd)


def test_silent_source_times_out_by_the_deadline(place):
    deadline_s = 2.0
    put(place, "file", 3 * MIB)
    put(place, "opened", 3 * MIB)
    (place.source / "folder").mkdir()
    with place.direct(f"fs.request_deadline={deadline_s:g}s", "fs.attribute_timeout=0s") as mount:
        direct = os.open(mount.path / "opened", os.O_RDONLY | os.O_DIRECT)
        folder = os.open(mount.path / "folder", os.O_RDONLY)
        mount.source.hold()
        acts = {
            "lookup": lambda: os.stat(mount.path / "nowhere"),
            "open": lambda: os.open(mount.path / "file", os.O_RDONLY),
            "read": lambda: read_direct(direct, 0, 4096),
            "stat": lambda: os.stat(mount.path / "file"),
            "list": lambda: os.listdir(folder),
        }
        children = {name: Child(partial(outcome, act)) for name, act in acts.items()}
        try:
            found = {name: child.result(deadline_s + 2 * SLACK_S) for name, child in children.items()}
        finally:
            mount.source.release()
            for child in children.values():
                with child:
                    pass
        assert {name: number for name, (number, _) in found.items()} == dict.fromkeys(acts, errno.ETIMEDOUT)
        assert max(seconds for _, seconds in found.values()) <= deadline_s + SLACK_S
        os.close(direct)
        os.close(folder)
        assert (mount.path / "file").read_bytes() == content(3 * MIB)  # all of it works again


def test_passing_faults_are_retried_unnoticed(place):
    data = put(place, "file", 9 * MIB)
    (place.source / "folder").mkdir()
    for number in range(50):
        put(place, f"folder/{number}", 10)
    (place.source / "link").symlink_to("file")
    with place.direct(*QUICK_RETRIES, "fs.attribute_timeout=0s") as mount:
        for acts in (["stat", "stat_exact"], ["open"], ["read"], ["list"], ["next_batch"], ["readlink"], ["refresh"]):
            mount.source.fail(acts, times=3)
        assert (mount.path / "file").read_bytes() == data
        assert len(os.listdir(mount.path / "folder")) == 50
        assert (mount.path / "folder" / "7").stat().st_size == 10
        assert os.readlink(mount.path / "link") == "file"
        with (mount.path / "file").open("rb") as opened:
            assert os.fstat(opened.fileno()).st_size == len(data)
        assert mount.status()["source"]["retries"] >= 10


def test_killed_reader_is_gone_by_the_deadline(place):
    deadline_s = 3.0
    put(place, "file", 3 * MIB)
    with place.direct(f"fs.request_deadline={deadline_s:g}s") as mount:
        fd = os.open(mount.path / "file", os.O_RDONLY)
        mount.source.hold(["read"])
        with Child(lambda: os.pread(fd, 4096, 0)) as reader:
            mount.source.wait_held()
            started = time.monotonic()
            reader.kill(deadline_s + SLACK_S)
            assert time.monotonic() - started <= deadline_s + SLACK_S
        mount.source.release()
        os.close(fd)


def test_df_answers_while_the_source_is_down(place):
    with place.direct("fs.attribute_timeout=0s") as mount:
        theirs = os.statvfs(place.source)
        expected = theirs.f_blocks * theirs.f_frsize
        eventually(
            lambda: os.statvfs(mount.path).f_blocks * 4096 == pytest.approx(expected, rel=0.01), "space is known"
        )
        mount.source.hold()
        with Child(lambda: os.stat(mount.path / "nowhere")):  # somebody hangs there, too
            mount.source.wait_held()
            command = ["df", "--block-size=1", "--output=size,avail", str(mount.path)]
            for _ in range(3):
                done = subprocess.run(command, capture_output=True, text=True, timeout=SLACK_S, check=True)
                size, available = map(int, done.stdout.split()[-2:])
                assert size == pytest.approx(expected, rel=0.01)
                assert 0 < available <= size
            mount.source.release()


def test_status_and_doctor_answer_while_reads_are_stuck(place):
    data = put(place, "file", 8 * MIB)
    with place.direct() as mount:
        fd = os.open(mount.path / "file", os.O_RDONLY | os.O_DIRECT)
        mount.source.hold()
        readers = [Child(lambda number=number: read_direct(fd, number * MIB, 4096)) for number in range(8)]
        try:
            mount.source.wait_held(8)
            started = time.monotonic()
            one = place.turbofs("status", str(mount.path), limit_s=30)
            file = place.turbofs("status", str(mount.path), "--json", limit_s=30)
            every = place.turbofs("status", limit_s=30)
            doctor = place.turbofs("doctor", str(mount.path), limit_s=30)
            assert time.monotonic() - started < 40  # far below the request deadline, which would be the way out
            assert not any(reader.gone for reader in readers)
            mount.source.release()
            for number, reader in enumerate(readers):
                assert reader.result() == data[number * MIB : number * MIB + 4096]
        finally:
            mount.source.release()
            for reader in readers:
                with reader:
                    pass
        assert one.returncode == file.returncode == every.returncode == 0
        assert str(mount.path) in one.stdout
        assert str(mount.path) in every.stdout
        assert "alive" in every.stdout
        assert f"daemon {mount.process.pid} answers" in doctor.stdout, doctor.stdout + doctor.stderr
        os.close(fd)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDONLY | os.O_DIRECT], ids=["buffered", "direct"])
def test_cached_bytes_are_read_while_the_source_is_down(place, flags):
    data = put(place, "file", 8 * MIB)
    with place.direct("fs.attribute_timeout=100ms") as mount:
        fd = os.open(mount.path / "file", flags)
        os.setxattr(mount.path / "file", "user.turbofs.prefetch", b"all")
        cached = [[0, len(data)]]
        eventually(lambda: mount.status("/file")["cached_ranges"] == cached, "all is cached")
        read_direct(fd, 0, MIB)
        stated = time.monotonic()
        eventually(lambda: time.monotonic() > stated + 0.2, "the attributes are older than their timeout")
        mount.source.hold()

        def read():
            return [read_direct(fd, offset, MIB) for offset in range(0, len(data), MIB)]

        try:
            assert b"".join(in_child(read, limit_s=SLACK_S)) == data
        finally:
            mount.source.release()
        os.close(fd)


def test_daemon_never_uses_its_own_mount(place):
    data = put(place, "file", 3 * MIB)
    (place.source / "into").symlink_to(place.mountpoint / "file")
    (place.source / "around").symlink_to(place.mountpoint)
    with place.mount("fs.attribute_timeout=0s", cwd=place.mountpoint) as mount:

        def use():
            assert (mount.path / "into").read_bytes() == data  # the reader follows it, not the daemon
            assert (mount.path / "around" / "around" / "into").read_bytes() == data
            assert sorted(entry.name for entry in os.scandir(mount.path / "around")) == ["around", "file", "into"]
            hints = mount.path / ".turbofs" / "hints"
            assert stat.S_ISREG(os.lstat(hints / "into").st_mode)

        in_child(use)
        process = Path("/proc") / str(mount.process.pid)
        uses = [os.readlink(link) for link in (process / "cwd", process / "root", *(process / "fd").iterdir())]
        uses += (process / "maps").read_text().splitlines()
        assert not [each for each in uses if str(mount.path) in each]
    inside = place.source / "inside"
    inside.mkdir()
    for source, directory in ((place.uri, inside), (f"file://{inside}", place.source)):
        refused = place.turbofs("mount", source, str(directory))
        assert refused.returncode == 2
        assert "inside one another" in refused.stderr


def test_changes_underneath_during_reads_never_deadlock(place):
    """Each content is one number, repeated: what is read must be one content, whole, and of that file."""
    files = [place.source / "folder" / f"file-{number}" for number in range(6)]
    chance = random.Random(11)
    serial = 0

    def fresh():
        nonlocal serial
        serial += 1
        return serial.to_bytes(8, "little") * chance.randrange(1, 60_000)

    (place.source / "folder").mkdir()
    for path in files:
        path.write_bytes(fresh())

    def read():
        """Until the parent says stop: how many reads worked, and how many failed as they may."""
        worked = failed = 0
        order = random.Random(os.getpid())
        while not (place.root / "stop").exists():
            path = place.mountpoint / "folder" / order.choice(files).name
            try:
                if order.random() < 0.2:
                    assert len(list(os.scandir(path.parent))) <= len(files) + 2
                flags = os.O_RDONLY | order.choice([0, os.O_DIRECT])
                fd = os.open(path, flags)
                try:
                    size = os.fstat(fd).st_size
                    seen = read_direct(fd, 0, 1 << 19)
                    assert len({seen[at : at + 8] for at in range(0, len(seen), 8)}) == 1, "two contents in one read"
                    assert len(seen) >= size, "an early end of the file"
                finally:
                    os.close(fd)
                worked += 1
            except OSError as error:
                if error.errno not in {errno.ENOENT, errno.ESTALE}:
                    raise
                failed += 1
        return worked, failed

    with place.mount("fs.attribute_timeout=20ms"):
        readers = [Child(read) for _ in range(3)]
        try:
            for turn in range(250):
                path = chance.choice(files)
                match turn % 5:
                    case 0 | 1:
                        path.with_name("new").write_bytes(fresh())
                        os.replace(path.with_name("new"), path)
                    case 2:
                        path.unlink(missing_ok=True)
                    case 3 if path.exists():
                        first = path.read_bytes()[:8]
                        with path.open("ab") as opened:
                            opened.write(first * 5000)
                    case 4:
                        path.parent.rename(place.source / "away")
                        (place.source / "away").rename(path.parent)
            (place.root / "stop").touch()
            results = [reader.result(60) for reader in readers]
        finally:
            for reader in readers:
                with reader:
                    pass
        assert all(worked for worked, _ in results), results

        def look_again():
            for path in files:
                if path.exists():
                    assert (place.mountpoint / "folder" / path.name).read_bytes() == path.read_bytes()

        stopped = time.monotonic()
        eventually(lambda: time.monotonic() > stopped + 0.1, "the attribute timeout has passed")
        in_child(look_again)


def test_denied_by_the_source_is_eacces(place):
    put(place, "secret", 10)
    put(place, "unopened", 10)
    (place.source / "folder").mkdir()
    with place.direct() as mount:
        denied = {"error": "AccessDeniedError"}
        mount.source.fail(["stat", "stat_exact"], path="/secret", **denied)
        mount.source.fail(["open"], path="/unopened", **denied)
        mount.source.fail(["list"], path="/folder", **denied)
        acts = (
            (mount.path / "secret").stat,
            (mount.path / "secret").read_bytes,
            (mount.path / "unopened").read_bytes,
            lambda: os.listdir(mount.path / "folder"),
        )
        assert [outcome(act)[0] for act in acts] == [errno.EACCES] * 4
        assert mount.source.requests("open", "/unopened")[1:] == []  # said once, and not retried
