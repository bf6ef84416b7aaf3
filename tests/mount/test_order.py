"""Nothing that a job does after an early acknowledgement reaches the source before what was acknowledged."""

from __future__ import annotations

import os
import shutil

import pytest

from turbofs.source.orphans import is_temporary_name
from turbofs.testing.children import Child, in_child
from turbofs.testing.conformance_base import content
from turbofs.testing.mounts import workplace
from turbofs.testing.waiting import eventually
from turbofs.testing.writing import (
    ACK,
    Watcher,
    acknowledge,
    broken_error,
    content_or_none,
    durability,
    temporaries,
    write_all,
)

pytestmark = pytest.mark.mount

MIB = 1 << 20
ONE, TWO, THREE = (content(MIB + seed, seed=seed) for seed in (1, 2, 3))
QUICK_RETRIES = ("source.backoff_first=1ms", "source.backoff_limit=5ms")


@pytest.fixture(scope="module")
def mount():
    with workplace() as place, place.direct("memory=256MiB", "write.drain=1s", *QUICK_RETRIES) as made:
        yield made


@pytest.fixture
def job(mount, request):
    """A job's directory with a first checkpoint and a tracker file: (in the source, in the mount)."""
    name = request.node.name.replace("[", "-").replace("]", "").replace(" ", "_")
    source, shown = mount.place.source / name, mount.path / name
    (source / "step-1").mkdir(parents=True)
    (source / "step-1" / "model").write_bytes(ONE)
    (source / "latest").write_text("step-1")
    acknowledge(shown)
    mount.source.forget_requests()
    yield source, shown
    mount.source.heal()
    mount.source.release()
    eventually(lambda: mount.status()["writing"]["acts"] == [], "nothing of this test waits")


def save(shown, step, data, *, shards=2):
    """A checkpoint that is a group of its own within the job."""
    (shown / step).mkdir()
    acknowledge(shown / step)
    for number in range(shards):
        write_all(shown / step / f"model-{number}", data)


def name_newest(shown, step):
    """As trainers do: the tracker file is written beside its name and renamed over it."""
    write_all(shown / "latest.tmp", step.encode())
    os.replace(shown / "latest.tmp", shown / "latest")


def complete(source, step, data, *, shards=2):
    return all(content_or_none(source / step / f"model-{number}") == data for number in range(shards))


def asked(mount, source, acts):
    """Paths in the job of the requests of these kinds, in their order."""
    top = f"/{source.name}/"
    return [
        each.path.removeprefix(top)
        for each in mount.source.requests()
        if each.act in acts and each.path.startswith(top)
    ]


def test_tracker_file_and_deletion_wait_for_the_checkpoint(mount, job):
    source, shown = job
    mount.source.hold(["rename"])

    def state():
        """What the tracker file names: it must be there, whole, unless the tracker moved on meanwhile."""
        newest = (source / "latest").read_text()
        old = newest == "step-1"
        there = content_or_none(source / "step-1" / "model") == ONE if old else complete(source, newest, TWO)
        return newest, there or (source / "latest").read_text() != newest

    with Watcher(state) as watcher:
        save(shown, "step-2", TWO)
        name_newest(shown, "step-2")
        shutil.rmtree(shown / "step-1")
        assert sorted(os.listdir(shown)) == ["latest", "step-2"], "it shows here at once"
        assert (shown / "latest").read_text() == "step-2"
        assert complete(shown, "step-2", TWO)
        mount.source.wait_held()
        watcher.catch_up()
        assert asked(mount, source, {"delete", "delete_directory"}) == []
        assert [path for path in asked(mount, source, {"rename"}) if not path.startswith("step-2/")] == []
        assert (source / "latest").read_text() == "step-1"
        assert (source / "step-1" / "model").read_bytes() == ONE
        mount.source.release()
        eventually(lambda: not (source / "step-1").exists(), "all of it reaches the source")
    assert [newest for newest, _ in watcher.seen] == ["step-1", "step-2"]
    assert all(there for _, there in watcher.seen), "the tracker names a checkpoint that is not there"
    eventually(lambda: durability(shown / "latest") == "persisted", "the tracker file is persisted")
    assert sorted(os.listdir(source)) == ["latest", "step-2"]
    renames = asked(mount, source, {"rename"})
    published = [number for number, path in enumerate(renames) if path.startswith("step-2/")]
    assert max(published) < min(number for number, path in enumerate(renames) if not path.startswith("step-2/"))
    changes = asked(mount, source, {"rename", "delete"})
    assert changes.index("latest.tmp") < changes.index("step-1/model"), (
        "the old one goes when the tracker names the new"
    )
    assert temporaries(source) == []


def test_close_that_promises_persisted_waits_for_what_was_acknowledged_before(mount, job):
    """Only the checkpoint is acknowledged early: the tracker's close keeps its own promise, and comes after it."""
    source, shown = job
    os.removexattr(shown, ACK)
    mount.source.hold(["rename"])
    save(shown, "step-2", TWO)
    with Child(lambda: write_all(shown / "newest", b"step-2")) as trainer:
        try:
            eventually(lambda: in_child((shown / "newest").read_bytes) == b"step-2", "it shows here at once")
            mount.source.wait_held()
            with pytest.raises(TimeoutError):
                trainer.result(0.5)
            assert not (source / "newest").exists()
        finally:
            mount.source.release()
        trainer.result(20)
    assert (source / "newest").read_text() == "step-2"
    assert complete(source, "step-2", TWO)


def test_marker_in_the_checkpoint_waits_for_the_shards(mount, job):
    source, shown = job
    mount.source.hold(["rename"])
    save(shown, "step-2", TWO)
    write_all(shown / "step-2" / "COMMITTED", b"")
    os.symlink("step-2", shown / "newest")
    assert sorted(os.listdir(shown / "step-2")) == ["COMMITTED", "model-0", "model-1"]
    assert os.readlink(shown / "newest") == "step-2"
    mount.source.wait_held()
    assert not (source / "newest").is_symlink()
    with Watcher(
        lambda: (
            ((source / "step-2" / "COMMITTED").exists() or (source / "newest").is_symlink())
            and not complete(source, "step-2", TWO)
        )
    ) as watcher:
        mount.source.release()
        eventually((source / "newest").is_symlink, "the link is there")
        eventually((source / "step-2" / "COMMITTED").exists, "the marker is there")
    assert watcher.seen == [False]


def test_directory_is_renamed_after_what_is_in_it(mount, job):
    """`step-2.tmp` → `step-2` right after saving: it waits, shows here at once, and keeps being written."""
    source, shown = job
    mount.source.hold(["rename"])
    save(shown, "step-2.tmp", TWO)
    os.rename(shown / "step-2.tmp", shown / "step-2")
    assert sorted(os.listdir(shown)) == ["latest", "step-1", "step-2"]
    assert complete(shown, "step-2", TWO)
    assert durability(shown / "step-2" / "model-0") == "staged"
    write_all(shown / "step-2" / "late", THREE)  # under the new name, which the source does not have yet
    assert not (source / "step-2").exists()
    assert all(is_temporary_name(os.path.basename(path)) for path in asked(mount, source, {"rename"}))
    mount.source.release()
    eventually(lambda: content_or_none(source / "step-2" / "late") == THREE, "all of it is there")
    assert complete(source, "step-2", TWO)
    assert not (source / "step-2.tmp").exists()
    assert (
        sorted(os.listdir(source / "step-2")) == sorted(os.listdir(shown / "step-2")) == ["late", "model-0", "model-1"]
    )


def test_staged_file_that_is_deleted_does_not_come_back(mount, job):
    source, shown = job
    mount.source.hold(["rename"])
    save(shown, "step-2", TWO)
    mount.source.wait_held()
    shutil.rmtree(shown / "step-2")
    assert sorted(os.listdir(shown)) == ["latest", "step-1"]
    mount.source.release()
    eventually(lambda: mount.status()["writing"]["acts"] == [], "nothing waits")
    for root in (source, shown):
        assert sorted(os.listdir(root)) == ["latest", "step-1"]


def test_other_jobs_do_not_wait(mount, job):
    _, shown = job
    other = mount.place.source / "another-job"
    other.mkdir(exist_ok=True)
    write_all(mount.path / "another-job" / "first", b"before")
    mount.source.hold(["write"])
    save(shown, "step-2", TWO, shards=1)
    mount.source.wait_held()
    os.rename(mount.path / "another-job" / "first", mount.path / "another-job" / "renamed")
    (mount.path / "another-job" / "renamed").chmod(0o600)
    assert os.listdir(other) == ["renamed"]
    (mount.path / "another-job" / "renamed").unlink()
    assert os.listdir(other) == []


def test_waiting_acts_are_shown_by_status(mount, job):
    source, shown = job
    mount.source.hold(["rename"])
    save(shown, "step-2", TWO, shards=1)
    name_newest(shown, "step-2")
    shutil.rmtree(shown / "step-1")
    acts = mount.status()["writing"]["acts"]
    top = f"/{source.name}"
    found = {(each["act"], each["path"], each.get("to")) for each in acts}
    paths = {path for _, path, _ in found}
    assert {f"{top}/step-1/model", f"{top}/step-1", f"{top}/latest.tmp"} <= paths
    assert any(to == f"{top}/latest" for _, _, to in found)
    assert all(each["waits_for"] for each in acts if each["path"] == f"{top}/step-1/model")
    mount.source.release()
    eventually(lambda: mount.status()["writing"]["acts"] == [], "nothing waits")
    assert not (source / "step-1").exists()


def test_broken_checkpoint_cancels_what_relied_on_it(mount, job):
    source, shown = job
    mount.source.hold(["rename"])
    save(shown, "step-2", TWO)
    name_newest(shown, "step-2")
    shutil.rmtree(shown / "step-1")
    mount.source.wait_held()
    mount.source.fail(["rename"], times=1, error="QuotaExceededError")
    mount.source.release()
    eventually(lambda: mount.status()["writing"]["acts"] == [], "nothing waits")
    broken = [name for name in ("model-0", "model-1") if broken_error(mount, shown / "step-2" / name)]
    assert broken
    # The source: as before, with what of the second checkpoint did get there.
    assert (source / "latest").read_text() == "step-1"
    assert (source / "step-1" / "model").read_bytes() == ONE
    assert not any(is_temporary_name(name) for name in os.listdir(source))
    # Here: the same, and everything that was not done is said.
    eventually(lambda: content_or_none(shown / "latest") == b"step-1", "the tracker file is the source's")
    assert (shown / "step-1" / "model").read_bytes() == ONE
    assert not (shown / "step-2" / broken[0]).exists()
    assert any("made to fail" in broken_error(mount, shown / "step-2" / name) for name in broken)
    assert any(broken_error(mount, shown / name) for name in ("latest", "latest.tmp"))
    assert any(broken_error(mount, shown / name) for name in ("step-1/model", "step-1"))
    for path in (shown / "step-2" / broken[0], shown / "step-2"):
        waited = mount.place.turbofs("wait", str(path))
        assert waited.returncode == 1
        assert "broken" in waited.stderr
    # A later group goes on.
    mount.source.heal()
    save(shown, "step-3", THREE)
    name_newest(shown, "step-3")
    shutil.rmtree(shown / "step-1")
    eventually(lambda: not (source / "step-1").exists(), "the later group reaches the source")
    assert (source / "latest").read_text() == (shown / "latest").read_text() == "step-3"
    assert complete(source, "step-3", THREE)
    assert durability(shown / "latest") == "persisted"


def test_group_that_was_acknowledged_behind_a_broken_one_goes_on(mount, job):
    """Two checkpoints wait; the older one breaks; the newer one and what vouches for it still reach the source."""
    source, shown = job
    mount.source.hold(["rename"])
    save(shown, "step-2", TWO, shards=1)
    name_newest(shown, "step-2")
    mount.source.wait_held()
    mount.source.fail(["rename"], times=1, error="QuotaExceededError")
    save(shown, "step-3", THREE, shards=1)
    name_newest(shown, "step-3")
    shutil.rmtree(shown / "step-1")
    assert (shown / "latest").read_text() == "step-3"
    mount.source.release()
    eventually(lambda: not (source / "step-1").exists(), "the newer group reaches the source")
    assert (source / "latest").read_text() == "step-3"
    assert broken_error(mount, shown / "step-2" / "model-0")
    assert durability(shown / "step-3" / "model-0") == "persisted"
    assert complete(source, "step-3", THREE, shards=1)


def test_broken_file_can_be_saved_again(mount, job):
    source, shown = job
    mount.source.hold(["rename"])
    save(shown, "step-2", TWO, shards=1)
    mount.source.wait_held()
    mount.source.fail(["rename"], times=1, error="AccessDeniedError")
    mount.source.release()
    file = shown / "step-2" / "model-0"
    eventually(lambda: broken_error(mount, file), "it is broken")
    mount.source.heal()
    write_all(file, THREE)
    eventually(lambda: durability(file) == "persisted", "it is persisted")
    assert (source / "step-2" / "model-0").read_bytes() == THREE
    assert broken_error(mount, file) is None
    assert mount.place.turbofs("wait", str(file)).returncode == 0
