"""Messages of the control socket: a 4-byte big-endian length, then one msgpack map with text keys.

Text that is not UTF-8 (file names may be any bytes) travels as the bytes it stands for, and comes back with
surrogate escapes, as everywhere in TurboFS.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgpack

import turbofs.errors
from turbofs.errors import ProtocolError, TurboError

HEADER = struct.Struct(">I")
REQUEST_LIMIT_BYTES = 1 << 20
REPLY_LIMIT_BYTES = 16 << 20  # a status document of a busy mount; no honest one is near
_DEPTH_LIMIT = 32
_ID_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True)
class Request:
    id: int
    op: str
    args: dict[str, object] = field(default_factory=dict)


def encode(message: Mapping[str, object], *, limit_bytes: int = REPLY_LIMIT_BYTES) -> bytes:
    """One framed message. Raises ProtocolError where it is too long, or holds what msgpack cannot carry."""
    try:
        payload: bytes = msgpack.packb(message, unicode_errors="surrogateescape", strict_types=False)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"cannot encode a message: {error}") from error
    if len(payload) > limit_bytes:
        raise ProtocolError(f"a message of {len(payload)} bytes exceeds the limit of {limit_bytes}")
    return HEADER.pack(len(payload)) + payload


def frame_length(header: bytes, *, limit_bytes: int) -> int:
    """The payload's length from the 4 bytes before it. Raises ProtocolError above *limit_bytes*, before any is read."""
    length: int = HEADER.unpack(header)[0]
    if length > limit_bytes:
        raise ProtocolError(f"a message of {length} bytes exceeds the limit of {limit_bytes}")
    return length


def decode(payload: bytes) -> dict[str, object]:
    """The map in *payload*: None, bool, int, float, str, bytes, lists and maps of them. Raises ProtocolError."""
    try:
        message = msgpack.unpackb(payload, raw=False, unicode_errors="surrogateescape", ext_hook=_refuse_extension)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not one msgpack map: {error}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"not a msgpack map but {type(message).__name__}")
    _check(message, _DEPTH_LIMIT)
    return message


def parse_request(message: Mapping[str, object]) -> Request:
    """The request in *message*. Raises ProtocolError naming the field that is missing, wrong or unknown."""
    request_id, op, args = message.get("id"), message.get("op"), message.get("args", {})
    if not isinstance(request_id, int) or isinstance(request_id, bool) or not 0 <= request_id < _ID_LIMIT:
        raise ProtocolError("a request needs an `id` from 0 to 2^63 - 1")
    if not isinstance(op, str) or not op or len(op) > 64:
        raise ProtocolError("a request needs an `op`, a short text")
    if not isinstance(args, dict):
        raise ProtocolError("`args` must be a map")
    unknown = sorted(set(message) - {"id", "op", "args"})
    if unknown:
        raise ProtocolError(f"unknown fields in a request: {', '.join(map(repr, unknown))}")
    return Request(request_id, op, args)


def request_id_of(message: Mapping[str, object]) -> int | None:
    """The id to answer a malformed request with; None where it has none that can be trusted."""
    request_id = message.get("id")
    usable = isinstance(request_id, int) and not isinstance(request_id, bool) and 0 <= request_id < _ID_LIMIT
    return request_id if usable and isinstance(request_id, int) else None


def success(request_id: int, result: object, *, descriptor: bool = False) -> dict[str, object]:
    """A reply; *descriptor* says that a file descriptor travels with its first byte."""
    reply: dict[str, object] = {"id": request_id, "ok": True, "result": result}
    return reply | {"descriptor": True} if descriptor else reply


def failure(request_id: int | None, error: TurboError) -> dict[str, object]:
    """A reply that carries *error*: its errno's name, its message, and for our own client its class and advice."""
    code = errno.errorcode.get(error.errno, "EIO")
    body = {"code": code, "message": str(error), "kind": type(error).__name__, "advice": error.advice}
    return {"id": request_id, "ok": False, "error": body}


def raised_by_reply(body: object) -> TurboError:
    """The error that the `error` map of a reply stands for; a class that this version does not know is a TurboError."""
    if not isinstance(body, dict):
        return ProtocolError("a reply without its error")
    known = getattr(turbofs.errors, str(body.get("kind")), None)
    kind = known if isinstance(known, type) and issubclass(known, TurboError) else TurboError
    advice = body.get("advice")
    error = kind(str(body.get("message")), advice=advice if isinstance(advice, str) else None)
    error.errno = getattr(errno, str(body.get("code")), error.errno)
    return error


def _refuse_extension(code: int, data: bytes) -> object:
    raise ValueError(f"extension type {code} of {len(data)} bytes")


def _check(value: object, depth: int) -> None:
    if depth == 0:
        raise ProtocolError(f"nested more than {_DEPTH_LIMIT} deep")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ProtocolError("a map's keys must be texts")
            _check(item, depth - 1)
    elif isinstance(value, list):
        for item in value:
            _check(item, depth - 1)
    elif value is not None and not isinstance(value, bool | int | float | str | bytes):
        raise ProtocolError(f"a value of type {type(value).__name__}")
