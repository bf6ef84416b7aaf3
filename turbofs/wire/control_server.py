"""The control socket's server: frames in, a handler's answers out. It knows no operation itself.

One client cannot harm another: connections and requests in flight are bounded, a frame that has begun must end within
a time limit, a client that does not read its replies or its events is cut off, and whatever is malformed gets an
error reply or a closed connection.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog
import trio

from turbofs.errors import BusyError, MountError, ProtocolError, TurboError
from turbofs.model import Caller
from turbofs.wire import control_codec as codec

_log = structlog.get_logger(__name__)
_SO_PEERGROUPS = 59  # not in Python's socket module; the same number on x86-64 and arm64


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may use; the reason beside each."""

    connections: int = 256
    connections_per_user: int = 64
    """A node's eight ranks with eight workers each; root is exempt, so that an operator always gets in."""
    requests_per_connection: int = 32
    frame_s: float = 10.0
    """From a frame's first byte to its last, and for a reply to be taken."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a handler returns; the server closes `descriptor` once it is passed on, and forwards `events` to their end."""

    result: object = None
    descriptor: int | None = None
    events: trio.MemoryReceiveChannel[dict[str, object]] | None = None


class Handler(Protocol):
    async def handle(self, request: codec.Request, caller: Caller) -> Answer:
        """Answer *request* of the process *caller* (the socket's peer credentials), or raise a TurboError."""
        ...


class ControlServer:
    """Serves *handler* on a Unix stream socket at *path*."""

    def __init__(self, path: Path, handler: Handler, limits: Limits | None = None) -> None:
        self._path = path
        self._handler = handler
        self._limits = limits or Limits()
        self._connections: Counter[int] = Counter()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled; the socket file is there once this has started. Raises MountError."""
        with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            try:
                await listener.bind(os.fspath(self._path))
                self._path.chmod(0o666)  # credentials decide what each client may do
                listener.listen(64)
            except OSError as error:
                raise MountError(f"cannot listen on {self._path}: {error.strerror}") from error
            try:
                async with trio.open_nursery() as nursery:
                    task_status.started()
                    while True:
                        connection = await _accept(listener)
                        nursery.start_soon(self._serve_connection, connection)
            finally:
                self._path.unlink(missing_ok=True)

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return self._connections.total()

    async def _serve_connection(self, connection: trio.socket.SocketType) -> None:
        with connection:
            try:
                caller = _credentials(connection)
                async with self._admitted(caller, connection):
                    await _Connection(connection, caller, self._handler, self._limits).serve()
            except* (OSError, trio.TooSlowError, trio.BrokenResourceError) as errors:
                _log.debug("control connection lost", error=str(errors.exceptions[0]))
            except* Exception:  # noqa: BLE001 - the reason is the next line
                # A defect in one request must not end the mount; the connection it came over is closed.
                _log.exception("control connection failed")

    @asynccontextmanager
    async def _admitted(self, caller: Caller, connection: trio.socket.SocketType) -> AsyncIterator[None]:
        mine, limits = self._connections[caller.uid], self._limits
        if caller.uid != 0 and (mine >= limits.connections_per_user or self.connections >= limits.connections):
            error = BusyError("too many connections to this control socket", advice="close some, or try again")
            with trio.move_on_after(limits.frame_s):
                await connection.send(codec.encode(codec.failure(None, error)))
            raise trio.BrokenResourceError("too many connections")
        self._connections[caller.uid] += 1
        try:
            yield
        finally:
            self._connections[caller.uid] -= 1
            if not self._connections[caller.uid]:
                del self._connections[caller.uid]


class _Connection:
    def __init__(self, connection: trio.socket.SocketType, caller: Caller, handler: Handler, limits: Limits) -> None:
        self._socket = connection
        self._caller = caller
        self._handler = handler
        self._limits = limits
        self._sending = trio.Lock()
        self._in_flight = 0

    async def serve(self) -> None:
        """Answer requests until the peer closes; what still runs then is cancelled."""
        async with trio.open_nursery() as nursery:
            while (payload := await self._receive()) is not None:
                await self._dispatch(payload, nursery)
            nursery.cancel_scope.cancel()

    async def _receive(self) -> bytes | None:
        """The next frame's payload; None at the end, also where what comes cannot be a frame."""
        first = await self._socket.recv(codec.HEADER.size)
        if not first:
            return None
        with trio.fail_after(self._limits.frame_s):
            header = first + await self._exactly(codec.HEADER.size - len(first))
            try:
                length = codec.frame_length(header, limit_bytes=codec.REQUEST_LIMIT_BYTES)
            except ProtocolError as error:
                # There is no way to find the next frame: answer, then close.
                await self._send(codec.failure(None, error))
                return None
            return await self._exactly(length)

    async def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = await self._socket.recv(min(count - len(parts), 1 << 16))
            if not part:
                raise trio.BrokenResourceError("the peer closed within a frame")
            parts += part
        return bytes(parts)

    async def _dispatch(self, payload: bytes, nursery: trio.Nursery) -> None:
        request_id = None
        try:
            message = codec.decode(payload)
            request_id = codec.request_id_of(message)
            request = codec.parse_request(message)
            if self._in_flight >= self._limits.requests_per_connection:
                raise BusyError(
                    f"{self._in_flight} requests of this connection wait for answers", advice="wait for some"
                )
        except TurboError as error:
            await self._send(codec.failure(request_id, error))
            return
        self._in_flight += 1
        nursery.start_soon(self._answer, request, nursery)

    async def _answer(self, request: codec.Request, nursery: trio.Nursery) -> None:
        try:
            answer = await self._handler.handle(request, self._caller)
        except TurboError as error:
            await self._send(codec.failure(request.id, error))
        except Exception:  # noqa: BLE001 - answered and logged, and the next request is served
            _log.exception("control request failed", op=request.op)
            await self._send(codec.failure(request.id, TurboError("the daemon failed on this request; see its log")))
        else:
            await self._send_answer(request.id, answer)
            if answer.events is not None:
                nursery.start_soon(self._forward, answer.events, nursery.cancel_scope)
        finally:
            self._in_flight -= 1

    async def _send_answer(self, request_id: int, answer: Answer) -> None:
        try:
            reply = codec.success(request_id, answer.result, descriptor=answer.descriptor is not None)
            await self._send(reply, answer.descriptor)
        except ProtocolError as error:
            await self._send(codec.failure(request_id, error))
        finally:
            if answer.descriptor is not None:
                os.close(answer.descriptor)

    async def _forward(self, events: trio.MemoryReceiveChannel[dict[str, object]], scope: trio.CancelScope) -> None:
        async with events:
            async for event in events:
                await self._send(event)
        # Whoever publishes ends a queue that has run full: the subscriber must know that it missed something.
        await self._send({"event": "dropped", "reason": "this subscriber does not keep up"})
        scope.cancel()

    async def _send(self, message: dict[str, object], descriptor: int | None = None) -> None:
        data = memoryview(codec.encode(message))
        with trio.fail_after(self._limits.frame_s):
            async with self._sending:
                if descriptor is not None:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]).tobytes())]
                    data = data[await self._socket.sendmsg([data], rights) :]
                while data:
                    data = data[await self._socket.send(data) :]


async def _accept(listener: trio.socket.SocketType) -> trio.socket.SocketType:
    while True:
        try:
            connection, _ = await listener.accept()
            return connection
        except OSError as error:
            if error.errno not in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED}:
                raise
            _log.warning("cannot accept a control connection", error=str(error))
            await trio.sleep(0.2)


def _credentials(connection: trio.socket.SocketType) -> Caller:
    """Who connected, as the kernel recorded it then: no process id can be reused in between."""
    layout = struct.Struct("3i")
    pid, uid, gid = layout.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size))
    groups: array.array[int] = array.array("I")
    with contextlib.suppress(OSError):
        groups.frombytes(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1024))  # as much as Python takes
    return Caller(uid, gid, pid, frozenset(groups))
