"""Which mounts there are, from /proc/self/mountinfo and the runtime folders: never by touching a mount.

A stat, a listing or a statfs of a mount asks its daemon. One that hangs would hang whoever diagnoses it, so paths
are resolved up to the mount point, and what is below it is only a text here.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from turbofs.cli.working_directory import absolute
from turbofs.errors import InvalidRequestError, NotReachableError
from turbofs.mountinfo import MountEntry, mount_entries
from turbofs.wire import runtime_dir

FILE_SYSTEM_TYPE = "fuse.turbofs"
_LINKS_LIMIT = 40  # the kernel's own limit


@dataclass(frozen=True, slots=True)
class Located:
    """A path below a mount: the mount point, and the path inside it ("/" for the root)."""

    mountpoint: str
    path: str


def turbofs_mounts(entries: list[MountEntry] | None = None) -> dict[str, MountEntry]:
    """TurboFS mounts by mount point; of several on one mount point the last, which hides the others."""
    found = entries if entries is not None else mount_entries()
    return {entry.mountpoint: entry for entry in found if entry.file_system_type == FILE_SYSTEM_TYPE}


def known_mountpoints() -> set[str]:
    """Mount points of mounted file systems, and of daemons that left a record."""
    return set(turbofs_mounts()) | {record.mountpoint for _, record in runtime_dir.list_records()}


def resolve(path: str, mountpoints: set[str]) -> Located | str:
    """Follow the links in *path* up to the first of *mountpoints*; what is below one is not looked at.

    Returns the place in a mount, or the absolute path where it is in none.
    """
    # A relative path starts from getcwd, which the kernel answers without asking the file system.
    pending = deque(PurePosixPath(absolute(path)).parts[1:])
    current, links = "/", 0
    while pending:
        if current in mountpoints:
            inner = _normalized(pending)
            if inner is not None:
                return Located(current, inner)
        part = pending.popleft()
        if part == "..":
            current = str(PurePosixPath(current).parent)
            continue
        candidate = f"/{part}" if current == "/" else f"{current}/{part}"
        target = None if candidate in mountpoints else _link_target(candidate)
        if target is None:
            current = candidate
            continue
        links += 1
        if links > _LINKS_LIMIT:
            raise InvalidRequestError(f"{path}: too many symbolic links")
        parts = PurePosixPath(target).parts
        if target.startswith("/"):
            current, parts = "/", parts[1:]
        pending.extendleft(reversed(parts))
    return Located(current, "/") if current in mountpoints else current


def locate(path: str) -> Located:
    """The mount that *path* lies in. Raises NotReachableError where it lies in none."""
    mountpoints = known_mountpoints()
    found = resolve(path, mountpoints)
    if isinstance(found, Located):
        return found
    listing = ", ".join(sorted(mountpoints)) or "none"
    raise NotReachableError(f"{path} is in no TurboFS mount", advice=f"mounts of this machine: {listing}")


def control_socket(mountpoint: str) -> Path:
    """The control socket of the mount at *mountpoint*. Raises NotReachableError where it has none here."""
    folder = runtime_dir.find_folder(mountpoint)
    if folder is None:
        looked = ", ".join(map(str, runtime_dir.runtime_bases()))
        raise NotReachableError(
            f"{mountpoint} has no control socket (looked in {looked})",
            advice="another user's mount? otherwise its daemon is gone: `turbofs doctor` tells",
        )
    return folder / runtime_dir.SOCKET_NAME


def _normalized(parts: deque[str]) -> str | None:
    """*parts* as a path inside the mount; None where `..` leads out of it."""
    kept: list[str] = []
    for part in parts:
        if part != "..":
            kept.append(part)
        elif kept:
            kept.pop()
        else:
            return None
    return "/" + "/".join(kept)


def _link_target(path: str) -> str | None:
    try:
        return os.readlink(path) if stat.S_ISLNK(os.lstat(path).st_mode) else None
    except OSError:
        return None  # missing or unreadable: not a link that leads into a mount
