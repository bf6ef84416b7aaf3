"""A killed daemon loses nothing that was acknowledged, and overwrites nothing that others did meanwhile."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from blake3 import blake3

from turbofs.testing.children import in_child
from turbofs.testing.conformance_base import content
from turbofs.testing.waiting import eventually
from turbofs.testing.writing import (
    acknowledge,
    content_or_none,
    durability,
    last_error,
    temporaries,
    write_all,
    write_fd,
)

pytestmark = pytest.mark.mount

MIB = 1 << 20
OLD, NEW, THEIRS = content(3 * MIB + 77, seed=1), content(2 * MIB + 5, seed=2), content(MIB, seed=3)
BRIEF_DRAIN = "write.drain=1s"
"""A test that fails while the source is held does not wait for it at the end."""


@pytest.fixture
def step(place):
    """A checkpoint's directory with one file: (in the source, in the mount)."""
    (place.source / "job" / "step").mkdir(parents=True)
    (place.source / "job" / "step" / "old").write_bytes(OLD)
    return place.source / "job" / "step", place.mountpoint / "job" / "step"


def kill(mount):
    mount.process.kill()
    mount.process.wait()


def persisted(*paths):
    for path in paths:
        eventually(lambda path=path: durability(path) == "persisted", f"{path.name} is persisted")


@pytest.mark.parametrize("held", [["create"], ["write"], ["complete", "sync"], ["rename"]], ids=lambda acts: acts[0])
def test_acknowledged_bytes_survive_a_killed_daemon(place, step, held):
    source, shown = step
    big = content(20 * MIB + 3, seed=9)
    with place.direct(BRIEF_DRAIN) as mount:
        acknowledge(shown)
        mount.source.hold(held)
        write_all(shown / "new", NEW)
        write_all(shown / "big", big)
        fd = os.open(shown / "old", os.O_RDWR)  # copied on demand: what was not written is the source's
        os.pwrite(fd, b"changed", MIB)
        os.close(fd)
        mount.source.wait_held()
        kill(mount)
    changed = OLD[:MIB] + b"changed" + OLD[MIB + 7 :]
    assert (source / "old").read_bytes() == OLD
    with place.direct(BRIEF_DRAIN, fail={"acts": ["create", "rename"]}) as mount:  # readable before the source has it
        assert in_child((shown / "new").read_bytes) == NEW
        assert in_child((shown / "big").read_bytes) == big
        assert in_child((shown / "old").read_bytes) == changed
        assert sorted(os.listdir(shown)) == ["big", "new", "old"]
        assert {durability(shown / name) for name in ("new", "big", "old")} == {"staged"}
        assert (source / "old").read_bytes() == OLD
        mount.source.heal()
        persisted(shown / "new", shown / "big", shown / "old")
    assert [(source / name).read_bytes() for name in ("new", "big", "old")] == [NEW, big, changed]
    assert sorted(os.listdir(source)) == ["big", "new", "old"]


def test_cut_after_the_acknowledgement_is_what_is_found(place, step):
    """A descriptor goes on after its early fsync, and the daemon dies: what is left is published, and is not called gone."""
    source, shown = step
    with place.direct(BRIEF_DRAIN) as mount:
        acknowledge(shown)
        mount.source.hold(["create"])
        fd = os.open(shown / "new", os.O_RDWR | os.O_CREAT)
        write_fd(fd, NEW)
        os.fsync(fd)
        os.ftruncate(fd, 10)
        kill(mount)
    with pytest.raises(OSError, match="not connected"):
        os.close(fd)
    with place.direct(BRIEF_DRAIN):
        assert in_child((shown / "new").read_bytes) == NEW[:10]
        persisted(shown / "new")
    assert (source / "new").read_bytes() == NEW[:10]


def test_unacknowledged_bytes_leave_the_old_file_or_the_synced_beginning(place, step):
    source, shown = step
    with place.direct(BRIEF_DRAIN) as mount:
        mount.source.hold(["complete"])
        rewritten = os.open(shown / "old", os.O_WRONLY | os.O_TRUNC)
        write_fd(rewritten, NEW)
        unsynced = os.open(shown / "new", os.O_WRONLY | os.O_CREAT)
        write_fd(unsynced, content(20 * MIB))
        log = os.open(shown / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(log, b"synced")
        os.fsync(log)
        os.write(log, b" and lost")
        kill(mount)
        for fd in (rewritten, unsynced, log):
            try:
                os.close(fd)
            except OSError:
                continue
    assert (source / "old").read_bytes() == OLD
    assert (source / "log").read_bytes().startswith(b"synced")
    assert not (source / "new").exists()
    with place.mount() as mount:
        eventually(lambda: temporaries(source) == [], "what nobody was promised is swept")
        assert (shown / "old").read_bytes() == OLD
        assert (shown / "log").read_bytes() in {b"synced", b"synced and lost"}
        assert sorted(os.listdir(shown)) == ["log", "old"]
        assert mount.status()["writing"]["files"] == []


def test_renames_and_deletions_after_the_acknowledgement_are_followed(place, step):
    source, shown = step
    with place.direct(BRIEF_DRAIN) as mount:
        acknowledge(shown)
        mount.source.hold(["rename"])
        for name in ("kept", "moved", "deleted"):
            write_all(shown / name, NEW)
        (shown / "deleted").unlink()
        os.rename(shown / "moved", shown / "renamed")
        os.rename(shown, shown.parent / "final")
        kill(mount)
    final = shown.parent / "final"
    with place.mount():
        assert sorted(os.listdir(final)) == ["kept", "old", "renamed"]
        assert not shown.exists()
        assert (final / "renamed").read_bytes() == (final / "kept").read_bytes() == NEW
        persisted(final / "kept", final / "renamed")
        eventually(lambda: not source.exists(), "the directory is renamed on the source")
        assert sorted(os.listdir(source.parent / "final")) == ["kept", "old", "renamed"]
    assert (source.parent / "final" / "renamed").read_bytes() == NEW


def test_order_survives_a_killed_daemon(place, step):
    """The tracker file and the removal of the old checkpoint still wait for what was acknowledged before."""
    source, shown = step
    (source.parent / "latest").write_text("step")
    with place.direct(BRIEF_DRAIN) as mount:
        mount.source.hold(["rename"])
        acknowledge(shown.parent)
        (shown.parent / "next").mkdir()
        acknowledge(shown.parent / "next")
        write_all(shown.parent / "next" / "model", NEW)
        write_all(shown.parent / "latest", b"next")
        shutil.rmtree(shown)
        kill(mount)
    assert (source.parent / "latest").read_text() == "step"
    assert (source / "old").read_bytes() == OLD
    with place.direct(BRIEF_DRAIN, fail={"acts": ["create", "rename"]}) as mount:
        assert sorted(os.listdir(shown.parent)) == ["latest", "next"]
        assert (shown.parent / "latest").read_text() == "next"
        assert (shown.parent / "next" / "model").read_bytes() == NEW
        assert (source.parent / "latest").read_text() == "step"
        assert (source / "old").read_bytes() == OLD
        mount.source.heal()
        eventually(lambda: not source.exists(), "all of it reaches the source")
        assert (source.parent / "next" / "model").read_bytes() == NEW
        assert (source.parent / "latest").read_text() == "next"


def save_over(file):
    file.with_name("beside").write_bytes(THEIRS)
    os.replace(file.with_name("beside"), file)


def append(file):
    with file.open("ab") as opened:
        opened.write(b"more")


@pytest.mark.parametrize("change", [save_over, append, os.unlink], ids=["replaced", "appended", "deleted"])
def test_target_that_changed_meanwhile_is_not_overwritten(place, step, change):
    """A newer job saved the same path before the old node came back."""
    source, shown = step
    with place.direct(BRIEF_DRAIN) as mount:
        acknowledge(shown)
        mount.source.hold(["rename"])
        write_all(shown / "old", NEW)
        kill(mount)
    change(source / "old")
    theirs = content_or_none(source / "old")
    with place.mount() as mount:
        eventually(lambda: mount.status()["writing"]["conflicts"] == 1, "the conflict is found")
        assert content_or_none(source / "old") == theirs
        eventually(lambda: content_or_none(shown / "old") == theirs, "the mount shows what the source has")
        (broken,) = mount.status()["writing"]["broken"]
        assert broken["path"] == "/job/step/old"
        assert broken["error"]
        if theirs is not None:
            assert durability(shown / "old") == "broken"
            assert "elsewhere" in last_error(shown / "old")
        waited = place.turbofs("wait", str(shown / "old"))
        assert waited.returncode == 1, waited.stdout + waited.stderr
        (conflict,) = json.loads(place.turbofs("conflicts", "ls", str(mount.path), "--json").stdout)["conflicts"]
        assert conflict["path"] == "/job/step/old"
        assert conflict["size"] == len(NEW)
        assert conflict["blake3"] in {None, blake3(NEW).hexdigest()}
        assert "elsewhere" in conflict["reason"]
    assert content_or_none(source / "old") == theirs


def test_file_made_elsewhere_meanwhile_is_not_overwritten(place, step):
    source, shown = step
    with place.direct(BRIEF_DRAIN) as mount:
        acknowledge(shown)
        mount.source.hold(["rename"])
        write_all(shown / "new", NEW)
        kill(mount)
    (source / "new").write_bytes(THEIRS)
    with place.mount() as mount:
        eventually(lambda: mount.status()["writing"]["conflicts"] == 1, "the conflict is found")
        assert (source / "new").read_bytes() == THEIRS
        eventually(lambda: (shown / "new").read_bytes() == THEIRS, "the mount shows what the source has")


def test_parked_bytes_are_read_published_and_dropped(place, step):
    source, shown = step
    with place.direct(BRIEF_DRAIN) as mount:
        acknowledge(shown)
        mount.source.hold(["rename"])
        for name in ("a", "b", "c"):
            write_all(shown / name, name.encode() * MIB)
        kill(mount)
    for name in ("a", "b", "c"):
        (source / name).write_bytes(THEIRS)
    with place.mount() as mount:
        eventually(lambda: mount.status()["writing"]["conflicts"] == 3, "the conflicts are found")
        kill(mount)  # what is parked outlives this, too
    with place.mount() as mount:
        listed = json.loads(place.turbofs("conflicts", "ls", str(mount.path), "--json").stdout)["conflicts"]
        found = {each["path"].rpartition("/")[2]: each for each in listed}
        assert sorted(found) == ["a", "b", "c"]
        for name, each in found.items():
            shown_all = json.loads(
                place.turbofs("conflicts", "show", str(mount.path), str(each["id"]), "--json").stdout
            )
            assert in_child(Path(shown_all["read_at"]).read_bytes) == name.encode() * MIB
        assert len(os.listdir(mount.path / ".turbofs" / "conflicts")) == 3
        numbers = {name: str(each["id"]) for name, each in found.items()}
        published = place.turbofs("conflicts", "publish", str(mount.path), numbers["a"])
        assert published.returncode == 0, published.stderr
        assert (source / "a").read_bytes() == b"a" * MIB
        eventually(lambda: (shown / "a").read_bytes() == b"a" * MIB, "the mount shows it")
        beside = place.turbofs("conflicts", "publish", str(mount.path), numbers["b"], "--to", str(shown / "b.ours"))
        assert beside.returncode == 0, beside.stderr
        assert (source / "b").read_bytes() == THEIRS
        assert (source / "b.ours").read_bytes() == b"b" * MIB
        dropped = place.turbofs("conflicts", "drop", str(mount.path), numbers["c"], "--yes")
        assert dropped.returncode == 0, dropped.stderr
        assert (source / "c").read_bytes() == THEIRS
        eventually(lambda: mount.status()["writing"]["conflicts"] == 0, "no conflict is left")
        assert os.listdir(mount.path / ".turbofs" / "conflicts") == []
        used = mount.status()["writing"]["staging"]["used_bytes"]
        assert used == 0


def test_killed_again_and_again(place, step):
    """A daemon that is killed while it recovers recovers the next time, whatever of it was done."""
    source, shown = step
    with place.direct(BRIEF_DRAIN) as mount:
        acknowledge(shown)
        mount.source.hold(["rename"])
        for number in range(4):
            write_all(shown / f"{number}", content(MIB, seed=number))
        kill(mount)
    for _ in range(3):
        with place.direct(BRIEF_DRAIN, "source.backoff_first=1ms", fail={"acts": ["rename"]}) as mount:
            mount.source.hold(["rename"], after=1)
            mount.source.heal()
            mount.source.wait_held()
            kill(mount)
    with place.mount():
        persisted(*(shown / f"{number}" for number in range(4)))
        eventually(lambda: temporaries(source) == [], "nothing temporary is left")
    assert [(source / f"{number}").read_bytes() for number in range(4)] == [content(MIB, seed=n) for n in range(4)]
    assert sorted(os.listdir(source)) == ["0", "1", "2", "3", "old"]
