"""Waiting for a condition instead of for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_POLL_S = 0.01


def eventually(condition: Callable[[], T], what: str, *, limit_s: float = 30.0) -> T:
    """The first true value of *condition*. Raises AssertionError, which names *what*, after *limit_s* seconds."""
    deadline = time.monotonic() + limit_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {limit_s:g} s")
        time.sleep(_POLL_S)
