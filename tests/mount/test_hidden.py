"""The hidden tree `.turbofs` at a mount's root."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from turbofs.testing.children import in_child
from turbofs.testing.mounts import workplace
from turbofs.wire.control_client import ControlClient

pytestmark = pytest.mark.mount

USER = 54321


@pytest.fixture(scope="module")
def mount():
    with workplace() as place:
        (place.source / "folder").mkdir()
        (place.source / "folder" / "file").write_bytes(b"x" * 5000)
        (place.source / "private").mkdir(mode=0o700)
        (place.source / "private" / "secret").write_text("x")
        (place.source / "link").symlink_to("folder")
        with place.mount() as made:
            yield made


def test_hidden_tree_is_not_listed_and_opens_by_name(mount):
    hidden = mount.path / ".turbofs"
    assert ".turbofs" not in os.listdir(mount.path)
    assert hidden.is_dir()
    assert sorted(os.listdir(hidden)) == ["README", "conflicts", "control", "hints", "stats", "status.json"]
    assert "hints" in (hidden / "README").read_text()
    for nowhere in (
        mount.path / "folder" / ".turbofs",
        hidden / ".turbofs",
        hidden / "no-such",
        hidden / "hints" / ".turbofs",
    ):
        assert not nowhere.exists(), nowhere


def test_stats_and_status_are_well_formed(mount):
    (mount.path / "folder" / "file").read_bytes()
    stats = mount.path / ".turbofs" / "stats"
    families = {family.name: family for family in text_string_to_metric_families(stats.read_text())}
    reads = [sample.value for sample in families["turbofs_read_bytes"].samples if sample.name.endswith("_total")]
    assert sum(reads) >= 5000
    document = json.loads((mount.path / ".turbofs" / "status.json").read_text())
    assert document["mountpoint"] == str(mount.path)
    assert document["source"]["uri"] == mount.place.uri
    with stats.open("rb", buffering=0) as file:  # as it was at the open, however long the reader takes
        first = file.read(100)
        for _ in range(10):
            (mount.path / "folder" / "file").stat()
            stats.read_text()
        rest = file.read()
        file.seek(0)
        assert file.read() == first + rest
        list(text_string_to_metric_families((first + rest).decode()))
    assert stats.stat().st_size > 1000


def test_control_link_leads_to_the_socket(mount):
    link = mount.path / ".turbofs" / "control"
    assert link.is_symlink()
    target = Path(os.readlink(link))
    assert stat.S_ISSOCK(target.stat().st_mode)
    with ControlClient(link) as client:
        answer = client.call("ping")
    assert answer["pid"] == mount.process.pid
    assert answer["mountpoint"] == str(mount.path)


def test_hints_mirror_the_tree_and_take_no_data(mount):
    hints = mount.path / ".turbofs" / "hints"
    assert sorted(os.listdir(hints)) == ["folder", "link", "private"]
    assert os.listdir(hints / "folder") == ["file"]
    assert stat.S_IMODE((hints / "folder").stat().st_mode) == 0o777
    assert (hints / "folder" / "file").stat().st_mode == stat.S_IFREG | 0o666
    assert stat.S_IMODE(hints.stat().st_mode) == 0o777
    assert (hints / "folder" / "file").read_bytes() == b""

    def refusals():
        acts = (
            lambda: (hints / "folder" / "file").open("r+b"),
            lambda: (hints / "folder" / "file").write_bytes(b"data"),
            lambda: (hints / "new").write_bytes(b"data"),
            (hints / "new").mkdir,
            (hints / "folder" / "file").unlink,
            lambda: (hints / "folder" / "file").rename(hints / "other"),
        )
        found = []
        for act in acts:
            try:
                act()
                found.append(0)
            except OSError as error:
                found.append(error.errno)
        return found

    assert set(refusals()) == set(in_child(refusals, uid=USER)) == {errno.EROFS}
    assert (mount.place.source / "folder" / "file").read_bytes() == b"x" * 5000

    def shut_out():
        """The mirror shows no name that the real directory hides."""
        found = []
        for act in (lambda: os.listdir(hints / "private"), lambda: os.stat(hints / "private" / "secret")):
            try:
                act()
                found.append(0)
            except OSError as error:
                found.append(error.errno)
        return found

    assert os.listdir(hints / "private") == ["secret"]
    assert in_child(shut_out, uid=USER) == [errno.EACCES, errno.EACCES]


def test_sources_own_name_does_not_show_through(place):
    (place.source / ".turbofs").mkdir()
    (place.source / ".turbofs" / "theirs").write_text("theirs")
    (place.source / ".turbofs" / "stats").write_text("theirs")
    (place.source / "folder" / ".turbofs").mkdir(parents=True)
    (place.source / "folder" / ".turbofs" / "ordinary").write_text("ordinary")
    with place.mount() as mount:
        assert os.listdir(mount.path) == ["folder"]
        assert not (mount.path / ".turbofs" / "theirs").exists()
        assert "turbofs_requests_total" in (mount.path / ".turbofs" / "stats").read_text()
        assert "theirs" not in os.listdir(mount.path / ".turbofs")
        # Below the root it is a name like any other.
        assert (mount.path / "folder" / ".turbofs" / "ordinary").read_text() == "ordinary"
        assert ".turbofs" not in os.listdir(mount.path / ".turbofs" / "hints")
