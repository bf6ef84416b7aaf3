"""The arguments of a request on the control socket, checked one by one; what nobody asked for is refused."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import TypeVar

from turbofs.errors import InvalidRequestError, ProtocolError
from turbofs.model import ByteRange
from turbofs.wire.control_codec import Request

_T = TypeVar("_T")


@dataclass(slots=True)
class Arguments:
    """The `args` of a request, taken one by one with their types; what is left at the end is refused."""

    request: Request

    def take(self, name: str, kind: type[_T]) -> _T:
        value = self.take_optional(name, kind)
        if value is None:
            raise ProtocolError(f"`{self.request.op}` needs `{name}`")
        return value

    def take_optional(self, name: str, kind: type[_T]) -> _T | None:
        value = self.request.args.pop(name, None)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise ProtocolError(f"`{self.request.op}`: `{name}` must be {kind.__name__}, not {type(value).__name__}")
        return value

    def seconds(self, name: str) -> float:
        value = self.request.args.pop(name, None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e6:
            raise ProtocolError(f"`{self.request.op}` needs `{name}`, a number of seconds")
        return float(value)

    def path(self) -> str:
        return _checked_path(self.take("path", str))

    def optional_path(self, name: str = "path") -> str | None:
        path = self.take_optional(name, str)
        return None if path is None else _checked_path(path)

    def ranges(self) -> list[ByteRange] | None:
        """`ranges`: [[start, stop], …]; None where it is absent."""
        pairs = self.take_optional("ranges", list)
        if pairs is None:
            return None
        try:
            return [ByteRange(int(start), int(stop)) for start, stop in pairs]
        except (TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"`ranges` must be pairs [start, stop) of bytes: {error}") from error

    def none_left(self) -> None:
        if self.request.args:
            raise ProtocolError(f"`{self.request.op}` does not know {', '.join(map(repr, sorted(self.request.args)))}")


def _checked_path(path: str) -> str:
    if not path.startswith("/") or "\0" in path or posixpath.normpath(path) != path:
        raise InvalidRequestError(f"{path!r} is not a path below the mount", advice="as /checkpoint/file, without ..")
    return path
