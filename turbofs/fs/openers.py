"""Who still has a file open for writing: from the texts under /proc, never by touching the mount.

Every close of a duplicated or inherited descriptor reaches the mount, and only the last one of the process that opened
the file means that it is done. The kernel does not say which one that is; `/proc/TGID/fdinfo` does. Nothing here takes a
lock that a process holds while it executes a program, so a close that happens within that can be looked into as well.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_HEAD_BYTES = 4096  # pos, flags, mnt_id and ino come first, then what the kind of file adds
_MEMORY = (
    "/memfd:",
    "/dev/zero (deleted)",
    "/SYSV",
)  # named as files are, but of mounts that the kernel keeps to itself


def thread_group_of(pid: int) -> int | None:
    """The process of the thread *pid*, as which FUSE names a caller. None where it is gone or of another PID namespace."""
    if pid <= 0:
        return None
    try:
        status = (_PROC / str(pid) / "status").read_bytes()
    except OSError:
        return None
    found = _fields(status).get(b"Tgid")
    return int(found) if found is not None and found.isdigit() and int(found) > 0 else None


def holds_for_writing(tgid: int, device: tuple[int, int] | str, inode: int) -> bool | None:
    """Whether the process *tgid* has a descriptor open for writing on the file *inode* of the mounts of *device*.

    *device* is (major, minor) or "MAJOR:MINOR", as in mountinfo; *inode* the number that the kernel knows the file by. A
    process that is gone or ending holds nothing. None where it cannot be told: another user's process, another PID
    namespace, or a kernel before 5.14, which does not name inodes in fdinfo. Blocks; call it in a thread.
    """
    if tgid <= 0:
        return None
    wanted = device if isinstance(device, str) else f"{device[0]}:{device[1]}"
    unknown = False
    try:
        for folder in _tables(tgid):
            for found in _writable(folder):
                number = found.get(b"ino")
                if number is not None and int(number) != inode:
                    continue
                if _is_ours(folder, found[b"fd"].decode(), int(found.get(b"mnt_id", b"-1")), wanted):
                    if number is not None:
                        return True
                    unknown = True
    except PermissionError:
        return None
    except (FileNotFoundError, ProcessLookupError):
        # Where /proc is mounted with hidepid=2, other users' processes are not there, but they live.
        return None if _lives_unseen(tgid) else False
    return None if unknown else False


def fdinfo_names_inodes() -> bool:
    """Whether this kernel says in fdinfo which inode a descriptor is of (5.14 and later)."""
    reading, writing = os.pipe()
    try:
        return b"ino" in _fields((_PROC / "self/fdinfo" / str(writing)).read_bytes())
    except OSError:
        return False
    finally:
        os.close(reading)
        os.close(writing)


def _tables(tgid: int) -> Iterator[Path]:
    """The folders in /proc that show a descriptor table of *tgid*: the first thread's, or where that has ended, others'."""
    leader = _PROC / str(tgid)
    yield leader
    # A first thread that has ended shows an empty table, while the others go on with theirs.
    if not os.listdir(leader / "fdinfo"):
        for thread in os.listdir(leader / "task"):
            if thread != str(tgid):
                yield leader / "task" / thread


def _writable(folder: Path) -> Iterator[dict[bytes, bytes]]:
    """What fdinfo says of each descriptor open for writing, and its number as `fd`."""
    place = f"{folder}/fdinfo"
    try:
        names = os.listdir(place)
    except (FileNotFoundError, ProcessLookupError):
        if folder.parent.name == "task":
            return  # this thread has ended; the others may not have
        raise
    for name in names:
        try:
            descriptor = os.open(f"{place}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError):
            continue  # closed meanwhile
        try:
            found = _fields(os.read(descriptor, _HEAD_BYTES))
        except (FileNotFoundError, ProcessLookupError):
            continue
        finally:
            os.close(descriptor)
        if int(found.get(b"flags", b"0"), 8) & os.O_ACCMODE in (os.O_WRONLY, os.O_RDWR):
            yield found | {b"fd": name.encode()}


def _is_ours(folder: Path, descriptor: str, mount_id: int, device: str) -> bool:
    """Whether the mount *mount_id*, which a descriptor of the process came through, is one of *device*."""
    for table in (folder / "mountinfo", _PROC / "self/mountinfo"):
        # A process that has ended its work, or changed its root, sees less than it has open.
        with contextlib.suppress(OSError, ValueError):
            for line in table.read_bytes().splitlines():
                fields = line.split(b" ", 3)
                if int(fields[0]) == mount_id:
                    return fields[2] == device.encode()
    # The mount is in no table: unmounted lazily, outside a chroot, or handed over from another namespace. What is a
    # file at all then, and has this inode number, is taken for ours: RELEASE publishes, should that be a coincidence.
    try:
        target = os.readlink(folder / "fd" / descriptor)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return target.startswith("/") and not target.startswith(_MEMORY)


def _lives_unseen(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return not (_PROC / str(pid)).exists()
    return False


def _fields(text: bytes) -> dict[bytes, bytes]:
    """The lines "name:<tab>value" of a file in /proc; the first of a name counts."""
    found: dict[bytes, bytes] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(b":")
        if colon:
            found.setdefault(name, value.strip())
    return found
