"""The source as this mount shows it: with what it has not been told yet. Paths are local; only reading is here.

As long as nothing is pending and nothing is staged, every path means itself, and nothing is added to a request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio

from turbofs.errors import InvalidRequestError, IsADirectoryTurboError, NotADirectoryTurboError, NotFoundError
from turbofs.fs.owners import OwnerMap
from turbofs.model import AttributeChange, Attributes, DirectoryEntry, FileKind, FileVersion, Space, join
from turbofs.source.base import Capability, Listing, Source, SourceFile
from turbofs.source.orphans import is_temporary_name
from turbofs.write.staged_file import StagedFile
from turbofs.write.view import LocalView, Located, MadeDirectory, MadeLink, OnSource, StagedName

T = TypeVar("T")


class LocalSource(Source):
    """*origin* seen through *view*."""

    def __init__(self, origin: Source, view: LocalView[StagedFile], owners: OwnerMap) -> None:
        self.origin = origin
        self.uri = origin.uri
        self._view = view
        self._owners = owners
        self.moved: Callable[[str], Awaitable[None]] = _at_once
        """Returns when no rename of, or above, a path of the source is under way which *view* does not show as done."""

    @property
    def capabilities(self) -> frozenset[Capability]:  # type: ignore[override]  # HDFS's change while it is mounted
        return self.origin.capabilities

    async def connect(self) -> None:
        await self.origin.connect()

    async def stat(self, path: str) -> Attributes:
        return await self._attributes(path, self.origin.stat)

    async def stat_exact(self, path: str) -> Attributes:
        return await self._attributes(path, self.origin.stat_exact)

    async def list(self, path: str) -> Listing:
        # What is known here is taken down before the source is asked: what is published or moved meanwhile is in both.
        names, hidden = self._view.names_below(path), self._view.hidden_below(path)
        located = self._locate(path)
        if isinstance(located, OnSource):
            return _LocalListing(self, path, names, hidden, await self._ask(path, self.origin.list))
        if isinstance(located, MadeDirectory):
            return _LocalListing(self, path, names, hidden, None)
        self._local(path, located)
        raise NotADirectoryTurboError(f"{path} is not a directory")

    async def open(self, path: str) -> SourceFile:
        return await self._ask(path, self.origin.open)

    async def readlink(self, path: str) -> str:
        located = self._locate(path)
        if isinstance(located, MadeLink):
            return located.target
        if not isinstance(located, OnSource):
            self._local(path, located)
            raise InvalidRequestError(f"{path} is not a symbolic link")
        return await self._ask(path, self.origin.readlink)

    async def open_local(self, path: str, version: FileVersion) -> int:
        return await self._ask(path, lambda there: self.origin.open_local(there, version))

    async def space(self) -> Space:
        return await self.origin.space()

    def describe(self) -> dict[str, object]:
        return self.origin.describe()

    async def aclose(self) -> None:
        await self.origin.aclose()

    def entry(self, path: str, located: Located[StagedFile]) -> Attributes | None:
        """The attributes of a name that is only local; None where the source has to be asked."""
        return None if isinstance(located, OnSource) else self._local(path, located)

    def _locate(self, path: str) -> Located[StagedFile]:
        return OnSource(path) if self._view.empty else self._view.locate(path)

    def on_source(self, path: str) -> str:
        """What the local name *path* is called on the source now. Raises NotFoundError, IsADirectoryTurboError."""
        located = self._locate(path)
        if isinstance(located, OnSource):
            return located.path
        if isinstance(located, MadeDirectory):
            raise IsADirectoryTurboError(f"{path} is a directory")
        raise NotFoundError(f"{path} is not on the source yet")

    async def _attributes(self, path: str, stat: Callable[[str], Awaitable[Attributes]]) -> Attributes:
        located = self._locate(path)
        if isinstance(located, OnSource):
            return self._as_pending(path, await self._ask(path, stat))
        return self._local(path, located)

    async def _ask(self, path: str, call: Callable[[str], Awaitable[T]]) -> T:
        """*call* with what *path* is called on the source, also where that changes while it is asked."""
        while True:
            there = self.on_source(path)
            try:
                return await call(there)
            except NotFoundError:
                await self.moved(there)
                located = self._locate(path)
                if not isinstance(located, OnSource) or located.path == there:
                    raise

    def _local(self, path: str, located: Located[StagedFile]) -> Attributes:
        match located:
            case StagedName(file):
                return file.attributes()
            case MadeDirectory():
                return self._made(FileKind.DIRECTORY, located, located.mode, 0)
            case MadeLink():
                return self._made(
                    FileKind.SYMLINK, located, 0o777, len(located.target.encode(errors="surrogateescape"))
                )
        raise NotFoundError(f"{path} does not exist")

    def _made(self, kind: FileKind, made: MadeDirectory | MadeLink, mode: int, size: int) -> Attributes:
        return Attributes(
            kind=kind,
            version=FileVersion(size, made.made_ns),
            mode=mode,
            owner=made.owner if made.owner is not None else self._owners.overflow_uid,
            group=made.group if made.group is not None else self._owners.overflow_gid,
            ctime_ns=made.made_ns,
        )

    def _as_pending(self, path: str, seen: Attributes) -> Attributes:
        if self._view.empty:
            return seen
        change = self._view.pending_change(path)
        return seen if change is None else changed(seen, change)


async def _at_once(_path: str) -> None:
    await trio.lowlevel.checkpoint()


def changed(attributes: Attributes, change: AttributeChange) -> Attributes:
    """*attributes* with *change* made."""
    version = attributes.version
    if change.mtime_ns is not None:
        version = version._replace(mtime_ns=change.mtime_ns)
    return attributes._replace(
        version=version,
        mode=attributes.mode if change.mode is None else change.mode,
        owner=attributes.owner if change.owner is None else change.owner,
        group=attributes.group if change.group is None else change.group,
        atime_ns=attributes.atime_ns if change.atime_ns is None else change.atime_ns,
    )


class _LocalListing(Listing):
    """First what is only here, then what the source lists and nothing here says otherwise of.

    Temporary files of uploads are not shown: nobody else's business, and gone when they are complete.
    """

    def __init__(
        self,
        source: LocalSource,
        path: str,
        names: Sequence[tuple[str, Located[StagedFile]]],
        hidden: frozenset[str],
        inner: Listing | None,
    ) -> None:
        self._source = source
        self._path = path
        self._names = names
        self._hidden = hidden
        self._inner = inner
        self._given: set[str] | None = None

    async def next_batch(self) -> Sequence[DirectoryEntry]:
        if self._given is None:
            self._given = set()
            batch = await self._local_entries()
            self._given.update(entry.name for entry in batch)
            if batch:
                return batch
        while self._inner is not None:
            batch = list(await self._inner.next_batch())
            if not batch:
                break
            shown = [entry for entry in batch if self._is_shown(entry.name)]
            if shown:
                return shown
        return ()

    async def aclose(self) -> None:
        if self._inner is not None:
            await self._inner.aclose()

    async def _local_entries(self) -> list[DirectoryEntry]:
        entries = []
        for name, located in self._names:
            path = join(self._path, name)
            try:
                attributes = self._source.entry(path, located) or await self._source.stat(path)
            except NotFoundError:
                continue
            entries.append(DirectoryEntry(name, attributes))
        return entries

    def _is_shown(self, name: str) -> bool:
        if name.startswith(".") and is_temporary_name(name):
            return False
        if name in (self._given or ()):
            return False
        return name not in self._hidden
