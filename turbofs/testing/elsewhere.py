"""Another client of a test's HDFS: the one that changes files while a mount has them open."""

from __future__ import annotations

import getpass
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hdfs_native
import httpx

from turbofs.testing.hdfs_cluster import HdfsCluster
from turbofs.testing.waiting import eventually

BLOCK_BYTES = 1 << 20
"""Small, so that files of a test have several blocks."""
_RECOVERY_LIMIT_S = 60.0
_ANSWER_LIMIT_S = 30.0
_numbers = itertools.count()


class Elsewhere:
    """Acts on what is below *folder* on *cluster*; every name is relative to it. Blocks; raises what the client raises."""

    def __init__(self, cluster: HdfsCluster, folder: str) -> None:
        self.cluster = cluster
        self.folder = folder
        self.client = hdfs_native.Client(cluster.uri)
        self.client.mkdirs(folder, 0o755, True)

    @property
    def uri(self) -> str:
        """What a mount of the folder takes as SOURCE."""
        return f"{self.cluster.uri}{self.folder}"

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def put(
        self,
        name: str,
        data: bytes,
        *,
        block_bytes: int = BLOCK_BYTES,
        copies: int | None = None,
        replace: bool = False,
    ) -> None:
        """A closed file. With *replace* it is written beside the name and renamed over it, as trainers do."""
        target = f"{name}.new-{next(_numbers)}" if replace else name
        options = hdfs_native.WriteOptions(block_size=block_bytes, replication=copies)
        with self.client.create(self.path(target), options) as writer:
            writer.write(data)
        if replace:
            self.client.rename(self.path(target), self.path(name), True)

    @contextmanager
    def writing(
        self, name: str, *, append: bool = False, block_bytes: int = BLOCK_BYTES
    ) -> Iterator[hdfs_native.FileWriter]:
        """A file that stays open for writing until the context is left, or `close` is called."""
        if append:
            writer = self.client.append(self.path(name))
        else:
            writer = self.client.create(self.path(name), hdfs_native.WriteOptions(block_size=block_bytes))
        with writer:
            yield writer

    def append(self, name: str, data: bytes) -> None:
        """Append and close."""
        with self.writing(name, append=True) as writer:
            writer.write(data)

    def rename(self, old: str, new: str, *, replace: bool = False) -> None:
        self.client.rename(self.path(old), self.path(new), replace)

    def delete(self, name: str) -> None:
        assert self.client.delete(self.path(name), True)

    def times(self, name: str) -> tuple[int, int]:
        """(modification, access) in HDFS's milliseconds."""
        status = self.client.get_file_info(self.path(name))
        return status.modification_time, status.access_time

    def set_times(self, name: str, times: tuple[int, int]) -> None:
        self.client.set_times(self.path(name), *times)

    def truncate(self, name: str, length: int) -> None:
        """Cut a closed file; returns once the DataNodes have recovered its last block and it is closed again."""
        self._web("POST", name, op="TRUNCATE", newlength=length)
        eventually(lambda: not self.open_for_writing(name), f"{name} is closed", limit_s=_RECOVERY_LIMIT_S)

    def open_for_writing(self, name: str) -> bool:
        blocks = self._web("GET", name, op="GET_BLOCK_LOCATIONS")["LocatedBlocks"]
        return bool(blocks["isUnderConstruction"])

    def _web(self, method: str, name: str, **parameters: str | int) -> dict[str, Any]:
        reply = httpx.request(
            method,
            f"{self.cluster.web}/webhdfs/v1{self.path(name)}",
            params={"user.name": getpass.getuser(), **parameters},
            timeout=_ANSWER_LIMIT_S,
            trust_env=False,
        )
        assert reply.is_success, reply.text
        document: dict[str, Any] = reply.json()
        return document
