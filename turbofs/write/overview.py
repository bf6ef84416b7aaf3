"""What is open, staged, waiting and broken: for the status, and for whoever waits for a path to be safe."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from turbofs.model import ROOT
from turbofs.write.acts import is_below, paths_of
from turbofs.write.pending import document_of
from turbofs.write.staged_file import StagedFile
from turbofs.write.staging import StagingArea
from turbofs.write.writes import Writes


class Overview:
    """A look at *writes*, which changes nothing."""

    def __init__(self, writes: Writes, area: StagingArea) -> None:
        self._writes = writes
        self._area = area

    def durability(self, path: str) -> str | None:
        """`open`, `staged` or `broken` for what is at or below *path*; None where nothing is outstanding."""
        if self._writes.broken.below(path):
            return "broken"
        levels = {self._level(file) for file in self._writes.files_below(path)}
        if "open" in levels:
            return "open"
        if "staged" in levels or any(
            each.deferred and any(is_below(one, path) or is_below(path, one) for one in paths_of(each.act))
            for each in self._writes.acts
        ):
            return "staged"
        return None

    def report(self, may_know: Callable[[str | int | None], bool]) -> dict[str, object]:
        """The status document. *may_know* tells by a file's owner (None: the mount itself) whether names are told."""
        files = [(file, document) for file in self._writes.files_below(ROOT) if (document := self._document(file))]
        acts = [document_of(each) for each in self._writes.acts if each.deferred]
        records = self._writes.broken.records()
        broken = [{"path": each.path, "error": each.error, "when": each.when_ns / 1e9} for each in records]
        trusted = may_know(None)
        return {
            "staging": self._area.statistics(),
            "files": [each if trusted or may_know(file.owner) else _nameless(each) for file, each in files],
            "acts": acts if trusted else [_nameless(each) for each in acts],
            "broken": broken if trusted else [_nameless(each) for each in broken],
            "conflicts": len(self._writes.parking.records()),
            "draining": self._writes.draining,
        }

    def _document(self, file: StagedFile) -> dict[str, object] | None:
        """One file in the status; None for one that the source has."""
        level = self._level(file)
        if level is None and file.error is None:
            return None
        return {
            "path": file.path,
            "state": "broken" if file.error is not None else "waiting" if level == "staged" else "open",
            "size": file.size,
            "uploaded_bytes": self._writes.flusher.uploaded(file),
            "error": str(file.error) if file.error is not None else None,
        }

    def _level(self, file: StagedFile) -> str | None:
        if self._writes.promises.waiting(file) is not None:
            return "staged"
        return "open" if self._writes.flusher.is_dirty(file) else None

    def broken_reason(self, path: str) -> str | None:
        """Why *path*, or the first broken one below it, is broken; None where nothing is."""
        return self._writes.broken.reason(path)


def _nameless(document: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in document.items() if key not in {"path", "to", "error"}}
