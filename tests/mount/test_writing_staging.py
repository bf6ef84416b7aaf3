"""Staging is bounded: writers slow down, then meet ENOSPC at write, and what was acknowledged stays whole."""

from __future__ import annotations

import errno
import os

import pytest

from turbofs.testing.children import Child, in_child
from turbofs.testing.conformance_base import content
from turbofs.testing.mounts import workplace
from turbofs.testing.waiting import eventually
from turbofs.testing.writing import acknowledge, durability, write_all, write_fd

pytestmark = pytest.mark.mount

MIB = 1 << 20
LIMIT = 16 * MIB


def staging(mount):
    return mount.status()["writing"]["staging"]


def test_writers_slow_down_to_the_flush(place):
    """Far more than the staging area takes goes through it, and no writer fails."""
    (place.source / "step").mkdir()
    parts = [content(4 * MIB, seed=number) for number in range(16)]
    with place.direct("staging_size=16MiB", "write.stall=60s", "write.drain=5s") as mount:
        assert staging(mount)["limit_bytes"] == LIMIT
        acknowledge(mount.path / "step")
        mount.source.hold(["create"])

        def save():
            for number, part in enumerate(parts):
                write_all(mount.path / "step" / f"{number}", part, step=MIB // 4)

        with Child(save) as writer:
            eventually(lambda: staging(mount)["used_bytes"] >= staging(mount)["soft_bytes"] - MIB // 4, "it is full")
            assert not writer.gone
            assert not (mount.path / "step" / "15").exists()
            mount.source.release()
            used = []
            while not writer.gone:
                used.append(staging(mount)["used_bytes"])
            writer.result()
        assert max(used, default=0) <= LIMIT
        for number, part in enumerate(parts):
            assert in_child((mount.path / "step" / f"{number}").read_bytes) == part
        eventually(lambda: staging(mount)["used_bytes"] == 0, "all has reached the source")
        assert mount.status()["writing"]["files"] == []
    for number, part in enumerate(parts):
        assert (place.source / "step" / f"{number}").read_bytes() == part


def test_full_staging_is_enospc_at_write_and_never_at_close(place):
    (place.source / "step").mkdir()
    with place.direct("staging_size=16MiB", "write.stall=200ms", "write.drain=1s") as mount:
        step = mount.path / "step"
        acknowledge(step)
        mount.source.hold(["create"])
        saved = [content(3 * MIB, seed=number) for number in range(3)]
        for number, data in enumerate(saved):
            write_all(step / f"{number}", data)
        fd = os.open(step / "last", os.O_RDWR | os.O_CREAT, 0o644)
        data = content(12 * MIB, seed=9)
        with pytest.raises(OSError) as refused:
            write_fd(fd, data, step=MIB)
        assert refused.value.errno == errno.ENOSPC
        taken = os.fstat(fd).st_size
        assert MIB <= taken <= LIMIT - 9 * MIB
        assert os.pread(fd, len(data), 0) == data[:taken]
        assert staging(mount)["used_bytes"] <= LIMIT
        os.close(fd)  # what was taken is acknowledged as any other
        assert {durability(step / name) for name in ("0", "1", "2", "last")} == {"staged"}
        assert [(step / f"{number}").read_bytes() for number in range(3)] == saved
        mount.source.release()
        for name in ("0", "1", "2", "last"):
            eventually(lambda name=name: durability(step / name) == "persisted", f"{name} is persisted")
        write_all(step / "after", data)
        eventually(lambda: durability(step / "after") == "persisted", "there is room again")
    assert (place.source / "step" / "last").read_bytes() == data[:taken]
    assert (place.source / "step" / "after").read_bytes() == data


def test_one_file_may_be_larger_than_the_staging_area(place):
    """A file that is written front to back is let go of here as the source takes it, and can still be read."""
    data = content(40 * MIB + 5, seed=4)
    with place.direct("staging_size=16MiB", "write.stall=60s", "write.drain=5s") as mount:
        fd = os.open(mount.path / "big", os.O_RDWR | os.O_CREAT, 0o644)
        for start in range(0, len(data), MIB):
            write_fd(fd, data[start : start + MIB])
        assert staging(mount)["used_bytes"] <= LIMIT
        assert os.pread(fd, MIB, 3) == data[3 : MIB + 3]
        os.close(fd)
        assert in_child((mount.path / "big").read_bytes) == data
    assert (place.source / "big").read_bytes() == data


def test_holes_take_no_room(place):
    with place.direct("staging_size=16MiB", "write.stall=1s", "write.drain=5s") as mount:
        fd = os.open(mount.path / "sparse", os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(fd, 64 * MIB)
        os.pwrite(fd, b"end", 64 * MIB - 3)
        assert staging(mount)["used_bytes"] <= MIB
        os.close(fd)
    assert (place.source / "sparse").read_bytes() == bytes(64 * MIB - 3) + b"end"


def test_room_is_given_back(place):
    (place.source / "old").write_bytes(content(3 * MIB))
    with place.mount("staging_size=16MiB") as mount:
        for turn in range(10):
            write_all(mount.path / "file", content(3 * MIB, seed=turn))
        fd = os.open(mount.path / "unlinked", os.O_RDWR | os.O_CREAT)
        write_fd(fd, content(3 * MIB))
        (mount.path / "unlinked").unlink()
        os.close(fd)
        os.truncate(mount.path / "old", 10)
        fd = os.open(mount.path / "file", os.O_RDWR | os.O_TRUNC)
        write_fd(fd, content(3 * MIB))
        assert staging(mount)["used_bytes"] >= 3 * MIB
        os.ftruncate(fd, 0)
        eventually(lambda: staging(mount)["used_bytes"] == 0, "nobody needs what was cut off, though the file is open")
        os.close(fd)
        eventually(lambda: staging(mount)["used_bytes"] == 0, "nothing is staged")
        assert [path for path in (place.source).rglob("*") if path.name not in {"file", "old"}] == []


def test_staging_directory_is_one_mounts_own(place):
    directory = place.root / "staging"
    with workplace() as other, place.mount(f"staging_dir={directory}") as mount:
        assert staging(mount)["directory"].startswith(str(directory))
        assert (directory.stat().st_mode & 0o077) == 0, "what is staged is for nobody else to read"
        command = ("mount", other.uri, str(other.mountpoint), *other.options(f"staging_dir={directory}"))
        refused = other.turbofs(*command)
        assert refused.returncode in {1, 2}, refused.stdout
        assert str(directory) in refused.stderr
        assert "--staging-dir" in refused.stderr
        assert not other.mounted
        write_all(mount.path / "file", b"undisturbed")
    assert (place.source / "file").read_bytes() == b"undisturbed"


def test_unusable_staging_directory_is_refused(place):
    (place.root / "a-file").touch()
    for directory in (place.root / "a-file", place.source / "staging", place.mountpoint / "staging"):
        refused = place.turbofs("mount", place.uri, str(place.mountpoint), *place.options(f"staging_dir={directory}"))
        assert refused.returncode in {1, 2}, refused.stdout
        assert str(directory) in refused.stderr
        assert not place.mounted
