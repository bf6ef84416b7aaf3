"""Extended attributes on inodes: hints that are set, documents that are derived, and clear refusals of the rest."""

from __future__ import annotations

from turbofs.errors import InvalidRequestError, NoSuchAttributeError, TurboError
from turbofs.fs.handles import ReadHandle
from turbofs.fs.hint_catalogue import (
    CATALOGUE,
    Attribute,
    attribute_to_read,
    attribute_to_remove,
    attribute_to_set,
    format_status,
    parse_hint,
)
from turbofs.fs.hint_store import HintStore
from turbofs.fs.hints import Hint, PrefetchHint
from turbofs.fs.inodes import Inode
from turbofs.fs.permissions import READ
from turbofs.fs.prefetches import Prefetches
from turbofs.fs.reports import Reports
from turbofs.fs.tree import Tree
from turbofs.fs.virtual import HintMirror
from turbofs.metrics import Metrics
from turbofs.model import Caller, FileKind
from turbofs.write.overview import Overview


class ExtendedAttributes:
    """Set on a file or directory itself a hint is everybody's; set on its mirror under `.turbofs/hints` it is the caller's."""

    def __init__(
        self,
        tree: Tree,
        hints: HintStore,
        prefetches: Prefetches,
        reports: Reports,
        metrics: Metrics,
        overview: Overview | None,
    ) -> None:
        self._tree = tree
        self._hints = hints
        self._prefetches = prefetches
        self._reports = reports
        self._metrics = metrics
        self._overview = overview

    async def set(self, inode: Inode, name: str, value: bytes, caller: Caller) -> None:
        """Set *name* on *inode*. Raises as `hint_catalogue` does, and keeps the reason as `last_error`."""
        if isinstance(inode.virtual, HintMirror):
            await self.set_own(inode.virtual.path, name, value, caller)
            return
        _require_source_file(inode)
        await self._set(inode, name, value, caller, own=False)

    async def set_own(self, path: str, name: str, value: bytes, caller: Caller) -> None:
        """Set a hint for *caller* alone, who must be allowed to read *path*."""
        inode = await self._tree.resolve(path, caller, wanted=READ)
        try:
            _require_source_file(inode)
            await self._set(inode, name, value, caller, own=True)
        finally:
            self._tree.give_back(inode)

    async def opened(self, handle: ReadHandle, caller: Caller) -> None:
        """Follow the prefetch hint that holds for a file that *caller* just opened, once for each content."""
        inode, cached = handle.inode, handle.reader.cached
        found = self._hints.effective(inode.path, Attribute.PREFETCH, uid=caller.uid)
        if found is None or cached.hint == found.value:
            return
        cached.hint = found.value
        ranges = PrefetchHint.parse(found.value).ranges_in(handle.reader.version.size)
        if ranges:
            await self._prefetches.follow(handle, ranges, caller)

    async def get(self, inode: Inode, name: str, caller: Caller) -> bytes:
        """The value of *name* here: set on exactly this, or derived. Raises NoSuchAttributeError, NotSupportedError."""
        spec = attribute_to_read(name)
        if isinstance(inode.virtual, HintMirror):
            path, uid = inode.virtual.path, caller.uid
        else:
            _require_source_file(inode)
            path, uid = inode.path, None
        if spec.settable:
            return self._hints.get(path, name, uid=uid).encode()
        match spec.attribute:
            case Attribute.LAST_ERROR:
                error = self._writes_error(inode) or self._hints.last_error(path, caller.uid)
                if error is None:
                    raise NoSuchAttributeError(f"no hint on {path} was refused")
                return error.encode("utf-8", "surrogateescape")
            case Attribute.DURABILITY:
                level = None if self._overview is None else self._overview.durability(path)
                return (level or "persisted").encode()
            case Attribute.SERVED_FROM:
                return self._reports.served_from(inode).encode()
            case Attribute.BLAKE3 if not isinstance(inode.virtual, HintMirror):
                return (await self._reports.blake3(inode)).encode()
            case Attribute.STATUS if not isinstance(inode.virtual, HintMirror):
                return format_status(self._reports.inode(inode, caller), "cached_ranges")
        raise NoSuchAttributeError(f"{name} is told of {path} itself, not of its mirror")

    def list(self, inode: Inode, caller: Caller) -> tuple[str, ...]:
        """The names that are set on exactly this: no derived ones, so that `cp -a` copies none."""
        if isinstance(inode.virtual, HintMirror):
            return self._hints.list(inode.virtual.path, uid=caller.uid)
        return () if inode.virtual is not None or inode.detached else self._hints.list(inode.path)

    async def remove(self, inode: Inode, name: str, caller: Caller) -> None:
        """Take *name* off exactly this. Raises NoSuchAttributeError where it is not set."""
        attribute_to_remove(name)
        if isinstance(inode.virtual, HintMirror):
            self._hints.remove(inode.virtual.path, name, uid=caller.uid)
        else:
            _require_source_file(inode)
            self._hints.remove(inode.path, name)
        self._metrics.hint_given(name, "removed")
        await self._hints.flush()

    def _writes_error(self, inode: Inode) -> str | None:
        return None if self._overview is None or inode.detached else self._overview.broken_reason(inode.path)

    async def _set(self, inode: Inode, name: str, value: bytes, caller: Caller, *, own: bool) -> None:
        path = inode.path
        try:
            spec = attribute_to_set(name)
            size = inode.attributes.size if inode.kind is FileKind.FILE else None
            hint = parse_hint(spec, value, size_bytes=size)
            await self._apply(inode, hint, caller)  # first: what is refused must not hold at the next open
            self._hints.set(path, name, hint.format(), uid=caller.uid if own else None)
        except TurboError as error:
            self._hints.record_error(path, caller.uid, f"{error}; {error.advice}")
            # A label must not have as many values as somebody can think of names.
            self._metrics.hint_given(name if name in CATALOGUE else "other", "refused")
            raise
        self._hints.record_error(path, caller.uid, None)
        self._metrics.hint_given(name, "set")
        await self._hints.flush()

    async def _apply(self, inode: Inode, hint: Hint, caller: Caller) -> None:
        if not isinstance(hint, PrefetchHint):
            return
        if inode.kind is FileKind.FILE:
            await self._prefetches.start_for(inode, hint.ranges_in(inode.attributes.size), caller)


def _require_source_file(inode: Inode) -> None:
    if inode.virtual is not None:
        raise InvalidRequestError("hidden files take no attributes", advice="set hints under .turbofs/hints/")
