"""WebHDFS and the NameNode's JMX: what hdfs-native lacks. File ids, block locations, unfinished blocks, space.

An HTTP server that does not answer must not cost every open a time-out: after a failure the server is left alone for
a while (1 s, doubling up to 30 s), and callers are told at once that it is down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import trio

from turbofs.errors import ShortReadError, SourceUnavailableError, TurboError
from turbofs.model import Attributes, BlockLocation, ByteRange, FileKind, FileVersion, Space
from turbofs.source.hdfs.errors import from_java
from turbofs.source.hdfs.native import MS, PERMISSION_BITS

_CONNECT_TIMEOUT_S = 2.0
"""A NameNode answers a connection within a round trip; HDFS itself is asked in the meantime."""
_PAUSE_FIRST_S, _PAUSE_LIMIT_S = 1.0, 30.0
_KINDS = {"FILE": FileKind.FILE, "DIRECTORY": FileKind.DIRECTORY, "SYMLINK": FileKind.SYMLINK}
_ACTS = {
    "GETFILESTATUS": "stat",
    "GET_BLOCK_LOCATIONS": "look at the blocks of",
    "GETFILEBLOCKLOCATIONS": "locate the blocks of",
    "OPEN": "read",
}
_NO_PARAMETERS: Mapping[str, str | int] = MappingProxyType({})


class WebHdfs:
    """The HTTP side of a cluster. With several NameNodes the active one is found and remembered."""

    def __init__(self, addresses: Sequence[str], user: str, timeout_s: float) -> None:
        self._addresses = list(addresses)
        self._active = 0
        self._user = user
        self._timeout = httpx.Timeout(timeout_s, connect=min(_CONNECT_TIMEOUT_S, timeout_s))
        self._client: httpx.AsyncClient | None = None
        self._down_reason = ""
        self._pause_s = 0.0
        self._retry_at = 0.0

    @property
    def address(self) -> str:
        """The server that is asked first."""
        return self._addresses[self._active]

    @property
    def down_reason(self) -> str:
        """Why the server counts as down; empty while it is up."""
        return self._down_reason

    def forgive(self) -> None:
        """Ask again at the next occasion: the whole NameNode was down, not just its HTTP server."""
        self._pause_s = self._retry_at = 0.0

    async def status(self, path: str, shown: str) -> Attributes:
        """Attributes with a strong version (one round trip, 2 to 3 ms)."""
        reply = await self._json("GETFILESTATUS", path, shown)
        with self._understood():
            return _attributes(reply["FileStatus"])

    async def under_construction(self, path: str, shown: str) -> bool:
        """Whether some client has the file open for writing."""
        reply = await self._json("GET_BLOCK_LOCATIONS", path, shown, {"offset": 0, "length": 1})
        with self._understood():
            return bool(reply["LocatedBlocks"]["isUnderConstruction"])

    async def block_locations(self, path: str, shown: str, wanted: ByteRange) -> list[BlockLocation]:
        parameters = {"offset": wanted.start, "length": wanted.length}
        reply = await self._json("GETFILEBLOCKLOCATIONS", path, shown, parameters)
        with self._understood():
            return [
                BlockLocation(ByteRange(block["offset"], block["offset"] + block["length"]), tuple(block["hosts"]))
                for block in reply["BlockLocations"].get("BlockLocation", [])
            ]

    async def space(self) -> Space:
        """Raw capacity of all DataNodes, every replica counted, as `hdfs dfsadmin -report` shows it."""
        bean = await self._jmx("Hadoop:service=NameNode,name=FSNamesystemState")
        with self._understood():
            limit = int(bean.get("MaxObjects", 0)) or None  # 0: the NameNode has no limit of names
            return Space(
                total_bytes=int(bean["CapacityTotal"]),
                free_bytes=int(bean["CapacityRemaining"]),
                total_files=limit,
                free_files=None if limit is None else max(0, limit - int(bean["FilesTotal"])),
            )

    async def read_into(
        self, path: str, shown: str, offset: int, buffer: memoryview, avoid: set[str], stall_s: float
    ) -> int:
        """Fill *buffer* from *offset* on through one DataNode; how many bytes arrived before it broke or ended.

        It may deliver nothing for *stall_s* at most.
        A DataNode (HOST:PORT) that failed is added to *avoid*, and the NameNode is asked not to name it again.
        Raises SourceUnavailableError where nothing at all could be read.
        """
        parameters: dict[str, str | int] = {"offset": offset, "length": len(buffer), "noredirect": "true"}
        if avoid:
            parameters["excludedatanodes"] = ",".join(sorted(avoid))
        reply = await self._json("OPEN", path, shown, parameters)
        with self._understood():
            location = str(reply["Location"])
        filled = 0
        try:
            async with self._http().stream("GET", location, timeout=stall_s) as answer:
                if answer.status_code != httpx.codes.OK:
                    await answer.aread()
                    raise _refusal(answer, "read", shown)
                async for piece in answer.aiter_raw():
                    end = min(filled + len(piece), len(buffer))
                    buffer[filled:end] = piece[: end - filled]
                    filled = end
        except (httpx.HTTPError, httpx.InvalidURL, SourceUnavailableError) as error:
            avoid.add(urlsplit(location).netloc)
            if not filled:
                raise SourceUnavailableError(
                    f"cannot read {shown} from DataNode {urlsplit(location).netloc}: {_why(error)}"
                ) from error
        if not filled and len(buffer):
            raise ShortReadError(f"{shown} ends before byte {offset}")
        return filled

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _http(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(
                timeout=self._timeout,
                trust_env=False,  # a proxy for the internet is no way to a cluster's NameNode
                limits=httpx.Limits(max_connections=64, max_keepalive_connections=16, keepalive_expiry=30),
            )
        return self._client

    async def _json(
        self, op: str, path: str, shown: str, parameters: Mapping[str, str | int] = _NO_PARAMETERS
    ) -> dict[str, Any]:
        url = f"/webhdfs/v1{quote(path)}"
        return await self._ask(url, {"op": op, "user.name": self._user, **parameters}, _ACTS[op], shown)

    async def _jmx(self, bean: str) -> dict[str, Any]:
        reply = await self._ask("/jmx", {"qry": bean}, "ask for the space of", self.address)
        with self._understood():
            found: dict[str, Any] = reply["beans"][0]
            return found

    async def _ask(self, url: str, parameters: Mapping[str, str | int], act: str, shown: str) -> dict[str, Any]:
        """One question to the active NameNode, or to whichever is active now."""
        self._require_up()
        failure: TurboError | None = None
        for _ in self._addresses:
            base = self.address
            try:
                reply = await self._http().get(base + url, params=dict(parameters))
                document = reply.json() if reply.status_code == httpx.codes.OK else None
            except (httpx.HTTPError, ValueError) as error:
                failure = SourceUnavailableError(f"{base} does not answer as WebHDFS: {_why(error)}")
            else:
                if isinstance(document, dict):
                    self._down_reason, self._pause_s = "", 0.0
                    return document
                failure = _refusal(reply, act, shown)
                if not isinstance(failure, SourceUnavailableError):
                    self._down_reason, self._pause_s = "", 0.0  # it answered; the answer is no
                    raise failure
            if base == self.address:  # else another question has moved on already: follow it
                self._active = (self._active + 1) % len(self._addresses)
        failure = failure or SourceUnavailableError("no WebHDFS address is known")
        self._leave_alone(failure)
        raise failure

    def _leave_alone(self, failure: TurboError) -> None:
        self._pause_s = min(max(_PAUSE_FIRST_S, 2 * self._pause_s), _PAUSE_LIMIT_S)
        self._retry_at = trio.current_time() + self._pause_s
        self._down_reason = str(failure)

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Inside, a document that lacks what it must have counts as no answer: something else listens there."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            failure = SourceUnavailableError(f"{self.address} does not answer as WebHDFS: {error!r} in its document")
            self._leave_alone(failure)
            raise failure from error

    def _require_up(self) -> None:
        if self._down_reason:
            now = trio.current_time()
            if now < self._retry_at:
                raise SourceUnavailableError(self._down_reason)
            self._retry_at = now + self._pause_s  # this caller tries; the others go on without it meanwhile


def _refusal(reply: httpx.Response, act: str, shown: str) -> TurboError:
    """What an answer other than 200 means."""
    try:
        remote = reply.json()["RemoteException"]
        error = from_java(str(remote["javaClassName"]), str(remote["message"]), act, shown)
    except (ValueError, KeyError, TypeError):
        hint = " (Kerberos is not supported here)" if reply.status_code == httpx.codes.UNAUTHORIZED else ""
        return SourceUnavailableError(f"{reply.url.host}:{reply.url.port} answered HTTP {reply.status_code}{hint}")
    if reply.is_server_error and type(error) is TurboError:
        return SourceUnavailableError(f"WebHDFS at {reply.url.host}:{reply.url.port} is broken: {error}")
    return error


def _attributes(status: Mapping[str, Any]) -> Attributes:
    kind = _KINDS.get(status["type"], FileKind.OTHER)
    is_file = kind is FileKind.FILE
    mtime_ns = status["modificationTime"] * MS
    return Attributes(
        kind,
        FileVersion(status["length"] if is_file else 0, mtime_ns, str(status["fileId"]), append_only=is_file),
        int(status["permission"], 8) & PERMISSION_BITS,
        status["owner"],
        status["group"],
        status["accessTime"] * MS or (0 if is_file else mtime_ns),
        mtime_ns,
        replication=status["replication"],
        block_size=status["blockSize"],
    )


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
