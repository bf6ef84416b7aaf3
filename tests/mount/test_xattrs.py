"""Hints and derived values as extended attributes of a real mount."""

from __future__ import annotations

import errno
import json
import os
import subprocess

import pytest
from blake3 import blake3

from turbofs.fs.hint_catalogue import CATALOGUE, DERIVED_LIMIT_BYTES, VALUE_LIMIT_BYTES
from turbofs.testing.children import in_child
from turbofs.testing.conformance_base import content
from turbofs.testing.mounts import workplace
from turbofs.testing.waiting import eventually

pytestmark = pytest.mark.mount

MIB = 1 << 20
USER, ANOTHER = 54321, 54322
PREFETCH, LAST_ERROR, STATUS = "user.turbofs.prefetch", "user.turbofs.last_error", "user.turbofs.status"
BLAKE3, SERVED_FROM = "user.turbofs.blake3", "user.turbofs.served_from"


@pytest.fixture(scope="module")
def mount():
    with workplace() as place, place.direct("memory=256MiB", "fs.attribute_timeout=30s") as made:
        yield made


@pytest.fixture
def corner(mount, request):
    """A new directory of this test: (in the source, in the mount)."""
    name = request.node.name
    (mount.place.source / name).mkdir()
    return mount.place.source / name, mount.path / name


def outcome(act, *arguments):
    """None where *act* works, else its errno."""
    try:
        act(*arguments)
    except OSError as error:
        return error.errno
    return None


def ranges_read(mount, path):
    """What was read of *path* in the mount, adjacent ranges joined."""
    joined = []
    for _, _, start, stop in sorted(mount.source.requests("read", f"/{path.relative_to(mount.path)}")):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], stop)
        else:
            joined.append([start, stop])
    return joined


def status(path):
    return json.loads(os.getxattr(path, STATUS))


def test_prefetch_hint_fetches_before_the_first_read(mount, corner):
    source, shown = corner
    data = content(6 * MIB + 5)
    for name in ("all", "ranges"):
        (source / name).write_bytes(data)
    os.setxattr(shown / "all", PREFETCH, b"all")
    eventually(lambda: ranges_read(mount, shown / "all") == [[0, len(data)]], "all is fetched")
    os.setxattr(shown / "ranges", PREFETCH, b"ranges=1MiB+64KiB;3MiB+1MiB")
    wanted = [[MIB, MIB + 65536], [3 * MIB, 4 * MIB]]
    eventually(lambda: ranges_read(mount, shown / "ranges") == wanted, "the ranges are fetched")
    eventually(lambda: status(shown / "all")["prefetches"][-1]["state"] == "done", "the job has ended")
    eventually(lambda: status(shown / "ranges")["cached_ranges"] == wanted, "they have arrived")
    mount.source.forget_requests()
    assert (shown / "all").read_bytes() == data
    fd = os.open(shown / "ranges", os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # the kernel would ask for what follows as well
    assert os.pread(fd, 65536, MIB) == data[MIB : MIB + 65536]
    assert os.pread(fd, MIB, 3 * MIB) == data[3 * MIB : 4 * MIB]
    os.close(fd)
    assert mount.source.requests("read") == []


def test_hint_is_inherited_and_the_nearest_wins(mount, corner):
    source, shown = corner
    (source / "far" / "near" / "deep").mkdir(parents=True)
    os.setxattr(shown / "far", PREFETCH, b"ranges=0+1MiB")
    os.setxattr(shown / "far" / "near", PREFETCH, b"ranges=2MiB+1MiB")
    expected = {
        shown / "far" / "file": [[0, MIB]],
        shown / "far" / "short": [[0, 1000]],  # clipped to the file
        shown / "far" / "near" / "deep" / "file": [[2 * MIB, 3 * MIB]],
        shown / "far" / "near" / "own": [[0, 4096]],
        shown / "outside": [],
    }
    for path in expected:  # also what appears after the hint
        (source / path.relative_to(shown)).write_bytes(content(1000 if path.name == "short" else 4 * MIB))
    os.setxattr(shown / "far" / "near" / "own", PREFETCH, b"ranges=0+4KiB")
    for path, wanted in expected.items():
        with path.open("rb"):
            eventually(lambda path=path, wanted=wanted: ranges_read(mount, path) == wanted, f"{path} is prefetched")
    in_force = status(shown / "far" / "near" / "deep" / "file")["hints"][PREFETCH]
    assert in_force["value"] == "ranges=2MiB+1MiB"
    assert in_force["set_on"] == f"/{shown.name}/far/near"
    os.removexattr(shown / "far" / "near", PREFETCH)
    assert status(shown / "far" / "near" / "deep" / "file")["hints"][PREFETCH]["value"] == "ranges=0+1MiB"
    os.removexattr(shown / "far", PREFETCH)
    assert status(shown / "far" / "near" / "deep" / "file")["hints"] == {}


@pytest.mark.parametrize("where", ["itself", "mirror"])
def test_bad_hint_is_refused_and_explained(mount, corner, where):
    source, shown = corner
    (source / "file").write_bytes(bytes(5000))
    if where == "mirror":
        shown = mount.path / ".turbofs" / "hints" / shown.name
    for target in (shown / "file", shown):
        bad = [b"", b"everything", b"ALL", b"ranges=", b"ranges=0", b"ranges=-1+5", b"ranges=0+0", b"ranges=0+1TB",
               b"ranges=99999999999999999999+1", b"all,all", b"\xff\xfe", b"size=5", b"ranges=0+1,colour=red"]  # fmt: skip
        if target.name == "file":
            bad += [b"ranges=5000+1", b"ranges=0+5001", b"ranges=0+1;4KiB+4KiB"]
        for value in bad:
            assert outcome(os.setxattr, target, PREFETCH, value) == errno.EINVAL, value
            assert PREFETCH in os.getxattr(target, LAST_ERROR).decode()
        assert outcome(os.getxattr, target, PREFETCH) == errno.ENODATA
        os.setxattr(target, PREFETCH, b"ranges=0+1KiB")
        assert outcome(os.getxattr, target, LAST_ERROR) == errno.ENODATA
        assert outcome(os.setxattr, target, PREFETCH, b"nonsense") == errno.EINVAL
        assert os.getxattr(target, PREFETCH) == b"ranges=0+1KiB"
    assert outcome(os.setxattr, shown / "file", PREFETCH, b"tensors=model.*") == errno.ENOTSUP


def test_unknown_and_planned_attributes_are_not_supported(corner):
    source, shown = corner
    (source / "file").touch()
    planned = [spec.attribute for spec in CATALOGUE.values() if not spec.works]
    assert len(planned) > 5
    for target in (shown / "file", shown):
        for name in (*planned, "user.turbofs.no_such", "user.turbofs.", "user.mime_type", "user.xdg.origin.url"):
            assert outcome(os.getxattr, target, name) == errno.ENOTSUP, name
            assert outcome(os.setxattr, target, name, b"value") == errno.ENOTSUP, name
            assert outcome(os.removexattr, target, name) == errno.ENOTSUP, name
        for spec in CATALOGUE.values():
            if spec.works and not spec.settable:
                assert outcome(os.setxattr, target, spec.attribute, b"value") == errno.EINVAL, spec.attribute
    assert os.listxattr(shown / "file") == []


def test_foreign_attributes_are_answered_from_memory(mount, corner):
    source, shown = corner
    (source / "file").touch()
    os.stat(shown / "file")
    mount.source.forget_requests()
    mount.source.hold()

    def ask():
        path = shown / "file"
        names = ("security.capability", "security.selinux", "trusted.overlay.opaque", "system.posix_acl_access")
        return (
            {outcome(os.getxattr, path, name) for name in names},
            outcome(os.setxattr, path, "trusted.mine", b"value"),
            outcome(os.removexattr, path, "trusted.mine"),
            os.listxattr(path),
        )

    try:
        got, put, removed, listed = in_child(ask, limit_s=20)
    finally:
        mount.source.release()
    assert got <= {errno.ENODATA, errno.ENOTSUP}
    assert (put, removed, listed) == (errno.ENOTSUP, errno.ENODATA, [])
    assert [each for each in mount.source.requests() if each.act != "space"] == []


def test_listing_attributes_names_only_what_is_set(corner, tmp_path):
    source, shown = corner
    (source / "file").write_bytes(b"data")
    assert os.listxattr(shown / "file") == []
    os.setxattr(shown, PREFETCH, b"all")
    assert os.listxattr(shown) == [PREFETCH]
    assert os.listxattr(shown / "file") == []  # holds for it, and is not set on it
    subprocess.run(["cp", "-a", shown / "file", tmp_path / "copy"], check=True, timeout=60)
    assert (tmp_path / "copy").read_bytes() == b"data"
    assert os.listxattr(tmp_path / "copy") == []
    os.setxattr(shown / "file", PREFETCH, b"all")
    assert os.listxattr(shown / "file") == [PREFETCH]
    os.removexattr(shown / "file", PREFETCH)
    assert os.listxattr(shown / "file") == []
    assert outcome(os.removexattr, shown / "file", PREFETCH) == errno.ENODATA


def test_reader_gives_hints_through_the_hidden_tree(mount, corner):
    source, shown = corner
    source.chmod(0o755)
    (source / "file").write_bytes(content(3 * MIB))
    (source / "private").write_bytes(b"x")
    (source / "private").chmod(0o600)
    mirror = mount.path / ".turbofs" / "hints" / shown.name

    def give():
        return (
            outcome(os.setxattr, shown / "file", PREFETCH, b"all"),
            outcome(os.setxattr, mirror / "file", PREFETCH, b"ranges=1MiB+1MiB"),
            os.getxattr(mirror / "file", PREFETCH),
            os.listxattr(mirror / "file"),
            status(shown / "file")["hints"],
            outcome(os.setxattr, mirror / "private", PREFETCH, b"all"),
        )

    itself, through, value, names, in_force, private = in_child(give, uid=USER)
    assert itself == errno.EACCES
    assert (through, value, names) == (None, b"ranges=1MiB+1MiB", [PREFETCH])
    assert in_force[PREFETCH]["own"] is True
    assert private == errno.EACCES
    eventually(lambda: ranges_read(mount, shown / "file") == [[MIB, 2 * MIB]], "what the reader asked for is fetched")

    def others():
        return (
            outcome(os.getxattr, mirror / "file", PREFETCH),
            os.listxattr(mirror / "file"),
            status(shown / "file")["hints"],
        )

    assert in_child(others) == in_child(others, uid=ANOTHER) == (errno.ENODATA, [], {})
    in_child(lambda: os.removexattr(mirror / "file", PREFETCH), uid=USER)
    assert in_child(others, uid=USER) == (errno.ENODATA, [], {})


@pytest.mark.parametrize("end", ["unmounted", "killed"])
def test_hints_survive_a_restart(place, end):
    (place.source / "folder").mkdir()
    (place.source / "folder" / "file").write_bytes(content(100_000))
    mirror = place.mountpoint / ".turbofs" / "hints" / "folder" / "file"
    with place.mount() as mount:
        os.setxattr(mount.path / "folder", PREFETCH, b"all")
        os.setxattr(mount.path / "folder" / "file", PREFETCH, b"ranges=0+64KiB")
        in_child(lambda: os.setxattr(mirror, PREFETCH, b"ranges=1KiB+1KiB"), uid=USER)
        if end == "killed":
            mount.process.kill()
            mount.process.wait()
    with place.mount() as mount:
        assert os.getxattr(mount.path / "folder", PREFETCH) == b"all"
        assert os.getxattr(mount.path / "folder" / "file", PREFETCH) == b"ranges=0+64KiB"
        assert in_child(lambda: os.getxattr(mirror, PREFETCH), uid=USER) == b"ranges=1KiB+1KiB"
        assert outcome(os.getxattr, mirror, PREFETCH) == errno.ENODATA


def test_status_of_a_file_with_many_extents_stays_small(corner):
    source, shown = corner
    with (source / "file").open("wb") as file:
        file.truncate(128 * MIB)
    value = b"ranges=" + b";".join(b"%d+1" % (number * 16384 + 1) for number in range(5800))
    assert DERIVED_LIMIT_BYTES < len(value) < VALUE_LIMIT_BYTES
    os.setxattr(shown / "file", PREFETCH, value)

    def done():
        document = os.getxattr(shown / "file", STATUS)
        assert len(document) <= DERIVED_LIMIT_BYTES
        return json.loads(document)["prefetches"][-1]["state"] == "done"

    eventually(done, "all ranges are fetched", limit_s=60)
    os.removexattr(shown / "file", PREFETCH)
    document = status(shown / "file")
    assert len(document["cached_ranges"]) + document["cached_ranges_omitted"] == 5800
    assert len(document["cached_ranges"]) > 1000


def test_digest_is_of_this_version_or_absent(mount, corner):
    source, shown = corner
    old, new = content(5 * MIB + 3, seed=1), content(5 * MIB + 3, seed=2)
    (source / "file").write_bytes(old)
    assert outcome(os.getxattr, shown / "file", BLAKE3) == errno.ENODATA
    os.setxattr(shown / "file", PREFETCH, b"all")
    eventually(lambda: outcome(os.getxattr, shown / "file", BLAKE3) is None, "the digest is known")
    assert os.getxattr(shown / "file", BLAKE3).decode() == blake3(old).hexdigest()
    assert os.getxattr(shown / "file", BLAKE3).decode() == blake3(old).hexdigest()  # remembered
    (source / "other").write_bytes(new)
    os.utime(source / "other", ns=((source / "file").stat().st_atime_ns, (source / "file").stat().st_mtime_ns))
    os.replace(source / "other", source / "file")
    with (shown / "file").open("rb"):
        seen = outcome(os.getxattr, shown / "file", BLAKE3)
        assert seen == errno.ENODATA or os.getxattr(shown / "file", BLAKE3).decode() == blake3(new).hexdigest()
    assert (shown / "file").read_bytes() == new
    eventually(lambda: outcome(os.getxattr, shown / "file", BLAKE3) is None, "the new digest is known")
    assert os.getxattr(shown / "file", BLAKE3).decode() == blake3(new).hexdigest()
    with (source / "file").open("r+b") as file:
        file.write(b"changed in place")
    with (shown / "file").open("rb") as file:
        file.read(1)
    changed = (source / "file").read_bytes()
    assert (shown / "file").read_bytes() == changed
    eventually(lambda: outcome(os.getxattr, shown / "file", BLAKE3) is None, "the digest is known again")
    assert os.getxattr(shown / "file", BLAKE3).decode() == blake3(changed).hexdigest()


def test_served_from_names_the_source(mount, corner):
    source, shown = corner
    (source / "file").touch()
    for target in (shown / "file", shown, mount.path / ".turbofs" / "hints" / shown.name / "file"):
        assert mount.place.uri in os.getxattr(target, SERVED_FROM).decode()
