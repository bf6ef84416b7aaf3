"""hdfs-native, with its sharp edges covered: forks, panics, hung NameNodes, one identity a process.

Everything here blocks and is called in threads. Times of HDFS are milliseconds, ours nanoseconds.
"""

from __future__ import annotations

import getpass
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Protocol

import hdfs_native

from turbofs.errors import ConfigError, NotFoundError, SourceUnavailableError
from turbofs.model import Attributes, DirectoryEntry, FileKind, FileVersion
from turbofs.source.hdfs.errors import translated
from turbofs.source.hdfs.hadoop_conf import NameNodes

MS = 1_000_000
"""Nanoseconds in HDFS's unit of time."""
PERMISSION_BITS = 0o1777
"""HDFS knows the sticky bit and neither set-user-id nor set-group-id; higher bits flag ACLs and encryption."""

INODES = "/.reserved/.inodes/"
_BEST_EFFORT = "dfs.client.block.write.replace-datanode-on-failure.best-effort"


class ByteReader(Protocol):
    """One open file of a blocking client, with the block locations that it got when it was opened."""

    length: int
    """Bytes that this reader can deliver; less than the file's size where its last block is still being written."""

    def read(self, offset: int, length: int) -> bytes:
        """At most *length* bytes from *offset* on, fewer only at `length`."""

    def pieces(self, offset: int, length: int) -> Iterator[bytes]:
        """The same bytes in pieces, each as soon as it has arrived."""


class NativeReader:
    """hdfs-native's reader; every range is clamped, because a range past the end is a panic there."""

    def __init__(self, reader: hdfs_native.FileReader, path: str) -> None:
        self._reader = reader.inner  # the Python wrapper around it only forwards
        self._path = path
        self.length = len(reader)

    def read(self, offset: int, length: int) -> bytes:
        length = min(length, self.length - offset)
        if length <= 0:
            return b""
        with translated("read", self._path):
            return self._reader.read_range(offset, length)

    def pieces(self, offset: int, length: int) -> Iterator[bytes]:
        length = min(length, self.length - offset)
        if length <= 0:
            return
        with translated("read", self._path):
            yield from self._reader.read_range_stream(offset, length)


class NativeClient:
    """One client of one process. Raises only TurboErrors; NotFoundError and the like name the path that was asked for.

    The client under it can be replaced when its NameNode hangs, because its one connection would hang for ever.
    """

    def __init__(self, servers: NameNodes, *, socket_timeout_s: float | None = None) -> None:
        """*socket_timeout_s*: how long a DataNode may be silent before the next replica is tried; None: Hadoop's."""
        self._servers = servers
        self._overrides = _without_own_retries(servers)
        # A pipeline that lost a DataNode goes on with those that are left where no other can be had. By default the write
        # would fail: in a small cluster, and after the file was renamed, because hdfs-native asks by the path that it knows.
        self._overrides[_BEST_EFFORT] = servers.settings.get(_BEST_EFFORT, "true")
        if socket_timeout_s is not None:
            self._overrides["dfs.client.socket-timeout"] = str(max(1, round(socket_timeout_s * 1000)))
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._client: hdfs_native.Client | None = None

    def client(self) -> hdfs_native.Client:
        if os.getpid() != self._pid:
            raise SourceUnavailableError(
                f"the HDFS client of process {self._pid} cannot be used in its fork {os.getpid()}",
                advice="connect a source of its own in each process (spawn workers instead of forking them)",
            )
        with self._lock:
            if self._client is None:
                with translated("configure the client of", f"hdfs://{self._servers.authority}"):
                    url, settings = f"hdfs://{self._servers.authority}", {**self._servers.settings, **self._overrides}
                    self._client = hdfs_native.Client(url, settings)
            return self._client

    def renew(self, hung: hdfs_native.Client | None) -> None:
        """Forget the client *hung* (unless somebody else already did): the next call connects anew, elsewhere first."""
        with self._lock:
            if hung is not None and self._client is hung:
                self._client = None
                self._servers = self._servers.rotated()

    @property
    def current(self) -> hdfs_native.Client | None:
        return self._client

    def stat(self, path: str, shown: str) -> Attributes:
        """Attributes with a weak version; *shown* is the name of *path* in messages."""
        with translated("stat", shown):
            status = self.client().get_file_info(path)
        return attributes_of(status)

    def version_of(self, path: str, shown: str, file_id: str) -> FileVersion:
        """The version now of the file with *file_id*, if *path* is its inode path, else the weak one of *path*."""
        with translated("stat", shown):
            status = self.client().get_file_info(path)
        return FileVersion(status.length, status.modification_time * MS, file_id, append_only=bool(file_id))

    def open(self, path: str, shown: str) -> NativeReader:
        with translated("open", shown):
            return NativeReader(self.client().read(path), shown)

    def list(self, path: str) -> Iterator[hdfs_native.FileStatus]:
        return self.client().list_status(path)

    def exists(self, path: str) -> bool:
        try:
            self.stat(path, path)
        except NotFoundError:
            return False
        return True


_new = tuple.__new__
"""Makes a named tuple without its constructor in Python: a listing makes three for each of its hundred thousand names."""


def entry_of(status: hdfs_native.FileStatus, name_from: int) -> DirectoryEntry:
    """A listed name, which begins at character *name_from* of the path that the NameNode tells."""
    name = status.path[name_from:]
    if status.isdir:
        return DirectoryEntry(name, attributes_of(status))
    mtime_ns = status.modification_time * MS
    version = _new(FileVersion, (status.length, mtime_ns, "", "", True))
    attributes = _new(
        Attributes,
        (
            FileKind.FILE,
            version,
            status.permission & PERMISSION_BITS,
            status.owner,
            status.group,
            status.access_time * MS,
            mtime_ns,
            1,
            status.replication or 0,
            status.blocksize or 0,
        ),
    )
    return _new(DirectoryEntry, (name, attributes))


def attributes_of(status: hdfs_native.FileStatus) -> Attributes:
    mtime_ns = status.modification_time * MS
    if status.isdir:
        return Attributes(
            FileKind.DIRECTORY,
            FileVersion(0, mtime_ns),
            status.permission & PERMISSION_BITS,
            status.owner,
            status.group,
            status.access_time * MS or mtime_ns,  # HDFS has one for a directory only once somebody has set it
            mtime_ns,
        )
    return Attributes(
        FileKind.FILE,
        FileVersion(status.length, mtime_ns, "", "", True),
        status.permission & PERMISSION_BITS,
        status.owner,
        status.group,
        status.access_time * MS,
        mtime_ns,
        1,
        status.replication or 0,
        status.blocksize or 0,
    )


def _without_own_retries(servers: NameNodes) -> dict[str, str]:
    """Settings that let each NameNode be asked once.

    hdfs-native would by itself repeat a call for up to three minutes, out of reach of any deadline; `RetryingSource`
    repeats calls where that helps.
    """
    return {
        "dfs.client.failover.max.attempts": str(0 if len(servers.rpc) == 1 else len(servers.rpc)),
        "dfs.client.failover.sleep.base.millis": "50",
        "dfs.client.failover.sleep.max.millis": "200",
    }


def resolve_user(configured: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """Who acts under simple authentication, as Hadoop's own clients decide it."""
    return configured or environment.get("HADOOP_USER_NAME") or getpass.getuser()


class _Identity:
    """The one user of this process: hdfs-native takes it from HADOOP_USER_NAME, at every connection that it makes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: Counter[str] = Counter()
        self._before: str | None = None

    def claim(self, user: str) -> None:
        """Act as *user* until `release`. Raises ConfigError while this process acts as somebody else."""
        with self._lock:
            if self._holders and user not in self._holders:
                raise ConfigError(
                    f"this process already acts on HDFS as {next(iter(self._holders))}, not as {user}",
                    advice="use one process for each HDFS user",
                )
            if not self._holders:
                self._before = os.environ.get("HADOOP_USER_NAME")
                os.environ["HADOOP_USER_NAME"] = user
            self._holders[user] += 1

    def release(self, user: str) -> None:
        with self._lock:
            self._holders[user] -= 1
            if self._holders[user] > 0:
                return
            del self._holders[user]
            if self._before is None:
                os.environ.pop("HADOOP_USER_NAME", None)
            else:
                os.environ["HADOOP_USER_NAME"] = self._before


identity = _Identity()
