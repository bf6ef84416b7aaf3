"""What a mount that writes has more than one that reads, put together; and the end of it: draining and closing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import structlog
import trio

from turbofs.background import Background
from turbofs.config import WriteConfig
from turbofs.errors import TurboError
from turbofs.fs.changes import NameChanges
from turbofs.fs.conflicts import Conflicts
from turbofs.fs.hint_store import HintStore
from turbofs.fs.inodes import Inode, InodeTable
from turbofs.fs.local_source import LocalSource
from turbofs.fs.owners import OwnerMap
from turbofs.fs.permissions import oversees
from turbofs.fs.tree import Tree
from turbofs.fs.writing import Writing
from turbofs.metrics import Metrics
from turbofs.source.base import Source
from turbofs.write.opening import close_staging
from turbofs.write.overview import Overview
from turbofs.write.recovery import delete_leftovers, recover
from turbofs.write.saving import LEFT_FILE, Left, save, write_left
from turbofs.write.staging import Staging
from turbofs.write.sweeping import Sweeper
from turbofs.write.writes import Writes

_log = structlog.get_logger(__name__)

_NOBODY = -1


class WriteRoom:
    """Writing of one mount over *origin*, staged in *staging*. `local` is the source as this mount shows it.

    The tree is made from `local` and `writing`, and given back by `join`, which completes the room.
    """

    changes: NameChanges
    conflicts: Conflicts

    def __init__(
        self,
        origin: Source,
        staging: Staging,
        config: WriteConfig,
        table: InodeTable,
        owners: OwnerMap,
        hints: HintStore,
        background: Background,
        state_directory: Path,
    ) -> None:
        self._origin = origin
        self._staging = staging
        self._config = config
        self._table = table
        self._owners = owners
        self._hints = hints
        self._background = background
        self._state = state_directory
        self._durability = trio.Event()
        self.writes = Writes(origin, staging.area, staging.journal, config, background)
        self.overview = Overview(self.writes, staging.area)
        self.local = LocalSource(origin, self.writes.view, owners)
        self.local.moved = self.writes.changes.moved
        self.writing = Writing(self.local, table, owners, hints, self.writes)
        self.writes.on_reverted = self._reverted
        self.writes.flusher.published_in = Sweeper(origin, background).published_in
        self.writes.on_durability = self._durability_moved

    def join(self, tree: Tree) -> None:
        """*tree* is the one that shows what is written here."""
        self.changes = NameChanges(tree, self.local, self.writing, self._hints)
        self.conflicts = Conflicts(tree, self.writing)

    def start(self) -> None:
        """Take up what an earlier mount left undone."""
        recovered = recover(self.writes, self._staging.area, self._staging.journal)
        self._background.start_soon(delete_leftovers, self._origin, self._staging.journal, recovered)

    def forget_parked(self, inode: Inode) -> None:
        """A handle of *inode* was closed: after the last one nobody needs its content any more."""
        path = inode.parked_path
        if path is not None and not inode.open_handles:
            inode.parked_path = None
            self._background.start_soon(self._delete_parked, path)

    def tell(self, metrics: Metrics) -> None:
        """Bring the metrics of writing up to date."""
        metrics.staged_bytes.set(self._staging.area.used_bytes)
        metrics.broken_files.set(len(self.writes.broken))
        flusher = self.writes.flusher
        metrics.uploaded_bytes.inc(flusher.uploaded_bytes)
        flusher.uploaded_bytes = 0

    def report(self, uid: int | None) -> dict[str, object]:
        """What `turbofs status` shows of writing to the user *uid* (None: anybody).

        Names may lie where others may not search: they are told to root, to the mount's own user, and of files to
        whoever owns them. The rest is counted for everybody.
        """
        document = self.overview.report(lambda owner: uid is not None and oversees(uid, self._uid_of(owner)))
        return {**document, "left_file": str(self._state / LEFT_FILE)}

    def _uid_of(self, owner: str | int | None) -> int:
        known = self._owners.resolve_nowait(owner, owner) if owner is not None else None
        return known[0] if known is not None else _NOBODY

    def durability_changed(self) -> trio.Event:
        """Set when the durability of something changes next."""
        return self._durability

    async def end(self) -> None:
        """Bring what was acknowledged to the source, within `write.drain`, keep the rest, and close the staging area.

        What is kept in memory goes to disk: memory does not outlive the machine. Never raises TurboError.
        """
        with trio.move_on_after(self._config.drain_s):
            await self.writes.drain()
        await self.writes.stop()
        files = self.writes.promises.files()
        journal = self._staging.journal
        kept = any((journal.files(), journal.acts(), journal.parked(), journal.broken()))
        waiting = len(journal.acts())
        journal.close()
        left = None
        if kept:
            where = self._staging.area.directory
            if self._staging.area.on_tmpfs:
                try:
                    where = await trio.to_thread.run_sync(save, self._staging.area, self._state)
                except TurboError as error:
                    _log.error("staged bytes stay in memory", error=str(error), advice=error.advice)
            paths = sorted(file.path for file in files)
            left = Left(len(files), sum(file.size for file in files), str(where), tuple(paths))
            if waiting:
                _log.error(
                    "not written to the source yet",
                    acts=waiting,
                    files=left.files,
                    bytes=left.bytes,
                    where=left.where,
                    paths=paths[:20],
                )
        write_left(self._state, left if waiting else None)
        close_staging(self._staging, empty=not kept)

    async def _delete_parked(self, path: str) -> None:
        try:
            await self._origin.delete(path)
        except TurboError as error:
            _log.info("a deleted file that was open stays until it is swept", path=path, error=str(error))

    def _reverted(self, paths: Iterable[str]) -> None:
        """Local names mean what the source says again: whoever has one looks it up anew."""
        for path in paths:
            inode: Inode | None = self._table.root
            for name in filter(None, path.split("/")):
                inode = None if inode is None else self._table.child(inode, name)
            if inode is not None and inode is not self._table.root:
                self._table.detach(inode)

    def _durability_moved(self) -> None:
        event, self._durability = self._durability, trio.Event()
        event.set()
