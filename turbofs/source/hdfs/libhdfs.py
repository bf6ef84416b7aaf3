"""Bytes through Hadoop's own JVM client (`--client libhdfs`): faster where the node has one.

Names and attributes stay with hdfs-native.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from turbofs.errors import ConfigError
from turbofs.source.hdfs.errors import translated
from turbofs.source.hdfs.hadoop_conf import NameNodes

_PIECE_BYTES = 1 << 20
"""One JNI call copies this much: below it the calls cost, above it the page faults."""


class LibhdfsReader:
    """One open file of libhdfs. Safe for concurrent positioned reads."""

    def __init__(self, file: pa.NativeFile, path: str) -> None:
        self._file = file
        self._path = path
        self.length = int(file.size())

    def read(self, offset: int, length: int) -> bytes:
        length = min(length, self.length - offset)
        if length <= 0:
            return b""
        with translated("read", self._path):
            data: bytes = self._file.read_at(length, offset)  # type: ignore[call-arg]  # pyarrow-stubs lack offset
        return data

    def pieces(self, offset: int, length: int) -> Iterator[bytes]:
        stop = min(offset + length, self.length)
        while offset < stop:
            piece = self.read(offset, min(_PIECE_BYTES, stop - offset))
            if not piece:
                return
            offset += len(piece)
            yield piece


class LibhdfsClient:
    """Opens readers. The JVM starts at the first one, and stays for the process's life."""

    def __init__(self, servers: NameNodes, user: str) -> None:
        require_libhdfs()
        self._servers = servers
        self._user = user
        self._lock = threading.Lock()
        self._file_system: fs.HadoopFileSystem | None = None

    def open(self, path: str, shown: str) -> LibhdfsReader:
        with translated("open", shown):
            return LibhdfsReader(self._connected().open_input_file(path), shown)

    def _connected(self) -> fs.HadoopFileSystem:
        with self._lock:
            if self._file_system is None:
                host, _, port = self._servers.authority.partition(":")
                # Port 0 is how libhdfs is told that the host is a name service.
                self._file_system = fs.HadoopFileSystem(
                    host, int(port or 0), user=self._user, extra_conf=dict(self._servers.settings) or None
                )
            return self._file_system


def require_libhdfs() -> None:
    """Raises ConfigError that names what libhdfs needs and does not find."""
    advice = "install Hadoop's client, or use --client native, which needs no JVM"
    home = os.environ.get("JAVA_HOME")
    if not home or not any(Path(home).glob("**/libjvm.so")):
        raise ConfigError(
            f"client=libhdfs needs JAVA_HOME; {home or 'it'} {'has no libjvm.so' if home else 'is not set'}",
            advice=f"set JAVA_HOME to a JDK or JRE (the folder above lib/server/libjvm.so); {advice}",
        )
    class_path = os.environ.get("CLASSPATH", "")
    if not class_path or "*" in class_path:
        raise ConfigError(
            "client=libhdfs needs CLASSPATH with every Hadoop jar written out (JNI expands no '*')",
            advice=f'run: export CLASSPATH="$(hadoop classpath --glob)"; {advice}',
        )
    folders = [os.environ.get("ARROW_LIBHDFS_DIR")]
    if os.environ.get("HADOOP_HOME"):
        folders.append(os.path.join(os.environ["HADOOP_HOME"], "lib", "native"))
    if not any(folder and (Path(folder) / "libhdfs.so").exists() for folder in folders):
        raise ConfigError(
            "client=libhdfs finds no libhdfs.so",
            advice=f"set ARROW_LIBHDFS_DIR to its folder, or HADOOP_HOME to Hadoop's (lib/native/libhdfs.so); {advice}",
        )
