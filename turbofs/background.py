"""Tasks of a mount that outlive the request which starts them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVarTuple

import structlog
import trio

_log = structlog.get_logger(__name__)
_Arguments = TypeVarTuple("_Arguments")


class Background:
    """Starts tasks in *nursery*. A defect in one ends that task, with its stack in the log, and not the mount."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery

    def start_soon(self, task: Callable[[*_Arguments], Awaitable[None]], *arguments: *_Arguments) -> None:
        self._nursery.start_soon(self._run, task, arguments, name=task)

    async def _run(self, task: Callable[[*_Arguments], Awaitable[None]], arguments: tuple[*_Arguments]) -> None:
        try:
            await task(*arguments)
        except Exception:  # noqa: BLE001  logged with its stack; the mount goes on
            _log.exception(
                "a background task failed on a defect of TurboFS", task=getattr(task, "__qualname__", str(task))
            )
