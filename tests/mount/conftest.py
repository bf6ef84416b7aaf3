"""Fixtures of the tests that make real kernel mounts."""

from __future__ import annotations

import pytest

from turbofs.testing.mounts import workplace


@pytest.fixture
def place():
    """A source tree and a mount point of this test's own."""
    with workplace() as made:
        yield made
