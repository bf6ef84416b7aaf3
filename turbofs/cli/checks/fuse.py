"""Can this user mount at all?"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

from turbofs.cli.checks.result import CheckResult, fail, ok, warn
from turbofs.fuse.kernel import allows_others


def device(path: Path = Path("/dev/fuse")) -> CheckResult:
    """The kernel's FUSE device is there and can be opened. Opening it mounts nothing."""
    name = "fuse device"
    try:
        if not stat.S_ISCHR(path.stat().st_mode):
            return fail(name, f"{path} is not a device", "remove it, then `modprobe fuse`")
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        return fail(name, f"{path} is missing", "`modprobe fuse`; in a container, start it with --device /dev/fuse")
    except OSError as error:
        if error.errno in {errno.EACCES, errno.EPERM}:
            advice = f"`chmod 666 {path}`, or join the group that owns it; in a container, add --cap-add SYS_ADMIN"
            return fail(name, f"{path} cannot be opened by you: {error.strerror}", advice)
        return fail(name, f"{path} cannot be opened: {error.strerror}", "`modprobe fuse`")
    return ok(name, f"{path} can be opened")


def helper(effective_uid: int, search_path: str | None = None) -> CheckResult:
    """fusermount3, which mounts for users and unmounts, is installed; for a user it must be setuid."""
    name = "fusermount3"
    found = shutil.which("fusermount3", path=search_path)
    if found is None:
        return fail(name, "fusermount3 is not installed", "install the package fuse3")
    status = Path(found).stat()
    if effective_uid != 0 and not (status.st_mode & stat.S_ISUID and status.st_uid == 0):
        return fail(name, f"{found} is not setuid root, so users cannot mount", f"`chmod u+s {found}` as root")
    return ok(name, found)


def user_allow_other(effective_uid: int, file: Path = Path("/etc/fuse.conf")) -> CheckResult:
    """A user's mount lets others in only where /etc/fuse.conf allows it."""
    name = "user_allow_other"
    if effective_uid == 0:
        return ok(name, "not needed by root")
    if allows_others(file):
        return ok(name, f"set in {file}")
    return warn(
        name,
        f"{file} does not set user_allow_other: your mounts are yours alone, and --allow-other is refused",
        f"as root, add the line `user_allow_other` to {file}",
    )
