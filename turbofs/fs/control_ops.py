"""What the control socket's operations mean: checks the arguments, asks the file system, shapes the answer.

Everybody may ask for status; hints, prefetches and `open` are for those who may read the file (the file system
checks); a job is waited for and cancelled by whoever started it, the mount's own user, or root; parked bytes are for
those and their owner.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import trio

from turbofs import __version__
from turbofs.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    NotPermittedError,
    NotSupportedError,
    ProtocolError,
    TurboError,
)
from turbofs.fs.control_arguments import Arguments
from turbofs.fs.events import EventBus
from turbofs.fs.permissions import oversees
from turbofs.model import ByteRange, Caller
from turbofs.wire.control_codec import Request
from turbofs.wire.control_server import Answer

DURABILITY_LEVELS = ("open", "staged", "replicated", "persisted")
_CONFLICT_ACTS = ("show", "publish", "drop")
_LATER_OPS = frozenset({"group.open", "group.seal", "group.wait"})
_PATIENT_OPS = frozenset({"wait", "subscribe"})
_LOOK_S = 2.0  # what one look at the durability of a file may take beyond the time limit: it may ask the source
_LEAST_PAUSE_S = 0.02  # between two looks: a job that saves thousands of files changes something all the time


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

    async def durability(self, path: str, caller: Caller) -> str:
        """One of DURABILITY_LEVELS, or "broken"; of a directory the worst of what is under it. Raises NotFoundError."""
        ...

    def durability_changed(self) -> trio.Event:
        """Set when the durability of any file changes after this call."""
        ...

    def broken_reason(self, path: str) -> str | None:
        """Why *path*, or the first broken file under it, is broken; None where nothing is, or nobody knows."""
        ...

    async def conflicts(self, caller: Caller) -> list[dict[str, object]]:
        """What was parked because it could not be published, of which *caller* may know, oldest first.

        Each with `id`, `path` (where it was to go), `size`, `reason`, `parked_at` (seconds since the epoch), `blake3`
        and `hidden` (the path in the mount at which its bytes can be read).
        """
        ...

    async def publish_conflict(self, conflict_id: int, to: str | None, caller: Caller) -> dict[str, object]:
        """Publish parked bytes at *to*, or where they were to go, replacing what is there; may take long.

        Returns `id`, `path`, `size` and `replaced`: None, or the `size` and `mtime` (seconds since the epoch) of what was
        there. Raises NotFoundError, NotPermittedError, and whatever keeps the bytes from being published.
        """
        ...

    async def drop_conflict(self, conflict_id: int, caller: Caller) -> None:
        """Delete parked bytes. Raises NotFoundError or NotPermittedError."""
        ...

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
        self._ops: dict[str, Callable[[Arguments, Caller], Awaitable[Answer]]] = {
            "ping": self._ping,
            "status": self._status,
            "hint": self._hint,
            "prefetch": self._prefetch,
            "cancel": self._cancel,
            "wait": self._wait,
            "conflicts": self._conflicts,
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
        # Publishing parked bytes takes as long as writing them does.
        patient = request.op in _PATIENT_OPS or (request.op == "conflicts" and request.args.get("act") == "publish")
        if patient:
            return await op(Arguments(request), caller)
        try:
            with trio.fail_after(self._deadline_s):
                return await op(Arguments(request), caller)
        except trio.TooSlowError as error:
            raise DeadlineExceededError(
                f"`{request.op}`: the source did not answer in {self._deadline_s:g} s"
            ) from error

    async def _ping(self, arguments: Arguments, _caller: Caller) -> Answer:
        arguments.none_left()
        return Answer(dict(self._identity))

    async def _status(self, arguments: Arguments, caller: Caller) -> Answer:
        path = arguments.optional_path()
        arguments.none_left()
        if path is not None:
            return Answer(await self._filesystem.file_status(path, caller))
        return Answer({"daemon": dict(self._identity)} | self._filesystem.status(caller))

    async def _hint(self, arguments: Arguments, caller: Caller) -> Answer:
        path, name = arguments.path(), arguments.take("name", str)
        value = arguments.take("value", bytes)
        arguments.none_left()
        await self._filesystem.set_hint(path, name, value, caller)
        return Answer()

    async def _prefetch(self, arguments: Arguments, caller: Caller) -> Answer:
        path, ranges = arguments.path(), arguments.ranges()
        arguments.none_left()
        job = await self._filesystem.start_prefetch(path, ranges, caller)
        return Answer(_job_document(job))

    async def _cancel(self, arguments: Arguments, caller: Caller) -> Answer:
        job = self._job(arguments.take("job", int), caller)
        arguments.none_left()
        job.cancel()
        return Answer(_job_document(job))

    async def _wait(self, arguments: Arguments, caller: Caller) -> Answer:
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
        deadline = trio.current_time() + timeout_s
        while True:
            # Taken before the look, so that no change falls between the two.
            changed = self._filesystem.durability_changed()
            with trio.move_on_at(max(deadline, trio.current_time() + _LOOK_S)) as look:
                level = await self._filesystem.durability(path, caller)
            if look.cancelled_caught:
                raise DeadlineExceededError(f"{path}: no answer about it in time; the source may be down")
            if level == "broken":
                raise TurboError(
                    f"{path} is broken: {self._filesystem.broken_reason(path) or 'no reason is known'}",
                    advice="`turbofs conflicts ls` shows whether its bytes were kept; save it again",
                )
            if DURABILITY_LEVELS.index(level) >= DURABILITY_LEVELS.index(until):
                return level
            with trio.move_on_at(deadline) as waiting:
                await trio.sleep(_LEAST_PAUSE_S)
                await changed.wait()
            if waiting.cancelled_caught:
                raise DeadlineExceededError(f"{path} is still {level!r}", advice="wait longer with --timeout")

    async def _conflicts(self, arguments: Arguments, caller: Caller) -> Answer:
        act = arguments.take("act", str)
        if act == "ls":
            arguments.none_left()
            return Answer({"conflicts": await self._filesystem.conflicts(caller)})
        if act not in _CONFLICT_ACTS:
            raise InvalidRequestError(f"unknown act {act!r}", advice=f"one of {', '.join(('ls', *_CONFLICT_ACTS))}")
        conflict_id = arguments.take("id", int)
        to = arguments.optional_path("to") if act == "publish" else None
        arguments.none_left()
        if act == "publish":
            return Answer(await self._filesystem.publish_conflict(conflict_id, to, caller))
        if act == "drop":
            await self._filesystem.drop_conflict(conflict_id, caller)
            return Answer({"id": conflict_id})
        for found in await self._filesystem.conflicts(caller):
            if found["id"] == conflict_id:
                return Answer(found)
        raise NotFoundError(f"no conflict {conflict_id} that you may see", advice="`turbofs conflicts ls` lists them")

    async def _open(self, arguments: Arguments, caller: Caller) -> Answer:
        path = arguments.path()
        arguments.none_left()
        return Answer({"path": path}, descriptor=await self._filesystem.local_descriptor(path, caller))

    async def _subscribe(self, arguments: Arguments, caller: Caller) -> Answer:
        arguments.none_left()
        return Answer(events=self._filesystem.events.subscribe(caller.uid))

    def _job(self, job_id: int, caller: Caller) -> PrefetchJob:
        job = self._filesystem.prefetch_job(job_id)
        if not oversees(caller.uid, job.owner_uid):
            raise NotPermittedError(
                f"job {job.id} is user {job.owner_uid}'s", advice="its owner and root may wait for it and cancel it"
            )
        return job


def _job_document(job: PrefetchJob) -> dict[str, object]:
    return {
        "job": job.id,
        "path": job.path,
        "wanted_bytes": job.wanted_bytes,
        "done_bytes": job.done_bytes,
        "state": job.state,
        "error": job.error,
    }
