"""Deletes what writers that died left in directories in which this mount writes: temporary files older than a day.

What this mount's own earlier life left is known from the journal, and deleted at the start. This is for other nodes that
never came back.
"""

from __future__ import annotations

import time
from collections import OrderedDict

import structlog

from turbofs.background import Background
from turbofs.errors import TurboError
from turbofs.source.base import Source
from turbofs.source.orphans import sweep

ORPHAN_S = 24 * 3600.0
"""A temporary file that nobody has written for a day: whoever waits that long for an outage to end, ends it by then."""
_DIRECTORIES_KEPT = 10_000
_log = structlog.get_logger(__name__)


class Sweeper:
    """Sweeps each directory once in the life of a mount, after the first file was published there."""

    def __init__(self, source: Source, background: Background) -> None:
        self._source = source
        self._background = background
        self._swept: OrderedDict[str, None] = OrderedDict()

    def published_in(self, directory: str) -> None:
        """A file was published in *directory* of the source."""
        if directory in self._swept:
            return
        self._swept[directory] = None
        if len(self._swept) > _DIRECTORIES_KEPT:
            self._swept.popitem(last=False)
        self._background.start_soon(self._sweep, directory)

    async def _sweep(self, directory: str) -> None:
        try:
            deleted = await sweep(self._source, directory, older_than_s=ORPHAN_S, now_ns=time.time_ns())
        except TurboError as error:
            _log.info("not swept", directory=directory, error=str(error))
            return
        if deleted:
            _log.info("temporary files of dead writers were deleted", directory=directory, count=len(deleted))
