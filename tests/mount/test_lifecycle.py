"""How a mount begins and ends, and what is left of it: nothing."""

from __future__ import annotations

import errno
import faulthandler
import json
import mmap
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from turbofs.testing.children import Child, in_child
from turbofs.testing.conformance_base import content
from turbofs.testing.waiting import eventually

pytestmark = pytest.mark.mount

MIB = 1 << 20
SLACK_S = 15.0
"""For a machine that has other things to do."""
DEAD = {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO}
"""What a process hears whose mount's daemon is gone."""


def outcome(act):
    """None where *act* works, else its errno."""
    try:
        act()
    except OSError as error:
        return error.errno
    return None


def close_dead(fd):
    """Close a descriptor of a dead mount: close() tells of it, too."""
    with pytest.raises(OSError) as told:
        os.close(fd)
    assert told.value.errno in DEAD


def runs(pid):
    """Whether the process is there, and not only waiting for its parent to notice its end."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def processes_of(place):
    """The processes that were started for the mount of *place*, the test's own aside."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TURBOFS_RUNTIME_DIR") == str(place.runtime):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def nothing_is_left(place):
    return not place.mounted and not processes_of(place) and not place.folder.exists()


def test_mount_returns_when_usable(place):
    data = content(3 * MIB)
    (place.source / "file").write_bytes(data)
    pid = place.mount_in_background()
    assert in_child((place.mountpoint / "file").read_bytes) == data  # at once, the first time
    assert runs(pid)
    status = json.loads(place.turbofs("status", str(place.mountpoint), "--json").stdout)
    assert status["daemon"]["pid"] == pid
    assert status["mountpoint"] == str(place.mountpoint)


@pytest.mark.parametrize("server", ["closed", "silent"])
def test_unreachable_source_leaves_nothing_half_alive(place, server):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if server == "silent":
            listener.listen()  # takes connections, and never says a word
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        options = place.options("source.operation_timeout=2s")  # the first attempt is always given its time
        started = time.monotonic()
        done = place.turbofs("mount", f"hdfs://{address}/data", str(place.mountpoint), "--wait", "2s", *options)
        assert time.monotonic() - started < 2 + SLACK_S
        assert done.returncode == 3, done.stderr
        assert address in done.stderr
        assert "waiting up to" in done.stderr
        assert nothing_is_left(place)
        assert in_child(lambda: os.listdir(place.mountpoint)) == []

        command = [sys.executable, "-m", "turbofs.cli.app", "mount", f"hdfs://{address}/data", str(place.mountpoint)]
        with subprocess.Popen(
            [*command, "--wait", "60s", *options], env=place.environment, stderr=subprocess.PIPE
        ) as waiting:
            assert b"waiting up to" in waiting.stderr.readline()
            waiting.send_signal(signal.SIGINT)  # the user has enough
            waiting.communicate(timeout=30)
        assert waiting.returncode != 0
        eventually(lambda: nothing_is_left(place), "nothing is left")


def test_what_is_missing_is_named(place, tmp_path):
    mountpoint = str(place.mountpoint)
    (place.source / "file").touch()
    for source, named in (
        (f"file://{tmp_path}/no/such/tree", "no/such/tree"),
        (f"file://{place.source}/file", "/file"),
        ("ftp://host/path", "ftp"),
        ("nonsense", "nonsense"),
        ("hdfs:///no/authority", "hdfs://"),
        (str(place.source), f"file://{place.source}"),  # what the user meant
    ):
        done = place.turbofs("mount", source, mountpoint, "--wait", "1s", *place.options())
        assert done.returncode in {1, 2}, f"{source}: {done.returncode} {done.stderr}"
        assert named in done.stderr
        assert "Traceback" not in done.stderr
        assert nothing_is_left(place)
    for variable in ("JAVA_HOME", "HADOOP_HOME", "CLASSPATH", "ARROW_LIBHDFS_DIR"):
        place.environment.pop(variable, None)
    done = place.turbofs(
        "mount", "hdfs://127.0.0.1:1/", mountpoint, "--client", "libhdfs", "--wait", "1s", *place.options()
    )
    assert done.returncode in {1, 2}, done.stderr
    assert "libhdfs" in done.stderr
    assert nothing_is_left(place)


def test_unusable_mount_point_is_refused(place):
    (place.source / "file").write_text("x")
    (place.root / "a-file").touch()
    for directory, exit_code, named in (
        (place.root / "missing", 2, "does not exist"),
        (place.root / "a-file", 2, "not a directory"),
        (place.source, 2, "inside one another"),
    ):
        done = place.turbofs("mount", place.uri, str(directory), *place.options())
        assert done.returncode == exit_code, done.stderr
        assert named in done.stderr
        assert str(directory) in done.stderr
    with place.mount() as mount:
        for uri in (place.uri, f"file://{place.root}/state"):
            again = place.turbofs("mount", uri, str(mount.path), *place.options())
            assert again.returncode == 1, again.stderr
            assert "mounted already" in again.stderr
            assert "turbofs umount" in again.stderr
        within = place.turbofs("mount", f"file://{place.root}/state", str(mount.path / "below"), *place.options())
        assert within.returncode == 2, within.stderr
        assert in_child((mount.path / "file").read_text) == "x"  # as if nothing had been


def test_killed_daemon_leaves_no_reader_waiting(place):
    (place.source / "file").write_bytes(content(9 * MIB))
    with place.direct() as mount:
        fd = os.open(mount.path / "file", os.O_RDONLY)
        with (mount.path / "file").open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        mount.source.hold()

        def faults():
            faulthandler.disable()  # SIGBUS is what comes, and it ends the child
            return mapped[8 * MIB]

        acts = {
            "read": lambda: os.pread(fd, 4096, 0),
            "direct": lambda: os.close(os.open(mount.path / "file", os.O_RDONLY | os.O_DIRECT)),
            "stat": lambda: os.stat(mount.path / "nowhere"),
            "list": lambda: os.listdir(mount.path),
        }
        waiting = {name: Child(partial(outcome, act)) for name, act in acts.items()}
        faulting = Child(faults)
        try:
            mount.source.wait_held(len(acts))
            mount.process.kill()
            mount.process.wait()
            found = {name: child.result(SLACK_S) for name, child in waiting.items()}
            assert set(found.values()) <= DEAD, found
            with pytest.raises(ChildProcessError):
                faulting.result(SLACK_S)
            assert in_child(lambda: outcome(lambda: os.stat(mount.path / "file")), limit_s=SLACK_S) in DEAD
            assert in_child(lambda: outcome(lambda: os.pread(fd, 4096, 4 * MIB)), limit_s=SLACK_S) in DEAD
        finally:
            for child in (*waiting.values(), faulting):
                with child:
                    pass
            mapped.close()
            close_dead(fd)


def test_mount_over_a_dead_one_cleans_it_up(place):
    data = content(9 * MIB)
    (place.source / "file").write_bytes(data)
    with place.direct() as mount:
        fd = os.open(mount.path / "file", os.O_RDONLY | os.O_DIRECT)  # keeps the dead mount busy
        mount.source.hold(["read"])
        with Child(lambda: outcome(lambda: os.preadv(fd, [mmap.mmap(-1, 4096)], 0))) as reader:
            mount.source.wait_held()  # it dies while it reads
            mount.process.kill()
            mount.process.wait()
            assert reader.result(SLACK_S) in DEAD
        assert place.mounted
        doctor = place.turbofs("doctor", str(mount.path))
        assert doctor.returncode == 1
        assert "dead mount left over" in doctor.stdout
        again = place.turbofs("mount", place.uri, str(mount.path), *place.options())
        assert again.returncode == 0, again.stderr
        assert "cleaning up" in again.stderr
        assert in_child((mount.path / "file").read_bytes) == data
        assert in_child(lambda: outcome(lambda: os.fstat(fd)), limit_s=SLACK_S) in DEAD
        close_dead(fd)
        assert place.turbofs("umount", str(mount.path)).returncode == 0
        assert nothing_is_left(place)


def test_mount_from_a_directory_that_died_with_the_mount(place):
    (place.source / "below").mkdir()
    pid = place.mount_in_background()
    shell = subprocess.Popen(  # where a user stands, who types the commands that repair it
        ["/bin/sh"], cwd=place.mountpoint / "below", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env=place.environment,
    )  # fmt: skip
    with shell:
        os.kill(pid, signal.SIGKILL)
        command = shlex.join([sys.executable, "-P", "-m", "turbofs.cli.app"])  # -P: imports nothing from there
        options = shlex.join(place.options())
        lines = [
            f"{command} mount {place.uri} {place.mountpoint} {options}; echo mounted $?",
            f"{command} status {place.mountpoint}; echo status $?",
            f"{command} umount .; echo relative $?",
            f"{command} umount {place.mountpoint}; echo unmounted $?",
        ]
        said, _ = shell.communicate("\n".join(lines), timeout=90)
    assert "Traceback" not in said
    for line in ("mounted 0", "status 0", "relative 2", "the working directory is gone", "unmounted 0"):
        assert line in said, said
    assert nothing_is_left(place)


def test_umount_leaves_nothing_of_a_dead_daemon(place):
    for mounted in (True, False):
        os.kill(place.mount_in_background(), signal.SIGKILL)
        eventually(lambda: outcome(lambda: os.stat(place.mountpoint)) in DEAD, "the mount is dead")
        if not mounted:
            subprocess.run(["umount", place.mountpoint], check=True, timeout=30)
        done = place.turbofs("umount", str(place.mountpoint))
        assert done.returncode == 0, done.stderr
        assert nothing_is_left(place)
        assert place.turbofs("umount", str(place.mountpoint)).returncode == 2


def test_umount_again_waits_for_the_daemon(place):
    pid = place.mount_in_background()
    os.kill(pid, signal.SIGSTOP)
    for _ in range(2):  # the second finds nothing mounted any more
        done = place.turbofs("umount", str(place.mountpoint), "--timeout", "1s")
        assert done.returncode == 4, done.stderr
        assert f"kill -9 {pid}" in done.stderr
    os.kill(pid, signal.SIGCONT)
    assert place.turbofs("umount", str(place.mountpoint)).returncode in {0, 2}  # 2: it was faster
    eventually(lambda: nothing_is_left(place), "the daemon ends")


def test_names_of_source_and_mount_point_may_be_any_bytes(place):
    place.environment["PYTHONIOENCODING"] = "utf-8:strict"  # as in most locales
    for name in ("données", "a b,c\\d\n'\"", "\udcff\udcfe"):
        source, directory = place.root / f"source {name}", place.root / f"mount {name}"
        source.mkdir()
        directory.mkdir()
        (source / name).write_text("x")
        done = place.turbofs("mount", f"file://{source}", str(directory), *place.options())
        assert done.returncode == 0, done.stderr
        assert in_child((directory / name).read_text) == "x"
        for command in (["status"], ["status", str(directory / name)], ["umount", str(directory)]):
            done = place.turbofs(*command)
            assert done.returncode == 0, done.stderr


def test_a_low_limit_of_descriptors_does_not_bound_open_files(place):
    (place.source / "file").write_text("x")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        pid = place.mount_in_background()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (hard, hard)
    assert place.turbofs("umount", str(place.mountpoint)).returncode == 0


def test_a_runtime_folder_without_room_is_named(place):
    place.runtime.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", place.runtime], check=True, timeout=30)
    try:
        with suppress(OSError):
            (place.runtime / "fill").write_bytes(bytes(1 << 20))
        done = place.turbofs("mount", place.uri, str(place.mountpoint), *place.options())
        assert done.returncode == 1, done.stderr
        assert f"cannot write to {place.folder}: No space left" in done.stderr
        assert "runtime_dir" in done.stderr
        assert nothing_is_left(place)
    finally:
        subprocess.run(["umount", place.runtime], check=True, timeout=30)


def test_umount_ends_the_daemon(place):
    (place.source / "file").write_text("x")
    pid = place.mount_in_background()
    assert in_child((place.mountpoint / "file").read_text) == "x"
    done = place.turbofs("umount", str(place.mountpoint))
    assert done.returncode == 0, done.stderr
    assert "is unmounted" in done.stdout
    assert not runs(pid)
    assert nothing_is_left(place)
    again = place.turbofs("umount", str(place.mountpoint))
    assert again.returncode == 2
    assert str(place.mountpoint) in again.stderr
    pid = place.mount_in_background()  # and by the system's own command
    subprocess.run(["umount", place.mountpoint], check=True, timeout=30)
    eventually(lambda: nothing_is_left(place), "the daemon ends")
    assert not runs(pid)


def test_umount_of_a_busy_mount_is_bounded(place):
    (place.source / "file").write_text("x")
    pid = place.mount_in_background()
    with (place.mountpoint / "file").open() as file:
        started = time.monotonic()
        done = place.turbofs("umount", str(place.mountpoint), "--timeout", "2s")
        assert time.monotonic() - started < 2 + SLACK_S
        assert done.returncode == 1
        assert f"({os.getpid()})" in done.stderr
        assert f"{place.mountpoint}/file" in done.stderr
        assert runs(pid)
        assert file.read() == "x"  # nothing was taken from whoever uses it
    assert place.turbofs("umount", str(place.mountpoint)).returncode == 0
    assert nothing_is_left(place)


@pytest.mark.parametrize("tool", ["turbofs", "umount"])
def test_umount_while_the_source_is_down(place, tool):
    (place.source / "file").write_bytes(content(20 * MIB))
    with place.direct("fs.attribute_timeout=0s") as mount:
        mount.source.hold(["read"])
        os.setxattr(mount.path / "file", "user.turbofs.prefetch", b"all")
        mount.source.wait_held()  # fetches hang in the background
        mount.source.hold()
        started = time.monotonic()
        if tool == "turbofs":
            done = place.turbofs("umount", str(mount.path))
            assert done.returncode == 0, done.stderr
        else:
            subprocess.run(["umount", mount.path], check=True, timeout=30)
        mount.process.wait(SLACK_S)
        assert time.monotonic() - started < SLACK_S
        assert mount.process.returncode == 0
        assert nothing_is_left(place)


@pytest.mark.parametrize("use", ["idle", "open file", "down"])
def test_terminated_daemon_unmounts(place, use):
    (place.source / "file").write_bytes(content(5 * MIB))
    with place.direct() as mount:
        fd = os.open(mount.path / "file", os.O_RDONLY) if use == "open file" else None
        if use == "down":
            mount.source.hold()
        mount.process.terminate()
        mount.process.wait(SLACK_S)
        assert mount.process.returncode == 0
        assert nothing_is_left(place)
        assert os.listdir(place.mountpoint) == []
        if fd is not None:
            assert in_child(lambda: outcome(lambda: os.pread(fd, 4096, 4 * MIB)), limit_s=SLACK_S) in DEAD
            close_dead(fd)
        assert "unmounted" in Path(place.root / "log" / "daemon.log").read_text()
