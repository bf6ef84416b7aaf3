"""The staging area: whose directory it takes, who gets room, and which saved bytes come back."""

from __future__ import annotations

import os

import pytest
import trio
import trio.testing

from turbofs.errors import ConfigError, OutOfSpaceError
from turbofs.write.saving import restore, save
from turbofs.write.staging import StagingArea

MIB = 1 << 20


def area_in(directory, *, limit_bytes=MIB, soft_bytes=None, stall_s=30.0):
    return StagingArea.open(directory, limit_bytes=limit_bytes, soft_bytes=soft_bytes, stall_s=stall_s)


def mode_of(path):
    return path.stat().st_mode & 0o7777


def test_a_staging_directory_is_made_private_and_what_was_there_is_never_changed(tmp_path):
    area_in(tmp_path / "deep" / "new").close()
    assert mode_of(tmp_path / "deep" / "new") == mode_of(tmp_path / "deep" / "new" / "data") == 0o700
    there = tmp_path / "there"
    there.mkdir()
    there.chmod(0o755)
    area_in(there).close()
    assert (mode_of(there), mode_of(there / "data")) == (0o755, 0o700)
    there.chmod(0o775)
    with pytest.raises(ConfigError, match="mode is 0775") as refused:
        area_in(there)
    assert "chmod 0755" in str(refused.value.advice)
    assert mode_of(there) == 0o775
    there.chmod(0o755)
    (there / "data").chmod(0o750)
    with pytest.raises(ConfigError, match="mode is 0750"):
        area_in(there)


def test_a_link_or_a_directory_of_somebody_else_is_no_staging_directory(tmp_path, monkeypatch):
    (tmp_path / "target").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("target")
    with pytest.raises(ConfigError, match="not a directory"):
        area_in(tmp_path / "link")
    anybodys = tmp_path / "anybodys"
    anybodys.mkdir()
    anybodys.chmod(0o777)
    with pytest.raises(ConfigError, match="anybody may rename"):
        area_in(anybodys / "new")
    anybodys.chmod(0o1777)
    area_in(anybodys / "new").close()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {os.getuid()}"):
        area_in(tmp_path / "target")


@pytest.fixture
def saved(tmp_path):
    """An area whose one file was saved, and is gone there; with the directory of the state."""
    area = area_in(tmp_path / "staging")
    leave(area.directory, b"saved")
    state = tmp_path / "state"
    save(area, state)
    yield area, state
    area.close()


def leave(directory, data):
    (directory / "data" / "1").write_bytes(data)
    (directory / "journal.sqlite3").write_bytes(b"journal of " + data)


def left(directory):
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*[1-9]")}


def test_saved_bytes_come_back_once(saved):
    area, state = saved
    assert left(area.directory) == {}
    restore(area.directory, state)
    back = {"data/1": b"saved", "journal.sqlite3": b"journal of saved"}
    assert left(area.directory) == back
    assert list(state.iterdir()) == []
    restore(area.directory, state)
    assert left(area.directory) == back
    assert sorted(path.name for path in area.directory.iterdir()) == ["data", "journal.sqlite3", "lock"]


def test_saved_bytes_go_unread_only_where_the_same_bytes_are_still_there(saved, monkeypatch):
    area, state = saved
    restore(area.directory, state)
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.unlink", lambda _path, **_options: None)
        save(area, state)  # killed before it deletes anything
    restore(area.directory, state)
    assert not (state / "staged").exists()
    assert left(area.directory) == {"data/1": b"saved", "journal.sqlite3": b"journal of saved"}


def test_other_bytes_in_the_staging_directory_are_no_reason_to_drop_the_saved_ones(saved, tmp_path):
    area, state = saved
    leave(area.directory, b"others")
    before = left(state)
    with pytest.raises(ConfigError, match="two places") as refused:
        restore(area.directory, state)
    assert str(area.directory) in str(refused.value)
    assert str(state / "staged") in str(refused.value)
    assert left(state) == before
    empty = area_in(tmp_path / "empty")
    restore(empty.directory, state)
    empty.close()
    restore(area.directory, state)
    assert left(empty.directory)["data/1"] == b"saved"
    assert left(area.directory)["data/1"] == b"others"


@pytest.fixture
def full(tmp_path):
    """An area of 100 bytes with a soft limit of 50, which are used."""
    area = area_in(tmp_path / "staging", limit_bytes=100, soft_bytes=50)
    area.adopt(50)
    yield area
    area.close()


async def test_writers_get_room_in_their_order(full):
    got = []

    async def writer(name, count_bytes):
        await full.reserve(count_bytes)
        got.append(name)

    async with trio.open_nursery() as nursery:
        for name, count_bytes in (("large", 40), ("small", 1), ("last", 1)):
            nursery.start_soon(writer, name, count_bytes)
            await trio.testing.wait_all_tasks_blocked()
        full.release(20)
        await trio.testing.wait_all_tasks_blocked()
        assert (got, full.waiting) == ([], 3), "a small one does not take what a large one waits for"
        full.release(20)
        await trio.testing.wait_all_tasks_blocked()
        assert got == ["large"]
        full.release(10)
    assert got == ["large", "small", "last"]
    assert (full.used_bytes, full.waiting) == (42, 0)


async def test_writer_that_has_waited_long_goes_on_to_the_hard_limit(tmp_path):
    area = area_in(tmp_path / "staging", limit_bytes=100, soft_bytes=50, stall_s=0.05)
    area.adopt(50)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(area.reserve, 30)
            nursery.start_soon(area.reserve, 20)
        assert area.used_bytes == 100
        with pytest.raises(OutOfSpaceError, match="is full"):
            await area.reserve(1)
    assert (area.used_bytes, area.waiting) == (100, 0)
    area.close()
