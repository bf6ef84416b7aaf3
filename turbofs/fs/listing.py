"""Listing a directory into the kernel's reply: entries with attributes, each with a stable offset.

Offset 0 is ".", 1 is "..", entry *i* of the handle's list has offset i + 2; an entry is followed by the offset after it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from turbofs.errors import NotFoundError
from turbofs.fs.handles import DirectoryHandle
from turbofs.fs.hidden import HIDDEN_NAME
from turbofs.fs.inodes import Inode
from turbofs.fs.tree import Tree
from turbofs.fs.virtual import HintMirror, VirtualDirectory
from turbofs.model import ROOT, Attributes, join

_DOTS = 2
Emit = Callable[[bytes, Inode, int], bool]
"""Takes a name, its inode and the next offset into a reply; False when the reply is full."""


async def emit_entries(tree: Tree, handle: DirectoryHandle, offset: int, emit: Emit) -> None:
    """Emit from *offset* on until *emit* is full or the directory ends; an accepted entry is a lookup the kernel holds."""
    directory = handle.inode
    if offset == 0 and len(handle) and not isinstance(directory.virtual, VirtualDirectory):
        await handle.rewind()
    # Nearly all names of a listing are new or unchanged: no coroutine for each of them.
    plain = directory.virtual is None and directory is not tree.table.root
    position = offset
    while position < _DOTS:
        target = directory if position == 0 else directory.parent or directory
        if not emit(b"." if position == 0 else b"..", target, position + 1):
            return
        position += 1
    while True:
        while position - _DOTS >= len(handle):
            batch = await handle.next_batch(tree.source, tree.background)
            if not batch:
                return
            await tree.owners.prepare({(entry.attributes.owner, entry.attributes.group) for entry in batch})
        name, attributes = handle.at(position - _DOTS)
        inode = None
        if plain and attributes is not None:
            inode = tree.names.reconcile_nowait(directory, name, attributes, seen_at=handle.batch_at)
        if inode is None:
            inode = await _inode(tree, handle, name, attributes)
        position += 1
        if inode is None:
            continue
        if not emit(os.fsencode(name), inode, position):
            tree.table.drop_unused(inode)
            return
        inode.lookups += 1


async def _inode(tree: Tree, handle: DirectoryHandle, name: str, attributes: Attributes | None) -> Inode | None:
    """The inode of a listed name; None where it is gone by now, or hidden."""
    directory = handle.inode
    if isinstance(directory.virtual, VirtualDirectory):
        return tree.hidden.child(directory, name)
    if name == HIDDEN_NAME and (directory is tree.table.root or directory.virtual == HintMirror(ROOT)):
        return None
    try:
        if isinstance(directory.virtual, HintMirror):
            path = join(directory.virtual.path, name)
            return tree.hidden.mirror(directory, name, path, attributes or await tree.source.stat(path))
        if attributes is None:
            return await tree.names.look_up(directory, name)
        found = tree.names.reconcile_nowait(directory, name, attributes, seen_at=handle.batch_at)
        return found or await tree.names.reconcile(directory, name, attributes)
    except NotFoundError:
        return None
