"""What a writer is told when the source refuses, is away or comes back: at close, at fsync, and ever after."""

from __future__ import annotations

import errno
import os

import pytest

from turbofs.testing.children import Child, in_child
from turbofs.testing.conformance_base import content
from turbofs.testing.mounts import workplace
from turbofs.testing.waiting import eventually
from turbofs.testing.writing import (
    acknowledge,
    broken_error,
    content_or_none,
    durability,
    last_error,
    outcome,
    temporaries,
    write_all,
    write_fd,
)

pytestmark = pytest.mark.mount

MIB = 1 << 20
OLD, NEW = content(3 * MIB + 77, seed=1), content(2 * MIB + 5, seed=2)
QUICK_RETRIES = ("source.backoff_first=1ms", "source.backoff_limit=5ms")
SLACK_S = 10.0


@pytest.fixture(scope="module")
def mount():
    with workplace() as place, place.direct("memory=256MiB", "write.drain=1s", *QUICK_RETRIES) as made:
        yield made


@pytest.mark.parametrize("act", ["create", "write", "complete", "rename"])
@pytest.mark.parametrize("kind", ["new", "existing"])
def test_failed_save_is_told_by_close(mount, corner, kind, act):
    source, shown = corner
    if kind == "existing":
        (source / "file").write_bytes(OLD)
    before = content_or_none(source / "file")
    mount.source.fail([act], error="QuotaExceededError")
    fd = os.open(shown / "file", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    write_fd(fd, NEW)
    assert outcome(os.close, fd) == errno.EDQUOT
    assert content_or_none(source / "file") == before, "the old content stays"
    assert "made to fail" in broken_error(mount, shown / "file")
    if kind == "existing":
        assert durability(shown / "file") == "broken"
        assert "made to fail" in last_error(shown / "file")
        eventually(lambda: in_child((shown / "file").read_bytes) == OLD, "here, too, once nobody has it open")
    else:
        eventually(lambda: not in_child((shown / "file").exists), "a file that never was is not there")
    waited = mount.place.turbofs("wait", str(shown / "file"))
    assert waited.returncode == 1
    assert "made to fail" in waited.stderr
    mount.source.heal()
    write_all(shown / "file", NEW)  # heals it
    assert durability(shown / "file") == "persisted"
    assert (source / "file").read_bytes() == (shown / "file").read_bytes() == NEW
    assert broken_error(mount, shown / "file") is None
    eventually(lambda: temporaries(source) == [], "nothing temporary is left")


@pytest.mark.parametrize("act", ["create", "write", "sync", "rename"])
def test_failed_save_is_told_by_fsync(mount, corner, act):
    source, shown = corner
    mount.source.fail([act], error="OutOfSpaceError")
    fd = os.open(shown / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, b"first")
    assert outcome(os.fsync, fd) == errno.ENOSPC
    assert not (source / "log").exists()
    mount.source.heal()
    os.write(fd, b" second")
    os.fsync(fd)
    assert (source / "log").read_bytes() == b"first second"
    os.close(fd)
    assert durability(shown / "log") == "persisted"


@pytest.mark.parametrize("acts", [["create"], ["write"], ["complete"], ["rename"], ["sync"], ["stat_exact"]])
def test_passing_faults_are_retried_unnoticed(mount, corner, acts):
    source, shown = corner
    (source / "old").write_bytes(OLD)
    for times in (1, 3):
        mount.source.fail(acts, times=times)
        write_all(shown / "file", NEW)
        fd = os.open(shown / "old", os.O_RDWR)
        os.pwrite(fd, b"%d" % times, MIB)
        os.fsync(fd)
        os.close(fd)
        assert (source / "file").read_bytes() == NEW
        assert (source / "old").read_bytes() == OLD[:MIB] + b"%d" % times + OLD[MIB + 1 :]
        mount.source.heal()
    eventually(lambda: temporaries(source) == [], "nothing temporary is left")


def test_early_acknowledged_file_waits_for_a_source_that_is_away(mount, corner):
    """However long that takes: being away is no reason to be broken."""
    source, shown = corner
    acknowledge(shown)
    mount.source.fail(["create", "rename", "complete"])
    write_all(shown / "file", NEW)
    mount.source.forget_requests()
    eventually(lambda: len(mount.source.requests("create")) > 20, "it is tried again and again")
    assert durability(shown / "file") == "staged"
    assert (shown / "file").read_bytes() == NEW
    mount.source.heal()
    eventually(lambda: durability(shown / "file") == "persisted", "it is persisted")
    assert (source / "file").read_bytes() == NEW


def test_failure_after_an_early_acknowledgement_is_never_lost(mount, corner):
    source, shown = corner
    acknowledge(shown)
    (source / "file").write_bytes(OLD)
    mount.source.fail(["create", "append"], error="QuotaExceededError")
    fd = os.open(shown / "file", os.O_RDWR)
    os.pwrite(fd, b"changed", 0)
    os.fsync(fd)
    eventually(lambda: durability(shown / "file") == "broken", "it is broken")
    mount.source.heal()  # what is said from here on is what was kept, not a new failure
    assert outcome(os.fsync, fd) == errno.EDQUOT, "the next fsync says so"
    assert outcome(os.close, fd) == errno.EDQUOT, "and so does the close"
    assert "made to fail" in broken_error(mount, shown / "file")
    assert (source / "file").read_bytes() == OLD
    waited = mount.place.turbofs("wait", str(shown / "file"))
    assert waited.returncode == 1
    assert "made to fail" in waited.stderr
    said = mount.place.turbofs("status", str(mount.path))
    assert "/file" in said.stdout
    assert "broken" in said.stdout


def test_silent_source_fails_a_save_by_the_deadline(place):
    deadline_s = 3.0
    (place.source / "file").write_bytes(OLD)
    options = (f"fs.request_deadline={deadline_s:g}s", "source.operation_timeout=1s", "source.deadline=2s")
    with place.direct(*options, "write.drain=1s") as mount:
        mount.source.hold(["create", "write", "complete", "rename", "append"])
        acts = {
            "close": lambda: write_all(mount.path / "file", NEW),
            "new": lambda: write_all(mount.path / "new", NEW),
            "rename": lambda: os.rename(mount.path / "file", mount.path / "other"),
        }
        children = {name: Child(lambda act=act: outcome(act)) for name, act in acts.items()}
        try:
            found = {name: child.result(deadline_s * 4 + SLACK_S) for name, child in children.items()}
        finally:
            mount.source.release()
            for child in children.values():
                with child:
                    pass
        assert set(found.values()) <= {errno.ETIMEDOUT, errno.EIO}, found
        assert errno.ETIMEDOUT in found.values()
        assert in_child(lambda: outcome(write_all, mount.path / "after", NEW)) is None
    assert (place.source / "after").read_bytes() == NEW


def test_changes_that_the_source_refuses_come_out_at_the_call(mount, corner):
    source, shown = corner
    (source / "file").write_bytes(OLD)
    (source / "folder").mkdir()
    before = sorted(source.rglob("*"))
    acts = {
        "rename": lambda: os.rename(shown / "file", shown / "other"),
        "delete": (shown / "file").unlink,
        "delete_directory": (shown / "folder").rmdir,
        "make_directory": (shown / "new").mkdir,
        "make_symlink": lambda: (shown / "link").symlink_to("file"),
        "set_attributes": lambda: (shown / "file").chmod(0o600),
    }
    for act, change in acts.items():
        mount.source.fail([act], error="AccessDeniedError")
        assert outcome(change) == errno.EACCES, act
        mount.source.heal()
    assert sorted(source.rglob("*")) == before
    assert sorted(os.listdir(shown)) == ["file", "folder"]
    assert (shown / "file").read_bytes() == OLD
    assert mount.status()["writing"]["acts"] == []


def test_status_answers_while_writers_are_stuck(mount, corner):
    _, shown = corner
    mount.source.hold()
    with Child(lambda: outcome(write_all, shown / "file", NEW)) as writer:
        mount.source.wait_held()
        said = mount.place.turbofs("status", str(mount.path), limit_s=30)
        assert said.returncode == 0, said.stderr
        assert not writer.gone
        mount.source.release()
        assert writer.result(60) is None


def test_killed_daemon_fails_writers_at_once(place):
    with place.direct("write.drain=1s") as mount:
        mount.source.hold(["complete"])
        with Child(lambda: outcome(write_all, mount.path / "file", NEW)) as writer:
            mount.source.wait_held()
            mount.process.kill()
            mount.process.wait()
            assert writer.result(SLACK_S) in {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO}
    assert not (place.source / "file").exists()
