"""What of writing survives a killed daemon: an SQLite database beside the staged bytes.

Four tables of JSON documents: staged files, pending acts, parked bytes, and what is broken. The documents are ASCII, so
that names which are not UTF-8 (PEP 383: lone surrogates) survive. A document names the classes of its values and their
fields: whoever renames one raises `_FORMAT`.

The journal outlives the process, not the machine: it is written with `synchronous=OFF`, because the page cache, and the
tmpfs on which staging usually lies, keep what a killed process has written; WAL frames carry checksums, so that half a
transaction is none. What must outlive the machine is on the source before it is acknowledged.

Everything here blocks, but for tens of microseconds: no call syncs, so they run on the event loop. `open` takes longer.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TypeVar

from turbofs.errors import ConfigError, OutOfSpaceError, TurboError
from turbofs.model import AttributeChange, FileVersion
from turbofs.write.acts import (
    Act,
    Delete,
    DeleteDirectory,
    Early,
    MakeDirectory,
    MakeLink,
    Publish,
    Rename,
    SetAttributes,
)

_APPLICATION_ID = 0x5446534A  # "TFSJ"
_FORMAT = 1
_ID_BLOCK = 1000
"""Numbers are reserved by the thousand: one write for that many."""
_BROKEN_LIMIT = 10_000
_RESERVE_BYTES = 2 << 20
"""Taken in the database and in its log at the start: some 4,000 records, and every removal, still fit on a full disk."""
_CHECKPOINT_PAGES = 256
"""The log goes back to its beginning after 1 MiB, well within that reserve."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file that has bytes in staging."""

    id: int
    path: str
    """The local name; empty where it has none any more."""
    base: FileVersion | None
    """What the source had under the name when writing began; None: nothing."""
    exclusive: bool
    mode: int
    owner: str | int | None
    group: str | int | None
    mtime_ns: int | None
    atime_ns: int | None
    size: int
    """Bytes that are acknowledged."""
    early: Early | None
    """None: nothing was acknowledged before it was on the source."""
    temporary: str | None
    """The path on the source of the hidden file to which the bytes are uploaded."""
    uploaded: FileVersion | None
    """The version of the completed temporary file, noted before it takes its name."""
    ours: FileVersion | None
    """What of this very file the source has under its name."""
    digest: str | None
    holds: bool = True
    """Whether the temporary file begins with what is acknowledged: else it was written again since."""


@dataclass(frozen=True, slots=True)
class ActRecord:
    """An act that the source has not seen yet. Acts are in the order of *seq*."""

    seq: int
    act: Act
    early: bool


@dataclass(frozen=True, slots=True)
class ParkedRecord:
    """Bytes that were acknowledged and cannot have their name any more."""

    id: int
    path: str
    size: int
    reason: str
    parked_ns: int
    base: FileVersion | None
    mode: int
    owner: str | int | None
    group: str | int | None
    digest: str | None


@dataclass(frozen=True, slots=True)
class BrokenRecord:
    """What an acknowledgement had promised for *path*, and is not so."""

    path: str
    error: str
    when_ns: int


Record = FileRecord | ActRecord | ParkedRecord | BrokenRecord
_R = TypeVar("_R", FileRecord, ActRecord, ParkedRecord, BrokenRecord)
_VALUES: dict[str, Callable[..., object]] = {
    each.__name__: each
    for each in (
        *(FileRecord, ActRecord, ParkedRecord, BrokenRecord, FileVersion, Early, AttributeChange),
        *(Publish, Rename, Delete, DeleteDirectory, MakeDirectory, MakeLink, SetAttributes),
    )
}
_TABLES = """
CREATE TABLE file (id INTEGER PRIMARY KEY, document TEXT NOT NULL);
CREATE TABLE act (id INTEGER PRIMARY KEY, document TEXT NOT NULL);
CREATE TABLE parked (id INTEGER PRIMARY KEY, document TEXT NOT NULL);
CREATE TABLE broken (id INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT NOT NULL UNIQUE, document TEXT NOT NULL);
CREATE TABLE counter (next INTEGER NOT NULL);
INSERT INTO counter VALUES (1);
"""


class Journal:
    """The journal of one staging directory, for one process and one thread at a time.

    Every change raises OutOfSpaceError where there is no room for it, TurboError for other trouble with the file, and
    then has changed nothing.
    """

    def __init__(self, connection: sqlite3.Connection, file: Path) -> None:
        self._connection = connection
        self._file = file
        self._next: int = connection.execute("SELECT next FROM counter").fetchone()[0]
        self._reserved = self._next  # numbers below are ours to give
        (self._broken_count,) = connection.execute("SELECT count(*) FROM broken").fetchone()  # at most so many

    @classmethod
    def open(cls, file: Path) -> Journal:
        """Open *file*, new or old, in a directory that exists. Blocks.

        Raises ConfigError where it cannot be used or read, and leaves it as it is: it tells what was acknowledged.
        OutOfSpaceError where the reserve does not fit.
        """
        try:
            os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            connection = sqlite3.connect(file, check_same_thread=False, isolation_level=None, timeout=0)
        except (OSError, sqlite3.Error) as error:
            raise _unusable(file, error) from error
        try:
            _prepare(connection, file)
            journal = cls(connection, file)
            for records in (journal.files, journal.acts, journal.parked, journal.broken):
                records()
        except sqlite3.Error as error:
            connection.close()
            if _is_full(error):
                raise _full(file, error) from error
            if isinstance(error, sqlite3.OperationalError):  # locked, unreadable for this user: nothing is wrong inside
                raise _unusable(file, error) from error
            raise _unreadable(file, str(error)) from error
        except BaseException:
            connection.close()
            raise
        return journal

    def close(self) -> None:
        """Close the file; the log beside it is folded in and gone."""
        self._connection.close()

    # --- changes

    def put(self, record: Record) -> None:
        """Note *record*, in place of the one with the same number (path, of what is broken)."""
        document = json.dumps(_plain(record), separators=(",", ":"))
        match record:
            case FileRecord():
                self._change("INSERT OR REPLACE INTO file VALUES (?, ?)", record.id, document)
            case ActRecord():
                self._change("INSERT OR REPLACE INTO act VALUES (?, ?)", record.seq, document)
            case ParkedRecord():
                self._change("INSERT OR REPLACE INTO parked VALUES (?, ?)", record.id, document)
            case BrokenRecord():
                path = json.dumps(record.path)
                self._change("INSERT OR REPLACE INTO broken (path, document) VALUES (?, ?)", path, document)
                self._broken_count += 1
                if self._broken_count > _BROKEN_LIMIT:
                    self._forget_oldest_broken()

    def remove_file(self, number: int) -> None:
        """Forget a staged file; one that is not there is forgotten already, as in the other removals."""
        self._change("DELETE FROM file WHERE id = ?", number)

    def remove_act(self, seq: int) -> None:
        self._change("DELETE FROM act WHERE id = ?", seq)

    def remove_parked(self, number: int) -> None:
        self._change("DELETE FROM parked WHERE id = ?", number)

    def remove_broken(self, path: str) -> None:
        self._change("DELETE FROM broken WHERE path = ?", json.dumps(path))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All changes inside, or none. Inside another one it is a part of that. Nothing may be awaited inside."""
        if self._connection.in_transaction:
            yield
            return
        self._change("BEGIN IMMEDIATE")
        try:
            yield
            self._change("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # a full disk may have ended it already
                self._change("ROLLBACK")
            if self._reserved > self._next:
                self._reserve()  # the reservation may have been made inside
            raise

    def next_id(self) -> int:
        """A number that this journal has never given before, and greater than all of those."""
        if self._next >= self._reserved:
            self._reserve()
        self._next += 1
        return self._next - 1

    # --- what is there

    def files(self) -> list[FileRecord]:
        """Staged files by their number."""
        return self._records("SELECT document FROM file ORDER BY id", FileRecord)

    def acts(self) -> list[ActRecord]:
        """Pending acts in the order in which they were issued."""
        return self._records("SELECT document FROM act ORDER BY id", ActRecord)

    def parked(self) -> list[ParkedRecord]:
        """Parked bytes by their number."""
        return self._records("SELECT document FROM parked ORDER BY id", ParkedRecord)

    def broken(self) -> list[BrokenRecord]:
        """What is broken, in the order in which it was said; the newest 10,000."""
        return self._records("SELECT document FROM broken ORDER BY id", BrokenRecord)

    # --- SQL

    def _change(self, statement: str, *values: int | str) -> None:
        try:
            self._connection.execute(statement, values)
        except sqlite3.Error as error:
            if _is_full(error):
                raise _full(self._file, error) from error
            raise TurboError(f"the journal of staged files {self._file} cannot be written: {error}") from error

    def _records(self, query: str, kind: type[_R]) -> list[_R]:
        try:
            records = [json.loads(text, object_hook=_revive) for (text,) in self._connection.execute(query)]
        except sqlite3.Error as error:
            raise TurboError(f"the journal of staged files {self._file} cannot be read: {error}") from error
        except (ValueError, TypeError, KeyError) as error:
            raise _unreadable(self._file, f"a record makes no sense ({error!r})") from error
        if not all(isinstance(record, kind) for record in records):
            raise _unreadable(self._file, f"what is noted as {kind.__name__} is something else")
        return records

    def _reserve(self) -> None:
        self._change("UPDATE counter SET next = ?", self._next + _ID_BLOCK)
        self._reserved = self._next + _ID_BLOCK

    def _forget_oldest_broken(self) -> None:
        self._change(
            "DELETE FROM broken WHERE id <= (SELECT id FROM broken ORDER BY id DESC LIMIT 1 OFFSET ?)", _BROKEN_LIMIT
        )
        (self._broken_count,) = self._connection.execute("SELECT count(*) FROM broken").fetchone()


def _prepare(connection: sqlite3.Connection, file: Path) -> None:
    """Check that the database is a journal, or make it one where it is empty; raises ConfigError or sqlite3.Error."""
    # No other process looks inside (the staging area is locked), so the log's index can stay in memory.
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    new = not (application or version or tables)
    if not new and application != _APPLICATION_ID:
        raise _unreadable(file, "it is a database of another program")
    if not new and version != _FORMAT:
        raise ConfigError(
            f"the journal of staged files {file} has format {version}; this TurboFS reads {_FORMAT}",
            advice="mount with the version of TurboFS that wrote it, which publishes what is staged, then with this one",
        )
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise _unreadable(file, verdict)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    if new:
        connection.executescript(
            f"BEGIN IMMEDIATE; {_TABLES} PRAGMA application_id = {_APPLICATION_ID}; "
            f"PRAGMA user_version = {_FORMAT}; COMMIT;"
        )
    # Pages once written stay allocated: free ones in the database, and the log, which is written over again.
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("CREATE TABLE reserve (bytes BLOB)")
    connection.execute("INSERT INTO reserve VALUES (zeroblob(?))", (_RESERVE_BYTES,))
    connection.execute("DROP TABLE reserve")
    connection.execute("COMMIT")
    connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()


def _plain(value: object) -> object:
    """*value* as JSON knows it; what has a class of ours carries its name under "type"."""
    if isinstance(value, FileVersion):
        return {"type": "FileVersion", **value._asdict()}
    if is_dataclass(value):
        named = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return {"type": type(value).__name__, **named}
    return value


def _revive(document: dict[str, object]) -> object:
    name = document.pop("type")
    return _VALUES[str(name)](**document)


def _is_full(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


def _full(file: Path, error: Exception) -> OutOfSpaceError:
    return OutOfSpaceError(
        f"the journal of staged files {file} has no room: {error}",
        advice="make room in the staging directory's file system, or choose another with --staging-dir",
    )


def _unusable(file: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"cannot open the journal of staged files {file}: {error}",
        advice="the staging directory must be writable for the mount's user, and not be another mount's; "
        "--staging-dir chooses another",
    )


def _unreadable(file: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{file} cannot be read as a journal of staged files: {reason}",
        advice="it was left as it is, with the bytes beside it in data/; keep the whole directory elsewhere if they "
        "matter, or remove it, or choose another with --staging-dir",
    )
