"""DataNodes and NameNodes that die or hang under a mount. One cluster for the file; after each test it is whole again."""

from __future__ import annotations

import errno
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import psutil
import pytest

from turbofs.testing.children import Child, in_child
from turbofs.testing.conformance_base import content
from turbofs.testing.elsewhere import Elsewhere
from turbofs.testing.hdfs_cluster import HdfsCluster
from turbofs.testing.reading import read_at
from turbofs.testing.waiting import eventually

pytestmark = [pytest.mark.hdfs, pytest.mark.mount]

MIB = 1 << 20
SLACK_S = 15.0
"""For a machine that has other things to do."""
DATA = content(24 * MIB + 12345, seed=1)
BLOCK_BYTES = 3 * MIB
ENDS = pytest.mark.parametrize("end", ["killed", "frozen"])
TURBOFS = [sys.executable, "-m", "turbofs.cli.app"]
_numbers = itertools.count()


@pytest.fixture(scope="module")
def fragile(tmp_path_factory):
    with HdfsCluster(tmp_path_factory.mktemp("fragile")) as cluster:
        yield cluster
    cluster.destroy()


@pytest.fixture
def elsewhere(fragile):
    """A folder of this test's own on the cluster."""
    before = live_datanodes(fragile)
    yield Elsewhere(fragile, f"/test-{next(_numbers)}")
    assert fragile.namenode is not None
    for daemon in (fragile.namenode, *fragile.workers):
        daemon.thaw()
    if not fragile.namenode.alive():
        fragile.start_namenode(wait=False)
    dead = [index for index, worker in enumerate(fragile.workers) if not worker.alive()]
    for index in dead:
        fragile.start_datanode(index)
    fragile.wait_ready()
    # The NameNode may still count one that died: it is whole when the new ones, on other ports, are in their places.
    eventually(lambda: len(live_datanodes(fragile) - before) >= len(dead), "the DataNodes are back", limit_s=60)


@pytest.fixture
def mounted(place, elsewhere):
    """`with mounted(*options) as mount`: the folder of `elsewhere`."""
    return partial(place.mount, f"source.web_address={elsewhere.cluster.web}", source=elsewhere.uri)


def live_datanodes(cluster):
    """The addresses of the DataNodes that the NameNode counts as live."""
    info = cluster.jmx("Hadoop:service=NameNode,name=NameNodeInfo")
    return {node["xferaddr"] for node in json.loads(info.get("LiveNodes", "{}")).values()}


def outcome(act: Callable[[], object]):
    """None where *act* works, else its errno."""
    try:
        act()
    except OSError as error:
        return error.errno
    return None


def end_it(daemon, end):
    if end == "killed":
        daemon.kill()
    else:
        daemon.freeze()  # its connections stay, and answer nothing


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDONLY | os.O_DIRECT], ids=["buffered", "direct"])
def test_cached_bytes_are_read_while_the_namenode_is_down(elsewhere, mounted, flags):
    elsewhere.put("file", DATA[: 8 * MIB])
    with mounted("fs.attribute_timeout=100ms") as mount:
        fd = os.open(mount.path / "file", flags)
        os.setxattr(mount.path / "file", "user.turbofs.prefetch", b"all")
        eventually(lambda: mount.status("/file")["cached_ranges"] == [[0, 8 * MIB]], "all is cached")
        assert read_at(fd, 0, MIB) == DATA[:MIB]
        end_it(elsewhere.cluster.namenode, "frozen")
        stated = time.monotonic()
        eventually(lambda: time.monotonic() > stated + 0.2, "the attributes are older than their timeout")

        def read():
            return [read_at(fd, offset, MIB) for offset in range(0, 8 * MIB, MIB)]

        assert b"".join(in_child(read, limit_s=SLACK_S)) == DATA[: 8 * MIB]
        elsewhere.cluster.namenode.thaw()
        os.close(fd)


@ENDS
def test_datanode_killed_mid_read_is_not_noticed(elsewhere, mounted, end):
    elsewhere.put("file", DATA, block_bytes=BLOCK_BYTES, copies=2)
    with mounted() as mount:
        reading, writing = os.pipe()

        def read():
            with open(mount.path / "file", "rb", buffering=0) as file:
                parts = [file.read(MIB)]
                os.write(writing, b"begun")
                while part := file.read(128 << 10):
                    parts.append(part)
            return b"".join(parts) == DATA

        with Child(read) as reader:
            assert os.read(reading, 5) == b"begun"
            end_it(elsewhere.cluster.workers[0], end)
            assert reader.result(120)
        for offset in range(MIB, len(DATA), BLOCK_BYTES):  # nor is it by readers that come later
            with open(mount.path / "file", "rb") as file:
                assert os.pread(file.fileno(), 100, offset) == DATA[offset : offset + 100]
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("end", ["frozen", pytest.param("killed", marks=pytest.mark.long)])
def test_namenode_stopped_for_twenty_seconds_fails_no_reader(elsewhere, mounted, place, end):
    elsewhere.put("large", DATA)
    small = [f"small-{number}" for number in range(3)]
    for name in small:
        elsewhere.put(name, DATA[:5000])
    with mounted("fs.attribute_timeout=0s", "memory=32MiB") as mount:

        def until_told(act):
            """How often *act* worked; whatever it raises, the parent raises."""
            turns = 0
            while not (place.root / "stop").exists():
                act()
                turns += 1
            return turns

        def read_large():
            with open(mount.path / "large", "rb", buffering=0) as file:
                while part := file.read(MIB):
                    assert DATA.startswith(part, file.tell() - len(part))

        def read_small():
            for name in small:
                assert (mount.path / name).read_bytes() == DATA[:5000]

        def list_all():
            assert sorted(os.listdir(mount.path)) == ["large", *small]
            assert (mount.path / "large").stat().st_size == len(DATA)
            assert not (mount.path / "next").exists()

        readers = [Child(partial(until_told, act)) for act in (read_large, read_small, list_all)]
        try:
            end_it(elsewhere.cluster.namenode, end)
            back_s = time.monotonic() + 20
            while time.monotonic() < back_s:
                assert not any(reader.gone for reader in readers), [reader.result(0) for reader in readers]
                time.sleep(0.1)
            if end == "frozen":
                elsewhere.cluster.namenode.thaw()
            else:
                elsewhere.cluster.start_namenode()
            (place.root / "stop").touch()  # each of them finishes what it began
            assert all(reader.result(60) for reader in readers)
        finally:
            for reader in readers:
                with reader:
                    pass
        assert mount.status()["source"]["retries"] > 0, "nobody noticed it: the test tests nothing"


@ENDS
def test_namenode_that_stays_away_times_out(elsewhere, mounted, place, end):
    deadline_s = 4.0
    elsewhere.put("file", DATA[: 3 * MIB])
    elsewhere.put("folder/file", b"x")
    # One attempt may take half of the deadline, so that several are made.
    options = (f"fs.request_deadline={deadline_s:g}s", "source.operation_timeout=2s", "fs.attribute_timeout=100ms")
    with mounted(*options) as mount:
        folder = os.open(mount.path / "folder", os.O_RDONLY)
        assert (mount.path / "file").stat().st_size == 3 * MIB
        eventually(lambda: os.statvfs(mount.path).f_blocks < 1 << 38, "the space of the cluster is known")
        space = os.statvfs(mount.path)
        end_it(elsewhere.cluster.namenode, end)
        acts = {
            "lookup": lambda: os.stat(mount.path / "nowhere"),
            "open": lambda: os.open(mount.path / "file", os.O_RDONLY),
            "list": lambda: os.listdir(folder),
        }
        children = {name: Child(partial(outcome, act)) for name, act in acts.items()}
        doctor = subprocess.Popen(
            [*TURBOFS, "doctor", str(mount.path)], env=place.environment, stdout=subprocess.PIPE, text=True
        )
        try:
            # Meanwhile, what needs no NameNode answers.
            assert in_child(lambda: os.statvfs(mount.path).f_blocks, limit_s=SLACK_S) == space.f_blocks
            df = ["df", "--output=size", str(mount.path)]
            subprocess.run(df, capture_output=True, timeout=SLACK_S, check=True)
            assert place.turbofs("status", str(mount.path), limit_s=30).returncode == 0
            found = {name: child.result(deadline_s + 2 * SLACK_S) for name, child in children.items()}
        finally:
            told, _ = doctor.communicate(timeout=90)
            for child in children.values():
                with child:
                    pass
        assert found == dict.fromkeys(acts, errno.ETIMEDOUT)
        assert doctor.returncode == 1
        assert f"daemon {mount.process.pid} answers" in told
        os.close(folder)
        done = place.turbofs("umount", str(mount.path), limit_s=60)
        assert done.returncode == 0, done.stderr
        assert not place.mounted


@ENDS
def test_unreachable_namenode_leaves_nothing_half_alive(elsewhere, place, end):
    elsewhere.put("file", b"there")
    command = ["mount", elsewhere.uri, str(place.mountpoint), "--json"]
    options = place.options(f"source.web_address={elsewhere.cluster.web}", "source.operation_timeout=1s")
    end_it(elsewhere.cluster.namenode, end)
    refused = place.turbofs(*command, "--wait", "2s", *options)
    assert refused.returncode == 3, refused.stderr
    error = json.loads(refused.stdout)["error"]
    assert elsewhere.uri in error["message"]
    assert error["advice"]
    assert "waiting up to" in refused.stderr
    assert not place.mounted
    assert list(place.runtime.iterdir()) == []
    assert daemons_of(place) == []
    assert list(place.mountpoint.iterdir()) == []

    # One that is told to wait longer is there when the NameNode is.
    with subprocess.Popen(
        [*TURBOFS, *command, "--wait", "90s", *options],
        env=place.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as starting:
        assert "waiting up to" in starting.stderr.readline()
        if end == "frozen":
            elsewhere.cluster.namenode.thaw()
        else:
            elsewhere.cluster.start_namenode(wait=False)
        out, err = starting.communicate(timeout=120)
        assert starting.returncode == 0, err
    assert daemons_of(place) == [json.loads(out)["pid"]]
    elsewhere.cluster.wait_ready()
    assert in_child((place.mountpoint / "file").read_bytes) == b"there"
    assert place.turbofs("umount", str(place.mountpoint)).returncode == 0
    assert daemons_of(place) == []


def daemons_of(place):
    """The processes that serve a mount of *place*, or would."""
    processes = [process for process in psutil.process_iter(["environ"]) if process.info["environ"]]
    return [each.pid for each in processes if each.info["environ"].get("TURBOFS_RUNTIME_DIR") == str(place.runtime)]
