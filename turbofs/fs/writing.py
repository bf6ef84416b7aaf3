"""Files open for writing: what open, write, truncate, flush, fsync and release mean for them.

All handles of one inode share its staged file, readers too: what one writes the others see. The staged file stays bound
to the inode until the source has it and nothing has the inode open; then the source's own bytes are read again.

FLUSH comes with each close of each duplicate of a descriptor. It publishes only when the process that opened the file has
no descriptor open for writing on it any more, and no other handle is (see `openers`); any other FLUSH leaves the bytes
staged, which they are.
"""

from __future__ import annotations

import os
import stat
import time
from collections import OrderedDict
from collections.abc import Callable

import trio

from turbofs.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    IsADirectoryTurboError,
    NotFoundError,
    NotSupportedError,
    StaleFileError,
)
from turbofs.fs.handles import StagedHandle
from turbofs.fs.hint_catalogue import Attribute
from turbofs.fs.hint_store import HintStore
from turbofs.fs.inodes import Inode, InodeTable
from turbofs.fs.local_source import LocalSource
from turbofs.fs.openers import holds_for_writing, thread_group_of
from turbofs.fs.owners import OwnerMap
from turbofs.model import Attributes, Caller, Change, FileKind, FileVersion, split
from turbofs.source.base import Capability
from turbofs.write.acts import Early
from turbofs.write.staged_file import StagedFile
from turbofs.write.writes import Writes

_EARLY_LEVEL = "staged"
_DIGESTS_KEPT = 10_000
"""Of files that were published lately: 300 bytes each."""


class Writing:
    """Staged files and the inodes that they are."""

    def __init__(
        self, source: LocalSource, table: InodeTable, owners: OwnerMap, hints: HintStore, writes: Writes
    ) -> None:
        self._source = source
        self._table = table
        self._owners = owners
        self._hints = hints
        self.writes = writes
        self.device: str | None = None
        """MAJOR:MINOR of the mount, once it is there."""
        self.pages_are_stale: Callable[[int], None] = lambda _number: None
        self._inodes: dict[StagedFile, Inode] = {}
        self._digests: OrderedDict[FileVersion, str] = OrderedDict()
        writes.flusher.published = self._published
        writes.on_released = self._released

    # --- names (what `names` is told)

    def file_at(self, path: str) -> StagedFile | None:
        return None if self.writes.view.empty else self.writes.file_at(path)

    def bind(self, inode: Inode, staged: StagedFile) -> None:
        """*inode* is *staged* until `settle` says otherwise."""
        if inode.staged is not staged:
            before = self._inodes.get(staged)
            if before is not None:
                before.staged = None
            else:
                staged.users += 1
            self._inodes[staged] = inode
            inode.staged = staged
            inode.kernel_version = None
        if staged.unlinked or self.writes.is_dirty(staged):
            inode.attributes = staged.attributes()

    async def moved_meanwhile(self, path: str) -> bool:
        return await self.writes.acts.renamed(lambda: path)

    def shows(self, inode: Inode, staged: StagedFile) -> bool:
        if not (staged.unlinked or self.writes.is_dirty(staged)):
            return False
        inode.attributes = staged.attributes()
        return True

    def digest_of(self, version: FileVersion) -> str | None:
        """BLAKE3 of what this mount published as *version* lately."""
        return self._digests.get(version)

    async def settle(self, inode: Inode) -> None:
        """Unbind the staged file of *inode* where nobody has either of them open and nothing of it is promised."""
        staged = inode.staged
        if staged is None or inode.open_handles or staged.users > 1:
            return
        lost = not staged.unlinked and self.writes.is_dirty(staged)
        inode.staged = None
        del self._inodes[staged]
        if lost and not inode.detached:
            self._table.detach(inode)  # the name is again what the source says
        await self.writes.release(staged)

    # --- open

    async def open(self, inode: Inode, flags: int, caller: Caller) -> StagedHandle:
        """Open an existing file for writing, or one that is staged for anything. Raises StaleFileError to look again."""
        if inode.kind is FileKind.DIRECTORY:
            raise IsADirectoryTurboError(f"{inode.path} is a directory")
        if inode.kind is not FileKind.FILE:
            raise NotSupportedError(f"{inode.path} is a {inode.kind.value}, not a file")
        appends = flags & os.O_APPEND and flags & os.O_ACCMODE != os.O_RDONLY and not flags & os.O_TRUNC
        if appends and inode.staged is None and Capability.APPEND not in self._source.capabilities:
            raise NotSupportedError(f"{self._source.uri} cannot append to {inode.path}", advice="write the file anew")
        inode.open_handles += 1
        try:
            staged = await self._staged(inode)
            if flags & os.O_ACCMODE != os.O_RDONLY and self.writes.is_promised(staged):
                staged = await self._succeed(inode, staged, empty=bool(flags & os.O_TRUNC))
            handle = await self._handle(inode, staged, flags, caller)
        except BaseException:
            inode.open_handles -= 1
            self._table.drop_unused(inode)
            raise
        if flags & os.O_TRUNC and handle.writable:
            try:
                await self.truncate(inode, staged, 0)
            except BaseException:
                await self.release(handle)
                raise
        return handle

    async def create(self, parent: Inode, name: str, mode: int, flags: int, caller: Caller) -> StagedHandle:
        """A new file, or what is there where *flags* allow it; its handle holds the inode. Raises AlreadyExistsError."""
        self._source.origin.require_name(parent.child_path(name))
        try:
            seen = await self._source.stat(parent.child_path(name))
        except NotFoundError:
            seen = None
        if seen is not None:
            raise AlreadyExistsError(f"{parent.child_path(name)} exists")
        owner, group = await self.owner_for(caller, parent)
        if owner is not None and group is not None:
            await self._owners.resolve(owner, group)
        path = parent.child_path(name)  # only now: what is above may have been renamed while this waited
        staged = self.writes.create(path, mode=stat.S_IMODE(mode), owner=owner, group=group)
        staged.exclusive = bool(flags & os.O_EXCL)
        known = self._table.child(parent, name)
        if known is not None:
            self._table.detach(known)
        inode = self._table.add(parent, name, staged.attributes())
        self.bind(inode, staged)
        staged.users -= 1  # the binding's is the one that holds it from here on
        inode.open_handles += 1
        handle = await self._handle(inode, staged, flags, caller)
        handle.may_publish = True  # it has to be there after the close, whatever the descriptor may do
        return handle

    async def owner_for(self, caller: Caller, parent: Inode) -> tuple[str | int | None, str | int | None]:
        """Whom the source is to give what *caller* makes in *parent*; None: whoever the source says."""
        if Capability.OWNERS not in self._source.capabilities:
            return None, None
        group_of_parent = bool(parent.attributes.mode & stat.S_ISGID)
        if isinstance(parent.attributes.owner, int):
            return caller.uid, parent.attributes.group if group_of_parent else caller.gid
        # A source that knows names gives a new file its directory's group.
        return await self._owners.user_name(caller.uid), parent.attributes.group

    async def keep_content(self, inode: Inode, path: str) -> None:
        """Take all bytes of *inode*, which the source has as *path*, into staging: its name is about to go there.

        Raises OutOfSpaceError where they do not fit, and as the source does.
        """
        seen = await self._source.origin.stat_exact(path)
        staged = self.writes.update("", seen, path)
        staged.unlinked = True
        try:
            await staged.fill_all()
        except BaseException:
            await self.writes.release(staged)
            raise
        self.bind(inode, staged)
        staged.users -= 1
        self.pages_are_stale(inode.number)

    # --- bytes

    async def write(self, handle: StagedHandle, offset: int, data: bytes) -> None:
        if not handle.writable:
            raise InvalidRequestError("the file is not open for writing")
        staged = handle.staged
        if handle.append and offset != staged.size:
            # The kernel appends where it believes the end to be; somebody else may have moved it.
            offset = staged.size
            self.pages_are_stale(handle.inode.number)
        if handle.closed:  # by a child that inherited the descriptor
            handle.closed = False
            staged.closed_writers -= 1
        if handle.direct and handle.inode.caching_handles:
            self.pages_are_stale(handle.inode.number)  # kernels before 6.6 do not drop them by themselves
        handle.sequential = handle.sequential and offset == staged.size
        await staged.write(offset, data)
        staged.streamable = handle.sequential and not handle.early
        self.writes.changed(staged, stream=staged.streamable)

    async def truncate(self, inode: Inode, staged: StagedFile, size: int) -> None:
        if size != staged.size:
            await staged.truncate(size)
            self.writes.changed(staged)
        self.shows(inode, staged)

    async def truncate_by_name(self, inode: Inode, size: int, caller: Caller) -> None:
        """truncate(2): opened, cut and closed in one, with what a close promises."""
        handle = await self.open(inode, os.O_WRONLY | (os.O_TRUNC if size == 0 else 0), caller)
        try:
            await self.truncate(inode, handle.staged, size)
            await self._publish(handle, final=handle.staged.writers == 1)
        finally:
            await self.release(handle)

    # --- promises

    async def flush(self, handle: StagedHandle) -> None:
        """A descriptor was closed: see the module."""
        staged = handle.staged
        if not handle.may_publish or staged.unlinked:
            return
        if staged.error is None and not self.writes.outstanding(staged):
            return
        if await self._still_open(handle):
            return
        if handle.writable and not handle.closed:
            handle.closed = True
            staged.closed_writers += 1
        if staged.writers > staged.closed_writers:
            return
        await self._publish(handle, final=True)

    async def fsync(self, handle: StagedHandle) -> None:
        if not handle.staged.unlinked and self.writes.outstanding(handle.staged):
            await self._publish(handle, final=False)

    async def release(self, handle: StagedHandle) -> None:
        """The last duplicate of a descriptor is closed. What was dirtied since its last FLUSH is published after this."""
        inode, staged = handle.inode, handle.staged
        inode.open_handles -= 1
        if not handle.direct:
            inode.caching_handles -= 1
        if handle.writable:
            staged.writers -= 1
            staged.closed_writers -= handle.closed
        if handle.may_publish and not staged.writers and staged.error is None and self.writes.unpromised(staged):
            self.writes.publish_soon(staged, self._early(inode, handle.uid))
        await self.writes.release(staged)
        await self.settle(inode)
        self._table.drop_unused(inode)

    async def _publish(self, handle: StagedHandle, *, final: bool) -> None:
        await self.writes.publish(handle.staged, self._early(handle.inode, handle.uid), final=final)

    def _early(self, inode: Inode, uid: int) -> Early | None:
        """The early acknowledgement that holds for *inode*, if any."""
        if inode.detached:
            return None
        return self.early_for(inode.path, uid)

    def early_for(self, path: str, uid: int) -> Early | None:
        found = self._hints.effective(path, Attribute.ACK, uid=uid)
        if found is None or found.value != _EARLY_LEVEL:
            return None
        if found.path == path:  # set on the file itself: its directory is the job's
            directory = split(path)[0]
            return Early(directory, directory)
        return Early(found.path, split(found.path)[0])

    async def _still_open(self, handle: StagedHandle) -> bool:
        if handle.opener is None or self.device is None:
            return False
        tgid, device, number = handle.opener, self.device, handle.inode.number
        return bool(await trio.to_thread.run_sync(holds_for_writing, tgid, device, number))

    # --- steps

    async def _staged(self, inode: Inode) -> StagedFile:
        bound = inode.staged
        if bound is not None and (bound.unlinked or self.writes.is_dirty(bound) or inode.detached):
            return bound
        path = inode.path
        found = self.file_at(path)
        if found is not None:
            self.bind(inode, found)
            return found
        try:
            seen = await self._source.stat_exact(path)
        except NotFoundError:
            if inode.detached or inode.path == path:
                raise
            raise StaleFileError(f"{path} was renamed just now") from None
        path = inode.path
        if inode.staged is not None and inode.staged is not bound:
            return inode.staged  # somebody else opened it while this waited
        self._agree(inode, seen)
        if bound is not None:
            if bound.size != seen.size:  # it grew elsewhere since it was published
                self._table.detach(inode)
                raise StaleFileError(f"{inode.name!r} grew elsewhere")
            return bound

        staged = self.writes.update(path, seen, self._source.on_source(path))
        self.bind(inode, staged)
        staged.users -= 1
        return staged

    async def _succeed(self, inode: Inode, staged: StagedFile, *, empty: bool) -> StagedFile:
        """What is promised of *staged* stays as it is: a new file takes its place, unless somebody has it open.

        Whoever goes on writing through a descriptor whose fsync was acknowledged does write to the same bytes.
        """
        if inode.open_handles - 1 > staged.closed_writers or staged.unlinked or staged.error is not None:
            return staged
        new = await self.writes.succeed(staged, empty=empty)
        if inode.staged is not staged or inode.open_handles - 1 > staged.closed_writers or staged.unlinked:
            await self.writes.release(new)
            raise StaleFileError(f"{inode.name!r} was opened or changed by somebody else meanwhile")
        inode.staged = None
        del self._inodes[staged]
        await self.writes.release(staged)
        self.bind(inode, new)
        new.users -= 1
        return new

    def _agree(self, inode: Inode, seen: Attributes) -> None:
        staged = inode.staged
        known = inode.attributes.version if staged is None else self.writes.flusher.side(staged).version
        if known is None or seen.kind is not FileKind.FILE or known.compare(seen.version) is Change.REPLACED:
            self._table.detach(inode)
            raise StaleFileError(f"{inode.name!r} was replaced or changed elsewhere")
        inode.attributes = seen

    async def _handle(self, inode: Inode, staged: StagedFile, flags: int, caller: Caller) -> StagedHandle:
        access = flags & os.O_ACCMODE
        writable = access != os.O_RDONLY
        # The page cache costs a copy, and a write-only descriptor has no use for it; nor must it pass by the pages that
        # another one has already. Who opens the file after it may map it: their pages are dropped as it writes.
        direct = writable and access == os.O_WRONLY and not inode.caching_handles
        handle = StagedHandle(
            inode,
            staged,
            writable=writable,
            append=bool(flags & os.O_APPEND),
            direct=direct,
            uid=caller.uid,
            opener=thread_group_of(caller.pid) if writable else None,
            early=not inode.detached and self.early_for(inode.path, caller.uid) is not None,
        )
        if not direct:
            inode.caching_handles += 1
        staged.users += 1
        if writable:
            staged.writers += 1
        return handle

    def _published(self, staged: StagedFile, attributes: Attributes) -> None:
        digest = self.writes.flusher.side(staged).digest
        if digest is not None and attributes.version.strong:
            self._digests[attributes.version] = digest
            if len(self._digests) > _DIGESTS_KEPT:
                self._digests.popitem(last=False)
        inode = self._inodes.get(staged)
        if inode is not None:
            inode.kernel_version = None
            if inode.parent is not None:
                inode.parent.refreshed_at = 0.0  # its times and sizes have moved
            inode.attributes = attributes
            inode.refreshed_at = time.monotonic()

    async def _released(self, staged: StagedFile) -> None:
        inode = self._inodes.get(staged)
        if inode is not None:
            await self.settle(inode)
