"""Opening files of HDFS for writing, and who has one open."""

from __future__ import annotations

from functools import partial
from weakref import WeakSet

import hdfs_native

from turbofs.errors import (
    AlreadyExistsError,
    BusyError,
    IsADirectoryTurboError,
    NotFoundError,
    SourceUnavailableError,
)
from turbofs.model import FileKind, join, split
from turbofs.source.hdfs.connection import Connection
from turbofs.source.hdfs.errors import translated
from turbofs.source.hdfs.writer import HdfsWriter
from turbofs.source.orphans import temporary_name


class Writers:
    """The writers of one source. Paths are absolute on HDFS; *shown* is the one inside the source, for messages."""

    def __init__(self, connection: Connection) -> None:
        self._hdfs = connection
        self._open: WeakSet[HdfsWriter] = WeakSet()

    async def create(self, where: str, shown: str, mode: int) -> HdfsWriter:
        """A new file of that name, empty. Raises AlreadyExistsError."""
        return await self._create(where, shown, mode, publish_as=None)

    async def create_to_replace(self, where: str, shown: str, mode: int) -> HdfsWriter:
        """A new file under a temporary name beside *where*, whose name it takes at its first sync or else at close.

        Raises BusyError, here or then, where some client has that one open for writing.
        """
        await self._require_closed(where, shown)
        return await self._create(temporary_beside(where), shown, mode, publish_as=where)

    async def append(self, where: str, shown: str) -> HdfsWriter:
        before = await self._hdfs.ask(f"stat {shown}", lambda: self._hdfs.native.stat(where, shown))
        if before.kind is not FileKind.FILE:
            raise IsADirectoryTurboError(f"{shown} is a directory")

        def reopen(now: str) -> hdfs_native.FileWriter:
            return self._hdfs.native_call("append to", shown, lambda client: client.append(now))

        native = await self._hdfs.ask(f"append to {shown}", partial(reopen, where), dispose=_close)
        return self._opened(HdfsWriter(self._hdfs, native, where, shown, base_bytes=before.size, reopen=reopen))

    async def being_written(self, where: str, shown: str) -> bool:
        """See `HdfsSource.being_written`."""
        try:
            return await self._hdfs.web.under_construction(where, shown)
        except SourceUnavailableError:
            try:
                await self._hdfs.call("look at", shown, lambda client: client.append(where).close())
            except BusyError:
                return True
            return False

    def note_rename(self, old: str, new: str) -> None:
        """*old*, perhaps a directory, is called *new* from now on: whoever writes there has to know."""
        for writer in list(self._open):
            writer.note_rename(old, new)

    async def _create(self, where: str, shown: str, mode: int, *, publish_as: str | None) -> HdfsWriter:
        options = hdfs_native.WriteOptions(permission=mode & 0o1777, overwrite=False, create_parent=False)

        def reopen(now: str) -> hdfs_native.FileWriter:
            return self._hdfs.native_call("create", shown, lambda client: client.create(now, options))

        def dispose(_: hdfs_native.FileWriter) -> None:
            self._hdfs.native_call("delete", shown, lambda client: client.delete(where, False))

        async def publish(now: str, final: str) -> None:
            await self._require_closed(final, shown)
            await self._hdfs.call("replace", shown, lambda client: client.rename(now, final, True))

        try:
            native = await self._hdfs.ask(f"create {shown}", partial(reopen, where), dispose=dispose)
        except BusyError as error:
            raise AlreadyExistsError(f"{shown} exists and is being written") from error
        writer = HdfsWriter(
            self._hdfs, native, where, shown, new=True, reopen=reopen, publish=publish, publish_as=publish_as
        )
        return self._opened(writer)

    def _opened(self, writer: HdfsWriter) -> HdfsWriter:
        self._open.add(writer)
        return writer

    async def _require_closed(self, where: str, shown: str) -> None:
        """Raises BusyError where some client has the file open for writing, IsADirectoryTurboError for a directory."""
        try:
            if await self.being_written(where, shown):
                raise BusyError(f"{shown} is being written by another client", advice="wait until it is closed")
        except NotFoundError:
            return


def temporary_beside(where: str) -> str:
    """A name that nobody else has, in the same directory."""
    return join(split(where)[0], temporary_name())


def _close(writer: hdfs_native.FileWriter) -> None:
    """An append that nobody waits for any more: the file is closed as it was."""
    with translated("close", "an abandoned writer"):
        writer.close()
