"""Is this directory fit to be mounted on? Checks before anything is started; a dead daemon's mount is cleaned up."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import urllib.parse
from collections.abc import Callable
from pathlib import Path

from turbofs.cli import mount_table, working_directory
from turbofs.errors import BusyError, ConfigError, MountError, TurboError
from turbofs.mountinfo import mount_entries
from turbofs.wire import runtime_dir

_UMOUNT_NOFOLLOW, _MNT_DETACH = 8, 2
_FUSERMOUNT_LIMIT_S = 30.0


def prepare(mountpoint: str, source: str, say: Callable[[str], None], base: Path | None = None) -> str:
    """The mount point to use for *mountpoint*: absolute, without links, a directory that nothing is mounted on.

    A mount whose daemon is dead is unmounted, and *say* is told. Raises ConfigError (missing, no directory, inside
    the source), BusyError (mounted already) or MountError.
    """
    entries = mount_entries()
    path = _canonical(mountpoint, {entry.mountpoint for entry in entries if entry.file_system_type.startswith("fuse.")})
    mounted = [entry for entry in entries if entry.mountpoint == path and entry.file_system_type.startswith("fuse.")]
    for entry in reversed(mounted):
        if entry.file_system_type != mount_table.FILE_SYSTEM_TYPE:
            raise BusyError(f"{path} has {entry.file_system_type} mounted on it", advice=f"`umount {path}` first")
        if serving(path, base):
            raise BusyError(f"{path} is mounted already ({entry.source})", advice=f"`turbofs umount {path}` first")
        say(f"cleaning up {path}, which a dead daemon left mounted ({entry.source})")
        detach(path, lazy=True)
    _check_directory(path)
    _check_apart(path, source)
    return path


def serving(mountpoint: str, base: Path | None = None) -> bool:
    """Whether a daemon lives behind the mount at *mountpoint*. Touches its runtime folder only."""
    bases = [*runtime_dir.runtime_bases()] if base is None else [base, *runtime_dir.runtime_bases()]
    for candidate in bases:
        folder = runtime_dir.folder_of(mountpoint, candidate)
        try:
            if runtime_dir.daemon_alive(folder):
                return True
        except PermissionError:
            # Somebody else's, so its lock cannot be tried: the process tells.
            record = runtime_dir.read_record(folder)
            return record is not None and os.path.isdir(f"/proc/{record.pid}")
    return False


def detach(mountpoint: str, *, lazy: bool = False) -> None:
    """Unmount *mountpoint*, or with *lazy* hide it at once and let it end with its last user.

    Raises BusyError where something uses it, MountError otherwise.
    """
    if lazy:
        working_directory.leave_below(mountpoint)
    if os.geteuid() == 0:
        _umount_call(mountpoint, _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0))
        return
    program = shutil.which("fusermount3")
    if program is None:
        raise MountError("fusermount3 is missing", advice="install the package fuse3")
    command = [program, "-u", *(["-z"] if lazy else []), "--", mountpoint]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_FUSERMOUNT_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise MountError(f"fusermount3 -u {mountpoint} hangs", advice="try `fusermount3 -u -z`") from error
    if result.returncode != 0:
        message = result.stderr.strip() or f"fusermount3 ended with {result.returncode}"
        raise (BusyError if "busy" in message.lower() else MountError)(message)


def _umount_call(mountpoint: str, flags: int) -> None:
    # umount(8) would look at the path first, which asks the daemon; the system call alone does not.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(mountpoint), flags) != 0:
        number = ctypes.get_errno()
        message = f"cannot unmount {mountpoint}: {os.strerror(number)}"
        raise BusyError(message) if number == errno.EBUSY else MountError(message)


def check_staging(directory: str, mountpoint: str, source: str) -> None:
    """Staging at *directory* must lie outside of every TurboFS mount, the one to be made included, and of the source.

    Raises ConfigError. Follows links up to a mount, and does not look below.
    """
    found = mount_table.resolve(directory, {mountpoint, *mount_table.turbofs_mounts()})
    if not isinstance(found, str):
        raise ConfigError(
            f"the staging directory {directory} lies inside the mount {found.mountpoint}: it would wait for itself",
            advice="choose one outside of it, on a tmpfs",
        )
    tree = _local_tree(source)
    if tree is not None and _inside(os.path.realpath(found), tree):
        raise ConfigError(
            f"the staging directory {directory} lies inside the source {tree}: the mount would show what it stages",
            advice="choose one outside of it, on a tmpfs",
        )


def _canonical(mountpoint: str, stops: set[str]) -> str:
    found = mount_table.resolve(mountpoint, stops)
    if isinstance(found, str):
        return found
    if found.path != "/":
        raise ConfigError(
            f"{mountpoint} lies inside the FUSE mount {found.mountpoint}", advice="choose a directory outside of it"
        )
    return found.mountpoint


def _check_directory(path: str) -> None:
    try:
        if not os.path.isdir(path):
            os.stat(path)
            raise ConfigError(f"{path} is not a directory", advice="name a directory to mount on")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist", advice=f"`mkdir -p {path}` first") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", advice="name a directory that you can reach") from error
    if os.geteuid() != 0 and not os.access(path, os.W_OK):
        raise MountError(f"{path} is not writable by you", advice="fusermount3 asks for a directory of your own")


def _check_apart(path: str, source: str) -> None:
    """A daemon that reads its own mount waits for itself, for ever."""
    tree = _local_tree(source)
    if tree is None:
        return
    if _inside(path, tree) or _inside(tree, path):
        raise ConfigError(
            f"{path} and the source {tree} lie inside one another: the daemon would wait for itself",
            advice="mount outside of the tree that is the source",
        )


def _local_tree(source: str) -> str | None:
    """The directory that a `file:` source is; None for the other kinds."""
    scheme, _, rest = source.partition(":")
    if scheme.lower() != "file":
        return None
    return os.path.realpath(urllib.parse.unquote(rest.removeprefix("//").removeprefix("localhost") or "/"))


def _inside(path: str, tree: str) -> bool:
    return path == tree or path.startswith(tree.rstrip("/") + "/")


def detach_leftover(mountpoint: str, base: Path | None = None) -> None:
    """After a start that failed or was killed: leave no mount behind whose daemon is gone. Never raises TurboError."""
    if mountpoint in mount_table.turbofs_mounts() and not serving(mountpoint, base):
        try:
            detach(mountpoint, lazy=True)
        except TurboError:
            return
