"""Temporary names, under which files are written before they get their own, and the removal of those left behind."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection

from turbofs.errors import IsADirectoryTurboError, NotFoundError
from turbofs.model import FileKind, join
from turbofs.source.base import Source

_TEMPORARY = re.compile(r"\.turbofs-[0-9a-f]{16}\.tmp")
_NS_PER_S = 10**9


def temporary_name() -> str:
    """A hidden name that no other writer has."""
    return f".turbofs-{secrets.token_hex(8)}.tmp"


def is_temporary_name(name: str) -> bool:
    """Whether *name* (no path) is one that `temporary_name` makes."""
    return _TEMPORARY.fullmatch(name) is not None


async def sweep(
    source: Source, directory: str, *, older_than_s: float, now_ns: int, keep: Collection[str] = ()
) -> list[str]:
    """Delete what dead writers left in *directory* of *source* (not below it); the paths of what was deleted.

    That are files with a temporary name, not in *keep* (paths), last modified more than *older_than_s* seconds before
    *now_ns* and open for writing nowhere. What vanishes meanwhile is no error; raises what listing and deleting raise.
    """
    newest_ns = now_ns - round(older_than_s * _NS_PER_S)
    found: list[str] = []
    async with await source.list(directory) as listing:
        while batch := await listing.next_batch():
            for name, attributes in batch:
                if (
                    is_temporary_name(name)
                    and attributes.kind is FileKind.FILE
                    and attributes.mtime_ns < newest_ns
                    and join(directory, name) not in keep
                ):
                    found.append(join(directory, name))
    deleted: list[str] = []
    for path in found:
        try:
            # A file that is being written keeps the time at which it was created, on HDFS.
            if not await source.being_written(path):
                await source.delete(path)
                deleted.append(path)
        except (NotFoundError, IsADirectoryTurboError):
            continue
    return deleted
