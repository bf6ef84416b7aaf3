"""Where a mount's control socket lives, and who owns it: one folder a mount, held by a lock while its daemon lives.

    BASE/NAME/control.sock   the control socket
    BASE/NAME/mount.json     what is mounted: {pid, source, mountpoint, started}
    BASE/NAME/lock           locked (flock) by the daemon as long as it lives, however it ends

BASE is /run/turbofs for root, else XDG_RUNTIME_DIR/turbofs; TURBOFS_RUNTIME_DIR overrides both. NAME is the escaped
mount point, as `systemd-escape --path` writes it. Nothing here touches a mount.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from turbofs.errors import BusyError, ConfigError, MountError

SYSTEM_BASE = Path("/run/turbofs")
SOCKET_NAME = "control.sock"
_LOCK_TRIES, _LOCK_PAUSE_S = 10, 0.01  # `daemon_alive` of some client may hold the lock for an instant
_SOCKET_PATH_LIMIT = 107  # sun_path holds 108 bytes, the last a NUL
_NAME_LIMIT = 255
_DIGEST_CHARACTERS = 16
_CUT_ESCAPE = re.compile(r"\\(x[0-9a-f]?)?$")  # the beginning of an escape whose end was cut off
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789:_.")


@dataclass(frozen=True, slots=True)
class MountRecord:
    """The content of `mount.json`."""

    pid: int
    source: str
    mountpoint: str
    started: float
    """Seconds since the epoch."""


def escape_path(path: str) -> str:
    """*path* as one file name, like `systemd-escape --path`: "/mnt/a b" is "mnt-a\\x20b", "/" is "-"."""
    parts = [part for part in path.split("/") if part]
    if not parts:
        return "-"
    escaped = ["".join(chr(b) if b in _PLAIN else f"\\x{b:02x}" for b in os.fsencode(part)) for part in parts]
    joined = "-".join(escaped)
    return f"\\x2e{joined[1:]}" if joined.startswith(".") else joined


def mount_name(mountpoint: str, base: Path) -> str:
    """The escaped mount point, shortened where the socket's path would not fit: then a digest stands for its tail."""
    name = escape_path(mountpoint)
    room = min(_SOCKET_PATH_LIMIT - len(os.fsencode(base)) - len(f"//{SOCKET_NAME}"), _NAME_LIMIT)
    if len(name) <= room:
        return name
    if room < _DIGEST_CHARACTERS:
        raise ConfigError(f"{base} is too long a path for a Unix socket in it", advice="choose a shorter runtime_dir")
    digest = hashlib.blake2b(name.encode(), digest_size=_DIGEST_CHARACTERS // 2).hexdigest()
    head = _CUT_ESCAPE.sub("", name[: max(0, room - _DIGEST_CHARACTERS - 1)])
    return f"{head}~{digest}"[-room:]


def runtime_base() -> Path:
    """Where this process's own mounts put their folders."""
    override = os.environ.get("TURBOFS_RUNTIME_DIR")
    if override:
        return Path(override)
    if os.geteuid() == 0:
        return SYSTEM_BASE
    import platformdirs  # knows the fall-backs where XDG_RUNTIME_DIR is not set; costs 10 ms

    return platformdirs.user_runtime_path("turbofs")


def runtime_bases() -> list[Path]:
    """Where clients look for mounts: one's own, then root's."""
    own = runtime_base()
    return [own] if own == SYSTEM_BASE or os.environ.get("TURBOFS_RUNTIME_DIR") else [own, SYSTEM_BASE]


def folder_of(mountpoint: str, base: Path) -> Path:
    return base / mount_name(mountpoint, base)


def find_folder(mountpoint: str, bases: list[Path] | None = None) -> Path | None:
    """The folder of the mount at *mountpoint*, dead or alive; None where no daemon of this machine had one."""
    for base in bases if bases is not None else runtime_bases():
        folder = folder_of(mountpoint, base)
        if (folder / SOCKET_NAME).exists() or (folder / "mount.json").exists():
            return folder
    return None


def list_records(bases: list[Path] | None = None) -> list[tuple[Path, MountRecord]]:
    """Every mount that left a record, dead ones too, with its folder."""
    found = []
    for base in bases if bases is not None else runtime_bases():
        with contextlib.suppress(FileNotFoundError, PermissionError):
            for folder in sorted(base.iterdir()):
                record = read_record(folder)
                if record is not None:
                    found.append((folder, record))
    return found


def read_record(folder: Path) -> MountRecord | None:
    """The record in *folder*; None where there is none, or it is not one."""
    try:
        document = json.loads((folder / "mount.json").read_bytes())
        return MountRecord(
            int(document["pid"]), str(document["source"]), str(document["mountpoint"]), float(document["started"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def held(mountpoint: str, base: Path) -> Iterator[Path]:
    """Own the folder of *mountpoint* under *base* while inside; it is empty at the start and removed at the end.

    Raises BusyError where a living daemon owns it, MountError where it cannot be made.
    """
    folder = folder_of(mountpoint, base)
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        for path in (base, folder):
            _make(path)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise MountError(f"cannot use {folder}: {error.strerror}", advice="set runtime_dir under [mount]") from error
    try:
        _lock(lock, folder, mountpoint)
        # What lies here now is a dead daemon's: the lock says so.
        _clear(folder)
        try:
            yield folder
        finally:
            _clear(folder)
            # Whoever waits for the lock sees the folder gone. One who opened the old lock file meanwhile owns a file
            # without a name: harmless, since the next to come makes a new one only if the folder is new as well.
            with contextlib.suppress(OSError):
                (folder / "lock").unlink()
                folder.rmdir()
    finally:
        os.close(lock)


def discard(mountpoint: str, base: Path) -> None:
    """Remove what a dead daemon of *mountpoint* left; leaves it where a new one owns it, or where it is not ours."""
    with contextlib.suppress(BusyError, MountError), held(mountpoint, base):
        pass


def write_record(folder: Path, record: MountRecord) -> None:
    """Publish *record*; readers see the old one, or all of the new one. Raises MountError where there is no room for it."""
    temporary = folder / "mount.json.new"
    try:
        temporary.write_text(json.dumps(asdict(record)), encoding="utf-8")
        temporary.chmod(0o644)
        temporary.replace(folder / "mount.json")
    except OSError as error:
        raise MountError(
            f"cannot write to {folder}: {error.strerror}", advice="set runtime_dir under [mount]"
        ) from error


def daemon_alive(folder: Path) -> bool:
    """Whether a daemon holds *folder*. Only its owner and root may ask: others get PermissionError."""
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _lock(lock: int, folder: Path, mountpoint: str) -> None:
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE_S)
    else:
        record = read_record(folder)
        who = f"the daemon {record.pid} ({record.source})" if record else "a daemon that is starting or ending"
        raise BusyError(f"{who} serves {mountpoint} already", advice=f"`turbofs umount {mountpoint}` first")
    try:
        current = os.stat(folder / "lock").st_ino == os.fstat(lock).st_ino
    except FileNotFoundError:
        current = False
    if not current:
        raise BusyError(f"the daemon that served {mountpoint} is just ending", advice="try again")


def _make(folder: Path) -> None:
    """Make *folder*, which others may search; refuse one that somebody else could have prepared."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(0o755)  # whatever the umask: users reach root's mounts through it
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise MountError(f"{folder} is not a directory", advice="set runtime_dir under [mount]")
    if status.st_uid not in {0, os.geteuid()}:
        raise MountError(f"{folder} belongs to user {status.st_uid}", advice="set runtime_dir under [mount]")


def _clear(folder: Path) -> None:
    for name in (SOCKET_NAME, "mount.json", "mount.json.new"):
        with contextlib.suppress(FileNotFoundError):
            (folder / name).unlink()
