"""Reads that tests make of files in a mount."""

from __future__ import annotations

import mmap
import os

_FILL = b"\xaa"


def read_at(fd: int, offset: int, length: int) -> bytes:
    """Up to *length* bytes at *offset*. The buffer is aligned, as O_DIRECT wants it, and not of zeros before."""
    with mmap.mmap(-1, length) as buffer:
        buffer[:] = _FILL * length
        count = os.preadv(fd, [buffer], offset)
        return buffer[:count]


def read_or_errno(fd: int, offset: int, length: int) -> bytes | int:
    """As `read_at`, but an error is returned as its errno."""
    try:
        return read_at(fd, offset, length)
    except OSError as error:
        return error.errno or -1
