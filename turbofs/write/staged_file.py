"""One file that is being written: its bytes in a sparse file of the staging area, its attributes, and what changed.

What a file opened for update had before is not copied ahead. `_missing` says which of its bytes are still only at its
*base* (the version on the source that was opened, or the temporary file of an upload whose local bytes were let go); they
are fetched when they are read, and by the upload as it passes them.

Writes run without a lock, so they may come while an upload reads: the upload notices by `changed_from`, and sends again
what was changed behind it. Where staging is on disk, system calls on bytes that are here run in threads; while one does,
nothing is let go. Bytes that were missing are written without waiting, so that none are fetched over them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from copy import copy
from functools import partial
from typing import TypeVar

import trio
from blake3 import blake3

from turbofs.errors import OutOfSpaceError, ShortReadError, StaleFileError, TurboError
from turbofs.model import AttributeChange, Attributes, Change, FileKind, FileVersion
from turbofs.source.base import SourceFile
from turbofs.write.local_bytes import Room, guarded, punch, write_all
from turbofs.write.ranges import RangeSet
from turbofs.write.staging import PAGE_BYTES, StagingArea

T = TypeVar("T")
OpenSource = Callable[[str], Awaitable[SourceFile]]

_INLINE_BYTES = 256 << 10
"""A read up to this size costs less than the way to a thread and back."""
_FILL_BYTES = 1 << 20
"""What is fetched at a time of a file opened for update: a reader of small pieces must not cost a request each."""


class StagedFile:
    """The local side of one file. `path` is its name now, which renames move; empty once it has none.

    `size`, `mode`, `owner`, `group` and the times are what the mount shows. `generation` counts changes of content,
    `attributes_generation` those of attributes; what the source has of them is for the flusher to know.
    """

    streamable = False
    """Written front to back so far, and not acknowledged early: it may be uploaded while it is written."""

    def __init__(
        self,
        area: StagingArea,
        number: int,
        path: str,
        *,
        mode: int,
        owner: str | int | None,
        group: str | int | None,
        descriptor: int,
        base: FileVersion | None = None,
    ) -> None:
        self._area = area
        self._fd = descriptor
        self.number = number
        self.path = path
        self.mode = mode
        self.owner = owner
        self.group = group
        self.mtime_ns = self.ctime_ns = self.atime_ns = time.time_ns()
        self.times_set = False
        """Whether somebody chose the times: then the source is given them."""
        self.base_path = ""
        """What the base is called on the source now."""
        self.base = base
        """The version of the target when the writing began; None where the name was free."""
        self.exclusive = False
        """Created with O_EXCL: it may never replace anything."""
        self.size = 0
        self.generation = 1
        self.attributes_generation = 0
        self.changed_from = 0
        """The lowest offset that changed since the upload last began anew or looked."""
        self.unlinked = False
        self.writers = 0
        """Handles open for writing."""
        self.closed_writers = 0
        """Those of them whose process has closed them: only their release is still to come."""
        self.users = 0
        """Handles of any kind, and whoever else needs the bytes."""
        self.error: TurboError | None = None
        """Why acknowledged bytes of this file were parked: what the next close and fsync are told."""
        self.acknowledged_size = 0
        """Bytes that were acknowledged early: what recovery goes by."""
        self.acknowledged_generation = 0
        self.failed_generation = 0
        """The content of which a close or fsync was told that it is not on the source: nobody expects it there."""
        self.let_go_bytes = 0
        """Bytes that only the temporary file on the source has, because staging was full."""
        self.lock = trio.Lock()
        """One upload, publication or change of attributes at a time."""
        self._missing = RangeSet()
        self._room = Room(area)
        self._local_calls = 0
        """System calls on the local file that run in threads now."""
        self._origin: SourceFile | None = None
        self._open_source: OpenSource | None = None
        self._expected: FileVersion | None = None
        self._epoch = 0
        """Moves when the missing bytes are elsewhere: what was fetched before may be older than what is there."""
        self._opening = trio.Lock()

    # --- made

    @classmethod
    def create(cls, area: StagingArea, number: int, path: str, **attributes: object) -> StagedFile:
        """A new file of no bytes. Raises OutOfSpaceError where the staging area's disk takes no more files."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = guarded(area, lambda: os.open(area.data_file(number), flags, 0o600))
        return cls(area, number, path, descriptor=fd, **attributes)  # type: ignore[arg-type]

    @classmethod
    def adopt(cls, area: StagingArea, number: int, path: str, size: int, **attributes: object) -> StagedFile:
        """What an earlier mount left, cut to the *size* that it acknowledged."""
        fd = guarded(area, lambda: os.open(area.data_file(number), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
        file = cls(area, number, path, descriptor=fd, **attributes)  # type: ignore[arg-type]
        guarded(area, lambda: os.ftruncate(fd, size))
        file.size = size
        guarded(area, lambda: file._room.adopt(fd))
        return file

    def update_of(self, version: FileVersion, path: str, open_source: OpenSource) -> None:
        """This file begins as what the source has: *version* of *path*, opened with *open_source* once bytes are needed."""
        self.base, self.base_path = version, path
        self.size = version.size
        self.generation = 0
        self.changed_from = version.size
        self._missing.add(0, version.size)
        self._expected, self._open_source = version, open_source

    # --- what it is now

    def attributes(self) -> Attributes:
        version = FileVersion(self.size, self.mtime_ns, f"staged:{self.number}", str(self.generation))
        return Attributes(
            kind=FileKind.FILE,
            version=version,
            mode=self.mode,
            owner=self.owner if self.owner is not None else os.geteuid(),
            group=self.group if self.group is not None else os.getegid(),
            atime_ns=self.atime_ns,
            ctime_ns=self.ctime_ns,
        )

    @property
    def whole(self) -> bool:
        """Whether every byte is here."""
        return not self._missing

    @property
    def staged_bytes(self) -> int:
        """The room that the bytes take."""
        return self._room.total_bytes

    def hand_over_room(self) -> int:
        """Let somebody else count the room that the bytes take: how many bytes that is."""
        return self._room.hand_over()

    def changed(self, offset: int) -> None:
        """The content changed from *offset* on."""
        self.generation += 1
        self.changed_from = min(self.changed_from, offset)
        self.mtime_ns = self.ctime_ns = time.time_ns()
        self.times_set = False

    def adopt_attributes(self, change: AttributeChange) -> None:
        """Show what *change* says."""
        self.mode = self.mode if change.mode is None else change.mode
        self.owner = self.owner if change.owner is None else change.owner
        self.group = self.group if change.group is None else change.group
        if change.mtime_ns is not None or change.atime_ns is not None:
            self.times_set = True
            self.mtime_ns = self.mtime_ns if change.mtime_ns is None else change.mtime_ns
            self.atime_ns = self.atime_ns if change.atime_ns is None else change.atime_ns
        self.ctime_ns = time.time_ns()

    # --- bytes

    async def write(self, offset: int, data: bytes) -> None:
        """Write all of *data*. Raises OutOfSpaceError, and what made the bytes be parked: those stay as they are."""
        stop = offset + len(data)
        self._require_unparked()
        await self._room.take(offset, stop)
        self._require_unparked()
        write = partial(guarded, self._area, partial(write_all, self._fd, data, offset))
        if self._area.on_tmpfs or self._missing.overlapping(offset, stop):
            write()
            self._missing.remove(offset, stop)
        else:
            self.changed(min(offset, self.size))  # an upload may read, and be complete, before this is
            try:
                await self._in_thread(write)
            except OutOfSpaceError:
                self.changed(min(offset, self.size))  # some of it may have been written
                raise
        self.changed(min(offset, self.size))
        self.size = max(self.size, stop)

    async def read(self, offset: int, length: int) -> bytes:
        """Bytes [offset, offset + length) as far as the file goes. Raises as the source does for bytes that are there."""
        stop = min(offset + length, self.size)
        if offset >= stop:
            return b""
        if self._missing:
            for gap in self._missing.overlapping(offset, stop):
                await self._fill(gap.start, min(max(gap.stop, gap.start + _FILL_BYTES), self.size))
            stop = min(stop, self.size)
        if self._missing and self._missing.overlapping(offset, stop):
            data = await self._read_through(offset, stop)  # staging is full: nothing can be kept
            return data[: max(0, self.size - offset)]
        return await self._run(lambda: guarded(self._area, lambda: os.pread(self._fd, stop - offset, offset)))

    async def read_piece(self, offset: int, length: int, hasher: blake3 | None) -> bytes:
        """All *length* bytes from *offset* on, for an upload, which *hasher* takes in passing. Fetched bytes are not kept."""
        if self._missing and self._missing.overlapping(offset, offset + length):
            piece = await self._read_through(offset, offset + length)
            if hasher is not None:
                await trio.to_thread.run_sync(hasher.update, piece)
            return piece

        def read() -> bytes:
            data = os.pread(self._fd, length, offset)
            while len(data) < length:
                more = os.pread(self._fd, length - len(data), offset + len(data))
                if not more:
                    more = bytes(length - len(data))  # cut off meanwhile: the upload will notice
                data += more
            if hasher is not None:
                hasher.update(data)
            return data

        if length <= _INLINE_BYTES:
            return await self._run(partial(guarded, self._area, read))
        return await self._in_thread(partial(guarded, self._area, read))

    async def truncate(self, size: int) -> None:
        """Cut to, or extend with zeros to, *size* bytes. Raises what made the bytes be parked."""
        self._require_unparked()
        before = self.size
        self.size = min(before, size)  # at once, so that nothing is fetched to behind the cut
        self._missing.truncate(size)
        await self._run(lambda: guarded(self._area, lambda: os.ftruncate(self._fd, size)))
        self.size = size
        self._room.cut(size)
        self.changed(min(size, before))

    async def fill_all(self) -> None:
        """Fetch whatever is not here yet. Raises OutOfSpaceError, and as the source does."""
        for gap in self._missing.ranges():
            for start in range(gap.start, gap.stop, _FILL_BYTES * 4):
                stop = min(start + _FILL_BYTES * 4, gap.stop, self.size)
                if start < stop:
                    await self._room.take(start, stop)
                    await self._fill(start, stop)

    async def let_go(self, stop: int, path: str, open_source: OpenSource) -> int:
        """Drop the bytes [0, *stop*) here: they are in *path* on the source. Returns how many bytes were freed.

        None where bytes after *stop* are missing too, something before it has changed by now, or it is being read.
        """
        stop -= stop % PAGE_BYTES
        if self._missing.overlapping(stop, max(stop, self.size)):
            return 0
        self._open_source = open_source
        await self.rebase(path)
        if self._local_calls or self.changed_from < stop or self._missing.overlapping(stop, max(stop, self.size)):
            return 0
        self._missing.add(0, stop)
        punch(self._fd, 0, stop)
        self.let_go_bytes = stop
        return self._room.free(0, stop)

    async def rebase(self, path: str) -> None:
        """What is missing here is in *path* on the source from now on: an upload's file, or what was just published."""
        self.base_path, self._expected = path, None
        self._epoch += 1
        origin, self._origin = self._origin, None
        if origin is not None:
            await origin.aclose()

    def base_is_now(self, version: FileVersion) -> None:
        """Attributes of the base were set through this mount: it is *version* now, with the same bytes."""
        if self._expected is not None:
            self._expected = version

    async def hold_base(self) -> None:
        """Open the base now, because its name is about to go. Raises as the source does."""
        if self._missing:
            await self._origin_file()

    async def discard(self) -> None:
        """Give everything back: the bytes, their room, and the base's handle. The number is free after this."""
        self.close()
        self._area.data_file(self.number).unlink(missing_ok=True)
        self._room.cut(0)
        if self._origin is not None:
            await self._origin.aclose()

    def close(self) -> None:
        """Close the descriptor; the bytes stay for the next mount."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    # --- steps

    async def _origin_file(self) -> SourceFile:
        async with self._opening:
            if self._origin is None:
                assert self._open_source is not None
                origin = await self._open_source(self.base_path)
                if self._expected is not None and not _same_bytes(self._expected, origin.version):
                    await origin.aclose()
                    raise StaleFileError(f"{self.base_path} was changed elsewhere while it was open here")
                self._origin = origin
            return self._origin

    async def _fetch(self, start: int, buffer: memoryview) -> None:
        """Fill *buffer* from the base. What this mount has published itself may have been completed meanwhile."""
        try:
            count = await (await self._origin_file()).read_into(start, buffer)
        except StaleFileError:
            if self._expected is not None:
                raise
            await self.rebase(self.base_path)
            count = await (await self._origin_file()).read_into(start, buffer)
        if count < len(buffer):
            raise ShortReadError(f"{self.path} ended early on the source")

    async def _fill(self, start: int, stop: int) -> None:
        """Fetch [start, stop) as far as it is missing; keeps nothing where staging has no room."""
        start -= start % PAGE_BYTES
        for gap in self._missing.overlapping(start, stop):
            if not self._room.take_nowait(gap.start, gap.stop):
                return
            buffer, epoch = bytearray(gap.length), -1
            while epoch != self._epoch:
                epoch = self._epoch
                await self._fetch(gap.start, memoryview(buffer))
            if not self._room.take_nowait(gap.start, gap.stop):
                return  # it was let go meanwhile
            # What was written, or cut off, while this waited is newer than what was fetched.
            for still in self._missing.overlapping(gap.start, min(gap.stop, self.size)):
                piece = memoryview(buffer)[still.start - gap.start : still.stop - gap.start]
                guarded(self._area, partial(write_all, self._fd, piece, still.start))
                self._missing.remove(still.start, still.stop)

    async def _read_through(self, offset: int, stop: int) -> bytes:
        """Bytes [offset, stop), some of which are missing; nothing is kept."""
        buffer = bytearray(stop - offset)
        view = memoryview(buffer)
        position = offset
        while position < stop:
            missing = self._missing.overlapping(position, stop)  # anew each time: something may be let go meanwhile
            here = missing[0].start if missing else stop
            if here > position:
                data = os.pread(self._fd, here - position, position)
                view[position - offset : position - offset + len(data)] = data
                position = here
            else:
                epoch, gap = self._epoch, missing[0]
                await self._fetch(gap.start, view[gap.start - offset : gap.stop - offset])
                if epoch == self._epoch and self._missing.covers(gap.start, gap.stop):
                    position = gap.stop
        return bytes(buffer)

    def _require_unparked(self) -> None:
        if self.error is not None:
            raise copy(self.error)

    async def _run(self, function: Callable[[], T]) -> T:
        """Do *function* here where it is a copy in memory, else in a thread: a disk may make it wait."""
        if self._area.on_tmpfs:
            return function()
        return await self._in_thread(function)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """Do *function*, which works on bytes that are here, in a thread: they are not let go meanwhile."""
        self._local_calls += 1
        try:
            return await trio.to_thread.run_sync(function)
        finally:
            self._local_calls -= 1


def _same_bytes(known: FileVersion, now: FileVersion) -> bool:
    """Whether *now* has the bytes of *known*: also where only the change time of a local file moved (a rename, a chmod)."""
    touched = known.compare(now) is Change.GREW and (known.size, known.mtime_ns) == (now.size, now.mtime_ns)
    return known.keeps_bytes(now) or touched
