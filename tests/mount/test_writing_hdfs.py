"""Writing through a mount of HDFS: what another client of it sees, and when."""

from __future__ import annotations

import errno
import getpass
import mmap
import os
import pwd
import random
import shutil
import stat

import httpx
import pytest

from turbofs.source.orphans import is_temporary_name
from turbofs.testing.children import in_child
from turbofs.testing.conformance_base import content
from turbofs.testing.elsewhere import Elsewhere
from turbofs.testing.mounts import workplace
from turbofs.testing.waiting import eventually
from turbofs.testing.writing import (
    Watcher,
    acknowledge,
    durability,
    last_error,
    outcome,
    write_all,
    write_fd,
)

pytestmark = [pytest.mark.hdfs, pytest.mark.mount]

MIB = 1 << 20
OLD, NEW = content(3 * MIB + 77, seed=1), content(2 * MIB + 5, seed=2)
BIG = content(20 * MIB + 12345, seed=3)


@pytest.fixture(scope="module")
def elsewhere(hdfs):
    return Elsewhere(hdfs, "/mount-writing")


def options(elsewhere):
    return (f"source.web_address={elsewhere.cluster.web}", "fs.attribute_timeout=200ms", "memory=256MiB")


@pytest.fixture(scope="module")
def mount(elsewhere):
    with workplace() as place, place.direct(*options(elsewhere), "write.drain=1s", source=elsewhere.uri) as made:
        yield made


class Corner:
    """A directory of one test: `shown` in the mount; the methods look at HDFS as another client does."""

    def __init__(self, elsewhere, name, mountpoint, *, make=True):
        self.elsewhere = elsewhere
        self.name = name
        self.shown = mountpoint / name
        if not make:
            return
        elsewhere.client.mkdirs(elsewhere.path(name), 0o777, True)
        elsewhere.client.set_permission(elsewhere.path(name), 0o777)

    def put(self, name, data):
        self.elsewhere.put(f"{self.name}/{name}", data)

    def get(self, name):
        """All that HDFS shows of the file, also while it is being written; None where the name is not there."""
        reply = self.web("GET", name, op="OPEN", follow=True)
        return None if reply.status_code == 404 else self._fine(reply).content

    def names(self, name=""):
        reply = self._fine(self.web("GET", name, op="LISTSTATUS"))
        return sorted(each["pathSuffix"] for each in reply.json()["FileStatuses"]["FileStatus"])

    def status(self, name):
        reply = self.web("GET", name, op="GETFILESTATUS")
        return None if reply.status_code == 404 else self._fine(reply).json()["FileStatus"]

    def web(self, method, name, *, follow=False, **parameters):
        path = self.elsewhere.path(f"{self.name}/{name}" if name else self.name)
        return httpx.request(
            method,
            f"{self.elsewhere.cluster.web}/webhdfs/v1{path}",
            params={"user.name": getpass.getuser(), **parameters},
            follow_redirects=follow,
            timeout=60,
            trust_env=False,
        )

    def _fine(self, reply):
        assert reply.is_success, reply.text
        return reply


@pytest.fixture
def corner(mount, elsewhere, request):
    name = request.node.name.replace("[", "-").replace("]", "").replace(" ", "_")
    yield Corner(elsewhere, name, mount.path)
    mount.source.heal()
    mount.source.release()


def slurp(path):
    """All of a file, read in a child: a mount that hangs fails the test."""
    return in_child(path.read_bytes, limit_s=60)


# --- bytes


@pytest.mark.parametrize(("size", "step"), [(0, 1), (1, 1), (70_000, 4093), (len(BIG), MIB), (len(BIG), 100_001)])
def test_sequential_write_gives_hdfs_the_same_bytes(corner, size, step):
    write_all(corner.shown / "file", BIG[:size], step=step)
    assert corner.get("file") == BIG[:size]
    assert (corner.shown / "file").stat().st_size == size
    assert slurp(corner.shown / "file") == BIG[:size]
    assert corner.names() == ["file"]


@pytest.mark.parametrize("kind", ["new", "existing"])
def test_random_writes_are_those_of_any_file_system(corner, kind):
    chance = random.Random(kind)
    model = bytearray()
    if kind == "existing":
        corner.put("file", OLD)
        model[:] = OLD
    fd = os.open(corner.shown / "file", os.O_RDWR | os.O_CREAT, 0o644)
    for turn in range(120):
        offset = chance.choice([0, len(model), chance.randrange(4 * MIB), chance.randrange(len(model) + 1)])
        match chance.randrange(10):
            case 0:
                os.ftruncate(fd, offset)
                model[offset:] = bytes(max(0, offset - len(model)))
            case 1 | 2:
                assert os.pread(fd, 100_000, offset) == model[offset : offset + 100_000]
            case _:
                data = chance.randbytes(chance.choice([1, 100, 4096, 70_000]))
                os.pwrite(fd, data, offset)
                model[len(model) : offset] = bytes(max(0, offset - len(model)))
                model[offset : offset + len(data)] = data
        if turn in {40, 41, 80}:
            os.fsync(fd)
            assert corner.get("file") == model
        if turn == 60:
            os.close(fd)
            assert corner.get("file") == model
            fd = os.open(corner.shown / "file", os.O_RDWR)
    os.close(fd)
    assert corner.get("file") == slurp(corner.shown / "file") == model
    assert corner.names() == ["file"]


@pytest.mark.parametrize("kind", ["new", "existing"])
def test_truncation_shrinks_and_extends(corner, kind):
    corner.put("file", OLD) if kind == "existing" else write_all(corner.shown / "file", OLD)
    expected = OLD
    for size in (MIB + 1, 2 * MIB, 0, 10):
        expected = expected[:size] + bytes(max(0, size - len(expected)))
        os.truncate(corner.shown / "file", size)
        assert corner.get("file") == slurp(corner.shown / "file") == expected
        assert (corner.shown / "file").stat().st_size == size


def test_appends_keep_the_file_and_go_to_its_end(corner):
    corner.put("log", OLD)
    before = corner.status("log")["fileId"]
    number = (corner.shown / "log").stat().st_ino
    expected = OLD
    for turn in range(3):
        with (corner.shown / "log").open("ab") as log:
            log.write(b"line %d\n" % turn)
        expected += b"line %d\n" % turn
        assert corner.get("log") == expected
    assert corner.status("log")["fileId"] == before, "appended in place, not written anew"
    assert (corner.shown / "log").stat().st_ino == number
    assert slurp(corner.shown / "log") == expected


def test_shared_mapping_writes_to_the_file(corner):
    fd = os.open(corner.shown / "file", os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(fd, len(NEW))
    with mmap.mmap(fd, len(NEW)) as mapped:
        mapped[:] = NEW
        mapped.flush()
    os.close(fd)
    assert corner.get("file") == slurp(corner.shown / "file") == NEW


# --- when it shows


@pytest.mark.parametrize("size", [1000, len(BIG)])
def test_new_file_appears_whole(corner, size):
    with Watcher(lambda: (corner.status("file") or {}).get("length")) as watcher:
        fd = os.open(corner.shown / "file", os.O_WRONLY | os.O_CREAT, 0o644)
        write_fd(fd, BIG[:size])
        if size > 8 * MIB:
            eventually(lambda: [name for name in corner.names() if is_temporary_name(name)], "it is on its way")
        watcher.catch_up()
        assert watcher.seen == [None]
        assert os.listdir(corner.shown) == ["file"]
        os.close(fd)
    assert watcher.seen == [None, size]
    assert corner.names() == ["file"]


@pytest.mark.parametrize("how", ["anew", "in the middle"])
def test_rewritten_file_is_the_old_or_the_new_at_every_moment(corner, how):
    corner.put("file", OLD)
    final = NEW if how == "anew" else OLD[:1000] + NEW + OLD[1000 + len(NEW) :]
    with Watcher(lambda: corner.get("file")) as watcher:
        fd = os.open(corner.shown / "file", os.O_RDWR | (os.O_TRUNC if how == "anew" else 0))
        os.pwrite(fd, NEW, 0 if how == "anew" else 1000)
        watcher.catch_up()
        assert watcher.seen == [OLD]
        os.close(fd)
    assert watcher.seen == [OLD, final]
    assert slurp(corner.shown / "file") == final


def test_synced_log_grows_under_its_name(corner):
    records = [b"%06d " % number * (1 + number % 300) for number in range(40)]
    whole = b"".join(records)
    with Watcher(lambda: corner.get("log")) as watcher:
        fd = os.open(corner.shown / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        written = 0
        for number, record in enumerate(records):
            os.write(fd, record)
            written += len(record)
            if number % 4 == 0:
                os.fsync(fd)
                seen = corner.get("log")
                assert len(seen) >= written
                assert whole.startswith(seen)
        os.close(fd)
        assert corner.get("log") == whole
    seen = [each or b"" for each in watcher.seen]
    assert all(whole.startswith(each) for each in seen), "holes, or bytes of something else"
    assert [len(each) for each in seen] == sorted({len(each) for each in seen}), "it shrank"
    assert corner.names() == ["log"]


def test_another_mount_sees_a_close_at_once(elsewhere, corner, place):
    with place.mount(f"source.web_address={elsewhere.cluster.web}", source=elsewhere.uri) as second:
        rank = second.path / corner.name
        assert not (rank / "model").exists()
        write_all(corner.shown / "model", NEW)
        assert slurp(rank / "model") == NEW
        os.rename(corner.shown / "model", corner.shown / "renamed")
        assert slurp(rank / "renamed") == NEW


def test_closes_by_others_in_the_middle_of_a_save_publish_nothing(corner):
    corner.put("file", OLD)
    fd = os.open(corner.shown / "file", os.O_WRONLY | os.O_TRUNC)
    os.write(fd, NEW[:MIB])
    os.close(os.dup(fd))
    in_child(lambda: os.close(fd))
    assert corner.get("file") == OLD
    os.write(fd, NEW[MIB:])
    os.close(fd)
    assert corner.get("file") == NEW


# --- acknowledgements


def test_staged_files_reach_hdfs_in_order(mount, corner):
    corner.put("step-1/model", OLD)
    corner.put("latest", b"step-1")
    acknowledge(corner.shown)
    mount.source.hold(["rename"])
    (corner.shown / "step-2.tmp").mkdir()
    acknowledge(corner.shown / "step-2.tmp")
    write_all(corner.shown / "step-2.tmp" / "model", BIG)
    os.rename(corner.shown / "step-2.tmp", corner.shown / "step-2")
    write_all(corner.shown / "latest", b"step-2")
    shutil.rmtree(corner.shown / "step-1")
    assert durability(corner.shown / "step-2" / "model") == "staged"
    assert sorted(os.listdir(corner.shown)) == ["latest", "step-2"]
    assert slurp(corner.shown / "step-2" / "model") == BIG
    assert {"step-1", "step-2.tmp", "latest"} <= set(corner.names())
    assert "step-2" not in corner.names()
    assert corner.get("latest") == b"step-1"

    def honest():
        newest = corner.get("latest")
        return newest == b"step-1" or (corner.status("step-2/model") or {}).get("length") == len(BIG)

    with Watcher(honest) as watcher:
        mount.source.release()
        eventually(lambda: "step-1" not in corner.names(), "all of it reaches HDFS", limit_s=60)
    assert watcher.seen == [True]
    assert corner.get("step-2/model") == BIG
    assert corner.get("latest") == b"step-2"
    eventually(lambda: durability(corner.shown / "step-2" / "model") == "persisted", "it is persisted")
    assert corner.names() == ["latest", "step-2"]


def test_acknowledged_bytes_survive_a_killed_daemon(elsewhere, place):
    """One job renames what it saved; what another saved was saved again by a newer job meanwhile."""
    kept, newer = (Corner(elsewhere, f"{name}/step", place.mountpoint) for name in ("kept", "newer"))
    newer.put("model", OLD)
    with place.direct(*options(elsewhere), source=elsewhere.uri) as mount:
        mount.source.hold(["rename"])
        for job in (kept, newer):
            acknowledge(job.shown)
            write_all(job.shown / "model", BIG)
        os.rename(kept.shown, kept.shown.with_name("final"))
        mount.source.wait_held()
        mount.process.kill()
        mount.process.wait()
    elsewhere.put("newer/step/model", NEW, replace=True)
    with place.mount(*options(elsewhere), source=elsewhere.uri) as mount:
        final = Corner(elsewhere, "kept/final", mount.path, make=False)
        assert slurp(final.shown / "model") == BIG
        eventually(lambda: durability(final.shown / "model") == "persisted", "it is persisted", limit_s=60)
        eventually(lambda: mount.status()["writing"]["conflicts"] == 1, "the conflict is found", limit_s=60)
        assert durability(newer.shown / "model") == "broken"
        for job, expected in ((final, BIG), (newer, NEW)):
            eventually(lambda job=job: job.names() == ["model"], "nothing temporary is left", limit_s=60)
            assert job.get("model") == expected
            assert slurp(job.shown / "model") == expected


def test_failed_close_is_told_and_leaves_no_lease(elsewhere, corner):
    """Out of quota: the error comes out at close, the old content stays, and others can write at once."""
    corner.put("q/file", OLD)
    assert corner.web("PUT", "q", op="SETQUOTA", namespacequota=1 << 40, storagespacequota=10 * MIB).is_success
    fd = os.open(corner.shown / "q" / "file", os.O_RDWR | os.O_TRUNC)
    write_fd(fd, BIG)
    assert outcome(os.close, fd) == errno.EDQUOT
    assert corner.get("q/file") == OLD
    assert durability(corner.shown / "q" / "file") == "broken"
    assert "quota" in last_error(corner.shown / "q" / "file").lower()
    assert corner.web("PUT", "q", op="SETQUOTA", namespacequota=1 << 40, storagespacequota=1 << 50).is_success
    elsewhere.append(f"{corner.name}/q/file", b"theirs")  # HDFS refuses where somebody still holds the lease
    eventually(lambda: corner.names("q") == ["file"], "nothing temporary is left")


def test_file_that_another_client_writes_is_not_replaced(elsewhere, corner):
    with elsewhere.writing(f"{corner.name}/file") as writer:
        writer.write(OLD)
        writer.hsync()
        assert outcome(write_all, corner.shown / "file", NEW) == errno.EBUSY
        writer.write(b"more")
    assert corner.get("file") == OLD + b"more"
    if outcome(write_all, corner.shown / "file", NEW) is not None:  # may tell of the failure once more
        write_all(corner.shown / "file", NEW)
    assert corner.get("file") == NEW


# --- names


def test_names_change_on_hdfs(mount, corner):
    shown = corner.shown
    (shown / "a" / "b").mkdir(parents=True)
    write_all(shown / "a" / "b" / "file", NEW)
    assert outcome(os.mkdir, shown / "a") == errno.EEXIST
    assert outcome(os.rmdir, shown / "a") == errno.ENOTEMPTY
    mount.source.forget_requests()
    os.rename(shown / "a", shown / "c")
    assert [each.act for each in mount.source.requests() if each.act in {"rename", "create", "delete"}] == ["rename"]
    assert corner.get("c/b/file") == NEW
    write_all(shown / "model", OLD)
    write_all(shown / "model.tmp", NEW)
    os.replace(shown / "model.tmp", shown / "model")
    assert corner.get("model") == slurp(shown / "model") == NEW
    corner.put("full/x", b"x")
    assert outcome(os.rename, shown / "c", shown / "full") in {errno.ENOTEMPTY, errno.EEXIST}
    assert outcome(os.rename, shown / "c", shown / "c" / "b" / "inside") == errno.EINVAL
    assert outcome(os.symlink, "model", shown / "link") == errno.ENOTSUP
    assert outcome(os.link, shown / "model", shown / "link") == errno.ENOTSUP
    assert outcome(os.mkdir, shown / "with:colon") == errno.EILSEQ
    assert outcome(lambda: os.open(os.fsencode(shown) + b"/\xff", os.O_WRONLY | os.O_CREAT)) == errno.EILSEQ
    (shown / "model").unlink()
    shutil.rmtree(shown / "c")
    assert corner.names() == sorted(os.listdir(shown)) == ["full"]


@pytest.mark.parametrize("how", ["deleted", "replaced"])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
def test_open_file_outlives_its_name(corner, how, flags):
    """HDFS itself takes the bytes away with the last name."""
    corner.put("file", BIG)
    fd = os.open(corner.shown / "file", flags)
    assert os.pread(fd, 10, 0) == BIG[:10]
    if how == "deleted":
        (corner.shown / "file").unlink()
        assert not (corner.shown / "file").exists()
    else:
        write_all(corner.shown / "other", NEW)
        os.replace(corner.shown / "other", corner.shown / "file")
        assert slurp(corner.shown / "file") == NEW
    assert corner.get("file") == (None if how == "deleted" else NEW)
    for offset in range(0, len(BIG), 3 * MIB):
        assert os.pread(fd, 3 * MIB, offset) == BIG[offset : offset + 3 * MIB]
    if flags == os.O_RDWR:
        os.pwrite(fd, b"changed", 5)
        assert os.pread(fd, 20, 0) == BIG[:5] + b"changed" + BIG[12:20]
    assert os.listdir(corner.shown) == ([] if how == "deleted" else ["file"])
    os.close(fd)
    eventually(lambda: corner.names() == ([] if how == "deleted" else ["file"]), "nothing of the old file is left")
    assert corner.get("file") == (None if how == "deleted" else NEW)


def test_modes_owners_and_times_are_what_was_asked_for(corner):
    shown = corner.shown
    daemon = pwd.getpwnam("daemon")

    def create():
        os.umask(0o027)
        write_all(shown / "file", NEW)
        (shown / "folder").mkdir()

    in_child(create, uid=daemon.pw_uid)
    for name, mode in (("file", 0o640), ("folder", 0o750)):
        assert corner.status(name)["owner"] == "daemon"
        assert int(corner.status(name)["permission"], 8) == mode
        assert (shown / name).stat().st_uid == daemon.pw_uid
        assert stat.S_IMODE((shown / name).stat().st_mode) == mode
        (shown / name).chmod(0o700)
        os.chown(shown / name, 0, -1)
        assert corner.status(name)["owner"] == "root"
        assert int(corner.status(name)["permission"], 8) == 0o700
    os.utime(shown / "file", ns=(10**18 + 2_000_000, 10**18 + 5_000_000))
    assert corner.status("file")["modificationTime"] == 10**12 + 5
    assert corner.status("file")["accessTime"] == 10**12 + 2
    assert (shown / "file").stat().st_mtime_ns == 10**18 + 5_000_000
    write_all(shown / "file", OLD)  # rewriting keeps owner and mode
    assert corner.status("file")["owner"] == "root"
    assert int(corner.status("file")["permission"], 8) == 0o700
