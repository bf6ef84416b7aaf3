"""Prefetches that hints ask for: each a job in the background, with the file held open while it runs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import structlog
import trio

from turbofs.background import Background
from turbofs.errors import InvalidRequestError, NotFoundError, OutOfMemoryBudgetError, TurboError
from turbofs.fs.events import EventBus
from turbofs.fs.files import FileOpener
from turbofs.fs.handles import ReadHandle
from turbofs.fs.inodes import Inode
from turbofs.fs.permissions import READ
from turbofs.fs.tree import Tree
from turbofs.metrics import Metrics
from turbofs.model import ByteRange, Caller
from turbofs.read.fetcher import Fetcher
from turbofs.read.prefetch_job import JobState, PrefetchJob

_log = structlog.get_logger(__name__)
_MOST_RUNNING = 1024
"""Each holds a file open; a loop over more files than that should wait for some of them."""
_FINISHED_KEPT = 256


class Prefetches:
    """All prefetch jobs of a mount, running and recently finished."""

    def __init__(
        self,
        tree: Tree,
        files: FileOpener,
        fetcher: Fetcher,
        background: Background,
        metrics: Metrics,
        events: EventBus,
        extent_bytes: int,
    ) -> None:
        self._tree = tree
        self._files = files
        self._fetcher = fetcher
        self._background = background
        self._metrics = metrics
        self._events = events
        self._extent_bytes = extent_bytes
        self._jobs: OrderedDict[int, PrefetchJob] = OrderedDict()

    async def start(self, path: str, ranges: Sequence[ByteRange] | None, caller: Caller) -> PrefetchJob:
        """Fetch *ranges* of *path* (None: all of it) for *caller*, who must be allowed to read it.

        Raises InvalidRequestError for a range outside the file, NotFoundError, AccessDeniedError, and
        OutOfMemoryBudgetError where too many jobs run already.
        """
        inode = await self._tree.resolve(path, caller, wanted=READ)
        try:
            return await self.start_for(inode, ranges, caller)
        finally:
            self._tree.give_back(inode)

    async def start_for(self, inode: Inode, ranges: Sequence[ByteRange] | None, caller: Caller) -> PrefetchJob:
        """As `start`, for an inode that the caller of this holds."""
        path = inode.path
        handle, _ = await self._files.open(inode)
        try:
            size = handle.reader.version.size
            wanted = [ByteRange(0, size)] if ranges is None else list(ranges)
            outside = next((each for each in wanted if each.stop > size or not each.length), None)
            if outside is not None and ranges is not None:
                raise InvalidRequestError(
                    f"[{outside.start}, {outside.stop}) is empty or outside the {size} bytes of {path}",
                    advice="ranges are offset+length inside the file",
                )
            return self._begin(path, handle, wanted, caller)
        except BaseException:
            await self._files.close(handle)
            raise

    async def follow(self, opened: ReadHandle, ranges: Sequence[ByteRange], caller: Caller) -> None:
        """Act on a hint that holds for a file that is being opened. Never raises TurboError: the open goes on."""
        handle = self._files.share(opened)
        try:
            self._begin(opened.inode.path, handle, ranges, caller)
        except TurboError as error:
            _log.info("hint not followed", path=opened.inode.path, reason=str(error))
            await self._files.close(handle)

    def _begin(self, path: str, handle: ReadHandle, wanted: Sequence[ByteRange], caller: Caller) -> PrefetchJob:
        if len(self.running()) >= _MOST_RUNNING:
            raise OutOfMemoryBudgetError(
                f"{_MOST_RUNNING} prefetches are running already", advice="wait for some, or cancel them"
            )
        job = PrefetchJob(path, caller.uid, _merged(wanted))
        self._jobs[job.id] = job
        self._forget_finished()
        self._metrics.prefetch_wanted_bytes.inc(job.wanted_bytes)
        self._background.start_soon(self._run, job, handle)
        return job

    def running(self) -> list[PrefetchJob]:
        return [job for job in self._jobs.values() if job.state is JobState.RUNNING]

    def job(self, job_id: int) -> PrefetchJob:
        """A job that runs or ended lately. Raises NotFoundError."""
        try:
            return self._jobs[job_id]
        except KeyError:
            raise NotFoundError(f"no job {job_id}", advice="finished jobs are forgotten after a while") from None

    def of(self, path: str) -> list[PrefetchJob]:
        """The jobs of one path, the newest last."""
        return [job for job in self._jobs.values() if job.path == path]

    def cancel_all(self) -> None:
        for job in self._jobs.values():
            job.cancel()

    async def _run(self, job: PrefetchJob, handle: ReadHandle) -> None:
        self._events.publish("prefetch_started", owner_uid=job.owner_uid, **job.as_dict())
        try:
            await job.run(handle.reader, self._fetcher, self._extent_bytes)
        finally:
            self._metrics.prefetch_fetched_bytes.inc(job.done_bytes)
            self._events.publish("prefetch_ended", owner_uid=job.owner_uid, **job.as_dict())
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
                await self._files.close(handle)

    def _forget_finished(self) -> None:
        finished = [job.id for job in self._jobs.values() if job.state is not JobState.RUNNING]
        for job_id in finished[: max(0, len(finished) - _FINISHED_KEPT)]:
            del self._jobs[job_id]


def _merged(ranges: Sequence[ByteRange]) -> list[ByteRange]:
    """The same bytes as disjoint ranges in order."""
    merged: list[ByteRange] = []
    for each in sorted(ranges):
        if merged and each.start <= merged[-1].stop:
            merged[-1] = ByteRange(merged[-1].start, max(merged[-1].stop, each.stop))
        else:
            merged.append(each)
    return merged
