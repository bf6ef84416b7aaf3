"""What a mount does to the names of its source, as values: who waits for whom follows from them. Pure.

Every change of the source is an act. Two acts whose paths touch (one is the other's, or above it) happen in the order in
which they were issued. Beyond that, an early acknowledgement (`Publish.early`) holds back what its job does later: the
tracker file, the commit marker and the removal of an older checkpoint must not overtake the checkpoint. Making a
directory vouches for nothing, and is held back by its path alone.

Paths in an act are those of the moment in which it was issued. As everything that touches them is done by the time the
act is, they are then the source's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from turbofs.model import ROOT, AttributeChange


@dataclass(frozen=True, slots=True)
class Early:
    """An early acknowledgement: *group* is the directory on which it was asked for, *job* the one above that."""

    group: str
    job: str


@dataclass(frozen=True, slots=True)
class Publish:
    """The staged file number *file* takes the name *path* on the source, or brings it up to date."""

    path: str
    file: int
    early: Early | None = None


@dataclass(frozen=True, slots=True)
class Rename:
    old: str
    new: str
    replace: bool
    identity: str = ""
    """`FileVersion.file_id` of what had the name *old* on the source, where that was known: recovery compares it."""


@dataclass(frozen=True, slots=True)
class Delete:
    """A file or a link loses its name."""

    path: str
    identity: str = ""


@dataclass(frozen=True, slots=True)
class DeleteDirectory:
    path: str
    identity: str = ""


@dataclass(frozen=True, slots=True)
class MakeDirectory:
    path: str
    mode: int
    owner: str | int | None = None
    group: str | int | None = None


@dataclass(frozen=True, slots=True)
class MakeLink:
    path: str
    target: str
    owner: str | int | None = None
    group: str | int | None = None


@dataclass(frozen=True, slots=True)
class SetAttributes:
    path: str
    change: AttributeChange


Act = Publish | Rename | Delete | DeleteDirectory | MakeDirectory | MakeLink | SetAttributes
HELD_BY_EARLIER = (Publish, Rename, Delete, DeleteDirectory, MakeLink)
"""What an early acknowledgement holds back."""


def paths_of(act: Act) -> tuple[str, ...]:
    """The names that *act* changes."""
    return (act.old, act.new) if isinstance(act, Rename) else (act.path,)


def is_below(path: str, top: str) -> bool:
    """Whether *path* is *top* or lies under it."""
    return top in {ROOT, path} or path.startswith(f"{top}/")


def moved_path(path: str, old: str, new: str) -> str:
    """*path* once *old* is called *new*: the same, unless it is at or below *old*."""
    return new + path[len(old) :] if is_below(path, old) else path


def touch(one: str, other: str) -> bool:
    """Whether what happens to one path matters to the other: they are equal, or one lies under the other."""
    return is_below(one, other) or is_below(other, one)


def waits_for(later: Act, earlier: Act) -> bool:
    """Whether *later*, issued while *earlier* was pending, may reach the source only after it."""
    if any(touch(one, other) for one in paths_of(later) for other in paths_of(earlier)):
        return True
    if isinstance(earlier, Publish) and earlier.early is not None and isinstance(later, HELD_BY_EARLIER):
        job = earlier.early.job
        return any(is_below(path, job) for path in paths_of(later))
    return False
