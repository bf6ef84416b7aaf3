"""Saving while HDFS fails: a cluster of this file's own; after each test it is whole again."""

from __future__ import annotations

import errno
import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import hdfs_native
import pytest

from turbofs.testing.children import Child, in_child
from turbofs.testing.conformance_base import content
from turbofs.testing.elsewhere import Elsewhere
from turbofs.testing.hdfs_cluster import HdfsCluster
from turbofs.testing.waiting import eventually
from turbofs.testing.writing import acknowledge, durability, outcome, write_all, write_fd

pytestmark = [pytest.mark.hdfs, pytest.mark.mount]

MIB = 1 << 20
DATA = content(24 * MIB + 12345, seed=1)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def fragile(tmp_path_factory):
    with HdfsCluster(tmp_path_factory.mktemp("fragile"), settings={"dfs.replication": "2"}) as cluster:
        yield cluster
    cluster.destroy()


def live_datanodes(cluster):
    """The addresses of the DataNodes that the NameNode counts as live."""
    info = cluster.jmx("Hadoop:service=NameNode,name=NameNodeInfo")
    return {node["xferaddr"] for node in json.loads(info.get("LiveNodes", "{}")).values()}


@pytest.fixture
def elsewhere(fragile):
    """A folder of this test's own on the cluster."""
    before = live_datanodes(fragile)
    yield Elsewhere(fragile, f"/test-{next(_numbers)}")
    if not fragile.namenode.alive():
        fragile.start_namenode(wait=False)
    dead = [index for index, worker in enumerate(fragile.workers) if not worker.alive()]
    for index in dead:
        fragile.start_datanode(index)
    fragile.wait_ready()
    eventually(lambda: len(live_datanodes(fragile) - before) >= len(dead), "the DataNodes are back", limit_s=60)


@pytest.fixture
def mounted(place, elsewhere):
    """`with mounted(*options) as mount`: the folder of `elsewhere`."""
    return partial(place.mount, f"source.web_address={elsewhere.cluster.web}", source=elsewhere.uri)


def read(elsewhere, name):
    """A closed file, read by another client."""
    file = hdfs_native.Client(elsewhere.cluster.uri).read(elsewhere.path(name))
    return file.read(len(file)) if len(file) else b""


def test_datanode_killed_mid_write_is_not_noticed(elsewhere, mounted):
    with mounted() as mount:
        reading, writing = os.pipe()

        def save():
            fd = os.open(mount.path / "model", os.O_WRONLY | os.O_CREAT, 0o644)
            write_fd(fd, DATA[: 12 * MIB])
            os.write(writing, b"begun")
            write_fd(fd, DATA[12 * MIB :], step=64 << 10)
            os.close(fd)
            for number in range(3):
                write_all(mount.path / f"small-{number}", DATA[:5000])
            return True

        with Child(save) as writer:
            assert os.read(reading, 5) == b"begun"
            elsewhere.cluster.workers[0].kill()
            assert writer.result(120)
        os.close(reading)
        os.close(writing)
        assert in_child((mount.path / "model").read_bytes) == DATA
    assert read(elsewhere, "model") == DATA
    assert [read(elsewhere, f"small-{number}") for number in range(3)] == [DATA[:5000]] * 3


def test_namenode_restarted_during_saves_fails_none(elsewhere, mounted):
    """A late save takes longer; an early one does not even wait."""
    with mounted() as mount:
        (mount.path / "step-2").mkdir()
        acknowledge(mount.path / "step-2")
        fd = os.open(mount.path / "late", os.O_WRONLY | os.O_CREAT, 0o644)
        write_fd(fd, DATA)
        early = os.open(mount.path / "step-2" / "model", os.O_WRONLY | os.O_CREAT, 0o644)
        write_fd(early, DATA[: 9 * MIB])
        elsewhere.cluster.namenode.kill()
        os.close(early)
        assert durability(mount.path / "step-2" / "model") == "staged"
        with ThreadPoolExecutor(1) as thread:
            closing = thread.submit(outcome, os.close, fd)
            elsewhere.cluster.start_namenode(wait=False)
            elsewhere.cluster.wait_ready()
            assert closing.result(120) is None
        eventually(lambda: durability(mount.path / "step-2" / "model") == "persisted", "it is persisted", limit_s=90)
    assert read(elsewhere, "late") == DATA
    assert read(elsewhere, "step-2/model") == DATA[: 9 * MIB]


def test_safe_mode_delays_an_early_acknowledged_save(elsewhere, mounted):
    with mounted() as mount:
        acknowledge(mount.path)
        elsewhere.cluster.shell("-safemode", "enter", admin=True)
        try:
            write_all(mount.path / "model", DATA)
            assert durability(mount.path / "model") == "staged"
            assert in_child((mount.path / "model").read_bytes) == DATA
        finally:
            elsewhere.cluster.shell("-safemode", "leave", admin=True)
        eventually(lambda: durability(mount.path / "model") == "persisted", "it is persisted", limit_s=90)
    assert read(elsewhere, "model") == DATA


def test_namenode_that_stays_away_fails_a_late_save_by_the_deadline(elsewhere, mounted):
    with mounted("fs.request_deadline=5s", "source.deadline=4s", "source.operation_timeout=2s") as mount:
        fd = os.open(mount.path / "model", os.O_WRONLY | os.O_CREAT, 0o644)
        write_fd(fd, DATA[:MIB])
        elsewhere.cluster.namenode.kill()
        assert in_child(lambda: outcome(os.mkdir, mount.path / "folder"), limit_s=40) in {errno.ETIMEDOUT, errno.EIO}
        assert outcome(os.close, fd) in {errno.ETIMEDOUT, errno.EIO}
        elsewhere.cluster.start_namenode(wait=False)
        elsewhere.cluster.wait_ready()
        if outcome(write_all, mount.path / "model", DATA) is not None:  # may tell of the failure once more
            write_all(mount.path / "model", DATA)
    assert read(elsewhere, "model") == DATA
