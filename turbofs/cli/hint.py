"""`turbofs hint PATH KEY=VALUE…`: hints over the control socket, as `setfattr` gives them on the mount."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from turbofs.cli import mount_table
from turbofs.cli.output import JsonOption, emit
from turbofs.errors import InvalidRequestError
from turbofs.wire.control_client import ControlClient

PREFIX = "user.turbofs."


def command(
    path: Annotated[str, typer.Argument(metavar="PATH", show_default=False, help="A file or directory of a mount.")],
    hints: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE…", show_default=False, help="For example prefetch=all.")
    ],
    json: JsonOption = False,
) -> None:
    """Tell the mount what will be read: `turbofs hint /mnt/ckpt/model.safetensors prefetch=all`."""
    pairs = [parse_hint(text) for text in hints]
    place = mount_table.locate(path)
    with ControlClient(mount_table.control_socket(place.mountpoint)) as client:
        for name, value in pairs:
            client.call("hint", {"path": place.path, "name": name, "value": os.fsencode(value)}, timeout_s=60.0)
    document = {"path": path, "mountpoint": place.mountpoint, "hints": dict(pairs)}
    emit(document, lambda: "\n".join(f"{path}: {name}={value}" for name, value in pairs))


def parse_hint(text: str) -> tuple[str, str]:
    """The attribute's full name and the value in "prefetch=all" or "user.turbofs.prefetch=all"."""
    key, equals, value = text.partition("=")
    if not equals or not key or key == PREFIX:
        raise InvalidRequestError(f"{text!r} is not KEY=VALUE", advice="for example prefetch=all")
    return PREFIX + key.removeprefix(PREFIX), value
