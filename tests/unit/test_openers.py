"""Who holds a file for writing, on real processes: what the kernel shows of them is the subject here."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from turbofs.fs import openers
from turbofs.testing.children import Child

LIMIT_S = 30.0
_CLONE_NEWNS, _MS_REC_PRIVATE = 0x20000, (1 << 14) | (1 << 18)
_OLDER = "pos:\t0\nflags:\t0100002\nmnt_id:\t{mount}\n"


@pytest.fixture
def path(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    return tmp_path / "file"


def device_of(path):
    """The device of the mount that *path* is in, as mountinfo has it: for some file systems not what stat says."""
    with path.open("rb") as file:
        fields = dict(line.split(":\t") for line in Path(f"/proc/self/fdinfo/{file.fileno()}").read_text().splitlines())
    table = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return next(line[2] for line in table if line[0] == fields["mnt_id"])


def held(path, tgid=None):
    return openers.holds_for_writing(tgid or os.getpid(), device_of(path), path.stat().st_ino)


@contextmanager
def program(text, *arguments, **options):
    """A Python program that says something when it has got there, and ends with its standard input."""
    command = [sys.executable, "-c", text, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options) as child:
        try:
            assert child.stdout.readline().strip() == "ready"
            yield child
        finally:
            child.stdin.close()
            try:
                child.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                raise


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (os.O_RDONLY, False),
        (os.O_WRONLY, True),
        (os.O_RDWR, True),
        (os.O_PATH, False),
        (os.O_WRONLY | os.O_APPEND, True),
    ],
)
def test_only_a_descriptor_for_writing_counts(path, flags, expected):
    descriptor = os.open(path, flags)
    assert held(path) is expected
    os.close(descriptor)
    assert held(path) is False


def test_a_duplicate_holds_until_it_is_closed_too(path):
    descriptor = os.open(path, os.O_WRONLY)
    duplicate = os.dup(descriptor)
    os.close(descriptor)
    assert held(path) is True
    os.close(duplicate)
    assert held(path) is False


def test_another_file_and_another_file_system_do_not_count(path):
    other = path.with_name("other")
    with other.open("wb"), path.open("rb+"):
        inode = path.stat().st_ino
        assert openers.holds_for_writing(os.getpid(), "0:0", inode) is False
        assert openers.holds_for_writing(os.getpid(), (0, 0), inode) is False
        major, minor = map(int, device_of(path).split(":"))
        assert openers.holds_for_writing(os.getpid(), (major, minor), inode) is True
    with other.open("wb"):
        assert held(path) is False


def test_a_pipe_of_the_same_number_does_not_count(path):
    reading, writing = os.pipe()
    assert openers.holds_for_writing(os.getpid(), device_of(path), os.fstat(writing).st_ino) is False
    os.close(reading)
    os.close(writing)


def test_parent_and_forked_child_are_told_apart(path):
    descriptor = os.open(path, os.O_WRONLY)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(descriptor)
    assert held(path) is False
    assert held(path, child) is True
    os.close(writing)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert held(path, child) is False, "a process that ended and was not waited for holds nothing"
    os.waitpid(child, 0)
    assert held(path, child) is False
    os.close(reading)


def test_a_program_that_inherited_the_descriptor_holds_it(path):
    descriptor = os.open(path, os.O_WRONLY)
    with program("print('ready', flush=True); input()", pass_fds=(descriptor,)) as child:
        os.close(descriptor)
        assert held(path, child.pid) is True
    assert held(path, child.pid) is False


def test_a_file_that_a_thread_opened_is_its_processs(path):
    opened, close = threading.Event(), threading.Event()
    found = []

    def work():
        descriptor = os.open(path, os.O_WRONLY)
        found.append(openers.thread_group_of(threading.get_native_id()))
        opened.set()
        close.wait(LIMIT_S)
        os.close(descriptor)

    thread = threading.Thread(target=work)
    thread.start()
    assert opened.wait(LIMIT_S)
    assert thread.native_id != os.getpid()
    assert found == [os.getpid()]
    assert held(path) is True
    close.set()
    thread.join()
    assert held(path) is False
    assert openers.thread_group_of(thread.native_id) is None


def test_a_process_whose_first_thread_has_ended_still_holds(path):
    text = """
import ctypes, os, sys, threading
os.open(sys.argv[1], os.O_WRONLY)
main = threading.get_native_id()
def work():
    while open(f"/proc/self/task/{main}/stat").read().rpartition(")")[2].split()[0] != "Z":
        os.sched_yield()
    os.write(1, b"ready\\n")
    os.read(0, 1)
    os._exit(0)
threading.Thread(target=work).start()
ctypes.CDLL(None).syscall(60, 0)
"""
    if os.uname().machine != "x86_64":
        pytest.skip("the number of the system call exit is that of x86_64")
    with program(text, path) as child:
        assert os.listdir(f"/proc/{child.pid}/fdinfo") == []
        assert held(path, child.pid) is True
    assert held(path, child.pid) is False


def test_a_process_that_is_gone_holds_nothing_and_has_no_thread_group(path):
    with subprocess.Popen(["true"]) as child:
        pass
    assert held(path, child.pid) is False
    assert openers.thread_group_of(child.pid) is None


@pytest.mark.parametrize("number", [0, -1])
def test_a_process_of_another_pid_namespace_cannot_be_told(path, number):
    assert openers.thread_group_of(number) is None
    assert openers.holds_for_writing(number, device_of(path), path.stat().st_ino) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_process_of_another_user_cannot_be_told(path):
    device, inode, me = device_of(path), path.stat().st_ino, os.getpid()
    with path.open("rb+"):
        assert Child(lambda: openers.holds_for_writing(me, device, inode), uid=65534).result() is None
        assert Child(lambda: openers.thread_group_of(me), uid=65534).result() == me
        assert held(path) is True


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_another_mount_namespace_has_other_numbers_for_the_same_mount(path):
    text = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
before = None
if sys.argv[2] == "before":
    os.open(sys.argv[1], os.O_WRONLY)
if libc.unshare(int(sys.argv[3])) or libc.mount(b"none", b"/", None, int(sys.argv[4]), None):
    sys.exit(os.strerror(ctypes.get_errno()))
if sys.argv[2] == "after":
    os.open(sys.argv[1], os.O_WRONLY)
if sys.argv[2] == "never":
    os.open(sys.argv[1], os.O_RDONLY)
print("ready", flush=True); input()
"""
    for when, expected in [("after", True), ("before", True), ("never", False)]:
        with program(text, path, when, _CLONE_NEWNS, _MS_REC_PRIVATE) as child:
            assert held(path, child.pid) is expected, when


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_process_that_changed_its_root_still_holds_what_it_opened_outside(path):
    (path.parent / "jail").mkdir()
    text = """
import os, sys
os.open(sys.argv[1], os.O_WRONLY)
os.chroot(sys.argv[2])
print("ready", flush=True); input()
"""
    with program(text, path, path.parent / "jail") as child:
        assert held(path, child.pid) is True


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_descriptor_of_a_mount_that_was_detached_counts(tmp_path):
    """Nobody can look such a mount up any more; its device is gone from every table."""
    text = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
place = os.fsencode(sys.argv[1])
if libc.unshare(int(sys.argv[2])) or libc.mount(b"none", b"/", None, int(sys.argv[3]), None):
    sys.exit(os.strerror(ctypes.get_errno()))
if libc.mount(b"none", place, b"tmpfs", 0, None):
    sys.exit(os.strerror(ctypes.get_errno()))
file = os.open(place + b"/file", os.O_WRONLY | os.O_CREAT)
memory = os.memfd_create("x")
libc.umount2(place, 2)
print("ready", flush=True)
print(os.fstat(file).st_ino, os.fstat(memory).st_ino, flush=True); input()
"""
    with program(text, tmp_path, _CLONE_NEWNS, _MS_REC_PRIVATE) as child:
        file, memory = map(int, child.stdout.readline().split())
        assert openers.holds_for_writing(child.pid, "0:0", file) is True
        if memory != file:
            assert openers.holds_for_writing(child.pid, "0:0", memory) is False


def test_a_kernel_that_names_no_inodes_cannot_tell(path, tmp_path, monkeypatch):
    with path.open("rb+") as file:
        shown = Path(f"/proc/self/fdinfo/{file.fileno()}").read_text()
        mount = next(line for line in shown.splitlines() if line.startswith("mnt_id")).split()[1]
    for name in ("7/fdinfo", "7/task", "self"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "7/mountinfo").write_bytes(Path("/proc/self/mountinfo").read_bytes())
    (tmp_path / "7/fdinfo/3").write_text(_OLDER.format(mount=mount))
    monkeypatch.setattr(openers, "_PROC", tmp_path)
    assert openers.holds_for_writing(7, device_of(path), path.stat().st_ino) is None
    assert openers.holds_for_writing(7, "0:0", path.stat().st_ino) is False
    assert openers.fdinfo_names_inodes() is False


def test_a_process_that_hidepid_hides_cannot_be_told(path, tmp_path, monkeypatch):
    def refuse(pid, number):
        raise PermissionError

    monkeypatch.setattr(openers, "_PROC", tmp_path)
    monkeypatch.setattr(os, "kill", refuse)
    assert openers.holds_for_writing(7, device_of(path), 1) is None


def test_this_kernel_is_looked_at(path):
    with path.open("rb") as file:
        shown = Path(f"/proc/self/fdinfo/{file.fileno()}").read_text()
    assert openers.fdinfo_names_inodes() is ("ino:" in shown)
