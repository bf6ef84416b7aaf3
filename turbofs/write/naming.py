"""Gives uploads their names on the source, and files their owners, modes and times.

A file that is new for its writer may find that somebody made the name meanwhile: who closes last wins, as on any file
system, unless the file was created with O_EXCL, or is written by another client at this moment. What an earlier mount
left is more careful: it takes its name only where the target is what it was (see `recovery`).
"""

from __future__ import annotations

import os
from collections.abc import Callable

import structlog

from turbofs.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    BusyError,
    NotFoundError,
    NotPermittedError,
    NotSupportedError,
)
from turbofs.model import AttributeChange, Change
from turbofs.source.base import Capability, Source
from turbofs.write.source_side import ConflictError, SourceSide
from turbofs.write.staged_file import StagedFile
from turbofs.write.upload import Upload

_log = structlog.get_logger(__name__)

_COMPARED_BYTES = 1 << 20


class Naming:
    """The last step of a publication."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._may_chown = True
        self._identity = source.describe().get("user")
        self.noted: Callable[[StagedFile, SourceSide], None] = lambda _file, _side: None
        """Told before a temporary file takes its name, where recovery needs to know it again."""
        self.traced: Callable[[StagedFile], bool] = lambda _file: False
        """Whether recovery needs that: what nobody was promised is simply dropped."""
        self.denied_owner: Callable[[], None] = lambda: None
        """Told once that the source does not let this identity give files to others."""

    async def take_name(self, file: StagedFile, side: SourceSide, upload: Upload, path: str) -> None:
        await self.give_owner(upload.path, file.owner, file.group)
        if side.recovered:
            await self._require_unchanged(file, side, path)
        if upload.version is None:
            upload.attributes = await self._source.stat_exact(upload.path)
            upload.version = upload.attributes.version
            if self.traced(file):
                self.noted(file, side)
        if not side.named:
            try:
                await self._source.rename(upload.path, path, replace=False, identity=upload.version)
                upload.path, upload.named = path, True
                return
            except AlreadyExistsError:
                if file.exclusive:
                    raise
        own = side.recovered and side.version is not None and side.version != file.base
        # A writer that died with the mount may still be said to have our own file open.
        if not own and await self.is_being_written(path):
            raise BusyError(f"{path} is being written by another client", advice="wait until it is closed")
        await self._source.rename(upload.path, path, replace=True, identity=upload.version)
        upload.path, upload.named = path, True

    async def require_absent(self, path: str) -> None:
        try:
            await self._source.stat(path)
        except NotFoundError:
            return
        raise AlreadyExistsError(f"{path} was made elsewhere meanwhile")

    async def _require_unchanged(self, file: StagedFile, side: SourceSide, path: str) -> None:
        """Raises ConflictError where the target is neither what it was nor something of ours."""
        try:
            now = (await self._source.stat_exact(path)).version
        except NotFoundError:
            if side.version is None:
                return
            raise ConflictError(f"{path} was deleted elsewhere") from None
        known = side.version
        side.named = True
        if known is None:
            raise ConflictError(f"{path} was made elsewhere meanwhile")
        change = known.compare(now)
        if change is Change.SAME:
            return
        # The earlier mount may have appended in place since it was noted: then these are the bytes that are staged.
        if change is Change.GREW and await self.begins(file, path, known.size, now.size):
            return
        raise ConflictError(f"{path} was changed elsewhere meanwhile")

    async def begins(self, file: StagedFile, path: str, start: int, stop: int) -> bool:
        """Whether bytes [start, stop) of *path* on the source are those of *file*."""
        if start == stop:
            return True
        if stop > file.size:
            return False
        target = await self._source.open(path)
        try:
            for offset in range(start, stop, _COMPARED_BYTES):
                length = min(_COMPARED_BYTES, stop - offset)
                theirs = bytearray(length)
                if await target.read_into(offset, memoryview(theirs)) < length:
                    return False
                if theirs != await file.read_piece(offset, length, None):
                    return False
        finally:
            await target.aclose()
        return True

    async def is_being_written(self, path: str) -> bool:
        """Whether some client has *path* open for writing, perhaps one that died; False where there is nothing."""
        try:
            return await self._source.being_written(path)
        except NotFoundError:
            return False

    async def give_owner(self, path: str, owner: str | int | None, group: str | int | None) -> None:
        """Give what this mount made at *path* to whom it was made for, where the source lets this identity do that."""
        if not self._may_chown or (owner is None and group is None):
            return
        if Capability.OWNERS not in self._source.capabilities or self._is_own(owner, group):
            return
        try:
            await self._source.set_attributes(path, AttributeChange(owner=owner, group=group))
        except (AccessDeniedError, NotPermittedError, NotSupportedError):
            self._may_chown = False
            self.denied_owner()

    def _is_own(self, owner: str | int | None, group: str | int | None) -> bool:
        """Whether what this identity makes belongs to them anyway. A source that knows names gives its directory's group."""
        if isinstance(owner, int):
            return (owner, group) == (os.geteuid(), os.getegid())
        return owner is not None and owner == self._identity

    def _change(self, file: StagedFile, side: SourceSide) -> AttributeChange | None:
        """What the source has to be told of attributes; a new temporary file has its mode and owner from the start."""
        asked = side.attributes_generation < file.attributes_generation
        if not asked and not (file.times_set and side.generation < file.generation):
            return None
        owners = asked and side.named and self._may_chown and Capability.OWNERS in self._source.capabilities
        return AttributeChange(
            mode=file.mode if asked else None,
            owner=file.owner if owners else None,
            group=file.group if owners else None,
            atime_ns=file.atime_ns if file.times_set else None,
            mtime_ns=file.mtime_ns if file.times_set else None,
        )

    async def set_attributes(self, file: StagedFile, side: SourceSide, path: str) -> bool:
        """Tell the source what was asked for *file*, which is *path* there, since it was told last; whether there was."""
        change = self._change(file, side)
        if change is not None:
            try:
                await self._source.set_attributes(path, change)
            except NotSupportedError as error:
                _log.info("attributes are not kept", path=path, error=str(error))
        return change is not None
