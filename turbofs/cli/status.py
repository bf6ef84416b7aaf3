"""`turbofs status [DIR]`: the mounts of this machine, or all about one of them, over the control socket."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from turbofs.cli import mount_table
from turbofs.cli.output import JsonOption, clock, emit
from turbofs.cli.writing_lines import writing_lines
from turbofs.errors import DeadlineExceededError, NotReachableError, ProtocolError, TurboError
from turbofs.units import format_size
from turbofs.wire import runtime_dir
from turbofs.wire.control_client import ControlClient

_PING_LIMIT_S = 2.0
_STATUS_LIMIT_S = 10.0
_TIMES = frozenset({"started", "when", "parked_at"})


def command(
    directory: Annotated[
        str | None, typer.Argument(metavar="[DIR]", show_default=False, help="A mount point, or a path in a mount.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the mounts of this machine, or show one; with a path below the mount point, one file."""
    if directory is None:
        mounts = list_mounts()
        emit({"mounts": mounts}, lambda: _mounts_text(mounts))
        return
    place = mount_table.locate(directory)
    document = mount_status(place.mountpoint, None if place.path == "/" else place.path)
    emit(document, lambda: "\n".join(_lines(document)))


def mount_status(mountpoint: str, path: str | None = None) -> dict[str, object]:
    """The status document of a mount, or of the file *path* in it. Raises NotReachableError, DeadlineExceededError."""
    with ControlClient(mount_table.control_socket(mountpoint)) as client:
        arguments: dict[str, object] = {} if path is None else {"path": path}
        document = client.call("status", arguments, timeout_s=_STATUS_LIMIT_S)
    if not isinstance(document, dict):
        raise ProtocolError("the daemon's status is not a map")
    return document


def list_mounts() -> list[dict[str, object]]:
    """Every mount that is mounted here or left a record: `state` is alive, dead, hanging or unknown."""
    mounted = mount_table.turbofs_mounts()
    found: dict[str, dict[str, object]] = {}
    for folder, record in runtime_dir.list_records():
        state = _state(folder / runtime_dir.SOCKET_NAME)
        found.setdefault(
            record.mountpoint,
            {
                "mountpoint": record.mountpoint,
                "source": record.source,
                "pid": record.pid,
                "started": record.started,
                "mounted": record.mountpoint in mounted,
                "state": state,
            },
        )
    for mountpoint, entry in mounted.items():
        # Without a record it is another user's, or its daemon is long gone.
        plain = {"mountpoint": mountpoint, "source": entry.source, "pid": None, "started": None, "mounted": True}
        found.setdefault(mountpoint, {**plain, "state": "unknown"})
    return [found[mountpoint] for mountpoint in sorted(found)]


def _state(socket: Path) -> str:
    try:
        with ControlClient(socket, timeout_s=_PING_LIMIT_S) as client:
            client.call("ping", timeout_s=_PING_LIMIT_S)
    except NotReachableError:
        return "dead"
    except DeadlineExceededError:
        return "hanging"
    except TurboError:
        return "unknown"
    return "alive"


def _mounts_text(mounts: list[dict[str, object]]) -> str:
    if not mounts:
        return "no mounts"
    rows = [("MOUNT POINT", "SOURCE", "DAEMON", "STATE", "UP")]
    for mount in mounts:
        started = mount["started"]
        up = _duration(time.time() - started) if isinstance(started, float) and mount["state"] == "alive" else "-"
        rows.append((str(mount["mountpoint"]), str(mount["source"]), str(mount["pid"] or "-"), str(mount["state"]), up))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _lines(document: Mapping[str, object], indent: str = "") -> Iterator[str]:
    """*document* as indented lines; whatever a later daemon adds is shown as well."""
    for key, value in document.items():
        if key == "writing" and isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from writing_lines(value, indent + "  ")
        elif isinstance(value, dict):
            if value:
                yield f"{indent}{key}:"
                yield from _lines(value, indent + "  ")
        elif isinstance(value, list):
            if value:
                yield f"{indent}{key}:"
                for item in value:
                    yield f"{indent}  {_item(item)}"
        elif value is not None:
            yield f"{indent}{key}: {_shown(key, value)}"


def _item(item: object) -> str:
    if isinstance(item, dict):
        return ", ".join(f"{key} {_shown(key, value)}" for key, value in item.items() if value is not None)
    return str(item)


def _shown(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and (key.endswith("_bytes") or key == "size"):
        return format_size(value)
    if isinstance(value, int | float) and key.endswith("_s"):
        return _duration(value)
    if key in _TIMES and isinstance(value, float):
        return clock(value)
    return str(value)


def _duration(seconds: float) -> str:
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if minutes < 120 else f"{hours:.0f} h" if hours < 48 else f"{days:.0f} d"
