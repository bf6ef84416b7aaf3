"""The sparse local files of the staging area: system calls on them, and the room that their blocks take."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

from turbofs.errors import OutOfSpaceError, TurboError
from turbofs.write.ranges import RangeSet
from turbofs.write.staging import PAGE_BYTES, StagingArea

T = TypeVar("T")

_PUNCH_HOLE, _KEEP_SIZE = 2, 1


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of *data* at *offset*, in as many calls as it takes."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def guarded(area: StagingArea, function: Callable[[], T]) -> T:
    """What *function* returns; an OSError of it becomes OutOfSpaceError, or a TurboError for any other failure."""
    try:
        return function()
    except OSError as error:
        kind = OutOfSpaceError if error.errno in {errno.ENOSPC, errno.EDQUOT} else TurboError
        raise kind(
            f"staging in {area.directory} failed: {error.strerror}",
            advice="free space there, or choose another directory with --staging-dir",
        ) from error


def punch(fd: int, start: int, stop: int) -> None:
    """Give the blocks of bytes [start, stop) back to the file system. Raises OSError where it cannot do that."""
    # Python has no fallocate with a mode.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_int64(start), ctypes.c_int64(stop - start)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def room_bytes(found: os.stat_result) -> int:
    """What a file takes of its disk or memory: its holes take nothing."""
    return found.st_blocks * 512


class Room:
    """The room of one file: the pages of it that count in the area."""

    def __init__(self, area: StagingArea) -> None:
        self._area = area
        self._pages = RangeSet()
        self._handed_over = False

    @property
    def total_bytes(self) -> int:
        return self._pages.total

    async def take(self, start: int, stop: int) -> None:
        """Have room for bytes [start, stop), waiting for it as the area does. Raises OutOfSpaceError."""
        first, last = _pages(start, stop)
        if not self._pages.covers(first, last):
            needed = sum(gap.length for gap in self._pages.gaps(first, last))
            await self._area.reserve(needed)
            self._note(first, last, reserved=needed)

    def take_nowait(self, start: int, stop: int) -> bool:
        """The same, within the hard limit; False where there is none."""
        first, last = _pages(start, stop)
        needed = sum(gap.length for gap in self._pages.gaps(first, last))
        if needed and not self._area.reserve_nowait(needed):
            return False
        self._note(first, last, reserved=needed)
        return True

    def adopt(self, fd: int) -> None:
        """Count what file *fd* has from an earlier mount. Raises OSError."""
        for start, stop in _data_of(fd):
            self._pages.add(*_pages(start, stop))
        self._area.adopt(self._pages.total)

    def free(self, start: int, stop: int) -> int:
        """Give back the pages [start, stop), which were punched out; how many bytes that is."""
        before = self._pages.total
        self._pages.remove(start, stop)
        self._area.release(before - self._pages.total)
        return before - self._pages.total

    def cut(self, size: int) -> None:
        """Give back what is behind a file of *size* bytes."""
        before = self._pages.total
        self._pages.truncate(_pages(0, size)[1])
        self._area.release(before - self._pages.total)

    def hand_over(self) -> int:
        """Somebody else counts these pages from now on: how many bytes that is."""
        total, self._pages, self._handed_over = self._pages.total, RangeSet(), True
        return total

    def _note(self, first: int, last: int, *, reserved: int) -> None:
        before = self._pages.total
        if not self._handed_over:
            self._pages.add(first, last)
        # Somebody else took some of it while this waited.
        self._area.release(reserved - (self._pages.total - before))


def _pages(start: int, stop: int) -> tuple[int, int]:
    return start - start % PAGE_BYTES, -(-stop // PAGE_BYTES) * PAGE_BYTES


def _data_of(fd: int) -> Iterator[tuple[int, int]]:
    """The ranges of file *fd* that are not holes."""
    stop = 0
    while True:
        try:
            start = os.lseek(fd, stop, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        stop = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, stop
