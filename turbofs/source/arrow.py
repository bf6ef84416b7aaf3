"""`s3://BUCKET/PREFIX` and `gs://BUCKET/PREFIX` through pyarrow.fs.

Objects have no directories, modes or owners: a directory is a prefix that some object has, and everything belongs to
whoever runs the mount. On S3 the ETag is a version's identity; it changes with the content. Writing replaces whole
objects; what object stores cannot do (append, atomic rename, exclusive create through pyarrow) is not declared.

pyarrow.fs costs about 100 MB of memory, so it is imported on connecting.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar
from urllib.parse import urlsplit

import trio

from turbofs.config import SourceConfig
from turbofs.errors import (
    ConfigError,
    IsADirectoryTurboError,
    NameTooLongError,
    NotADirectoryTurboError,
    NotFoundError,
    SourceUnavailableError,
)
from turbofs.model import ROOT, Attributes, DirectoryEntry, FileKind, FileVersion
from turbofs.source.arrow_errors import translated
from turbofs.source.arrow_files import ArrowFile, ArrowListing, ArrowWriter
from turbofs.source.base import Capability, Listing, Source, SourceFile, SourceWriter
from turbofs.source.checks import NAME_LIMIT_BYTES, components, require_utf8
from turbofs.source.threads import abandonable
from turbofs.source.uri import parse_source_uri

if TYPE_CHECKING:
    from pyarrow import NativeFile
    from pyarrow.fs import FileInfo, FileSystem

T = TypeVar("T")

KEY_LIMIT_BYTES = 1024
"""Both stores refuse longer keys."""


class ArrowSource(Source):
    """The objects under one prefix of one bucket, as a tree."""

    def __init__(self, uri: str, config: SourceConfig, limiter: trio.CapacityLimiter) -> None:
        parsed = parse_source_uri(uri)
        self.uri = uri
        self.capabilities = frozenset({Capability.CREATE, Capability.DELETE})
        if parsed.scheme == "s3":
            self.capabilities |= {Capability.STRONG_VERSIONS}
        self._scheme = parsed.scheme
        self._bucket = parsed.authority
        self._top = parsed.authority + parsed.path.rstrip("/")
        self._config = config
        self._limiter = limiter
        self._client: FileSystem | None = None
        _split_endpoint(config.s3_endpoint)  # refuse a bad one now, not at the first request

    async def connect(self) -> None:
        if self._client is None:
            self._client = await self._call("connect to", self.uri, self._make_client)
        info = await self._call("look at", self.uri, partial(self._info, ROOT))
        if info.type.name != "Directory":
            raise NotFoundError(
                f"{self.uri}: no such bucket, or no object under this prefix",
                advice="check the name, the region (s3_region) and the endpoint (s3_endpoint)",
            )

    # --- reading

    async def stat(self, path: str) -> Attributes:
        info = await self._call("stat", path, partial(self._info, path))
        return self._attributes(self._require_found(info, path))

    async def stat_exact(self, path: str) -> Attributes:
        attributes = await self.stat(path)
        if attributes.kind is not FileKind.FILE:
            return attributes
        return attributes.with_version(await self._version(path))

    async def list(self, path: str) -> Listing:
        return ArrowListing(await self._call("list", path, partial(self._list, path)))

    async def open(self, path: str) -> SourceFile:
        file, version = await self._call(
            "open", path, partial(self._open, path), dispose=lambda opened: opened[0].close()
        )
        return ArrowFile(file, version, path, self._limiter, partial(self._version, path))

    # --- writing

    async def create(self, path: str, *, mode: int = 0o644, replace: bool = False) -> SourceWriter:
        """Create an object; it appears, whole, when the writer completes. *mode* has nowhere to be kept."""
        if not replace:
            raise self._unsupported("creating a file only where none exists", path)
        key = self._key(path)
        info = await self._call("look at", path, partial(self._info, path))
        if info.type.name == "Directory":
            raise IsADirectoryTurboError(f"{path} is a directory")
        return ArrowWriter(path, self._limiter, lambda: self._fs().open_output_stream(key))

    async def delete(self, path: str) -> None:
        self._require_file(await self._call("look at", path, partial(self._info, path)), path)
        await self._call("delete", path, lambda: self._fs().delete_file(self._key(path)))

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "client": "pyarrow.fs", "endpoint": self._config.s3_endpoint or "the store's own"}

    async def aclose(self) -> None:
        self._client = None
        await trio.lowlevel.checkpoint()

    # --- in threads

    async def _call(
        self, act: str, path: str, function: Callable[[], T], *, dispose: Callable[[T], object] | None = None
    ) -> T:
        with translated(act, path):
            return await abandonable(self._limiter, function, dispose=dispose)

    def _make_client(self) -> FileSystem:
        from pyarrow import fs

        config = self._config
        if self._scheme == "gs":
            patience = timedelta(seconds=max(1, int(config.operation_timeout_s)))
            return fs.GcsFileSystem(anonymous=config.anonymous, retry_time_limit=patience)
        scheme, endpoint = _split_endpoint(config.s3_endpoint)
        return fs.S3FileSystem(  # type: ignore[call-arg] # allow_delayed_open is newer than the stubs
            anonymous=config.anonymous,
            region=config.s3_region or self._find_region(endpoint),
            scheme=scheme,
            endpoint_override=endpoint,
            connect_timeout=config.operation_timeout_s,
            request_timeout=config.operation_timeout_s,
            allow_delayed_open=True,  # one request for a small object instead of three
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),  # the retrying source does that
        )

    def _find_region(self, endpoint: str | None) -> str | None:
        """Where AWS keeps the bucket: a request to another region is refused."""
        from pyarrow import fs

        if endpoint is not None or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
            return None
        return fs.resolve_s3_region(self._bucket)

    def _fs(self) -> FileSystem:
        if self._client is None:
            raise SourceUnavailableError(f"{self.uri} is not connected", advice="connect() comes first")
        return self._client

    def _key(self, path: str) -> str:
        """BUCKET/KEY, as pyarrow wants it."""
        require_utf8(path)
        key = "/".join([self._top, *components(path)])
        if len(key.encode()) - len(self._bucket) - 1 > KEY_LIMIT_BYTES:
            raise NameTooLongError(f"the key of {path[:80]}… is longer than {KEY_LIMIT_BYTES} bytes")
        return key

    def _info(self, path: str) -> FileInfo:
        return self._fs().get_file_info(self._key(path))

    def _list(self, path: str) -> Sequence[DirectoryEntry]:
        from pyarrow import fs

        info = self._require_found(self._info(path), path)
        if info.type.name != "Directory":
            raise NotADirectoryTurboError(f"{path} is not a directory")
        found: dict[str, FileInfo] = {}
        for child in self._fs().get_file_info(fs.FileSelector(self._key(path))):
            name = child.base_name
            # A key may be both an object and a prefix; then the object has the name, as in stat.
            if _is_name(name) and (name not in found or child.type.name == "File"):
                found[name] = child
        return [DirectoryEntry(name, self._attributes(found[name])) for name in sorted(found)]

    def _open(self, path: str) -> tuple[NativeFile, FileVersion]:
        try:
            file = self._fs().open_input_file(self._key(path))
        except FileNotFoundError:
            self._require_file(self._info(path), path)
            raise
        metadata = {_text(key).lower(): _text(value) for key, value in (file.metadata() or {}).items()}
        modified = metadata.get("last-modified")
        mtime_ns = _nanoseconds(modified) if modified else self._info(path).mtime_ns or 0
        return file, FileVersion(size=file.size(), mtime_ns=mtime_ns, file_id=metadata.get("etag", "").strip('"'))

    async def _version(self, path: str) -> FileVersion:
        """The version of the object that has this name now."""
        file, version = await self._call(
            "stat", path, partial(self._open, path), dispose=lambda opened: opened[0].close()
        )
        file.close()
        return version

    def _require_found(self, info: FileInfo, path: str) -> FileInfo:
        if info.type.name == "NotFound":
            raise NotFoundError(f"no {path}")
        return info

    def _require_file(self, info: FileInfo, path: str) -> None:
        if self._require_found(info, path).type.name == "Directory":
            raise IsADirectoryTurboError(f"{path} is a directory")

    def _attributes(self, info: FileInfo) -> Attributes:
        directory = info.type.name == "Directory"
        return Attributes(
            kind=FileKind.DIRECTORY if directory else FileKind.FILE,
            version=FileVersion(size=info.size or 0, mtime_ns=info.mtime_ns or 0),
            mode=0o755 if directory else 0o644,
            owner=os.getuid(),
            group=os.getgid(),
        )


def _split_endpoint(endpoint: str | None) -> tuple[Literal["http", "https"], str | None]:
    """Scheme and HOST[:PORT] of the configured endpoint."""
    if endpoint is None:
        return "https", None
    parts = urlsplit(endpoint)
    if parts.scheme not in {"http", "https"} or not parts.netloc or parts.path.strip("/") or parts.query:
        raise ConfigError(f"s3_endpoint {endpoint!r} is not an endpoint", advice="write http(s)://HOST[:PORT]")
    return "http" if parts.scheme == "http" else "https", parts.netloc


def _is_name(name: str) -> bool:
    """Whether a part of a key can be a file's name; other objects cannot be shown in a tree."""
    return name not in {"", ".", ".."} and len(name.encode()) <= NAME_LIMIT_BYTES and "\0" not in name


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _nanoseconds(iso_date: str) -> int:
    """Nanoseconds since the epoch; S3 tells whole seconds."""
    return int(datetime.fromisoformat(iso_date).timestamp()) * 10**9
