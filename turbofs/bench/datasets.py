"""The files on HDFS that scenes read. Contents are random, so that nothing on the way can compress or merge them."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import blake3
import hdfs_native
import numpy as np

_PIECE_BYTES = 8 << 20
_WRITERS = 16  # completing a file can sleep half a second (a late replica report): overlapped
_ATTEMPTS = 3  # on a busy machine the DataNode's report can be too late for hdfs-native, which then gives up
_CREATORS = 64  # 64 threads made 7,000 empty files a second here, 16 threads 3,000


def write_file(client: hdfs_native.Client, path: str, size_bytes: int, seed: int = 0) -> str:
    """Write *size_bytes* random bytes (a function of *seed*) to *path*, one replica; returns their BLAKE3 digest."""
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(RuntimeError):
            return _write_once(client, path, size_bytes, seed)
    return _write_once(client, path, size_bytes, seed)


def _write_once(client: hdfs_native.Client, path: str, size_bytes: int, seed: int) -> str:
    generator = np.random.default_rng(seed)
    digest = blake3.blake3()
    with client.create(path, hdfs_native.WriteOptions(replication=1, overwrite=True)) as writer:
        left = size_bytes
        while left:
            piece = generator.bytes(min(left, _PIECE_BYTES))
            writer.write(piece)
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest()


def write_files(client: hdfs_native.Client, folder: str, count: int, size_bytes: int) -> dict[str, str]:
    """Write *count* different files of *size_bytes* into *folder*; returns path → BLAKE3 digest."""
    client.mkdirs(folder, 0o755, True)
    paths = [f"{folder}/file-{index:03d}.bin" for index in range(count)]
    with ThreadPoolExecutor(_WRITERS) as pool:
        digests = pool.map(lambda item: write_file(client, item[1], size_bytes, seed=item[0] + 1), enumerate(paths))
        return dict(zip(paths, digests, strict=True))


def make_empty_files(client: hdfs_native.Client, folder: str, count: int) -> None:
    """Create *count* empty files, named as a data set's shards are, in *folder*."""
    client.mkdirs(folder, 0o755, True)
    options = hdfs_native.WriteOptions(replication=1)

    def create(index: int) -> None:
        client.create(f"{folder}/sample-{index:08d}.jpg", options).close()

    with ThreadPoolExecutor(_CREATORS) as pool:
        for _ in pool.map(create, range(count), chunksize=64):
            pass
