"""What every source checks about its arguments before it asks anybody: paths, names, ranges."""

from __future__ import annotations

import os

from turbofs.errors import BadNameError, InvalidRequestError, NameTooLongError
from turbofs.model import ROOT

NAME_LIMIT_BYTES = 255


def components(path: str) -> list[str]:
    """The names along *path*, none for the root.

    Raises InvalidRequestError for a relative path, BadNameError for empty names, ".", "..", NUL, and for text that
    stands for no bytes (a lone surrogate outside PEP 383), NameTooLongError past 255 bytes.
    """
    if not path.startswith(ROOT):
        raise InvalidRequestError(f"{path!r} is not absolute", advice="paths inside a source begin with '/'")
    if path == ROOT:
        return []
    names = path[1:].split("/")
    for name in names:
        _check_name(name, path)
    return names


def require_utf8(path: str) -> None:
    """Raises BadNameError where a name along *path* is not UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise BadNameError(f"{path!r} is not UTF-8 at character {error.start}") from error


def require_range(offset: int, length: int, size: int) -> int:
    """How many of the *length* bytes from *offset* on lie inside a file of *size* bytes.

    Raises InvalidRequestError for a negative offset.
    """
    if offset < 0:
        raise InvalidRequestError(f"cannot read at offset {offset}", advice="offsets count from the start of the file")
    return max(0, min(length, size - offset))


def _check_name(name: str, path: str) -> None:
    if name in {"", ".", ".."} or "\0" in name:
        raise BadNameError(f"{path!r} has the name {name!r} in it", advice="give a path without '//', '.', '..' or NUL")
    try:
        length_bytes = len(os.fsencode(name))
    except UnicodeEncodeError as error:
        raise BadNameError(f"{path!r} has a name that stands for no bytes: {name!r}") from error
    if length_bytes > NAME_LIMIT_BYTES:
        raise NameTooLongError(f"a name of {length_bytes} bytes in {path[:80]!r}…; at most {NAME_LIMIT_BYTES}")
