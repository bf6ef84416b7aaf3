"""What a mount of HDFS shows: bytes across blocks, files being written elsewhere, names, modes, space, forks."""

from __future__ import annotations

import os
import pwd
import random
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from turbofs.testing.children import Child, in_child
from turbofs.testing.conformance_base import content
from turbofs.testing.elsewhere import Elsewhere
from turbofs.testing.mounts import workplace
from turbofs.testing.reading import read_at
from turbofs.testing.waiting import eventually

pytestmark = [pytest.mark.hdfs, pytest.mark.mount]

MIB = 1 << 20
BIG = content(11 * MIB + 12345, seed=1)
FLAGS = pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDONLY | os.O_DIRECT], ids=["buffered", "direct"])
OVERFLOW_ID = 65534
"""What the kernel calls nobody, where nobody changed it."""


@pytest.fixture(scope="module")
def elsewhere(hdfs):
    return Elsewhere(hdfs, "/mount-reading")


@pytest.fixture(scope="module")
def mount(elsewhere):
    """A mount that finds the cluster as Hadoop's own clients do, by HADOOP_CONF_DIR."""
    elsewhere.put("big", BIG)
    with workplace() as place:
        place.environment["HADOOP_CONF_DIR"] = str(elsewhere.cluster.conf_dir)
        with place.mount("fs.attribute_timeout=100ms", "memory=128MiB", source=elsewhere.uri) as made:
            yield made


def slurp(path):
    """All of a file, read in a child: a mount that hangs fails the test."""
    return in_child(path.read_bytes, limit_s=60)


# --- bytes


@pytest.mark.parametrize("step", [4093, 128 << 10, 3 * MIB, -1])
def test_sequential_read_returns_the_files_bytes(mount, step):
    with open(mount.path / "big", "rb", buffering=0) as file:
        parts = []
        while part := file.read(step):
            parts.append(part)
    assert b"".join(parts) == BIG


@FLAGS
def test_random_reads_across_block_borders(mount, elsewhere, flags):
    name = f"random-{flags}"  # not cached yet
    elsewhere.put(name, BIG)
    chance = random.Random(3)
    borders = range(MIB, len(BIG), MIB)
    wanted = [(border - 4096, 8192) for border in borders]
    wanted += [(border - 4096, 2 * MIB) for border in borders]
    wanted += [(chance.randrange(len(BIG)) // 4096 * 4096, chance.choice([4096, 65536, 5 * MIB])) for _ in range(60)]
    if not flags & os.O_DIRECT:
        wanted += [(border - 2, 3) for border in borders]
        wanted += [(chance.randrange(len(BIG)), chance.choice([1, 511, 4097, MIB + 7])) for _ in range(60)]
    chance.shuffle(wanted)
    fd = os.open(mount.path / name, flags)
    try:
        for offset, length in wanted:
            assert read_at(fd, offset, length) == BIG[offset : offset + length]
    finally:
        os.close(fd)


def test_file_being_written_elsewhere_reads_to_its_reported_length(mount, elsewhere):
    shown = mount.path / "written"
    data = content(5 * MIB // 2, seed=4)
    with elsewhere.writing("written") as writer:
        done = 0
        for part in (100, 70_000, MIB, MIB + 1000):  # inside the first block, to the third
            writer.write(data[done : done + part])
            writer.hsync()
            done += part
            eventually(lambda done=done: shown.stat().st_size == done, "the synced length shows")
            assert slurp(shown) == data[:done]
        fd = os.open(shown, os.O_RDONLY)
        writer.write(data[done:])
        writer.hsync()
        eventually(lambda: os.fstat(fd).st_size == len(data), "the new length shows")
        assert read_at(fd, done - 10, len(data)) == data[done - 10 :]
        assert elsewhere.open_for_writing("written")
    assert read_at(fd, 0, len(data)) == data
    os.close(fd)
    assert slurp(shown) == data


def test_file_open_for_append_elsewhere_keeps_its_bytes(mount, elsewhere):
    data = content(2 * MIB + 70_000, seed=5)
    elsewhere.put("appended", data)
    shown = mount.path / "appended"
    before = os.open(shown, os.O_RDONLY | os.O_DIRECT)
    with elsewhere.writing("appended", append=True) as writer:
        after = os.open(shown, os.O_RDONLY | os.O_DIRECT)
        for fd in (before, after):
            assert read_at(fd, 0, len(data) + 1) == data
            os.close(fd)
        writer.write(b"tail")
        writer.hsync()
        eventually(lambda: slurp(shown) == data + b"tail", "what was synced shows")
    eventually(lambda: slurp(shown) == data + b"tail", "what was closed shows")


def test_read_while_a_block_is_finalised_is_served(mount, elsewhere):
    """The writer finalises a block every few milliseconds, while readers that open anew each time read all of it."""
    data = content(64 * 4096, seed=6)
    mount.path.joinpath("finalised").exists()

    def write():
        with elsewhere.writing("finalised", block_bytes=8192) as writer:
            for start in range(0, len(data), 4096):
                writer.write(data[start : start + 4096])
                writer.hsync()
        return True

    def read(written):
        lengths = set()
        while True:
            last = written.done()
            try:
                seen = (mount.path / "finalised").read_bytes()
            except FileNotFoundError:
                assert not last
                continue
            assert seen == data[: len(seen)]
            lengths.add(len(seen))
            if last:
                return lengths

    with ThreadPoolExecutor(3) as threads:
        written = threads.submit(write)
        readers = [threads.submit(read, written) for _ in range(2)]
        assert written.result(120)
        lengths = set().union(*(reader.result(60) for reader in readers))
    assert len(lengths) > 5, "nobody read while it was written"
    eventually(lambda: slurp(mount.path / "finalised") == data, "all of it shows")


# --- names


def test_new_checkpoint_is_seen_at_once(elsewhere):
    """Two mounts that believe what they know for an hour: ranks on two machines wait for one file."""
    options = (f"source.web_address={elsewhere.cluster.web}", "fs.attribute_timeout=1h")
    with (
        workplace() as one,
        workplace() as two,
        one.mount(*options, source=elsewhere.uri) as first,
        two.mount(*options, source=elsewhere.uri) as second,
    ):
        ranks = (first.path, second.path)

        def nobody_sees(name):
            return not any((rank / name).exists() for rank in ranks)

        assert nobody_sees("step-1/model")
        assert nobody_sees("latest")
        elsewhere.put("step-1.tmp/model", b"weights")
        assert nobody_sees("step-1/model")
        elsewhere.rename("step-1.tmp", "step-1")
        assert [(rank / "step-1/model").read_bytes() for rank in ranks] == [b"weights"] * 2
        assert nobody_sees("step-1/extra")
        elsewhere.put("step-1/extra", b"x")
        elsewhere.put("latest", b"step-1")
        for rank in ranks:
            assert (rank / "step-1/extra").exists()
            assert (rank / "latest").read_bytes() == b"step-1"
            assert {"model", "extra"} == set(os.listdir(rank / "step-1"))


def test_name_that_is_not_utf8_is_absent(mount, elsewhere):
    def lookups():
        return elsewhere.cluster.jmx("Hadoop:service=NameNode,name=NameNodeActivity")["FileInfoOps"]

    folder = os.fsencode(mount.path)
    before = lookups()
    for number in range(100):
        name = b"caf\xe9-%d" % number
        for act in (os.stat, os.listdir, lambda path: os.open(path, os.O_RDONLY)):
            with pytest.raises(FileNotFoundError):
                act(os.path.join(folder, name))
    assert lookups() - before < 100, "the mount may look at its root meanwhile, and at nothing else"


def test_listing_holds_every_name_once(mount, elsewhere):
    """Three batches of the NameNode."""
    names = [f"{number:04}" for number in range(2100)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: elsewhere.client.mkdirs(elsewhere.path(f"many/{name}"), 0o755, True), names))
    elsewhere.put("many/file", b"x" * 77)
    listed = in_child(lambda: [(entry.name, entry.is_dir()) for entry in os.scandir(mount.path / "many")])
    assert sorted(listed) == [*((name, True) for name in names), ("file", False)]
    assert (mount.path / "many/file").stat().st_size == 77
    assert sorted(os.listdir(mount.path / "many")) == [*names, "file"]


def test_modes_and_owners_are_the_sources(mount, elsewhere):
    known = next(entry for entry in pwd.getpwall() if entry.pw_uid not in {0, OVERFLOW_ID})
    for name, mode, owner in (
        ("secret", 0o600, known.pw_name),
        ("open", 0o664, "no-such-user-here"),
        ("run", 0o755, None),
    ):
        elsewhere.put(name, b"x")
        elsewhere.client.set_permission(elsewhere.path(name), mode)
        if owner is not None:
            elsewhere.client.set_owner(elsewhere.path(name), owner, "no-such-group-here")
        shown = (mount.path / name).stat()
        assert stat.S_IMODE(shown.st_mode) == mode
        if owner is not None:
            assert shown.st_uid == (known.pw_uid if owner == known.pw_name else OVERFLOW_ID)
            assert shown.st_gid == OVERFLOW_ID
        else:
            assert shown.st_uid == os.getuid(), "whoever runs the cluster made it"
    elsewhere.client.mkdirs(elsewhere.path("shared"), 0o777, False)
    elsewhere.client.set_permission(elsewhere.path("shared"), 0o1777)
    assert stat.S_IMODE((mount.path / "shared").stat().st_mode) == 0o1777


# --- the mount as a whole


def test_statfs_gives_the_clusters_space(mount, elsewhere):
    def state():
        return elsewhere.cluster.jmx("Hadoop:service=NameNode,name=FSNamesystemState")

    total = state()["CapacityTotal"]
    assert total > 0
    figures = eventually(
        lambda: (found := os.statvfs(mount.path)) and found.f_blocks * found.f_frsize == total // 4096 * 4096 and found,
        "the capacity shows",
    )
    free = figures.f_bavail * figures.f_frsize
    assert 0 < free < total
    assert abs(free - state()["CapacityRemaining"]) < total / 4, "others write to this disk meanwhile"


def test_forked_children_read_through_inherited_descriptors(mount, elsewhere):
    elsewhere.put("forked", BIG)
    fd = os.open(mount.path / "forked", os.O_RDONLY)
    assert os.pread(fd, 100, 0) == BIG[:100]

    def right(seed):
        chance = random.Random(seed)
        for offset in [chance.randrange(len(BIG)) for _ in range(60)]:
            assert os.pread(fd, 20_000, offset) == BIG[offset : offset + 20_000]
        with open(mount.path / "forked", "rb") as own:  # a loader opens files of its own, too
            assert own.read(1000) == BIG[:1000]
        os.close(fd)
        return True

    children = [Child(lambda seed=seed: right(seed)) for seed in range(4)]
    for child in children:
        with child:
            assert child.result(60)
    assert os.pread(fd, 100, 9 * MIB) == BIG[9 * MIB : 9 * MIB + 100]
    os.close(fd)
