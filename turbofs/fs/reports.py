"""What the mount tells about itself: metrics, the status of the mount and of single files. From memory alone."""

from __future__ import annotations

import time
from collections.abc import Callable

import trio
from blake3 import blake3

from turbofs import __version__
from turbofs.config import Config
from turbofs.errors import NoSuchAttributeError, NotSupportedError
from turbofs.fs.files import FileOpener
from turbofs.fs.handles import HandleTable
from turbofs.fs.hint_store import HintStore
from turbofs.fs.inodes import Inode
from turbofs.fs.permissions import READ, oversees
from turbofs.fs.prefetches import Prefetches
from turbofs.fs.space import SpaceKeeper
from turbofs.fs.tree import Tree
from turbofs.metrics import Metrics
from turbofs.model import Caller, FileVersion
from turbofs.read.extent_cache import CachedFile, ExtentCache, ExtentState
from turbofs.read.prefetch_job import PrefetchJob
from turbofs.source.base import Source

_LONGEST_HINT_SHOWN = 4096
_LONGEST_ERROR_SHOWN = 512


class Reports:
    """Documents for `status`, `.turbofs` and the derived attributes."""

    def __init__(
        self,
        source: Source,
        config: Config,
        tree: Tree,
        files: FileOpener,
        handles: HandleTable,
        cache: ExtentCache,
        hints: HintStore,
        prefetches: Prefetches,
        space: SpaceKeeper,
        metrics: Metrics,
    ) -> None:
        self._source = source
        self._config = config
        self._tree = tree
        self._files = files
        self._handles = handles
        self._cache = cache
        self._hints = hints
        self._prefetches = prefetches
        self._space = space
        self._metrics = metrics
        self._started = time.time()
        self._evictions_told = 0
        self.writing: Callable[[int | None], dict[str, object]] | None = None
        """What is being written, staged and broken; None on a mount that only reads."""
        self.digest_of: Callable[[FileVersion], str | None] = lambda _version: None
        """The digest of what this mount has written, by version."""
        self.tell_more: Callable[[Metrics], None] = lambda _metrics: None
        """Brings metrics of other rooms up to date."""
        self.notes: list[str] = []
        """What the mount could not do as asked (kernel read-ahead, allow_other); shown in status and by the doctor."""

    def stats(self) -> bytes:
        """All metrics in Prometheus' text format."""
        cache = self._cache.statistics()
        self._metrics.cache_bytes.set(cache["used_bytes"])
        self._metrics.budget_bytes.set(cache["limit_bytes"])
        self._metrics.budget_used_bytes.set(cache["resident_bytes"])
        self._metrics.evictions.inc(cache["evictions"] - self._evictions_told)
        self._evictions_told = cache["evictions"]
        self.tell_more(self._metrics)
        return self._metrics.render()

    def mount(self, uid: int | None = None) -> dict[str, object]:
        """The whole mount as one JSON-able document, for the user *uid* (None: anybody)."""
        space = self._space.latest
        return {
            "version": __version__,
            "source": self._source.describe(),
            "mountpoint": str(self._config.mount.mountpoint),
            "read_only": self._config.mount.read_only,
            "uptime_s": round(time.time() - self._started, 1),
            "inodes": len(self._tree.table),
            "open_handles": len(self._handles),
            "cache": self._cache.statistics(),
            "prefetches": [_job_for(uid, job) for job in self._prefetches.running()],
            "hints": self._hints.statistics(),
            "space": {"total_bytes": space.total_bytes, "free_bytes": space.free_bytes},
            **({"writing": self.writing(uid)} if self.writing is not None else {}),
            "notes": list(self.notes),
        }

    async def file(self, path: str, caller: Caller) -> dict[str, object]:
        """One file's document, for a *caller* who may read it."""
        inode = await self._tree.resolve(path, caller, wanted=READ)
        try:
            return self.inode(inode, caller)
        finally:
            self._tree.give_back(inode)

    def inode(self, inode: Inode, caller: Caller) -> dict[str, object]:
        path = inode.path
        cached = self._files.cached(inode)
        digest = cached.digest.hex() if cached is not None and cached.digest else None
        digest = digest or self.digest_of(inode.attributes.version)
        return {
            "path": path,
            "kind": inode.kind.value,
            "size": inode.attributes.size,
            "version": inode.attributes.version.token(),
            "strong_version": inode.attributes.version.strong,
            "served_from": self.served_from(inode),
            "blake3": digest,
            "open_handles": self._handles.open_on(inode),
            "hints": self._effective_hints(path, caller),
            "prefetches": [_brief(job) for job in self._prefetches.of(path)[-8:]],
            "last_error": self._hints.last_error(path, caller.uid),
            "cached_ranges": [[r.start, r.stop] for r in cached.ready_ranges()] if cached is not None else [],
        }

    def served_from(self, inode: Inode) -> str:
        """Which source the next read would use, and why."""
        return f"{self._source.uri} (origin: no replica or peer is configured)"

    async def blake3(self, inode: Inode) -> str:
        """The digest of the content, where it is known: all of this version is in the cache.

        Raises NoSuchAttributeError where it is not.
        """
        written = self.digest_of(inode.attributes.version)
        if written is not None:
            return written
        cached = self._files.cached(inode)
        if cached is None or not cached.version.strong:
            raise NoSuchAttributeError(
                f"the digest of {inode.path} is not known", advice="prefetch the whole file, then ask"
            )
        if cached.digest is None:
            cached.digest = await self._digest(inode, cached)
        return cached.digest.hex()

    async def _digest(self, inode: Inode, cached: CachedFile) -> bytes:
        version = cached.version
        extents = [extent for extent in cached.extents() if extent.state is ExtentState.READY]
        if sum(extent.length for extent in extents) != version.size:
            raise NoSuchAttributeError(
                f"the digest of {inode.path} is not known: not all of it is cached",
                advice="prefetch the whole file first",
            )
        hasher = blake3()

        def update() -> None:
            for extent in extents:
                hasher.update(extent.view(extent.start, extent.stop))

        for extent in extents:
            self._cache.pin(extent)
        try:
            await trio.to_thread.run_sync(update)
        finally:
            for extent in extents:
                self._cache.unpin(extent)
        if cached.version != version:
            raise NoSuchAttributeError(f"{inode.path} changed while its digest was computed")
        return hasher.digest()

    async def local_descriptor(self, path: str, caller: Caller) -> int:
        """A read-only descriptor of a complete local copy; the caller of this closes it. Raises NotSupportedError."""
        inode = await self._tree.resolve(path, caller, wanted=READ)
        try:
            if inode.virtual is not None:
                raise NotSupportedError(f"{path} is made by the mount", advice="read it through the mount")
            return await self._source.open_local(inode.path, inode.attributes.version)
        finally:
            self._tree.give_back(inode)

    def _effective_hints(self, path: str, caller: Caller) -> dict[str, object]:
        found = self._hints.effective(path, "user.turbofs.prefetch", uid=caller.uid)
        if found is None:
            return {}
        value = found.value
        if len(value) > _LONGEST_HINT_SHOWN:  # whole where it is set; here it must not crowd out the rest
            value = value[:_LONGEST_HINT_SHOWN] + "…"
        return {"user.turbofs.prefetch": {"value": value, "set_on": found.path, "own": found.own}}


def _brief(job: PrefetchJob) -> dict[str, object]:
    """A job in the document of its own file, which has a largest size."""
    document = job.as_dict()
    del document["path"]
    document["error"] = job.error and job.error[:_LONGEST_ERROR_SHOWN]
    return document


def _job_for(uid: int | None, job: PrefetchJob) -> dict[str, object]:
    document = job.as_dict()
    if uid is None or not oversees(uid, job.owner_uid):
        del document["path"], document["error"]  # names may lie where others may not search
    return document
