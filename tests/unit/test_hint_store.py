"""Hints by path: inheritance, layers, renames, bounds, and what outlives a restart."""

from __future__ import annotations

import sqlite3

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from turbofs.config import FsConfig
from turbofs.errors import ConfigError, NoSuchAttributeError, OutOfSpaceError
from turbofs.fs.hint_store import ERROR_LIMIT_BYTES, MOST_ERRORS, FoundHint, HintStore, state_directory, state_file
from turbofs.model import ROOT

NAME = "user.turbofs.prefetch"
OTHER = "user.turbofs.priority"
ALICE, BOB = 1001, 1002


def test_nearest_hint_wins():
    store = HintStore()
    store.set(ROOT, NAME, "root")
    store.set("/a/b", NAME, "b")
    assert store.effective("/a/b/c", NAME, uid=ALICE) == FoundHint("b", "/a/b", own=False)
    assert store.effective("/a/b", NAME, uid=ALICE) == FoundHint("b", "/a/b", own=False)
    assert store.effective("/a/bc", NAME, uid=ALICE) == FoundHint("root", ROOT, own=False)
    assert store.effective("/a/b/c", OTHER, uid=ALICE) is None


def test_callers_own_hint_wins_at_the_same_path_only():
    store = HintStore()
    store.set("/a", NAME, "shared")
    store.set("/a", NAME, "alice's", uid=ALICE)
    assert store.effective("/a/f", NAME, uid=ALICE) == FoundHint("alice's", "/a", own=True)
    assert store.effective("/a/f", NAME, uid=BOB) == FoundHint("shared", "/a", own=False)
    store.set("/a/f", NAME, "nearer")
    assert store.effective("/a/f", NAME, uid=ALICE) == FoundHint("nearer", "/a/f", own=False)


def test_root_is_a_caller_like_any_other():
    store = HintStore()
    store.set("/a", NAME, "root's own", uid=0)
    assert store.effective("/a", NAME, uid=ALICE) is None
    assert store.get("/a", NAME, uid=0) == "root's own"


def test_get_list_and_remove_see_exactly_one_path_and_layer():
    store = HintStore()
    store.set("/a", NAME, "x")
    store.set("/a", OTHER, "y", uid=ALICE)
    assert store.get("/a", NAME) == "x"
    assert store.list("/a") == (NAME,)
    assert store.list("/a", uid=ALICE) == (OTHER,)
    assert store.list("/a/b") == ()
    for path, name, uid in [("/a/b", NAME, None), ("/a", NAME, ALICE), ("/a", OTHER, None)]:
        with pytest.raises(NoSuchAttributeError):
            store.get(path, name, uid=uid)
        with pytest.raises(NoSuchAttributeError):
            store.remove(path, name, uid=uid)
    store.remove("/a", NAME)
    assert store.list("/a") == ()
    store.remove("/a", OTHER, uid=ALICE)
    assert store.statistics() == {"entries": 0, "bytes": 0, "unsaved": 0}


def test_rename_moves_the_subtree_and_nothing_else():
    store = HintStore()
    for path in ("/a", "/a/b", "/a/b/c", "/ab"):
        store.set(path, NAME, path)
    store.set("/a/b", NAME, "own", uid=ALICE)
    store.rename("/a", "/z")
    assert store.get("/z", NAME) == "/a"
    assert store.get("/z/b/c", NAME) == "/a/b/c"
    assert store.get("/z/b", NAME, uid=ALICE) == "own"
    assert store.get("/ab", NAME) == "/ab"
    assert store.list("/a") == store.list("/a/b") == ()


def test_rename_onto_a_name_drops_what_the_name_had():
    store = HintStore()
    store.set("/new", NAME, "of the replaced file")
    store.set("/old", OTHER, "moves")
    store.rename("/old", "/new")
    assert store.list("/new") == (OTHER,)
    store.rename("/new", "/new")
    assert store.list("/new") == (OTHER,)


def test_forget_drops_the_subtree():
    store = HintStore()
    for path in ("/a", "/a/b", "/ab"):
        store.set(path, NAME, "x")
    store.forget("/a")
    assert [store.list(path) for path in ("/a", "/a/b", "/ab")] == [(), (), (NAME,)]
    store.forget(ROOT)
    assert store.statistics()["entries"] == 0


def test_full_store_refuses_and_says_what_to_do():
    store = HintStore(most_entries=2)
    store.set("/a", NAME, "x")
    store.set("/b", NAME, "x")
    with pytest.raises(OutOfSpaceError, match="2 are set") as refused:
        store.set("/c", NAME, "x")
    assert "directory" in refused.value.advice
    store.set("/b", NAME, "replaced")
    store.rename("/b", "/much/longer/name")
    assert store.get("/much/longer/name", NAME) == "replaced"
    store.remove("/a", NAME)
    store.set("/c", NAME, "fits now")


def test_bytes_are_bounded_too():
    store = HintStore(most_bytes=1000)
    with pytest.raises(OutOfSpaceError, match="limits"):
        store.set("/a", NAME, "x" * 1000)
    assert store.statistics()["entries"] == 0


def test_errors_are_kept_per_path_and_caller_until_a_hint_is_accepted():
    store = HintStore()
    store.record_error("/a", ALICE, "no such unit")
    assert store.last_error("/a", ALICE) == "no such unit"
    assert store.last_error("/a", BOB) is None
    assert store.last_error("/b", ALICE) is None
    store.record_error("/a", ALICE, None)
    assert store.last_error("/a", ALICE) is None


def test_errors_are_bounded_in_number_and_length():
    store = HintStore()
    for i in range(MOST_ERRORS + 1):
        store.record_error(f"/{i}", ALICE, "x")
    assert store.last_error("/0", ALICE) is None
    assert store.last_error("/1", ALICE) == "x"
    store.record_error("/long", ALICE, "é\udcff" * ERROR_LIMIT_BYTES)
    kept = store.last_error("/long", ALICE)
    assert kept is not None
    assert len(kept.encode()) <= ERROR_LIMIT_BYTES


# --- restarts


async def test_hints_outlive_a_restart(tmp_path):
    file = tmp_path / "state" / "hints.sqlite3"
    store = HintStore.open(file)
    store.set("/a\udcff", NAME, "name that is not UTF-8")
    store.set("/b", NAME, "own", uid=ALICE)
    store.set("/c", NAME, "first")
    await store.flush()
    store.set("/c", NAME, "second")
    store.remove("/b", NAME, uid=ALICE)
    store.set("/d", OTHER, "x")
    store.rename("/d", "/e")
    await store.aclose()

    again = HintStore.open(file)
    assert again.get("/a\udcff", NAME) == "name that is not UTF-8"
    assert again.get("/c", NAME) == "second"
    assert again.list("/b", uid=ALICE) == again.list("/d") == ()
    assert again.get("/e", OTHER) == "x"
    assert again.statistics()["entries"] == 3
    await again.aclose()


async def test_what_was_not_flushed_is_not_half_there(tmp_path):
    file = tmp_path / "hints.sqlite3"
    store = HintStore.open(file)
    store.set("/a", NAME, "flushed")
    await store.flush()
    store.set("/a", NAME, "not flushed")
    killed = HintStore.open(file)  # as after kill -9: the first store never closed
    assert killed.get("/a", NAME) == "flushed"
    await killed.aclose()
    await store.aclose()


async def test_concurrent_flushes_save_everything(tmp_path):
    file = tmp_path / "hints.sqlite3"
    store = HintStore.open(file)

    async def set_and_flush(number: int) -> None:
        store.set(f"/{number}", NAME, "x")
        await store.flush()
        assert f"/{number}" in saved_paths(file)

    async with trio.open_nursery() as nursery:
        for number in range(30):
            nursery.start_soon(set_and_flush, number)
    assert len(saved_paths(file)) == 30
    assert store.statistics()["unsaved"] == 0
    await store.aclose()


def saved_paths(file):
    connection = sqlite3.connect(file)
    try:
        return {path.decode() for (path,) in connection.execute("SELECT path FROM hint")}
    finally:
        connection.close()


@pytest.mark.parametrize(
    "content", [b"not a database, but longer than a header" * 100, b"SQLite format 3\0" + b"\xff" * 9000]
)
async def test_unreadable_file_is_moved_aside_and_the_store_starts_empty(tmp_path, content):
    file = tmp_path / "hints.sqlite3"
    file.write_bytes(content)
    store = HintStore.open(file)
    assert store.statistics()["entries"] == 0
    store.set("/a", NAME, "x")
    await store.aclose()
    (aside,) = tmp_path.glob("hints.sqlite3.unreadable-*")
    assert aside.read_bytes() == content
    again = HintStore.open(file)
    assert again.get("/a", NAME) == "x"
    await again.aclose()


async def test_file_of_a_newer_version_is_moved_aside(tmp_path):
    file = tmp_path / "hints.sqlite3"
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    store = HintStore.open(file)
    await store.aclose()
    assert len(list(tmp_path.glob("hints.sqlite3.unreadable-*"))) == 1


async def test_table_of_another_shape_is_moved_aside(tmp_path):
    file = tmp_path / "hints.sqlite3"
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE hint (something TEXT)")
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    store = HintStore.open(file)
    await store.aclose()
    assert len(list(tmp_path.glob("hints.sqlite3.unreadable-*"))) == 1


def test_state_directory_that_cannot_be_made_is_an_error_with_advice(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot keep hints") as refused:
        HintStore.open(tmp_path / "file" / "hints.sqlite3")
    assert "fs.state_dir" in refused.value.advice


async def test_disk_that_takes_nothing_keeps_hints_in_force_and_says_so(tmp_path):
    file = tmp_path / "hints.sqlite3"
    store = HintStore.open(file)
    locker = sqlite3.connect(file, isolation_level=None)
    assert store._database is not None
    store._database._connection.execute("PRAGMA busy_timeout = 0")  # else the test waits for the lock
    locker.execute("BEGIN EXCLUSIVE")
    store.set("/a", NAME, "x")
    store.set("/b", NAME, "old")
    with pytest.raises(OutOfSpaceError, match="cannot be saved"):
        await store.flush()
    store.set("/b", NAME, "new")
    assert store.effective("/a", NAME, uid=ALICE) is not None
    locker.execute("ROLLBACK")
    locker.close()
    await store.aclose()
    again = HintStore.open(file)
    assert (again.get("/a", NAME), again.get("/b", NAME)) == ("x", "new")
    await again.aclose()


async def test_stored_hints_beyond_the_limit_are_left_out(tmp_path):
    file = tmp_path / "hints.sqlite3"
    store = HintStore.open(file)
    for number in range(5):
        store.set(f"/{number}", NAME, "x")
    await store.aclose()
    small = HintStore.open(file, most_entries=3)
    assert small.statistics()["entries"] == 3
    await small.aclose()


# --- random histories against a plain dictionary

paths = st.sampled_from(["/", "/a", "/a/b", "/a/b/c", "/a/bc", "/d", "/d/e"])
acts = st.one_of(
    st.tuples(st.just("set"), paths, st.sampled_from([None, ALICE]), st.sampled_from("xyz")),
    st.tuples(st.just("remove"), paths, st.sampled_from([None, ALICE])),
    st.tuples(st.just("forget"), paths),
    st.tuples(st.just("rename"), st.sampled_from([("/a/b", "/d"), ("/a", "/f"), ("/d", "/a/b"), ("/d/e", "/a/bc")])),
)


@given(st.lists(acts, max_size=25))
def test_any_history_agrees_with_a_plain_dictionary(history):
    store, model = HintStore(), {}

    def below(top):
        return [key for key in model if key[0] == top or key[0].startswith(top.rstrip("/") + "/")]

    for act in history:
        match act:
            case ("set", path, uid, value):
                store.set(path, NAME, value, uid=uid)
                model[path, uid] = value
            case ("remove", path, uid):
                if model.pop((path, uid), None) is not None:
                    store.remove(path, NAME, uid=uid)
            case ("forget", path):
                store.forget(path)
                for key in below(path):
                    del model[key]
            case ("rename", (old, new)):
                store.rename(old, new)
                moved = {(new + path[len(old) :], uid): model.pop((path, uid)) for path, uid in below(old)}
                for key in below(new):
                    del model[key]
                model.update(moved)
        assert {(p, u): store.get(p, NAME, uid=u) for p, u in model} == model
        assert store.statistics()["entries"] == len(model)
    store.forget(ROOT)
    assert store.statistics() == {"entries": 0, "bytes": 0, "unsaved": 0}


# --- where state lives


def test_state_directory_is_named_by_the_escaped_mount_point(tmp_path, monkeypatch):
    config = FsConfig(state_dir=tmp_path)
    assert state_directory(config, tmp_path / "a-b").parent == tmp_path
    assert state_directory(config, tmp_path / "a-b") != state_directory(config, tmp_path / "a" / "b")
    assert state_file(tmp_path).parent == tmp_path
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert str(state_directory(FsConfig(), tmp_path)).startswith("/var/lib/turbofs/")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_directory(FsConfig(), tmp_path).parent == tmp_path / "turbofs"
