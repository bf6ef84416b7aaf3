"""The hidden tree `.turbofs`: what the mount tells about itself, and the mirror that takes readers' hints.

It is not listed, and its names cannot be told from ordinary ones once opened. Under `hints/` every name of the source
appears again, directories with mode 0777 and files with 0666, because the kernel lets only who may write set an
attribute. That must not show names to those who may not search the real directory, so each step is checked as the caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from turbofs.errors import NotFoundError
from turbofs.fs.inodes import Inode, InodeTable
from turbofs.fs.virtual import HintMirror, VirtualBytes, VirtualDirectory, VirtualFile, VirtualLink, VirtualNode
from turbofs.model import Attributes, DirectoryEntry, FileKind, FileVersion

HIDDEN_NAME = ".turbofs"

_README = b"""This directory belongs to TurboFS. It is not listed; its names can be opened.

stats        metrics of this mount, in Prometheus' text format
status.json  sources, caches, open files and prefetches
control      a symbolic link to the control socket
conflicts/   bytes that were acknowledged and could not be published; see `turbofs conflicts`
hints/PATH   takes a reader's hints for PATH:
             setfattr -n user.turbofs.prefetch -v all .turbofs/hints/PATH

docs/INTERFACE.md of TurboFS explains all of it.
"""


def hidden_tree(
    render_stats: Callable[[], bytes],
    render_status: Callable[[], bytes],
    control_path: Callable[[], str],
    conflicts: Callable[[], Mapping[str, VirtualNode]],
) -> VirtualDirectory:
    """The tree under `.turbofs`. *conflicts* tells what is parked now."""
    children: dict[str, VirtualNode] = {
        "README": VirtualFile(lambda: _README),
        "stats": VirtualFile(render_stats),
        "status.json": VirtualFile(render_status),
        "control": VirtualLink(control_path),
        "conflicts": VirtualDirectory(conflicts, listed=False),
        "hints": HintMirror("/"),
    }
    return VirtualDirectory(lambda: children)


class HiddenTree:
    """Looks names up below `.turbofs` and makes their inodes."""

    def __init__(self, top: VirtualDirectory, table: InodeTable) -> None:
        self._top = top
        self._table = table

    def child(self, parent: Inode, name: str) -> Inode:
        """The inode of a fixed hidden name; *parent* is the root or a hidden directory. Raises NotFoundError."""
        if parent is self._table.root:
            node: VirtualNode = self._top
        else:
            found = parent.virtual.children().get(name) if isinstance(parent.virtual, VirtualDirectory) else None
            if found is None:
                raise NotFoundError(f"no {name!r} in the hidden directory; see its README")
            node = found
        return self._inode(parent, name, node, virtual_attributes(node))

    def refresh(self, inode: Inode) -> None:
        """Bring the size of a hidden file up to that of its content now."""
        if inode.virtual is not None:
            inode.attributes = virtual_attributes(inode.virtual)

    def mirror(self, parent: Inode, name: str, path: str, real: Attributes) -> Inode:
        """The inode that mirrors *path*, whose own attributes are *real*."""
        node = HintMirror(path)
        return self._inode(parent, name, node, mirror_attributes(real))

    def entries(self, directory: Inode) -> list[DirectoryEntry]:
        """What is listed in a fixed hidden directory."""
        assert isinstance(directory.virtual, VirtualDirectory)
        return [DirectoryEntry(name, virtual_attributes(node)) for name, node in directory.virtual.children().items()]

    def _inode(self, parent: Inode, name: str, node: VirtualNode, attributes: Attributes) -> Inode:
        inode = self._table.child(parent, name)
        if inode is not None and (inode.virtual is None or inode.kind is not attributes.kind):
            self._table.detach(inode)
            inode = None
        if inode is None:
            inode = self._table.add(parent, name, attributes)
        inode.virtual = node
        inode.attributes = attributes
        inode.refreshed_at = time.monotonic()
        return inode


def virtual_attributes(node: VirtualNode) -> Attributes:
    """Attributes of a hidden node; a file's size is that of its content now."""
    match node:
        case VirtualFile(render):
            return _attributes(FileKind.FILE, 0o444, len(render()))
        case VirtualLink(target):
            return _attributes(FileKind.SYMLINK, 0o777, len(target()))
        case VirtualBytes(attributes):
            return attributes
        case VirtualDirectory(listed=listed):
            return _attributes(FileKind.DIRECTORY, 0o555 if listed else 0o511, 0)
        case HintMirror():
            return _attributes(FileKind.DIRECTORY, 0o777, 0)


def mirror_attributes(real: Attributes) -> Attributes:
    """Attributes of a hint mirror: a directory for a directory, an empty file for anything else."""
    if real.kind is FileKind.DIRECTORY:
        return _attributes(FileKind.DIRECTORY, 0o777, 0)
    return _attributes(FileKind.FILE, 0o666, 0)


def _attributes(kind: FileKind, mode: int, size: int) -> Attributes:
    now = time.time_ns()
    return Attributes(
        kind=kind, version=FileVersion(size, now), mode=mode, owner=0, group=0, atime_ns=now, ctime_ns=now
    )
