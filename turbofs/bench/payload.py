"""The bytes that scenes write: random, made before the clock starts, in memory that two processes share.

The run fills the buffer anew each round and knows its digest; the writer process maps the same memory and copies
nothing. The memory belongs to no file system, so it is gone when both are.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import Self

import blake3
import numpy as np

MIB = 1 << 20
CHUNK_BYTES = MIB
"""What one write hands over; contents are rotated in these steps."""
_PIECE_BYTES = 8 * MIB


class Payload:
    """*size_bytes* (a multiple of CHUNK_BYTES) of shared memory, page-aligned. Close it when no process uses it."""

    def __init__(self, size_bytes: int) -> None:
        if size_bytes <= 0 or size_bytes % CHUNK_BYTES:
            raise ValueError(f"{size_bytes} bytes are not a positive multiple of {CHUNK_BYTES}")
        self.size_bytes = size_bytes
        self._descriptor = os.memfd_create("turbofs-bench-payload")
        os.ftruncate(self._descriptor, size_bytes)
        self._memory = mmap.mmap(self._descriptor, size_bytes)
        self.view = memoryview(self._memory)

    @property
    def path(self) -> str:
        """Where another process of the same user finds it, as long as this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def fill(self, seed: int) -> None:
        """Random bytes, a function of *seed*, over the whole buffer."""
        generator = np.random.Generator(np.random.SFC64(seed))
        for start in range(0, self.size_bytes, _PIECE_BYTES):
            piece = generator.bytes(min(_PIECE_BYTES, self.size_bytes - start))
            self.view[start : start + len(piece)] = piece

    def digest(self, shift_bytes: int = 0) -> str:
        """BLAKE3 of the content that begins at *shift_bytes* and goes around (see `rotated`)."""
        hasher = blake3.blake3()
        for piece in (self.view[shift_bytes:], self.view[:shift_bytes]):
            hasher.update(piece)
        return hasher.hexdigest()

    def close(self) -> None:
        self.view.release()
        self._memory.close()
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def rotated(data: memoryview, shift_bytes: int = 0) -> Iterator[memoryview]:
    """All of *data* in chunks, from *shift_bytes* (a multiple of CHUNK_BYTES) to the end, then from the start.

    So that several writers write different files out of one buffer.
    """
    for start in range(shift_bytes, shift_bytes + len(data), CHUNK_BYTES):
        begin = start % len(data)
        yield data[begin : begin + CHUNK_BYTES]
