"""The staging area: a directory on tmpfs in which written bytes wait for the source, and how much may wait there.

Room is given out in pages and is bounded twice. Below the soft limit a writer does not wait. Above it, writers wait in the
order in which they came, so that they slow down to the rate of the flush; one that has waited for `stall_s` may go on up
to the hard limit. Where that is reached too, and nothing has been freed for `stall_s`, it is answered ENOSPC there and
then, never later.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import trio

from turbofs.errors import BusyError, ConfigError, OutOfSpaceError
from turbofs.mountinfo import filesystem_of
from turbofs.units import format_size
from turbofs.write.journal import Journal

PAGE_BYTES = 4096
JOURNAL_FILE, DATA_FOLDER = "journal.sqlite3", "data"
_LOCK = "lock"


class StagingArea:
    """The staging directory of one mount, locked against any other. Make it with `open`."""

    def __init__(self, directory: Path, lock: int, *, limit_bytes: int, soft_bytes: int, stall_s: float) -> None:
        self.directory = directory
        self.limit_bytes = limit_bytes
        self.soft_bytes = min(soft_bytes, limit_bytes)
        self.on_tmpfs = filesystem_of(directory) in {"tmpfs", "ramfs"}
        """Whether reads and writes cost a copy in memory, so that they may run on the event loop."""
        self.used_bytes = 0
        self.wanted: Callable[[], None] = lambda: None
        """Told, whenever a writer has to wait, that room is wanted."""
        self._parked: dict[int, int] = {}
        """The room of each parked file, in bytes."""
        self._lock = lock
        self._stall_s = stall_s
        self._freed = trio.Event()
        self._freed_at = 0.0
        """When room was given back last (monotonic seconds)."""
        self._queue: deque[object] = deque()
        """Writers that wait for room, in their order."""

    @classmethod
    def open(cls, directory: Path, *, limit_bytes: int, soft_bytes: int | None = None, stall_s: float) -> StagingArea:
        """Make the directory where there is none, and lock it. Blocks. What is there keeps its mode.

        Raises ConfigError where it cannot be used or others could reach into it, BusyError where another mount has it.
        """
        try:
            _make_private(directory)
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot stage in {directory}: {error.strerror}", advice="choose a directory with --staging-dir"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise BusyError(
                f"another mount stages in {directory}", advice="give each mount a --staging-dir of its own"
            ) from error
        soft = soft_bytes if soft_bytes is not None else limit_bytes * 3 // 4
        return cls(directory, lock, limit_bytes=limit_bytes, soft_bytes=soft, stall_s=stall_s)

    @property
    def waiting(self) -> int:
        """Writers that wait for room."""
        return len(self._queue)

    def data_file(self, number: int) -> Path:
        """Where the bytes of staged file *number* are."""
        return self.directory / DATA_FOLDER / str(number)

    def data_files(self) -> dict[int, Path]:
        """What is there, by number."""
        return {int(path.name): path for path in (self.directory / DATA_FOLDER).iterdir() if path.name.isdigit()}

    async def reserve(self, count_bytes: int) -> None:
        """Take room for *count_bytes*, waiting as the module says. Raises OutOfSpaceError."""
        if not self._queue and self.used_bytes + count_bytes <= self.soft_bytes:
            self.used_bytes += count_bytes
            return
        turn = object()
        self._queue.append(turn)
        try:
            await self._wait_for_room(count_bytes, turn)
        finally:
            self._queue.remove(turn)
            self._wake()  # it is the next one's turn

    async def _wait_for_room(self, count_bytes: int, turn: object) -> None:
        patient_until = time.monotonic() + self._stall_s
        while True:
            now = time.monotonic()
            if self._queue[0] is turn and self.used_bytes + count_bytes <= self.soft_bytes:
                self.used_bytes += count_bytes
                return
            if now >= patient_until and self.reserve_nowait(count_bytes):
                return
            stalled_at = max(self._freed_at + self._stall_s, patient_until)
            if now >= stalled_at:
                raise OutOfSpaceError(
                    f"staging in {self.directory} is full: {format_size(self.used_bytes)} of "
                    f"{format_size(self.limit_bytes)} wait for the source",
                    advice="raise --staging-size, or see `turbofs status` for what keeps the source from taking them",
                )
            self.wanted()
            freed = self._freed
            with trio.move_on_after((patient_until if now < patient_until else stalled_at) - now):
                await freed.wait()

    def reserve_nowait(self, count_bytes: int) -> bool:
        """Take room within the hard limit; False where there is none."""
        if self.used_bytes + count_bytes > self.limit_bytes:
            return False
        self.used_bytes += count_bytes
        return True

    def release(self, count_bytes: int) -> None:
        """Give room back, and let those go on who wait for it."""
        if count_bytes:
            self.used_bytes -= count_bytes
            self._freed_at = time.monotonic()
            self._wake()

    def _wake(self) -> None:
        freed, self._freed = self._freed, trio.Event()
        freed.set()

    def adopt(self, count_bytes: int) -> None:
        """Count what an earlier mount left here: it takes room, whatever the limit is now."""
        self.used_bytes += count_bytes

    def keep_parked(self, number: int, room_bytes: int) -> None:
        """Parked file *number* takes *room_bytes*, which are counted already, until `drop_parked`."""
        self._parked[number] = self._parked.get(number, 0) + room_bytes

    def drop_parked(self, number: int) -> None:
        """Give back the room of parked file *number*."""
        self.release(self._parked.pop(number, 0))

    def statistics(self) -> dict[str, object]:
        return {
            "directory": str(self.directory),
            "on_tmpfs": self.on_tmpfs,
            "used_bytes": self.used_bytes,
            "soft_bytes": self.soft_bytes,
            "limit_bytes": self.limit_bytes,
        }

    def close(self) -> None:
        """Let another mount have the directory."""
        os.close(self._lock)


def _make_private(directory: Path) -> None:
    """Make *directory*, and the folder of the bytes in it, where missing, and require that nobody else changes them.

    What is staged is for those who may read it on the source: the folder of the bytes is for nobody else at all.
    """
    for parent in reversed(directory.parents):
        if not parent.exists():
            parent.mkdir(mode=0o755, exist_ok=True)
    made = not os.path.lexists(directory)
    if made:
        above = directory.parent.stat()
        if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
            raise ConfigError(
                f"cannot stage in {directory}: anybody may rename what is in {directory.parent}",
                advice=f"chmod o-w {directory.parent}, or choose another directory with --staging-dir",
            )
        directory.mkdir(mode=0o700)
    require_own(directory, others=stat.S_IWGRP | stat.S_IWOTH)
    data = directory / DATA_FOLDER
    if not os.path.lexists(data):
        data.mkdir(mode=0o700)
    require_own(data, others=stat.S_IRWXG | stat.S_IRWXO)


def require_own(directory: Path, *, others: int) -> None:
    """Raises ConfigError unless *directory* is a directory, and no link, of this user without the mode bits *others*."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        problem, advice = "it is not a directory", "name a directory itself, not a link to one"
    elif found.st_uid != os.geteuid():
        problem, advice = f"it belongs to user {found.st_uid}", "it must belong to the user who mounts"
    elif found.st_mode & others:
        mode = stat.S_IMODE(found.st_mode)
        problem, advice = f"its mode is {mode:04o}", f"chmod {mode & ~others:04o} {directory}"
    else:
        return
    raise ConfigError(
        f"cannot stage in {directory}: {problem}", advice=f"{advice}; or choose another directory with --staging-dir"
    )


class Staging(NamedTuple):
    """The staging area of a mount and what it says of its content."""

    area: StagingArea
    journal: Journal
