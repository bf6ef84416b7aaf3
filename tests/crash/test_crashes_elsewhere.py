"""Crashes together with a source that fails: out of quota, in safe mode, restarted, a DataNode gone; and staging that is full."""

from __future__ import annotations

import errno
import itertools
import os
from functools import partial
from random import Random

import hdfs_native
import pytest

from turbofs.errors import NotReachableError
from turbofs.source.orphans import is_temporary_name
from turbofs.testing.children import in_child
from turbofs.testing.conformance_base import content
from turbofs.testing.crash_daemons import Kill, defects
from turbofs.testing.crash_jobs import Job, beginning, run, save_checkpoints
from turbofs.testing.crash_judge import broken_promise, difference
from turbofs.testing.elsewhere import Elsewhere
from turbofs.testing.hdfs_cluster import HdfsCluster
from turbofs.testing.waiting import eventually
from turbofs.testing.writing import acknowledge, durability, write_all

MIB = 1 << 20
DATA = content(3 * MIB + 5, seed=1)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with HdfsCluster(tmp_path_factory.mktemp("crashes"), settings={"dfs.replication": "2"}) as made:
        yield made
    made.destroy()


@pytest.fixture
def elsewhere(cluster):
    return Elsewhere(cluster, f"/crashes-{next(_numbers)}")


@pytest.fixture
def start(house, place, elsewhere):
    """A daemon over a folder of this test's own on the cluster."""

    def start(kill=None):
        return house.start(place, kill, f"source.web_address={elsewhere.cluster.web}", source=elsewhere.uri)

    return start


def tree_of(elsewhere):
    """{path: content} of the folder, read by another client, and the temporary names in it."""
    client = hdfs_native.Client(elsewhere.cluster.uri)
    tree, temporaries = {}, []
    for status in client.list_status(elsewhere.folder, recursive=True):
        path = os.path.relpath(status.path, elsewhere.folder)
        if is_temporary_name(os.path.basename(path)):
            temporaries.append(path)
        elif status.isdir:
            tree[path] = None
        else:
            with client.read(status.path) as file:
                tree[path] = file.read(len(file)) if len(file) else b""
    return tree, temporaries


def with_directories(tree):
    """Directories that a recursive listing of files may leave out."""
    parents = {os.path.dirname(path) for path in tree} - {""}
    return {**dict.fromkeys(parents), **tree}


def writing(daemon):
    return daemon.status()["writing"]


def settled(daemon):
    """Whether nothing is pending; False where the daemon is dead."""
    try:
        now = writing(daemon)
    except NotReachableError:
        return False
    return not now["files"] and not now["acts"]


KILLS = (
    Kill("complete before", 2),
    Kill("rename after", 2),
    Kill("write middle", 3),
    Kill("journal remove act before", 2),
    Kill("take name before", 4),
    Kill("delete after", 1),
)


@pytest.mark.hdfs
@pytest.mark.mount
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 6))])
def test_what_was_promised_outlives_crashes_over_hdfs(elsewhere, place, start, seed):
    random = Random(seed)
    tree = beginning(random)
    for path, data in tree.items():
        if data is not None:
            elsewhere.put(path, data)
    print(f"seed {seed}: killed at {KILLS[seed]}")
    daemon = start(KILLS[seed])
    job = Job(place.mountpoint, random, tree)
    history = in_child(partial(run, job, save_checkpoints), limit_s=90)
    eventually(lambda: daemon.ended or settled(daemon), "all is published, or the daemon dead", limit_s=90)
    daemon.kill()
    assert broken_promise(with_directories(tree_of(elsewhere)[0]), history) is None
    daemon = start(None)
    assert daemon.usable, daemon.log()
    eventually(lambda: settled(daemon), "all is published", limit_s=90)
    assert writing(daemon)["broken"] == [], daemon.log()
    eventually(lambda: tree_of(elsewhere)[1] == [], "nothing temporary is left")
    assert difference(with_directories(tree_of(elsewhere)[0]), history) is None, daemon.log()
    eventually(lambda: os.listdir(place.staging / "data") == [], "staging is empty")
    daemon.stop()
    assert defects(daemon.log()) == [], daemon.log()


def save_early(place, kill_at_once, names=("a", "b")):
    """Save files into a new folder, acknowledged early; what was acknowledged."""
    folder = place.mountpoint / "step"
    folder.mkdir()
    acknowledge(folder)
    for name in names:
        write_all(folder / name, DATA)
    kill_at_once()
    return {f"step/{name}": DATA for name in names}


@pytest.mark.hdfs
@pytest.mark.mount
@pytest.mark.long
def test_safe_mode_and_a_crash_lose_nothing(elsewhere, place, start):
    daemon = start(None)
    (place.mountpoint / "other").mkdir()
    folder = place.mountpoint / "step"
    folder.mkdir()
    acknowledge(folder)
    elsewhere.cluster.shell("-safemode", "enter", admin=True)
    try:
        write_all(folder / "a", DATA)
        write_all(folder / "b", DATA)
        daemon.kill()
        daemon = start(None)
        assert in_child((folder / "a").read_bytes) == DATA
        assert durability(folder / "b") == "staged"
    finally:
        elsewhere.cluster.shell("-safemode", "leave", admin=True)
    eventually(lambda: settled(daemon), "all is published", limit_s=90)
    found, temporaries = tree_of(elsewhere)
    assert {path: data for path, data in found.items() if data is not None} == {"step/a": DATA, "step/b": DATA}
    assert temporaries == []
    daemon.stop()


@pytest.mark.hdfs
@pytest.mark.mount
@pytest.mark.long
def test_namenode_restarted_between_crash_and_recovery_loses_nothing(elsewhere, place, start):
    daemon = start(Kill("complete before"))
    promised = save_early(place, lambda: eventually(lambda: daemon.ended, "the daemon is killed"))
    elsewhere.cluster.namenode.kill()
    elsewhere.cluster.start_namenode(wait=False)
    elsewhere.cluster.wait_ready()
    daemon = start(None)
    eventually(lambda: settled(daemon), "all is published", limit_s=90)
    found, temporaries = tree_of(elsewhere)
    assert {path: data for path, data in found.items() if data is not None} == promised
    assert temporaries == []
    daemon.stop()


@pytest.mark.hdfs
@pytest.mark.mount
@pytest.mark.long
def test_quota_breaks_what_does_not_fit_and_keeps_its_bytes(elsewhere, place, start):
    daemon = start(None)
    folder = place.mountpoint / "step"
    folder.mkdir()
    elsewhere.cluster.shell("-setSpaceQuota", str(2 * MIB), f"{elsewhere.folder}/step", admin=True)
    acknowledge(folder)
    for name in ("a", "b"):
        write_all(folder / name, DATA)
    daemon.kill()
    daemon = start(None)
    eventually(lambda: settled(daemon), "each is published or broken", limit_s=90)
    now = writing(daemon)
    assert {each["path"] for each in now["broken"]} == {"/step/a", "/step/b"}
    assert now["conflicts"] == 2
    assert [path for path, data in tree_of(elsewhere)[0].items() if data is not None] == []
    daemon.kill()  # parked bytes outlive that, too
    daemon = start(None)
    parked = [path for path in (place.staging / "data").iterdir() if path.read_bytes() == DATA]
    assert len(parked) == writing(daemon)["conflicts"] == 2
    daemon.stop()


@pytest.mark.hdfs
@pytest.mark.mount
@pytest.mark.long
def test_datanode_killed_mid_write_and_a_crash_lose_nothing(elsewhere, place, start):
    daemon = start(None)

    def both():
        elsewhere.cluster.workers[0].kill()
        daemon.kill()

    promised = save_early(place, both)
    daemon = start(None)
    eventually(lambda: settled(daemon), "all is published", limit_s=120)
    found, temporaries = tree_of(elsewhere)
    assert {path: data for path, data in found.items() if data is not None} == promised
    assert temporaries == []
    daemon.stop()
    elsewhere.cluster.start_datanode(0)


@pytest.mark.mount
def test_full_staging_and_a_crash_lose_nothing_that_was_acknowledged(house, place):
    promised, refused = {}, None
    with place.direct("staging_size=16MiB", "write.stall=100ms") as mount:
        folder = mount.path / "step"
        folder.mkdir()
        acknowledge(folder)
        mount.source.hold(["rename"])
        while refused is None:
            name = f"{len(promised)}"
            try:
                write_all(folder / name, DATA)
                promised[name] = DATA
            except OSError as error:
                refused = error.errno
        mount.process.kill()
        mount.process.wait()
    assert refused == errno.ENOSPC
    assert len(promised) >= 4
    daemon = house.start(place, Kill("complete after", 2), "staging_size=16MiB")
    eventually(lambda: daemon.ended or settled(daemon), "all is published, or the daemon dead")
    daemon.kill()
    daemon = house.start(place, None, "staging_size=16MiB")
    eventually(lambda: settled(daemon), "all is published")
    found = {path.name: path.read_bytes() for path in (place.source / "step").iterdir()}
    assert {name: found.get(name) for name in promised} == promised
    assert set(found) == set(promised) or DATA.startswith(found[f"{len(promised)}"])  # closed after the error, or not
    daemon.stop()


@pytest.mark.mount
def test_newer_job_that_saved_first_is_left_alone(house, place):
    """The old node comes back after another one has saved the same checkpoint: its bytes are parked."""
    daemon = house.start(place, Kill("rename before"))
    promised = save_early(place, lambda: eventually(lambda: daemon.ended, "the daemon is killed"), names=("a",))
    (place.source / "step" / "a").write_bytes(b"newer")
    daemon = house.start(place, Kill("park after"))
    eventually(lambda: daemon.ended, "it is killed when the bytes are parked")
    daemon.kill()
    daemon = house.start(place, None)
    eventually(lambda: settled(daemon), "it is settled")
    now = writing(daemon)
    assert [each["path"] for each in now["broken"]] == ["/step/a"]
    assert now["conflicts"] == 1
    assert (place.source / "step" / "a").read_bytes() == b"newer"
    assert durability(place.mountpoint / "step" / "a") == "broken"
    assert [path.read_bytes() for path in (place.staging / "data").iterdir()] == list(promised.values())
    daemon.stop()
