"""`turbofs prefetch PATH…`: fetch now, in the background of the mount; with `--wait` until it is there."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer

from turbofs.cli import mount_table
from turbofs.cli.output import JsonOption, emit
from turbofs.cli.progress import Show, progress
from turbofs.errors import ProtocolError, TurboError
from turbofs.units import format_size, parse_range
from turbofs.wire.control_client import ControlClient

Job = dict[str, object]
_STEP_S = 0.5  # how long one `wait` message waits: the pace of the progress shown
_START_LIMIT_S = 60.0


def command(
    paths: Annotated[list[str], typer.Argument(metavar="PATH…", show_default=False, help="Files of mounts.")],
    wait: Annotated[bool, typer.Option("--wait", help="Return when everything is fetched.")] = False,
    ranges: Annotated[
        list[str] | None,
        typer.Option("--range", metavar="OFF+LEN", help="Only these bytes of each file; repeatable."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Fetch files, or ranges of them, into the mount's memory."""
    wanted = [parse_range(text) for text in ranges or []]
    places = [mount_table.locate(path) for path in paths]
    with ExitStack() as stack:
        clients = {
            mountpoint: stack.enter_context(ControlClient(mount_table.control_socket(mountpoint)))
            for mountpoint in {place.mountpoint for place in places}
        }
        started: list[tuple[ControlClient, Job]] = []
        for place in places:
            arguments: dict[str, object] = {"path": place.path}
            if wanted:
                arguments["ranges"] = [[part.start, part.stop] for part in wanted]
            client = clients[place.mountpoint]
            started.append((client, _job(client.call("prefetch", arguments, timeout_s=_START_LIMIT_S))))
        jobs = _follow(started) if wait else [job for _, job in started]
    emit({"jobs": jobs}, lambda: "\n".join(_line(job) for job in jobs))
    failed = [job for job in jobs if job["state"] in {"failed", "partial", "cancelled"}]
    if failed:
        raise TurboError(
            "; ".join(f"{job['path']}: {job['state']}: {job['error'] or 'no reason given'}" for job in failed),
            advice="what was fetched stays cached; `turbofs status` shows the memory in use",
        )


def _follow(started: list[tuple[ControlClient, Job]]) -> list[Job]:
    """Wait for all jobs, showing how they get on; Ctrl-C cancels those that still run."""
    jobs = [job for _, job in started]
    try:
        with progress() as show:
            for number, (client, _) in enumerate(started):
                while jobs[number]["state"] == "running":
                    arguments = {"job": jobs[number]["job"], "timeout_s": _STEP_S}
                    jobs[number] = _job(client.call("wait", arguments, timeout_s=_STEP_S + 10.0))
                    _show(show, jobs)
    except KeyboardInterrupt:
        for (client, _), job in zip(started, jobs, strict=True):
            if job["state"] == "running":
                client.call("cancel", {"job": job["job"]})
        raise
    return jobs


def _show(show: Show, jobs: list[Job]) -> None:
    done, wanted = _total(jobs, "done_bytes"), _total(jobs, "wanted_bytes")
    show(done, wanted, "fetching", f"fetched {format_size(done)} of {format_size(wanted)}")


def _job(result: object) -> Job:
    if not isinstance(result, dict) or "job" not in result or "state" not in result:
        raise ProtocolError(f"not a job: {result!r}")
    return result


def _line(job: Job) -> str:
    done, wanted = _total([job], "done_bytes"), _total([job], "wanted_bytes")
    return f"{job['path']}: {job['state']}, {format_size(done)} of {format_size(wanted)}"


def _total(jobs: list[Job], key: str) -> int:
    return sum(value for job in jobs if isinstance(value := job.get(key), int))
