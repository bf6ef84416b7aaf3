"""What a name is, through a mount: found, absent, gone, refused."""

from __future__ import annotations

import errno
import os
import socket
import stat
import time

import pytest

from turbofs.testing.mounts import workplace
from turbofs.testing.waiting import eventually

pytestmark = pytest.mark.mount


@pytest.fixture(scope="module")
def mount():
    """A mount over a source in which each test makes names of its own. Absent names are never kept anyway."""
    with workplace() as place, place.mount("fs.attribute_timeout=200ms") as made:
        yield made


@pytest.fixture
def corner(mount, request):
    """A new directory of this test: (in the source, in the mount)."""
    name = request.node.name
    (mount.place.source / name).mkdir()
    return mount.place.source / name, mount.path / name


def absent(path):
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    return False


def everything_below(folder):
    """Path, attributes and content of all that *folder* holds: what a change would change."""
    found = []
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else None
        found.append((path, status.st_ino, status.st_mode, status.st_uid, status.st_mtime_ns, content))
    return found


def test_absent_name_is_not_remembered(corner):
    source, shown = corner
    for number in range(20):
        assert not (shown / f"step-{number}").exists()
        (source / f"step-{number}").write_text("new")
        assert (shown / f"step-{number}").read_text() == "new"
    (source / "folder").mkdir()
    assert (shown / "folder").is_dir()


def test_deleted_name_is_gone_after_the_timeout(corner):
    source, shown = corner
    for name in ("deleted", "renamed"):
        (source / name).write_text(name)
        assert (shown / name).exists()
    (source / "folder").mkdir()
    assert (shown / "folder").exists()
    changed = time.monotonic()
    (source / "deleted").unlink()
    (source / "renamed").rename(source / "now")
    (source / "folder").rmdir()
    for name in ("deleted", "renamed", "folder"):
        while True:
            looked = time.monotonic()
            if absent(shown / name):
                break
            # The kernel counts in ticks of up to 10 ms.
            assert looked < changed + 0.2 + 0.02, f"{name} still there after the attribute timeout"
    assert (shown / "now").read_text() == "renamed"
    assert os.listdir(shown) == ["now"]


def test_stat_reports_the_sources_attributes(corner):
    source, shown = corner
    (source / "file").write_bytes(b"12345")
    (source / "file").chmod(0o640)
    os.link(source / "file", source / "link")
    os.utime(source / "file", ns=(1_600_000_000_123_456_789, 1_500_000_000_987_654_321))
    (source / "folder").mkdir(mode=0o750)
    (source / "symlink").symlink_to("file")
    os.mkfifo(source / "pipe")
    for name in ("file", "link", "folder", "symlink", "."):
        theirs, ours = os.lstat(source / name), os.lstat(shown / name)
        for field in ("st_mode", "st_nlink", "st_uid", "st_gid", "st_mtime_ns", "st_ctime_ns", "st_atime_ns"):
            assert getattr(ours, field) == getattr(theirs, field), f"{name}: {field}"
        if not stat.S_ISDIR(ours.st_mode):
            assert ours.st_size == theirs.st_size
    assert os.lstat(shown / "file").st_blocks == 1
    assert not stat.S_ISFIFO(os.lstat(shown / "pipe").st_mode)  # its reader would wait for ever
    with pytest.raises(OSError) as refused:
        (shown / "pipe").read_bytes()
    assert refused.value.errno == errno.ENOTSUP


def test_inode_numbers_are_stable_and_distinct(place):
    for number in range(100):
        folder = place.source / f"d{number % 7}" / f"e{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"f{number}").touch()

    def numbers():
        found = {}
        for folder, folders, files in os.walk(place.mountpoint):
            for entry in os.scandir(folder):
                assert entry.inode() == entry.stat(follow_symlinks=False).st_ino
            for name in folders + files:
                path = os.path.join(folder, name)
                found[path] = os.lstat(path).st_ino
        return found

    with place.mount("fs.attribute_timeout=0s"):
        first = numbers()
        assert len(first) == 100 + 7 + 21
        assert len(set(first.values())) == len(first)
        assert 1 not in first.values()  # the root's own
        assert numbers() == first
    with place.mount():
        assert numbers() == first


def test_symbolic_link_shows_its_target(corner):
    source, shown = corner
    (source / "file").write_text("content")
    targets = {
        "near": "file",
        "dangling": "no/such/file",
        "absolute": "/etc/hostname",
        "up": "../../..",
        "long": "x" * 3000,
    }
    for name, target in targets.items():
        (source / name).symlink_to(target)
    for name, target in targets.items():
        assert os.readlink(shown / name) == target
        assert stat.S_ISLNK(os.lstat(shown / name).st_mode)
    assert (shown / "near").read_text() == "content"
    assert not (shown / "dangling").exists()
    with pytest.raises(OSError) as refused:
        os.readlink(shown / "file")
    assert refused.value.errno == errno.EINVAL


def test_name_that_is_not_utf8_is_found(corner):
    source, shown = corner
    names = [b"\xff\xfe", b"caf\xe9", "café".encode(), b"line\nbreak", b"back\\slash", b" ", b"\x01\x7f", b"x" * 255]
    for name in names:
        path = os.fsencode(source) + b"/" + name
        with open(path, "wb") as file:
            file.write(name)
    assert sorted(os.listdir(os.fsencode(shown))) == sorted(names)
    for name in names:
        with open(os.fsencode(shown) + b"/" + name, "rb") as file:
            assert file.read() == name


def test_long_name_is_refused(corner):
    _, shown = corner
    for name in ("x" * 256, "é" * 128, "x" * 4000):
        with pytest.raises(OSError) as refused:
            os.stat(shown / name)
        assert refused.value.errno == errno.ENAMETOOLONG
    assert absent(shown / ("x" * 255))


def test_file_used_as_a_directory_is_refused(corner):
    source, shown = corner
    (source / "file").write_text("x")
    for act in (lambda: os.stat(shown / "file" / "below"), lambda: os.listdir(shown / "file")):
        with pytest.raises(NotADirectoryError):
            act()
    with pytest.raises(IsADirectoryError):
        open(shown, "rb").close()


@pytest.mark.parametrize("option", ["ro", "read_only=yes"])
def test_changes_are_refused_and_leave_the_source_alone(place, option):
    source, shown = place.source, place.mountpoint
    (source / "file").write_text("content")
    (source / "folder").mkdir()
    (source / "folder" / "inner").write_text("inner")
    (source / "empty").mkdir()
    before = everything_below(source)
    file, new = shown / "file", shown / "new"

    def bind():
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(new))

    acts = [
        lambda: file.open("r+b"),
        lambda: file.open("wb"),
        lambda: file.open("ab"),
        lambda: os.open(file, os.O_RDONLY | os.O_TRUNC),
        lambda: new.open("wb"),
        lambda: os.open(new, os.O_RDONLY | os.O_CREAT),
        lambda: os.truncate(file, 1),
        file.unlink,
        lambda: file.rename(new),
        lambda: (shown / "folder").rename(new),
        lambda: os.rename(file, shown / "folder" / "inner"),
        lambda: os.link(file, new),
        lambda: new.symlink_to("file"),
        new.mkdir,
        (shown / "empty").rmdir,
        lambda: os.mkfifo(new),
        lambda: os.mknod(new, 0o644 | stat.S_IFREG),
        lambda: file.chmod(0o777),
        lambda: shown.chmod(0o700),
        lambda: os.chown(file, 1, 1),
        lambda: os.utime(file, (1, 1)),
        lambda: os.utime(file),
        bind,
    ]
    with place.mount(option):
        for number, act in enumerate(acts):
            with pytest.raises(OSError) as refused:
                act()
            assert refused.value.errno == errno.EROFS, f"act {number}: {refused.value}"
        assert everything_below(source) == before
        assert file.read_text() == "content"


def test_statfs_is_never_zero(mount, place):
    theirs, ours = os.statvfs(mount.place.source), eventually(lambda: known(os.statvfs(mount.path)), "space is known")
    assert ours.f_blocks * ours.f_frsize == pytest.approx(theirs.f_blocks * theirs.f_frsize, rel=0.01)
    assert ours.f_bavail * ours.f_frsize == pytest.approx(theirs.f_bavail * theirs.f_frsize, rel=0.2)
    assert ours.f_files == theirs.f_files
    assert ours.f_namemax == 255
    with place.direct(fail={"acts": ["space"], "error": "NotSupportedError"}) as silent:
        figures = os.statvfs(silent.path)
        assert min(figures.f_blocks, figures.f_bfree, figures.f_bavail, figures.f_files, figures.f_ffree) > 1000
        assert figures.f_bavail * figures.f_frsize >= 1 << 30
        assert figures.f_bsize > 0


def known(figures):
    """*figures*, once they are not those of a source that has not told yet."""
    return figures if figures.f_blocks * figures.f_frsize < 1 << 50 else None
