"""Tells the kernel to drop the pages of files that changed underneath, in a task of its own.

A notification may wait in the kernel for pages that requests of the same file hold locked, and those requests wait for this
daemon: so it is never sent from a request's own task, nor on the event loop, but one at a time in a thread.
"""

from __future__ import annotations

from collections import OrderedDict

import pyfuse3
import structlog
import trio

_log = structlog.get_logger(__name__)


class Notifier:
    """A queue of inode numbers; the same number waits once."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._more = trio.Event()

    def drop_pages_soon(self, number: int) -> None:
        """Ask for the pages of inode *number* to be dropped. Never waits."""
        self._waiting[number] = None
        self._more.set()

    async def run(self) -> None:
        """Send notifications until cancelled."""
        while True:
            await self._more.wait()
            self._more = trio.Event()
            while self._waiting:
                number, _ = self._waiting.popitem(last=False)
                try:
                    await trio.to_thread.run_sync(
                        pyfuse3.invalidate_inode, pyfuse3.InodeT(number), abandon_on_cancel=True
                    )
                except OSError as error:
                    _log.debug(
                        "pages not dropped", inode=number, error=str(error)
                    )  # forgotten meanwhile: none are kept
