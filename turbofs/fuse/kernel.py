"""What is asked of the kernel about a mount without touching it: the mount table, its read-ahead, a dead one's removal."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_MOUNT_TABLE = Path("/proc/self/mountinfo")
_FUSE_CONF = Path("/etc/fuse.conf")


@dataclass(frozen=True, slots=True)
class KernelMount:
    """One line of the mount table. *device* is MAJOR:MINOR."""

    device: str
    mountpoint: Path
    filesystem_type: str
    source: str


def mounts_at(mountpoint: Path, table: Path = _MOUNT_TABLE) -> list[KernelMount]:
    """What is mounted on *mountpoint*, the newest last. Reads the table only: a dead mount cannot block it."""
    found = []
    for line in table.read_text().splitlines():
        fields, _, tail = line.partition(" - ")
        parts = fields.split(" ")
        kind, source, *_ = tail.split(" ")
        if _unescape(parts[4]) == str(mountpoint):
            found.append(KernelMount(parts[2], mountpoint, kind, _unescape(source)))
    return found


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
    if os.geteuid() == 0:
        return True
    try:
        lines = conf.read_text().splitlines()
    except OSError:
        return False
    return any(line.strip() == "user_allow_other" for line in lines)


def unmount_lazily(mountpoint: Path) -> str | None:
    """Take a dead mount out of the way; returns why it could not, or None. Blocks for at most some seconds."""
    tools = (["umount", "-l"],) if os.geteuid() == 0 else (["fusermount3", "-u", "-z"],)
    failure = "no tool"
    for tool in tools:
        done = subprocess.run([*tool, str(mountpoint)], capture_output=True, text=True, timeout=10, check=False)
        if done.returncode == 0:
            return None
        failure = done.stderr.strip()
    return failure


def _unescape(text: str) -> str:
    """Undo the octal escapes of the mount table."""
    return (
        text.encode("latin-1", "backslashreplace")
        .decode("unicode_escape")
        .encode("latin-1")
        .decode("utf-8", "surrogateescape")
    )
