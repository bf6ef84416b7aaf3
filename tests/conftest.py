"""Fixtures that several kinds of tests share: a real HDFS."""

from __future__ import annotations

import itertools
import signal

import hdfs_native
import pytest

from turbofs.config import SourceConfig
from turbofs.testing.hdfs_cluster import HdfsCluster

# Assertions of the shipped suite are shown in full; said here, before any test imports it.
pytest.register_assert_rewrite(
    "turbofs.testing.conformance_base",
    "turbofs.testing.conformance_reading",
    "turbofs.testing.conformance_writing",
    "turbofs.testing.conformance_writers",
)

# A run that a shell started in the background ignores SIGINT, and so would every program that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

_numbers = itertools.count()


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory):
    """A NameNode and three DataNodes for the whole run (8 s to start). Tests leave its daemons alone."""
    cluster = HdfsCluster(tmp_path_factory.mktemp("hdfs"))
    with cluster:
        yield cluster
    cluster.destroy()


@pytest.fixture
def hdfs_dir(hdfs):
    """The absolute path of a directory on `hdfs` that is this test's own, writable by everybody."""
    path = f"/test-{next(_numbers)}"
    hdfs_native.Client(hdfs.uri).mkdirs(path, 0o777, True)
    return path


@pytest.fixture
def hdfs_config(hdfs):
    """How a source or a mount reaches `hdfs`: its HTTP port is not the usual one."""
    return SourceConfig(web_address=hdfs.web)


@pytest.fixture
def own_hdfs(tmp_path):
    """Start clusters of this test's own: `own_hdfs(datanodes=2, settings={…})`, for tests that kill what they use."""
    started = []

    def start(**options):
        cluster = HdfsCluster(tmp_path / f"hdfs-{len(started)}", **options)
        cluster.root.mkdir()
        started.append(cluster)
        cluster.start()
        return cluster

    yield start
    for cluster in started:
        for daemon in cluster.workers:
            daemon.thaw()  # what a test froze would not notice SIGTERM, and its ports would live on
        cluster.destroy()
