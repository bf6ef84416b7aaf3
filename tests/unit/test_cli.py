"""The command line's parts, without a mount: paths, errors, exit codes, output, the daemon's messages."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from turbofs import errors, mountinfo
from turbofs.cli import app, background, mount_helper, mount_point, mount_table, output, umount
from turbofs.cli.failures import exit_code, only_turbo_error
from turbofs.cli.hint import parse_hint
from turbofs.cli.mount_table import Located
from turbofs.cli.notify import PipeReporter, notify_systemd
from turbofs.config import Config, MountConfig, WriteConfig
from turbofs.errors import (
    BusyError,
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    NotReachableError,
    SourceUnavailableError,
    TurboError,
)
from turbofs.units import parse_duration

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_runtime_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TURBOFS_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setitem(output._mode, "json", False)


def run(capsys, *arguments):
    """The exit code, stdout and stderr of one command, run in this process."""
    with pytest.raises(SystemExit) as caught:
        app.main(list(arguments))
    shown = capsys.readouterr()
    return caught.value.code, shown.out, shown.err


# --- the mount table


def test_mountinfo_is_read_with_its_escapes_and_devices(tmp_path):
    table = tmp_path / "mountinfo"
    table.write_bytes(
        b"22 27 0:21 / /proc rw,relatime - proc proc rw\n"
        b"30 27 0:45 / /mnt/a\\040b rw,nosuid shared:5 - fuse.turbofs file:///x\\134y rw,user_id=0\n"
        b"31 27 0:46 / /mnt/\xff rw master:1 shared:2 - fuse.turbofs memory: rw\n"
        b"broken line\n"
    )
    found = mount_table.turbofs_mounts(mountinfo.mount_entries(table))
    assert set(found) == {"/mnt/a b", "/mnt/" + os.fsdecode(b"\xff")}
    assert found["/mnt/a b"].source == "file:///x\\y"
    assert found["/mnt/a b"].device == "0:45"


def test_paths_are_resolved_up_to_the_mount_and_not_beyond(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real/../real/mnt")
    (tmp_path / "absolute").symlink_to(tmp_path / "link")
    place = str(tmp_path / "real/mnt")
    touched = []
    looked_up = os.lstat
    monkeypatch.setattr(os, "lstat", lambda path, **kwargs: touched.append(str(path)) or looked_up(path, **kwargs))
    monkeypatch.chdir(tmp_path)
    for text, inner in [
        (f"{place}/a/b", "/a/b"),
        (place, "/"),
        (f"{place}/", "/"),
        (f"{place}/a/../b/./c", "/b/c"),
        ("link/x", "/x"),
        ("absolute/x/y", "/x/y"),
        ("real/mnt/../mnt/z", "/z"),
    ]:
        assert mount_table.resolve(text, {place}) == Located(place, inner), text
    assert mount_table.resolve(f"{place}/../other", {place}) == str(tmp_path / "real/other")
    assert mount_table.resolve(f"{place}2", {place}) == f"{place}2"
    assert not [path for path in touched if path == place or path.startswith(f"{place}/")]


def test_links_in_a_circle_are_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(InvalidRequestError, match="too many symbolic links"):
        mount_table.resolve(str(tmp_path / "a/x"), {"/mnt"})


@given(st.lists(st.sampled_from(["..", ".", "a", "b", ""]), max_size=8))
def test_dots_mean_what_they_mean_to_the_kernel(parts):
    place = "/nonexistent-1/nonexistent-2"
    text = "/".join([place, *parts])
    expected = os.path.normpath(text)
    found = mount_table.resolve(text, {place})
    if expected == place or expected.startswith(place + "/"):
        assert found == Located(place, expected.removeprefix(place) or "/")
    else:
        assert found == expected


def test_a_path_in_no_mount_names_the_mounts_there_are(monkeypatch):
    monkeypatch.setattr(mount_table, "known_mountpoints", lambda: {"/mnt/one"})
    with pytest.raises(NotReachableError) as caught:
        mount_table.locate("/mnt/two/file")
    assert "/mnt/one" in caught.value.advice


# --- errors and exit codes


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TurboError("x"), 1),
        (BusyError("x"), 1),
        (ConfigError("x"), 2),
        (InvalidRequestError("x"), 2),
        (NotReachableError("x"), 3),
        (SourceUnavailableError("x"), 3),
        (DeadlineExceededError("x"), 4),
    ],
)
def test_exit_codes(error, code):
    assert exit_code(error) == code


def test_every_error_has_advice_and_an_exit_code():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TurboError)]
    assert len(kinds) > 20
    for kind in kinds:
        assert kind.advice
        assert exit_code(kind("x")) in {1, 2, 3, 4}


def test_errors_are_found_in_groups_but_never_hide_a_defect():
    cause = BusyError("busy")
    assert only_turbo_error(ExceptionGroup("", [ExceptionGroup("", [cause])])) is cause
    assert only_turbo_error(ExceptionGroup("", [cause, ZeroDivisionError()])) is None
    assert only_turbo_error(ZeroDivisionError()) is None


def test_errors_are_two_lines_on_stderr_and_a_document_with_json(capsys):
    code, out, err = run(capsys, "status", "/")
    assert (code, out) == (3, "")
    assert err.startswith("turbofs: / is in no TurboFS mount\n  mounts of this machine:")
    code, out, _ = run(capsys, "status", "/", "--json")
    assert code == 3
    assert json.loads(out)["error"] == {
        "code": "ENOTCONN",
        "message": "/ is in no TurboFS mount",
        "advice": json.loads(out)["error"]["advice"],
        "exit_code": 3,
    }


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nonsense"], 2),
        (["mount"], 2),
        (["mount", "--memory"], 2),
        (["mount", "memory:", "/tmp", "--memory", "lots"], 2),
        (["mount", "nonsense://x", "/tmp"], 2),
        (["mount", "memory:", "/nonexistent"], 2),
        (["mount", "memory:", "/etc/passwd"], 2),
        (["mount", "/tmp"], 2),
        (["umount", "/"], 2),
        (["umount", "/", "--timeout", "soon"], 2),
        (["hint", "/etc", "prefetch"], 2),
        (["hint", "/etc", "prefetch=all"], 3),
        (["prefetch", "/etc", "--range", "1-2"], 2),
        (["prefetch", "/etc"], 3),
        (["wait", "/etc", "--until", "soon"], 2),
        (["wait", "/etc"], 3),
        (["conflicts"], 2),
        (["conflicts", "burn"], 2),
        (["conflicts", "ls", "/etc"], 3),
        (["conflicts", "show", "/etc", "x"], 2),
        (["conflicts", "show", "/etc", "0"], 2),
        (["conflicts", "publish", "/etc", "1", "--timeout", "soon"], 2),
        (["conflicts", "drop", "/etc", "1", "--yes"], 3),
        (["status", "/etc"], 3),
        (["status"], 0),
        (["--version"], 0),
        (["--help"], 0),
    ],
)
def test_exit_codes_of_commands(capsys, arguments, code):
    assert run(capsys, *arguments)[0] == code


def test_help_groups_the_commands_and_each_takes_json(capsys):
    _, text, _ = run(capsys, "--help")
    for group in ("Mounts", "Hints", "Care"):
        assert group in text
    for command in ("mount", "umount", "status", "hint", "prefetch", "wait", "doctor", "bench"):
        assert command in text
        assert "--json" in run(capsys, command, "--help")[1]
    for act in ("ls", "show", "publish", "drop"):
        assert "--json" in run(capsys, "conflicts", act, "--help")[1]


def test_commands_start_without_loading_clients_or_the_event_loop():
    program = "import sys; import turbofs.cli.app; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"pyarrow", "hdfs_native", "trio", "pyfuse3", "httpx", "numpy", "av", "prometheus_client", "psutil"}
    assert heavy.isdisjoint(loaded)


# --- mounting: checks before anything is started


def test_a_source_around_the_mount_point_is_refused(tmp_path):
    (tmp_path / "mnt/sub").mkdir(parents=True)
    for place, source in [
        ("mnt", tmp_path),
        ("mnt", tmp_path / "mnt"),
        ("mnt", tmp_path / "mnt/sub"),
        ("mnt/sub", tmp_path),
    ]:
        with pytest.raises(ConfigError, match="inside one another"):
            mount_point.prepare(str(tmp_path / place), f"file://{source}", print)
    (tmp_path / "mnt2").mkdir()
    assert mount_point.prepare(str(tmp_path / "mnt2"), f"file://{tmp_path}/mnt", print) == str(tmp_path / "mnt2")


def test_a_linked_source_around_the_mount_point_is_refused(tmp_path):
    (tmp_path / "data/mnt").mkdir(parents=True)
    (tmp_path / "link").symlink_to("data")
    with pytest.raises(ConfigError, match="inside one another"):
        mount_point.prepare(str(tmp_path / "data/mnt"), f"file://{tmp_path}/link", print)


def test_links_to_the_mount_point_are_followed(tmp_path):
    (tmp_path / "mnt").mkdir()
    (tmp_path / "link").symlink_to("mnt")
    assert mount_point.prepare(str(tmp_path / "link"), "memory:", print) == str(tmp_path / "mnt")


def test_staging_lies_outside_of_the_mount_and_of_the_source(tmp_path, capsys):
    for name in ("mnt", "data/staging", "fine"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("mnt/sub")
    (tmp_path / "other").symlink_to("data/staging")
    for name, message in [
        ("mnt", "wait for itself"),
        ("mnt/sub/new", "wait for itself"),
        ("link", "wait for itself"),
        ("data/staging", "inside the source"),
        ("other", "inside the source"),
    ]:
        arguments = [f"file://{tmp_path}/data", str(tmp_path / "mnt"), "--staging-dir", str(tmp_path / name)]
        code, _, err = run(capsys, "mount", *arguments)
        assert (code, message in err) == (2, True), name
    code, _, err = run(capsys, "mount", "memory:", str(tmp_path / "mnt"), "--staging-dir", "fine")
    assert (code, "absolute path" in err) == (2, True)
    mount_point.check_staging(str(tmp_path / "fine"), str(tmp_path / "mnt"), f"file://{tmp_path}/data")


def test_staging_inside_another_mount_is_refused(monkeypatch):
    monkeypatch.setattr(mount_table, "turbofs_mounts", lambda: {"/mnt/other": None})
    with pytest.raises(ConfigError, match="inside the mount /mnt/other"):
        mount_point.check_staging("/mnt/other/staging", "/mnt/x", "memory:")


def test_mount_helper_takes_fstab_options_and_checks_with_f(tmp_path, capsys):
    options = f"rw,_netdev,x-systemd.automount,memory=1GiB,config={tmp_path}/c.toml"
    (tmp_path / "c.toml").write_text('[fs]\nattribute_timeout = "2s"\n')
    mount_helper.main(["memory:", str(tmp_path), "-sfnv", "-o", options])
    with pytest.raises(SystemExit) as caught:
        mount_helper.main(["memory:", str(tmp_path), "-f", "-o", "memori=1GiB"])
    assert caught.value.code == 2
    assert "did you mean 'memory'" in capsys.readouterr().err


# --- small parts


def test_hints_may_be_named_short_or_in_full():
    assert parse_hint("prefetch=ranges=0+4") == ("user.turbofs.prefetch", "ranges=0+4")
    assert parse_hint("user.turbofs.prefetch=all") == ("user.turbofs.prefetch", "all")
    for text in ("prefetch", "=all", "user.turbofs.=all"):
        with pytest.raises(InvalidRequestError):
            parse_hint(text)


def test_processes_that_hold_a_directory_are_named(tmp_path):
    (tmp_path / "file").touch()
    program = "import sys; f = open('file'); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        child.stdout.readline()
        assert child.pid in {holder.pid for holder in umount.holders(str(tmp_path))}
        assert umount.holders(str(tmp_path / "fil")) == []
        assert [holder.pid for holder in umount.holders(str(tmp_path / "file"))] == [child.pid]
    finally:
        child.communicate()


def test_the_pipe_carries_progress_then_readiness_and_is_closed():
    reading, writing = os.pipe()
    reporter = PipeReporter(writing)
    reporter.progress("waiting")
    reporter.failed(BusyError("taken", advice="wait"))
    reporter.progress("nobody hears this")
    with os.fdopen(reading) as pipe:
        lines = [json.loads(line) for line in pipe]
    assert lines[0] == {"kind": "progress", "message": "waiting"}
    assert lines[1]["class"] == "BusyError"
    assert lines[1]["error"]["advice"] == "wait"


def test_a_parent_that_has_gone_does_not_end_the_daemon():
    reading, writing = os.pipe()
    os.close(reading)
    PipeReporter(writing).ready()


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_notified_where_it_asked(tmp_path, monkeypatch, abstract):
    name = f"\0turbofs-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(name)
        monkeypatch.setenv("NOTIFY_SOCKET", name.replace("\0", "@"))
        notify_systemd("READY=1", "STATUS=up")
        assert receiver.recv(100) == b"READY=1\nSTATUS=up"
    notify_systemd("STOPPING=1")  # nobody listens any more: no error
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify_systemd("READY=1")


def test_json_shows_names_that_are_not_utf8():
    text = output.to_json({"path": os.fsdecode(b"/\xff"), "value": b"\xffx", "file": Path("/a")})
    assert json.loads(text) == {"path": "/\udcff", "value": "\\xffx", "file": "/a"}
    text.encode()


class Waiting:
    """A source that is down in several ways, then there; without reasons it only takes its time."""

    uri = "hdfs://nn/x"

    def __init__(self, *reasons):
        self.reasons = reasons

    async def connect(self, *, wait_s, progress):
        for reason in self.reasons:
            progress(SourceUnavailableError(reason), wait_s)
        await trio.sleep(wait_s - 1)


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        (("refused", "refused", "safe mode", "refused"), ["refused", "safe mode"]),
        ((), ["no answer yet"]),
    ],
)
async def test_a_start_tells_each_reason_once_and_never_keeps_silent(autojump_clock, reasons, expected):
    from turbofs.cli import daemon

    told = []

    class Reporter:
        progress = staticmethod(told.append)

    await daemon._connect(Waiting(*reasons), 10, Reporter())
    assert [text.rpartition(": ")[2] for text in told] == expected


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_systemd_unit_verifies(tmp_path):
    unit = tmp_path / "turbofs-mount@mnt-ckpt.service"
    shutil.copy(ROOT / "systemd/turbofs-mount@.service", unit)
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_systemd_unit_gives_the_end_of_a_mount_the_time_that_it_takes():
    unit = (ROOT / "systemd/turbofs-mount@.service").read_text()
    umount_s = parse_duration(re.search(r"^ExecStop=.* umount --timeout (\S+) ", unit, re.MULTILINE)[1])
    stop_s = 60 * int(re.search(r"^TimeoutStopSec=(\d+)min$", unit, re.MULTILINE)[1])
    saving_s = 300  # what was not drained goes to disk
    assert WriteConfig().drain_s + saving_s <= umount_s < stop_s
    assert "\nRuntimeDirectoryPreserve=yes\n" in unit


def test_a_log_that_cannot_be_written_is_wrong_use(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    config = Config(MountConfig("memory:", tmp_path))
    with pytest.raises(ConfigError, match="cannot log to"):
        background.start(config, tmp_path / "file/daemon.log", print)
