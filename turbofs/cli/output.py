"""How commands speak: one JSON document with `--json`, else text; results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Annotated

import typer

_mode = {"json": False}


def _choose_json(chosen: bool) -> bool:
    _mode["json"] = chosen
    return chosen


JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document.", callback=_choose_json, is_eager=True)
]
"""The `--json` flag of every command; `json_mode` tells the rest of the command line that it was given."""


def json_mode() -> bool:
    return _mode["json"]


def emit(document: object, text: Callable[[], str | None]) -> None:
    """Print *document* as JSON where that was asked for, else what *text* gives."""
    if json_mode():
        print(to_json(document))
        return
    shown = text()
    if shown:
        print(shown)


def to_json(document: object) -> str:
    """One line; bytes and paths as text, names that are not UTF-8 with surrogate escapes as JSON escapes them."""
    return json.dumps(document, default=_plain, sort_keys=False)


def note(message: str) -> None:
    """A line for people, which no program should parse."""
    print(f"turbofs: {message}", file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """A time since the epoch as a person reads it, in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _plain(value: object) -> object:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
