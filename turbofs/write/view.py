"""What the names of a mount mean while acts on its source are pending. Pure.

The view is a tree of the local names that differ from the source, and of those that a pending act made, moved or changed.
A node may say what it is: made here, gone, or an object of the source that still has another path there. A node that
says nothing is what its parent is, one name further down. So a renamed directory carries everything below it along
by moving one node, and a look-up takes one step for each component of the path.

The tree follows the execution of acts: a node counts the pending acts that named it. Once there are none left, its
object is on the source where its parent's is, and the node need not say anything any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from time import time_ns
from typing import Generic, TypeVar

from turbofs.model import ROOT, AttributeChange, join
from turbofs.write.acts import Act, Delete, DeleteDirectory, MakeDirectory, MakeLink, Publish, Rename, moved_path

F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class OnSource:
    """Look at the source, under *path*; that there is anything is not said."""

    path: str


@dataclass(frozen=True, slots=True)
class MadeDirectory:
    """A directory that the source does not have yet. `path` is local; pending changes of its attributes are in it."""

    path: str
    mode: int
    owner: str | int | None
    group: str | int | None
    made_ns: int


@dataclass(frozen=True, slots=True)
class MadeLink:
    """A symbolic link that the source does not have yet. `path` is local."""

    path: str
    target: str
    owner: str | int | None
    group: str | int | None
    made_ns: int


@dataclass(frozen=True, slots=True)
class StagedName(Generic[F]):
    """A file whose bytes are in staging."""

    file: F


@dataclass(frozen=True, slots=True)
class Absent:
    """There is nothing under this name, whatever the source still has."""


ABSENT = Absent()
Located = OnSource | MadeDirectory | MadeLink | StagedName[F] | Absent
_Entry = OnSource | MadeDirectory | MadeLink | Absent


class _Node(Generic[F]):
    """One local name. `entry` None: what the parent is, one name further. `pins`: pending acts that named it."""

    __slots__ = ("changes", "children", "entry", "file", "name", "parent", "pins")

    def __init__(self, entry: _Entry | None = None) -> None:
        self.parent: _Node[F] | None = None
        self.name = ""
        self.entry = entry
        self.file: F | None = None
        self.children: dict[str, _Node[F]] = {}
        self.changes: list[AttributeChange] = []
        self.pins = 0

    @property
    def differs(self) -> bool:
        """Whether the source's own entry of this name must not be shown for it."""
        return self.entry is not None or self.file is not None


class LocalView(Generic[F]):
    """Local names, with *F* for what stands for a staged file. Paths are absolute; ROOT itself cannot be moved.

    Acts are applied as they are issued and reported `done` as they reach the source. Where acts are cancelled, the
    view is made anew from those that are left (`rebuild`). All acts must have been valid in the view when issued.
    """

    def __init__(self, clock_ns: Callable[[], int] = time_ns) -> None:
        self._clock_ns = clock_ns
        self._root = _Node[F](OnSource(ROOT))
        self._elsewhere: set[_Node[F]] = set()  # nodes whose entry is OnSource
        self._pinned: dict[Act, deque[tuple[_Node[F], ...]]] = {}  # pending act → the nodes it named
        self._made_ns: dict[Act, int] = {}

    @property
    def empty(self) -> bool:
        """Nothing is pending and nothing staged: every path means itself."""
        return not self._root.children and not self._root.pins

    # --- what happens

    def rebuild(self, acts: Iterable[Act], files: Mapping[str, F]) -> None:
        """Start over: *acts* are those pending, in their order; *files* the staged files by their local path now."""
        known_ns = self._made_ns
        self._root = _Node(OnSource(ROOT))
        self._elsewhere, self._pinned, self._made_ns = set(), {}, {}
        for act in acts:
            self._apply(act, known_ns.get(act))
        for path, file in files.items():
            self.put(path, file)

    def apply(self, act: Act) -> None:
        """One more act was issued. Staged files move and vanish with the names above them; Publish moves nothing."""
        self._apply(act, None)

    def _apply(self, act: Act, made_ns: int | None) -> None:
        """*made_ns*: when what the act makes was made, if that is known already."""
        match act:
            case Rename(old=old, new=new) if old != new:
                nodes = self._rename(old, new)
            case Delete(path=path) | DeleteDirectory(path=path):
                nodes = (self._place(path, _Node(ABSENT)),)
            case MakeDirectory() | MakeLink():
                nodes = (self._place(act.path, _Node(self._made(act, made_ns))),)
            case Publish(path=path) | Rename(old=path):
                nodes = (self._node(path),)
            case _:
                nodes = (self._node(act.path),)
                nodes[0].changes.append(act.change)
        for node in nodes:
            node.pins += 1
        self._pinned.setdefault(act, deque()).append(nodes)

    def done(self, act: Act) -> None:
        """The source has carried out *act*; whatever it had to wait for was done before. Unknown acts change nothing.

        Staged files stay until they are removed: their bytes may be newer than what the source has.
        """
        waiting = self._pinned.get(act)
        if not waiting:
            return
        nodes = waiting.popleft()  # equal acts touch the same names, so they are done in the order of their issue
        if not waiting:
            del self._pinned[act]
            self._made_ns.pop(act, None)
        match act:
            case Rename(old=old, new=new):
                self._follow(old, new)
            case Publish() | MakeDirectory() | MakeLink():
                self._settle(nodes[0], OnSource(act.path))
            case Delete() | DeleteDirectory():
                pass
            case _:
                nodes[0].changes.remove(act.change)
        for node in nodes:
            node.pins -= 1
            if not node.pins and node is not self._root:
                self._settle(node, None)
                self._prune(node)

    def put(self, path: str, file: F) -> None:
        """The staged file *file* has the local name *path* now."""
        self._node(path).file = file

    def remove(self, path: str) -> None:
        """No staged file has the local name *path* any more; whatever else the name means shows again."""
        node = self._find(path)
        if node is not None:
            node.file = None
            self._prune(node)

    # --- what names mean

    def locate(self, path: str) -> Located[F]:
        """What *path* is: where to look for it on the source, or what it is here. O(depth)."""
        entry: _Entry = OnSource(ROOT)
        node: _Node[F] | None = self._root
        rest: list[str] = []  # the components since `entry`
        for name in _components(path):
            if node is not None:
                if node.file is not None:
                    return ABSENT  # nothing lies below a file
                node = node.children.get(name)
            if node is not None and node.entry is not None:
                entry = node.entry
                rest.clear()
            else:
                rest.append(name)
        if node is not None and node.file is not None:
            return StagedName(node.file)
        if isinstance(entry, MadeDirectory | MadeLink) and node is not None and not rest:
            return _as_changed(entry, path, node.changes)
        return _below(entry, rest)

    def file(self, path: str) -> F | None:
        """The staged file that has the local name *path*."""
        node = self._find(path)
        return None if node is None else node.file

    def names_below(self, directory: str) -> list[tuple[str, Located[F]]]:
        """The names directly in *directory* that only exist locally or mean something else than on the source."""
        node = self._find(directory)
        if node is None:
            return []
        shown: list[tuple[str, Located[F]]] = []
        for name, child in node.children.items():
            if child.file is not None:
                shown.append((name, StagedName(child.file)))
            elif isinstance(child.entry, MadeDirectory | MadeLink):
                shown.append((name, _as_changed(child.entry, join(directory, name), child.changes)))
            elif isinstance(child.entry, OnSource):
                shown.append((name, child.entry))
        return shown

    def is_hidden(self, directory: str, name: str) -> bool:
        """Whether the entry *name*, which the source lists for *directory*, is gone here or is something else.

        What it is instead, if anything, is among `names_below`.
        """
        node = self._find(directory)
        child = None if node is None else node.children.get(name)
        return child is not None and child.differs

    def hidden_below(self, directory: str) -> frozenset[str]:
        """All names for which `is_hidden` holds in *directory*."""
        node = self._find(directory)
        return (
            frozenset() if node is None else frozenset(name for name, child in node.children.items() if child.differs)
        )

    def pending_change(self, path: str) -> AttributeChange | None:
        """What pending acts will set on the object at the local name *path*, the latest of each field."""
        node = self._find(path)
        return None if node is None or not node.changes else _merge(node.changes)

    # --- the tree

    def _find(self, path: str) -> _Node[F] | None:
        node = self._root
        for name in _components(path):
            found = node.children.get(name)
            if found is None:
                return None
            node = found
        return node

    def _node(self, path: str) -> _Node[F]:
        """The node of *path*, made where there is none."""
        node = self._root
        for name in _components(path):
            found = node.children.get(name)
            if found is None:
                found = _Node()
                _attach(node, name, found)
            node = found
        return node

    def _place(self, path: str, node: _Node[F]) -> _Node[F]:
        """Give *node* the name *path*; what was at and below it is dropped."""
        place = self._node(path)
        if place.parent is None:
            raise ValueError("the root of a mount cannot be moved, made or deleted")
        parent, name = place.parent, place.name
        place.parent = None
        _attach(parent, name, node)
        return node

    def _rename(self, old: str, new: str) -> tuple[_Node[F], ...]:
        node = self._node(old)
        if node.entry is None:
            self._settle(node, self._inherited(node))
        gone = self._place(old, _Node(ABSENT))
        return self._place(new, node), gone

    def _inherited(self, node: _Node[F]) -> _Entry:
        """What *node* is by what the nodes above it are."""
        rest: list[str] = []
        above: _Node[F] = node
        while above.entry is None and above.parent is not None:
            rest.append(above.name)
            above = above.parent
        return _below(above.entry or ABSENT, rest[::-1])

    def _settle(self, node: _Node[F], entry: _Entry | None) -> None:
        node.entry = entry
        if isinstance(entry, OnSource):
            self._elsewhere.add(node)
        else:
            self._elsewhere.discard(node)

    def _follow(self, old: str, new: str) -> None:
        """The source has renamed *old* to *new*: what was looked for under *old* is there now."""
        for node in self._elsewhere:
            if isinstance(node.entry, OnSource):
                node.entry = OnSource(moved_path(node.entry.path, old, new))

    def _prune(self, node: _Node[F]) -> None:
        """Forget *node*, and those above it, where they say nothing."""
        while node.parent is not None and not (node.children or node.pins or node.differs):
            parent = node.parent
            del parent.children[node.name]
            node.parent = None
            node = parent

    def _made(self, act: MakeDirectory | MakeLink, made_ns: int | None) -> MadeDirectory | MadeLink:
        made_ns = self._made_ns[act] = self._clock_ns() if made_ns is None else made_ns
        if isinstance(act, MakeDirectory):
            return MadeDirectory(act.path, act.mode, act.owner, act.group, made_ns)
        return MadeLink(act.path, act.target, act.owner, act.group, made_ns)


def _components(path: str) -> list[str]:
    return [] if path == ROOT else path[1:].split("/")


def _attach(parent: _Node[F], name: str, node: _Node[F]) -> None:
    node.parent, node.name = parent, name
    parent.children[name] = node


def _below(entry: _Entry, names: list[str]) -> _Entry:
    """What lies at *names* below *entry*; nothing lies below what the source does not have yet."""
    if not names:
        return entry
    if isinstance(entry, OnSource):
        return OnSource(f"{'' if entry.path == ROOT else entry.path}/{'/'.join(names)}")
    return ABSENT


def _merge(changes: list[AttributeChange]) -> AttributeChange:
    latest: dict[str, int | str | None] = {}
    for change in changes:
        for field in fields(change):
            value = getattr(change, field.name)
            if value is not None:
                latest[field.name] = value
    return replace(AttributeChange(), **latest)  # type: ignore[arg-type]  # each value came from its own field


def _as_changed(made: MadeDirectory | MadeLink, path: str, changes: list[AttributeChange]) -> MadeDirectory | MadeLink:
    """*made*, under its name of now, with the pending changes of its attributes."""
    change = _merge(changes)
    owner = made.owner if change.owner is None else change.owner
    group = made.group if change.group is None else change.group
    if isinstance(made, MadeLink):
        return replace(made, path=path, owner=owner, group=group)
    mode = made.mode if change.mode is None else change.mode
    return replace(made, path=path, mode=mode, owner=owner, group=group)
