"""Daemons that kill themselves at a named point, started quickly: `python -m turbofs.testing.crashing`.

The process that runs this module imports everything once and then forks one daemon for each line of JSON on its standard
input, {"start": {"source", "mountpoint", "options", "environment", "log", "kill": [point, nth] | null}}, which it answers
with {"pid": …}. A point is one of `POINTS`; at the *nth* time that the daemon comes there it sends itself SIGKILL.
Nothing of the product knows of this: its source is wrapped, and its methods are patched from outside.

`turbofs.testing.crash_daemons` is the other side.
"""

from __future__ import annotations

import functools
import gc
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import trio

from turbofs import settings
from turbofs.cli import daemon, logs
from turbofs.cli.notify import TerminalReporter
from turbofs.config import Config, SourceConfig
from turbofs.fs import write_room
from turbofs.fs.writing import Writing
from turbofs.source.base import Source, SourceWriter
from turbofs.source.registry import open_source
from turbofs.testing.children import die_with_parent
from turbofs.testing.delegating import DelegatingSource
from turbofs.write.changes import Changes
from turbofs.write.flusher import Flusher
from turbofs.write.journal import Journal
from turbofs.write.naming import Naming
from turbofs.write.parking import Parking
from turbofs.write.promises import Promises
from turbofs.write.staged_file import StagedFile
from turbofs.write.uploads import Uploads
from turbofs.write.writes import Writes

T = TypeVar("T")

_SOURCE_ACTS: dict[str, tuple[str, ...]] = {
    "upload": ("create", "append", "write", "sync", "complete"),
    "rename": ("rename",),
    "names": ("delete", "delete_directory", "make_directory", "set_attributes"),
    "questions": ("stat_exact", "being_written"),
}
_METHODS: dict[str, dict[str, tuple[object, str]]] = {
    "stage": {
        "stage file": (StagedFile, "create"),
        "stage update": (Writes, "update"),
        "stage write": (StagedFile, "write"),
        "stage truncate": (StagedFile, "truncate"),
        "stage discard": (StagedFile, "discard"),
    },
    "acknowledge": {
        "acknowledge": (Promises, "make"),
        "flush": (Writing, "flush"),
        "fsync": (Writing, "fsync"),
        "defer": (Changes, "change"),
        "move": (Writes, "move_files"),
    },
    "publish": {
        "publish": (Flusher, "publish"),
        "resume": (Uploads, "resume"),
        "take name": (Naming, "take_name"),
        "tell": (Flusher, "_tell"),
        "park": (Parking, "park"),
    },
    "journal": {
        "journal put": (Journal, "put"),
        "journal remove file": (Journal, "remove_file"),
        "journal remove act": (Journal, "remove_act"),
        "journal commit": (Journal, "_change"),
    },
    "recovery": {
        "recover": (write_room, "recover"),
        "recover file": (Writes, "recovered"),
        "recover act": (Changes, "carry_out_later"),
        "recover leftovers": (write_room, "delete_leftovers"),
    },
}
_ONLY_WHEN: dict[str, Callable[..., bool]] = {"journal commit": lambda _journal, statement, *_: statement == "COMMIT"}
"""Where not every call of a method is the point."""


def _always(*_: object) -> bool:
    return True


POINTS: dict[str, tuple[str, ...]] = {
    **{
        place: tuple(f"{act} {when}" for act in acts for when in ("before", "after"))
        for place, acts in _SOURCE_ACTS.items()
    },
    **{
        place: tuple(f"{name} {when}" for name in methods for when in ("before", "after"))
        for place, methods in _METHODS.items()
    },
}
"""Where a daemon may be killed, by what it does there. `write middle` is half of one write to the source."""
POINTS["upload"] += ("write middle",)


class Killer:
    """Counts how often the daemon comes to *point*, and ends it the *nth* time."""

    def __init__(self, point: str, nth: int) -> None:
        if not any(point in points for points in POINTS.values()):
            raise ValueError(f"there is no point {point!r}")
        self.point = point
        self._left = nth

    def passes(self, point: str) -> None:
        if point == self.point:
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)

    def patch(self) -> None:
        """Put this killer around the methods of the product that points are named for."""
        for methods in _METHODS.values():
            for name, (owner, method) in methods.items():
                if self.point.rpartition(" ")[0] == name:
                    self._surround(owner, method, name)

    def _surround(self, owner: object, method: str, name: str) -> None:
        plain: Callable[..., Any] = getattr(owner, method)
        counts = _ONLY_WHEN.get(name, _always)

        @functools.wraps(plain)
        def surrounded(*arguments: Any, **named: Any) -> Any:
            if not counts(*arguments):
                return plain(*arguments, **named)
            self.passes(f"{name} before")
            result = plain(*arguments, **named)
            self.passes(f"{name} after")
            return result

        @functools.wraps(plain)
        async def surrounded_async(*arguments: Any, **named: Any) -> Any:
            self.passes(f"{name} before")
            result = await plain(*arguments, **named)
            self.passes(f"{name} after")
            return result

        wrapper = surrounded_async if inspect.iscoroutinefunction(plain) else surrounded
        # A class method comes out of the class bound already.
        setattr(owner, method, staticmethod(wrapper) if inspect.ismethod(plain) else wrapper)


class CrashingSource(DelegatingSource):
    """Passes the killer before, after and (writes) in the middle of each act."""

    def __init__(self, inner: Source, killer: Killer) -> None:
        super().__init__(_HalvingSource(inner, killer) if killer.point == "write middle" else inner)
        self._killer = killer

    async def around(self, act: str, path: str, call: Callable[[], Awaitable[T]]) -> T:
        self._killer.passes(f"{act} before")
        result = await call()
        self._killer.passes(f"{act} after")
        return result


class _HalvingSource(DelegatingSource):
    def __init__(self, inner: Source, killer: Killer) -> None:
        super().__init__(inner)
        self._killer = killer

    async def create(self, path: str, *, mode: int = 0o644, replace: bool = False) -> SourceWriter:
        return _HalvingWriter(await self.inner.create(path, mode=mode, replace=replace), self._killer)

    async def append(self, path: str) -> SourceWriter:
        return _HalvingWriter(await self.inner.append(path), self._killer)


class _HalvingWriter(SourceWriter):
    def __init__(self, inner: SourceWriter, killer: Killer) -> None:
        self._inner = inner
        self._killer = killer

    async def write(self, data: memoryview) -> None:
        await self._inner.write(data[: len(data) // 2])
        self._killer.passes("write middle")
        await self._inner.write(data[len(data) // 2 :])

    async def sync(self) -> None:
        await self._inner.sync()

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def abort(self) -> None:
        await self._inner.abort()


def _config(request: Mapping[str, Any]) -> Config:
    place: settings.Values = {
        ("mount", "source"): request["source"],
        ("mount", "mountpoint"): Path(request["mountpoint"]),
    }
    return settings.build_config(settings.parse_options(request["options"]), place)


def _be_daemon(request: Mapping[str, Any], lifetime_s: int) -> None:
    die_with_parent()
    signal.alarm(lifetime_s)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(request["environment"])
    config = _config(request)
    logs.configure(config.mount.log_format, config.mount.log_level)
    os.chdir("/")
    killer = Killer(*request["kill"]) if request["kill"] else None
    if killer is not None:
        killer.patch()

    def opener(uri: str, source_config: SourceConfig, limiter: trio.CapacityLimiter) -> Source:
        source = open_source(uri, source_config, limiter)
        return source if killer is None else CrashingSource(source, killer)

    trio.run(daemon.serve, config, TerminalReporter(), opener)


def _commands() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    """Fork a daemon for each command until the input ends; those that still live then are killed with this process."""
    gc.freeze()
    for command in _commands():
        if "start" in command:
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    _be_daemon(command["start"], command["lifetime_s"])
                    code = 0
                except BaseException:  # noqa: BLE001 - whoever started it reads the log
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            answer = {"pid": pid}
        else:
            answer = {"status": os.waitstatus_to_exitcode(os.waitpid(command["wait"], 0)[1])}
        print(json.dumps(answer), flush=True)  # noqa: T201 - its caller reads it


if __name__ == "__main__":
    main()
