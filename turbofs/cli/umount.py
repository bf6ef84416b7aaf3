"""`turbofs umount DIR`: unmounts, waits until the daemon has written what is staged and is gone.

Says who keeps a mount busy, how far the writing is, and what could not be written and where it is kept.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from turbofs.cli import mount_point, mount_table
from turbofs.cli.draining import Draining, left_text
from turbofs.cli.output import JsonOption, emit, note
from turbofs.cli.progress import progress
from turbofs.errors import BusyError, DeadlineExceededError, InvalidRequestError, TurboError
from turbofs.mountinfo import MountEntry, mount_entries
from turbofs.units import parse_duration
from turbofs.wire import runtime_dir

_BUSY_PATIENCE_S = 1.0  # a program that has just ended may still be closing its files
_POLL_S = 0.05
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that keeps a mount busy, and one of the paths by which it does."""

    pid: int
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class Unmounted:
    """A mount that has ended, and what its daemon could not write: `files`, `bytes`, `where`, `paths`."""

    mountpoint: str
    left: dict[str, object] | None = None


def command(
    directory: Annotated[str, typer.Argument(metavar="DIR", show_default=False, help="The mount point.")],
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="How long to wait for the daemon to write what is staged and end.")
    ] = "5m",
    json: JsonOption = False,
) -> None:
    """Unmount DIR; returns when its daemon has written what is staged, and is gone."""
    done = unmount(directory, parse_duration(timeout))
    if done.left is not None:
        note(left_text(done.left, done.mountpoint))
    document = {"mountpoint": done.mountpoint, "unmounted": True, "left": done.left}
    emit(document, lambda: f"{done.mountpoint} is unmounted")


def unmount(directory: str, timeout_s: float) -> Unmounted:
    """Unmount *directory* within *timeout_s*, showing how the writing gets on.

    Raises InvalidRequestError where it is no TurboFS mount, BusyError with the processes that hold it, and
    DeadlineExceededError where the daemon does not end.
    """
    deadline = time.monotonic() + timeout_s
    mounts = mount_table.turbofs_mounts()
    found = mount_table.resolve(directory, set(mounts))
    # What is not mounted any more may have left a record, or a daemon that is still ending.
    place = found if isinstance(found, str) else found.mountpoint if found.path == "/" else None
    folder = runtime_dir.find_folder(place) if place is not None else None
    if place is None or (place not in mounts and folder is None):
        listing = ", ".join(sorted(mounts)) or "none"
        raise InvalidRequestError(f"{directory} is not the mount point of TurboFS", advice=f"mounted now: {listing}")
    record = runtime_dir.read_record(folder) if folder else None
    if folder is not None and not mount_point.serving(place, folder.parent):
        note(f"the daemon of {place} is dead: cleaning up")
        if place in mounts:
            mount_point.detach(place, lazy=True)
        runtime_dir.discard(place, folder.parent)
        return Unmounted(place)
    draining = Draining(folder / runtime_dir.SOCKET_NAME if folder is not None else None)
    draining.look()  # also for where it will say what is left: it may end before the next look
    if place in mounts:
        _detach_idle(place, min(deadline, time.monotonic() + _BUSY_PATIENCE_S))
    with progress() as show:
        next_look = time.monotonic() + _LOOK_EVERY_S
        while place in mount_table.turbofs_mounts() or (folder and _alive(folder, record)):
            if time.monotonic() > deadline:
                raise _too_slow(place, record, draining, mounts.get(place), timeout_s)
            if time.monotonic() > next_look:
                draining.look()
                draining.tell(show)
                next_look = time.monotonic() + _LOOK_EVERY_S
            time.sleep(_POLL_S)
    return Unmounted(place, draining.left())


def _too_slow(
    place: str,
    record: runtime_dir.MountRecord | None,
    draining: Draining,
    entry: MountEntry | None,
    timeout_s: float,
) -> DeadlineExceededError:
    who = f"daemon {record.pid}" if record else "daemon"
    others = elsewhere(entry.device) if entry is not None else []
    if others:
        pids = ", ".join(map(str, others[:8]))
        return DeadlineExceededError(
            f"{place} is unmounted here, but its {who} still serves other mount namespaces (of processes {pids})",
            advice="a container or `unshare` copied the mount: unmount it there, or end those processes",
        )
    if draining.files:
        return DeadlineExceededError(
            f"{place} is unmounted, but its {who} is still writing after {timeout_s:g} s: {draining}",
            advice=f"it goes on by itself, and `turbofs status {place}` shows how far it is; wait with"
            f" `turbofs umount {place} --timeout 10m`",
        )
    return DeadlineExceededError(
        f"{place} is unmounted, but its {who} has not ended after {timeout_s:g} s",
        advice="a program still holds one of its files, or the source does not answer; wait longer with --timeout,"
        f" or end it with `kill -9 {record.pid if record else 'PID'}`",
    )


def holders(mountpoint: str) -> list[Holder]:
    """The processes that use *mountpoint*: by an open file, a mapping, or their working or root directory.

    Reads /proc only: the links there are texts, and following them would ask the mount. Processes of other users
    show to root alone.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            path = next((path for path in _held_paths(entry) if _below(path, mountpoint)), None)
            if path is not None:
                found.append(Holder(int(entry.name), _name(entry), path))
    return found


def elsewhere(device: str) -> list[int]:
    """One process of each other mount namespace in which the file system *device* ("MAJOR:MINOR") is mounted."""
    namespaces: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                namespaces.setdefault(os.readlink(entry / "ns/mnt"), int(entry.name))
    with contextlib.suppress(OSError):
        namespaces.pop(os.readlink("/proc/self/ns/mnt"), None)
    found = []
    for pid in namespaces.values():
        with contextlib.suppress(OSError):
            if any(entry.device == device for entry in mount_entries(Path(f"/proc/{pid}/mountinfo"))):
                found.append(pid)
    return sorted(found)


def _detach_idle(place: str, patience_until: float) -> None:
    while True:
        try:
            mount_point.detach(place)
            return
        except BusyError as error:
            if time.monotonic() < patience_until:
                time.sleep(_POLL_S)
                continue
            users = holders(place)
            listing = ", ".join(f"{user.name} ({user.pid}) holds {user.path}" for user in users[:8])
            more = f" and {len(users) - 8} more" if len(users) > 8 else ""
            raise BusyError(
                f"{place} is in use: {listing}{more}" if users else f"{place} is in use by processes of other users",
                advice="end them, or let them leave the directory, then try again",
            ) from error
        except TurboError:
            if place not in mount_table.turbofs_mounts():
                return  # somebody else was faster
            raise


def _alive(folder: Path, record: runtime_dir.MountRecord | None) -> bool:
    with contextlib.suppress(PermissionError):
        if runtime_dir.daemon_alive(folder):
            return True
    return record is not None and _process_since(record)


def _process_since(record: runtime_dir.MountRecord) -> bool:
    import psutil

    try:
        process = psutil.Process(record.pid)
        # A process that started after the mount has only inherited the number.
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= record.started + 1
    except psutil.Error:
        return False


def _held_paths(process: Path) -> Iterator[str]:
    links = [process / "cwd", process / "root", process / "exe"]
    with contextlib.suppress(OSError):
        links += list((process / "fd").iterdir())
    for link in links:
        with contextlib.suppress(OSError):
            yield os.readlink(link)
    with contextlib.suppress(OSError), (process / "maps").open(encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6:
                yield fields[5]


def _below(path: str, mountpoint: str) -> bool:
    return path == mountpoint or path.startswith(mountpoint.rstrip("/") + "/")


def _name(process: Path) -> str:
    try:
        return (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "?"
