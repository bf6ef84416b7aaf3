"""What is asked of the kernel about a mount beyond serving it: larger limits, and whether others may be let in."""

from __future__ import annotations

import os
from pathlib import Path

from turbofs.mountinfo import mounts_at

_FUSE_CONF = Path("/etc/fuse.conf")


def tune(mountpoint: Path, read_ahead_kib: int, max_background: int, sysfs: Path = Path("/sys")) -> list[str]:
    """Raise the kernel's limits for the mount; returns a note for each that it refused (only root may).

    The default read-ahead of 128 KiB carries 0.4 GB/s through FUSE, 4 MiB 3 GB/s; the default of 12 requests in the
    background starves parallel readers.
    """
    mounts = mounts_at(mountpoint)
    if not mounts:
        return [f"the kernel's limits were not raised: {mountpoint} is not in the mount table"]
    device = mounts[-1].device
    wanted = (
        ("read-ahead", sysfs / "class/bdi" / device / "read_ahead_kb", read_ahead_kib),
        (
            "requests in the background",
            sysfs / "fs/fuse/connections" / device.split(":")[1] / "max_background",
            max_background,
        ),
    )
    notes = []
    for what, control, value in wanted:
        if not control.parent.exists():
            continue  # fusectl is not mounted on this machine: nothing that the mount could do about it
        try:
            control.write_text(f"{value}\n")
        except OSError as error:
            notes.append(f"{what} stays at the kernel's default, reads are slower: {error.strerror} ({control})")
    return notes


def may_allow_others(conf: Path = _FUSE_CONF) -> bool:
    """Whether this user may let other users into a mount: root may, others where fuse.conf says user_allow_other."""
    return os.geteuid() == 0 or allows_others(conf)


def allows_others(conf: Path = _FUSE_CONF) -> bool:
    """Whether fuse.conf says user_allow_other."""
    try:
        lines = conf.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return any(line.split("#", 1)[0].strip() == "user_allow_other" for line in lines)
