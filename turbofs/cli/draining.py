"""What a mount still has to write while it ends: its daemon tells over the control socket, and leaves a file behind.

Nothing here fails because the daemon does not answer: it may have ended, and whether it did is somebody else's question.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from turbofs.cli.progress import Show
from turbofs.errors import TurboError
from turbofs.units import format_size
from turbofs.wire.control_client import ControlClient

_LOOK_LIMIT_S = 2.0
_UNWRITTEN = frozenset({"open", "staged", "waiting"})
_CLOCK_SLACK_S = 2.0  # file systems stamp with a coarser clock than ours
_SHOWN = 8


class Draining:
    """Follows the mount whose control socket is *socket* to its end (None: one that has no daemon to ask)."""

    def __init__(self, socket: Path | None) -> None:
        self._socket = socket
        self._began = time.time()
        self._left_file: Path | None = None
        self._most_bytes = 0
        self.files = 0
        """Files that have not reached the source, when the daemon was last asked."""
        self.bytes = 0
        """What of them has not, in bytes."""

    def look(self) -> None:
        """Ask the daemon, for at most 2 s."""
        if self._socket is None:
            return
        try:
            with ControlClient(self._socket, timeout_s=_LOOK_LIMIT_S) as client:
                document = client.call("status", timeout_s=_LOOK_LIMIT_S)
        except TurboError:
            return
        writing = document.get("writing") if isinstance(document, dict) else None
        if not isinstance(writing, dict):
            return
        pending = [file for file in writing.get("files", ()) if file.get("state") in _UNWRITTEN]
        self.files = len(pending)
        self.bytes = sum(max(0, _number(file, "size") - _number(file, "uploaded_bytes")) for file in pending)
        self._most_bytes = max(self._most_bytes, self.bytes)
        if isinstance(writing.get("left_file"), str):
            self._left_file = Path(writing["left_file"])

    def tell(self, show: Show) -> None:
        """Show how far it is, where there is anything to write."""
        if self.files:
            show(self._most_bytes - self.bytes, self._most_bytes, f"{_files(self.files)} left", f"writing: {self}")

    def __str__(self) -> str:
        return f"{_files(self.files)} left, {format_size(self.bytes)}"

    def left(self) -> dict[str, object] | None:
        """What the daemon could not write before it ended, as it wrote it down: `files`, `bytes`, `where`, `paths`."""
        if self._left_file is None:
            return None
        try:
            if self._left_file.stat().st_mtime < self._began - _CLOCK_SLACK_S:
                return None  # of an earlier end
            document = json.loads(self._left_file.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return {"files": None, "bytes": None, "where": str(self._left_file), "paths": [], "error": str(error)}
        return document if isinstance(document, dict) and document.get("files") else None


def left_text(left: Mapping[str, object], mountpoint: str) -> str:
    """What a person must know about files that did not reach the source."""
    if left.get("error"):
        return f"what did not reach the source is listed in {left['where']}, which cannot be read: {left['error']}"
    paths = left.get("paths")
    shown = [str(path) for path in paths[:_SHOWN]] if isinstance(paths, list) else []
    more = _number(left, "files") - len(shown)
    names = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
    return (
        f"NOT WRITTEN to the source: {_files(_number(left, 'files'))} ({format_size(_number(left, 'bytes'))}), kept in"
        f" {left.get('where')}; the next `turbofs mount` on {mountpoint} writes what is there: {names}"
    )


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _number(document: Mapping[str, object], key: str) -> int:
    value = document.get(key)
    return int(value) if isinstance(value, int | float) else 0
