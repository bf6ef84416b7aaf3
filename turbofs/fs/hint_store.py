"""What is set where: hints by path, in memory for reading, in a small database for the next start.

Two layers. A hint that was set on a path itself is shared by everyone. One that was set on `.turbofs/hints/PATH` is
that caller's own, by user id. A hint holds for everything below its path; the nearest one wins, and at the same path
the caller's own comes before the shared one. Hints belong to paths: they move with what is renamed through this mount,
and stay where they are when something is renamed or deleted elsewhere.

All methods but `open`, `flush` and `aclose` work on memory alone and never block. Changes reach the disk with `flush`,
which runs in a thread; concurrent flushes share one transaction. The whole is bounded in entries and in bytes.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import structlog
import trio

from turbofs.config import FsConfig
from turbofs.errors import NoSuchAttributeError, OutOfSpaceError
from turbofs.fs.hint_database import HintDatabase, HintKey
from turbofs.model import ROOT, split
from turbofs.wire.runtime_dir import SYSTEM_BASE, mount_name

MOST_ENTRIES = 10_000
"""More than that are set by a loop over files, which one hint on their directory replaces."""
MOST_BYTES = 16 << 20
MOST_ERRORS = 1024
ERROR_LIMIT_BYTES = 4096

_log = structlog.get_logger(__name__)
_STATE_FILE = "hints.sqlite3"
_SHARED = -1  # in place of a user id


def state_directory(config: FsConfig, mountpoint: Path) -> Path:
    """Where the state of the mount on *mountpoint* lives; not created here.

    Root's mounts: /var/lib/turbofs/NAME. A user's own: XDG_STATE_HOME/turbofs/NAME. `fs.state_dir` replaces the parent.
    """
    if config.state_dir is not None:
        parent = config.state_dir
    elif os.geteuid() == 0:
        parent = Path("/var/lib/turbofs")
    else:
        parent = platformdirs.user_state_path("turbofs")
    # No socket lives here: however long the parent's path is, the name is the one that root's control socket has.
    return parent / mount_name(str(mountpoint), SYSTEM_BASE)


@dataclass(frozen=True, slots=True)
class FoundHint:
    """A hint that holds for a path: its text, the path on which it was set, and whether it is the caller's own."""

    value: str
    path: str
    own: bool


class HintStore:
    """The hints of one mount. Make it with `HintStore.open` (or without arguments: nothing outlives the process)."""

    def __init__(self, *, most_entries: int = MOST_ENTRIES, most_bytes: int = MOST_BYTES) -> None:
        self._most_entries = most_entries
        self._most_bytes = most_bytes
        self._values: dict[str, dict[tuple[int, str], str]] = {}  # path → (user id, attribute) → text
        self._entries = 0
        self._bytes = 0
        self._errors: OrderedDict[tuple[str, int], str] = OrderedDict()
        self._database: HintDatabase | None = None
        self._unsaved: dict[HintKey, str | None] = {}
        self._flushing = trio.Lock()

    @classmethod
    def open(
        cls, state_file: Path | None, *, most_entries: int = MOST_ENTRIES, most_bytes: int = MOST_BYTES
    ) -> HintStore:
        """Read what an earlier mount left in *state_file*. Blocks: call it before the event loop, or in a thread.

        A file that cannot be read as one of ours is moved aside, with a warning, and the store starts empty.
        Raises ConfigError where the directory cannot be made or written.
        """
        store = cls(most_entries=most_entries, most_bytes=most_bytes)
        if state_file is not None:
            store._database = HintDatabase.open(state_file)
            for key, value in store._database.found:
                try:
                    store._put(key, value)
                except OutOfSpaceError as error:
                    _log.warning("hints_left_out", file=str(state_file), reason=str(error))
                    break
        return store

    # --- one path

    def set(self, path: str, name: str, value: str, *, uid: int | None = None) -> None:
        """Set *name* on *path*: shared, or only for the user *uid*. Raises OutOfSpaceError where the store is full."""
        key = (path, _layer(uid), name)
        self._put(key, value)
        self._remember(key, value)

    def get(self, path: str, name: str, *, uid: int | None = None) -> str:
        """What is set on exactly *path*. Raises NoSuchAttributeError."""
        try:
            return self._values[path][_layer(uid), name]
        except KeyError:
            raise _absent(path, name) from None

    def remove(self, path: str, name: str, *, uid: int | None = None) -> None:
        """Take *name* off exactly *path*. Raises NoSuchAttributeError."""
        key = (path, _layer(uid), name)
        if not self._drop(key):
            raise _absent(path, name)
        self._remember(key, None)

    def list(self, path: str, *, uid: int | None = None) -> tuple[str, ...]:
        """The names set on exactly *path* in one layer, sorted."""
        layer = _layer(uid)
        return tuple(sorted(name for owner, name in self._values.get(path, ()) if owner == layer))

    def effective(self, path: str, name: str, *, uid: int) -> FoundHint | None:
        """The hint that holds for *path* when *uid* uses it: the nearest; the caller's own before the shared one."""
        for place in _upwards(path):
            here = self._values.get(place)
            if here:
                for layer in (uid, _SHARED):
                    value = here.get((layer, name))
                    if value is not None:
                        return FoundHint(value, place, own=layer != _SHARED)
        return None

    # --- the tree changes

    def rename(self, old: str, new: str) -> None:
        """*old*, with all below it, is now *new*; what *new* named before is gone."""
        if old == new:
            return
        moved = [(key, value) for key, value in self._below(old)]
        self.forget(new)
        for (path, layer, name), value in moved:
            self._drop((path, layer, name))
            self._remember((path, layer, name), None)
            key = (new + path[len(old) :], layer, name)
            self._put(key, value, bounded=False)  # moving adds no entry: it must not fail half-way
            self._remember(key, value)

    def forget(self, path: str) -> None:
        """*path*, with all below it, was deleted."""
        for key, _ in list(self._below(path)):
            self._drop(key)
            self._remember(key, None)

    # --- why the last hint was refused

    def record_error(self, path: str, uid: int, text: str | None) -> None:
        """Note why the last hint that *uid* gave for *path* was refused; None: it was accepted."""
        self._errors.pop((path, uid), None)
        if text is not None:
            self._errors[path, uid] = text.encode("utf-8", "replace")[:ERROR_LIMIT_BYTES].decode("utf-8", "ignore")
            while len(self._errors) > MOST_ERRORS:
                self._errors.popitem(last=False)

    def last_error(self, path: str, uid: int) -> str | None:
        """Why the last hint that *uid* gave for *path* was refused; None where it was accepted, or long ago."""
        return self._errors.get((path, uid))

    # --- the disk

    async def flush(self) -> None:
        """Make everything set so far outlive a restart. Without changes it returns at once.

        Raises OutOfSpaceError where the state directory cannot take it: the hints hold, and are tried again later.
        """
        if self._database is None:
            self._unsaved.clear()
        while self._database is not None and self._unsaved:
            async with self._flushing:
                changes, self._unsaved = self._unsaved, {}
                saved = False
                try:
                    if changes:
                        # Not abandoned on cancellation: the thread would go on with what we put back below.
                        await trio.to_thread.run_sync(self._database.apply, changes)
                    saved = True
                finally:
                    if not saved:
                        self._unsaved = {**changes, **self._unsaved}

    async def aclose(self) -> None:
        """Flush as far as the disk allows, then close. Never raises."""
        with trio.CancelScope(shield=True):
            try:
                await self.flush()
            except OutOfSpaceError as error:
                _log.warning("hints_not_saved", reason=str(error))
            if self._database is not None:
                await trio.to_thread.run_sync(self._database.close)
                self._database = None

    def statistics(self) -> dict[str, int]:
        """Entries and bytes held, and changes that are not on disk yet."""
        return {"entries": self._entries, "bytes": self._bytes, "unsaved": len(self._unsaved)}

    # --- memory

    def _put(self, key: HintKey, value: str, *, bounded: bool = True) -> None:
        path, layer, name = key
        before = self._values.get(path, {}).get((layer, name))
        entries = self._entries + (before is None)
        total = self._bytes + _cost(key, value) - (0 if before is None else _cost(key, before))
        if bounded and (entries > self._most_entries or total > self._most_bytes):
            raise OutOfSpaceError(
                f"no room for another hint: {self._entries} are set, in {self._bytes} bytes "
                f"(limits: {self._most_entries}, {self._most_bytes})",
                advice="set one hint on the directory instead of one on each file, or remove some with `setfattr -x`",
            )
        self._values.setdefault(path, {})[layer, name] = value
        self._entries, self._bytes = entries, total

    def _drop(self, key: HintKey) -> bool:
        path, layer, name = key
        here = self._values.get(path, {})
        value = here.pop((layer, name), None)
        if value is None:
            return False
        if not here:
            del self._values[path]
        self._entries -= 1
        self._bytes -= _cost(key, value)
        return True

    def _below(self, top: str) -> Iterator[tuple[HintKey, str]]:
        prefix = top if top == ROOT else f"{top}/"
        for path, here in self._values.items():
            if path == top or path.startswith(prefix):
                for (layer, name), value in here.items():
                    yield (path, layer, name), value

    def _remember(self, key: HintKey, value: str | None) -> None:
        if self._database is not None:
            self._unsaved[key] = value


def state_file(directory: Path) -> Path:
    """The store's file in a mount's state directory."""
    return directory / _STATE_FILE


def _layer(uid: int | None) -> int:
    return _SHARED if uid is None else uid


def _cost(key: HintKey, value: str) -> int:
    """Bytes that an entry counts for: its texts, and about what Python adds."""
    return len(key[0]) + len(key[2]) + len(value) + 64


def _upwards(path: str) -> Iterator[str]:
    while True:
        yield path
        if path == ROOT:
            return
        path, _ = split(path)


def _absent(path: str, name: str) -> NoSuchAttributeError:
    return NoSuchAttributeError(f"{name} is not set on {path}")
