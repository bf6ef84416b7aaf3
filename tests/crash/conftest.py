"""Fixtures of the crash runs."""

from __future__ import annotations

import pytest

from turbofs.testing.crash_daemons import DaemonHouse
from turbofs.testing.mounts import workplace


@pytest.fixture(scope="module")
def house():
    """Where daemons are forked from."""
    with DaemonHouse() as made:
        yield made


@pytest.fixture
def place():
    """A source tree and a mount point of this test's own."""
    with workplace() as made:
        yield made
