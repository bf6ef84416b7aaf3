"""The kernel's mount table, read as text: never by touching a mount, which may hang.

Each line is described in proc(5), under /proc/pid/mountinfo.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_MOUNTINFO = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class MountEntry:
    """One line of the table. `device` is "MAJOR:MINOR", which names the folder in /sys/class/bdi."""

    mountpoint: str
    file_system_type: str
    source: str
    device: str


def mount_entries(mountinfo: Path = _MOUNTINFO) -> list[MountEntry]:
    """All mounts of this mount namespace, in the order in which they were made."""
    entries = []
    for line in mountinfo.read_bytes().splitlines():
        before, _, after = line.partition(b" - ")
        fields, rest = before.split(b" "), after.split(b" ")
        if len(fields) >= 5 and len(rest) >= 2:
            entries.append(MountEntry(_unescape(fields[4]), _unescape(rest[0]), _unescape(rest[1]), fields[2].decode()))
    return entries


def mounts_at(mountpoint: Path, mountinfo: Path = _MOUNTINFO) -> list[MountEntry]:
    """What is mounted on *mountpoint*, the newest, which hides the others, last."""
    return [entry for entry in mount_entries(mountinfo) if entry.mountpoint == str(mountpoint)]


def _unescape(field: bytes) -> str:
    r"""Undo the octal escapes for space, tab, newline and backslash: \040, \011, \012 and \134."""
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field))


def filesystem_of(path: Path, mountinfo: Path = _MOUNTINFO) -> str:
    """The type ("tmpfs", "ext4") of the file system that *path* lies on, by its text; empty where none is known."""
    place = os.path.realpath(path)
    found = ""
    longest = -1
    for entry in mount_entries(mountinfo):
        top = entry.mountpoint.rstrip("/")
        if (place == top or place.startswith(f"{top}/")) and len(top) >= longest:
            found, longest = entry.file_system_type, len(top)
    return found
