"""Nodes of the hidden `.turbofs` tree: content that the mount itself makes, and mirrors that take a reader's hints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class VirtualFile:
    """A file whose whole content *render* returns when it is opened."""

    render: Callable[[], bytes]


@dataclass(frozen=True)
class VirtualLink:
    """A symbolic link; *target* is asked each time."""

    target: Callable[[], str]


@dataclass(frozen=True)
class VirtualDirectory:
    """A directory with fixed children."""

    children: dict[str, VirtualNode] = field(default_factory=dict)


@dataclass(frozen=True)
class HintMirror:
    """The mirror of one source path under `.turbofs/hints/`: takes hints from callers who may only read."""

    path: str


VirtualNode = VirtualFile | VirtualLink | VirtualDirectory | HintMirror
