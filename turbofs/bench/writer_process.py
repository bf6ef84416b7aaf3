"""A process that does nothing but write, as a trainer would: every contestant is written by the same one.

It lives as long as the run, so that Python, hdfs-native and its connections are warm for all contestants alike.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Concatenate, ParamSpec, Self, TypeVar

from turbofs.bench.payload import Payload
from turbofs.testing.children import die_with_parent

P = ParamSpec("P")
T = TypeVar("T")

_shared: list[memoryview] = []  # in the writer process: the shared bytes, once they are mapped


class WriterProcess:
    """Runs functions of `turbofs.bench.writers` in a process of its own, over the bytes of *payload*."""

    def __init__(self, payload: Payload) -> None:
        # spawn: a fork would inherit hdfs-native's client, which does not work there
        self._pool = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(payload.path, os.getpid())
        )

    def call(self, function: Callable[Concatenate[memoryview, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What *function* returns in the writer process, or raises there; its first argument are the shared bytes."""
        return self._pool.submit(_call, function, args, kwargs).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def _begin(path: str, parent: int) -> None:
    die_with_parent()
    if os.getppid() != parent:
        raise RuntimeError("the run ended while its writer started")
    descriptor = os.open(path, os.O_RDWR)
    memory = mmap.mmap(descriptor, 0)
    os.close(descriptor)
    data = memoryview(memory)
    for start in range(0, len(data), mmap.PAGESIZE):
        data[start]  # this process's page tables, off the clock
    _shared.append(data)


def _call(function: Callable[..., T], args: tuple[object, ...], kwargs: dict[str, object]) -> T:
    return function(_shared[0], *args, **kwargs)
