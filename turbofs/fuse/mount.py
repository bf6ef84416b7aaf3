"""A mount's life: mount, serve, unmount. One per process (pyfuse3 keeps one session in global state)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pyfuse3
import structlog
import trio

from turbofs.config import Config
from turbofs.errors import MountError
from turbofs.fs.filesystem import FileSystem
from turbofs.fuse.kernel import may_allow_others, tune
from turbofs.fuse.notify import Notifier
from turbofs.fuse.operations import Operations
from turbofs.fuse.watchdog import Watchdog
from turbofs.mountinfo import mounts_at

_log = structlog.get_logger(__name__)
_ASCII = "".join(map(chr, range(128)))
_REQUESTS_AT_ONCE = 512
"""Tasks that may wait for the source at the same time; the kernel's own limit (max_background) is below it."""


async def serve(filesystem: FileSystem, config: Config, ready: Callable[[], None]) -> None:
    """Mount *filesystem*, call *ready* once it is usable, serve until it is unmounted; unmount if cancelled.

    Raises MountError where the kernel or fusermount3 refuses.
    """
    mount = config.mount
    options = _options(config)
    if mount.allow_other and "allow_other" not in options:
        filesystem.reports.notes.append(
            "only the mounting user may use this mount: /etc/fuse.conf does not say user_allow_other"
        )
    operations = Operations(filesystem)
    try:
        pyfuse3.init(operations, str(mount.mountpoint), options)
    except (RuntimeError, OSError) as error:
        raise MountError(f"cannot mount on {mount.mountpoint}: {error}") from error
    try:
        filesystem.start()
        notifier = Notifier()
        filesystem.pages_are_stale = notifier.drop_pages_soon
        filesystem.tree.names.drop_pages = notifier.drop_pages
        if filesystem.room is not None:
            filesystem.room.writing.pages_are_stale = notifier.drop_pages_soon
            filesystem.room.writing.device = _device(mount.mountpoint)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Watchdog().run)
            nursery.start_soon(notifier.run)
            nursery.start_soon(_serve_requests, nursery.cancel_scope)
            await operations.initialized.wait()
            await trio.lowlevel.checkpoint()  # the answer to INIT, which sets the kernel's defaults, is out after this
            for note in tune(mount.mountpoint, mount.read_ahead_kib, mount.max_background):
                _log.warning("kernel limits", note=note)
                filesystem.reports.notes.append(note)
            ready()
    finally:
        # Also where the kernel has unmounted already; lazily where files are still open: they get ENOTCONN from now on.
        pyfuse3.close(unmount=True)
        with trio.CancelScope(shield=True):
            await filesystem.end_writing()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + config.source.operation_timeout_s):
            await filesystem.aclose()


async def _serve_requests(scope: trio.CancelScope) -> None:
    await pyfuse3.main(min_tasks=4, max_tasks=_REQUESTS_AT_ONCE)
    scope.cancel()


def _device(mountpoint: Path) -> str | None:
    """MAJOR:MINOR of what is mounted on *mountpoint* now, from the kernel's table: the mount itself is not touched."""
    mounts = mounts_at(mountpoint)
    return mounts[-1].device if mounts else None


def _options(config: Config) -> set[str]:
    mount = config.mount
    # pyfuse3 takes ASCII only; other bytes are written as a URI writes them.
    name = quote(os.fsencode(mount.source), safe=_ASCII).replace("\\", "\\\\").replace(",", "\\,")
    options = {"default_permissions", f"fsname={name}", "subtype=turbofs"}
    if mount.allow_other and may_allow_others():
        options.add("allow_other")
    return options
