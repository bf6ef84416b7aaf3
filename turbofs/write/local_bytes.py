"""System calls on the sparse local files of the staging area."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import TypeVar

from turbofs.errors import OutOfSpaceError
from turbofs.write.staging import StagingArea

T = TypeVar("T")

_PUNCH_HOLE, _KEEP_SIZE = 2, 1


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of *data* at *offset*, in as many calls as it takes."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def guarded(area: StagingArea, function: Callable[[], T]) -> T:
    """What *function* returns; an OSError of it becomes OutOfSpaceError, which says what to do."""
    try:
        return function()
    except OSError as error:
        raise OutOfSpaceError(
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
