"""What close and fsync promise, early and late, and what the source shows meanwhile."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys

import pytest
from blake3 import blake3

from turbofs.source.orphans import is_temporary_name
from turbofs.testing.children import Child, in_child
from turbofs.testing.conformance_base import content
from turbofs.testing.mounts import workplace
from turbofs.testing.waiting import eventually
from turbofs.testing.writing import (
    ACK,
    Watcher,
    acknowledge,
    content_or_none,
    durability,
    outcome,
    temporaries,
    write_all,
    write_fd,
)

pytestmark = pytest.mark.mount

MIB = 1 << 20
OLD, NEW = content(3 * MIB + 77, seed=1), content(2 * MIB + 5, seed=2)
SLACK_S = 15.0
"""For a machine that has other things to do."""
BRIEF_DRAIN = "write.drain=1s"
"""A test that fails while the source is held does not wait for it at the end."""


@pytest.fixture(scope="module")
def mount():
    """A mount over a source that obeys; each test makes files of its own, and lets the source go on in the end."""
    with workplace() as place, place.direct("memory=256MiB", "fs.attribute_timeout=200ms", BRIEF_DRAIN) as made:
        yield made


def listed(mount, shown):
    """What the mount's status says of the file that is being written or waits: its state, or None."""
    path = f"/{shown.relative_to(mount.path)}"
    return next((each["state"] for each in mount.status()["writing"]["files"] if each["path"] == path), None)


# --- late: persisted, the default


def test_close_returns_when_the_source_has_the_file(mount, corner):
    source, shown = corner
    mount.source.hold(["complete"])
    with Child(lambda: write_all(shown / "file", NEW)) as writer:
        mount.source.wait_held()
        assert not writer.gone
        assert not (source / "file").exists()
        assert durability(shown / "file") != "persisted"
        mount.source.release()
        writer.result()
    assert (source / "file").read_bytes() == NEW
    assert durability(shown / "file") == "persisted"


def test_new_file_has_a_hidden_temporary_name_until_close(mount, corner):
    source, shown = corner
    with Watcher(lambda: content_or_none(source / "file")) as watcher:
        fd = os.open(shown / "file", os.O_WRONLY | os.O_CREAT, 0o644)
        write_fd(fd, content(10 * MIB, seed=5))
        eventually(lambda: temporaries(source), "it is on its way")
        assert all(path.parent == source for path in temporaries(source))
        assert os.listdir(shown) == ["file"], "the mount lists no temporary names"
        assert all(is_temporary_name(name) for name in os.listdir(source))
        watcher.catch_up()
        assert watcher.seen == [None]
        os.close(fd)
    assert watcher.seen == [None, content(10 * MIB, seed=5)]
    assert os.listdir(source) == ["file"]


@pytest.mark.parametrize("how", ["anew", "in the middle", "cut", "extended", "beside and renamed"])
def test_rewritten_file_is_the_old_or_the_new_at_every_moment(corner, how):
    source, shown = corner
    (source / "file").write_bytes(OLD)
    expected = {
        "in the middle": OLD[:MIB] + NEW + OLD[MIB + len(NEW) :],
        "cut": OLD[:MIB],
        "extended": OLD + b"tail" + NEW,
    }
    name = "file.tmp" if how == "beside and renamed" else "file"
    with Watcher(lambda: content_or_none(source / "file")) as watcher:
        fd = os.open(shown / name, os.O_RDWR | os.O_CREAT | (os.O_TRUNC if how == "anew" else 0), 0o644)
        match how:
            case "in the middle":
                for start in range(0, len(NEW), 100_000):
                    os.pwrite(fd, NEW[start : start + 100_000], MIB + start)
            case "cut":
                os.ftruncate(fd, MIB)
            case "extended":
                os.pwrite(fd, b"tail" + NEW, len(OLD))
            case _:
                write_fd(fd, NEW, step=100_000)
        watcher.catch_up()
        assert watcher.seen == [OLD]
        os.close(fd)
        if how == "beside and renamed":
            assert (source / name).read_bytes() == NEW
            os.replace(shown / name, shown / "file")
    final = expected.get(how, NEW)
    if how == "extended":  # what is only longer is appended in place
        assert (watcher.seen[0], watcher.seen[-1]) == (OLD, final)
        assert all(final.startswith(seen) and seen.startswith(OLD) for seen in watcher.seen)
    else:
        assert watcher.seen == [OLD, final]
    assert (shown / "file").read_bytes() == final
    assert os.listdir(source) == ["file"]


def test_first_fsync_publishes_what_it_covers(corner):
    source, shown = corner
    fd = os.open(shown / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, b"unsynced")
    assert not (source / "log").exists()
    os.fsync(fd)
    assert (source / "log").read_bytes() == b"unsynced"
    os.write(fd, b" and more")
    os.fdatasync(fd)
    assert (source / "log").read_bytes() == b"unsynced and more"
    os.write(fd, b" to the end")
    os.close(fd)
    assert (source / "log").read_bytes() == b"unsynced and more to the end"
    assert os.listdir(source) == ["log"]


@pytest.mark.parametrize("kind", ["new", "existing"])
def test_synced_log_grows_and_never_shows_what_was_not_written(corner, kind):
    source, shown = corner
    records = [b"%06d " % number * (1 + number % 300) for number in range(200)]
    before = b"".join(records[:50]) if kind == "existing" else b""
    if before:
        (source / "log").write_bytes(before)
    whole = b"".join(records)
    lengths = []
    with Watcher(lambda: content_or_none(source / "log")) as watcher:
        fd = os.open(shown / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        written = len(before)
        for number, record in enumerate(records[50 if before else 0 :]):
            os.write(fd, record)
            written += len(record)
            if number % 7 == 0:
                os.fsync(fd)
                lengths.append(written)
                assert (source / "log").stat().st_size >= written
        os.close(fd)
    assert (source / "log").read_bytes() == whole
    seen = [each or b"" for each in watcher.seen]
    assert all(whole.startswith(each) for each in seen), "holes, or bytes of something else"
    assert [len(each) for each in seen] == sorted({len(each) for each in seen}), "it shrank"
    assert len(seen) > 5, "nobody looked while it grew"


def test_fsync_of_changed_bytes_replaces_the_file_at_once(corner):
    source, shown = corner
    (source / "file").write_bytes(OLD)
    contents = [OLD]
    with Watcher(lambda: content_or_none(source / "file")) as watcher:
        fd = os.open(shown / "file", os.O_RDWR)
        for turn in range(5):
            os.pwrite(fd, b"%d" % turn * 1000, turn * 1000)
            os.pwrite(fd, b"%d" % turn * 1000, 2 * MIB)
            os.fsync(fd)
            contents.append((shown / "file").read_bytes())
            assert (source / "file").read_bytes() == contents[-1]
        os.close(fd)
    assert [each for each in watcher.seen if each not in contents] == []
    assert os.listdir(source) == ["file"]


def test_directory_fsync_works(corner):
    source, shown = corner
    write_all(shown / "file", NEW)
    fd = os.open(shown, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)
    assert (source / "file").read_bytes() == NEW


def test_digest_of_what_was_written_is_known(mount, corner):
    _, shown = corner
    mount.source.forget_requests()
    write_all(shown / "file", content(9 * MIB, seed=4))
    assert os.getxattr(shown / "file", "user.turbofs.blake3").decode() == blake3(content(9 * MIB, seed=4)).hexdigest()
    assert mount.source.requests("read") == [], "it was computed while the bytes went by"


# --- early: staged


def test_close_returns_before_the_source_answers(mount, corner):
    source, shown = corner
    acknowledge(shown)
    mount.source.hold(["create", "rename"])
    write_all(shown / "file", NEW)
    fd = os.open(shown / "log", os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(fd, b"synced")
    os.fsync(fd)
    os.close(fd)
    assert os.listdir(source) == []
    for name, data in (("file", NEW), ("log", b"synced")):
        assert durability(shown / name) == "staged"
        assert (shown / name).read_bytes() == data
        assert in_child((shown / name).read_bytes) == data
        assert (shown / name).stat().st_size == len(data)
        assert listed(mount, shown / name) in {"staged", "waiting"}
    assert sorted(os.listdir(shown)) == ["file", "log"]
    mount.source.release()
    for name, data in (("file", NEW), ("log", b"synced")):
        eventually(lambda name=name: durability(shown / name) == "persisted", f"{name} is persisted")
        assert (source / name).read_bytes() == data
        assert listed(mount, shown / name) is None
    assert sorted(os.listdir(source)) == ["file", "log"]


def test_staged_file_may_be_written_again(mount, corner):
    """Each close is acknowledged, the source gets the newest, and never a mix."""
    source, shown = corner
    (source / "file").write_bytes(OLD)
    acknowledge(shown)
    mount.source.hold(["rename"])
    contents = [OLD]
    with Watcher(lambda: content_or_none(source / "file")) as watcher:
        for turn in range(4):
            contents.append(content(MIB + turn, seed=10 + turn))
            write_all(shown / "file", contents[-1])
            assert (shown / "file").read_bytes() == contents[-1]
            assert durability(shown / "file") == "staged"
        watcher.catch_up()
        assert watcher.seen == [OLD]
        mount.source.release()
        eventually(lambda: durability(shown / "file") == "persisted", "the newest is persisted")
    assert watcher.seen[-1] == contents[-1]
    assert [contents.index(each) for each in watcher.seen] == sorted({contents.index(each) for each in watcher.seen})
    # What was acknowledged goes as it was, also while the next content is half written.
    older, newer = content(MIB, seed=20), content(MIB, seed=21)
    mount.source.hold(["create"])
    write_all(shown / "file", older)
    with Watcher(lambda: content_or_none(source / "file")) as watcher:
        fd = os.open(shown / "file", os.O_WRONLY | os.O_TRUNC)
        write_fd(fd, newer[: MIB // 2])
        mount.source.release()
        eventually(lambda: content_or_none(source / "file") == older, "the older content is on the source")
        watcher.catch_up()
        write_fd(fd, newer[MIB // 2 :])
        os.close(fd)
        eventually(lambda: durability(shown / "file") == "persisted", "the newer one is persisted")
    assert watcher.seen == [contents[-1], older, newer]


def test_acknowledgement_is_inherited_and_the_nearest_wins(mount, corner):
    source, shown = corner
    for name in ("early/late", "other"):
        (shown / name).mkdir(parents=True)
    acknowledge(shown / "early")
    acknowledge(shown / "early" / "late", "persisted")
    write_all(shown / "early" / "own", b"before")
    eventually(lambda: durability(shown / "early" / "own") == "persisted", "nothing waits")
    os.setxattr(shown / "early" / "own", ACK, b"persisted")
    assert outcome(os.setxattr, shown / "early", ACK, b"sometimes") == errno.EINVAL
    assert outcome(os.setxattr, shown / "early", ACK, b"replicated") == errno.ENOTSUP
    assert os.getxattr(shown / "early", ACK) == b"staged"
    mount.source.hold(["rename"])
    names = ("early/late/file", "early/own", "other/file")
    writers = [Child(lambda name=name: write_all(shown / name, NEW)) for name in names]
    try:
        mount.source.wait_held(len(names))
        assert not any(writer.gone for writer in writers)
        write_all(shown / "early" / "file", NEW)
        assert [durability(shown / name) for name in ("early/file", *names)] == ["staged", "open", "open", "open"]
    finally:
        mount.source.release()
        for writer in writers:
            with writer:
                writer.result()
    os.removexattr(shown / "early", ACK)
    eventually(lambda: durability(shown / "early" / "file") == "persisted", "nothing waits")
    write_all(shown / "early" / "again", NEW)
    assert (source / "early" / "again").read_bytes() == NEW


def test_durability_tells_where_the_bytes_are(mount, corner):
    source, shown = corner
    (source / "theirs").write_bytes(OLD)
    assert durability(shown / "theirs") == "persisted"
    acknowledge(shown)
    mount.source.hold(["rename"])
    fd = os.open(shown / "file", os.O_WRONLY | os.O_CREAT, 0o644)
    assert durability(shown / "file") == "open"
    os.write(fd, NEW)
    assert durability(shown / "file") == "open"
    os.close(fd)
    assert durability(shown / "file") == "staged"
    mount.source.release()
    eventually(lambda: durability(shown / "file") == "persisted", "it is persisted")
    fd = os.open(shown / "file", os.O_WRONLY)
    os.pwrite(fd, b"x", 0)
    assert durability(shown / "file") == "open"
    os.close(fd)
    eventually(lambda: durability(shown / "file") == "persisted", "it is persisted again")


def test_wait_returns_when_the_files_are_persisted(mount, corner):
    source, shown = corner
    turbofs = mount.place.turbofs
    acknowledge(shown)
    mount.source.hold(["rename"])
    for number in range(3):
        write_all(shown / f"{number}", NEW)
    paths = [str(shown / f"{number}") for number in range(3)]
    early = turbofs("wait", *paths, "--until", "staged", "--timeout", "30s")
    assert early.returncode == 0, early.stderr
    late = turbofs("wait", paths[0], "--until", "persisted", "--timeout", "500ms")
    assert late.returncode == 4, late.stderr
    assert "staged" in late.stderr
    command = [sys.executable, "-m", "turbofs.cli.app", "wait", *paths, str(shown), "--json"]
    with subprocess.Popen(command, env=mount.place.environment, stdout=subprocess.PIPE) as waiting:
        assert waiting.poll() is None
        mount.source.release()
        answer, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 0
    assert {each["durability"] for each in json.loads(answer)["files"]} == {"persisted"}
    assert all((source / f"{number}").read_bytes() == NEW for number in range(3))


# --- the end of a mount


def start(place, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "turbofs.cli.app", *arguments],
        env=place.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_umount_drains(place):
    (place.source / "step").mkdir()
    with place.direct("write.drain=10s") as mount:
        acknowledge(mount.path / "step")
        mount.source.hold(["rename"])
        for number in range(5):
            write_all(mount.path / "step" / f"{number}", NEW)
        with start(place, "umount", str(mount.path)) as ending:
            eventually(lambda: mount.status()["writing"]["draining"], "it drains")
            assert ending.poll() is None
            assert all(is_temporary_name(name) for name in os.listdir(place.source / "step"))
            mount.source.release()
            said, _ = ending.communicate(timeout=60)
        assert ending.returncode == 0, said
        mount.process.wait(SLACK_S)
    assert all((place.source / "step" / f"{number}").read_bytes() == NEW for number in range(5))
    assert len(os.listdir(place.source / "step")) == 5


@pytest.mark.parametrize("how", ["umount", "SIGTERM"])
def test_what_cannot_be_drained_is_kept_and_said(place, how):
    (place.source / "step").mkdir()
    with place.direct(BRIEF_DRAIN) as mount:
        acknowledge(mount.path / "step")
        mount.source.hold(["create"])
        write_all(mount.path / "step" / "model", NEW)
        if how == "umount":
            done = place.turbofs("umount", str(mount.path))
            said = done.stdout + done.stderr
        else:
            mount.process.send_signal(signal.SIGTERM)
            mount.process.wait(SLACK_S + 5)
            said = (place.root / "log" / "daemon.log").read_text()
        eventually(lambda: mount.process.poll() is not None, "the daemon ends")
        assert "/step/model" in said, said
    assert os.listdir(place.source / "step") == []
    with place.mount() as mount:
        assert in_child((mount.path / "step" / "model").read_bytes) == NEW
        eventually(lambda: durability(mount.path / "step" / "model") == "persisted", "it is persisted after all")
    assert (place.source / "step" / "model").read_bytes() == NEW
