"""The folder of a mount's control socket: its name, its lock, and what a dead daemon leaves."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbofs.errors import BusyError, ConfigError, MountError
from turbofs.wire import runtime_dir

PATHS = ["/", "/mnt/ckpt", "//mnt//ckpt/", "/mnt/a b", "/mnt/a-b", "/.hidden/.x", "/mnt/ü", "/mnt/a\\b", "/x:y_z.1"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.skipif(shutil.which("systemd-escape") is None, reason="systemd-escape is not installed")
def test_names_are_those_of_systemd_escape(path):
    expected = subprocess.run(["systemd-escape", "--path", path], capture_output=True, text=True, check=True).stdout
    assert runtime_dir.escape_path(path) == expected.rstrip("\n")


def test_a_long_name_is_shortened_to_what_a_socket_path_takes(tmp_path):
    base = Path("/run/user/1000/turbofs")
    first, second = "/mnt/" + "a" * 200 + "/1", "/mnt/" + "a" * 200 + "/2"
    names = {runtime_dir.mount_name(path, base) for path in (first, second)}
    assert len(names) == 2
    for name in names:
        assert len(os.fsencode(base / name / runtime_dir.SOCKET_NAME)) <= 107
        assert name.startswith("mnt-aaa")


def test_shortening_never_cuts_an_escape_in_two():
    base = Path("/run/turbofs")
    for length in range(60, 100):
        head, _, _ = runtime_dir.mount_name("/mnt/" + "a" * (length - 20) + "-" * 60, base).partition("~")
        assert re.fullmatch(r"([a-z-]|\\x2d)*", head)


def test_the_longest_path_can_be_bound(tmp_path):
    folder = runtime_dir.folder_of("/" + "x" * 300, tmp_path)
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / runtime_dir.SOCKET_NAME))


@given(st.text(st.characters(exclude_characters="\0"), min_size=1, max_size=400), st.integers(1, 60))
def test_every_name_is_one_safe_short_file_name(path, base_length):
    base = Path("/" + "b" * base_length)
    name = runtime_dir.mount_name(os.fsdecode(os.fsencode(path.encode("utf-8", "replace").decode())), base)
    assert "/" not in name
    assert name not in {"", ".", ".."}
    assert len(os.fsencode(base / name / runtime_dir.SOCKET_NAME)) <= 107


def test_a_base_without_room_is_refused():
    with pytest.raises(ConfigError, match="too long"):
        runtime_dir.mount_name("/mnt/" + "x" * 200, Path("/" + "b" * 100))


def test_a_held_folder_is_busy_for_others_and_gone_afterwards(tmp_path):
    with runtime_dir.held("/mnt/x", tmp_path / "run") as folder:
        runtime_dir.write_record(folder, runtime_dir.MountRecord(1, "memory:", "/mnt/x", 5.0))
        assert runtime_dir.daemon_alive(folder)
        assert runtime_dir.list_records([tmp_path / "run"])[0][1].source == "memory:"
        with pytest.raises(BusyError, match="daemon 1"), runtime_dir.held("/mnt/x", tmp_path / "run"):
            pass
    assert not folder.exists()
    assert not runtime_dir.daemon_alive(folder)


def test_a_daemon_starts_while_a_client_tries_its_lock(tmp_path):
    folder = runtime_dir.folder_of("/mnt/x", tmp_path)
    folder.mkdir(mode=0o755)
    client = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(client, fcntl.LOCK_EX)
    threading.Timer(0.02, os.close, [client]).start()
    with runtime_dir.held("/mnt/x", tmp_path):
        assert runtime_dir.daemon_alive(folder)


def test_what_a_killed_daemon_leaves_is_taken_over(tmp_path):
    program = f"""
import os, signal, socket
from pathlib import Path
from turbofs.wire import runtime_dir
with runtime_dir.held("/mnt/x", Path({str(tmp_path)!r})) as folder:
    socket.socket(socket.AF_UNIX).bind(str(folder / "control.sock"))
    runtime_dir.write_record(folder, runtime_dir.MountRecord(os.getpid(), "memory:", "/mnt/x", 1.0))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    folder = runtime_dir.find_folder("/mnt/x", [tmp_path])
    assert folder is not None
    assert not runtime_dir.daemon_alive(folder)
    with runtime_dir.held("/mnt/x", tmp_path) as folder:
        assert not (folder / runtime_dir.SOCKET_NAME).exists()
        assert runtime_dir.read_record(folder) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder away")
def test_a_folder_that_belongs_to_somebody_else_is_refused(tmp_path):
    folder = runtime_dir.folder_of("/mnt/x", tmp_path)
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    with pytest.raises(MountError, match="belongs to user 12345"), runtime_dir.held("/mnt/x", tmp_path):
        pass


def test_users_may_search_the_folder_whatever_the_umask(tmp_path):
    old = os.umask(0o077)
    try:
        with runtime_dir.held("/mnt/x", tmp_path / "run") as folder:
            assert folder.stat().st_mode & 0o777 == 0o755
            assert folder.parent.stat().st_mode & 0o777 == 0o755
            runtime_dir.write_record(folder, runtime_dir.MountRecord(1, "memory:", "/mnt/x", 5.0))
            assert (folder / "mount.json").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(old)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"pid": "x"}', b"\xff", b"null", b'{"pid": null}'])
def test_a_damaged_record_is_none(tmp_path, content):
    (tmp_path / "mount.json").write_bytes(content)
    assert runtime_dir.read_record(tmp_path) is None
