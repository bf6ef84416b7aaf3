"""Settings of the C library's allocator that suit a daemon which moves many buffers of 64 KiB."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h's names for mallopt(3)
_TRIM_BYTES = 32 << 20
_MMAP_BYTES = 8 << 20
_ARENAS = 4
"""Each keeps what was freed in it: one for each of 64 threads would hold as many buffers as were ever in use."""


def keep_freed_memory() -> None:
    """Let glibc keep what was freed for the next buffer instead of handing it to the kernel at once.

    By default each buffer that hdfs-native frees takes the top of the heap with it, and the next one costs page faults:
    30,000 a GiB read, 0.15 s on a virtual machine. Another C library is left as it is.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
    mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
    mallopt(_M_ARENA_MAX, _ARENAS)
