"""`turbofs wait PATH…`: returns when the files have reached a level of durability."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from turbofs.cli import mount_table
from turbofs.cli.output import JsonOption, emit
from turbofs.errors import InvalidRequestError, ProtocolError
from turbofs.units import parse_duration
from turbofs.wire.control_client import ControlClient

LEVELS = ("staged", "replicated", "persisted")
_ANSWER_GRACE_S = 5.0  # the daemon keeps the time limit itself; this is for its answer


def command(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH…", show_default=False, help="Files or directories of mounts.")
    ],
    until: Annotated[str, typer.Option(metavar="LEVEL", help=f"One of {', '.join(LEVELS)}.")] = "persisted",
    timeout: Annotated[str, typer.Option(metavar="TIME", help="Exit with 4 after this long.")] = "10m",
    json: JsonOption = False,
) -> None:
    """Wait until what was written is safe: on this node, on several, or on the source; a directory with all under it.

    Fails with the reason where a file is broken: what was acknowledged did not reach the source.
    """
    if until not in LEVELS:
        raise InvalidRequestError(f"--until {until}: unknown level", advice=f"one of {', '.join(LEVELS)}")
    deadline = time.monotonic() + parse_duration(timeout)
    reached = []
    for path, place in [(path, mount_table.locate(path)) for path in paths]:
        left_s = max(0.0, deadline - time.monotonic())
        with ControlClient(mount_table.control_socket(place.mountpoint)) as client:
            arguments = {"path": place.path, "until": until, "timeout_s": left_s}
            result = client.call("wait", arguments, timeout_s=left_s + _ANSWER_GRACE_S)
        if not isinstance(result, dict):
            raise ProtocolError(f"{path}: the daemon gave no level")
        reached.append({"path": path, "durability": result.get("durability")})
    emit({"files": reached}, lambda: "\n".join(f"{file['path']}: {file['durability']}" for file in reached))
