"""A real S3 protocol server for the tests of `s3`."""

import pytest

from turbofs.testing.s3_server import CREDENTIALS, S3Server


@pytest.fixture(scope="session")
def _s3_process():
    with S3Server() as server:
        yield server


@pytest.fixture
def s3_server(_s3_process, monkeypatch):
    """The server, and credentials for it in the environment."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return _s3_process
