"""Writing through a mount of an object store: whole objects, and nothing weaker in place of what it cannot do."""

from __future__ import annotations

import errno
import os

import pytest
from pyarrow import fs

from turbofs.testing.children import in_child
from turbofs.testing.conformance_base import content
from turbofs.testing.mounts import workplace
from turbofs.testing.s3_server import CREDENTIALS, REGION, S3Server
from turbofs.testing.waiting import eventually
from turbofs.testing.writing import acknowledge, durability, outcome, write_all, write_fd

pytestmark = pytest.mark.mount

MIB = 1 << 20
OLD, NEW = content(MIB + 77, seed=1), content(12 * MIB + 5, seed=2)


@pytest.fixture(scope="module")
def mount():
    with S3Server() as server, workplace() as place:
        bucket = server.make_bucket()
        place.environment.update(CREDENTIALS)
        options = (f"source.s3_endpoint={server.endpoint}", f"source.s3_region={REGION}", "write.drain=1s")
        with place.direct(*options, source=f"s3://{bucket}") as made:
            made.bucket = (server, bucket)
            yield made


@pytest.fixture
def store(mount):
    """What another client of the bucket does."""
    yield Store(*mount.bucket)
    mount.source.heal()
    mount.source.release()


class Store:
    def __init__(self, server, bucket):
        self._bucket = bucket
        self._client = fs.S3FileSystem(
            access_key=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            secret_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            endpoint_override=server.endpoint,
            region=REGION,
        )

    def put(self, key, data):
        with self._client.open_output_stream(f"{self._bucket}/{key}") as stream:
            stream.write(data)

    def get(self, key):
        """The object, or None."""
        try:
            with self._client.open_input_stream(f"{self._bucket}/{key}") as stream:
                return stream.read()
        except FileNotFoundError:
            return None


def test_object_appears_whole_at_close(mount, store):
    store.put("whole/there", b"")
    fd = os.open(mount.path / "whole" / "new", os.O_RDWR | os.O_CREAT, 0o644)
    write_fd(fd, NEW)
    os.pwrite(fd, b"header", 0)
    assert os.pread(fd, 10, 0) == b"header" + NEW[6:10]
    assert store.get("whole/new") is None
    os.close(fd)
    assert store.get("whole/new") == b"header" + NEW[6:]
    assert in_child((mount.path / "whole" / "new").read_bytes) == b"header" + NEW[6:]
    assert sorted(os.listdir(mount.path / "whole")) == ["new", "there"]


def test_object_is_replaced_at_close(mount, store):
    store.put("replaced/object", OLD)
    fd = os.open(mount.path / "replaced" / "object", os.O_RDWR)
    os.pwrite(fd, b"changed", 100)
    assert store.get("replaced/object") == OLD
    os.close(fd)
    assert store.get("replaced/object") == OLD[:100] + b"changed" + OLD[107:]
    os.truncate(mount.path / "replaced" / "object", 50)
    assert store.get("replaced/object") == OLD[:50]


def test_failed_upload_is_told_by_close(mount, store):
    store.put("failed/object", OLD)
    mount.source.fail(["complete"], error="AccessDeniedError")
    fd = os.open(mount.path / "failed" / "object", os.O_WRONLY | os.O_TRUNC)
    write_fd(fd, NEW)
    assert outcome(os.close, fd) == errno.EACCES
    assert store.get("failed/object") == OLD
    assert durability(mount.path / "failed" / "object") == "broken"


def test_early_acknowledged_object_follows(mount, store):
    store.put("early/there", b"")
    acknowledge(mount.path / "early")
    mount.source.hold(["complete"])
    write_all(mount.path / "early" / "new", NEW)
    assert store.get("early/new") is None
    assert durability(mount.path / "early" / "new") == "staged"
    assert in_child((mount.path / "early" / "new").read_bytes) == NEW
    mount.source.release()
    eventually(lambda: durability(mount.path / "early" / "new") == "persisted", "it is persisted")
    assert store.get("early/new") == NEW


def test_what_an_object_store_cannot_do_is_not_supported(mount, store):
    """Renames and links would be copies, an append would write the object anew under everybody's eyes."""
    store.put("limits/object", OLD)
    folder = mount.path / "limits"
    acts = {
        "rename": lambda: os.rename(folder / "object", folder / "renamed"),
        "replace": lambda: os.replace(folder / "object", folder / "object2"),
        "rename directory": lambda: os.rename(folder, mount.path / "elsewhere"),
        "symlink": lambda: os.symlink("object", folder / "link"),
        "link": lambda: os.link(folder / "object", folder / "link"),
        "append": lambda: os.close(os.open(folder / "object", os.O_WRONLY | os.O_APPEND)),
        "chmod": lambda: (folder / "object").chmod(0o600),
    }
    assert {name: outcome(act) for name, act in acts.items()} == dict.fromkeys(acts, errno.ENOTSUP)
    assert store.get("limits/object") == OLD
    assert os.listdir(folder) == ["object"]
    (folder / "object").unlink()
    assert store.get("limits/object") is None
