"""Where a mount stages, and how much: opened before anything is written, with what an earlier mount left there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from turbofs.config import WriteConfig
from turbofs.errors import ConfigError
from turbofs.limits import memory_limit
from turbofs.mountinfo import filesystem_of
from turbofs.write.journal import Journal
from turbofs.write.saving import restore
from turbofs.write.staging import JOURNAL_FILE, Staging, StagingArea, require_own

_SHARED_MEMORY = Path("/dev/shm/turbofs")  # noqa: S108 - used only where it is this user's own
_LEAST_BYTES = 64 << 20
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})


def staging_place(config: WriteConfig, name: str, runtime_base: Path, state_directory: Path) -> Path:
    """The staging directory of the mount called *name*.

    Where none is named, root's mounts stage in memory: below the runtime directory, else in /dev/shm. What a user's mount
    had there would be gone at the user's logout, so it stages on disk, in its state directory.
    """
    if config.staging_dir is not None:
        return config.staging_dir
    if os.geteuid() == 0:
        for parent in (runtime_base / "staging", _SHARED_MEMORY):
            if filesystem_of(parent) in _IN_MEMORY:
                return parent / name
    return state_directory / "staging"


def open_staging(config: WriteConfig, directory: Path, state_directory: Path) -> Staging:
    """Open, and lock, the staging area in *directory*, with what the last mount saved in *state_directory*. Blocks.

    Raises ConfigError where it cannot be used or what is there is not a journal of TurboFS, BusyError where another
    mount has it.
    """
    if config.staging_dir is None and directory.parent == _SHARED_MEMORY:  # where anybody may have made it first
        if not os.path.lexists(_SHARED_MEMORY):
            _SHARED_MEMORY.mkdir(mode=0o755)
        require_own(_SHARED_MEMORY, others=stat.S_IWGRP | stat.S_IWOTH)
    limit_bytes = config.staging_size_bytes or _default_limit(directory)
    area = StagingArea.open(
        directory, limit_bytes=limit_bytes, soft_bytes=config.staging_soft_bytes, stall_s=config.stall_s
    )
    try:
        restore(directory, state_directory)
        return Staging(area, Journal.open(directory / JOURNAL_FILE))
    except BaseException:
        area.close()
        raise


def close_staging(staging: Staging, *, empty: bool) -> None:
    """Close the journal, then the area; an *empty* one gives its memory back."""
    staging.journal.close()
    if empty:
        for path in staging.area.directory.glob(f"{JOURNAL_FILE}*"):
            path.unlink(missing_ok=True)
    staging.area.close()


def _default_limit(directory: Path) -> int:
    nearest = next(folder for folder in (directory, *directory.parents) if folder.exists())
    try:
        found = os.statvfs(nearest)
    except OSError as error:
        raise ConfigError(
            f"cannot stage in {directory}: {error.strerror}", advice="choose a directory with --staging-dir"
        ) from error
    free_bytes = found.f_bavail * found.f_frsize // 2
    if filesystem_of(nearest) in _IN_MEMORY:
        free_bytes = min(free_bytes, memory_limit().limit_bytes // 2)
    return max(free_bytes, _LEAST_BYTES)
