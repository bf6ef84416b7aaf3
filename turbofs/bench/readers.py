"""How files are read: the same loops for every contestant, over readers that are opened before the clock starts.

A mount, tmpfs and the in-memory file are read with preadv into one reused, page-aligned buffer of 1 MiB. hdfs-native
has no call that fills a caller's buffer; it is used with what is fastest in it (`read_range_stream`, whose pieces are
dropped without a copy), which can only favour the baseline.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import hdfs_native

from turbofs.bench.harness import BenchmarkError

MIB = 1 << 20
CHUNK_BYTES = MIB


class Reader(Protocol):
    """One open file of *size* bytes. Not for use by several threads at once."""

    size: int

    def stream(self) -> int:
        """Read the whole file front to back; returns the bytes that came."""

    def read_at(self, offset: int, length: int) -> int:
        """Read *length* bytes at *offset*; returns the bytes that came."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...


class _Closing:
    def close(self) -> None:
        """Release the file."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class FileReader(_Closing):
    """A file by its path, wherever it is mounted. *direct* bypasses the kernel's page cache (O_DIRECT)."""

    def __init__(self, path: Path, *, direct: bool = False) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        self._buffer = mmap.mmap(-1, CHUNK_BYTES)
        self._buffer.write(bytes(CHUNK_BYTES))  # the first touch of the buffer is not the contestant's time
        self._view = memoryview(self._buffer)
        self.size = os.fstat(self._descriptor).st_size

    def __enter__(self) -> Self:
        return self

    def stream(self) -> int:
        descriptor, into, offset = self._descriptor, [self._buffer], 0
        while count := os.preadv(descriptor, into, offset):
            offset += count
        return offset

    def read_at(self, offset: int, length: int) -> int:
        return os.preadv(self._descriptor, [self._view[:length]], offset)

    def consume(self, take: Callable[[memoryview], object]) -> int:
        """Read the whole file and hand each piece to *take*, which must not keep it."""
        offset = 0
        while count := os.preadv(self._descriptor, [self._buffer], offset):
            take(self._view[:count])
            offset += count
        return offset

    def close(self) -> None:
        os.close(self._descriptor)
        self._view.release()
        self._buffer.close()


class NativeReader(_Closing):
    """A file on HDFS, read with hdfs-native and nothing else."""

    def __init__(self, client: hdfs_native.Client, path: str) -> None:
        self._file = client.read(path)
        self.size = self._file.size

    def __enter__(self) -> Self:
        return self

    def stream(self) -> int:
        total = 0
        for piece in self._file.read_range_stream(0, self.size):
            total += len(piece)
        return total

    def read_at(self, offset: int, length: int) -> int:
        return len(self._file.read_range(offset, length))


def throughput_mib_s(reader: Reader, passes: int = 1) -> float:
    """MiB/s of *passes* sequential readings of the whole file. Raises BenchmarkError where bytes are missing."""
    began = time.perf_counter()
    for _ in range(passes):
        total = reader.stream()
        if total != reader.size:
            raise BenchmarkError(f"{total} bytes of {reader.size} came back")
    return passes * reader.size / MIB / (time.perf_counter() - began)


def latencies_s(reader: Reader, offsets: Sequence[int], length: int) -> list[float]:
    """Seconds of each read of *length* bytes, one after another in the given order."""
    taken = []
    for offset in offsets:
        began = time.perf_counter()
        count = reader.read_at(offset, length)
        taken.append(time.perf_counter() - began)
        if count != length:
            raise BenchmarkError(f"{count} bytes of {length} came back at offset {offset}")
    return taken


def read_in_parallel(paths: Sequence[Path]) -> int:
    """Read every file front to back, a thread each, all descriptors open before the first byte; returns the bytes."""
    readers = [FileReader(path) for path in paths]
    totals = [0] * len(readers)
    failures: list[BaseException] = []
    barrier = threading.Barrier(len(readers))

    def read(index: int) -> None:
        try:
            barrier.wait()
            totals[index] = readers[index].stream()
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread below
            failures.append(error)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(readers))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for reader in readers:
            reader.close()
    if failures:
        raise failures[0]
    if totals != [reader.size for reader in readers]:
        raise BenchmarkError("a parallel reader got fewer bytes than its file has")
    return sum(totals)


def scan_and_stat(folder: Path) -> int:
    """Name and size of every entry of *folder*, each stat'ed as it comes, like `ls -l`; returns how many there are."""
    with os.scandir(folder) as entries:
        return len([(entry.name, entry.stat(follow_symlinks=False).st_size) for entry in entries])


def native_list(client: hdfs_native.Client, path: str) -> int:
    """Name and size of every entry of *path*, which hdfs-native lists with its attributes; returns how many."""
    return len([(entry.path, entry.length) for entry in client.list_status(path)])


def seconds(action: Callable[[], int], expected: int) -> float:
    """Seconds that *action* takes. Raises BenchmarkError where it does not return *expected*."""
    began = time.perf_counter()
    count = action()
    taken = time.perf_counter() - began
    if count != expected:
        raise BenchmarkError(f"{count} entries came back, {expected} were expected")
    return taken
