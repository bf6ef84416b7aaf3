"""Owner and group names of the source as numbers of this machine, and back.

HDFS tells owners by name; the kernel wants numbers. The name service (files, LDAP, SSSD) translates, and may block for
as long as it likes: so it is asked in threads, under a deadline, and answers are remembered, "unknown" among them.
An unknown name becomes the kernel's own overflow id (nobody, nogroup). While the name service does not answer, what it
said last is used, else nobody.
"""

from __future__ import annotations

import grp
import pwd
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import structlog
import trio

K = TypeVar("K", bound=str | int)
V = TypeVar("V", bound=str | int)

LOOKUP_DEADLINE_S = 2.0
"""What a request waits for the name service at most: longer than a healthy LDAP, short against a request's deadline."""
RETRY_S = 5.0
"""How soon a name service that did not answer is asked again: not by each request, or each would wait."""
MOST_REMEMBERED = 10_000
THREADS = 4
"""Lookups at once. Threads that the name service holds count, so a dead one costs four threads and no more."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Answer(Generic[V]):
    value: V | None
    """None: the name service knows no such name."""
    until: float


class _Translation(Generic[K, V]):
    """One direction of one kind: remembered answers in front of a lookup that blocks."""

    def __init__(
        self,
        kind: str,
        lookup: Callable[[K], V],
        *,
        timeout_s: float,
        lookup_deadline_s: float,
        clock: Callable[[], float],
        limiter: trio.CapacityLimiter,
    ) -> None:
        self._kind = kind
        self._lookup = lookup
        self._timeout_s = timeout_s
        self._lookup_deadline_s = lookup_deadline_s
        self._clock = clock
        self._limiter = limiter
        self._answers: dict[K, _Answer[V]] = {}
        self._asking: dict[K, trio.Event] = {}

    def remembered(self, key: K) -> _Answer[V] | None:
        """The answer to *key*, if it is not too old."""
        answer = self._answers.get(key)
        return answer if answer is not None and answer.until > self._clock() else None

    async def ask(self, key: K) -> V | None:
        """The translation of *key*; None where there is none, or no answer in time."""
        answer = self.remembered(key)
        if answer is None:
            with trio.move_on_after(self._lookup_deadline_s):
                await self._ask_once(key)
            answer = self.remembered(key) or self._go_without(key)
        return answer.value

    async def _ask_once(self, key: K) -> None:
        """One lookup for all who want *key* now."""
        under_way = self._asking.get(key)
        if under_way is not None:
            await under_way.wait()
            return
        done = self._asking[key] = trio.Event()
        try:
            await trio.to_thread.run_sync(self._look_up, key, limiter=self._limiter, abandon_on_cancel=True)
        finally:
            del self._asking[key]
            done.set()

    def _look_up(self, key: K) -> None:
        """Runs in a thread, perhaps one that nobody waits for any more: then its answer serves the next request."""
        value: V | None
        try:
            value = self._lookup(key)
        except KeyError:
            value = None
        except (OSError, ValueError, OverflowError) as error:  # a name with NUL, a number no id can have, NSS down
            _log.warning("owner_lookup_failed", kind=self._kind, key=key, reason=str(error))
            value = None
        self._remember(key, value, self._timeout_s)

    def _go_without(self, key: K) -> _Answer[V]:
        last = self._answers.get(key)
        _log.warning("owner_lookup_timed_out", kind=self._kind, key=key, waited_s=self._lookup_deadline_s)
        return self._remember(key, last.value if last else None, min(RETRY_S, self._timeout_s))

    def _remember(self, key: K, value: V | None, timeout_s: float) -> _Answer[V]:
        # Single dict operations only: threads and the event loop both come here.
        answer = _Answer(value, self._clock() + timeout_s)
        if len(self._answers) >= MOST_REMEMBERED:
            self._answers = {}
        self._answers[key] = answer
        return answer


class OwnerMap:
    """Translates owners for one mount. `overflow_uid` and `overflow_gid` stand for unknown names.

    *clock* gives seconds and may be called from threads. The four lookups default to this machine's name service; each
    raises KeyError for what it does not know.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        clock: Callable[[], float] | None = None,
        lookup_deadline_s: float = LOOKUP_DEADLINE_S,
        uid_of: Callable[[str], int] = lambda name: pwd.getpwnam(name).pw_uid,
        gid_of: Callable[[str], int] = lambda name: grp.getgrnam(name).gr_gid,
        user_of: Callable[[int], str] = lambda uid: pwd.getpwuid(uid).pw_name,
        group_of: Callable[[int], str] = lambda gid: grp.getgrgid(gid).gr_name,
    ) -> None:
        limiter = trio.CapacityLimiter(THREADS)

        def translation(kind: str, lookup: Callable[[K], V]) -> _Translation[K, V]:
            return _Translation(
                kind,
                lookup,
                timeout_s=timeout_s,
                lookup_deadline_s=lookup_deadline_s,
                clock=clock or time.monotonic,
                limiter=limiter,
            )

        self.overflow_uid = _overflow_id("uid")
        self.overflow_gid = _overflow_id("gid")
        self._uids: _Translation[str, int] = translation("user", uid_of)
        self._gids: _Translation[str, int] = translation("group", gid_of)
        self._users: _Translation[int, str] = translation("uid", user_of)
        self._groups: _Translation[int, str] = translation("gid", group_of)

    def resolve_nowait(self, owner: str | int, group: str | int) -> tuple[int, int] | None:
        """(uid, gid) if both are known without asking anybody; else None: then `await resolve`."""
        uid = _nowait(self._uids, owner, self.overflow_uid)
        gid = _nowait(self._gids, group, self.overflow_gid)
        return None if uid is None or gid is None else (uid, gid)

    async def resolve(self, owner: str | int, group: str | int) -> tuple[int, int]:
        """(uid, gid), within two lookup deadlines whatever the name service does. Never raises."""
        uid = await _resolve(self._uids, owner, self.overflow_uid)
        gid = await _resolve(self._gids, group, self.overflow_gid)
        return uid, gid

    async def prepare(self, pairs: Iterable[tuple[str | int, str | int]]) -> None:
        """Ask for every (owner, group) of a directory at once, so that `resolve_nowait` knows them after."""
        owners, groups = set(), set()
        for owner, group in pairs:
            owners.add(owner)
            groups.add(group)
        async with trio.open_nursery() as nursery:
            for owner in owners:
                if _nowait(self._uids, owner, 0) is None:
                    nursery.start_soon(self._uids.ask, str(owner))
            for group in groups:
                if _nowait(self._gids, group, 0) is None:
                    nursery.start_soon(self._gids.ask, str(group))

    async def user_name(self, uid: int) -> str | None:
        """The name of *uid* on this machine; None where it has none, or the name service does not answer."""
        return await self._users.ask(uid)

    async def group_name(self, gid: int) -> str | None:
        """The name of *gid* on this machine; None where it has none, or the name service does not answer."""
        return await self._groups.ask(gid)


def _nowait(translation: _Translation[str, int], name: str | int, unknown: int) -> int | None:
    if isinstance(name, int):
        return name
    answer = translation.remembered(name)
    return None if answer is None else _number(name, answer.value, unknown)


async def _resolve(translation: _Translation[str, int], name: str | int, unknown: int) -> int:
    return name if isinstance(name, int) else _number(name, await translation.ask(name), unknown)


def _number(name: str, found: int | None, unknown: int) -> int:
    """As chown reads it: a name that the machine knows comes first, then digits are the number itself."""
    if found is not None:
        return found
    return int(name) if name.isascii() and name.isdigit() and len(name) <= 9 else unknown


def _overflow_id(kind: str) -> int:
    """The id that this kernel shows for owners it cannot map: nobody and nogroup."""
    try:
        return int(Path(f"/proc/sys/kernel/overflow{kind}").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 65534
