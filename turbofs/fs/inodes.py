"""Inodes: what the kernel knows by number. Numbers follow from paths, so they survive a forget and a remount.

A number names one file for as long as the kernel knows it. Where a name turns out to be another file (replaced elsewhere),
the old inode is detached from its name and the name gets a new number; handles that are open on the old one go on. How
often that happened to a name is remembered, because the kernel may forget the old number before it asks for the new one.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from zlib import crc32

from turbofs.errors import StaleFileError
from turbofs.fs.virtual import VirtualNode
from turbofs.model import ROOT, Attributes, FileKind, FileVersion, join
from turbofs.read.file_reader import FileReader
from turbofs.write.staged_file import StagedFile

ROOT_NUMBER = 1
_NUMBER_MASK = (1 << 63) - 1
"""Some programs keep inode numbers in signed 64-bit integers."""
_SPREAD = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, as in Fibonacci hashing (Knuth, The Art of Computer Programming, 6.4)."""
_GENERATIONS_KEPT = 1 << 16
"""Names that lost a file and whose next number must be another: 200 bytes each."""
_REMOVALS_KEPT = 1 << 14
"""Names that were removed here lately, and that an older listing may still hold."""


class Inode:
    """One file, directory or link, under its current name. `lookups` counts what the kernel holds."""

    __slots__ = (
        "attributes",
        "caching_handles",
        "children",
        "detached",
        "entries",
        "kernel_version",
        "lookups",
        "name",
        "number",
        "open_handles",
        "parent",
        "parked_path",
        "reader",
        "refreshed_at",
        "staged",
        "virtual",
    )

    def __init__(self, number: int, parent: Inode | None, name: str, attributes: Attributes) -> None:
        self.number = number
        self.parent = parent
        self.name = name
        self.attributes = attributes
        self.refreshed_at = 0.0
        self.lookups = 0
        self.open_handles = 0
        self.detached = False
        self.entries: dict[str, Inode] | None = None
        """A directory's inodes by name, as far as the table has any."""
        self.children = 0
        """Inodes in the table that have this one as parent: it must outlive them."""
        self.reader: FileReader | None = None
        self.kernel_version: FileVersion | None = None
        """The version whose pages the kernel's own cache may hold."""
        self.virtual: VirtualNode | None = None
        self.staged: StagedFile | None = None
        """The local side of a file that this mount writes, or has written while it was open."""
        self.parked_path: str | None = None
        """Where the source keeps the content of a file that lost its name while it was open, until its last close."""
        self.caching_handles = 0
        """Handles whose bytes the kernel may keep in its page cache."""

    @property
    def kind(self) -> FileKind:
        return self.attributes.kind

    @property
    def is_directory(self) -> bool:
        return self.attributes.kind is FileKind.DIRECTORY

    @property
    def path(self) -> str:
        """The path in the source. Raises StaleFileError where this inode (or a directory above) lost its name."""
        names: list[str] = []
        node = self
        while node.parent is not None:
            if node.detached:
                raise StaleFileError(f"{node.name!r} is another file now")
            names.append(node.name)
            node = node.parent
        return ROOT + "/".join(reversed(names))

    def child_path(self, name: str) -> str:
        return join(self.path, name)


class InodeTable:
    """All inodes that the kernel knows or that something holds open."""

    def __init__(self, root_attributes: Attributes) -> None:
        self.root = Inode(ROOT_NUMBER, None, "", root_attributes)
        self.root.lookups = 1
        self._by_number: dict[int, Inode] = {ROOT_NUMBER: self.root}
        self._generations: OrderedDict[tuple[int, str], int] = OrderedDict()
        self._removed_at: OrderedDict[tuple[int, str], float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[Inode]:
        return iter(tuple(self._by_number.values()))

    def get(self, number: int) -> Inode:
        """Raises StaleFileError for a number that was never told or is forgotten."""
        try:
            return self._by_number[number]
        except KeyError:
            raise StaleFileError(f"inode {number} is not known") from None

    def child(self, parent: Inode, name: str) -> Inode | None:
        return parent.entries.get(name) if parent.entries is not None else None

    def add(self, parent: Inode, name: str, attributes: Attributes) -> Inode:
        """A new inode for a name that has none."""
        number = self._new_number(parent, name)
        inode = Inode(number, parent, name, attributes)
        self._by_number[number] = inode
        if parent.entries is None:
            parent.entries = {}
        parent.entries[name] = inode
        parent.children += 1
        return inode

    def detach(self, inode: Inode) -> None:
        """The name of *inode* is another file now, or gone. Forgets it unless the kernel or a handle holds it."""
        if inode.parent is not None and not inode.detached:
            inode.detached = True
            key = (inode.parent.number, inode.name)
            self._unlist(inode.parent, inode.name)
            self._generations[key] = self._generations.pop(key, 0) + 1
            if len(self._generations) > _GENERATIONS_KEPT:
                self._generations.popitem(last=False)
        self.drop_unused(inode)

    def remove(self, inode: Inode) -> None:
        """The name of *inode* was removed through this mount: what was listed before does not bring it back."""
        if inode.parent is not None:
            self.note_removed(inode.parent, inode.name)
        self.detach(inode)

    def note_removed(self, parent: Inode, name: str) -> None:
        self._removed_at.pop((parent.number, name), None)
        self._removed_at[parent.number, name] = time.monotonic()
        if len(self._removed_at) > _REMOVALS_KEPT:
            self._removed_at.popitem(last=False)

    def was_removed_since(self, parent: Inode, name: str, moment: float) -> bool:
        """Whether *name* was removed here after *moment* (time.monotonic)."""
        return bool(self._removed_at) and self._removed_at.get((parent.number, name), moment) > moment

    def move(self, inode: Inode, parent: Inode, name: str) -> None:
        """*inode* is called *name* in *parent* now; whatever had that name has none any more."""
        before = inode.parent
        assert before is not None
        self.note_removed(before, inode.name)
        replaced = self.child(parent, name)
        if replaced is not None and replaced is not inode:
            self.detach(replaced)
        if not inode.detached:
            self._unlist(before, inode.name)
        inode.parent, inode.name, inode.detached = parent, name, False
        if parent.entries is None:
            parent.entries = {}
        parent.entries[name] = inode
        parent.children += 1
        before.children -= 1
        self.drop_unused(before)

    def forget(self, number: int, count: int) -> None:
        """The kernel lets go of *count* lookups."""
        inode = self._by_number.get(number)
        if inode is None or inode is self.root:
            return
        inode.lookups = max(0, inode.lookups - count)
        self.drop_unused(inode)

    def drop_unused(self, inode: Inode) -> bool:
        """Remove *inode* if nothing refers to it any more; says whether it did."""
        parent = inode.parent
        if inode.lookups or inode.open_handles or inode.children or parent is None:
            return False
        if self._by_number.pop(inode.number, None) is None:
            return False
        if not inode.detached:
            self._unlist(parent, inode.name)
            inode.detached = True  # whoever still refers to it must not take the name from its next inode
        parent.children -= 1
        self.drop_unused(parent)
        return True

    def _unlist(self, parent: Inode, name: str) -> None:
        assert parent.entries is not None
        del parent.entries[name]
        if not parent.entries:
            parent.entries = None

    def _new_number(self, parent: Inode, name: str) -> int:
        # The product spreads directories over 63 bits, the checksum names over 32: a listing does this for each name.
        first = self._generations.get((parent.number, name), 0) if self._generations else 0
        number = (parent.number + first) * _SPREAD + crc32(name.encode("utf-8", "surrogateescape")) & _NUMBER_MASK
        while number <= ROOT_NUMBER or number in self._by_number:
            number = number + _SPREAD & _NUMBER_MASK
        return number
