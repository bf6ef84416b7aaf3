"""Writing one file to HDFS, front to back.

What hdfs-native leaves to its user: a first block whose pipeline contains a DataNode that just died (the file is made
again), and a file whose completion failed and whose lease would otherwise last an hour (it is recovered).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import hdfs_native
import trio

from turbofs.errors import SourceUnavailableError, TurboError
from turbofs.model import FileVersion
from turbofs.source.base import SourceWriter
from turbofs.source.hdfs.connection import Connection
from turbofs.source.hdfs.errors import translated
from turbofs.source.hdfs.native import INODES

_PIECE_BYTES = 4 << 20
"""How much is handed to hdfs-native at once: each piece has its own time-out."""
_PIPELINE_ATTEMPTS, _PIPELINE_PAUSE_S = 8, 0.05
"""A pipeline is chosen at random: with one dead DataNode of three and one replica, eight fail once in 6,000 times."""
_REPLAY_BYTES = 1 << 20
"""hdfs-native connects a pipeline when the first packets (64 KiB) are full: until then writes seem to succeed."""
_CLOSE_TIMEOUT_S = 30.0
"""hdfs-native asks five times over 15 s whether enough replicas have been reported."""
_RECOVERY_S = 30.0
_RECOVERY_POLL_S = 0.25

Reopen = Callable[[], hdfs_native.FileWriter]


class HdfsWriter(SourceWriter):
    """See `SourceWriter`. Made by `HdfsSource.create` and `append`.

    *base_bytes* is the file's size before; *file_id* is empty where WebHDFS could not tell it. *new* files are removed
    by `abort`, others keep what was written. *reopen* (blocking) makes the native writer again after its first block
    found no pipeline. *publish* gives the file its final name, at the first sync or else once it is complete.
    """

    def __init__(
        self,
        connection: Connection,
        native: hdfs_native.FileWriter,
        where: str,
        shown: str,
        *,
        new: bool,
        file_id: str = "",
        base_bytes: int = 0,
        reopen: Reopen,
        publish: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._hdfs = connection
        self._native: hdfs_native.FileWriter | None = native
        self._where = where
        self._shown = shown
        self._new = new
        self._file_id = file_id
        self._base_bytes = base_bytes
        self._written_bytes = 0
        self._reopen = reopen
        self._replay: list[bytes] | None = []
        self._publish = publish
        self._broken = False

    async def write(self, data: memoryview) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            piece = bytes(data[start : start + _PIECE_BYTES])
            await self._stubbornly("write to", partial(_write, piece))
            self._written_bytes += len(piece)
            if self._replay is not None:
                self._replay.append(piece)
                if self._written_bytes > _REPLAY_BYTES:
                    self._replay = None  # the pipeline took more than it buffers: it stands

    async def sync(self) -> None:
        if self._written_bytes:  # else there is no pipeline to sync yet; the name is durable since it was made
            await self._stubbornly("sync", lambda writer: writer.hsync())
            self._replay = None
        await self._published()

    async def aclose(self) -> None:
        try:
            # Once closed, closing again is nothing: so a failed publication can be tried again.
            await self._stubbornly("close", lambda writer: writer.close(), timeout_s=_CLOSE_TIMEOUT_S)
        except SourceUnavailableError:
            if not await self._completed_by_recovery():
                raise
            self._broken = False
        await self._published()
        self._native = None

    async def abort(self) -> None:
        writer, self._native = self._native, None
        if writer is None:
            return
        with trio.CancelScope(shield=True), trio.move_on_after(_RECOVERY_S):
            try:
                if self._new:
                    await self._remove()
                elif self._broken or not await self._closed(writer):
                    await self._recovered()
            except TurboError:
                # The NameNode is out of reach: the lease, no longer renewed, runs out there by itself.
                return

    # --- steps

    async def _stubbornly(
        self, act: str, function: Callable[[hdfs_native.FileWriter], object], timeout_s: float | None = None
    ) -> None:
        """Do *function* with the native writer; while the first pipeline may be what failed, with further ones too."""
        pause_s = _PIPELINE_PAUSE_S
        for attempt in range(1, _PIPELINE_ATTEMPTS + 1):
            try:
                if attempt > 1:
                    await self._begin_again()
                await self._step(act, partial(function, self._usable()), timeout_s)
                return
            except SourceUnavailableError:
                # Once bytes have left, they are no longer here to be written again: that is the caller's to do.
                if self._replay is None or attempt == _PIPELINE_ATTEMPTS:
                    raise
            await trio.sleep(pause_s)
            pause_s *= 2

    async def _begin_again(self) -> None:
        if self._new:
            await self._remove()
        elif not await self._recovered() or await self._size() != self._base_bytes:
            self._replay = None
            raise SourceUnavailableError(f"cannot tell what an append left in {self._shown}")
        writer = await self._hdfs.ask(f"open {self._shown} for writing again", self._reopen)
        self._native, self._broken = writer, False
        if self._new and self._file_id:
            self._file_id = await file_id_of(self._hdfs, self._where, self._shown)
        for piece in self._replay or ():
            await self._step("write to", partial(writer.write, piece))

    async def _step(self, act: str, function: Callable[[], object], timeout_s: float | None = None) -> None:
        def work() -> None:
            with translated(act, self._shown):
                function()

        done = False
        try:
            await self._hdfs.calls.run(f"{act} {self._shown}", work, timeout_s=timeout_s)
            done = True
        finally:
            self._broken = self._broken or not done  # also when cancelled: nobody knows how much was taken

    def _usable(self) -> hdfs_native.FileWriter:
        if self._native is None or self._broken:
            raise TurboError(f"the writer of {self._shown} failed or was closed", advice="abort it and write anew")
        return self._native

    async def _published(self) -> None:
        if self._publish is None:
            await trio.lowlevel.checkpoint()
            return
        await self._publish()
        self._publish = None

    async def _closed(self, writer: hdfs_native.FileWriter) -> bool:
        try:
            await self._step("close", writer.close, timeout_s=_CLOSE_TIMEOUT_S)
        except TurboError:
            return False
        return True

    async def _completed_by_recovery(self) -> bool:
        """After a close without an answer: whether the file is complete, with all that was written."""
        try:
            if not await self._recovered():
                return False
            return await self._size() == self._base_bytes + self._written_bytes
        except TurboError:
            return False

    async def _size(self) -> int:
        version: FileVersion = await self._hdfs.ask(
            f"look at {self._shown}", lambda: self._hdfs.native.version_of(self._name, self._shown, self._file_id)
        )
        return version.size

    async def _recovered(self) -> bool:
        """Make the NameNode close the file and end its lease; False if that takes too long."""

        def recover() -> bool:
            with translated("recover the lease of", self._shown):
                return self._hdfs.native.client().recover_lease(self._name)

        deadline = trio.current_time() + _RECOVERY_S
        while trio.current_time() < deadline:
            if await self._hdfs.ask(f"recover the lease of {self._shown}", recover):
                return True
            await trio.sleep(_RECOVERY_POLL_S)  # the DataNodes agree on the last block's length meanwhile
        return False

    async def _remove(self) -> None:
        def delete() -> None:
            with translated("delete", self._shown):
                self._hdfs.native.client().delete(self._name)

        try:
            await self._hdfs.ask(f"delete {self._shown}", delete)
        except TurboError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise

    @property
    def _name(self) -> str:
        """The file's own name: by its id, which nobody else's file can take over."""
        return INODES + self._file_id if self._file_id else self._where


def _write(piece: bytes, writer: hdfs_native.FileWriter) -> None:
    writer.write(piece)


async def file_id_of(connection: Connection, where: str, shown: str) -> str:
    """The id of the file at *where*; empty where WebHDFS cannot tell."""
    try:
        return (await connection.web.status(where, shown)).version.file_id
    except TurboError:
        return ""
