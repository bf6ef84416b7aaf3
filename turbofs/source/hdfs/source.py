"""The `hdfs` source: which client does what, and the acts that need more than one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import hdfs_native
import structlog
import trio

from turbofs.config import SourceConfig
from turbofs.errors import (
    AlreadyExistsError,
    BadNameError,
    ConfigError,
    InvalidRequestError,
    IsADirectoryTurboError,
    NotADirectoryTurboError,
    NotFoundError,
    SourceUnavailableError,
    TurboError,
)
from turbofs.model import (
    ROOT,
    AttributeChange,
    Attributes,
    BlockLocation,
    ByteRange,
    FileKind,
    FileVersion,
    Space,
)
from turbofs.source.base import Capability, Listing, Source, SourceFile, SourceWriter
from turbofs.source.checks import components, require_utf8
from turbofs.source.hdfs.calls import BlockingCalls
from turbofs.source.hdfs.connection import Connection, StallMemory
from turbofs.source.hdfs.file import HdfsFile
from turbofs.source.hdfs.hadoop_conf import load_hadoop_conf, locate
from turbofs.source.hdfs.listing import HdfsListing
from turbofs.source.hdfs.native import MS, ByteReader, NativeClient, identity, resolve_user
from turbofs.source.hdfs.web import WebHdfs
from turbofs.source.hdfs.writers import Writers, temporary_beside
from turbofs.source.uri import parse_source_uri

T = TypeVar("T")

_log = structlog.get_logger(__name__)

_SETTLE_S = 1.0
"""A transfer that nobody wants any more ends with its next piece; what takes longer than this hangs."""
_OF_WEB = frozenset({Capability.STRONG_VERSIONS, Capability.BLOCK_LOCATIONS, Capability.SPACE})
_NEVER = frozenset(
    # A file that lost its last name has lost its bytes, too.
    {Capability.SET_ID_BITS, Capability.SYMLINKS, Capability.ARBITRARY_NAMES, Capability.KEEPS_OPEN}
)
_ALWAYS = frozenset(Capability) - _OF_WEB - _NEVER


class HdfsSource(Source):
    """A directory of HDFS and what is under it.

    Capabilities that need WebHDFS (file ids, block locations, space) are declared once it was reached, and given up
    while it is out of reach: versions are weak then, and `describe` says why.
    """

    def __init__(self, uri: str, config: SourceConfig, limiter: trio.CapacityLimiter) -> None:
        """Raises ConfigError for a URI, client name or Hadoop configuration that cannot be used."""
        self.uri = uri
        parsed = parse_source_uri(uri)
        require_utf8(parsed.path)
        self._root = parsed.path
        conf = load_hadoop_conf(config.hadoop_conf_dir)
        self._servers = locate(parsed.authority, conf, config.web_address)
        self._client_name = config.client
        self._user = resolve_user(config.user)
        native = NativeClient(self._servers)
        stalls = StallMemory(config.operation_timeout_s)
        if config.client == "native":
            # A client of its own: reads move on from a silent DataNode far sooner than writes may give one up.
            open_reader: Callable[[str, str], ByteReader] = NativeClient(
                self._servers, socket_timeout_s=stalls.socket_s
            ).open
        elif config.client == "libhdfs":
            from turbofs.source.hdfs.libhdfs import LibhdfsClient  # pyarrow takes a while to import

            open_reader = LibhdfsClient(self._servers, self._user).open
        else:
            raise ConfigError(f"client {config.client!r} is neither native nor libhdfs")
        self._hdfs = Connection(
            native,
            WebHdfs(self._servers.web, self._user, config.operation_timeout_s),
            BlockingCalls(limiter, config.operation_timeout_s),
            stalls,
            open_reader,
        )
        self._writers = Writers(self._hdfs)
        self.capabilities = _ALWAYS | _OF_WEB
        self._claimed = False

    # --- coming and going

    async def connect(self) -> None:
        if not self._claimed:
            identity.claim(self._user)
            self._claimed = True
        try:
            root = await self.stat(ROOT)
            if root.kind is not FileKind.DIRECTORY:
                raise NotADirectoryTurboError(f"{self.uri} is a file", advice="mount the directory that holds it")
            await self.stat_exact(ROOT)
        except BaseException:
            await self.aclose()
            raise
        if self._hdfs.web.down_reason:
            _log.warning("hdfs.weak_versions", uri=self.uri, web=self._hdfs.web.address, why=self._hdfs.web.down_reason)

    async def aclose(self) -> None:
        if self._claimed:
            self._claimed = False
            identity.release(self._user)
        with trio.CancelScope(shield=True):
            await self._hdfs.calls.settle(_SETTLE_S)
            await self._hdfs.web.aclose()

    def describe(self) -> dict[str, object]:
        reason = self._hdfs.web.down_reason
        return {
            **super().describe(),
            "client": self._client_name,
            "user": self._user,
            "namenodes": list(self._servers.rpc),
            "web": self._hdfs.web.address,
            "versions": f"weak: {reason}" if reason else "strong",
            "hung_calls": self._hdfs.calls.hung,
        }

    # --- reading

    async def stat(self, path: str) -> Attributes:
        where = self._existing(path)
        return await self._hdfs.ask(f"stat {path}", lambda: self._hdfs.native.stat(where, path))

    async def stat_exact(self, path: str) -> Attributes:
        try:
            attributes = await self._hdfs.web.status(self._existing(path), path)
        except SourceUnavailableError:
            try:
                attributes = await self.stat(path)
            except SourceUnavailableError:
                self._hdfs.web.forgive()
                raise
        self._note_web()
        return attributes

    async def list(self, path: str) -> Listing:
        listing = HdfsListing(self._hdfs, self._existing(path), path)
        await listing.begin()
        return listing

    async def open(self, path: str) -> SourceFile:
        attributes = await self.stat_exact(path)
        if attributes.kind is not FileKind.FILE:
            raise IsADirectoryTurboError(f"{path} is a directory")
        return HdfsFile(self._hdfs, self._existing(path), path, attributes.version)

    async def space(self) -> Space:
        return await self._hdfs.web.space()

    async def block_locations(self, path: str, wanted: ByteRange) -> Sequence[BlockLocation]:
        return await self._hdfs.web.block_locations(self._existing(path), path, wanted)

    # --- writing

    async def create(self, path: str, *, mode: int = 0o644, replace: bool = False) -> SourceWriter:
        """See `Source.create`.

        With *replace* the bytes go to a hidden temporary file beside the target, which takes the name at the first
        sync or else at close: HDFS's own overwrite would destroy the target at once, also under a client that has it
        open for writing. A target that is being written raises BusyError, here or then.
        """
        create = self._writers.create_to_replace if replace else self._writers.create
        return await create(self._new(path), path, mode)

    def require_name(self, path: str) -> None:
        self._new(path)

    async def being_written(self, path: str) -> bool:
        """See `Source.being_written`.

        WebHDFS tells. Where it is out of reach the file is opened for appending and closed as it was, which the
        NameNode refuses while a client holds its lease. That needs the right to write the file, moves its modification
        time, and takes the file from a writer that has been dead for a minute (HDFS's soft limit).
        """
        return await self._writers.being_written(self._existing(path), path)

    async def append(self, path: str) -> SourceWriter:
        return await self._writers.append(self._existing(path), path)

    async def rename(self, old: str, new: str, *, replace: bool, identity: FileVersion | None = None) -> None:
        source, target = self._existing(old), self._new(new)
        if old == new:
            await self.stat(old)
            if not replace:
                raise AlreadyExistsError(f"cannot rename {old} to itself without replacing")
            return
        if target.startswith(source.rstrip("/") + "/"):
            raise InvalidRequestError(f"cannot rename {old} into itself, {new}", advice="choose a target outside it")
        try:
            await self._hdfs.call(f"rename {old} to", new, lambda client: client.rename(source, target, replace))
            self._writers.note_rename(source, target)
        except TurboError as error:
            if "must both be directories" not in str(error):
                raise
            if not replace:
                raise AlreadyExistsError(f"{new} exists") from error
            if (await self.stat(old)).kind is FileKind.DIRECTORY:
                raise NotADirectoryTurboError(f"cannot replace the file {new} by a directory") from error
            raise IsADirectoryTurboError(f"cannot replace the directory {new} by a file") from error

    async def delete(self, path: str) -> None:
        if (await self.stat(path)).kind is FileKind.DIRECTORY:
            raise IsADirectoryTurboError(f"{path} is a directory")
        await self._delete(path)

    async def delete_directory(self, path: str) -> None:
        if (await self.stat(path)).kind is not FileKind.DIRECTORY:
            raise NotADirectoryTurboError(f"{path} is a file")
        await self._delete(path)

    async def make_directory(self, path: str, *, mode: int = 0o755) -> None:
        """See `Source.make_directory`. HDFS's mkdirs succeeds where the directory exists; a rename does not."""
        where = self._new(path)
        temporary = temporary_beside(where)

        def make(client: hdfs_native.Client) -> None:
            client.mkdirs(temporary, mode, False)
            try:
                client.rename(temporary, where, False)
            except BaseException:
                client.delete(temporary, False)
                raise

        try:
            await self._hdfs.call("make the directory", path, make)
        except TurboError as error:
            if "must both be directories" not in str(error):
                raise
            raise AlreadyExistsError(f"{path} is a file") from error

    async def set_attributes(self, path: str, change: AttributeChange) -> None:
        """See `Source.set_attributes`. Owners and groups are names; times lose what is below a millisecond."""
        where = self._existing(path)
        if isinstance(change.owner, int) or isinstance(change.group, int):
            raise InvalidRequestError(f"HDFS knows owners by name; cannot set {change} on {path}")
        owner, group = change.owner, change.group

        def apply(client: hdfs_native.Client) -> None:
            if change.mode is not None:
                client.set_permission(where, change.mode & 0o1777)
            if owner is not None or group is not None:
                client.set_owner(where, owner, group)
            if change.atime_ns is not None or change.mtime_ns is not None:
                now = client.get_file_info(where)
                mtime = now.modification_time if change.mtime_ns is None else change.mtime_ns // MS
                atime = now.access_time if change.atime_ns is None else change.atime_ns // MS
                client.set_times(where, max(0, mtime), max(0, atime))

        await self._hdfs.call("change the attributes of", path, apply)

    async def set_replication(self, path: str, copies: int) -> None:
        where = self._existing(path)
        if not 0 < copies < 1 << 15:
            raise InvalidRequestError(
                f"{copies} is no number of copies", advice="dfs.replication.max is 512 by default"
            )
        if not await self._hdfs.call(
            "set the replication of", path, lambda client: client.set_replication(where, copies)
        ):
            if (await self.stat(path)).kind is FileKind.DIRECTORY:
                raise IsADirectoryTurboError(f"{path} is a directory: only files have replicas")
            raise InvalidRequestError(f"{path} has no replicas to change (erasure coding)")

    # --- helpers

    def _existing(self, path: str) -> str:
        """Absolute path on HDFS of something that may exist. Raises NotFoundError where no such name can."""
        where = self._absolute(path)
        if not _possible(path):
            raise NotFoundError(f"{path!r} cannot exist on HDFS: its names are UTF-8 without ':'")
        return where

    def _new(self, path: str) -> str:
        """Absolute path on HDFS. Raises BadNameError for names that HDFS does not take."""
        where = self._absolute(path)
        if not _possible(path):
            raise BadNameError(f"HDFS does not take {path!r}: its names are UTF-8 without ':'")
        return where

    def _absolute(self, path: str) -> str:
        components(path)  # raises for what is no path at all
        if path == ROOT:
            return self._root
        return path if self._root == ROOT else self._root + path

    async def _delete(self, path: str) -> None:
        where = self._existing(path)
        if not await self._hdfs.call("delete", path, lambda client: client.delete(where, False)):
            raise NotFoundError(f"{path} does not exist")

    def _note_web(self) -> None:
        self.capabilities = _ALWAYS if self._hdfs.web.down_reason else _ALWAYS | _OF_WEB


def _possible(path: str) -> bool:
    """Whether HDFS can have such a name."""
    if path.isascii():
        return ":" not in path
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return ":" not in path
