"""Tells the kernel to drop the pages of files that changed underneath.

A notification may wait in the kernel for pages that reads of the same file hold locked, and those reads wait for this
daemon: so it is sent in a thread, never on the event loop, and a read never waits for one. Who asks for attributes may.
"""

from __future__ import annotations

from collections import OrderedDict

import pyfuse3
import structlog
import trio

_log = structlog.get_logger(__name__)


_AT_ONCE = 8
"""Threads that may be stuck behind reads that wait for the source."""
_PATIENCE_S = 1.0


class Notifier:
    """A queue of inode numbers, where the same number waits once; and notifications that are waited for."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(_AT_ONCE)
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._more = trio.Event()

    def drop_pages_soon(self, number: int) -> None:
        """Ask for the pages of inode *number* to be dropped. Never waits."""
        self._waiting[number] = None
        self._more.set()

    async def drop_pages(self, number: int) -> bool:
        """Have the pages of inode *number* dropped before this returns True; False where that takes long."""
        with trio.move_on_after(_PATIENCE_S):
            await self._drop(number)
            return True
        return False

    async def run(self) -> None:
        """Send notifications until cancelled."""
        while True:
            await self._more.wait()
            self._more = trio.Event()
            while self._waiting:
                number, _ = self._waiting.popitem(last=False)
                await self._drop(number)

    async def _drop(self, number: int) -> None:
        try:
            await trio.to_thread.run_sync(
                pyfuse3.invalidate_inode, pyfuse3.InodeT(number), abandon_on_cancel=True, limiter=self._limiter
            )
        except OSError as error:
            _log.debug("pages not dropped", inode=number, error=str(error))  # forgotten meanwhile: none are kept
