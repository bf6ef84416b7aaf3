"""Nodes of the hidden `.turbofs` tree: content that the mount itself makes, and mirrors that take a reader's hints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from turbofs.model import Attributes


@dataclass(frozen=True)
class VirtualFile:
    """A file whose whole content *render* returns when it is opened."""

    render: Callable[[], bytes]


@dataclass(frozen=True)
class VirtualLink:
    """A symbolic link; *target* is asked each time."""

    target: Callable[[], str]


@dataclass(frozen=True)
class VirtualBytes:
    """A file whose bytes lie in a local file, which *open* opens for reading; *attributes* say whose it is."""

    attributes: Attributes
    open: Callable[[], int]


@dataclass(frozen=True)
class VirtualDirectory:
    """A directory; *children* is asked each time. Without *listed*, names can be opened by all, and listed by root."""

    children: Callable[[], Mapping[str, VirtualNode]]
    listed: bool = True


@dataclass(frozen=True)
class HintMirror:
    """The mirror of one source path under `.turbofs/hints/`: takes hints from callers who may only read."""

    path: str


VirtualNode = VirtualFile | VirtualBytes | VirtualLink | VirtualDirectory | HintMirror
