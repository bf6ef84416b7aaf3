"""What could not be brought to the source before a mount ended, when staging is in memory: on disk until the next start.

A copy is complete when it has its name: files first, each synced, then one rename. Only after that are the bytes in memory
deleted, so at any time one of the two is whole. A random number beside each of the two says that they are the same: it is
made for each copy, and goes when there is one of them again.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from turbofs.errors import ConfigError, OutOfSpaceError
from turbofs.write.staging import DATA_FOLDER, JOURNAL_FILE, StagingArea

_log = structlog.get_logger(__name__)

_SAVED, _NEW, _OLD = "staged", "staged.new", "staged.old"
_ID = "saved-as"
LEFT_FILE = "left.json"
_PATHS_NAMED = 20


@dataclass(frozen=True)
class Left:
    """What is left at the end of a mount: how much, where its bytes are, and the first of its paths."""

    files: int
    bytes: int
    where: str
    paths: tuple[str, ...]


def save(area: StagingArea, state_directory: Path) -> Path:
    """Move what is in *area*, whose journal is closed, to *state_directory*. Blocks. Returns where it is then.

    Raises OutOfSpaceError where the disk does not take it: everything is still in *area* then.
    """
    saved, new = state_directory / _SAVED, state_directory / _NEW
    try:
        shutil.rmtree(new, ignore_errors=True)
        (new / DATA_FOLDER).mkdir(mode=0o700, parents=True)
        (area.directory / _ID).write_text(secrets.token_hex(16), encoding="ascii")
        for path in [*area.data_files().values(), area.directory / JOURNAL_FILE, area.directory / _ID]:
            _copy(path, new / path.relative_to(area.directory))
        shutil.rmtree(saved, ignore_errors=True)
        new.rename(saved)
        _sync(state_directory)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise OutOfSpaceError(
            f"staged bytes could not be saved in {state_directory}: {error.strerror}",
            advice=f"they are in {area.directory} until the machine restarts: mount again before that",
        ) from error
    for path in [*area.data_files().values(), area.directory / JOURNAL_FILE, area.directory / _ID]:
        path.unlink(missing_ok=True)
    return saved


def restore(directory: Path, state_directory: Path) -> None:
    """Bring back to the staging *directory*, which is locked, what the last mount saved. Blocks.

    Raises OutOfSpaceError, and ConfigError where the directory holds something else: neither of the two is touched then.
    """
    saved, old = state_directory / _SAVED, state_directory / _OLD
    journal, mark = directory / JOURNAL_FILE, directory / _ID
    shutil.rmtree(old, ignore_errors=True)
    if not saved.is_dir():
        mark.unlink(missing_ok=True)
        return
    if not journal.exists():
        try:
            for path in sorted((saved / DATA_FOLDER).iterdir()):
                _copy(path, directory / DATA_FOLDER / path.name)
            _copy(saved / _ID, mark)
            part = directory / f"{JOURNAL_FILE}.part"
            _copy(saved / JOURNAL_FILE, part)
            part.rename(journal)
        except OSError as error:
            raise OutOfSpaceError(
                f"staged bytes saved in {saved} do not fit into {directory}: {error.strerror}",
                advice="make room there, or name a larger --staging-dir",
            ) from error
        _log.info("staged bytes of the last mount are back", directory=str(directory))
    elif not _same(saved / _ID, mark):
        raise ConfigError(
            f"staged bytes are in two places, which are not the same: {saved}, of the last mount, and {directory}",
            advice="mount first with an empty --staging-dir, which takes up the former, then with this one again",
        )
    # Else saving was cut off right before the end, or this was: both are whole.
    saved.rename(old)
    mark.unlink(missing_ok=True)
    shutil.rmtree(old, ignore_errors=True)


def _same(one: Path, other: Path) -> bool:
    try:
        return one.read_bytes() == other.read_bytes()
    except FileNotFoundError:
        return False


def write_left(state_directory: Path, left: Left | None) -> None:
    """Say what is left (None: nothing) where `turbofs umount` looks for it. Never raises."""
    file = state_directory / LEFT_FILE
    try:
        if left is None:
            file.unlink(missing_ok=True)
            return
        state_directory.mkdir(parents=True, exist_ok=True)
        document = asdict(left)
        document["paths"] = list(left.paths[:_PATHS_NAMED])
        file.write_text(json.dumps(document), encoding="ascii")
    except OSError as error:
        _log.warning("cannot say what is left", file=str(file), error=str(error))


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    target.chmod(0o600)
    _sync(target)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
