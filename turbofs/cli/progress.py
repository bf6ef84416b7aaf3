"""How long work shows that it goes on: a bar on a terminal, a line now and then elsewhere; on stderr, never with --json."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from turbofs.cli.output import json_mode

if TYPE_CHECKING:
    from rich.progress import Progress

_LINE_EVERY_S = 5.0


class Show(Protocol):
    """Tells how far the work is: bytes done of all bytes, a few words for the bar, a sentence for a line."""

    def __call__(self, done_bytes: int, total_bytes: int, words: str, line: str) -> None: ...


def progress() -> AbstractContextManager[Show]:
    """Show progress as long as the context lasts."""
    return _Bar() if sys.stderr.isatty() and not json_mode() else _Lines()


class _Bar(AbstractContextManager[Show]):
    """A progress bar, for a terminal; appears with the first figures."""

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def __enter__(self) -> Show:
        return self._show

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _show(self, done_bytes: int, total_bytes: int, words: str, line: str) -> None:
        if self._bar is None:
            self._bar = self._start()
            self._task = self._bar.add_task(words)
        self._bar.update(self._task, total=total_bytes, completed=done_bytes, description=words)

    def _start(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
        )
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        bar.start()
        return bar


class _Lines(AbstractContextManager[Show]):
    """A line now and then, for logs and pipes."""

    def __enter__(self) -> Show:
        self._next = time.monotonic() + _LINE_EVERY_S
        return self._show

    def __exit__(self, *_: object) -> None:
        """Nothing to put back."""

    def _show(self, done_bytes: int, total_bytes: int, words: str, line: str) -> None:
        if time.monotonic() >= self._next:
            self._next += _LINE_EVERY_S
            print(line, file=sys.stderr, flush=True)
