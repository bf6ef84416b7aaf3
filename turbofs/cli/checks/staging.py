"""Is the place where written bytes wait fit for that? From texts under /proc and /etc, and the place itself; no mount."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from turbofs.cli.checks.result import CheckResult, fail, ok, warn
from turbofs.limits import memory_limit
from turbofs.mountinfo import filesystem_of
from turbofs.units import format_size

_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_CLEANED = {Path("/tmp"): "10 days", Path("/var/tmp"): "30 days"}  # noqa: S108 - looked for, never used
_FIRST_USER_ID = 1000  # below are system users, whose files logind leaves alone
NAME = "staging"


def place(directory: Path, uid: int, root: Path = Path("/")) -> CheckResult:
    """Whether the bytes stay where they are put, and are put there fast. *uid* is the daemon's user.

    *root* stands for "/" (tests put a tree of their own there).
    """
    elsewhere = "choose another place with --staging-dir, such as a folder of your own on a tmpfs"
    if loss := _lost_at_logout(directory, uid, root):
        linger = "let the user linger (`loginctl enable-linger`), or run the mount as a system service"
        return warn(NAME, f"{directory}: {loss}", f"{linger}; or {elsewhere}")
    for folder, age in _CLEANED.items():
        if directory.is_relative_to(folder):
            return warn(NAME, f"{directory}: what is older than {age} may be cleaned away from {folder}", elsewhere)
    kind = filesystem_of(directory, root / "proc/self/mountinfo") if root != Path("/") else filesystem_of(directory)
    if kind not in _IN_MEMORY:
        advice = f"{elsewhere}; it stays right, only slower"
        return warn(NAME, f"{directory} is on {kind or 'an unknown file system'}, not in memory", advice)
    return ok(NAME, f"{directory} is in memory, and nothing cleans it away")


def usable(directory: Path) -> CheckResult:
    """Whether this user can make files in *directory*, or make it."""
    name = "staging directory"
    nearest = next(folder for folder in (directory, *directory.parents) if folder.exists())
    if not nearest.is_dir():
        return fail(name, f"{nearest} is not a directory", "choose another with --staging-dir")
    if not os.access(nearest, os.W_OK | os.X_OK):
        return fail(name, f"{nearest} is not writable by you", f"`chown` {directory} to you, or choose another")
    return ok(name, f"{directory} can be used")


def room(directory: Path, used_bytes: int, limit_bytes: int, budget_bytes: int, root: Path = Path("/")) -> CheckResult:
    """Whether the bytes that may be staged fit on the file system, and with the read buffers into the memory."""
    name = "staging room"
    try:
        found = os.statvfs(next(folder for folder in (directory, *directory.parents) if folder.exists()))
    except OSError as error:
        return warn(name, f"{directory}: {error.strerror}", "run the doctor as the daemon's user")
    free_bytes = found.f_bavail * found.f_frsize
    wanted_bytes = max(0, limit_bytes - used_bytes)
    if wanted_bytes > free_bytes:
        return warn(
            name,
            f"{format_size(wanted_bytes)} more may be staged, but {directory} has {format_size(free_bytes)} free:"
            " writers are refused earlier",
            "lower --staging-size, or enlarge that file system (`mount -o remount,size=…` for a tmpfs)",
        )
    limit = memory_limit(root)
    in_memory = filesystem_of(directory) in _IN_MEMORY
    if in_memory and limit_bytes + budget_bytes > limit.limit_bytes:
        return warn(
            name,
            f"staging {format_size(limit_bytes)} and buffers {format_size(budget_bytes)} exceed the memory limit of "
            f"{format_size(limit.limit_bytes)} ({limit.origin})",
            "lower --staging-size or --memory, or raise the cgroup's limit",
        )
    return ok(name, f"{format_size(free_bytes)} free, {format_size(wanted_bytes)} of it may be used")


def leftover(directory: Path, mountpoint: str | None, root: Path = Path("/")) -> list[CheckResult]:
    """Files that wait in *directory* although no daemon has it; nothing where one does, or nothing waits."""
    try:
        data = [entry for entry in os.scandir(directory / "data") if entry.name.isdigit()]
        if not data or _locked(directory / "lock", root):
            return []
        size = sum(entry.stat().st_blocks * 512 for entry in data)
    except OSError:
        return []  # nothing there, or another user's
    files = "1 file" if len(data) == 1 else f"{len(data)} files"
    return [
        warn(
            "left in staging",
            f"{directory} holds {format_size(size)} in {files} that no daemon is going to write",
            f"`turbofs mount SOURCE {mountpoint or 'DIR'}` as before: it goes on where the last one ended",
        )
    ]


def _lost_at_logout(directory: Path, uid: int, root: Path) -> str | None:
    """Why a logout would delete *directory*; None where it would not."""
    if _lingers(uid, root):
        return None
    if directory.is_relative_to("/run/user"):
        return "the folder is removed when its user logs out"
    shared = directory.is_relative_to("/dev/shm")  # noqa: S108 - looked for, never used
    if shared and uid >= _FIRST_USER_ID and _removes_ipc(root):
        return "logind removes a user's files from /dev/shm at logout (RemoveIPC=yes)"
    return None


def _lingers(uid: int, root: Path) -> bool:
    try:
        return (root / "var/lib/systemd/linger" / pwd.getpwuid(uid).pw_name).exists()
    except KeyError:
        return False


def _removes_ipc(root: Path) -> bool:
    """Whether logind runs with RemoveIPC, which is its default. Where there is no logind, nothing is removed."""
    if not (root / "run/systemd/seats").exists():
        return False
    drop_ins = sorted((root / "etc/systemd/logind.conf.d").glob("*.conf"))
    removes = True
    for file in (root / "etc/systemd/logind.conf", *drop_ins):
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition("=")
            if key.strip() == "RemoveIPC":
                removes = value.strip().lower() in {"yes", "true", "1", "on"}
    return removes


def _locked(file: Path, root: Path) -> bool:
    """Whether somebody holds *file* locked: by the kernel's list, since trying would disturb a daemon that starts."""
    try:
        found = file.stat()
        table = (root / "proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    wanted = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    return any(wanted in line.split() for line in table)
