"""Names that change through a mount: made, renamed, deleted, given modes, owners and times; and locks on files."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import pwd
import shutil
import stat
import time
from pathlib import Path

import pytest

from turbofs.testing.children import Child, in_child
from turbofs.testing.conformance_base import content
from turbofs.testing.mounts import workplace
from turbofs.testing.waiting import eventually
from turbofs.testing.writing import outcome, write_all

pytestmark = pytest.mark.mount

MIB = 1 << 20
OLD, NEW = content(3 * MIB + 77, seed=1), content(2 * MIB + 5, seed=2)
USER = 54321
"""Of a user and a group that no machine has."""
AT_FDCWD, RENAME_NOREPLACE, RENAME_EXCHANGE = -100, 1, 2
UTIME_NOW, UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2
_libc = ctypes.CDLL(None, use_errno=True)


class Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@pytest.fixture(scope="module")
def mount():
    """A mount whose requests are counted; each test makes names of its own."""
    with workplace() as place, place.direct("memory=256MiB", "fs.attribute_timeout=200ms") as made:
        yield made


@pytest.fixture
def corner(mount, request):
    """A new directory of this test that everybody may change: (in the source, in the mount)."""
    name = request.node.name.replace("[", "-").replace("]", "").replace(" ", "_")
    (mount.place.source / name).mkdir()
    (mount.place.source / name).chmod(0o777)
    return mount.place.source / name, mount.path / name


def rename2(old, new, flags):
    if _libc.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags):
        raise OSError(ctypes.get_errno(), "renameat2", str(old), None, str(new))


def set_times(path, access, modification):
    """utimensat with (seconds, nanoseconds), as `os.utime` cannot say UTIME_OMIT."""
    times = (Timespec * 2)(Timespec(*access), Timespec(*modification))
    if _libc.utimensat(AT_FDCWD, os.fsencode(path), times, 0):
        raise OSError(ctypes.get_errno(), "utimensat", str(path))


def names(*folders):
    """The names in each of these directories, which must be the same in all."""
    found = [sorted(os.listdir(folder)) for folder in folders]
    assert all(each == found[0] for each in found), found
    return found[0]


def asked(mount, shown, acts):
    """Which of *acts* the source was asked for at or below *shown*: (act, path there)."""
    top = f"/{shown.relative_to(mount.path)}"
    return [
        (each.act, each.path[len(top) :])
        for each in mount.source.requests()
        if each.act in acts and each.path.startswith(top)
    ]


def test_directories_are_made_and_removed(corner):
    source, shown = corner
    (shown / "a" / "b" / "c").mkdir(parents=True)
    assert (source / "a" / "b" / "c").is_dir()
    assert (shown / "a" / "b").stat().st_nlink >= 2
    for name, number in (("a", errno.EEXIST), ("none/x", errno.ENOENT), ("x" * 256, errno.ENAMETOOLONG)):
        assert outcome(os.mkdir, shown / name) == number
    (source / "file").touch()
    assert outcome(os.mkdir, shown / "file") == errno.EEXIST
    assert outcome(os.mkdir, shown / "file" / "x") == errno.ENOTDIR
    assert outcome(os.rmdir, shown / "a") == errno.ENOTEMPTY
    assert outcome(os.rmdir, shown / "none") == errno.ENOENT
    assert outcome(os.rmdir, shown / "file") == errno.ENOTDIR
    for name in ("a/b/c", "a/b", "a"):
        os.rmdir(shown / name)
    assert not (source / "a").exists()
    assert names(source, shown) == ["file"]


def test_files_are_deleted(corner):
    source, shown = corner
    write_all(shown / "own", NEW)
    (source / "theirs").write_bytes(OLD)
    (source / "folder").mkdir()
    for name in ("own", "theirs"):
        (shown / name).unlink()
        assert not (shown / name).exists()
        assert not (source / name).exists()
        assert outcome(os.unlink, shown / name) == errno.ENOENT
    assert outcome(os.unlink, shown / "folder") == errno.EISDIR
    write_all(shown / "own", OLD)  # the name is free again
    assert (source / "own").read_bytes() == OLD
    shutil.rmtree(shown / "folder")
    assert names(source, shown) == ["own"]


@pytest.mark.parametrize("kind", ["being written", "own", "theirs"])
def test_deleted_open_file_stays_readable_and_writable(corner, kind):
    source, shown = corner
    if kind == "theirs":
        (source / "file").write_bytes(NEW)
    elif kind == "own":
        write_all(shown / "file", NEW)
    fd = os.open(shown / "file", os.O_RDWR | os.O_CREAT, 0o644)
    if kind == "being written":
        os.write(fd, NEW)
    (shown / "file").unlink()
    assert not (shown / "file").exists()
    assert not (source / "file").exists()
    assert os.fstat(fd).st_size == len(NEW)
    assert os.pread(fd, len(NEW), 0) == NEW
    os.pwrite(fd, b"changed", MIB)
    os.ftruncate(fd, MIB + 7)
    assert os.pread(fd, 10, MIB) == b"changed"
    write_all(shown / "file", OLD)  # another file takes the name
    assert os.pread(fd, MIB + 100, 0) == NEW[:MIB] + b"changed"
    os.close(fd)
    assert (source / "file").read_bytes() == (shown / "file").read_bytes() == OLD
    eventually(lambda: os.listdir(source) == ["file"], "nothing of the deleted file is left")


@pytest.mark.parametrize("target", ["none", "own", "theirs"])
def test_rename_takes_the_name_in_one_step(mount, corner, target):
    """`model.tmp` → `model`, as every trainer saves: the old file or the new, at every moment."""
    source, shown = corner
    if target == "own":
        write_all(shown / "model", OLD)
    elif target == "theirs":
        (source / "model").write_bytes(OLD)
    write_all(shown / "model.tmp", NEW)
    mount.source.forget_requests()
    os.replace(shown / "model.tmp", shown / "model")
    assert names(source, shown) == ["model"]
    assert (source / "model").read_bytes() == (shown / "model").read_bytes() == NEW
    changes = asked(mount, shown, {"rename", "delete", "create"})
    assert changes == [("rename", "/model.tmp")], "one act of the source, never delete and rename"
    assert outcome(os.rename, shown / "model.tmp", shown / "model") == errno.ENOENT


def test_rename_of_open_files(corner):
    """The file keeps being written and read, whatever it is called."""
    source, shown = corner
    (source / "theirs").write_bytes(OLD)
    writing = os.open(shown / "model.tmp", os.O_RDWR | os.O_CREAT, 0o644)
    os.write(writing, NEW[:MIB])
    reading = os.open(shown / "theirs", os.O_RDONLY)
    os.rename(shown / "model.tmp", shown / "model")
    os.rename(shown / "theirs", shown / "renamed")
    assert (shown / "model").stat().st_size == MIB
    assert not (shown / "model.tmp").exists()
    os.write(writing, NEW[MIB:])
    assert os.pread(writing, len(NEW), 0) == (shown / "model").read_bytes() == NEW
    assert os.pread(reading, len(OLD), 0) == OLD
    os.close(writing)
    os.close(reading)
    assert (source / "model").read_bytes() == (shown / "model").read_bytes() == NEW
    assert names(source, shown) == ["model", "renamed"]


@pytest.mark.parametrize("mode", ["reading", "writing"])
def test_replaced_open_file_stays_readable(corner, mode):
    source, shown = corner
    (source / "model").write_bytes(OLD)
    fd = os.open(shown / "model", os.O_RDONLY if mode == "reading" else os.O_RDWR)
    number = os.fstat(fd).st_ino
    if mode == "writing":
        os.pwrite(fd, b"x", 0)
    write_all(shown / "model.tmp", NEW)
    os.replace(shown / "model.tmp", shown / "model")
    expected = OLD if mode == "reading" else b"x" + OLD[1:]
    assert os.pread(fd, len(OLD) + 1, 0) == expected
    assert os.fstat(fd).st_ino == number != (shown / "model").stat().st_ino
    os.close(fd)
    assert (source / "model").read_bytes() == (shown / "model").read_bytes() == NEW
    eventually(lambda: os.listdir(source) == ["model"], "nothing of the replaced file is left")


def test_rename_without_replacing(corner):
    source, shown = corner
    write_all(shown / "a", OLD)
    write_all(shown / "b", NEW)
    (source / "theirs").write_bytes(b"theirs")
    assert outcome(rename2, shown / "a", shown / "b", RENAME_NOREPLACE) == errno.EEXIST
    assert outcome(rename2, shown / "a", shown / "theirs", RENAME_NOREPLACE) == errno.EEXIST
    assert outcome(rename2, shown / "a", shown / "b", RENAME_EXCHANGE) == errno.EINVAL
    assert [(source / name).read_bytes() for name in ("a", "b")] == [OLD, NEW]
    rename2(shown / "a", shown / "c", RENAME_NOREPLACE)
    assert names(source, shown) == ["b", "c", "theirs"]
    fd = os.open(shown / "open", os.O_WRONLY | os.O_CREAT)  # a name that only this mount knows so far is taken, too
    assert outcome(rename2, shown / "c", shown / "open", RENAME_NOREPLACE) == errno.EEXIST
    os.close(fd)
    assert (shown / "c").read_bytes() == OLD


def test_directory_is_renamed_by_one_request(mount, corner):
    source, shown = corner
    (source / "step.tmp" / "deep").mkdir(parents=True)
    for number in range(20):
        (source / "step.tmp" / f"{number}").write_bytes(b"%d" % number)
    write_all(shown / "step.tmp" / "deep" / "own", NEW)
    reading = os.open(shown / "step.tmp" / "7", os.O_RDONLY)
    writing = os.open(shown / "step.tmp" / "late", os.O_RDWR | os.O_CREAT)
    os.write(writing, b"half")
    mount.source.forget_requests()
    os.rename(shown / "step.tmp", shown / "step")
    assert asked(mount, shown, {"rename", "create", "delete", "make_directory"}) == [("rename", "/step.tmp")]
    assert names(source, shown) == ["step"]
    assert os.pread(reading, 10, 0) == b"7"
    assert os.listdir(shown / "step" / "deep") == ["own"]
    assert (shown / "step" / "deep" / "own").read_bytes() == NEW
    assert (shown / "step" / "late").read_bytes() == b"half"
    os.write(writing, b" and the rest")
    os.close(writing)
    os.close(reading)
    assert (source / "step" / "late").read_bytes() == b"half and the rest"
    assert len(names(source / "step", shown / "step")) == 22


def test_renames_that_cannot_be_are_refused(corner):
    source, shown = corner
    (source / "full" / "inner").mkdir(parents=True)
    (source / "other" / "x").mkdir(parents=True)
    (source / "empty").mkdir()
    (source / "file").write_bytes(OLD)
    before = sorted(source.rglob("*"))
    for old, new, numbers in (
        ("other", "full", {errno.ENOTEMPTY, errno.EEXIST}),
        ("full", "full/inner/below", {errno.EINVAL}),
        ("full", "full/inside", {errno.EINVAL}),
        ("full", "file", {errno.ENOTDIR}),
        ("file", "empty", {errno.EISDIR}),
        ("none", "file", {errno.ENOENT}),
        ("file", "none/x", {errno.ENOENT}),
        ("file/x", "y", {errno.ENOTDIR}),
        ("file", "x" * 256, {errno.ENAMETOOLONG}),
    ):
        assert outcome(os.rename, shown / old, shown / new) in numbers, (old, new)
    assert sorted(source.rglob("*")) == before
    assert outcome(os.rename, shown / "file", shown.parent / ".turbofs" / "file") in {
        errno.EXDEV,
        errno.EROFS,
        errno.EACCES,
    }
    assert outcome(os.rename, shown / "file", shown / "file") is None
    os.rename(shown / "full", shown / "empty")  # an empty directory may be replaced
    assert sorted(os.listdir(source)) == sorted(os.listdir(shown)) == ["empty", "file", "other"]
    assert os.listdir(shown / "empty") == ["inner"]


def test_one_of_two_renamers_loses_with_the_exact_error(corner):
    source, shown = corner
    for turn in range(10):
        (source / f"from-{turn}").mkdir()
        (source / f"from-{turn}" / "inside").touch()

    def rename(number):
        return [outcome(os.rename, shown / f"from-{turn}", shown / f"to-{turn}-{number}") for turn in range(10)]

    movers = [Child(lambda number=number: rename(number)) for number in range(2)]
    results = []
    for mover in movers:
        with mover:
            results.append(mover.result())
    for pair in zip(*results, strict=True):
        assert sorted(pair, key=str) == [errno.ENOENT, None]
    assert len(names(source, shown)) == 10


def test_changes_show_at_once_to_every_process(mount, corner):
    """Nobody on the node waits for the attribute timeout, and what is open keeps its listing honest."""
    source, shown = corner

    def there():
        return in_child(lambda: sorted(os.listdir(shown)))

    for turn in range(5):
        write_all(shown / "file", b"%d" % turn)
        assert there() == ["file"]
        assert in_child((shown / "file").read_bytes) == b"%d" % turn
        os.rename(shown / "file", shown / "renamed")
        assert there() == ["renamed"]
        (shown / "folder").mkdir()
        assert there() == ["folder", "renamed"]
        (shown / "renamed").unlink()
        (shown / "folder").rmdir()
        assert there() == []
        assert not in_child((shown / "renamed").exists)
    fd = os.open(shown / "new", os.O_WRONLY | os.O_CREAT)
    assert there() == ["new"], "a file is listed from its creation on, and nothing beside it"
    os.close(fd)
    assert os.listdir(source) == ["new"]


def test_symbolic_links_are_made(corner):
    source, shown = corner
    targets = {
        "near": "file",
        "dangling": "no/such",
        "absolute": "/etc/hostname",
        "bytes": "\udcff\udcfe",
        "long": "x" * 3000,
    }
    for name, target in targets.items():
        (shown / name).symlink_to(target)
        assert os.readlink(source / name) == os.readlink(shown / name) == target
        assert (shown / name).lstat().st_size == len(os.fsencode(target))
    assert outcome(os.symlink, "x", shown / "near") == errno.EEXIST
    write_all(shown / "near", NEW)  # through the link
    assert (source / "file").read_bytes() == NEW
    (shown / "near").unlink()
    os.rename(shown / "dangling", shown / "moved")
    assert os.readlink(source / "moved") == "no/such"
    assert (shown / "file").read_bytes() == NEW


def test_hard_links_are_not_supported(corner):
    source, shown = corner
    write_all(shown / "file", NEW)
    assert outcome(os.link, shown / "file", shown / "link") == errno.ENOTSUP
    assert outcome(os.mkfifo, shown / "pipe") == errno.ENOTSUP
    assert names(source, shown) == ["file"]


def test_modes_are_what_was_asked_for(corner):
    source, shown = corner
    for umask in (0o000, 0o022, 0o027, 0o077):

        def create(umask=umask):
            os.umask(umask)
            os.close(os.open(shown / f"file-{umask:o}", os.O_WRONLY | os.O_CREAT, 0o666))
            os.close(os.open(shown / f"run-{umask:o}", os.O_WRONLY | os.O_CREAT, 0o777))
            os.mkdir(shown / f"folder-{umask:o}", 0o777)

        in_child(create)
        for name, mode in (("file", 0o666), ("run", 0o777), ("folder", 0o777)):
            for root in (source, shown):
                assert stat.S_IMODE((root / f"{name}-{umask:o}").stat().st_mode) == mode & ~umask
    fd = os.open(shown / "file-0", os.O_WRONLY)
    os.write(fd, NEW)
    os.fchmod(fd, 0o600)  # of a file that is being written
    assert stat.S_IMODE((shown / "file-0").stat().st_mode) == 0o600
    os.close(fd)
    for mode in (0o400, 0o640, 0o755, 0o1777, 0o2755):
        for name in ("file-0", "folder-0"):
            (shown / name).chmod(mode)
            for root in (source, shown):
                assert stat.S_IMODE((root / name).stat().st_mode) == mode
    write_all(shown / "run-0", OLD)  # rewriting keeps the mode
    assert stat.S_IMODE((source / "run-0").stat().st_mode) == 0o777


def test_owners_are_who_wrote(corner):
    source, shown = corner

    def create():
        write_all(shown / "own", NEW)
        (shown / "folder").mkdir()
        (shown / "link").symlink_to("own")
        assert outcome(os.chown, shown / "own", 0, 0) == errno.EPERM
        os.chmod(shown / "own", 0o600)
        return [(shown / name).lstat().st_uid for name in ("own", "folder", "link")]

    assert in_child(create, uid=USER) == [USER] * 3
    for name in ("own", "folder", "link"):
        for root in (source, shown):
            assert ((root / name).lstat().st_uid, (root / name).lstat().st_gid) == (USER, USER), name
    daemon = pwd.getpwnam("daemon")
    for name in ("own", "folder"):
        os.chown(shown / name, daemon.pw_uid, -1)
        assert (source / name).stat().st_uid == (shown / name).stat().st_uid == daemon.pw_uid
        assert (source / name).stat().st_gid == USER
        os.chown(shown / name, -1, daemon.pw_gid)
        assert (source / name).stat().st_gid == (shown / name).stat().st_gid == daemon.pw_gid
    write_all(shown / "own", OLD)  # by root: the file stays its owner's
    assert (source / "own").stat().st_uid == daemon.pw_uid
    assert stat.S_IMODE((source / "own").stat().st_mode) == 0o600
    assert (source / "own").read_bytes() == OLD


def test_modes_shut_other_users_out_of_changes(corner):
    source, shown = corner
    (source / "file").write_bytes(OLD)
    (source / "file").chmod(0o644)
    (source / "folder").mkdir(mode=0o755)
    (source / "folder" / "inside").touch()
    (source / "sticky").mkdir()
    (source / "sticky").chmod(0o1777)
    (source / "sticky" / "theirs").touch()

    def refusals():
        return [
            outcome(act)
            for act in (
                lambda: os.open(shown / "file", os.O_WRONLY),
                lambda: os.open(shown / "folder" / "new", os.O_WRONLY | os.O_CREAT),
                lambda: os.truncate(shown / "file", 0),
                (shown / "folder" / "inside").unlink,
                (shown / "folder" / "new").mkdir,
                lambda: os.rename(shown / "folder" / "inside", shown / "inside"),
            )
        ]

    assert in_child(refusals, uid=USER) == [errno.EACCES] * 6
    assert in_child(lambda: outcome((shown / "file").chmod, 0o777), uid=USER) == errno.EPERM
    assert in_child(lambda: outcome((shown / "sticky" / "theirs").unlink), uid=USER) in {errno.EPERM, errno.EACCES}
    assert (source / "file").read_bytes() == OLD
    assert (source / "folder" / "inside").exists()


def test_times_are_set(corner):
    source, shown = corner
    write_all(shown / "file", NEW)
    (shown / "folder").mkdir()
    for name in ("file", "folder"):
        os.utime(shown / name, ns=(10**18 + 123_456_789, 10**18 + 987_654_321))
        for root in (source, shown):
            assert (root / name).stat().st_mtime_ns == 10**18 + 987_654_321
            assert (root / name).stat().st_atime_ns == 10**18 + 123_456_789
        set_times(shown / name, (0, UTIME_OMIT), (1_600_000_000, 5))
        assert (source / name).stat().st_mtime_ns == (shown / name).stat().st_mtime_ns == 1_600_000_000 * 10**9 + 5
        assert (source / name).stat().st_atime_ns == 10**18 + 123_456_789
        set_times(shown / name, (1_500_000_000, 0), (0, UTIME_OMIT))
        assert (source / name).stat().st_atime_ns == 1_500_000_000 * 10**9
        assert (source / name).stat().st_mtime_ns == 1_600_000_000 * 10**9 + 5
        before = time.time_ns()
        set_times(shown / name, (0, UTIME_OMIT), (0, UTIME_NOW))
        assert abs((source / name).stat().st_mtime_ns - before) < 60 * 10**9
        assert (source / name).stat().st_mtime_ns == (shown / name).stat().st_mtime_ns
    fd = os.open(shown / "copied", os.O_WRONLY | os.O_CREAT)  # as `cp -p` does it, before the close
    os.write(fd, NEW)
    os.utime(fd, ns=(10**18, 10**18 + 1))
    assert os.fstat(fd).st_mtime_ns == 10**18 + 1
    os.close(fd)
    assert (source / "copied").stat().st_mtime_ns == (shown / "copied").stat().st_mtime_ns == 10**18 + 1


def test_other_extended_attributes_are_not_supported(corner):
    source, shown = corner
    write_all(shown / "file", NEW)
    for target in (shown / "file", shown):
        for name in ("user.mime_type", "user.turbofs.no_such", "trusted.mine"):
            assert outcome(os.setxattr, target, name, b"value") == errno.ENOTSUP
    assert os.listxattr(source / "file") == []


# --- locks


def lock(path: Path, kind: str, *, wait: bool):
    """Take an exclusive lock and keep it while the process lives; an errno where it is taken."""
    fd = os.open(path, os.O_RDWR)
    take = fcntl.flock if kind == "flock" else fcntl.lockf
    return outcome(take, fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


@pytest.mark.parametrize("kind", ["flock", "posix"])
def test_locks_hold_between_processes_of_the_node(corner, kind):
    source, shown = corner
    write_all(shown / "file", NEW)
    fd = os.open(shown / "file", os.O_RDWR)
    take = fcntl.flock if kind == "flock" else fcntl.lockf
    take(fd, fcntl.LOCK_EX)
    assert in_child(lambda: lock(shown / "file", kind, wait=False)) in {errno.EAGAIN, errno.EACCES}
    with Child(lambda: lock(shown / "file", kind, wait=True)) as waiting:
        assert not waiting.gone
        os.write(fd, b"under the lock")
        take(fd, fcntl.LOCK_UN)
        assert waiting.result() is None
    assert in_child(lambda: lock(shown / "file", kind, wait=False)) is None  # gone with its holder
    os.close(fd)
    assert (source / "file").read_bytes() == b"under the lock" + NEW[14:]
