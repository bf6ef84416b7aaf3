"""What is checked after the clock: that HDFS, or a mount, has the bytes that were written."""

from __future__ import annotations

import os
import time
from pathlib import Path

import blake3
import hdfs_native

from turbofs.bench import writers
from turbofs.bench.harness import BenchmarkError
from turbofs.bench.readers import FileReader

_PERSIST_LIMIT_S = 120.0
_POLL_S = 0.02
_READABLE_POLL_S = 0.002
_EDGE_BYTES = 4096


def check_content(client: hdfs_native.Client, path: str, size_bytes: int, digest: str) -> None:
    """Raise BenchmarkError where *path* on HDFS is not *size_bytes* long with the BLAKE3 *digest*."""
    reader = client.read(path)
    hasher = blake3.blake3()
    read_bytes = 0
    for piece in reader.read_range_stream(0, reader.size):
        hasher.update(piece)
        read_bytes += len(piece)
    if (reader.size, read_bytes) != (size_bytes, size_bytes):
        raise BenchmarkError(f"{path} has {reader.size} bytes on HDFS, {read_bytes} came, {size_bytes} were written")
    if hasher.hexdigest() != digest:
        raise BenchmarkError(f"{path} on HDFS has other bytes than were written", advice="a defect: report it")


def await_content(client: hdfs_native.Client, path: str, size_bytes: int, digest: str) -> None:
    """As `check_content`, for a writer that may upload a file a second time (rclone, when its times change late)."""
    deadline = time.monotonic() + _PERSIST_LIMIT_S
    while True:
        try:
            check_content(client, path, size_bytes, digest)
            return
        except (BenchmarkError, OSError, RuntimeError):
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_S)


def check_small_files(client: hdfs_native.Client, folder: str, data: memoryview, count: int) -> None:
    """Raise BenchmarkError where *folder* on HDFS does not hold *count* small files of *data*, and nothing else."""
    names = {Path(entry.path).name for entry in client.list_status(folder)}
    if names != {writers.small_name(index) for index in range(count)}:
        raise BenchmarkError(f"{folder} holds {len(names)} files, not the {count} that were written")
    for index in range(count):
        content = writers.small_content(data, index)
        check_content(client, f"{folder}/{writers.small_name(index)}", len(content), blake3.blake3(content).hexdigest())


def await_persisted(path: Path) -> None:
    """Return when the mount says that *path* is on the source. Raises BenchmarkError where it breaks, or takes long."""
    deadline = time.monotonic() + _PERSIST_LIMIT_S
    while (level := os.getxattr(path, "user.turbofs.durability").decode()) != "persisted":
        if level == "broken":
            reason = os.getxattr(path, "user.turbofs.last_error").decode(errors="replace")
            raise BenchmarkError(f"{path.name} is broken: {reason}")
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{path.name} is still {level} after {_PERSIST_LIMIT_S:.0f} s")
        time.sleep(_POLL_S)


def await_readable(path: Path, data: memoryview) -> None:
    """Return when *path* has the size of *data* and its first, middle and last page can be read and are right."""
    deadline = time.monotonic() + _PERSIST_LIMIT_S
    while True:
        try:
            with FileReader(path) as reader:
                if reader.size != len(data):
                    raise BenchmarkError(f"{path.name} came back with {reader.size} bytes of {len(data)}")
            with path.open("rb", buffering=0) as file:
                for offset in (0, len(data) // 2, len(data) - _EDGE_BYTES):
                    if os.pread(file.fileno(), _EDGE_BYTES, offset) != data[offset : offset + _EDGE_BYTES]:
                        raise BenchmarkError(f"{path.name} came back with other bytes at {offset}")
            return
        except OSError as error:  # not there yet
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{path.name} cannot be read after a restart: {error}") from error
            time.sleep(_READABLE_POLL_S)
