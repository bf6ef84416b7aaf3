"""The tree of names as the kernel and the control socket walk it: the source's, and the hidden one beside it.

Two ways in: the kernel holds inodes by lookup counts; everybody else resolves a path, holds the inode while using it, and
gives it back. No method holds a lock across a question to the source; what may change over an await is read again after it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import trio

from turbofs.background import Background
from turbofs.config import FsConfig
from turbofs.errors import InvalidRequestError, NameTooLongError, NotADirectoryTurboError, NotFoundError, TurboError
from turbofs.fs.hidden import HIDDEN_NAME, HiddenTree
from turbofs.fs.inodes import Inode, InodeTable
from turbofs.fs.names import NameService, StagedNames
from turbofs.fs.owners import OwnerMap
from turbofs.fs.permissions import SEARCH, require
from turbofs.fs.virtual import HintMirror, VirtualDirectory, VirtualFile, VirtualLink
from turbofs.model import Attributes, Caller, FileKind, join
from turbofs.source.base import Source

NAME_LIMIT_BYTES = 255
_PATIENCE_S = 1.0
"""How long a getattr of an open file waits for the source, before it answers what was known last."""


class _Refresh:
    """One question for the attributes of an open file, for all who want them now."""

    def __init__(self, patient_until: float) -> None:
        self.patient_until = patient_until
        self.ended = trio.Event()


class Tree:
    """Names to inodes, in *table*. *staged* knows what this mount writes; *hidden* is the fixed part of `.turbofs`."""

    def __init__(
        self,
        source: Source,
        config: FsConfig,
        table: InodeTable,
        owners: OwnerMap,
        staged: StagedNames,
        hidden: VirtualDirectory,
        background: Background,
    ) -> None:
        self.source = source
        self.owners = owners
        self.table = table
        self.table.root.refreshed_at = time.monotonic()
        self.names = NameService(source, self.table, self.owners, config, staged)
        self.hidden = HiddenTree(hidden, self.table)
        self._attribute_timeout_s = config.attribute_timeout_s
        self.background = background
        self._root_refreshing = False
        self._refreshes: dict[Inode, _Refresh] = {}

    async def lookup(self, parent_number: int, name: str, caller: Caller) -> Inode:
        """The inode of a name; the kernel then holds one lookup more of it."""
        inode = await self.find(self.table.get(parent_number), name, caller)
        inode.lookups += 1
        return inode

    def forget(self, counts: Sequence[tuple[int, int]]) -> None:
        """The kernel lets go of (inode number, lookups)."""
        for number, count in counts:
            self.table.forget(number, count)

    async def find(self, parent: Inode, name: str, caller: Caller) -> Inode:
        """As `lookup`, without the kernel's reference: the inode may be dropped at the caller's next await."""
        if len(os.fsencode(name)) > NAME_LIMIT_BYTES:
            raise NameTooLongError(f"a name of more than {NAME_LIMIT_BYTES} bytes")
        if isinstance(parent.virtual, HintMirror):
            return await self._find_mirror(parent, parent.virtual, name, caller)
        if parent.virtual is not None or (parent is self.table.root and name == HIDDEN_NAME):
            return self.hidden.child(parent, name)
        if not parent.is_directory:
            raise NotADirectoryTurboError(f"{parent.path} is not a directory")
        return await self.names.look_up(parent, name)

    async def resolve(self, path: str, caller: Caller, *, wanted: int = 0) -> Inode:
        """Walk to *path* as *caller*, who needs search permission on the way and *wanted* at its end.

        The inode is held until `give_back`.
        """
        inode = self.table.root
        inode.open_handles += 1
        try:
            for name in filter(None, path.split("/")):
                if not inode.is_directory:
                    raise NotADirectoryTurboError(f"{inode.path} is not a directory")
                self.require(inode, caller, SEARCH)
                child = await self.find(inode, name, caller)
                child.open_handles += 1
                self.give_back(inode)
                inode = child
            self.require(inode, caller, wanted)
        except BaseException:
            self.give_back(inode)
            raise
        return inode

    def give_back(self, inode: Inode) -> None:
        """End one hold on *inode*."""
        inode.open_handles -= 1
        self.table.drop_unused(inode)

    def require(self, inode: Inode, caller: Caller, wanted: int) -> None:
        """Raises AccessDeniedError where the mode bits of *inode* do not give *caller* what is *wanted*."""
        uid, gid = self.owner_of(inode.attributes)
        require(caller, uid, gid, inode.attributes.mode, wanted, inode.path)

    def owner_of(self, attributes: Attributes) -> tuple[int, int]:
        """(uid, gid) of a name whose owners were resolved when it was seen; nobody's where that is long ago."""
        known = self.owners.resolve_nowait(attributes.owner, attributes.group)
        return known or (self.owners.overflow_uid, self.owners.overflow_gid)

    async def getattr(self, number: int) -> Inode:
        """The inode with attributes no older than the attribute timeout.

        The root is answered from memory and refreshed behind: `df` and `umount` ask for it while the source is down.
        An open file is, too, while the source does not answer: the kernel asks for attributes before it reads, and
        would otherwise keep readers from bytes that are cached.
        """
        inode = self.table.get(number)
        if inode is self.table.root:
            if not inode.refreshed_at:  # a name in it was changed here
                with trio.move_on_after(_PATIENCE_S):
                    await self.names.refresh_root()
            self._refresh_root_soon()
        elif inode.virtual is None:
            if inode.detached and inode.staged is None and inode.reader is None and inode.open_handles:
                pass  # a directory that was removed while somebody has it open: what was known last
            elif inode.reader is not None and inode.staged is None:
                await self._refresh_patiently(inode)
            else:
                await self.names.refresh(inode)
            await self.owners.resolve(inode.attributes.owner, inode.attributes.group)
        elif isinstance(inode.virtual, VirtualFile):
            self.hidden.refresh(inode)
        return inode

    async def readlink(self, number: int) -> str:
        inode = self.table.get(number)
        if isinstance(inode.virtual, VirtualLink):
            return inode.virtual.target()
        if inode.kind is not FileKind.SYMLINK:
            raise InvalidRequestError(f"{inode.path} is not a symbolic link")
        return await self.source.readlink(inode.path)

    async def check_mirror(self, mirror: HintMirror, caller: Caller, wanted: int) -> None:
        """Raises where *caller* does not have *wanted* on what is mirrored."""
        self.give_back(await self.resolve(mirror.path, caller, wanted=wanted))

    async def _find_mirror(self, parent: Inode, mirror: HintMirror, name: str, caller: Caller) -> Inode:
        path = join(mirror.path, name)
        if path == f"/{HIDDEN_NAME}":
            raise NotFoundError("hints are about files of the source, not about hidden ones")
        real = await self.resolve(path, caller)  # which asks for search permission on every directory above it
        try:
            return self.hidden.mirror(parent, name, path, real.attributes)
        finally:
            self.give_back(real)

    async def _refresh_patiently(self, inode: Inode) -> None:
        """Refresh the open *inode*; past `_PATIENCE_S` go on without, and leave the refresh to its own deadline."""
        if not self.names.is_old(inode):
            return
        refresh = self._refreshes.get(inode)
        if refresh is None:
            refresh = self._refreshes[inode] = _Refresh(trio.current_time() + _PATIENCE_S)
            inode.open_handles += 1  # keeps it while the source is asked
            self.background.start_soon(self._refresh_open, inode, refresh)
        with trio.move_on_at(refresh.patient_until):
            await refresh.ended.wait()

    async def _refresh_open(self, inode: Inode, refresh: _Refresh) -> None:
        try:
            await self.names.refresh(inode)
        except TurboError:
            pass  # whoever has it open keeps what was known; who opens it again is told
        finally:
            del self._refreshes[inode]
            self.give_back(inode)
            refresh.ended.set()

    def _refresh_root_soon(self) -> None:
        async def refresh() -> None:
            try:
                await self.names.refresh_root()
            finally:
                self._root_refreshing = False

        age_s = time.monotonic() - self.table.root.refreshed_at
        if not self._root_refreshing and age_s > self._attribute_timeout_s:
            self._root_refreshing = True
            self.background.start_soon(refresh)
