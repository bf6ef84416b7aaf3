"""A descriptor that is closed by somebody who is not done writing publishes nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from turbofs.testing.children import Child, in_child
from turbofs.testing.conformance_base import content
from turbofs.testing.mounts import workplace
from turbofs.testing.waiting import eventually
from turbofs.testing.writing import Watcher, content_or_none, write_fd

pytestmark = pytest.mark.mount

MIB = 1 << 20
OLD, NEW = content(MIB + 77, seed=1), content(2 * MIB + 5, seed=2)
HALF = len(NEW) // 2


@pytest.fixture(scope="module")
def mount():
    with workplace() as place, place.mount("memory=256MiB") as made:
        yield made


@pytest.fixture
def corner(mount, request):
    """A new directory of this test: (in the source, in the mount)."""
    name = request.node.name.replace("[", "-").replace("]", "").replace(" ", "_")
    (mount.place.source / name).mkdir()
    return mount.place.source / name, mount.path / name


def close_a_duplicate(fd):
    os.close(os.dup(fd))


def close_in_a_fork(fd):
    in_child(lambda: os.close(fd))


def end_a_fork(fd):
    in_child(lambda: None)


def run_a_program_that_inherits(fd):
    subprocess.run(["true"], pass_fds=[fd], check=True, timeout=60)


def run_a_program_that_closes(fd):
    subprocess.run([sys.executable, "-c", f"import os; os.close({fd})"], pass_fds=[fd], check=True, timeout=60)


def open_and_close_for_reading(fd):
    with open(f"/proc/self/fd/{fd}", "rb") as reader:
        reader.read(10)


@pytest.mark.parametrize("kind", ["new", "existing"])
@pytest.mark.parametrize(
    "disturb",
    [
        close_a_duplicate,
        close_in_a_fork,
        end_a_fork,
        run_a_program_that_inherits,
        run_a_program_that_closes,
        open_and_close_for_reading,
    ],
)
def test_a_close_in_the_middle_of_a_save_publishes_nothing(corner, disturb, kind):
    source, shown = corner
    before = None
    if kind == "existing":
        before = OLD
        (source / "file").write_bytes(OLD)
    fd = os.open(shown / "file", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    for start in range(0, HALF, MIB // 4):
        write_fd(fd, NEW[start : min(start + MIB // 4, HALF)])
        disturb(fd)
        assert content_or_none(source / "file") == before
    assert in_child((shown / "file").read_bytes) == NEW[:HALF]
    with Watcher(lambda: content_or_none(source / "file")) as watcher:
        write_fd(fd, NEW[HALF:])
        os.close(fd)
    assert watcher.seen == [before, NEW]


def test_the_last_writing_descriptor_of_the_opener_publishes(corner):
    source, shown = corner
    first = os.open(shown / "file", os.O_WRONLY | os.O_CREAT, 0o644)
    second = os.open(shown / "file", os.O_RDWR)
    os.write(first, b"first")
    os.close(first)
    assert not (source / "file").exists()
    os.pwrite(second, b" and second", 5)
    os.close(second)
    assert (source / "file").read_bytes() == b"first and second"


def test_a_fork_that_keeps_the_descriptor_does_not_hold_publication_back(corner):
    """A forked data loader lives on with everything that it inherited."""
    source, shown = corner
    reading, writing = os.pipe()
    fd = os.open(shown / "file", os.O_WRONLY | os.O_CREAT, 0o644)
    write_fd(fd, NEW[:HALF])

    def linger():
        os.close(writing)
        os.read(reading, 1)
        os.write(fd, b"late")

    with Child(linger) as child:
        write_fd(fd, NEW[HALF:])
        os.close(fd)
        assert (source / "file").read_bytes() == NEW
        os.close(writing)  # ends its wait
        child.result()
    os.close(reading)
    eventually(lambda: (source / "file").read_bytes() == NEW + b"late", "what the fork wrote is published in the end")


def test_an_opener_that_ends_without_closing_publishes(corner):
    source, shown = corner

    def save():
        fd = os.open(shown / "file", os.O_WRONLY | os.O_CREAT, 0o644)
        write_fd(fd, NEW)
        os._exit(0)

    with Child(save) as child:
        eventually(lambda: child.gone, "it has ended")
    eventually(lambda: content_or_none(source / "file") == NEW, "its bytes are published")
