"""System calls relative to a root directory that no path can leave.

Each directory on the way is opened by its descriptor and never through a link: the kernel has resolved links for
whoever uses the mount, so a link in the middle can only mean that the tree changed meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from turbofs.source.checks import components

_WALK_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
_RENAME_NOREPLACE = 1
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def parent_of(root_fd: int, path: str) -> Iterator[tuple[int, str]]:
    """The descriptor of the directory that has *path*, and the name in it ("." for the root itself)."""
    names = components(path)
    directory = root_fd
    try:
        for name in names[:-1]:
            deeper = os.open(name, _WALK_FLAGS, dir_fd=directory)
            if directory != root_fd:
                os.close(directory)
            directory = deeper
        yield directory, names[-1] if names else "."
    finally:
        if directory != root_fd:
            os.close(directory)


def rename_no_replace(old: str, old_fd: int, new: str, new_fd: int) -> None:
    """renameat2(RENAME_NOREPLACE): atomic, fails with EEXIST; EINVAL where the file system does not offer it."""
    if _libc.renameat2(old_fd, os.fsencode(old), new_fd, os.fsencode(new), _RENAME_NOREPLACE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), new)


def sync_directory(directory_fd: int) -> None:
    """Make the names in a directory durable, where its file system can and this process may read it.

    One that was deleted meanwhile has no names.
    """
    with suppress(PermissionError, FileNotFoundError):
        readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=directory_fd)
        try:
            os.fsync(readable)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.EROFS}:
                raise
        finally:
            os.close(readable)
