"""`turbofs conflicts ls|show|publish|drop`: what could not be published because the target had changed meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated

import typer

from turbofs.cli import mount_table
from turbofs.cli.output import JsonOption, clock, emit, json_mode, note
from turbofs.errors import InvalidRequestError, ProtocolError
from turbofs.units import format_size, parse_duration
from turbofs.wire.control_client import ControlClient

_LIMIT_S = 60.0

app = typer.Typer(
    help="What could not be published: list it, show it, publish it after all, or drop it.", no_args_is_help=True
)

_Directory = Annotated[str, typer.Argument(metavar="DIR", show_default=False, help="The mount, or a path in it.")]
_Id = Annotated[int, typer.Argument(metavar="ID", show_default=False, min=1, help="As `conflicts ls` shows it.")]


@app.command("ls")
def ls(directory: _Directory, json: JsonOption = False) -> None:
    """List what was parked, oldest first."""
    found = _call(_place(directory), {"act": "ls"}).get("conflicts")
    if not isinstance(found, list):
        raise ProtocolError("the daemon gave no list of conflicts")
    emit({"conflicts": found}, lambda: "\n".join(_line(conflict) for conflict in found) or "no conflicts")


@app.command("show")
def show(directory: _Directory, conflict: _Id, json: JsonOption = False) -> None:
    """Show all about one, and where its bytes can be read."""
    place = _place(directory)
    found = _call(place, {"act": "show", "id": conflict})
    if isinstance(found.get("hidden"), str):
        found["read_at"] = f"{place.rstrip('/')}{found['hidden']}"
    emit(found, lambda: "\n".join(f"{key}: {_shown(key, value)}" for key, value in found.items() if value is not None))


@app.command("publish")
def publish(
    directory: _Directory,
    conflict: _Id,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="PATH", help="A path in the same mount; without: where it was to go."),
    ] = None,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="Exit with 4 after this long.")] = "10m",
    json: JsonOption = False,
) -> None:
    """Publish the parked bytes now, replacing what has that name; says what it replaced."""
    limit_s, place = parse_duration(timeout), _place(directory)
    arguments: dict[str, object] = {"act": "publish", "id": conflict}
    if to is not None:
        target = mount_table.locate(to)
        if target.mountpoint != place:
            raise InvalidRequestError(f"--to {to} is not in the mount {place}", advice="publish it there, then copy it")
        arguments["to"] = target.path
    done = _call(place, arguments, limit_s)
    emit(done, lambda: _published(conflict, done))


@app.command("drop")
def drop(
    directory: _Directory,
    conflict: _Id,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: JsonOption = False,
) -> None:
    """Delete the parked bytes for good."""
    place = _place(directory)
    if not yes:
        found = _call(place, {"act": "show", "id": conflict})
        if json_mode() or not sys.stdin.isatty():
            raise InvalidRequestError(
                f"this deletes the only copy of {found.get('path')} as it was saved",
                advice="say --yes to go ahead; `turbofs conflicts show` tells where it can be read before",
            )
        if not typer.confirm(f"{_line(found)}\nDelete these bytes for good?", err=True):
            note("nothing was deleted")
            raise typer.Exit(1)
    _call(place, {"act": "drop", "id": conflict})
    emit({"id": conflict, "dropped": True}, lambda: f"conflict {conflict} is dropped")


def _place(directory: str) -> str:
    return mount_table.locate(directory).mountpoint


def _call(mountpoint: str, arguments: dict[str, object], limit_s: float = _LIMIT_S) -> dict[str, object]:
    with ControlClient(mount_table.control_socket(mountpoint)) as client:
        result = client.call("conflicts", arguments, timeout_s=limit_s)
    if not isinstance(result, dict):
        raise ProtocolError("the daemon's answer about conflicts is not a map")
    return result


def _line(conflict: Mapping[str, object]) -> str:
    parts = (_shown("size", conflict.get("size")), f"parked {_shown('parked_at', conflict.get('parked_at'))}")
    return f"{conflict.get('id')}  {conflict.get('path')} ({', '.join(parts)}): {conflict.get('reason')}"


def _published(conflict: int, done: Mapping[str, object]) -> str:
    replaced = done.get("replaced")
    if not isinstance(replaced, dict):
        what = "there was nothing of that name"
    else:
        what = f"it replaced {_shown('size', replaced.get('size'))}, changed {_shown('mtime', replaced.get('mtime'))}"
    return f"conflict {conflict} is published as {done.get('path')} ({_shown('size', done.get('size'))}); {what}"


def _shown(key: str, value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if key == "size":
            return format_size(value)
        if key in {"parked_at", "mtime"}:
            return clock(value)
    return str(value)
