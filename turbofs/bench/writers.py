"""How files are written: the same loops for every contestant, run in the writer process.

A mount and tmpfs are written with write() of 1 MiB, out of one page-aligned buffer. hdfs-native is used through the
one call that it has, and takes pieces of the same memory without a copy of our making. The clock starts before the file is
created and ends when its close has returned.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import hdfs_native

from turbofs.bench.harness import BenchmarkError
from turbofs.bench.payload import MIB, rotated

SMALL_BYTES = 4096
"""A small file, and an append to a log."""
NATIVE_PIECE_BYTES = 16 * MIB
"""What hdfs-native is handed at a time. Of 1, 4, 16 and 512 MiB the fastest here, by a tenth to a half."""
_POLL_S = 0.005
_UPLOAD_LIMIT_S = 120.0


def write_file(data: memoryview, path: str, *, direct: bool = False, shift_bytes: int = 0) -> float:
    """Write *data*, rotated by *shift_bytes*, to the new file *path*; returns MiB/s. *direct*: with O_DIRECT."""
    began = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0), 0o644)
    try:
        write_open_file(data, descriptor, shift_bytes=shift_bytes)
    finally:
        os.close(descriptor)
    return len(data) / MIB / (time.perf_counter() - began)


def write_open_file(data: memoryview, descriptor: int, *, shift_bytes: int = 0) -> None:
    """Write *data*, rotated by *shift_bytes*, to *descriptor*, 1 MiB at a time."""
    for chunk in rotated(data, shift_bytes):
        _write_all(descriptor, chunk)


def write_file_until_on_hdfs(data: memoryview, path: str, uri: str, hdfs_path: str) -> float:
    """As `write_file`, and the clock goes on until HDFS has the whole file; returns MiB/s.

    HDFS counts a file's last block once that is complete, so the full length says that nothing is missing.
    """
    client = _client(uri)
    began = time.perf_counter()
    write_file(data, path)
    while _length(client, hdfs_path) != len(data):
        if time.perf_counter() - began > _UPLOAD_LIMIT_S:
            raise BenchmarkError(f"{hdfs_path} is not on HDFS {_UPLOAD_LIMIT_S:.0f} s after it was begun")
        time.sleep(_POLL_S)
    return len(data) / MIB / (time.perf_counter() - began)


def write_native(data: memoryview, uri: str, path: str, *, piece_bytes: int = NATIVE_PIECE_BYTES) -> float:
    """Write *data* to the new file *path* with hdfs-native alone; returns MiB/s."""
    client = _client(uri)
    # bytes, made off the clock: of anything else hdfs-native takes one element after the other, at 70 MiB/s
    pieces = [bytes(data[start : start + piece_bytes]) for start in range(0, len(data), piece_bytes)]
    began = time.perf_counter()
    with client.create(path, _options()) as writer:
        for piece in pieces:
            writer.write(piece)
    return len(data) / MIB / (time.perf_counter() - began)


def write_files(data: memoryview, folder: str, count: int, shift_bytes: int) -> float:
    """Write *count* files `writer-00` … of all of *data* into *folder*, a thread each; returns MiB/s of all.

    Writer i's content is rotated by i times *shift_bytes*.
    """

    def write(index: int) -> float:
        return write_file(data, f"{folder}/{writer_name(index)}", shift_bytes=index * shift_bytes)

    return count * len(data) / MIB / _in_threads(write, count, count)


def create_files(data: memoryview, folder: str, count: int, threads: int) -> float:
    """Write *count* new files of SMALL_BYTES into *folder*; returns files a second."""

    def create(index: int) -> None:
        descriptor = os.open(f"{folder}/{small_name(index)}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            _write_all(descriptor, small_content(data, index))
        finally:
            os.close(descriptor)

    return count / _in_threads(create, count, threads)


def create_native(data: memoryview, uri: str, folder: str, count: int, threads: int) -> float:
    """As `create_files`, with hdfs-native alone."""
    client = _client(uri)

    def create(index: int) -> None:
        with client.create(f"{folder}/{small_name(index)}", _options()) as writer:
            writer.write(small_content(data, index))

    return count / _in_threads(create, count, threads)


def append_file(data: memoryview, path: str, count: int) -> list[float]:
    """Append SMALL_BYTES to the new log *path* and fsync it, *count* times; returns the seconds of each."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
    try:

        def append(content: memoryview) -> None:
            _write_all(descriptor, content)
            os.fsync(descriptor)

        return _appends_s(data, count, append)
    finally:
        os.close(descriptor)


def append_native(data: memoryview, uri: str, path: str, count: int) -> list[float]:
    """As `append_file`, with hdfs-native's write and hsync."""
    with _client(uri).create(path, _options()) as writer:

        def append(content: memoryview) -> None:
            writer.write(content)
            writer.hsync()

        return _appends_s(data, count, append)


def writer_name(index: int) -> str:
    """The name of the file of writer number *index*."""
    return f"writer-{index:02d}"


def small_name(index: int) -> str:
    """The name of small file number *index*."""
    return f"small-{index:05d}"


def small_content(data: memoryview, index: int) -> memoryview:
    """The content of small file, or append, number *index*."""
    start = index * SMALL_BYTES % len(data)
    return data[start : start + SMALL_BYTES]


def _appends_s(data: memoryview, count: int, append: Callable[[memoryview], None]) -> list[float]:
    taken_s = []
    for index in range(count):
        began = time.perf_counter()
        append(small_content(data, index))
        taken_s.append(time.perf_counter() - began)
    return taken_s


def _in_threads(action: Callable[[int], object], count: int, threads: int) -> float:
    """Seconds for *action* of each number below *count*, on *threads* threads. Raises what the first one raised."""
    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        for _ in pool.map(action, range(count)):
            pass
        return time.perf_counter() - began


def _write_all(descriptor: int, chunk: memoryview) -> None:
    written = os.write(descriptor, chunk)
    while written < len(chunk):
        written += os.write(descriptor, chunk[written:])


def _length(client: hdfs_native.Client, path: str) -> int:
    try:
        return client.get_file_info(path).length
    except FileNotFoundError:
        return -1


@functools.cache
def _client(uri: str) -> hdfs_native.Client:
    return hdfs_native.Client(uri)


def _options() -> hdfs_native.WriteOptions:
    return hdfs_native.WriteOptions(replication=1)
