"""Notices an event loop that stands still, which no deadline inside it can: the stacks of all threads go to the log."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time

import structlog
import trio

_log = structlog.get_logger(__name__)
_BEAT_S = 1.0


class Watchdog:
    """A thread that expects a beat of the loop every second and reports once for each time it waits *limit_s* in vain."""

    def __init__(self, limit_s: float = 15.0) -> None:
        self._limit_s = limit_s
        self._last_beat = time.monotonic()
        self._stop = threading.Event()
        self.stalls = 0

    async def run(self) -> None:
        """Beat until cancelled."""
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            while True:
                self._last_beat = time.monotonic()
                await trio.sleep(_BEAT_S)
        finally:
            self._stop.set()

    def _watch(self) -> None:
        reported = False
        while not self._stop.wait(_BEAT_S):
            late_s = time.monotonic() - self._last_beat
            if late_s < self._limit_s:
                reported = False
            elif not reported:
                reported = True
                self.stalls += 1
                _log.error("the event loop stands still", seconds=round(late_s, 1))
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
