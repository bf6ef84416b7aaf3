"""Fixtures of the tests that make real kernel mounts."""

from __future__ import annotations

import pytest

from turbofs.testing.mounts import workplace
from turbofs.testing.tools import ToolMissingError, find_tool
from turbofs.testing.trees import FILE, HDFS, PLAIN, writable_tree


@pytest.fixture
def place():
    """A source tree and a mount point of this test's own."""
    with workplace() as made:
        yield made


@pytest.fixture
def corner(mount, request):
    """A new directory of this test in the module's `mount`, whose source obeys: (in the source, in the mount)."""
    name = request.node.name.replace("[", "-").replace("]", "").replace(" ", "_")
    (mount.place.source / name).mkdir()
    yield mount.place.source / name, mount.path / name
    mount.source.heal()
    mount.source.release()


@pytest.fixture(scope="module", params=[PLAIN, FILE, pytest.param(HDFS, marks=pytest.mark.hdfs)])
def tree(request):
    """A writable directory that a module's tests share: a plain one, and mounts of `file:` and `hdfs:`."""
    cluster = request.getfixturevalue("hdfs") if request.param == HDFS else None
    with writable_tree(request.param, cluster) as made:
        yield made


@pytest.fixture
def need_tool():
    """Call it with a program's name: the test is skipped where this machine lacks it."""

    def need(name):
        try:
            return find_tool(name)
        except ToolMissingError as error:
            pytest.skip(str(error))

    return need
