"""Open files: one reader for each file version that is open, its cached extents kept for the next open of that version."""

from __future__ import annotations

from turbofs.config import ReadConfig
from turbofs.errors import IsADirectoryTurboError, NotFoundError, NotSupportedError, StaleFileError
from turbofs.fs.handles import ReadHandle
from turbofs.fs.inodes import Inode, InodeTable
from turbofs.fs.names import NameService
from turbofs.metrics import Metrics
from turbofs.model import Change, FileKind, FileVersion
from turbofs.read.extent_cache import CachedFile
from turbofs.read.fetcher import Fetcher
from turbofs.read.file_reader import FileReader
from turbofs.source.base import Source, SourceFile

_MOST_IDLE_FILES = 4096
"""Files that are remembered by identity though nothing has them open: a few hundred bytes each."""


class FileOpener:
    """Opens inodes for reading, close-to-open: what an open returns is the content of the last close anywhere."""

    def __init__(
        self,
        source: Source,
        table: InodeTable,
        names: NameService,
        fetcher: Fetcher,
        config: ReadConfig,
        metrics: Metrics,
    ) -> None:
        self._source = source
        self._table = table
        self._names = names
        self._fetcher = fetcher
        self._config = config
        self._metrics = metrics
        self._cached: dict[str, CachedFile] = {}
        self._forget_at = _MOST_IDLE_FILES

    async def open(self, inode: Inode) -> tuple[ReadHandle, bool]:
        """A handle, and whether the pages that the kernel keeps of this inode are still right.

        Raises StaleFileError where the name is another file by now: the kernel then looks it up again, once.
        """
        if inode.kind is FileKind.DIRECTORY:
            raise IsADirectoryTurboError(f"{inode.path} is a directory")
        if inode.kind is not FileKind.FILE:
            raise NotSupportedError(f"{inode.path} is a {inode.kind.value}, not a file")
        inode.open_handles += 1  # keeps the inode while this waits
        try:
            reader = await self._reader(inode)
        except BaseException:
            inode.open_handles -= 1
            self._table.drop_unused(inode)
            raise
        reader.users += 1
        version = reader.version
        keep_pages = version.strong and inode.kernel_version == version
        inode.kernel_version = version if version.strong else None
        self._metrics.open_handles.inc()
        return ReadHandle(inode, reader, self._config), keep_pages

    def cached(self, inode: Inode) -> CachedFile | None:
        """What is cached of the content that *inode* has, open or not."""
        if inode.reader is not None:
            return inode.reader.cached
        cached = self._cached.get(inode.attributes.version.file_id)
        return cached if cached is not None and cached.version == inode.attributes.version else None

    def share(self, handle: ReadHandle) -> ReadHandle:
        """Another handle on what *handle* has open, without asking the source."""
        handle.inode.open_handles += 1
        handle.reader.users += 1
        self._metrics.open_handles.inc()
        return ReadHandle(handle.inode, handle.reader, self._config)

    async def close(self, handle: ReadHandle) -> None:
        self._fetcher.forget_sequential(handle.tracker)
        self._metrics.open_handles.dec()
        inode, reader = handle.inode, handle.reader
        inode.open_handles -= 1
        reader.users -= 1
        if not reader.users:
            if inode.reader is reader:
                inode.reader = None
            self._fetcher.cache.let_go(reader.cached)
            await reader.source_file.aclose()
        self._table.drop_unused(inode)

    async def _reader(self, inode: Inode) -> FileReader:
        shared = inode.reader
        if shared is not None and not inode.detached:
            seen = await self._source.stat_exact(inode.path)
            if seen.version.strong:
                await self._agree(inode, seen.version)
                if inode.reader is shared:
                    return shared
        try:
            source_file = await self._source.open(inode.path)
        except NotFoundError:
            self._table.detach(inode)
            raise
        try:
            await self._agree(inode, source_file.version)
        except BaseException:
            await source_file.aclose()
            raise
        other = inode.reader
        if other is not None and other.users and other.version.strong and other.version == source_file.version:
            await source_file.aclose()  # somebody else opened the same version while this waited
            # That one may have been closed by now, and would fail every read.
            return other if inode.reader is other else await self._reader(inode)
        inode.reader = FileReader(source_file, self._cached_file(source_file), self._fetcher, self._metrics)
        return inode.reader

    async def _agree(self, inode: Inode, version: FileVersion) -> None:
        """Make *inode* agree with the *version* that its name has now, or raise StaleFileError."""
        change = inode.attributes.version.compare(version)
        if change is Change.REPLACED:
            self._table.detach(inode)
            raise StaleFileError(f"{inode.name!r} was replaced or changed elsewhere")
        if change is Change.GREW:
            await self._names.advance(inode, inode.attributes.with_version(version))
        elif version.strong:
            inode.attributes = inode.attributes.with_version(version)

    def _cached_file(self, source_file: SourceFile) -> CachedFile:
        version = source_file.version
        if not version.strong:
            return CachedFile(version)  # proves nothing: known to this open alone
        cached = self._cached.get(version.file_id)
        if cached is None:
            self._forget_idle()
            cached = self._cached[version.file_id] = CachedFile(version)
        elif cached.version != version:
            if cached.version.compare(version) is Change.REPLACED:
                # Handles that are open on the old content keep what they have.
                cached = self._cached[version.file_id] = CachedFile(version)
            else:
                self._fetcher.cache.advance(cached, version)
        return cached

    def _forget_idle(self) -> None:
        if len(self._cached) < self._forget_at:
            return
        in_use = {inode.reader.cached for inode in self._table if inode.reader is not None}
        for file_id, cached in list(self._cached.items()):
            if cached not in in_use and not cached.extents():
                del self._cached[file_id]
        # What is left has cached bytes: looking through it again at each open would be quadratic.
        self._forget_at = max(_MOST_IDLE_FILES, 2 * len(self._cached))
