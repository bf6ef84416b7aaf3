"""Acts that were issued and are not done yet: who waits for whom, and what falls with what. No I/O.

Most acts are done while their caller waits, and fail at the call. One that has to wait for something acknowledged early
is *deferred*: its caller has gone on, so its failure has to be reported, and so has that of whatever relied on it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator

import trio

from turbofs.errors import TurboError
from turbofs.model import ROOT, split
from turbofs.write.acts import HELD_BY_EARLIER, Act, Delete, Publish, Rename, is_below, paths_of, touch, waits_for

_Index = defaultdict[str, dict[int, "PendingAct"]]
_NOTHING: dict[int, PendingAct] = {}


class CancelledActError(TurboError):
    """Not done, because what was acknowledged before it could not be persisted."""

    advice = "the previous state is still on the source; `turbofs conflicts ls` shows the bytes that are kept"


class PendingAct:
    """One issued act. `deferred`: whoever asked for it has been answered already. `jobs`: whose line it stands in."""

    def __init__(self, sequence: int, act: Act, waits: list[PendingAct], *, deferred: bool) -> None:
        self.jobs: tuple[str, ...] = ()
        self.sequence = sequence
        self.act = act
        self.deferred = deferred
        self.waits = waits
        self.ended = trio.Event()
        self.error: TurboError | None = None

    @property
    def early(self) -> bool:
        return isinstance(self.act, Publish) and self.act.early is not None


class PendingActs:
    """The queue, in the order of issue. Sequence numbers come from *numbers*, so that they outlive a restart.

    An index by path finds what an act has to wait for without a look at all the others: removing an old checkpoint may
    put ten thousand deletions in line. Early acknowledgements, and the renames that they hold back, stand in one line for
    each job: whoever waits for the last of it waits for all, because each of them waits for the one before it.
    """

    def __init__(self, numbers: Iterator[int] | None = None) -> None:
        self._numbers = numbers or itertools.count(1)
        self._acts: dict[int, PendingAct] = {}
        self._at: _Index = defaultdict(dict)
        self._below: _Index = defaultdict(dict)
        self._lines: _Index = defaultdict(dict)
        self.idle: Callable[[], None] = lambda: None
        """Told when none is pending any more."""
        self._publishing: dict[int, int] = {}  # publications of each file, by its number

    def __iter__(self) -> Iterator[PendingAct]:
        return iter(tuple(self._acts.values()))

    def __len__(self) -> int:
        return len(self._acts)

    def issue(self, act: Act, *, sequence: int | None = None, deferred: bool = False) -> PendingAct:
        """Put *act* behind what it waits for. It is deferred if anything of that is (or *deferred* says so)."""
        waits = self._before(act)
        deferred = deferred or any(earlier.deferred for earlier in waits)
        pending = PendingAct(next(self._numbers) if sequence is None else sequence, act, waits, deferred=deferred)
        pending.jobs = self._jobs(act)
        self._acts[pending.sequence] = pending
        for place in self._places(pending):
            place[pending.sequence] = pending
        if isinstance(act, Publish):
            self._publishing[act.file] = self._publishing.get(act.file, 0) + 1
        return pending

    def would_defer(self, act: Act) -> bool:
        """Whether *act*, issued now, would be deferred."""
        return bool(self._acts) and any(earlier.deferred for earlier in self._before(act))

    def publishes(self, file: int) -> bool:
        """Whether a publication of the file number *file* is pending."""
        return file in self._publishing

    async def renamed(self, path: Callable[[], str]) -> bool:
        """Return when no rename of *path*, or of what is above it, is being carried out; whether one was."""
        waited = False
        while (busy := self._renaming(path())) is not None:
            await busy.ended.wait()
            waited = True
        return waited

    def _renaming(self, path: str) -> PendingAct | None:
        for place in (path, *_upwards(path)):
            for each in self._at.get(place, _NOTHING).values():
                if isinstance(each.act, Rename) and not each.deferred and is_below(path, each.act.old):
                    return each
        return None

    def replaces(self, path: str) -> bool:
        """Whether what has the name *path* is to be deleted or replaced by an act that is pending."""
        return any(
            isinstance(each.act, Delete) or (isinstance(each.act, Rename) and each.act.new == path)
            for each in self._at.get(path, _NOTHING).values()
        )

    async def ready(self, pending: PendingAct) -> None:
        """Return when everything that *pending* waits for has ended. Raises CancelledActError where it fell with one."""
        while ahead := _ahead(pending):
            for earlier in ahead:
                await earlier.ended.wait()
        if pending.error is not None:
            raise pending.error

    def finish(self, pending: PendingAct, error: TurboError | None = None) -> None:
        """*pending* is done, or failed with *error*; what relied on it falls with it, and has ended then, too.

        With an early acknowledgement falls what its job did after it, up to the first publication of another group. With
        any deferred act falls what was to happen to the same names: it was meant for what is not there now. A whole new file
        under such a name relies on nothing but its directory.
        """
        if pending.ended.is_set():
            return  # it fell before it heard of it, and so did what relied on it: what came since relies on others
        self._end(pending, error)
        if error is None or not pending.deferred:
            return
        fallen = {pending}
        same_group = pending.early
        for later in tuple(self._acts.values()):
            if later.sequence < pending.sequence:
                continue
            same_group = same_group and not _begins_another_group(later, pending)
            reasons = [each for each in later.waits if each in fallen and each.error is not None]
            held = same_group and waits_for(later.act, pending.act)
            if held or any(_relies(later, each, fallen) for each in reasons):
                self._end(later, CancelledActError(f"not done: {paths_of(pending.act)[0]} was not persisted: {error}"))
                fallen.add(later)

    def _before(self, act: Act) -> list[PendingAct]:
        found: dict[int, PendingAct] = {}
        held = isinstance(act, HELD_BY_EARLIER)
        for path in paths_of(act):
            found.update(self._at.get(path, _NOTHING))
            found.update(self._below.get(path, _NOTHING))
            for top in _upwards(path):
                found.update(self._at.get(top, _NOTHING))
            if held:
                for job in (path, *_upwards(path)):
                    for earlier in reversed(self._lines.get(job, _NOTHING).values()):
                        found[earlier.sequence] = earlier
                        if any(is_below(each, job) for each in paths_of(earlier.act)):
                            break  # it waits itself for those ahead of it
        return [found[sequence] for sequence in sorted(found)]

    def _jobs(self, act: Act) -> tuple[str, ...]:
        """The jobs in whose line *act* stands."""
        if isinstance(act, Publish) and act.early is not None:
            return (act.early.job,)
        if isinstance(act, Rename):
            return tuple({top for path in paths_of(act) for top in (path, *_upwards(path)) if self._lines.get(top)})
        return ()

    def _places(self, pending: PendingAct) -> Iterator[dict[int, PendingAct]]:
        """Where *pending* is indexed: at its names, below all that are above them, and by its job."""
        for path in paths_of(pending.act):
            yield self._at[path]
            for top in _upwards(path):
                yield self._below[top]
        for job in pending.jobs:
            yield self._lines[job]

    def _end(self, pending: PendingAct, error: TurboError | None) -> None:
        pending.error = error
        pending.waits = _ahead(pending) if pending.jobs else []  # not all that ever was
        del self._acts[pending.sequence]
        for place in self._places(pending):
            place.pop(pending.sequence, None)
        if isinstance(pending.act, Publish):
            self._publishing[pending.act.file] -= 1
            if not self._publishing[pending.act.file]:
                del self._publishing[pending.act.file]
        if not self._acts:
            for index in (self._at, self._below, self._lines):
                index.clear()
            self.idle()
        pending.ended.set()


def document_of(pending: PendingAct) -> dict[str, object]:
    """One act in the status: what it does, where, and how many others it still waits for."""
    act = pending.act
    return {
        "act": type(act).__name__,
        "path": paths_of(act)[0],
        "to": act.new if isinstance(act, Rename) else None,
        "waits_for": sum(not earlier.ended.is_set() for earlier in pending.waits),
    }


def _upwards(path: str) -> Iterator[str]:
    """The directories above *path*."""
    while path != ROOT:
        path = split(path)[0]
        yield path


def _ahead(pending: PendingAct) -> list[PendingAct]:
    """What *pending* still waits for: what has a place in a line may have ended before those ahead of it there."""
    found, looked_at = [], list(pending.waits)
    while looked_at:
        each = looked_at.pop()
        if not each.ended.is_set():
            found.append(each)
        elif each.jobs:
            looked_at += each.waits
    return found


def _relies(later: PendingAct, earlier: PendingAct, fallen: set[PendingAct]) -> bool:
    """Whether *later*, which touches the same names, was meant for what *earlier* would have made of them."""
    act = later.act
    anew = isinstance(act, Publish) and not (isinstance(earlier.act, Publish) and earlier.act.file == act.file)
    if isinstance(act, Rename):  # what it moves was published since
        anew = any(
            isinstance(each.act, Publish) and each.act.path == act.old and each.sequence > earlier.sequence
            for each in later.waits
            if each not in fallen
        )
    if anew:
        return any(is_below(split(path)[0], above) for path in paths_of(act) for above in paths_of(earlier.act))
    return _touch(later, earlier)


def _touch(one: PendingAct, other: PendingAct) -> bool:
    return any(touch(mine, theirs) for mine in paths_of(one.act) for theirs in paths_of(other.act))


def _begins_another_group(later: PendingAct, broken: PendingAct) -> bool:
    """Whether *later* is the first of another group: not of the same one, nor of a directory that holds it."""
    one, other = later.act, broken.act
    if not isinstance(one, Publish) or not isinstance(other, Publish) or one.early is None or other.early is None:
        return False
    return not is_below(other.early.group, one.early.group)
