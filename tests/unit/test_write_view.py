"""What local names mean while acts are pending: the view over a source that lags behind, against a tree that does not."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turbofs.model import ROOT, AttributeChange, join, split
from turbofs.write.acts import (
    Act,
    Delete,
    DeleteDirectory,
    MakeDirectory,
    MakeLink,
    Publish,
    Rename,
    SetAttributes,
    is_below,
    waits_for,
)
from turbofs.write.view import ABSENT, LocalView, MadeDirectory, MadeLink, OnSource, StagedName


@dataclass
class Thing:
    """A directory (children not None), a link or a file of the reference tree."""

    mode: int
    children: dict[str, Thing] | None = None
    target: str | None = None
    token: str = ""
    staged: bool = False


@dataclass
class Tree:
    root: Thing = field(default_factory=lambda: Thing(0, {}))

    def get(self, path: str) -> Thing | None:
        thing = self.root
        for name in [] if path == ROOT else path[1:].split("/"):
            found = (thing.children or {}).get(name)
            if found is None:
                return None
            thing = found
        return thing

    def directory(self, path: str) -> dict[str, Thing]:
        thing = self.get(path)
        assert thing is not None
        assert thing.children is not None
        return thing.children

    def do(self, act: Act) -> None:
        """Carry out *act*, which must be valid here."""
        if isinstance(act, Rename):
            assert (self.get(act.new) is None) or act.replace
            (old_parent, old_name), (new_parent, new_name) = split(act.old), split(act.new)
            thing = self.directory(old_parent).pop(old_name)
            replaced = self.directory(new_parent).get(new_name)
            assert replaced is None or not replaced.children
            assert replaced is None or (replaced.children is None) == (thing.children is None)
            self.directory(new_parent)[new_name] = thing
            return
        parent, name = split(act.path)
        names = self.directory(parent)
        match act:
            case Delete():
                assert names.pop(name).children is None
            case DeleteDirectory():
                assert names.pop(name).children == {}
            case MakeDirectory():
                assert name not in names
                names[name] = Thing(act.mode, {})
            case MakeLink():
                assert name not in names
                names[name] = Thing(0, target=act.target)
            case SetAttributes():
                assert act.change.mode is not None
                names[name].mode = act.change.mode
            case Publish():
                known = names.get(name)
                assert known is None or (known.children is None and known.target is None)
                names[name] = Thing(known.mode if known else 0, token=str(act.file))

    def walk(self, path: str = ROOT) -> list[str]:
        below = [join(path, name) for name in self.directory(path)]
        return below + [deeper for p in below if self.get(p).children is not None for deeper in self.walk(p)]  # type: ignore[union-attr]


_NAMES = "abc"
_PATHS = ["/" + "/".join(names) for depth in (1, 2, 3) for names in itertools.product(_NAMES, repeat=depth)]


class World:
    """A source, the tree as a user of the mount must see it, the acts in between, and the view under test."""

    def __init__(self) -> None:
        self.source, self.local = Tree(), Tree()
        self.pending: list[Act] = []
        self.view = LocalView[str](clock_ns=lambda: 5)
        self.tokens = itertools.count(1)

    # each step takes numbers and turns them into something valid, or does nothing

    def issue(self, kind: int, one: int, other: int) -> None:
        parents = [ROOT, *(path for path in self.local.walk() if path.count("/") < 3)]
        free = [
            path
            for path in _PATHS
            if split(path)[0] in parents
            and self.local.get(split(path)[0]).children is not None  # type: ignore[union-attr]
            and self.local.get(path) is None
        ]
        makes = kind % 6 in {1, 2} or (kind % 6 == 5 and other % 2)
        paths = free if makes else self.local.walk()
        if not paths:
            return
        path, seconds = paths[one % len(paths)], free + self.local.walk()
        thing, second = self.local.get(path), seconds[other % len(seconds)]
        act: Act | None = None
        match kind % 6:
            case 0:
                act = self._renamed(path, thing, second)
            case 1 if thing is None:
                act = MakeDirectory(path, 1 + other % 7)
            case 2 if thing is None:
                act = MakeLink(path, f"to-{other % 3}")
            case 3 if thing is not None and not thing.children:
                act = Delete(path) if thing.children is None else DeleteDirectory(path)
            case 4 if thing is not None:
                act = SetAttributes(path, AttributeChange(mode=10 + other % 7))
            case 5 if thing is None or (thing.children is None and thing.target is None):
                act = Publish(path, next(self.tokens))
        if act is None:
            return
        self.local.do(act)
        self.pending.append(act)
        if isinstance(act, Publish):
            self.local.get(act.path).staged = True  # type: ignore[union-attr]
            self.view.put(act.path, str(act.file))
        self.view.apply(act)

    def _renamed(self, old: str, thing: Thing | None, new: str) -> Act | None:
        parent, there = self.local.get(split(new)[0]), self.local.get(new)
        if thing is None or parent is None or parent.children is None or is_below(new, old) or is_below(old, new):
            return None
        if there is not None and (there.children or (there.children is None) != (thing.children is None)):
            return None
        return Rename(old, new, replace=there is not None)

    def execute(self, which: int) -> None:
        ready = [
            act
            for place, act in enumerate(self.pending)
            if not any(waits_for(act, earlier) for earlier in self.pending[:place])
        ]
        if ready:
            act = ready[which % len(ready)]
            place = next(at for at, pending in enumerate(self.pending) if pending is act)
            del self.pending[place]
            self.source.do(act)
            self.view.done(act)

    def forget(self, which: int) -> None:
        """A file that was published, and is not to be published again, leaves staging."""
        publishing = {str(act.file) for act in self.pending if isinstance(act, Publish)}
        clean = [path for path, token in self.files().items() if token not in publishing]
        if clean:
            path = clean[which % len(clean)]
            self.local.get(path).staged = False  # type: ignore[union-attr]
            self.view.remove(path)

    def files(self) -> dict[str, str]:
        found = {path: self.local.get(path) for path in self.local.walk()}
        return {path: thing.token for path, thing in found.items() if thing is not None and thing.staged}

    def check(self) -> None:
        again = LocalView[str](clock_ns=lambda: 5)
        again.rebuild(self.pending, self.files())
        for view in (self.view, again):
            assert sorted(self.listed(view)) == sorted(self.local.walk())
            for path in _PATHS:
                self.check_path(view, path)
        if not self.pending and not self.files():
            assert self.view.empty
            assert again.empty

    def listed(self, view: LocalView[str], directory: str = ROOT) -> list[str]:
        """Every path below *directory*, found as a listing would find it."""
        located = view.locate(directory)
        names = []
        if isinstance(located, OnSource):
            names = [name for name in self.source.directory(located.path) if not view.is_hidden(directory, name)]
        for name, child in view.names_below(directory):
            assert view.locate(join(directory, name)) == child
            names.append(name)
        assert len(names) == len(set(names))
        paths = [join(directory, name) for name in names]
        return paths + [
            deeper for path in paths if self._is_directory(view, path) for deeper in self.listed(view, path)
        ]

    def _is_directory(self, view: LocalView[str], path: str) -> bool:
        located = view.locate(path)
        if isinstance(located, OnSource):
            thing = self.source.get(located.path)
            assert thing is not None
            return thing.children is not None
        return isinstance(located, MadeDirectory)

    def check_path(self, view: LocalView[str], path: str) -> None:
        thing, located, change = self.local.get(path), view.locate(path), view.pending_change(path)
        changed = None if change is None else change.mode
        assert view.file(path) == (thing.token if thing is not None and thing.staged else None)
        if thing is None:
            assert located == ABSENT or (isinstance(located, OnSource) and self.source.get(located.path) is None)
        elif thing.staged:
            assert located == StagedName(thing.token)
        elif isinstance(located, OnSource):
            there = self.source.get(located.path)
            assert there is not None
            assert (there.children is None, there.target, there.token) == (
                thing.children is None,
                thing.target,
                thing.token,
            )
            assert (there.mode if changed is None else changed) == thing.mode
        elif thing.children is not None:
            assert located == MadeDirectory(path, thing.mode, None, None, 5)
        else:
            assert isinstance(located, MadeLink)
            assert (located.path, located.target) == (path, thing.target)


_numbers = st.integers(0, 1000)
_steps = st.lists(st.tuples(st.integers(0, 11), _numbers, _numbers), max_size=40)


@settings(max_examples=150, deadline=None)
@given(before=_steps, steps=_steps)
def test_a_lagging_source_is_shown_as_if_it_did_not_lag(
    before: list[tuple[int, int, int]], steps: list[tuple[int, int, int]]
) -> None:
    """Whatever is issued, and whichever of the acts that may be carried out are: the mount shows the user's own tree."""
    world = World()
    for kind, one, other in before:
        world.issue(kind, one, other)
    world.source = copy.deepcopy(world.local)
    world.pending.clear()
    for path in list(world.files()):
        world.local.get(path).staged = False  # type: ignore[union-attr]
    world.view.rebuild([], {})
    assert world.view.empty
    for kind, one, other in steps:
        if kind < 6:
            world.issue(kind, one, other)
        elif kind < 9:
            world.execute(one)
        elif kind < 11:
            world.forget(one)
        else:
            world.view.rebuild(world.pending, world.files())
        world.check()
    while world.pending:
        world.execute(0)
        world.check()
    while world.files():
        world.forget(0)
        world.check()
    assert world.view.empty


# --- what a reader of the module would ask first


def test_nothing_pending_means_every_path_is_itself() -> None:
    view = LocalView[str]()
    assert view.empty
    assert view.locate(ROOT) == OnSource(ROOT)
    assert view.locate("/a/b") == OnSource("/a/b")
    assert view.names_below("/a") == []
    assert not view.is_hidden("/a", "b")
    assert view.pending_change("/a") is None


def test_a_renamed_directory_is_looked_for_under_its_old_name() -> None:
    view = LocalView[str]()
    view.put("/run/staged", "F")
    view.apply(Rename("/run", "/final", replace=False))
    assert view.locate("/final/part/x") == OnSource("/run/part/x")
    assert view.locate("/final/staged") == StagedName("F")
    assert view.locate("/run/part") == ABSENT
    assert view.is_hidden(ROOT, "run")
    assert view.names_below(ROOT) == [("final", OnSource("/run"))]
    assert not view.is_hidden("/final", "part")


def test_a_name_given_again_after_a_rename() -> None:
    view = LocalView[str]()
    view.apply(Rename("/a", "/b", replace=False))
    view.apply(MakeDirectory("/a", 0o755))
    view.apply(Rename("/c", "/a/x", replace=False))
    assert view.locate("/b/y") == OnSource("/a/y")
    assert view.locate("/a/x/z") == OnSource("/c/z")
    assert view.locate("/a/y") == ABSENT
    view.done(Rename("/a", "/b", replace=False))
    assert view.locate("/b/y") == OnSource("/b/y")
    view.done(MakeDirectory("/a", 0o755))
    assert view.locate("/a/x/z") == OnSource("/c/z")
    assert view.locate("/a/y") == OnSource("/a/y")
    view.done(Rename("/c", "/a/x", replace=False))
    assert view.locate("/a/x/z") == OnSource("/a/x/z")
    assert view.empty


def test_an_object_moved_back_into_its_renamed_directory() -> None:
    """Its path on the source looks like the inherited one, but stops being so when the first rename is done."""
    view = LocalView[str]()
    acts = [Rename("/w", "/a/y", False), Rename("/a/y", "/t", False), Rename("/a", "/b", False)]
    acts.append(Rename("/t", "/b/y", replace=False))
    for act in acts:
        view.apply(act)
    for act, place in zip(acts, ["/a/y", "/t", "/t", "/b/y"], strict=True):
        view.done(act)
        assert view.locate("/b/y") == OnSource(place)
    assert view.empty


def test_pending_changes_follow_the_object() -> None:
    view = LocalView[str](clock_ns=lambda: 7)
    view.apply(MakeDirectory("/made", 0o755, "ann", "staff"))
    view.apply(SetAttributes("/made", AttributeChange(mode=0o700)))
    view.apply(SetAttributes("/old", AttributeChange(mode=0o600, owner="ann")))
    view.apply(SetAttributes("/old", AttributeChange(mode=0o640)))
    view.apply(Rename("/old", "/new", replace=False))
    view.apply(Rename("/made", "/there", replace=False))
    assert view.locate("/there") == MadeDirectory("/there", 0o700, "ann", "staff", 7)
    assert view.pending_change("/new") == AttributeChange(mode=0o640, owner="ann")
    assert view.pending_change("/old") is None
    view.apply(Delete("/new"))
    assert view.pending_change("/new") is None


def test_nothing_lies_below_a_link_or_a_staged_file() -> None:
    view = LocalView[str]()
    view.apply(MakeLink("/link", "a", "ann"))
    view.put("/file", "F")
    assert view.locate("/link") == MadeLink("/link", "a", "ann", None, view.locate("/link").made_ns)  # type: ignore[union-attr]
    assert view.locate("/link/x") == ABSENT
    assert view.locate("/file/x") == ABSENT
    assert view.file("/file") == "F"
    view.remove("/file")
    assert view.locate("/file") == OnSource("/file")


def test_a_made_directory_keeps_its_time_when_the_view_is_made_anew() -> None:
    times = iter([1, 2, 3])
    view = LocalView[str](clock_ns=lambda: next(times))
    made = MakeDirectory("/made", 0o755)
    view.apply(made)
    view.rebuild([made, MakeDirectory("/later", 0o755)], {})
    located = view.locate("/made")
    assert isinstance(located, MadeDirectory)
    assert located.made_ns == 1


def test_an_act_that_was_never_pending_changes_nothing() -> None:
    view = LocalView[str]()
    view.apply(Delete("/a"))
    view.done(Delete("/b"))
    view.remove("/b")
    assert view.locate("/a") == ABSENT
    view.apply(Rename("/c", "/c", replace=True))
    assert view.locate("/c") == OnSource("/c")


def test_the_root_stays() -> None:
    view = LocalView[str]()
    with pytest.raises(ValueError, match="root"):
        view.apply(DeleteDirectory(ROOT))
    view.apply(SetAttributes(ROOT, AttributeChange(mode=0o700)))
    assert not view.empty
    view.done(SetAttributes(ROOT, AttributeChange(mode=0o700)))
    assert view.empty
    assert view.locate("/a") == OnSource("/a")
