"""Writing one file to HDFS, front to back.

What hdfs-native leaves to its user: a first block whose pipeline contains a DataNode that just died (the file is made
again), and a file whose completion failed and whose lease would otherwise last an hour (it is recovered).

A file may be renamed while it is written: HDFS knows it by its id, and what is done by path here follows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import hdfs_native
import trio

from turbofs.errors import NotFoundError, SourceUnavailableError, StaleFileError, TurboError
from turbofs.model import FileVersion
from turbofs.source.base import SourceWriter
from turbofs.source.hdfs.calls import StalledError
from turbofs.source.hdfs.connection import Connection
from turbofs.source.hdfs.errors import translated
from turbofs.source.hdfs.native import INODES

_PIECE_BYTES = 4 << 20
"""How much is handed to hdfs-native at once: each piece has its own time-out."""
_HELD_BYTES = 64 << 10
"""Up to so many bytes (a packet of HDFS) are kept here until more come or they are synced: a thread less for each."""
_PIPELINE_ATTEMPTS, _PIPELINE_PAUSE_S = 8, 0.05
"""A pipeline is chosen at random: with one dead DataNode of three and one replica, eight fail once in 6,000 times."""
_REPLAY_BYTES = 1 << 20
"""hdfs-native connects a pipeline when the first packets (64 KiB) are full: until then writes seem to succeed."""
_CLOSE_TIMEOUT_S = 30.0
"""hdfs-native asks five times over 15 s whether enough replicas have been reported."""
_RECOVERY_S = 30.0
_RECOVERY_POLL_S = 0.25

Reopen = Callable[[str], hdfs_native.FileWriter]
Publish = Callable[[str, str], Awaitable[None]]


class HdfsWriter(SourceWriter):
    """See `SourceWriter`. Made by `Writers`.

    *base_bytes* is the file's size before. *new* files are removed by `abort` unless they got another name meanwhile;
    others keep what was written. *reopen* (blocking) makes the native writer for a path again after its first block
    found no pipeline. *publish* renames (path now, *publish_as*) at the first sync or else once the file is complete.
    """

    def __init__(
        self,
        connection: Connection,
        native: hdfs_native.FileWriter,
        where: str,
        shown: str,
        *,
        new: bool = False,
        base_bytes: int = 0,
        reopen: Reopen,
        publish: Publish | None = None,
        publish_as: str | None = None,
    ) -> None:
        self._hdfs = connection
        self._native: hdfs_native.FileWriter | None = native
        self._where = where
        self._shown = shown
        self._new = new
        self._file_id = ""
        self._id_asked = False
        self._base_bytes = base_bytes
        self._held = bytearray()
        self._sent_bytes = self._synced_bytes = 0
        self._reopen = reopen
        self._replay: list[bytes] | None = []
        self._publish = publish
        self._publish_as = publish_as
        self._broken = self._closing = self._removing = False

    async def write(self, data: memoryview) -> None:
        self._usable()
        if len(self._held) + len(data) <= _HELD_BYTES:
            self._held += data
            await trio.lowlevel.checkpoint_if_cancelled()  # a turn of the event loop is a tenth of a log's fsync
            return
        try:
            if self._held:
                await self._stubbornly("write to", _nothing, bytes(self._held))
            for start in range(0, len(data), _PIECE_BYTES):
                await self._stubbornly("write to", _nothing, _owned(data[start : start + _PIECE_BYTES]))
        except BaseException:
            self._replay = None  # without this piece there is nothing right to begin again with
            raise

    async def sync(self) -> None:
        self._usable()
        if self._sent_bytes + len(self._held) > self._synced_bytes:  # else nothing is new; a name is durable at once
            await self._stubbornly("sync", lambda writer: writer.hsync(), bytes(self._held), again=True)
            self._synced_bytes = self._sent_bytes
            self._replay = None
        await self._ask_id()
        await self._published()
        await trio.lowlevel.checkpoint_if_cancelled()

    async def aclose(self) -> None:
        try:
            if self._closing and self._broken and self._replay is None:
                raise SourceUnavailableError(f"it is not known whether {self._shown} was completed")
            self._usable()
            self._closing = True
            # Once closed, closing again is nothing: so a failed publication can be tried again.
            await self._stubbornly("close", lambda writer: writer.close(), bytes(self._held), _CLOSE_TIMEOUT_S)
        except SourceUnavailableError:
            if self._replay is not None or not await self._completed_by_recovery():
                raise
            self._broken = False
        await self._published()
        self._native = None

    async def abort(self) -> None:
        writer, self._native = self._native, None
        if writer is None:
            return
        self._held.clear()
        with trio.CancelScope(shield=True), trio.move_on_after(_RECOVERY_S):
            try:
                if self._new and await self._has_its_first_name() and await self._remove():
                    return
                if self._broken or not await self._closed(writer):
                    await self._recovered()
            except TurboError:
                # The NameNode is out of reach: the lease, no longer renewed, runs out there by itself.
                return

    def note_rename(self, old: str, new: str) -> None:
        """*old*, this file or a directory above it, is called *new* from now on."""
        if self._publish_as is not None:
            self._publish_as = _renamed(self._publish_as, old, new)
        if self._where == old:
            self._new = False  # whoever named it wants it to stay
            self._replay = None  # and it must not appear again under its old name
        self._where = _renamed(self._where, old, new)

    # --- steps

    async def _stubbornly(
        self,
        act: str,
        function: Callable[[hdfs_native.FileWriter], object],
        data: bytes,
        timeout_s: float | None = None,
        again: bool = False,
    ) -> None:
        """Write *data* and do *function*; while the first pipeline may be what failed, with further ones too.

        *again*: a *function* that failed may be done again with the same writer.
        """
        taken = False

        def step(writer: hdfs_native.FileWriter) -> None:
            nonlocal taken
            if data:
                writer.write(data)
            taken = True
            function(writer)

        pause_s = _PIPELINE_PAUSE_S
        for attempt in range(1, _PIPELINE_ATTEMPTS + 1):
            try:
                if self._broken and self._replay is not None:
                    await self._begin_again()
                await self._step(act, partial(step, self._usable()), timeout_s)
                break
            except SourceUnavailableError as error:
                # Once bytes have left, they are no longer here to be written again: that is the caller's to do.
                if self._replay is None and again and taken and not isinstance(error, StalledError):
                    self._broken = False  # a NameNode that restarts takes the length the next time
                    self._note_sent(data)
                if self._replay is None or attempt == _PIPELINE_ATTEMPTS:
                    raise
            await trio.sleep(pause_s)
            pause_s *= 2
        self._note_sent(data)

    def _note_sent(self, data: bytes) -> None:
        if not data:
            return
        self._held.clear()  # what was held is what was sent, or was sent before
        self._sent_bytes += len(data)
        if self._replay is not None:
            self._replay.append(data)
            if self._sent_bytes > _REPLAY_BYTES:
                self._replay = None  # the pipeline took more than it buffers: it stands

    async def _begin_again(self) -> None:
        if self._new:
            tried_before, self._removing = self._removing, True
            if not await self._remove() and not tried_before:  # somebody else did, or it has another name
                self._replay = None
                raise StaleFileError(f"{self._shown} was renamed or deleted while it was written")
        elif not await self._recovered() or await self._size() != self._base_bytes:
            self._replay = None
            raise SourceUnavailableError(f"cannot tell what an append left in {self._shown}")
        reopen = partial(self._reopen, self._where)
        self._native = await self._hdfs.ask(f"open {self._shown} for writing again", reopen)
        self._broken = self._removing = False
        for piece in self._replay or ():
            await self._step("write to", partial(self._native.write, piece))

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
        if self._native is None or (self._broken and self._replay is None):
            raise TurboError(f"the writer of {self._shown} failed or was closed", advice="abort it and write anew")
        return self._native

    async def _published(self) -> None:
        final = self._publish_as
        if final is None or self._publish is None:
            return
        await self._ask_id()
        try:
            await self._publish(self._where, final)
        except NotFoundError:
            # The answer to an earlier attempt may have been lost.
            if not self._file_id or await self._id_of(final) != self._file_id:
                raise
        self._where, self._publish_as, self._new = final, None, False

    async def _has_its_first_name(self) -> bool:
        """Whether the file still has the name under which it was created, as far as that can be told.

        One that was never synced has, unless this source renamed it: nobody names what cannot be read yet.
        """
        if not self._file_id:
            return True
        return await self._id_of(self._where) == self._file_id

    async def _ask_id(self) -> None:
        """Learn the file's id before it may get another name: a file that is complete at once needs none."""
        if not self._id_asked:
            self._file_id = await self._id_of(self._where)
            self._id_asked = True

    async def _id_of(self, where: str) -> str:
        """The id of the file at *where*; empty where there is none, or WebHDFS cannot tell."""
        try:
            return (await self._hdfs.web.status(where, self._shown)).version.file_id
        except TurboError:
            return ""

    async def _closed(self, writer: hdfs_native.FileWriter) -> bool:
        try:
            await self._step("close", writer.close, timeout_s=_CLOSE_TIMEOUT_S)
        except TurboError:
            return False
        return True

    async def _completed_by_recovery(self) -> bool:
        """After a close without an answer: whether the file is complete; False where that cannot be told now.

        Raises TurboError where the file is closed, and lacks some of what was written.
        """
        try:
            if not await self._recovered():
                return False
            size_bytes = await self._size()
        except TurboError:
            return False
        written_bytes = self._base_bytes + self._sent_bytes + len(self._held)
        if size_bytes != written_bytes:
            raise TurboError(f"{self._shown} has only {size_bytes} of the {written_bytes} bytes that were written")
        return True

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

    async def _remove(self) -> bool:
        """Delete the file; False where there is none any more."""
        try:
            return await self._hdfs.call("delete", self._shown, lambda client: client.delete(self._name))
        except NotFoundError:
            return False

    @property
    def _name(self) -> str:
        """The file's own name: by its id, which nobody else's file can take over."""
        return INODES + self._file_id if self._file_id else self._where


def _owned(data: memoryview) -> bytes:
    """*data* as bytes that nobody changes: a thread that was left behind may still read them. hdfs-native takes no view."""
    whole = data.obj
    return whole if type(whole) is bytes and len(whole) == len(data) else bytes(data)


def _nothing(_: hdfs_native.FileWriter) -> None:
    pass


def _renamed(path: str, old: str, new: str) -> str:
    """*path* after *old*, which is *path* or may be above it, was renamed to *new*."""
    return new + path[len(old) :] if path == old or path.startswith(old.rstrip("/") + "/") else path
