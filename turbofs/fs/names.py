"""What a name means now: from what the source says to inodes, and what follows when a file changed underneath.

The cheap look (`Source.stat`) may carry a weak version, which proves nothing. Where bytes of the file may be cached (its
strong version is known), a difference is looked at again with `stat_exact` before anything is concluded. Every decision
between two awaits is made on the table as it is then.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from turbofs.config import FsConfig
from turbofs.errors import NotFoundError, StaleFileError, TurboError
from turbofs.fs.inodes import Inode, InodeTable
from turbofs.fs.owners import OwnerMap
from turbofs.model import Attributes, Change, FileKind, FileVersion
from turbofs.source.base import Source
from turbofs.write.staged_file import StagedFile

_PAGE_BYTES = mmap.PAGESIZE


class NameService:
    """Looks names up in the source and keeps the inode table true to it."""

    def __init__(
        self, source: Source, table: InodeTable, owners: OwnerMap, config: FsConfig, staged: StagedNames
    ) -> None:
        self._source = source
        self._table = table
        self._owners = owners
        self._timeout_s = config.attribute_timeout_s
        self._staged = staged
        self.drop_pages: Callable[[int], Awaitable[bool]] = _no_pages
        """Makes the kernel drop the pages of an inode; False where it has not by now."""

    async def look_up(self, parent: Inode, name: str) -> Inode:
        """The inode that *name* is in *parent* now. Raises NotFoundError and whatever the source raises."""
        path = parent.child_path(name)
        staged = self._staged.file_at(path)
        if staged is not None:
            return self._bind(parent, name, staged)
        asked_at = time.monotonic()
        try:
            seen = await self._source.stat(path)
        except NotFoundError:
            if await self._staged.moved_meanwhile(path) or parent.child_path(name) != path:
                return await self.look_up(parent, name)  # what is above was renamed here just then
            known = self._table.child(parent, name)
            if known is not None:
                self._table.detach(known)
            raise
        await self._owners.resolve(seen.owner, seen.group)
        staged = self._staged.file_at(path)
        if staged is not None:  # made, or changed, while the source was asked
            return self._bind(parent, name, staged)
        return await self.reconcile(parent, name, seen, asked_at=asked_at)

    def _bind(self, parent: Inode, name: str, staged: StagedFile) -> Inode:
        """The inode of a name whose content is in staging."""
        inode = self._table.child(parent, name)
        if inode is not None and inode.staged is not staged and (inode.staged or inode.kind is not FileKind.FILE):
            self._table.detach(inode)
            inode = None
        if inode is None:
            inode = self._table.add(parent, name, staged.attributes())
        self._staged.bind(inode, staged)
        return inode

    def is_old(self, inode: Inode) -> bool:
        """Whether the attributes of *inode* are older than the attribute timeout."""
        return time.monotonic() - inode.refreshed_at >= self._timeout_s

    async def refresh(self, inode: Inode) -> Inode:
        """Bring the attributes of *inode* up to date where they are older than the attribute timeout.

        An inode that lost its name but is open is asked through its handle, and keeps what was known last where even
        that is gone. Raises StaleFileError for one that is not open: the kernel then looks the name up again.
        """
        if inode.staged is not None and self._staged.shows(inode, inode.staged):
            return inode
        if not self.is_old(inode):
            return inode
        if not inode.detached and inode.parent is not None:
            try:
                found = await self.look_up(inode.parent, inode.name)
                if found is inode:
                    return inode
                self._table.drop_unused(found)  # nobody asked for the name's new file yet
            except NotFoundError:
                pass
            except StaleFileError:
                if not inode.open_handles:
                    raise
        if not inode.open_handles:
            raise StaleFileError(f"{inode.name!r} is gone or another file now")
        await self._refresh_open(inode)
        return inode

    async def refresh_root(self) -> None:
        """Ask for the root's attributes; keeps the last ones where the source does not answer. Never raises TurboError."""
        root = self._table.root
        try:
            seen = await self._source.stat("/")
            await self._owners.resolve(seen.owner, seen.group)
        except TurboError:
            return
        root.attributes = seen
        root.refreshed_at = time.monotonic()

    def reconcile_nowait(
        self, parent: Inode, name: str, seen: Attributes, *, seen_at: float | None = None
    ) -> Inode | None:
        """The inode for *seen*, where that needs no further question: a name that is new or unchanged. Else None.

        *seen_at*: since when *seen* may be out of date (on time.monotonic's clock; None: it is new). Whoever has looked
        since then knows better.
        """
        entries = parent.entries
        inode = entries.get(name) if entries is not None else None
        if inode is None:
            if seen_at is not None and self._table.was_removed_since(parent, name, seen_at):
                return None
            inode = self._table.add(parent, name, seen)
        elif (inode.staged is not None and self._staged.shows(inode, inode.staged)) or (
            seen_at is not None and inode.refreshed_at > seen_at
        ):
            return inode
        elif inode.attributes != seen:
            if _change(inode, seen) is not Change.SAME:
                return None
            _adopt(inode, seen)
        inode.refreshed_at = time.monotonic() if seen_at is None else seen_at
        return inode

    async def reconcile(self, parent: Inode, name: str, seen: Attributes, *, asked_at: float | None = None) -> Inode:
        """The inode for what the source said of *name*; replaces or advances the one that was there.

        *asked_at*: when the source was asked (on time.monotonic's clock). What changed here since then is newer.
        """
        exact = False
        while True:
            known = self._table.child(parent, name)
            if known is not None and asked_at is not None and known.refreshed_at > asked_at:
                return known
            inode = self.reconcile_nowait(parent, name, seen)
            if inode is not None:
                return inode
            known = self._table.child(parent, name)
            assert known is not None
            if known.attributes.version.strong and not seen.version.strong and not exact:
                seen = await self._source.stat_exact(parent.child_path(name))
                exact = True
            elif _change(known, seen) is Change.REPLACED:
                self._table.detach(known)
            else:
                known.open_handles += 1  # the kernel may forget it while the source is asked
                try:
                    await self.advance(known, seen)
                except BaseException as error:
                    known.open_handles -= 1
                    self._table.drop_unused(known)
                    if not isinstance(error, StaleFileError):
                        raise
                    continue  # what is open is not that file any more: the name gets an inode of its own
                known.open_handles -= 1
                if not known.detached:
                    return known
                self._table.drop_unused(known)

    async def touched(self, inode: Inode, version: FileVersion) -> None:
        """Attributes of the open *inode* were set through this mount: its bytes are still those that its readers have.

        The file is opened anew, because a local tree cannot tell a new time from new bytes.
        """
        reader = inode.reader
        if reader is None or reader.version == version:
            return
        fresh = await self._source.open(inode.path)
        same = (reader.version.file_id, reader.version.size) == (fresh.version.file_id, fresh.version.size)
        if not same or inode.reader is not reader:
            await fresh.aclose()
            return
        before, reader.source_file = reader.source_file, fresh
        reader.advance(fresh.version)
        await before.aclose()

    async def advance(self, inode: Inode, seen: Attributes) -> None:
        """*inode* is the same file, grown or touched: go on with its new version.

        The attributes stay as they are where the kernel could not be made to let go of the old last page by now.
        """
        if inode.reader is not None:
            try:
                inode.reader.advance(await inode.reader.source_file.refresh())
            except StaleFileError:
                self._table.detach(inode)
                raise
        await self._tell(inode, seen)

    async def _tell(self, inode: Inode, seen: Attributes) -> None:
        """Let *seen* be what the kernel is told of *inode*, whose reader already gives the bytes of that version.

        The kernel fills the last page of a file with zeros. Told of a longer file, it drops its pages, but only after it
        has believed the new size: a reader in between would be given those zeros as bytes. So the page goes first.
        """
        grows = seen.size > inode.attributes.size and inode.attributes.size % _PAGE_BYTES
        if grows and inode.open_handles and inode.lookups and not await self.drop_pages(inode.number):
            return
        inode.attributes = seen
        inode.refreshed_at = time.monotonic()

    async def _refresh_open(self, inode: Inode) -> None:
        if inode.reader is None:
            return
        try:
            version = await inode.reader.source_file.refresh()
        except StaleFileError:
            return
        if inode.reader.version != version:
            inode.reader.advance(version)
        await self._tell(inode, inode.attributes.with_version(version))


class StagedNames(Protocol):
    """What this room is told of files that the mount writes."""

    def file_at(self, path: str) -> StagedFile | None:
        """The staged file that the local name *path* means, where the source does not have all of it."""

    def bind(self, inode: Inode, staged: StagedFile) -> None:
        """*inode* is *staged* from now on."""

    async def moved_meanwhile(self, path: str) -> bool:
        """Whether *path*, or what is above it, is being renamed here; returns when it is not any more."""

    def shows(self, inode: Inode, staged: StagedFile) -> bool:
        """Whether *staged* is what the inode's name means now; its attributes are brought up to date then."""


class NothingStaged:
    """What `names` is told on a mount that only reads."""

    def file_at(self, _path: str) -> StagedFile | None:
        return None

    def bind(self, inode: Inode, staged: StagedFile) -> None:
        raise ValueError(f"{inode.name!r} cannot be staged on a mount that only reads ({staged.number})")

    async def moved_meanwhile(self, _path: str) -> bool:
        return False

    def shows(self, _inode: Inode, _staged: StagedFile) -> bool:
        return False


async def _no_pages(_number: int) -> bool:
    await trio.lowlevel.checkpoint()
    return True


def _change(inode: Inode, seen: Attributes) -> Change:
    known = inode.attributes
    if known.kind is not seen.kind:
        return Change.REPLACED
    if seen.kind is FileKind.FILE:
        return known.version.compare(seen.version)
    ids = known.version.file_id, seen.version.file_id
    return Change.REPLACED if all(ids) and ids[0] != ids[1] else Change.SAME


def _adopt(inode: Inode, seen: Attributes) -> None:
    version = inode.attributes.version
    if version.strong and not seen.version.strong:
        # What was compared with a file's version is the same; of a directory the cheap look tells all but the identity.
        same = version if seen.kind is FileKind.FILE else seen.version._replace(file_id=version.file_id)
        seen = seen.with_version(same)
    inode.attributes = seen
