"""Listing a directory in batches: hdfs-native asks the NameNode for 1000 names at a time, and so does each batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import hdfs_native
import trio

from turbofs.errors import NotADirectoryTurboError
from turbofs.model import ROOT, DirectoryEntry
from turbofs.source.base import Listing
from turbofs.source.hdfs.connection import Connection
from turbofs.source.hdfs.errors import translated
from turbofs.source.hdfs.native import entry_of

BATCH = 1000
"""dfs.ls.limit's default: a batch costs the NameNode one answer."""


class HdfsListing(Listing):
    """See `Listing`. Entries come sorted by name, as the NameNode keeps them."""

    def __init__(self, connection: Connection, where: str, shown: str) -> None:
        self._hdfs = connection
        self._where = where
        self._shown = shown
        self._prefix_length = 1 if where == ROOT else len(where) + 1
        self._statuses: Iterator[hdfs_native.FileStatus] | None = None
        self._first: list[DirectoryEntry] | None = None

    async def begin(self) -> None:
        """Fetch the first batch, so that what is wrong with the directory shows when it is opened.

        Raises NotFoundError, NotADirectoryTurboError, AccessDeniedError.
        """
        self._statuses = self._hdfs.native.list(self._where)
        self._first = await self._fetch()

    async def next_batch(self) -> Sequence[DirectoryEntry]:
        if self._first is not None:
            batch, self._first = self._first, None
            await trio.lowlevel.checkpoint()
            return batch
        return await self._fetch()

    async def aclose(self) -> None:
        self._statuses = self._first = None
        await trio.lowlevel.checkpoint()

    async def _fetch(self) -> list[DirectoryEntry]:
        statuses = self._statuses
        if statuses is None:
            return []
        return await self._hdfs.ask(f"list {self._shown}", lambda: self._take(statuses))

    def _take(self, statuses: Iterator[hdfs_native.FileStatus]) -> list[DirectoryEntry]:
        with translated("list", self._shown):
            taken = list(islice(statuses, BATCH))
        if len(taken) == 1 and taken[0].path == self._where:
            raise NotADirectoryTurboError(f"{self._shown} is a file")  # HDFS lists a file as itself
        start = self._prefix_length
        return [entry_of(status, start) for status in taken]
