"""One version of one HDFS file, open for reading.

The file is named by its inode (`/.reserved/.inodes/ID`) where the id is known, so that renames do not matter. Each
reader that is opened is checked against the version; a read goes on from the byte where one way of reading broke:
the open reader, a reader with fresh locations, then WebHDFS, which can be told which DataNodes to leave out.
"""

from __future__ import annotations

import time

import trio

from turbofs.errors import NotFoundError, ShortReadError, SourceUnavailableError, StaleFileError, TurboError
from turbofs.model import Change, FileVersion
from turbofs.source.base import SourceFile
from turbofs.source.checks import require_range
from turbofs.source.hdfs.calls import Sink, StalledError, StallWatch
from turbofs.source.hdfs.connection import Connection
from turbofs.source.hdfs.native import INODES, ByteReader
from turbofs.source.hdfs.readers import Lease, ReaderPool

_SMALL_BYTES = 256 << 10
"""Up to here one `read_range` is quickest; beyond it page faults cost more than 64 KiB pieces do."""
_RECHECK_S = 1.0
"""How old a reader may be that ends too early, before a new one is asked whether the block is finished by now."""
_TRUST_S = 0.1
"""How long the file is believed to be unchanged after a look at it.

One that is cut in place and appended to keeps the names of its blocks, and the DataNodes give the new bytes to a reader
of the old version. That takes a recovery of the last block and a new pipeline, so hardly less than this; and ten looks a
second for each file that is being read are no load for a NameNode.
"""
_CHECK_TIMEOUT_S, _BLIND_S = 2.0, 5.0
"""How long that look may hold a read up, and how long there is none again after one without an answer."""
_WEB_ATTEMPTS = 6
"""DataNodes that are tried one after another through WebHDFS, each excluded once it failed."""


class HdfsFile(SourceFile):
    """See `SourceFile`. *where* is the file's absolute path on HDFS, *shown* the one inside the source."""

    def __init__(self, connection: Connection, where: str, shown: str, version: FileVersion) -> None:
        self.version = version
        self._hdfs = connection
        self._where = INODES + version.file_id if version.file_id else where
        self._shown = shown
        self._pool = ReaderPool()
        self._looked_s = float("-inf")
        """When the last look began that found the file to be this version; all bytes that were read before it are right."""

    async def read_into(self, offset: int, buffer: memoryview) -> int:
        wanted = require_range(offset, len(buffer), self.version.size)
        if not wanted:
            await trio.lowlevel.checkpoint()
            return 0
        target = buffer[:wanted]
        done = 0
        if wanted <= _SMALL_BYTES:
            done = await self._read_small(offset, target)  # the common case, with as little around it as possible
        if done < wanted:
            await self._read_stubbornly(offset + done, target[done:])
        return wanted

    async def refresh(self) -> FileVersion:
        what = f"look at {self._shown} again"
        try:
            newer = await self._hdfs.ask(what, self._version_now)
        except NotFoundError as error:
            raise self._stale() from error
        if self.version.compare(newer) is Change.REPLACED:
            raise self._changed(newer)  # cut short in place: this file stays the version that was opened
        if newer != self.version:
            self._pool.clear()
            self.version = newer
        return newer

    async def aclose(self) -> None:
        self._pool.clear()
        await trio.lowlevel.checkpoint()

    # --- the ways of reading

    async def _read_small(self, offset: int, target: memoryview) -> int:
        """One call on an open reader; how many bytes it gave. A failure gives none: others try next."""
        lease = self._pool.pick(len(target), large=False)
        if lease is None:
            return 0
        reader, length, begun_s = lease.reader, len(target), time.monotonic()
        try:
            if reader.length <= offset:
                return 0
            data = await self._hdfs.calls.run(
                f"read {self._shown}", lambda: reader.read(offset, length), timeout_s=self._hdfs.stalls.limit_s
            )
        except SourceUnavailableError as error:
            self._failed(lease, error)
            return 0
        finally:
            self._pool.give_back(lease)
        self._note_delay(lease, time.monotonic() - begun_s)
        await self._recheck()
        target[: len(data)] = data
        return len(data)

    async def _read_stubbornly(self, offset: int, target: memoryview) -> None:
        """Fill *target*, by one way after another. Raises the last way's error, or StaleFileError."""
        done = 0
        failure: TurboError | None = None
        for fresh in (False, True):
            # A NameNode that does not answer ends the attempt here: it would not answer WebHDFS either.
            lease = await self._lease(offset + done, len(target) - done, fresh=fresh)
            sink = Sink(target[done:])
            try:
                await self._stream(lease, offset + done, len(target) - done, sink)
            except SourceUnavailableError as error:
                failure = error
                self._failed(lease, error)
            finally:
                self._pool.give_back(lease)
                done += sink.close()
            if done == len(target):
                await self._recheck()
                return
            if failure is None:
                break  # the reader ends here: the rest is in a block that is still being written
        try:
            await self._read_web(offset + done, target[done:])
        except SourceUnavailableError as error:
            raise failure or error from error

    async def _lease(self, offset: int, length: int, *, fresh: bool) -> Lease:
        lease = None if fresh else self._pool.pick(length, large=length > _SMALL_BYTES)
        if lease is not None and lease.reader.length < offset + length and lease.age_s > _RECHECK_S:
            self._pool.give_back(lease)
            self._pool.discard(lease)  # perhaps the block is finished by now
            lease = None
        return lease or self._pool.add(await self._open_reader(), length)

    async def _stream(self, lease: Lease, offset: int, length: int, sink: Sink) -> None:
        """Feed *sink* what the reader has of the range; fewer bytes where the reader ends early."""
        reader, watch = lease.reader, StallWatch()

        def transfer() -> None:
            for piece in reader.pieces(offset, length):
                if not sink.feed(piece):
                    return
                watch.touch()

        await self._hdfs.calls.run(f"read {self._shown}", transfer, timeout_s=self._hdfs.stalls.limit_s, watch=watch)
        self._note_delay(lease, watch.longest_s)

    def _note_delay(self, lease: Lease, silent_s: float) -> None:
        """A DataNode may have been silent, and hdfs-native have gone on to the next: not again with this reader."""
        stalls = self._hdfs.stalls
        if silent_s > stalls.socket_s:
            self._pool.discard(lease)
            stalls.note()

    def _failed(self, lease: Lease, error: SourceUnavailableError) -> None:
        self._pool.discard(lease)
        if isinstance(error, StalledError):
            self._hdfs.stalls.note()

    async def _read_web(self, offset: int, target: memoryview) -> None:
        """Fill *target* through WebHDFS, which also shows blocks that are still being written."""
        avoid: set[str] = set()
        done = 0
        failure: TurboError | None = None
        for _ in range(_WEB_ATTEMPTS):
            try:
                done += await self._hdfs.web.read_into(
                    self._where, self._shown, offset + done, target[done:], avoid, self._hdfs.stalls.limit_s
                )
            except NotFoundError as error:
                raise self._stale() from error
            except (SourceUnavailableError, ShortReadError) as error:
                failure = error
                if self._hdfs.web.down_reason:
                    break
            if done == len(target) or isinstance(failure, ShortReadError):
                await self._require_version()
            if done == len(target):
                return
        raise failure or ShortReadError(f"{self._shown} ended at byte {offset + done} of {self.version.size}")

    # --- the version

    async def _open_reader(self) -> ByteReader:
        """A reader with the locations of now, that has been checked to be of this version."""

        def work() -> tuple[ByteReader, FileVersion]:
            # In this order: a change between the two calls shows in the second.
            return self._hdfs.open_reader(self._where, self._shown), self._version_now()

        begun_s = time.monotonic()
        try:
            reader, now = await self._hdfs.ask(f"open {self._shown}", work)
        except NotFoundError as error:
            raise self._stale() from error
        self._require_same(now)
        self._looked_s = max(self._looked_s, begun_s)
        return reader

    async def _recheck(self) -> None:
        """Make sure, after bytes arrived and before they are given, that the file was still this version just now."""
        if time.monotonic() - self._looked_s < _TRUST_S:
            return
        try:
            await self._require_version(_CHECK_TIMEOUT_S)
        except SourceUnavailableError:
            # A NameNode that is down changes no file: what is open can be read on, without such a wait at each read.
            self._looked_s = time.monotonic() + _BLIND_S
        except StaleFileError:
            self._pool.clear()
            raise

    async def _require_version(self, timeout_s: float | None = None) -> None:
        begun_s = time.monotonic()
        try:
            now = await self._hdfs.ask(f"look at {self._shown}", self._version_now, timeout_s=timeout_s)
        except NotFoundError as error:
            raise self._stale() from error
        self._require_same(now)
        self._looked_s = max(self._looked_s, begun_s)

    def _require_same(self, now: FileVersion) -> None:
        same = self.version.keeps_bytes(now) if self.version.strong else self._weakly_same(now)
        if not same:
            raise self._changed(now)

    def _weakly_same(self, now: FileVersion) -> bool:
        """Without an id, a name is believed to be the same file while its times agree and it did not shrink."""
        return now.mtime_ns == self.version.mtime_ns and now.size >= self.version.size

    def _version_now(self) -> FileVersion:
        return self._hdfs.native.version_of(self._where, self._shown, self.version.file_id)

    def _changed(self, now: FileVersion) -> StaleFileError:
        return StaleFileError(f"{self._shown} changed since it was opened: {self.version.token()} is now {now.token()}")

    def _stale(self) -> StaleFileError:
        return StaleFileError(f"{self._shown} was replaced or deleted since it was opened")
