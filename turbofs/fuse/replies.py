"""From inodes to the structures that the kernel wants."""

from __future__ import annotations

import stat

import pyfuse3

from turbofs.fs.inodes import Inode
from turbofs.fs.tree import NAME_LIMIT_BYTES
from turbofs.fs.virtual import HintMirror, VirtualFile
from turbofs.model import AttributeChange, FileKind, Space

_IO_BYTES = 128 << 10
"""st_blksize: what stdio and `cp` read at a time. Python's buffered files read this much for each small read."""
_SECTOR_BYTES = 512
_STATFS_BLOCK_BYTES = 4096
_UNLIMITED_BYTES = 1 << 50
"""For a source that tells no size: a petabyte, all free. Zero makes installers and caches give up."""
_UNLIMITED_FILES = 1 << 30


def entry_attributes(
    inode: Inode, uid: int, gid: int, timeout_s: float, entry: pyfuse3.EntryAttributes | None = None
) -> pyfuse3.EntryAttributes:
    """The reply to lookup, getattr and readdirplus. What depends on the caller is not cached by the kernel.

    *entry* is used again where it is given: a listing copies each into its reply at once.
    """
    attributes = inode.attributes
    kind, version = attributes.kind, attributes.version
    if kind is FileKind.DIRECTORY:
        type_bits = stat.S_IFDIR
    elif kind is FileKind.SYMLINK:
        type_bits = stat.S_IFLNK
    else:
        # A device or socket of a local tree is shown, and cannot be opened: its type without its number would mislead.
        type_bits = stat.S_IFREG
    if entry is None:
        entry = pyfuse3.EntryAttributes()
    entry.st_ino = pyfuse3.InodeT(inode.number)
    entry.st_mode = pyfuse3.ModeT(type_bits | attributes.mode)
    entry.st_nlink = 0 if inode.detached else attributes.link_count
    entry.st_uid = uid
    entry.st_gid = gid
    size = version.size
    entry.st_size = size
    entry.st_blksize = _IO_BYTES
    entry.st_blocks = -(-size // _SECTOR_BYTES)
    entry.st_mtime_ns = version.mtime_ns
    entry.st_atime_ns = attributes.atime_ns or version.mtime_ns
    entry.st_ctime_ns = attributes.ctime_ns or version.mtime_ns
    kept = 0.0 if inode.virtual is not None and isinstance(inode.virtual, HintMirror | VirtualFile) else timeout_s
    entry.entry_timeout = kept
    # The times of a file that is being written are the source's once it is closed: nobody keeps those of before.
    entry.attr_timeout = 0.0 if inode.staged is not None else kept
    return entry


def attribute_change(attr: pyfuse3.EntryAttributes, fields: pyfuse3.SetattrFields) -> AttributeChange:
    """What a setattr request asks for, apart from the size. "Now" has been filled in by pyfuse3."""
    return AttributeChange(
        mode=stat.S_IMODE(attr.st_mode) if fields.update_mode else None,
        owner=attr.st_uid if fields.update_uid else None,
        group=attr.st_gid if fields.update_gid else None,
        atime_ns=attr.st_atime_ns if fields.update_atime else None,
        mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
    )


def statfs_data(space: Space) -> pyfuse3.StatvfsData:
    """The reply to statfs, from what the source said last."""
    total = space.total_bytes if space.total_bytes is not None else _UNLIMITED_BYTES
    free = space.free_bytes if space.free_bytes is not None else total
    files = space.total_files if space.total_files is not None else _UNLIMITED_FILES
    free_files = space.free_files if space.free_files is not None else files
    data = pyfuse3.StatvfsData()
    data.f_bsize = data.f_frsize = _STATFS_BLOCK_BYTES
    data.f_blocks = total // _STATFS_BLOCK_BYTES
    data.f_bfree = data.f_bavail = free // _STATFS_BLOCK_BYTES
    data.f_files = files
    data.f_ffree = data.f_favail = free_files
    data.f_namemax = NAME_LIMIT_BYTES
    return data
