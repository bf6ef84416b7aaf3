"""The source's space, kept in memory so that `df` answers at once whatever the source does."""

from __future__ import annotations

import trio

from turbofs.errors import NotSupportedError, TurboError
from turbofs.model import Space
from turbofs.source.base import Source


class SpaceKeeper:
    """`latest` is what the source said last, at most a refresh interval ago while it answers."""

    def __init__(self, source: Source, refresh_s: float) -> None:
        self._source = source
        self._refresh_s = refresh_s
        self.latest = Space()

    async def keep_fresh(self) -> None:
        """Run until cancelled, or until the source says that it never tells."""
        while True:
            try:
                self.latest = await self._source.space()
            except NotSupportedError:
                return
            except TurboError:
                pass  # the figure of before is still the best there is
            await trio.sleep(self._refresh_s)
