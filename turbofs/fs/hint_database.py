"""Hints on disk: one small SQLite database in a mount's state directory. Everything here blocks.

    hint(path BLOB, uid INTEGER, name TEXT, value TEXT), PRIMARY KEY (path, uid, name)

`path` holds bytes, because names need not be UTF-8; `uid` is -1 for a hint that everyone shares. A file that cannot be
read as ours is moved aside, never overwritten.
"""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

import structlog

from turbofs.errors import ConfigError, OutOfSpaceError

HintKey = tuple[str, int, str]
"""Path, user id (-1: shared), attribute."""

_SCHEMA_VERSION = 1
_log = structlog.get_logger(__name__)


class HintDatabase:
    """The table of one mount. One thread at a time; it need not be the same one."""

    def __init__(self, connection: sqlite3.Connection, file: Path, found: list[tuple[HintKey, str]]) -> None:
        self._connection = connection
        self._file = file
        self.found = found
        """What was in the table when it was opened."""

    @classmethod
    def open(cls, file: Path) -> HintDatabase:
        """Open *file*, new or old, making its directory. Raises ConfigError where that cannot be written."""
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(file, error) from error
        try:
            return cls._connect(file)
        except sqlite3.OperationalError as error:
            raise _unwritable(file, error) from error
        except sqlite3.DatabaseError as error:
            aside = file.with_name(f"{file.name}.unreadable-{time.time_ns()}")
            _log.warning("hints_unreadable", file=str(file), moved_to=str(aside), reason=str(error))
            try:
                file.rename(aside)
                # A journal of the file that went aside would be played into the new one.
                file.with_name(f"{file.name}-journal").unlink(missing_ok=True)
                return cls._connect(file)
            except (OSError, sqlite3.DatabaseError) as again:
                raise _unwritable(file, again) from again

    @classmethod
    def _connect(cls, file: Path) -> HintDatabase:
        connection = sqlite3.connect(file, check_same_thread=False, isolation_level=None, timeout=5)
        try:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version not in (0, _SCHEMA_VERSION):
                raise sqlite3.DatabaseError(f"written by another version of TurboFS (schema {version})")
            (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS hint (path BLOB NOT NULL, uid INTEGER NOT NULL, name TEXT NOT NULL, "
                "value TEXT NOT NULL, PRIMARY KEY (path, uid, name)) WITHOUT ROWID"
            )
            connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
            connection.execute("COMMIT")
            found = _rows(connection)
        except BaseException:
            connection.close()
            raise
        return cls(connection, file, found)

    def apply(self, changes: dict[HintKey, str | None]) -> None:
        """All of *changes* or none. Raises OutOfSpaceError."""
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            for (path, uid, name), value in changes.items():
                where = (os.fsencode(path), uid, name)
                if value is None:
                    connection.execute("DELETE FROM hint WHERE path = ? AND uid = ? AND name = ?", where)
                else:
                    connection.execute("INSERT OR REPLACE INTO hint VALUES (?, ?, ?, ?)", (*where, value))
            connection.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise OutOfSpaceError(
                f"hints hold, but cannot be saved in {self._file}: {error}",
                advice="make room in the state directory (fs.state_dir), or hints are lost at the next restart",
            ) from error

    def close(self) -> None:
        self._connection.close()


def _rows(connection: sqlite3.Connection) -> list[tuple[HintKey, str]]:
    try:
        rows = connection.execute("SELECT path, uid, name, value FROM hint").fetchall()
        return [((os.fsdecode(path), int(uid), str(name)), str(value)) for path, uid, name, value in rows]
    except (sqlite3.OperationalError, TypeError, ValueError) as error:
        raise sqlite3.DatabaseError(f"not a table of hints: {error}") from error


def _unwritable(file: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"cannot keep hints in {file}: {error}",
        advice="make the directory writable for the mount's user, or choose another with fs.state_dir",
    )
