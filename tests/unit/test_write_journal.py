"""The journal of staged files: what was put is there after a kill, and what is not ours is left alone."""

from __future__ import annotations

import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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
from turbofs.write.journal import ActRecord, BrokenRecord, FileRecord, Journal, ParkedRecord

_ODD = "/job/h\udce9t\udcff \u00e9\U0001f600'\n"
_VERSION = FileVersion(1 << 40, 1_700_000_000_123_456_789, "12:345", "tag\udc80", append_only=True)
_ACTS: list[Act] = [
    Publish(_ODD, 3, Early(_ODD, "/job")),
    Publish("/x", 4),
    Rename(_ODD, "/y", replace=True, identity="7"),
    Delete(_ODD, "12:345"),
    DeleteDirectory("/d"),
    MakeDirectory(_ODD, 0o1755, "ann", 100),
    MakeLink("/l", _ODD, None, "staff"),
    SetAttributes(_ODD, AttributeChange(mode=0o600, owner="ann", group=7, atime_ns=-1, mtime_ns=5)),
]


def _file(number: int, path: str = "/a") -> FileRecord:
    return FileRecord(number, path, None, False, 0o644, None, None, None, None, 0, None, None, None, None, None)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite3"


@pytest.fixture
def journal(place: Path) -> Iterator[Journal]:
    journal = Journal.open(place)
    yield journal
    journal.close()


def test_every_record_comes_back_as_it_was(place: Path) -> None:
    full = FileRecord(
        2,
        _ODD,
        _VERSION,
        True,
        0o7777,
        "ann\udcff",
        1000,
        -5,
        1 << 62,
        10,
        Early(_ODD, "/job"),
        _ODD,
        _VERSION,
        _VERSION,
        "ab",
    )
    parked = [
        ParkedRecord(8, _ODD, 5, "why\udcff", 17, _VERSION, 0o600, 0, "staff", "ab"),
        ParkedRecord(9, "/p", 0, "", 0, None, 0, None, None, None),
    ]
    broken = [BrokenRecord(_ODD, "disk\udcff", 3), BrokenRecord("/z", "", 1)]
    acts = [ActRecord(seq, act, early=seq % 2 == 0) for seq, act in enumerate(_ACTS)]
    journal = Journal.open(place)
    for record in (full, _file(1), *reversed(acts), *reversed(parked), *broken):
        journal.put(record)
    for _again in range(2):
        assert journal.files() == [_file(1), full]
        assert journal.acts() == acts
        assert [type(record.act) for record in journal.acts()] == [type(act) for act in _ACTS]
        assert isinstance(journal.files()[1].base, FileVersion)
        assert journal.parked() == parked
        assert journal.broken() == broken
        journal.close()
        journal = Journal.open(place)
    journal.close()
    assert [file.name for file in place.parent.iterdir()] == [place.name]
    assert stat.S_IMODE(place.stat().st_mode) == 0o600


def test_put_replaces_and_remove_forgets(journal: Journal) -> None:
    for record in (_file(1), _file(1, "/b"), ActRecord(1, Delete("/x"), early=False), BrokenRecord("/x", "one", 1)):
        journal.put(record)
    journal.put(BrokenRecord("/y", "other", 1))
    journal.put(BrokenRecord("/x", "two", 2))
    assert journal.files() == [_file(1, "/b")]
    assert journal.broken() == [BrokenRecord("/y", "other", 1), BrokenRecord("/x", "two", 2)]
    for number in (1, 99):
        journal.remove_file(number)
        journal.remove_act(number)
        journal.remove_parked(number)
    journal.remove_broken("/x")
    journal.remove_broken("/nothing")
    assert (journal.files(), journal.acts(), journal.broken()) == ([], [], [BrokenRecord("/y", "other", 1)])


def test_a_transaction_is_all_or_nothing(journal: Journal) -> None:
    with journal.transaction():
        journal.put(_file(1))
        with journal.transaction():
            journal.put(ActRecord(1, Publish("/a", 1), early=True))

    def fail() -> None:
        with journal.transaction():
            journal.remove_file(1)
            journal.put(ActRecord(2, Delete("/a"), early=False))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert journal.files() == [_file(1)]
    assert [record.seq for record in journal.acts()] == [1]


def test_numbers_are_given_once_across_restarts_and_failures(place: Path) -> None:
    given: list[int] = []

    def fail(journal: Journal) -> None:
        with journal.transaction():
            given.append(journal.next_id())
            raise KeyError

    for round_ in range(3):
        journal = Journal.open(place)
        with pytest.raises(KeyError):
            fail(journal)
        given += [journal.next_id() for _ in range(1500 if round_ else 3)]
        journal.close()
    assert given == sorted(set(given))
    assert given[0] > 0


def test_only_the_newest_of_what_is_broken_are_kept(journal: Journal) -> None:
    with journal.transaction():
        for number in range(10_010):
            journal.put(BrokenRecord(f"/{number}", "why", number))
    kept = journal.broken()
    assert len(kept) == 10_000
    assert (kept[0].path, kept[-1].path) == ("/10", "/10009")


# --- kills

_CHILD = """
import sys
from pathlib import Path
from turbofs.write.acts import Publish
from turbofs.write.journal import ActRecord, FileRecord, Journal
journal = Journal.open(Path(sys.argv[1]))
while True:
    number = journal.next_id()
    with journal.transaction():
        journal.put(FileRecord(number, "/f\\udcff", None, False, 0, *[None] * 4, number, *[None] * 5))
        journal.put(ActRecord(number, Publish("/f", number), True))
    if number % 3 == 0:
        journal.remove_act(number)
    print(number, flush=True)
"""


def test_a_killed_process_loses_nothing_that_it_put(place: Path) -> None:
    seen = 0
    for lines in (1, 40, 2500):  # the last one is past several checkpoints
        with subprocess.Popen([sys.executable, "-c", _CHILD, str(place)], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            told = [int(child.stdout.readline()) for _ in range(lines)]
            child.send_signal(signal.SIGKILL)
            told += [int(line) for line in child.stdout if line.endswith("\n")]
        assert told[0] > seen
        seen = told[-1]
        journal = Journal.open(place)
        files = {record.id: record for record in journal.files()}
        acts = {record.seq for record in journal.acts()}
        assert set(told) <= set(files)
        assert all(record.size == number for number, record in files.items())
        assert {number for number in told if number % 3} <= acts
        assert not {number for number in told if number % 3 == 0} & acts
        assert {number for number in files if number % 3} == acts - {number for number in acts if number % 3 == 0}
        seen = max(seen, *files)
        journal.close()


# --- what is not ours


def _refused(place: Path, match: str) -> None:
    before = place.read_bytes()
    with pytest.raises(ConfigError, match=match) as caught:
        Journal.open(place)
    assert caught.value.advice
    assert place.read_bytes() == before


def test_garbage_is_refused_and_left_alone(place: Path) -> None:
    place.write_bytes(b"\0garbage" * 1000)
    _refused(place, "not a database")


def test_another_programs_database_is_refused(place: Path) -> None:
    with sqlite3.connect(place) as database:
        database.execute("CREATE TABLE theirs (x)")
    database.close()
    _refused(place, "another program")


def test_a_newer_format_is_refused(place: Path) -> None:
    Journal.open(place).close()
    with sqlite3.connect(place) as database:
        database.execute("PRAGMA user_version = 9")
    database.close()
    _refused(place, "format 9")


def test_a_damaged_journal_is_refused(place: Path) -> None:
    journal = Journal.open(place)
    with journal.transaction():
        for number in range(500):
            journal.put(_file(number))
    journal.close()
    whole = place.read_bytes()
    place.write_bytes(whole[:4096] + b"\xee" * 20_000 + whole[24_096:])
    _refused(place, "cannot be read")


@pytest.mark.parametrize(
    "document",
    ["{", "[]", "7", '{"type":"Nothing"}', '{"type":"Early","group":"/","job":"/"}', '{"type":"Early"}', "{}"],
)
def test_a_record_that_makes_no_sense_is_refused(place: Path, document: str) -> None:
    Journal.open(place).close()
    with sqlite3.connect(place) as database:
        database.execute("INSERT INTO file VALUES (1, ?)", (document,))
    database.close()
    with pytest.raises(ConfigError, match="cannot be read as a journal"):
        Journal.open(place)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent/journal"):
        Journal.open(tmp_path / "absent" / "journal")
    with pytest.raises(ConfigError, match="cannot open"):
        Journal.open(tmp_path)


# --- trouble with the disk


def test_no_room_is_said_as_such_and_changes_nothing(journal: Journal) -> None:
    journal.put(_file(1))
    (pages,) = journal._connection.execute("PRAGMA page_count").fetchone()
    journal._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(OutOfSpaceError, match="no room"):
        journal.put(_file(2, "/" + "x" * (4 << 20)))

    def fail() -> None:
        with journal.transaction():
            journal.put(_file(3))
            journal.put(_file(4, "/" + "x" * (4 << 20)))

    with pytest.raises(OutOfSpaceError):
        fail()
    assert journal.files() == [_file(1)]
    journal.put(_file(5))
    assert journal.files() == [_file(1), _file(5)]


def test_the_first_thousands_of_records_need_no_more_room(place: Path, journal: Journal) -> None:
    """On a file system that somebody else has filled, what is under way can still be noted and forgotten."""

    def taken() -> dict[str, int]:
        return {file.name: file.stat().st_blocks for file in place.parent.iterdir()}

    before = taken()
    for number in range(3000):
        journal.put(_file(number, f"/job/checkpoint/{number}"))
    for number in range(3000):
        journal.remove_file(number)
    assert taken() == before


def test_other_trouble_names_the_file(place: Path) -> None:
    journal = Journal.open(place)
    journal.close()
    with pytest.raises(TurboError, match=place.name):
        journal.put(_file(1))
    with pytest.raises(TurboError, match=place.name):
        journal.files()


def test_a_second_daemon_is_kept_out(place: Path, journal: Journal) -> None:
    journal.put(_file(1))
    with pytest.raises(ConfigError, match="locked") as caught:
        Journal.open(place)
    assert "another mount" in caught.value.advice
