"""The commands about writing, against the real control socket over files that a test invents."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import trio

from turbofs.cli import app, mount_table, output, progress, status, umount
from turbofs.cli.draining import Draining, left_text
from turbofs.cli.mount_table import Located
from turbofs.cli.umount import Unmounted
from turbofs.cli.writing_lines import writing_lines
from turbofs.errors import DeadlineExceededError, NotFoundError, NotPermittedError
from turbofs.fs.control_ops import ControlOps
from turbofs.fs.events import EventBus
from turbofs.wire import runtime_dir
from turbofs.wire.control_server import ControlServer

PLACE = "/mnt/invented"
LIMIT_S = 30.0


class Files:
    """A file system that has parked two files."""

    def __init__(self):
        self.events, self.level, self.reason, self.asked = EventBus(), "persisted", None, []
        self.writing = {"files": [], "draining": False}
        self.parked = {
            number: {
                "id": number,
                "path": f"/run/{number}.pt",
                "size": 3 << 20,
                "reason": "the target had changed",
                "parked_at": 1.7e9,
                "blake3": None,
                "hidden": f"/.turbofs/conflicts/{number}/{number}.pt",
            }
            for number in (3, 4)
        }

    def status(self, caller):
        return {"writing": self.writing}

    async def durability(self, path, caller):
        return self.level

    def durability_changed(self):
        return trio.Event()

    def broken_reason(self, path):
        return self.reason

    async def conflicts(self, caller):
        return list(self.parked.values())

    async def publish_conflict(self, conflict_id, to, caller):
        self.asked.append((conflict_id, to))
        replaced = {"size": 1 << 20, "mtime": 1.7e9} if to else None
        return {"id": conflict_id, "path": to or "/run/3.pt", "size": 3 << 20, "replaced": replaced}

    async def drop_conflict(self, conflict_id, caller):
        if conflict_id == 4:
            raise NotPermittedError("conflict 4 is not yours")
        if self.parked.pop(conflict_id, None) is None:
            raise NotFoundError(f"no conflict {conflict_id}")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Served at a control socket that the commands find for everything below PLACE."""
    found, path, started, end = Files(), tmp_path / "control.sock", threading.Event(), []

    async def serve():
        async with trio.open_nursery() as nursery:
            await nursery.start(ControlServer(path, ControlOps(found, {})).serve)
            end.append((trio.lowlevel.current_trio_token(), nursery.cancel_scope))
            started.set()

    def locate(text):
        if text.startswith("/mnt/other"):
            return Located("/mnt/other", "/")
        return Located(PLACE, text.removeprefix(PLACE) or "/")

    monkeypatch.setattr(mount_table, "locate", locate)
    monkeypatch.setattr(mount_table, "control_socket", lambda place: path)
    monkeypatch.setitem(output._mode, "json", False)
    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    assert started.wait(LIMIT_S)
    found.socket = path
    yield found
    token, scope = end[0]
    token.run_sync_soon(scope.cancel)
    thread.join(LIMIT_S)


def run(capsys, *arguments):
    """The exit code, stdout and stderr of one command, run in this process."""
    with pytest.raises(SystemExit) as caught:
        app.main(list(arguments))
    shown = capsys.readouterr()
    return caught.value.code, shown.out, shown.err


# --- conflicts


def test_conflicts_are_listed_and_shown_with_the_place_to_read_them(files, capsys):
    code, out, _ = run(capsys, "conflicts", "ls", PLACE)
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()] == [["3", "/run/3.pt"], ["4", "/run/4.pt"]]
    assert "3 MiB" in out
    assert "the target had changed" in out
    code, out, _ = run(capsys, "conflicts", "show", f"{PLACE}/run", "3")
    assert f"read_at: {PLACE}/.turbofs/conflicts/3/3.pt" in out.splitlines()
    _, out, _ = run(capsys, "conflicts", "ls", PLACE, "--json")
    assert [found["id"] for found in json.loads(out)["conflicts"]] == [3, 4]
    assert run(capsys, "conflicts", "show", PLACE, "5")[0] == 1
    files.parked.clear()
    assert run(capsys, "conflicts", "ls", PLACE)[1] == "no conflicts\n"


def test_publishing_says_what_was_replaced(files, capsys):
    code, out, _ = run(capsys, "conflicts", "publish", PLACE, "3")
    assert (code, "there was nothing of that name" in out) == (0, True)
    code, out, _ = run(capsys, "conflicts", "publish", PLACE, "3", "--to", f"{PLACE}/run/kept.pt")
    assert (code, "as /run/kept.pt (3 MiB); it replaced 1 MiB, changed 20" in out) == (0, True)
    assert files.asked == [(3, None), (3, "/run/kept.pt")]
    code, _, err = run(capsys, "conflicts", "publish", PLACE, "3", "--to", "/mnt/other/x")
    assert (code, "is not in the mount" in err) == (2, True)


def test_dropping_without_a_terminal_must_be_said_outright(files, capsys):
    code, _, err = run(capsys, "conflicts", "drop", PLACE, "3")
    assert (code, "only copy of /run/3.pt" in err) == (2, True)
    assert 3 in files.parked
    code, _, err = run(capsys, "conflicts", "drop", PLACE, "4", "--yes")
    assert (code, "not yours" in err) == (1, True)


def test_dropping_on_a_terminal_asks_once(files, capsys, monkeypatch):
    class Terminal:
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    code, _, err = run(capsys, "conflicts", "drop", PLACE, "3")
    assert (code, "nothing was deleted" in err, 3 in files.parked) == (1, True, True)
    monkeypatch.setattr("typer.confirm", lambda *_, **__: True)
    assert run(capsys, "conflicts", "drop", PLACE, "3")[:2] == (0, "conflict 3 is dropped\n")
    assert 3 not in files.parked


# --- wait


def test_waiting_for_something_broken_fails_with_the_reason(files, capsys):
    assert run(capsys, "wait", f"{PLACE}/run")[:2] == (0, f"{PLACE}/run: persisted\n")
    files.level, files.reason = "broken", "/run/3.pt: the quota is used up"
    code, _, err = run(capsys, "wait", f"{PLACE}/run", "--until", "staged")
    assert (code, "is broken: /run/3.pt: the quota is used up" in err) == (1, True)
    files.level = "staged"
    assert run(capsys, "wait", f"{PLACE}/run", "--timeout", "0s")[0] == 4


# --- the status of writing


def test_the_status_lists_what_is_staged_waiting_and_broken(files, capsys):
    files.writing = {
        "staging": {"directory": "/dev/shm/x", "on_tmpfs": True, "used_bytes": 3 << 20, "limit_bytes": 1 << 30},
        "files": [
            {"path": "/run/a", "state": "staged", "size": 2 << 20, "uploaded_bytes": 1 << 20, "error": None},
            {"path": "/run/b", "state": "waiting", "size": 1, "uploaded_bytes": 0, "error": "safe mode"},
        ],
        "acts": [{"act": "rename", "path": "/t", "to": "/latest", "waits_for": ["/run/a", "/run/b"]}],
        "broken": [{"path": "/run/c", "error": "quota", "when": 1.7e9}],
        "conflicts": 2,
        "draining": True,
        "left_file": "/var/lib/x/left.json",
        "later": 5,
    }
    code, out, _ = run(capsys, "status", PLACE)
    assert code == 0
    lines = [line.strip() for line in out.splitlines()]
    assert "staging: 3 MiB of 1 GiB in /dev/shm/x" in lines
    assert "staged  /run/a (2 MiB, 1 MiB of it sent)" in lines
    assert "waiting  /run/b (1 B): safe mode" in lines
    assert "rename /t to /latest, after /run/a, /run/b" in lines
    assert any(line.startswith("/run/c (20") and line.endswith(": quota") for line in lines)
    assert "conflicts: 2 (`turbofs conflicts ls` lists them)" in lines
    assert "draining: the mount ends once these are written" in lines
    assert "later: 5" in lines
    assert json.loads(run(capsys, "status", PLACE, "--json")[1])["writing"] == files.writing


def test_a_long_list_is_cut_for_people():
    files = [{"path": f"/{number}", "state": "staged", "size": 1} for number in range(50)]
    lines = list(writing_lines({"files": files}))
    assert len(lines) == 22
    assert lines[-1].strip() == "and 30 more (--json shows all)"
    assert list(writing_lines({"files": [], "acts": [], "broken": [], "conflicts": 0, "draining": False})) == []


def test_times_in_any_status_are_readable():
    lines = list(status._lines({"daemon": {"started": 1.7e9}, "parked_at": 1.7e9}))
    assert "1700000000" not in "".join(lines)


# --- the end of a mount


class Shown:
    def __init__(self):
        self.calls = []

    def __call__(self, done_bytes, total_bytes, words, line):
        self.calls.append((done_bytes, total_bytes, words, line))


def staged(*sizes, state="staged"):
    return [{"path": f"/{size}", "state": state, "size": size, "uploaded_bytes": 0} for size in sizes]


def test_draining_counts_down_what_is_not_written(files):
    watch, shown = Draining(files.socket), Shown()
    watch.look()
    watch.tell(shown)
    assert shown.calls == [], "nothing to write, nothing to say"
    files.writing = {"files": staged(4 << 20, 2 << 20) + staged(9, state="broken")}
    watch.look()
    watch.tell(shown)
    files.writing["files"][0]["uploaded_bytes"] = 3 << 20
    watch.look()
    watch.tell(shown)
    files.writing["files"] = files.writing["files"][1:]
    watch.look()
    watch.tell(shown)
    assert [call[:3] for call in shown.calls] == [
        (0, 6 << 20, "2 files left"),
        (3 << 20, 6 << 20, "2 files left"),
        (4 << 20, 6 << 20, "1 file left"),
    ]
    assert shown.calls[-1][3] == "writing: 1 file left, 2 MiB"


def test_what_is_left_is_read_from_the_file_that_the_daemon_named(files, tmp_path):
    file = tmp_path / "left.json"
    files.writing = {"files": staged(5), "left_file": str(file)}
    watch = Draining(files.socket)
    watch.look()
    assert watch.left() is None, "everything was written"
    document = {"files": 30, "bytes": 5 << 20, "where": "/var/lib/x/staging", "paths": [f"/{n}" for n in range(20)]}
    file.write_text(json.dumps(document))
    assert watch.left() == document
    text = left_text(document, PLACE)
    assert "30 files (5 MiB)" in text
    assert "/var/lib/x/staging" in text
    assert "and 22 more" in text
    os.utime(file, (time.time() - 3600,) * 2)
    assert watch.left() is None, "an earlier end's"
    file.write_text("{")
    broken = watch.left()
    assert str(file) in left_text(broken, PLACE)
    file.write_text('{"files": 0}')
    assert watch.left() is None


def test_a_daemon_that_does_not_answer_is_no_error(tmp_path):
    for socket in (None, tmp_path / "absent.sock"):
        watch = Draining(socket)
        watch.look()
        assert (watch.files, watch.left()) == (0, None)


@contextmanager
def ending_daemon(files, folder, monkeypatch):
    """A daemon whose mount is gone already: it holds its lock and answers until `files.end` is set."""
    monkeypatch.setenv("TURBOFS_RUNTIME_DIR", str(folder))
    monkeypatch.setattr(umount, "_LOOK_EVERY_S", 0.0)
    with subprocess.Popen(["true"]) as gone:
        pass
    started, files.end = threading.Event(), threading.Event()

    async def serve():
        with runtime_dir.held(PLACE, folder) as own:
            runtime_dir.write_record(own, runtime_dir.MountRecord(gone.pid, "memory:", PLACE, time.time()))
            async with trio.open_nursery() as nursery:
                await nursery.start(ControlServer(own / runtime_dir.SOCKET_NAME, ControlOps(files, {})).serve)
                started.set()
                await trio.to_thread.run_sync(files.end.wait, LIMIT_S)
                nursery.cancel_scope.cancel()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    assert started.wait(LIMIT_S)
    try:
        yield
    finally:
        files.end.set()
        thread.join(LIMIT_S)


def test_umount_follows_the_draining_to_the_end_of_the_daemon(tmp_path, monkeypatch):
    class Ending(Files):
        looks = 0

        def status(self, caller):
            self.looks += 1
            if self.looks == 3:
                (tmp_path / "left.json").write_text(json.dumps(left))
                self.end.set()
            sizes = (4 << 20, 2 << 20) if self.looks == 1 else (4 << 20,)
            return {"writing": {"files": staged(*sizes), "left_file": str(tmp_path / "left.json")}}

    left = {"files": 1, "bytes": 4 << 20, "where": str(tmp_path / "saved"), "paths": ["/run/a"]}
    shown, files = Shown(), Ending()
    monkeypatch.setattr(umount, "progress", lambda: nullcontext(shown))
    with ending_daemon(files, tmp_path / "run", monkeypatch):
        assert umount.unmount(PLACE, LIMIT_S) == Unmounted(PLACE, left)
    assert shown.calls[-1][:3] == (2 << 20, 6 << 20, "1 file left")


def test_umount_that_takes_too_long_says_what_is_still_written(tmp_path, monkeypatch):
    files = Files()
    files.writing = {"files": staged(4 << 20)}
    with (
        ending_daemon(files, tmp_path / "run", monkeypatch),
        pytest.raises(DeadlineExceededError, match="still writing after 0 s: 1 file left, 4 MiB"),
    ):
        umount.unmount(PLACE, 0)


def test_umount_says_loudly_what_is_left_and_succeeds(capsys, monkeypatch):
    left = {"files": 1, "bytes": 5, "where": "/var/lib/x/staging", "paths": ["/run/a"]}
    monkeypatch.setitem(output._mode, "json", False)
    monkeypatch.setattr(umount, "unmount", lambda *_: Unmounted(PLACE, left))
    code, out, err = run(capsys, "umount", PLACE)
    assert (code, out) == (0, f"{PLACE} is unmounted\n")
    assert "NOT WRITTEN to the source: 1 file (5 B), kept in /var/lib/x/staging; the next `turbofs mount`" in err
    code, out, err = run(capsys, "umount", PLACE, "--json")
    assert json.loads(out) == {"mountpoint": PLACE, "unmounted": True, "left": left}
    assert "NOT WRITTEN" in err


# --- progress


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(capsys, monkeypatch, terminal):
    monkeypatch.setitem(output._mode, "json", False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    with progress.progress() as show:
        show(1 << 20, 2 << 20, "1 file left", "writing: 1 file left")
    err = capsys.readouterr().err
    assert ("writing: 1 file left" in err) is not terminal


def test_no_bar_with_json(monkeypatch):
    monkeypatch.setitem(output._mode, "json", True)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert isinstance(progress.progress(), progress._Lines)


def test_the_state_directory_is_named_by_its_path_only(tmp_path):
    """`left_file` is a text from the daemon: a place that is none is told, and raises nothing."""
    watch = Draining(None)
    watch._left_file = Path(tmp_path)
    assert "cannot be read" in left_text(watch.left(), PLACE)
