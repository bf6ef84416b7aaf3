"""Acknowledged bytes that could not be published: parked, with the reason, until somebody decides."""

from __future__ import annotations

import os
import time

from turbofs.errors import NotFoundError
from turbofs.model import FileVersion
from turbofs.write.acts import Publish
from turbofs.write.flusher import Flusher
from turbofs.write.journal import Journal, ParkedRecord
from turbofs.write.pending import PendingActs
from turbofs.write.source_side import SourceSide
from turbofs.write.staged_file import StagedFile
from turbofs.write.staging import StagingArea


class Parking:
    """What is under `.turbofs/conflicts/`. The bytes stay in the staging area, and count there."""

    def __init__(self, area: StagingArea, journal: Journal) -> None:
        self._area = area
        self._journal = journal

    def park(self, file: StagedFile, side: SourceSide, path: str, reason: str) -> None:
        """Keep the bytes of *file*, which was to be *path*; it stays open for those who have it open."""
        record = ParkedRecord(
            id=file.number,
            path=path,
            size=file.size,
            reason=reason,
            parked_ns=time.time_ns(),
            base=file.base,
            mode=file.mode,
            owner=file.owner,
            group=file.group,
            digest=side.digest,
        )
        with self._journal.transaction():
            self._journal.put(record)
            self._journal.remove_file(file.number)
        self._area.keep_parked(file.number, file.hand_over_room())

    def records(self) -> list[ParkedRecord]:
        return list(self._journal.parked())

    def record(self, number: int) -> ParkedRecord:
        """Raises NotFoundError."""
        for record in self._journal.parked():
            if record.id == number:
                return record
        raise NotFoundError(f"no conflict has the number {number}", advice="`turbofs conflicts ls` lists them")

    def open(self, number: int) -> int:
        """A read-only descriptor of parked bytes; the caller closes it. Raises NotFoundError."""
        self.record(number)
        return os.open(self._area.data_file(number), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    async def publish(
        self, record: ParkedRecord, path: str, replaced: FileVersion | None, acts: PendingActs, flusher: Flusher
    ) -> None:
        """Publish parked bytes as *path*, where the source has *replaced* now. They stay parked whatever happens."""
        file = StagedFile.adopt(
            self._area, record.id, path, record.size, mode=record.mode, owner=record.owner, group=record.group
        )
        try:
            side = flusher.begin(file)
            if replaced is not None:
                side.named, side.version, file.base = True, replaced, replaced
                side.lowest_change = 0  # nothing of what is there stays, however long it is
            pending = acts.issue(Publish(path, file.number))
            try:
                await flusher.publish(file, pending, final=True)
            finally:
                acts.finish(pending)
        finally:
            flusher.end(file)
            file.close()
            self._area.release(file.staged_bytes)  # they counted as parked all the while

    def drop(self, number: int) -> None:
        """Delete parked bytes. Raises NotFoundError."""
        self.record(number)
        self._journal.remove_parked(number)
        self._area.data_file(number).unlink(missing_ok=True)
        self._area.drop_parked(number)
