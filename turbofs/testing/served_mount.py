"""A mount's daemon over a source that misbehaves on command: `python -m turbofs.testing.served_mount SOURCE DIR -o …`.

It is the ordinary daemon (`turbofs.cli.daemon`) but for its source, which is wrapped: every act is counted, then held
or delayed, then made to fail, as the commands say. They come on standard input, one JSON object a line, with the name
of a method of `Director` and its arguments: {"call": "hold", "args": {"acts": ["read"]}}. Each is answered on standard
output by {"result": …} or {"error": …}. At the end of the input the daemon ends as on SIGTERM.

`turbofs.testing.mounts` is the other side.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio

from turbofs import errors, settings
from turbofs.cli import daemon, logs
from turbofs.cli.notify import TerminalReporter
from turbofs.config import Config, SourceConfig
from turbofs.errors import TurboError
from turbofs.model import AttributeChange
from turbofs.source.base import Source
from turbofs.source.memory import MemorySource
from turbofs.source.registry import open_source
from turbofs.testing.counting import CountingSource
from turbofs.testing.delegating import ACTS
from turbofs.testing.faulty import Fault, FaultySource
from turbofs.testing.slow import SlowSource

_WAIT_LIMIT_S = 60.0


class Director:
    """The wrapped source, and one method for each command."""

    _origin: Source
    _faulty: FaultySource
    _slow: SlowSource
    _counting: CountingSource

    def __init__(self, faults: Sequence[Fault]) -> None:
        """*faults* are there from the start, before the source is reached."""
        self._first_faults = faults

    def open_source(self, uri: str, config: SourceConfig, limiter: trio.CapacityLimiter) -> Source:
        self._origin = open_source(uri, config, limiter)
        self._faulty = FaultySource(self._origin, *self._first_faults)
        self._slow = SlowSource(self._faulty)
        self._counting = CountingSource(self._slow)
        return self._counting

    async def requests(self) -> list[tuple[str, str, int | None, int | None]]:
        """(act, path, start, stop) of all requests so far, the range for reads only."""
        return [
            (each.act, each.path, *((each.range.start, each.range.stop) if each.range else (None, None)))
            for each in self._counting.requests
        ]

    async def forget_requests(self) -> None:
        self._counting.reset()

    async def hold(self, acts: Sequence[str] = tuple(ACTS), after: int = 0) -> None:
        await self._slow.hold(acts, after=after)

    async def release(self, acts: Sequence[str] = tuple(ACTS)) -> None:
        await self._slow.release(acts)

    async def wait_held(self, count: int = 1) -> None:
        """Return once *count* acts hang."""
        with trio.fail_after(_WAIT_LIMIT_S):
            await self._slow.wait_held(count)

    async def delay(self, latency_s: float) -> None:
        self._slow.latency_s = latency_s

    async def fail(self, **arguments: Any) -> None:
        """As `fault` says, from now on."""
        self._faulty.faults.append(fault(**arguments))

    async def heal(self) -> None:
        self._faulty.faults.clear()

    async def put(self, path: str, text: str = "", owner: str | None = None, group: str | None = None) -> None:
        """Make a file in a `memory:` source, of that owner and group."""
        assert isinstance(self._origin, MemorySource)
        self._origin.put(path, text.encode())
        await self._origin.set_attributes(path, AttributeChange(owner=owner, group=group))


def fault(
    acts: Sequence[str],
    times: int | None = None,
    error: str = "SourceUnavailableError",
    path: str | None = None,
    short_reads: bool = False,
) -> Fault:
    """The next *times* of these acts (None: all) raise *error*, or come back short."""
    kind: type[TurboError] = getattr(errors, error)
    return Fault(
        acts=frozenset(acts),
        nth=None if times is None else frozenset(range(1, times + 1)),
        error=lambda: kind("made to fail"),
        path=path,
        short_reads=short_reads,
    )


async def serve(config: Config, director: Director) -> None:
    """Serve one mount and obey what comes on standard input."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_obey, director)
        await daemon.serve(config, TerminalReporter(), director.open_source)
        nursery.cancel_scope.cancel()


async def _obey(director: Director) -> None:
    buffered = bytearray()
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as commands:
        async for data in commands:
            buffered += data
            *lines, rest = buffered.split(b"\n")
            buffered = bytearray(rest)
            for line in lines:
                sys.stdout.write(json.dumps(await _answer(director, json.loads(line))) + "\n")
                sys.stdout.flush()
    signal.raise_signal(signal.SIGTERM)


async def _answer(director: Director, command: dict[str, Any]) -> dict[str, object]:
    try:
        method = getattr(director, command["call"])
        return {"result": await method(**command["args"])}
    except Exception as error:  # noqa: BLE001 - the test is told, whatever it is
        return {"error": f"{type(error).__name__}: {error}"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="served_mount")
    parser.add_argument("source")
    parser.add_argument("directory", type=Path)
    parser.add_argument("-o", dest="options", action="append", default=[])
    parser.add_argument("--fail", type=json.loads, action="append", default=[], help="arguments of `fail`, at once")
    chosen = parser.parse_args(arguments)
    place: settings.Values = {("mount", "source"): chosen.source, ("mount", "mountpoint"): chosen.directory}
    config = settings.build_config(settings.parse_options(chosen.options), place)
    logs.configure(config.mount.log_format, config.mount.log_level)
    os.chdir("/")
    trio.run(serve, config, Director([fault(**each) for each in chosen.fail]))


if __name__ == "__main__":
    main()
