"""The doctor's checks, each on what it looks for; on sources in memory and servers on loopback."""

from __future__ import annotations

import contextlib
import email.utils
import fcntl
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import trio

from turbofs.cli import doctor
from turbofs.cli.checks import fuse, memory, mounts, staging, writing
from turbofs.cli.checks import source as source_checks
from turbofs.cli.checks.result import Verdict
from turbofs.config import SourceConfig
from turbofs.model import Attributes, FileKind, FileVersion
from turbofs.mountinfo import MountEntry
from turbofs.source.registry import open_source

GIB = 1 << 30


@pytest.fixture(autouse=True)
def own_runtime_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TURBOFS_RUNTIME_DIR", str(tmp_path / "run"))


# --- FUSE


def test_a_missing_device_is_a_failure_with_the_remedy(tmp_path):
    found = fuse.device(tmp_path / "fuse")
    assert found.verdict is Verdict.FAIL
    assert "modprobe fuse" in found.advice


def test_a_file_in_place_of_the_device_is_a_failure(tmp_path):
    (tmp_path / "fuse").touch()
    assert "not a device" in fuse.device(tmp_path / "fuse").message


def test_a_device_that_opens_is_fine():
    assert fuse.device(Path("/dev/null")).verdict is Verdict.OK


def test_a_device_without_permission_is_a_failure(monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    found = fuse.device(Path("/dev/null"))
    assert found.verdict is Verdict.FAIL
    assert "cannot be opened by you" in found.message


def test_fusermount3_must_be_there_and_setuid_for_users(tmp_path):
    assert "install the package fuse3" in fuse.helper(0, str(tmp_path)).advice
    program = tmp_path / "fusermount3"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert fuse.helper(0, str(tmp_path)).verdict is Verdict.OK
    assert "not setuid" in fuse.helper(1000, str(tmp_path)).message


@pytest.mark.parametrize(
    ("content", "allowed"),
    [("user_allow_other\n", True), ("# user_allow_other\n", False), ("  user_allow_other # yes\n", True), ("", False)],
)
def test_user_allow_other_is_read_from_fuse_conf(tmp_path, content, allowed):
    (tmp_path / "fuse.conf").write_text(content)
    assert fuse.user_allow_other(1000, tmp_path / "fuse.conf").verdict is (Verdict.OK if allowed else Verdict.WARN)
    assert fuse.user_allow_other(0, tmp_path / "fuse.conf").verdict is Verdict.OK
    assert fuse.user_allow_other(1000, tmp_path / "absent").verdict is Verdict.WARN


# --- memory and mounts


@pytest.mark.parametrize(("budget", "verdict"), [(GIB, Verdict.OK), (3 * GIB, Verdict.WARN), (4 * GIB, Verdict.FAIL)])
def test_the_budget_is_held_against_the_limit(tmp_path, budget, verdict):
    for name, content in {"proc/meminfo": "MemTotal: 67108864 kB\n", "proc/self/cgroup": "0::/job\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "sys/fs/cgroup/job").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/job/memory.max").write_text(f"{4 * GIB}\n")
    found = memory.budget(budget, tmp_path)
    assert found.verdict is verdict
    assert "/sys/fs/cgroup/job/memory.max" in found.message


def test_a_low_read_ahead_is_a_warning_with_the_command(tmp_path):
    entry = MountEntry("/mnt/x", "fuse.turbofs", "memory:", "0:45")
    assert mounts.read_ahead(entry, 4096, tmp_path).verdict is Verdict.WARN
    (tmp_path / "class/bdi/0:45").mkdir(parents=True)
    (tmp_path / "class/bdi/0:45/read_ahead_kb").write_text("128\n")
    found = mounts.read_ahead(entry, 4096, tmp_path)
    assert found.verdict is Verdict.WARN
    assert "echo 4096 >" in found.advice
    (tmp_path / "class/bdi/0:45/read_ahead_kb").write_text("4096\n")
    assert mounts.read_ahead(entry, 4096, tmp_path).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("state", "mounted", "verdict", "text"),
    [
        ("alive", True, Verdict.OK, "answers"),
        ("hanging", True, Verdict.FAIL, "does not answer"),
        ("dead", True, Verdict.FAIL, "dead mount left over"),
        ("dead", False, Verdict.WARN, "without cleaning up"),
        ("unknown", True, Verdict.WARN, "not to be found"),
    ],
)
def test_daemons_are_told_apart(monkeypatch, state, mounted, verdict, text):
    mount = {"mountpoint": "/mnt/x", "source": "memory:", "pid": 7, "mounted": mounted, "state": state}
    monkeypatch.setattr(mounts, "list_mounts", lambda: [mount])
    (found,) = mounts.alive()
    assert (found.verdict, text in found.message) == (verdict, True)
    assert mounts.alive("/mnt/y")[0].verdict is Verdict.FAIL


# --- staging and writing


def machine(root, *, filesystem="tmpfs", files=()):
    """A tree that stands for "/": its mount table, and files that only have to be there or hold a text."""
    table = f"22 1 0:21 / / rw - ext4 /dev/x rw\n23 22 0:22 / /stage rw - {filesystem} x rw\n"
    for name, content in {"proc/self/mountinfo": table, **dict(files)}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(
    ("directory", "uid", "files", "verdict", "text"),
    [
        ("/stage/x", 0, {}, Verdict.OK, "in memory"),
        ("/data/x", 0, {}, Verdict.WARN, "is on ext4"),
        ("/tmp/x", 0, {}, Verdict.WARN, "cleaned away"),
        ("/var/tmp/x", 0, {}, Verdict.WARN, "30 days"),
        ("/run/user/0/x", 0, {}, Verdict.WARN, "logs out"),
        ("/dev/shm/x", 60000, {"run/systemd/seats/x": ""}, Verdict.WARN, "RemoveIPC"),
        ("/dev/shm/x", 0, {"run/systemd/seats/x": ""}, Verdict.WARN, "is on ext4"),
        ("/dev/shm/x", 60000, {}, Verdict.WARN, "is on ext4"),
        (
            "/dev/shm/x",
            60000,
            {"run/systemd/seats/x": "", "etc/systemd/logind.conf.d/x.conf": "[Login]\nRemoveIPC=no\n"},
            Verdict.WARN,
            "is on ext4",
        ),
        ("/run/user/0/x", 0, {"var/lib/systemd/linger/root": ""}, Verdict.WARN, "is on ext4"),
    ],
)
def test_a_place_that_forgets_or_is_slow_is_pointed_out(tmp_path, directory, uid, files, verdict, text):
    found = staging.place(Path(directory), uid, machine(tmp_path, files=files))
    assert (found.verdict, text in found.message) == (verdict, True), found.message
    assert bool(found.advice) is (verdict is not Verdict.OK)


def test_staging_must_be_writable(tmp_path, monkeypatch):
    assert staging.usable(tmp_path / "new/deep").verdict is Verdict.OK
    (tmp_path / "file").touch()
    assert "not a directory" in staging.usable(tmp_path / "file/x").message
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "not writable" in staging.usable(tmp_path).message


def test_staging_that_does_not_fit_is_pointed_out(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "filesystem_of", lambda _: "tmpfs")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {(8 * GIB) >> 10} kB\n")
    found = os.statvfs(tmp_path)
    free = found.f_bavail * found.f_frsize
    assert staging.room(tmp_path, 0, 1 << 20, 1 << 20, tmp_path).verdict is Verdict.OK
    assert staging.room(tmp_path / "new", 0, 1 << 20, 1 << 20, tmp_path).verdict is Verdict.OK
    assert "writers are refused earlier" in staging.room(tmp_path, 0, 2 * free, GIB, tmp_path).message
    assert "exceed the memory limit" in staging.room(tmp_path, 8 * GIB - 1, 8 * GIB, GIB, tmp_path).message


def test_what_a_dead_mount_left_in_staging_is_pointed_out(tmp_path):
    assert staging.leftover(tmp_path / "absent", None) == []
    (tmp_path / "data").mkdir()
    assert staging.leftover(tmp_path, "/mnt/x") == []
    (tmp_path / "data/7").write_bytes(b"x" * 5000)
    with (tmp_path / "lock").open("w") as lock:
        (found,) = staging.leftover(tmp_path, "/mnt/x")
        assert (found.verdict, "in 1 file that" in found.message) == (Verdict.WARN, True)
        assert "turbofs mount SOURCE /mnt/x" in found.advice
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert staging.leftover(tmp_path, "/mnt/x") == [], "a daemon has it"


def test_a_mounts_own_word_about_its_writing_is_passed_on(tmp_path):
    area = {"directory": str(tmp_path), "used_bytes": 0, "limit_bytes": 1 << 20}
    status = {"writing": {"staging": area, "broken": [], "conflicts": 0}}
    assert {result.name for result in writing.mount("/mnt/x", status, 0, GIB)} == {"staging", "staging room"}
    status["writing"] |= {"broken": [{"path": "/run/a", "error": "quota"}], "conflicts": 2}
    results = {result.name: result for result in writing.mount("/mnt/x", status, 0, GIB)}
    assert results["broken files"].verdict is Verdict.FAIL
    assert "/run/a: quota" in results["broken files"].message
    assert results["conflicts"].verdict is Verdict.WARN
    assert writing.mount("/mnt/x", status | {"read_only": True}, 0, GIB) == []
    assert writing.mount("/mnt/x", {}, 0, GIB) == []


def test_a_daemon_that_cannot_tell_the_last_close_is_pointed_out(monkeypatch):
    monkeypatch.setattr(writing, "fdinfo_names_inodes", lambda: True)
    assert writing.closes(0, lets_others_in=True).verdict is Verdict.OK
    assert writing.closes(1000, lets_others_in=False).verdict is Verdict.OK
    assert "other users' processes" in writing.closes(1000, lets_others_in=True).message
    monkeypatch.setattr(writing, "fdinfo_names_inodes", lambda: False)
    assert "each close publishes" in writing.closes(0, lets_others_in=True).message


@pytest.mark.parametrize(
    ("user", "verdict"),
    [("hdfs", Verdict.OK), ("hdfs/nn.example@REALM", Verdict.OK), ("alice", Verdict.WARN), ("hdfs2", Verdict.WARN)],
)
def test_an_identity_that_cannot_give_files_away_is_pointed_out(user, verdict):
    top = Attributes(FileKind.DIRECTORY, FileVersion(0, 0), 0o755, "hdfs", "supergroup")
    (found,) = writing.identity({"user": user}, top)
    assert found.verdict is verdict
    assert ("cannot chown to others" in found.message) is (verdict is Verdict.WARN)
    assert writing.identity({}, top) == []


def test_a_configured_staging_directory_is_looked_at(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(f'[mount]\nstaging_dir = "{tmp_path}/staging"\n')
    names = [result.name for result in doctor.examine(f"file://{tmp_path}", file)]
    assert {"staging directory", "staging", "last close"} <= set(names)
    file.write_text(f'[mount]\nread_only = true\nstaging_dir = "{tmp_path}/staging"\n')
    names = [result.name for result in doctor.examine(f"file://{tmp_path}", file)]
    assert not {"staging directory", "staging", "last close"} & set(names)


# --- the source


@contextlib.asynccontextmanager
async def local(path):
    source = open_source(f"file://{path}", SourceConfig(), trio.CapacityLimiter(8))
    try:
        yield source
    finally:
        await source.aclose()


async def test_a_source_that_answers_and_one_that_does_not(tmp_path):
    async with local(tmp_path) as source:
        assert (await source_checks.reachable(source)).verdict is Verdict.OK
    async with local(tmp_path / "absent") as source:
        found = await source_checks.reachable(source)
        assert found.verdict is Verdict.FAIL
        assert found.advice


async def test_private_files_are_pointed_at(tmp_path):
    (tmp_path / "run/step-1").mkdir(parents=True)
    (tmp_path / "run/step-1/model.safetensors").write_bytes(b"x")
    (tmp_path / "run/step-1/model.safetensors").chmod(0o600)
    async with local(tmp_path) as source:
        await source.connect()
        found, versions = await source_checks.files(source)
        assert found.verdict is Verdict.WARN
        assert "/run/step-1/model.safetensors" in found.message
        (tmp_path / "run/step-1/model.safetensors").chmod(0o644)
        assert versions.message.startswith("strong")
        assert (await source_checks.files(source))[0].verdict is Verdict.OK


@contextlib.contextmanager
def web_server(skew_s):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response_only(200)
            self.send_header("Date", email.utils.formatdate(time.time() + skew_s, usegmt=True))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("skew_s", "verdict", "text"),
    [(0, Verdict.OK, "within"), (3600, Verdict.WARN, "ahead"), (-120, Verdict.WARN, "behind")],
)
async def test_the_name_nodes_clock_is_compared(skew_s, verdict, text):
    with web_server(skew_s) as address:
        web, clock = await source_checks.web({"web": address})
    assert web.verdict is Verdict.OK
    assert (clock.verdict, text in clock.message) == (verdict, True)


async def test_a_web_port_that_is_closed_or_unknown_is_a_failure():
    with web_server(0) as address:
        pass
    for description in ({"web": address}, {"web": None}):
        (found,) = await source_checks.web(description)
        assert found.verdict is Verdict.FAIL
        assert "versions are weak" in found.message
    assert await source_checks.web({}) == []


def test_a_server_without_a_date_is_a_warning():
    assert source_checks.clock(None, time.time()).verdict is Verdict.WARN
    assert source_checks.clock("yesterday", time.time()).verdict is Verdict.WARN


# --- all together


def test_the_whole_of_a_healthy_tree_has_no_failure(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    results = {result.name: result for result in doctor.examine(f"file://{tmp_path}")}
    assert {"fuse device", "fusermount3", "user_allow_other", "memory", "daemon", "source", "readable files"} <= set(
        results
    )
    assert results["source"].verdict is Verdict.OK


def test_a_wrong_source_or_directory_is_one_failure(tmp_path):
    sources = [result for result in doctor.examine("nonsense://x") if result.name == "source"]
    assert [result.verdict for result in sources] == [Verdict.FAIL]
    daemons = [result for result in doctor.examine(str(tmp_path)) if result.name == "daemon"]
    assert [result.verdict for result in daemons] == [Verdict.FAIL]
    assert "is not mounted" in daemons[0].message
