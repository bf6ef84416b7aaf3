"""What changes names and attributes: mkdir, rmdir, unlink, rename, symlink, chmod, chown, utimens.

Each is checked here as far as the local view knows more than the source does, carried out by the write room (at once, or
in its turn, see `write.changes`), and then shown: the inode table and the hints follow in the same step.
"""

from __future__ import annotations

import os
import stat
import time
from functools import partial

import structlog

from turbofs.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    IsADirectoryTurboError,
    NameTooLongError,
    NotADirectoryTurboError,
    NotEmptyError,
    NotFoundError,
    NotSupportedError,
    OutOfSpaceError,
    ReadOnlyError,
)
from turbofs.fs.hidden import HIDDEN_NAME
from turbofs.fs.hint_store import HintStore
from turbofs.fs.inodes import Inode
from turbofs.fs.local_source import LocalSource, changed
from turbofs.fs.tree import NAME_LIMIT_BYTES, Tree
from turbofs.fs.writing import Writing
from turbofs.model import AttributeChange, Caller, FileKind, FileVersion, join, split
from turbofs.source.base import Capability
from turbofs.source.orphans import sweep, temporary_name
from turbofs.write.acts import (
    Delete,
    DeleteDirectory,
    MakeDirectory,
    MakeLink,
    Rename,
    SetAttributes,
)
from turbofs.write.staged_file import StagedFile
from turbofs.write.sweeping import ORPHAN_S
from turbofs.write.view import OnSource

_log = structlog.get_logger(__name__)

_SET_ID_BITS = stat.S_ISUID | stat.S_ISGID
_COPIED_BYTES = 16 << 20
"""Up to this size, what is open and deleted is copied here; larger files get a hidden name until their last close."""
_REPLACED_BYTES = 256 << 20
"""Up to this size, what is open and replaced is copied here first; of larger ones their readers keep what is cached."""

RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2


class NameChanges:
    """Names and attributes of the tree, changed as the kernel asks."""

    def __init__(self, tree: Tree, source: LocalSource, writing: Writing, hints: HintStore) -> None:
        self._tree = tree
        self._source = source
        self._writing = writing
        self._writes = writing.writes
        self._hints = hints

    async def mkdir(self, parent: Inode, name: str, mode: int, caller: Caller) -> Inode:
        path = self._new_path(parent, name)
        owner, group = await self._writing.owner_for(caller, parent)
        mode = stat.S_IMODE(mode) | (parent.attributes.mode & stat.S_ISGID)
        act = MakeDirectory(path, mode, owner, group)
        if self._writes.changes.would_defer(act):
            await self._require_absent(path)
        await self._writes.change(act)
        _moved_on(parent)
        return await self._tree.names.look_up(parent, name)

    async def symlink(self, parent: Inode, name: str, target: str, caller: Caller) -> Inode:
        path = self._new_path(parent, name)
        if Capability.SYMLINKS not in self._source.capabilities:
            raise NotSupportedError(
                f"{self._source.uri} has no symbolic links", advice="copy the file, or use its path"
            )
        owner, group = await self._writing.owner_for(caller, parent)
        act = MakeLink(path, target, owner, group)
        if self._writes.changes.would_defer(act):
            await self._require_absent(path)
        await self._writes.change(act)
        _moved_on(parent)
        return await self._tree.names.look_up(parent, name)

    async def unlink(self, parent: Inode, name: str) -> None:
        inode = await self._existing(parent, name)
        if inode.is_directory:
            raise IsADirectoryTurboError(f"{inode.path} is a directory")
        path = inode.path
        staged = self._staged(inode)
        if staged is not None and not self._writes.has_on_source(staged):
            await self._writes.unlink_now(staged)
        else:
            act = Delete(path, _identity(inode, staged))
            await self._writes.change(act, partial(self._keep_readable, inode, staged, path))
            if staged is not None:
                await self._writes.unlink_now(staged)
        self._tree.table.remove(inode)
        _moved_on(parent)
        self._hints.forget(path)

    async def rmdir(self, parent: Inode, name: str) -> None:
        inode = await self._existing(parent, name)
        if not inode.is_directory:
            raise NotADirectoryTurboError(f"{inode.path} is not a directory")
        path = inode.path
        act = DeleteDirectory(path, inode.attributes.version.file_id)
        if self._writes.files_below(path):
            raise NotEmptyError(f"{path} is not empty")
        if self._writes.changes.would_defer(act):
            await self._require_empty(path)
            await self._writes.change(act)
        else:
            await self._delete_directory(path, act)
        self._tree.table.remove(inode)
        _moved_on(parent)
        self._hints.forget(path)

    async def rename(self, old_parent: Inode, old_name: str, new_parent: Inode, new_name: str, flags: int) -> None:
        if flags & ~RENAME_NOREPLACE:
            raise InvalidRequestError("names cannot be exchanged in one step", advice="rename in three steps")
        moving = await self._existing(old_parent, old_name)
        old, new = moving.path, self._new_path(new_parent, new_name)
        if old == new:
            return
        if new.startswith(f"{old}/"):
            raise InvalidRequestError(f"cannot move {old} into itself", advice="choose a target outside it")
        moving.open_handles += 1  # keeps both while this waits
        target = await self._target(new_parent, new_name)
        if target is not None:
            target.open_handles += 1
        try:
            if target is not None:
                self._require_replaceable(moving, target, flags)
            await self._rename(moving, target, old, new, replace=not flags & RENAME_NOREPLACE)
            if target is not None:
                self._tree.table.detach(target)
            self._tree.table.move(moving, new_parent, new_name)
            _moved_on(old_parent)
            _moved_on(new_parent)
            self._hints.rename(old, new)
        finally:
            self._tree.give_back(moving)
            if target is not None:
                self._tree.give_back(target)
                await self._writing.settle(target)

    async def set_attributes(self, inode: Inode, change: AttributeChange, caller: Caller) -> None:
        """chmod, chown and utimens. Owners and groups are numbers here, as the kernel has them."""
        change = await self._as_source_knows(inode, change)
        staged = inode.staged
        if staged is not None and (
            staged.unlinked or self._writes.is_dirty(staged) or self._writes.outstanding(staged)
        ):
            self._writes.set_attributes(staged, change)
            inode.attributes = staged.attributes()
            return
        if inode.detached:
            inode.attributes = changed(inode.attributes, change)
            return
        path = inode.path
        await self._writes.change(SetAttributes(path, change))
        if staged is not None:
            staged.adopt_attributes(change)
        seen = await self._source.stat_exact(path)
        if not inode.detached:
            if inode.kernel_version == inode.attributes.version and seen.size == inode.attributes.size:
                inode.kernel_version = seen.version  # the bytes are the same, whatever the times say
            await self._follow_version(inode, staged, seen.version)
            inode.attributes = seen
            inode.refreshed_at = time.monotonic()

    def require_new(self, parent: Inode, name: str) -> None:
        """Raises where *name* cannot be made in *parent*, whoever asks."""
        self._new_path(parent, name)

    # --- steps

    async def _rename(self, moving: Inode, target: Inode | None, old: str, new: str, *, replace: bool) -> None:
        writes = self._writes
        staged = self._staged(moving)
        replaced = self._staged(target) if target is not None else None
        replaced_on_source = target is not None and (replaced is None or writes.has_on_source(replaced))
        if staged is not None and not writes.has_on_source(staged):
            # Nobody else knows the file yet: it gets its name when it is published.
            if target is not None:
                await self._keep_content(target, replaced, new, _REPLACED_BYTES)
                if replaced is not None:
                    await writes.unlink_now(replaced)
                if replaced_on_source:
                    writes.takes_over(staged, target.attributes.version)
            writes.move_files(old, new)
            return
        if target is not None:
            if replaced is not None and not replaced_on_source:
                await writes.unlink_now(replaced)
            if target.is_directory and writes.files_below(new):
                raise NotEmptyError(f"{new} is not empty")
        act = Rename(old, new, replace, _identity(moving, staged))
        if target is not None and target.is_directory and writes.changes.would_defer(act):
            await self._require_empty(new)
        before = None if target is None else partial(self._make_way, target, replaced, new)
        await writes.change(act, before)
        if replaced is not None and replaced_on_source:
            await writes.unlink_now(replaced)
        if staged is not None:
            staged.path = new
            if not writes.is_dirty(staged):
                # A rename moves the change time of a local file, and with it its version.
                seen = await self._source.stat_exact(new)
                writes.is_now(staged, seen.version)
                moving.attributes = seen

    async def _keep_readable(self, inode: Inode, staged: StagedFile | None, path: str) -> bool:
        """The file *inode*, which the source has as *path*, is to be deleted: have at hand what may still be read of it.

        True where that took its name away already.
        """
        if await self._keep_content(inode, staged, path, _COPIED_BYTES) or not inode.open_handles:
            return False
        return await self._park(inode, path)

    async def _make_way(self, inode: Inode, staged: StagedFile | None, path: str) -> bool:
        """The file *inode* is about to be replaced: have at hand what may still be read of it, up to a size.

        It keeps its name until the one step that replaces it: nothing may fail, or crash, between the two.
        """
        if not await self._keep_content(inode, staged, path, _REPLACED_BYTES):
            _log.info("who has the replaced file open can read on only what is cached", path=path)
        return False

    async def _keep_content(self, inode: Inode, staged: StagedFile | None, path: str, limit_bytes: int) -> bool:
        """Whether what is open of *inode* can be read without its name: because the source keeps it, or it is here now."""
        if not inode.open_handles or inode.kind is not FileKind.FILE:
            return True
        if Capability.KEEPS_OPEN in self._source.capabilities:
            if staged is not None:
                await staged.hold_base()
            return True
        if staged is not None:
            await staged.fill_all()
            return True
        if inode.reader is None:
            return True
        if inode.attributes.size > limit_bytes:
            return False
        try:
            await self._writing.keep_content(inode, path)
        except OutOfSpaceError:
            return False
        return True

    async def _park(self, inode: Inode, path: str) -> bool:
        """Give a large file that is open a hidden name until its last close, as a source that deletes at once needs it."""
        hidden = join(split(path)[0], temporary_name())
        await self._source.origin.rename(path, hidden, replace=False)
        inode.parked_path = hidden
        return True

    async def _delete_directory(self, path: str, act: DeleteDirectory) -> None:
        try:
            await self._writes.change(act)
        except NotEmptyError:
            await self._writes.abandoning.wait_idle()  # temporary files of what was deleted a moment ago
            located = self._writes.view.locate(path)
            if not isinstance(located, OnSource):
                raise
            swept = await sweep(
                self._source.origin, located.path, older_than_s=ORPHAN_S, now_ns=time.time_ns(), keep=()
            )
            if swept:
                _log.info("temporary files of dead writers were deleted", directory=located.path, count=len(swept))
            await self._writes.change(act)

    async def _existing(self, parent: Inode, name: str) -> Inode:
        self._require_ours(parent, name)
        known = self._tree.table.child(parent, name)
        if known is not None and not self._tree.names.is_old(known):
            return known
        return await self._tree.names.look_up(parent, name)

    async def _target(self, parent: Inode, name: str) -> Inode | None:
        try:
            return await self._tree.names.look_up(parent, name)
        except NotFoundError:
            return None

    def _require_ours(self, parent: Inode, name: str) -> None:
        if parent.virtual is not None or (parent is self._tree.table.root and name == HIDDEN_NAME):
            raise ReadOnlyError("the hidden directory is the mount's own", advice="see .turbofs/README")

    def _new_path(self, parent: Inode, name: str) -> str:
        self._require_ours(parent, name)
        if len(os.fsencode(name)) > NAME_LIMIT_BYTES:
            raise NameTooLongError(f"a name of more than {NAME_LIMIT_BYTES} bytes")
        return parent.child_path(name)

    def _require_replaceable(self, moving: Inode, target: Inode, flags: int) -> None:
        if flags & RENAME_NOREPLACE:
            raise AlreadyExistsError(f"{target.path} exists")
        if target.is_directory and not moving.is_directory:
            raise IsADirectoryTurboError(f"{target.path} is a directory")
        if moving.is_directory and not target.is_directory:
            raise NotADirectoryTurboError(f"{target.path} is not a directory")

    async def _require_absent(self, path: str) -> None:
        try:
            await self._source.stat(path)
        except NotFoundError:
            return
        raise AlreadyExistsError(f"{path} exists")

    async def _require_empty(self, path: str) -> None:
        async with await self._source.list(path) as listing:
            if await listing.next_batch():
                raise NotEmptyError(f"{path} is not empty")

    def _staged(self, inode: Inode) -> StagedFile | None:
        """The staged file of *inode* where it matters for the source: what is clean is the source's own."""
        return inode.staged if inode.staged is not None else self._writing.file_at(inode.path)

    async def _follow_version(self, inode: Inode, staged: StagedFile | None, version: FileVersion) -> None:
        if staged is not None:
            self._writes.is_now(staged, version)
        reader = inode.reader
        if reader is not None and reader.version.file_id:
            await self._tree.names.touched(inode, version)

    async def _as_source_knows(self, inode: Inode, change: AttributeChange) -> AttributeChange:
        if (change.mode or 0) & _SET_ID_BITS and Capability.SET_ID_BITS not in self._source.capabilities:
            raise NotSupportedError(f"{self._source.uri} keeps no set-user-id and set-group-id bits")
        if change.owner is None and change.group is None:
            return change
        if Capability.OWNERS not in self._source.capabilities:
            raise NotSupportedError(f"{self._source.uri} keeps no owners")
        if isinstance(inode.attributes.owner, int) and isinstance(inode.attributes.group, int):
            return change
        owner: str | int | None = change.owner
        group: str | int | None = change.group
        if isinstance(owner, int):
            owner = await self._tree.owners.user_name(owner) or str(owner)
        if isinstance(group, int):
            group = await self._tree.owners.group_name(group) or str(group)
        return AttributeChange(change.mode, owner, group, change.atime_ns, change.mtime_ns)


def _moved_on(directory: Inode) -> None:
    """A name in *directory* was changed: its times, and perhaps its number of links, are not what was seen last."""
    directory.refreshed_at = 0.0


def _identity(inode: Inode, staged: StagedFile | None) -> str:
    """What the source knows the object by; nothing for what it does not have as it is."""
    return "" if staged is not None else inode.attributes.version.file_id
