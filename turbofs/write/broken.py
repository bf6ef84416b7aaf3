"""What is broken: acknowledged, or asked for, and not done. Said durably, until it is past."""

from __future__ import annotations

import time

import structlog

from turbofs.errors import TurboError
from turbofs.write.acts import Act, Delete, DeleteDirectory, Rename, is_below, paths_of
from turbofs.write.journal import BrokenRecord, Journal

_log = structlog.get_logger(__name__)


class BrokenPaths:
    """Paths that are broken, and why. In memory for looking, in the journal for the next mount."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._records = {record.path: record for record in journal.broken()}

    def __len__(self) -> int:
        return len(self._records)

    def mark(self, path: str, error: TurboError) -> None:
        """*path* failed with *error*. Never raises: where the journal takes no more, memory and log still say it."""
        text = f"{error}; {error.advice}"
        _log.error("broken", path=path, error=text)
        record = self._records[path] = BrokenRecord(path, text, time.time_ns())
        try:
            self._journal.put(record)
        except TurboError as failure:
            _log.error("the journal does not take what is broken", path=path, error=str(failure))

    def heal(self, path: str) -> None:
        """*path* was written, renamed or deleted with success, so that what was said of it is past. Never raises."""
        if self._records.pop(path, None) is not None:
            try:
                self._journal.remove_broken(path)
            except TurboError as failure:
                _log.warning("the journal keeps what is not broken any more", path=path, error=str(failure))

    def past(self, act: Act) -> None:
        """*act* is done: what was said of names that are gone, or another's now, is past."""
        if isinstance(act, Rename | Delete | DeleteDirectory):
            for path in paths_of(act):
                self.heal(path)

    def below(self, path: str) -> bool:
        """Whether anything at or below *path* is broken."""
        return any(is_below(each, path) for each in self._records)

    def reason(self, path: str) -> str | None:
        """Why *path*, or the first broken one below it, is broken; None where nothing is."""
        for each, record in sorted(self._records.items()):
            if is_below(each, path):
                return record.error if each == path else f"{each}: {record.error}"
        return None

    def records(self) -> list[BrokenRecord]:
        return list(self._records.values())
