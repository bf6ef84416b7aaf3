"""One budget for every buffer of a mount, and the recycled slabs that large extents live in.

A fresh anonymous page costs a fault and a zeroing, 0.3 s of CPU a GiB; a slab that was used before costs nothing.
Slabs are therefore kept and handed out again, backed by huge pages where the kernel has them. What is kept counts
against the budget just as what is in use, so the resident size stays below it.

All methods run on the event loop. A buffer that was freed may be handed out and overwritten at once: whoever frees
one must know that no other thread still writes to it, and that no reply is still being copied from it.
"""

from __future__ import annotations

import mmap

_PAGE_BYTES = mmap.PAGESIZE
_SMALL_BYTES = 64 * 1024
"""Below this a bytearray is cheaper than a mapping of its own (two system calls and a whole page at least)."""
_OVERHEAD_BYTES = 512
"""Python's own objects around one buffer (extent, view, list slots), so that a million tiny ones are bounded too."""


class Buffer:
    """*length* writable bytes that belong to one owner until they are freed."""

    __slots__ = ("charged_bytes", "memory", "slab", "view")

    def __init__(self, memory: bytearray | mmap.mmap, length: int, charged_bytes: int, slab: bool) -> None:
        self.memory = memory
        self.view = memoryview(memory)[:length]
        self.charged_bytes = charged_bytes
        self.slab = slab


class MemoryBudget:
    """At most *limit_bytes* for all buffers; slabs of *slab_bytes* are recycled."""

    def __init__(self, limit_bytes: int, slab_bytes: int) -> None:
        if limit_bytes < 4 * slab_bytes:
            raise ValueError(f"a budget of {limit_bytes} bytes is below four extents of {slab_bytes} bytes")
        self.limit_bytes = limit_bytes
        self.slab_bytes = slab_bytes
        self._charged_bytes = 0
        self._free_slabs: list[mmap.mmap] = []

    @property
    def used_bytes(self) -> int:
        """Charged to live buffers."""
        return self._charged_bytes - len(self._free_slabs) * self.slab_bytes

    @property
    def resident_bytes(self) -> int:
        """Charged to live buffers and to slabs that wait to be used again."""
        return self._charged_bytes

    def cost_of(self, length: int) -> int:
        """What a buffer of *length* bytes is charged."""
        if length > self.slab_bytes // 2:
            return self.slab_bytes
        if length > _SMALL_BYTES:
            return -(-length // _PAGE_BYTES) * _PAGE_BYTES + _OVERHEAD_BYTES
        return length + _OVERHEAD_BYTES

    def allocate_nowait(self, length: int) -> Buffer | None:
        """A buffer of *length* bytes (at most a slab), or None where the budget does not allow it now."""
        if not 0 < length <= self.slab_bytes:
            raise ValueError(f"not the length of a buffer: {length}")
        cost = self.cost_of(length)
        if cost == self.slab_bytes:
            return self._allocate_slab(length)
        while self._charged_bytes + cost > self.limit_bytes:
            if not self._free_slabs:
                return None
            self._free_slabs.pop()
            self._charged_bytes -= self.slab_bytes
        self._charged_bytes += cost
        memory = _mapping(length) if length > _SMALL_BYTES else bytearray(length)
        return Buffer(memory, length, cost, slab=False)

    def free(self, buffer: Buffer) -> None:
        """Take *buffer* back; its memory may be handed out again at once."""
        if buffer.slab:
            assert isinstance(buffer.memory, mmap.mmap)
            self._free_slabs.append(buffer.memory)
            return
        self._charged_bytes -= buffer.charged_bytes
        if isinstance(buffer.memory, mmap.mmap):
            # The object may live on, in a traceback or a view; its pages must not.
            buffer.memory.madvise(mmap.MADV_DONTNEED)

    def _allocate_slab(self, length: int) -> Buffer | None:
        if self._free_slabs:
            memory = self._free_slabs.pop()
        else:
            if self._charged_bytes + self.slab_bytes > self.limit_bytes:
                return None
            memory = _mapping(self.slab_bytes)
            _ask_for_huge_pages(memory)
            self._charged_bytes += self.slab_bytes
        return Buffer(memory, length, self.slab_bytes, slab=True)


def _mapping(length: int) -> mmap.mmap:
    # Python's default is shared, which the kernel backs by tmpfs: dearer faults, and no huge pages.
    return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _ask_for_huge_pages(memory: mmap.mmap) -> None:
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        # A kernel without transparent huge pages: slower by the page faults, otherwise the same.
        return
