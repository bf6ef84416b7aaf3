"""The control socket's client: plain blocking calls, each with a deadline, safe to use from any program.

It imports neither trio nor a framework, so that `turbofs status` starts at once and a training process can use it.
One client serves one thread; open another for a second one, and after a fork.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from turbofs.errors import DeadlineExceededError, NotReachableError, ProtocolError
from turbofs.wire import control_codec as codec

DEFAULT_TIMEOUT_S = 10.0


class ControlClient:
    """A connection to the daemon that listens on *path*. Raises NotReachableError where none does."""

    def __init__(self, path: Path, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._path = path
        self._next_id = 0
        self._received = bytearray()
        self._descriptors: deque[int] = deque()
        self._events: deque[dict[str, object]] = deque()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(os.fspath(path))
        except TimeoutError:
            self._socket.close()
            raise DeadlineExceededError(f"the daemon at {path} does not accept connections") from None
        except OSError as error:
            self._socket.close()
            raise NotReachableError(f"no daemon answers at {path}: {error.strerror or error}") from error

    def call(self, op: str, args: dict[str, object] | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> object:
        """The result of *op*. Raises the TurboError that the daemon answers, or DeadlineExceededError.

        After a deadline the connection is closed: its late answer would be taken for another one's.
        """
        reply = self._exchange(op, args or {}, timeout_s)
        if reply.get("descriptor"):
            os.close(self._take_descriptor())
        return reply.get("result")

    def open(self, path: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """A read-only file descriptor of the complete local copy of *path*, which the caller closes.

        Raises NotSupportedError where there is no such copy.
        """
        reply = self._exchange("open", {"path": path}, timeout_s)
        if not reply.get("descriptor"):
            raise ProtocolError(f"{self._path}: the reply to `open` carries no descriptor")
        return self._take_descriptor()

    def events(self) -> Iterator[dict[str, object]]:
        """Subscribe, then yield events until the daemon ends or drops this subscriber; waits without limit."""
        self.call("subscribe")
        while True:
            if self._events:
                yield self._events.popleft()
                continue
            try:
                message = self._next_message(None)
            except NotReachableError:
                return
            if "event" in message:
                self._events.append(message)

    def close(self) -> None:
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _exchange(self, op: str, args: dict[str, object], timeout_s: float) -> dict[str, object]:
        deadline = time.monotonic() + timeout_s
        self._next_id += 1
        request = codec.encode({"id": self._next_id, "op": op, "args": args}, limit_bytes=codec.REQUEST_LIMIT_BYTES)
        try:
            self._send(request, deadline)
            while (reply := self._next_message(deadline)).get("id") != self._next_id:
                if "event" in reply:
                    self._events.append(reply)
                elif reply.get("id") is None:
                    raise codec.raised_by_reply(reply.get("error"))
        except TimeoutError:
            self.close()
            raise DeadlineExceededError(
                f"the daemon at {self._path} did not answer `{op}` within {timeout_s:g} s",
                advice="it may wait for its source; `turbofs doctor` tests each part",
            ) from None
        if reply.get("ok") is not True:
            raise codec.raised_by_reply(reply.get("error"))
        return reply

    def _send(self, data: bytes, deadline: float) -> None:
        self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
        # A daemon that refuses a message closes the connection, perhaps before all of it is sent; what it
        # answered before says why, and is read next.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)

    def _next_message(self, deadline: float | None) -> dict[str, object]:
        header = self._exactly(codec.HEADER.size, deadline)
        return codec.decode(self._exactly(codec.frame_length(header, limit_bytes=codec.REPLY_LIMIT_BYTES), deadline))

    def _exactly(self, count: int, deadline: float | None) -> bytes:
        while len(self._received) < count:
            self._receive(deadline)
        data = bytes(self._received[:count])
        del self._received[:count]
        return data

    def _receive(self, deadline: float | None) -> None:
        remaining_s = None if deadline is None else deadline - time.monotonic()
        if remaining_s is not None and remaining_s <= 0:
            raise TimeoutError
        self._socket.settimeout(remaining_s)
        size = array.array("i").itemsize
        try:
            data, ancillary, _, _ = self._socket.recvmsg(1 << 16, socket.CMSG_SPACE(size), socket.MSG_CMSG_CLOEXEC)
        except ConnectionError as error:
            raise NotReachableError(f"the daemon at {self._path} closed the connection") from error
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(content[: len(content) - len(content) % size])
                self._descriptors.extend(descriptors)
        if not data:
            raise NotReachableError(f"the daemon at {self._path} closed the connection")
        self._received += data

    def _take_descriptor(self) -> int:
        if not self._descriptors:
            raise ProtocolError(f"{self._path}: a reply announced a descriptor that did not come")
        return self._descriptors.popleft()
