"""Who may do what on a mount: the source's modes and owners, enforced by the kernel."""

from __future__ import annotations

import errno
import grp
import os
import pwd
from pathlib import Path

import pytest

from turbofs.testing.children import in_child
from turbofs.testing.mounts import workplace

pytestmark = pytest.mark.mount

USER = 54321
"""Of a user and a group that no machine has."""


@pytest.fixture(scope="module")
def mount():
    with workplace() as place, place.mount() as made:
        yield made


@pytest.fixture
def corner(mount, request):
    """A new directory of this test that everybody may search: (in the source, in the mount)."""
    name = request.node.originalname
    (mount.place.source / name).mkdir(exist_ok=True)
    (mount.place.source / name).chmod(0o755)
    return mount.place.source / name, mount.path / name


def put(folder, name, mode, *, owner=0, group=0):
    path = folder / name
    path.write_text(name)
    os.chown(path, owner, group)
    path.chmod(mode)
    return path


def outcome(act):
    """None where *act* works, else its errno."""
    try:
        act()
    except OSError as error:
        return error.errno
    return None


def test_modes_are_the_sources(corner):
    source, shown = corner
    modes = (0o000, 0o400, 0o444, 0o600, 0o640, 0o644, 0o755, 0o777, 0o1777, 0o2755, 0o4711, 0o7777)
    for mode in modes:
        put(source, f"file-{mode:o}", mode)
        (source / f"folder-{mode:o}").mkdir()
        (source / f"folder-{mode:o}").chmod(mode)
    for entry in os.scandir(shown):
        assert entry.stat().st_mode == (source / entry.name).stat().st_mode, entry.name
    assert len(os.listdir(shown)) == 2 * len(modes)


@pytest.mark.parametrize("allow_other", ["yes", "no"])
def test_mode_shuts_a_user_out(place, allow_other):
    put(place.source, "private", 0o600)
    put(place.source, "group", 0o640)
    put(place.source, "public", 0o644)
    (place.source / "closed").mkdir()
    put(place.source / "closed", "public", 0o644)
    (place.source / "closed").chmod(0o700)
    (place.source / "unlisted").mkdir()
    put(place.source / "unlisted", "public", 0o644)
    (place.source / "unlisted").chmod(0o711)
    with place.mount(f"allow_other={allow_other}") as mount:

        def outcomes():
            return {
                "private": outcome((mount.path / "private").read_bytes),
                "group": outcome((mount.path / "group").read_bytes),
                "public": outcome((mount.path / "public").read_bytes),
                "closed/public": outcome((mount.path / "closed" / "public").read_bytes),
                "list closed": outcome(lambda: os.listdir(mount.path / "closed")),
                "unlisted/public": outcome((mount.path / "unlisted" / "public").read_bytes),
                "list unlisted": outcome(lambda: os.listdir(mount.path / "unlisted")),
            }

        assert set(in_child(outcomes).values()) == {None}  # root may all
        open_to_all = None if allow_other == "yes" else errno.EACCES
        expected = dict.fromkeys(outcomes(), errno.EACCES) | {"public": open_to_all, "unlisted/public": open_to_all}
        assert in_child(outcomes, uid=USER) == expected


def test_other_user_reads_what_the_mode_allows(corner):
    source, shown = corner
    put(source, "everybody", 0o644)
    put(source, "own", 0o400, owner=USER)
    put(source, "group", 0o640, group=USER)
    put(source, "others", 0o604)
    names = sorted(os.listdir(source))

    def contents():
        assert sorted(os.listdir(shown)) == names
        return [(shown / name).read_text() for name in names]

    assert in_child(contents, uid=USER) == names


def test_unknown_owner_is_shown_as_nobody(place):
    nobody = (
        int(Path("/proc/sys/kernel/overflowuid").read_text()),
        int(Path("/proc/sys/kernel/overflowgid").read_text()),
    )
    user, group = pwd.getpwnam("daemon"), grp.getgrnam("daemon")
    with place.direct(source="memory:") as mount:
        mount.source.put("/known", owner="daemon", group="daemon")
        mount.source.put("/unknown", owner="hdfs-of-elsewhere", group="people-of-elsewhere")
        mount.source.put("/number", owner="4711", group="4712")
        shown = {entry.name: entry.stat() for entry in os.scandir(mount.path)}
        assert {name: (status.st_uid, status.st_gid) for name, status in shown.items()} == {
            "known": (user.pw_uid, group.gr_gid),
            "unknown": nobody,
            "number": (4711, 4712),
        }
        for name, listed in shown.items():
            assert os.stat(mount.path / name).st_uid == listed.st_uid


def test_access_agrees_with_open(corner):
    source, shown = corner
    for mode in range(0o1000):
        if mode & 0o333 == 0 or mode % 37 == 0:  # all combinations of read bits, and some of the others
            for owner, group in ((0, 0), (USER, 0), (0, USER)):
                put(source, f"{mode:03o}-{owner}-{group}", mode, owner=owner, group=group)

    def disagreements():
        found = []
        for name in os.listdir(shown):
            path = shown / name
            opened = outcome(lambda path=path: os.close(os.open(path, os.O_RDONLY))) is None
            if os.access(path, os.R_OK) != opened:
                found.append(name)
        return found

    assert in_child(disagreements, uid=USER) == []
    assert in_child(disagreements) == []


def test_doctor_points_at_unreadable_files(place):
    put(place.source, "fine.safetensors", 0o644)
    with place.mount() as mount:
        well = place.turbofs("doctor", str(mount.path))
        assert "for their owner alone" not in well.stdout
        (place.source / "step-1000").mkdir()
        put(place.source / "step-1000", "model.safetensors", 0o600)
        ill = place.turbofs("doctor", str(mount.path))
    assert "/step-1000/model.safetensors" in ill.stdout, ill.stdout + ill.stderr
    assert "chmod" in ill.stdout
