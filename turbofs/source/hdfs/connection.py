"""What a source shares with its files, listings and writers: the clients, and how they are called."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import hdfs_native

from turbofs.source.hdfs.calls import BlockingCalls, StalledError
from turbofs.source.hdfs.errors import translated
from turbofs.source.hdfs.native import ByteReader, NativeClient
from turbofs.source.hdfs.web import WebHdfs

T = TypeVar("T")

_STALLS_REMEMBERED_S = 60.0


class StallMemory:
    """Whether DataNodes hung lately: then the next ones are given up sooner."""

    def __init__(self, timeout_s: float) -> None:
        self.socket_s = timeout_s / 5
        """How long hdfs-native waits for one DataNode before it takes the next replica by itself."""
        self._patient_s = timeout_s / 2
        self._brisk_s = min(timeout_s / 10, 1.0)
        self._last_s = float("-inf")

    @property
    def limit_s(self) -> float:
        """How long a read may deliver nothing."""
        return self._brisk_s if time.monotonic() - self._last_s < _STALLS_REMEMBERED_S else self._patient_s

    def note(self) -> None:
        self._last_s = time.monotonic()


@dataclass(frozen=True)
class Connection:
    """The clients of one source."""

    native: NativeClient
    web: WebHdfs
    calls: BlockingCalls
    stalls: StallMemory
    open_reader: Callable[[str, str], ByteReader]
    """Opens a reader for (path, path as shown), by whichever client carries the bytes. Blocks."""

    async def ask(
        self,
        what: str,
        function: Callable[[], T],
        *,
        timeout_s: float | None = None,
        dispose: Callable[[T], object] | None = None,
    ) -> T:
        """Run *function*, which asks the NameNode, in a thread; see `BlockingCalls.run`.

        A NameNode that does not answer gets a new connection, to the other one first where there are two.
        """
        client = self.native.current
        try:
            return await self.calls.run(what, function, timeout_s=timeout_s, dispose=dispose)
        except StalledError:
            self.native.renew(client)
            raise

    async def call(self, act: str, shown: str, function: Callable[[hdfs_native.Client], T]) -> T:
        """What *function* gets from hdfs-native's client, as `ask`; *act* and *shown* are for messages."""
        return await self.ask(f"{act} {shown}", lambda: self.native_call(act, shown, function))

    def native_call(self, act: str, shown: str, function: Callable[[hdfs_native.Client], T]) -> T:
        """The same, blocking."""
        client = self.native.client()
        with translated(act, shown):
            return function(client)
