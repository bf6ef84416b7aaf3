"""What the control socket's operations mean: checks the arguments, asks the file system, shapes the answer.

Everybody may ask for status; hints, prefetches and `open` are for those who may read the file (the file system
checks); a job is waited for and cancelled by whoever started it, the mount's own user, or root.
"""

from __future__ import annotations

import os
import posixpath
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import trio

from turbofs import __version__
from turbofs.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NotPermittedError,
    NotSupportedError,
    ProtocolError,
    TurboError,
)
from turbofs.fs.events import EventBus
from turbofs.fs.permissions import oversees
from turbofs.model import ByteRange, Caller
from turbofs.wire.control_codec import Request
from turbofs.wire.control_server import Answer

DURABILITY_LEVELS = ("open", "staged", "replicated", "persisted")
_LATER_OPS = frozenset({"group.open", "group.seal", "group.wait"})
_PATIENT_OPS = frozenset({"wait", "subscribe"})
_POLL_FIRST_S, _POLL_LIMIT_S = 0.02, 0.5
_T = TypeVar("_T")


class PrefetchJob(Protocol):
    """A prefetch in the background. `state` is running, done, partial, failed or cancelled."""

    @property
    def id(self) -> int: ...
    @property
    def owner_uid(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def wanted_bytes(self) -> int: ...
    @property
    def done_bytes(self) -> int: ...
    @property
    def state(self) -> str: ...
    @property
    def error(self) -> str | None: ...
    async def wait(self) -> None:
        """Return when the job has ended, however it did."""

    def cancel(self) -> None: ...


class ControlledFileSystem(Protocol):
    """The part of the file system that the control socket reaches."""

    def status(self, caller: Caller | None) -> dict[str, object]: ...
    async def file_status(self, path: str, caller: Caller) -> dict[str, object]: ...
    async def set_hint(self, path: str, name: str, value: bytes, caller: Caller) -> None: ...
    async def start_prefetch(self, path: str, ranges: Sequence[ByteRange] | None, caller: Caller) -> PrefetchJob: ...
    def prefetch_job(self, job_id: int) -> PrefetchJob:
        """A job that runs or ended lately, however it was started. Raises NotFoundError."""
        ...

    async def durability(self, path: str, caller: Caller) -> str: ...
    async def local_descriptor(self, path: str, caller: Caller) -> int:
        """A read-only descriptor of a complete local copy; raises NotSupportedError where there is none."""
        ...

    @property
    def events(self) -> EventBus: ...


class ControlOps:
    """The handler behind a mount's control socket. *identity* is what `ping` tells: source and mount point.

    An operation that does not wait by its meaning is bounded by *deadline_s*, as requests of the kernel are.
    """

    def __init__(
        self, filesystem: ControlledFileSystem, identity: dict[str, object], *, deadline_s: float = 60.0
    ) -> None:
        self._filesystem = filesystem
        self._deadline_s = deadline_s
        self._identity = {"version": __version__, "pid": os.getpid(), "started": time.time(), **identity}
        self._ops: dict[str, Callable[[_Arguments, Caller], Awaitable[Answer]]] = {
            "ping": self._ping,
            "status": self._status,
            "hint": self._hint,
            "prefetch": self._prefetch,
            "cancel": self._cancel,
            "wait": self._wait,
            "open": self._open,
            "subscribe": self._subscribe,
        }

    async def handle(self, request: Request, caller: Caller) -> Answer:
        if request.op in _LATER_OPS:
            raise NotSupportedError(
                f"`{request.op}`: this mount has no groups", advice="groups come with writing, in a later release"
            )
        op = self._ops.get(request.op)
        if op is None:
            raise ProtocolError(f"unknown operation {request.op!r}; known: {', '.join(self._ops)}")
        if request.op in _PATIENT_OPS:
            return await op(_Arguments(request), caller)
        try:
            with trio.fail_after(self._deadline_s):
                return await op(_Arguments(request), caller)
        except trio.TooSlowError as error:
            raise DeadlineExceededError(
                f"`{request.op}`: the source did not answer in {self._deadline_s:g} s"
            ) from error

    async def _ping(self, arguments: _Arguments, _caller: Caller) -> Answer:
        arguments.none_left()
        return Answer(dict(self._identity))

    async def _status(self, arguments: _Arguments, caller: Caller) -> Answer:
        path = arguments.optional_path()
        arguments.none_left()
        if path is not None:
            return Answer(await self._filesystem.file_status(path, caller))
        return Answer({"daemon": dict(self._identity)} | self._filesystem.status(caller))

    async def _hint(self, arguments: _Arguments, caller: Caller) -> Answer:
        path, name = arguments.path(), arguments.take("name", str)
        value = arguments.take("value", bytes)
        arguments.none_left()
        await self._filesystem.set_hint(path, name, value, caller)
        return Answer()

    async def _prefetch(self, arguments: _Arguments, caller: Caller) -> Answer:
        path, ranges = arguments.path(), arguments.ranges()
        arguments.none_left()
        job = await self._filesystem.start_prefetch(path, ranges, caller)
        return Answer(_job_document(job))

    async def _cancel(self, arguments: _Arguments, caller: Caller) -> Answer:
        job = self._job(arguments.take("job", int), caller)
        arguments.none_left()
        job.cancel()
        return Answer(_job_document(job))

    async def _wait(self, arguments: _Arguments, caller: Caller) -> Answer:
        """For a job: its document when it has ended, or as it is at the time limit. For a path: its durability."""
        timeout_s = arguments.seconds("timeout_s")
        job_id = arguments.take_optional("job", int)
        if job_id is not None:
            arguments.none_left()
            job = self._job(job_id, caller)
            with trio.move_on_after(timeout_s):
                await job.wait()
            return Answer(_job_document(job))
        path, until = arguments.path(), arguments.take_optional("until", str) or "persisted"
        arguments.none_left()
        return Answer({"path": path, "durability": await self._wait_durable(path, until, timeout_s, caller)})

    async def _wait_durable(self, path: str, until: str, timeout_s: float, caller: Caller) -> str:
        if until not in DURABILITY_LEVELS[1:]:
            raise InvalidRequestError(f"unknown level {until!r}", advice=f"one of {', '.join(DURABILITY_LEVELS[1:])}")
        deadline, pause_s = trio.current_time() + timeout_s, _POLL_FIRST_S
        while True:
            level = await self._filesystem.durability(path, caller)
            if level == "broken":
                raise TurboError(f"{path} is broken: it will not become {until}", advice="see user.turbofs.last_error")
            if DURABILITY_LEVELS.index(level) >= DURABILITY_LEVELS.index(until):
                return level
            if trio.current_time() + pause_s > deadline:
                raise DeadlineExceededError(f"{path} is still {level!r}", advice="wait longer with --timeout")
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_LIMIT_S)

    async def _open(self, arguments: _Arguments, caller: Caller) -> Answer:
        path = arguments.path()
        arguments.none_left()
        return Answer({"path": path}, descriptor=await self._filesystem.local_descriptor(path, caller))

    async def _subscribe(self, arguments: _Arguments, caller: Caller) -> Answer:
        arguments.none_left()
        return Answer(events=self._filesystem.events.subscribe(caller.uid))

    def _job(self, job_id: int, caller: Caller) -> PrefetchJob:
        job = self._filesystem.prefetch_job(job_id)
        if not oversees(caller.uid, job.owner_uid):
            raise NotPermittedError(
                f"job {job.id} is user {job.owner_uid}'s", advice="its owner and root may wait for it and cancel it"
            )
        return job


@dataclass(slots=True)
class _Arguments:
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

    def optional_path(self) -> str | None:
        path = self.take_optional("path", str)
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


def _job_document(job: PrefetchJob) -> dict[str, object]:
    return {
        "job": job.id,
        "path": job.path,
        "wanted_bytes": job.wanted_bytes,
        "done_bytes": job.done_bytes,
        "state": job.state,
        "error": job.error,
    }
