"""A figure of a daemon, sampled while something else happens."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def sampled(measure: Callable[[], int], interval_s: float = 0.02) -> Iterator[list[int]]:
    """Samples of *measure*, taken in a thread for as long as the context lasts."""
    samples: list[int] = []
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(interval_s):
            samples.append(measure())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()
