"""Parked bytes as users deal with them: who may see them, publish them after all, or drop them."""

from __future__ import annotations

import contextlib
import os
from functools import partial

from turbofs.errors import NotFoundError, NotPermittedError
from turbofs.fs.permissions import SEARCH, WRITE, oversees
from turbofs.fs.tree import Tree
from turbofs.fs.virtual import VirtualBytes, VirtualNode
from turbofs.fs.writing import Writing
from turbofs.model import Attributes, Caller, FileKind, FileVersion, split
from turbofs.write.journal import ParkedRecord


class Conflicts:
    """What is under `.turbofs/conflicts`: for root, the mount's own user, and whoever owns the file."""

    def __init__(self, tree: Tree, writing: Writing) -> None:
        self._tree = tree
        self._writes = writing.writes

    async def list(self, caller: Caller) -> list[dict[str, object]]:
        """All about each conflict that *caller* may deal with."""
        return [
            {
                "id": record.id,
                "path": record.path,
                "size": record.size,
                "reason": record.reason,
                "parked_at": record.parked_ns / 1e9,
                "blake3": record.digest,
                "base": record.base.token() if record.base is not None else None,
                "mode": record.mode,
                "owner": record.owner,
                "hidden": f"/.turbofs/conflicts/{name_of(record)}",
            }
            for record in self._writes.parking.records()
            if await self._may(record, caller)
        ]

    async def publish(self, number: int, to: str | None, caller: Caller) -> dict[str, object]:
        """Give parked bytes the name *to* (None: the one they were meant for), replacing what has it. Waits for it.

        Raises NotFoundError, NotPermittedError, AccessDeniedError, and as the source does; they stay parked then.
        """
        record = await self._record(number, caller)
        path = to or record.path
        self._tree.give_back(await self._tree.resolve(split(path)[0], caller, wanted=WRITE | SEARCH))
        replaced: Attributes | None = None
        with contextlib.suppress(NotFoundError):
            replaced = await self._tree.source.stat_exact(path)
        writes = self._writes
        version = replaced.version if replaced is not None else None
        await writes.parking.publish(record, path, version, writes.acts, writes.flusher)
        writes.drop_parked(number)
        writes.broken.heal(path)
        was = None if replaced is None else {"size": replaced.size, "mtime": replaced.mtime_ns / 1e9}
        return {"id": number, "path": path, "size": record.size, "replaced": was}

    async def drop(self, number: int, caller: Caller) -> None:
        """Delete parked bytes. Raises NotFoundError, NotPermittedError."""
        await self._record(number, caller)
        self._writes.drop_parked(number)

    async def _record(self, number: int, caller: Caller) -> ParkedRecord:
        record = self._writes.parking.record(number)
        if not await self._may(record, caller):
            raise NotPermittedError(f"conflict {number} is not yours", advice="its owner and root may deal with it")
        return record

    async def _may(self, record: ParkedRecord, caller: Caller) -> bool:
        owner = record.owner if record.owner is not None else -1
        uid, _ = await self._tree.owners.resolve(owner, record.group if record.group is not None else -1)
        return oversees(caller.uid, uid)


def parked_nodes(writing: Writing) -> dict[str, VirtualNode]:
    """What `.turbofs/conflicts` holds: parked bytes, each for its owner to read.

    The directory that may have shut others out is not above them here.
    """
    parking = writing.writes.parking
    return {
        name_of(record): VirtualBytes(_attributes(record), partial(parking.open, record.id))
        for record in parking.records()
    }


def _attributes(record: ParkedRecord) -> Attributes:
    return Attributes(
        kind=FileKind.FILE,
        version=FileVersion(record.size, record.parked_ns, f"parked:{record.id}"),
        mode=record.mode & 0o400,
        owner=record.owner if record.owner is not None else os.geteuid(),
        group=record.group if record.group is not None else os.getegid(),
    )


def name_of(record: ParkedRecord) -> str:
    """The name of parked bytes under `.turbofs/conflicts`."""
    return f"{record.id}-{split(record.path)[1]}"
