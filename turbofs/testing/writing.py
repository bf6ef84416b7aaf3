"""What tests of writing ask of a mount, and of the source beneath it while somebody writes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from turbofs.source.orphans import is_temporary_name
from turbofs.testing.mounts import Mount

ACK = "user.turbofs.ack"
DURABILITY = "user.turbofs.durability"
LAST_ERROR = "user.turbofs.last_error"
_POLL_S = 0.001
_END_LIMIT_S = 30.0


def acknowledge(folder: Path, level: str = "staged") -> None:
    """Say what close and fsync below *folder* of a mount wait for."""
    os.setxattr(folder, ACK, level.encode())


def durability(path: Path) -> str:
    """Where the last acknowledged bytes of a file of a mount are: `open`, `staged`, `persisted` or `broken`."""
    return os.getxattr(path, DURABILITY).decode()


def last_error(path: Path) -> str:
    """Why a file of a mount is broken, or a hint on it was refused."""
    return os.getxattr(path, LAST_ERROR).decode("utf-8", "surrogateescape")


def broken_error(mount: Mount, path: Path) -> str | None:
    """Why the mount's status says that *path* in it is broken; None where it does not. The name itself may be gone."""
    writing = cast("dict[str, list[dict[str, str]]]", mount.status()["writing"])
    shown = f"/{path.relative_to(mount.path)}"
    return next((each["error"] for each in writing["broken"] if each["path"] == shown), None)


def outcome(act: Callable[..., object], *arguments: object) -> int | None:
    """None where *act* works, else its errno."""
    try:
        act(*arguments)
    except OSError as error:
        return error.errno
    return None


def temporaries(folder: Path) -> list[Path]:
    """The hidden temporary files below *folder* of a local tree."""
    return sorted(path for path in folder.rglob(".turbofs-*") if is_temporary_name(path.name))


def write_all(
    path: Path, data: bytes, *, step: int = 1 << 20, flags: int = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
) -> None:
    """Write a file front to back; raises what open, write or close raise."""
    fd = os.open(path, flags, 0o644)
    try:
        write_fd(fd, data, step=step)
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)


def write_fd(fd: int, data: bytes, *, step: int = 1 << 20) -> None:
    """Write all of *data* at the descriptor's offset."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view[:step]) :]


def content_or_none(path: Path) -> bytes | None:
    """What the file holds now; None where the name is not there."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


class Watcher:
    """Looks at something over and over in a thread, and keeps every value that differs from the one before it.

    with Watcher(lambda: content_or_none(place.source / "file")) as watcher:
        ...
    assert watcher.seen == [None, b"old", b"new"]

    What the look raises is raised at the end of the context. Fork no process meanwhile.
    """

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look
        self._stop = threading.Event()
        self._looks = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.seen: list[object] = []

    def catch_up(self) -> None:
        """Return once a look that began after this call has ended."""
        target = self._looks + 2
        deadline = time.monotonic() + _END_LIMIT_S
        while self._looks < target and self._error is None:
            assert time.monotonic() < deadline, "the watcher hangs"
            time.sleep(_POLL_S)

    def __enter__(self) -> Self:
        self._thread.start()
        self.catch_up()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.catch_up()
        self._stop.set()
        self._thread.join(_END_LIMIT_S)
        assert not self._thread.is_alive(), "the watcher hangs"
        if self._error is not None and kind is None:
            raise self._error

    def _watch(self) -> None:
        try:
            while not self._stop.is_set():
                value = self._look()
                if not self.seen or value != self.seen[-1]:
                    self.seen.append(value)
                self._looks += 1
                time.sleep(_POLL_S)
        except BaseException as error:  # noqa: BLE001 - the test's own thread raises it
            self._error = error
