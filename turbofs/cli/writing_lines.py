"""The `writing` part of a mount's status, for people: what is staged, what waits for what, what is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from turbofs.cli.output import clock
from turbofs.units import format_size

_MOST_LINES = 20
"""Of each list; a job that saves thousands of files must not scroll away the rest. --json shows all of them."""

Part = Mapping[str, object]


def writing_lines(writing: Part, indent: str = "") -> Iterator[str]:
    """The lines for one `writing` document; what a later daemon adds to it is shown by its name."""
    staging = writing.get("staging")
    if isinstance(staging, dict):
        yield f"{indent}{_staging(staging)}"
    for key, line in _LISTS.items():
        found = writing.get(key)
        if isinstance(found, list) and found:
            yield f"{indent}{key}:"
            yield from (f"{indent}  {line(part)}" for part in found[:_MOST_LINES])
            if len(found) > _MOST_LINES:
                yield f"{indent}  and {len(found) - _MOST_LINES} more (--json shows all)"
    if writing.get("conflicts"):
        yield f"{indent}conflicts: {writing['conflicts']} (`turbofs conflicts ls` lists them)"
    if writing.get("draining"):
        yield f"{indent}draining: the mount ends once these are written"
    for key, value in writing.items():
        if key not in {"staging", "conflicts", "draining", "left_file", *_LISTS} and value not in (None, [], {}):
            yield f"{indent}{key}: {value}"


def _staging(staging: Part) -> str:
    used, limit = _size(staging.get("used_bytes")), _size(staging.get("limit_bytes"))
    kind = "" if staging.get("on_tmpfs") else ", not on tmpfs: slower"
    return f"staging: {used} of {limit} in {staging.get('directory')}{kind}"


def _file(file: Part) -> str:
    uploaded = file.get("uploaded_bytes")
    sent = f", {_size(uploaded)} of it sent" if uploaded else ""
    error = f": {file['error']}" if file.get("error") else ""
    return f"{file.get('state')}  {file.get('path')} ({_size(file.get('size'))}{sent}){error}"


def _act(act: Part) -> str:
    to = f" to {act['to']}" if act.get("to") else ""
    held = act.get("waits_for")
    names = ", ".join(map(str, held)) if isinstance(held, list) else held
    return f"{act.get('act')} {act.get('path')}{to}" + (f", after {names}" if held else "")


def _broken(broken: Part) -> str:
    when = broken.get("when")
    since = f" ({clock(when)})" if isinstance(when, int | float) else ""
    return f"{broken.get('path')}{since}: {broken.get('error')}"


_LISTS: dict[str, Callable[[Part], str]] = {"files": _file, "acts": _act, "broken": _broken}


def _size(value: object) -> str:
    return format_size(value) if isinstance(value, int | float) else "?"
