"""Who may do what, by mode bits: for requests that do not pass the kernel's own check (control socket, hint mirror)."""

from __future__ import annotations

import os
from pathlib import Path

from turbofs.errors import AccessDeniedError
from turbofs.model import Caller

READ, WRITE, SEARCH = 4, 2, 1


def may(caller: Caller, uid: int, gid: int, mode: int, wanted: int) -> bool:
    """Whether *caller* has all of the *wanted* bits (READ, WRITE, SEARCH) on something of *uid*, *gid* and *mode*.

    As POSIX has it: the owner's bits for the owner, the group's for members, the others' for the rest; root may all
    but execute what nobody may, which no caller of this asks for.
    """
    if caller.uid == 0:
        return True
    if caller.uid == uid:
        bits = mode >> 6
    elif gid == caller.gid or gid in caller.groups or gid in supplementary_groups(caller.pid):
        bits = mode >> 3
    else:
        bits = mode
    return bits & wanted == wanted


def require(caller: Caller, uid: int, gid: int, mode: int, wanted: int, path: str) -> None:
    """Raises AccessDeniedError where `may` says no."""
    if not may(caller, uid, gid, mode, wanted):
        raise AccessDeniedError(
            f"user {caller.uid} may not {'read' if wanted & READ else 'search'} {path}",
            advice="ask its owner for permission; mode bits are those of the source",
        )


def oversees(uid: int, owner_uid: int) -> bool:
    """Whether *uid* may know and end what *owner_uid* asked this mount to do in the background.

    Its paths may lie where others may not search. Root and the mount's own user could see all of it anyway.
    """
    return uid in {0, owner_uid, os.geteuid()}


def supplementary_groups(pid: int) -> frozenset[int]:
    """The supplementary groups of a process; none where it is gone or in another PID namespace."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return frozenset()
    line = next((line for line in status.splitlines() if line.startswith("Groups:")), "Groups:")
    return frozenset(int(group) for group in line.split()[1:])
