"""What an earlier mount left in the staging area, taken up again without asking the source.

Acts are issued anew in their old order. What was acknowledged waits in its turn as before, and is published only where
its target is what it was; whoever looks sees it at once. What nobody was promised is dropped, and what it had on the
source under a temporary name is deleted when the source answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from turbofs.errors import NotFoundError, TurboError
from turbofs.source.base import Source
from turbofs.write.acts import Act, Delete, DeleteDirectory, Publish, Rename, is_below, moved_path, paths_of
from turbofs.write.journal import ActRecord, FileRecord, Journal
from turbofs.write.local_bytes import room_bytes
from turbofs.write.staged_file import StagedFile
from turbofs.write.staging import StagingArea
from turbofs.write.writes import Writes

_log = structlog.get_logger(__name__)

_GONE = TurboError(
    "the staged bytes are gone: the staging area was cleared before they were published",
    advice="nothing may clear the staging directory while it holds acknowledged files; save again",
)


@dataclass(frozen=True)
class Recovered:
    """What was found: files and bytes that wait for the source, and temporary files to delete there."""

    files: int
    size_bytes: int
    acts: int
    leftovers: tuple[FileRecord, ...]
    """Files that nobody was promised, of which the source has something under a temporary name."""


def recover(writes: Writes, area: StagingArea, journal: Journal) -> Recovered:
    """Take up what is in *area*. Blocks for as long as it takes to read the journal."""
    records = {record.id: record for record in journal.files()}
    parked = {record.id for record in journal.parked()}
    present = area.data_files()
    acts = sorted(journal.acts(), key=lambda record: record.seq)
    files = _take_up(writes, area, journal, acts, records, present)
    leftovers = []
    for number, path in present.items():
        if number in parked:
            area.adopt(room_bytes(path.stat()))
            area.keep_parked(number, room_bytes(path.stat()))
        elif number not in files:
            path.unlink(missing_ok=True)
    for number, left in records.items():
        if number not in files:
            if left.temporary:
                leftovers.append(left)
            else:
                journal.remove_file(number)
    size = sum(file.size for file in files.values())
    return Recovered(len(files), size, len(acts), tuple(leftovers))


def _take_up(
    writes: Writes,
    area: StagingArea,
    journal: Journal,
    acts: Iterable[ActRecord],
    records: Mapping[int, FileRecord],
    present: Mapping[int, Path],
) -> dict[int, StagedFile]:
    """Issue *acts* anew; the promised files of them by their number."""
    files: dict[int, StagedFile] = {}
    names: dict[str, StagedFile] = {}  # the newest promised file of each name
    for record in acts:
        act = record.act
        if isinstance(act, Publish):
            if not _promised(writes, area, record, records.get(act.file), present, files):
                writes.broken.mark(act.path, _GONE)
                journal.remove_act(record.seq)
                continue
            before, names[act.path] = names.get(act.path), files[act.file]
            side = writes.flusher.side(files[act.file])
            if before is not None and before is not files[act.file] and side.version is None:
                side.named, side.after = True, writes.flusher.side(before)
        else:
            pending = writes.acts.issue(act, sequence=record.seq, deferred=True)
            writes.view.apply(act)
            _follow(files.values(), names, act)
            writes.changes.carry_out_later(pending, recovered=True)
    return files


def _promised(
    writes: Writes,
    area: StagingArea,
    record: ActRecord,
    described: FileRecord | None,
    present: Mapping[int, Path],
    files: dict[int, StagedFile],
) -> bool:
    """Take up one promised publication; False where its bytes are not there."""
    act = record.act
    assert isinstance(act, Publish)
    file = files.get(act.file)
    if file is None:
        file = _file(writes, area, described, present)
        if file is None:
            return False
        files[act.file] = file
        file.path = act.path
        writes.view.put(act.path, file)
    pending = writes.acts.issue(act, sequence=record.seq, deferred=True)
    writes.view.apply(act)
    writes.recovered(file, pending)
    return True


def _follow(files: Iterable[StagedFile], names: dict[str, StagedFile], act: Act) -> None:
    """What *files* are called, and whose the *names* are, after *act*."""
    moved: dict[str, StagedFile] = {}
    if isinstance(act, Rename):
        for file in files:
            file.path = moved_path(file.path, act.old, act.new)
        moved = {moved_path(path, act.old, act.new): file for path, file in names.items() if is_below(path, act.old)}
    if isinstance(act, Rename | Delete | DeleteDirectory):
        for gone in paths_of(act):
            for path in [path for path in names if is_below(path, gone)]:
                del names[path]
    names.update(moved)


async def delete_leftovers(source: Source, journal: Journal, recovered: Recovered) -> None:
    """Delete what uploads that nobody was promised left on the source. Never raises TurboError.

    What cannot be deleted now stays in the journal for the next mount.
    """
    for record in recovered.leftovers:
        assert record.temporary is not None
        try:
            with suppress(NotFoundError):
                await source.delete(record.temporary)
            journal.remove_file(record.id)
        except TurboError as error:
            _log.info("a temporary file of an earlier mount stays for now", path=record.temporary, error=str(error))


def _file(
    writes: Writes, area: StagingArea, record: FileRecord | None, present: Mapping[int, Path]
) -> StagedFile | None:
    if record is None or record.id not in present:
        return None
    # Shorter than acknowledged, it was cut after that: this is what its user did last, and the cut is not taken back.
    size_bytes = min(record.size, present[record.id].stat().st_size)
    file = StagedFile.adopt(
        area,
        record.id,
        record.path,
        size_bytes,
        mode=record.mode,
        owner=record.owner,
        group=record.group,
        base=record.base,
    )
    file.exclusive = record.exclusive
    file.acknowledged_size = size_bytes
    if record.mtime_ns is not None:
        file.mtime_ns, file.atime_ns, file.times_set = record.mtime_ns, record.atime_ns or record.mtime_ns, True
    side = writes.flusher.begin(file)
    side.recovered = True
    side.version = record.ours or record.base
    side.named = side.version is not None
    side.digest = record.digest if size_bytes == record.size else None
    if record.temporary and record.uploaded:
        side.resume = (record.temporary, record.uploaded, record.holds)
    elif record.temporary:
        side.retired.append(record.temporary)
    return file
