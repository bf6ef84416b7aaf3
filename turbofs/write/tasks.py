"""Tasks that the end of a mount waits for: publications and deferred acts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from turbofs.background import Background
from turbofs.errors import TurboError


class Outcome:
    """How a publication ended, for who waits for it."""

    def __init__(self) -> None:
        self.ended = trio.Event()
        self.error: TurboError | None = TurboError("it was not published: the mount ended meanwhile")


class Tasks:
    """What is running now. Tasks that are cancelled leave journal and staging as a crash would."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._scopes: set[trio.CancelScope] = set()
        self._idle = trio.Event()

    def start_soon(self, task: Callable[..., Awaitable[None]], *arguments: object) -> None:
        scope = trio.CancelScope()
        self._scopes.add(scope)

        async def run() -> None:
            try:
                with scope:
                    await task(*arguments)
            finally:
                self._scopes.discard(scope)
                if not self._scopes:
                    idle, self._idle = self._idle, trio.Event()
                    idle.set()

        self._background.start_soon(run)

    async def wait_idle(self) -> None:
        """Return when none is running."""
        while self._scopes:
            await self._idle.wait()

    async def stop(self) -> None:
        """Cancel all of them, and return when they have ended."""
        for scope in self._scopes:
            scope.cancel()
        await self.wait_idle()
