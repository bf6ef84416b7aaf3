"""What the groups of the scene `write` share: sizes, services, and the bytes of each round."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

import hdfs_native

from turbofs.bench import services
from turbofs.bench.checks import check_content
from turbofs.bench.payload import MIB, Payload
from turbofs.bench.writer_process import WriterProcess
from turbofs.testing.hdfs_cluster import HdfsCluster

MEMORY = "1GiB"
"""Budget of the mounts' own buffers."""
WRITERS = 16
HDFS_RESERVE_BYTES = 2 * WRITERS * 128 * MIB
"""HDFS sets a whole block (128 MiB) aside for each file that is being written, however short it will be."""


@dataclass(frozen=True)
class Sizes:
    """How much is written. `quick` keeps every shape and shrinks the amounts."""

    rounds: int
    create_rounds: int
    recover_rounds: int
    big_bytes: int
    small_files: int
    appends: int
    staging_bytes: int
    """Limit of staging while the memory of many writers is measured: less than they write, so that they wait."""

    @property
    def memory_bytes(self) -> int:
        """What a run keeps in memory at most: the bytes and hdfs-native's copy of them, and staging, HDFS or a copy."""
        return 2 * self.big_bytes + max(4 * self.big_bytes, self.staging_bytes) + 512 * MIB

    @property
    def disk_bytes(self) -> int:
        """HDFS's data while the memory of many writers is measured, and what its NameNode and checksums need."""
        return WRITERS * self.big_bytes + WRITERS * self.big_bytes // 16 + 4096 * MIB


FULL = Sizes(
    rounds=7,
    create_rounds=5,
    recover_rounds=3,
    big_bytes=1024 * MIB,
    small_files=500,
    appends=200,
    staging_bytes=4096 * MIB,
)
QUICK = Sizes(
    rounds=1,
    create_rounds=1,
    recover_rounds=1,
    big_bytes=256 * MIB,
    small_files=100,
    appends=50,
    staging_bytes=512 * MIB,
)


@dataclass
class Bench:
    """What the groups share: the cluster, a client of it, a folder in memory, the bytes and who writes them."""

    cluster: HdfsCluster
    client: hdfs_native.Client
    work: Path
    sizes: Sizes
    payload: Payload
    writer: WriterProcess
    digest: str = ""
    """BLAKE3 of the bytes."""
    _filled_for: tuple[str, int] | None = field(default=None, repr=False)
    _seed: int = 0

    def contents(self, group: str, number: int) -> None:
        """New bytes for round *number* of *group*; the same for all contestants of that round."""
        if self._filled_for != (group, number):
            self._seed += 1
            self.payload.fill(self._seed)
            self.digest = self.payload.digest()
            self._filled_for = (group, number)

    def mount(self) -> contextlib.AbstractContextManager[services.Mount]:
        return services.turbofs_mount(
            self.cluster, self.work, memory=MEMORY, staging_bytes=max(4 * self.sizes.big_bytes, 1024 * MIB)
        )

    def clear(self) -> None:
        """Delete whatever a group left on HDFS, as one does that failed."""
        for entry in list(self.client.list_status("/")):
            self.client.delete(entry.path, recursive=True)

    def check_and_delete(self, path: str) -> None:
        """The file on HDFS is what was written; then it goes, and its blocks."""
        check_content(self.client, path, len(self.payload.view), self.digest)
        self.client.delete(path)
        services.await_no_blocks(self.cluster)


def early_folder(mount: services.Mount, name: str) -> Path:
    """A directory of the mount under which close waits for staging only."""
    folder = mount.folder / name
    folder.mkdir(exist_ok=True)
    os.setxattr(folder, "user.turbofs.ack", b"staged")
    return folder
