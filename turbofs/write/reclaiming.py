"""Makes room in the staging area: lets go, here, of what uploads have taken of files that are still being written."""

from __future__ import annotations

from collections.abc import Collection

from turbofs.background import Background
from turbofs.write.flusher import Flusher
from turbofs.write.promises import Promises
from turbofs.write.staged_file import StagedFile
from turbofs.write.staging import StagingArea

_STREAMS = 4
"""Short files that are uploaded at a time to make room."""


class Reclaimer:
    """Runs when a writer has to wait for room. What is promised stays until it is published: a crash must find it."""

    def __init__(
        self,
        area: StagingArea,
        files: Collection[StagedFile],
        flusher: Flusher,
        promises: Promises,
        background: Background,
    ) -> None:
        self._area = area
        self._files = files
        self._flusher = flusher
        self._promises = promises
        self._background = background
        self._running = False
        area.wanted = self._start
        flusher.pressed = lambda: area.waiting > 0

    def _start(self) -> None:
        if not self._running:
            self._running = True
            self._background.start_soon(self._run)

    def _stream_largest(self) -> None:
        """Upload what is open and written front to back, however short it is: first where most is still only here."""
        for file in sorted(self._files, key=self._only_here, reverse=True)[:_STREAMS]:
            side = self._flusher.side(file)
            if file.streamable and side.streams and not side.streaming and not side.named and self._only_here(file):
                side.streaming = True
                self._background.start_soon(self._flusher.stream, file)

    def _only_here(self, file: StagedFile) -> int:
        return file.size - self._flusher.uploaded(file) if file.streamable else 0

    async def _run(self) -> None:
        """The largest first, until there is room for a while."""
        try:
            for file in sorted(self._files, key=self._flusher.uploaded, reverse=True):
                if self._area.used_bytes <= self._area.soft_bytes // 2:
                    return
                if file in self._files and self._promises.waiting(file) is None and self._flusher.uploaded(file):
                    await self._flusher.let_go(file)
            if self._area.waiting:
                self._stream_largest()
        finally:
            self._running = False
