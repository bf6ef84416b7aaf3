"""The directory that the command was started in, which may be gone: it lay in a mount that died, or was deleted.

A shell that stands in such a directory is where people type the command that repairs it. Absolute paths work there;
a relative one cannot mean anything, and is refused rather than taken from somewhere else.
"""

from __future__ import annotations

import os

from turbofs.errors import InvalidRequestError

_here = {"lost": False}


def leave_if_lost() -> None:
    """Go to "/" where the working directory is gone: libraries ask for it while they are loaded, and would fail."""
    try:
        os.getcwd()
    except OSError:
        _leave()


def leave_below(directory: str) -> None:
    """Go to "/" if the working directory is *directory* or below it, which is about to go. Asks no file system."""
    try:
        here = os.getcwd()
    except OSError:
        here = directory
    if here == directory or here.startswith(directory.rstrip("/") + "/"):
        _leave()


def absolute(path: str) -> str:
    """*path* from the root, not normalised. Raises InvalidRequestError where that takes a directory that is gone."""
    if path.startswith("/"):
        return path
    try:
        if not _here["lost"]:
            return os.path.join(os.getcwd(), path)
    except OSError:
        pass
    raise InvalidRequestError(
        f"{path} is a relative path, and the working directory is gone",
        advice="`cd` elsewhere, or give an absolute path",
    )


def _leave() -> None:
    os.chdir("/")
    _here["lost"] = True
