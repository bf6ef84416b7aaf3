"""Daemons of tests that are killed at a named point (`turbofs.testing.crashing`), from the test's side."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from turbofs.cli import mount_point
from turbofs.testing.mounts import Workplace
from turbofs.testing.waiting import eventually
from turbofs.wire import runtime_dir
from turbofs.wire.control_client import ControlClient

LIFETIME_S = 120
_START_LIMIT_S, _END_LIMIT_S, _ANSWER_LIMIT_S = 60.0, 60.0, 60.0
_DEFECTS = ("on a defect of TurboFS", "Traceback (most recent call last)", '"exception":')


@dataclass(frozen=True)
class Kill:
    """SIGKILL at the *nth* time that the daemon comes to *point*, one of `crashing.POINTS`."""

    point: str
    nth: int = 1


class CrashDaemon:
    """One daemon, alive or not. `usable` says whether its mount ever was."""

    def __init__(self, house: DaemonHouse, place: Workplace, pid: int) -> None:
        self._house = house
        self._place = place
        self.pid = pid
        self.usable = False
        self._descriptor = os.pidfd_open(pid)
        self._status: int | None = None

    @property
    def ended(self) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return self._status is not None or bool(poll.poll(0))

    def wait(self, limit_s: float = _END_LIMIT_S) -> int:
        """The exit status, or minus the signal that ended it; AssertionError where it does not end."""
        if self._status is None:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            assert poll.poll(limit_s * 1000), f"the daemon {self.pid} does not end within {limit_s:g} s"
            self._status = cast("int", self._house.ask({"wait": self.pid})["status"])
            os.close(self._descriptor)
        return self._status

    def kill(self) -> None:
        """SIGKILL, if it lives; returns when it is gone."""
        if not self.ended:
            os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def stop(self) -> None:
        """SIGTERM, and a clean end."""
        os.kill(self.pid, signal.SIGTERM)
        assert self.wait() == 0, self.log()

    def status(self) -> dict[str, object]:
        """The status document of the mount. Raises as the control client does where the daemon is dead."""
        with ControlClient(self._place.folder / runtime_dir.SOCKET_NAME) as client:
            return cast("dict[str, object]", client.call("status", {}))

    def log(self) -> str:
        return _log_path(self._place).read_text(errors="replace")


class DaemonHouse:
    """The process that forks the daemons. Use as a context manager; they end with it."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "turbofs.testing.crashing"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=None,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(_END_LIMIT_S)
        self._process.stdout.close()

    def ask(self, command: dict[str, object]) -> dict[str, object]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], _ANSWER_LIMIT_S)
        line = self._process.stdout.readline() if ready else b""
        assert line, f"the daemons' parent does not answer {command}"
        return cast("dict[str, object]", json.loads(line))

    def start(self, place: Workplace, kill: Kill | None, *options: str, source: str | None = None) -> CrashDaemon:
        """A daemon over *place*, in which nothing else is served; returns once it is usable, or killed.

        AssertionError, with its log, where it ends otherwise.
        """
        with suppress(OSError):
            mount_point.detach(str(place.mountpoint), lazy=True) if place.mounted else None
        request = {
            "source": source or place.uri,
            "mountpoint": str(place.mountpoint),
            "options": [part for part in place.options(*options) if part != "-o"],
            "environment": {name: value for name, value in place.environment.items() if os.environ.get(name) != value},
            "log": str(_log_path(place)),
            "kill": [kill.point, kill.nth] if kill else None,
        }
        pid = cast("int", self.ask({"start": request, "lifetime_s": LIFETIME_S})["pid"])
        made = CrashDaemon(self, place, pid)

        def usable() -> bool:
            record = runtime_dir.read_record(place.folder)
            made.usable = record is not None and record.pid == pid
            return made.usable or made.ended

        eventually(usable, "the mount is usable, or the daemon dead", limit_s=_START_LIMIT_S)
        assert made.usable or made.wait() == -signal.SIGKILL, made.log()
        return made


def defects(log: str) -> list[str]:
    """Lines of a daemon's log that tell of a defect of its own."""
    return [line for line in log.splitlines() if any(sign in line for sign in _DEFECTS)]


def _log_path(place: Workplace) -> Path:
    return place.root / "log" / "daemon.log"
