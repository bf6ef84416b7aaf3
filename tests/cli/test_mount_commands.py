"""The commands against real mounts of local trees: start, use, diagnose, end, and every way in which a start fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from turbofs import mountinfo
from turbofs.cli import mount_point, mount_table
from turbofs.wire import runtime_dir
from turbofs.wire.control_client import ControlClient

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="/dev/fuse cannot be opened"),
]
TURBOFS = [sys.executable, "-m", "turbofs.cli.app"]
HELPER = [sys.executable, "-m", "turbofs.cli.mount_helper"]
LIMIT_S = 60.0


class Place:
    """A tree to serve, a directory to mount it on, and folders of its own for everything that a mount keeps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree, self.mountpoint, self.run_dir = folder / "tree", folder / "mnt", folder / "run"
        for path in (self.tree / "sub", self.mountpoint):
            path.mkdir(parents=True)
        (self.tree / "sub/file").write_bytes(b"0123456789" * 1000)
        self.source = f"file://{self.tree}"
        self.options = f"log_dir={folder}/log,fs.state_dir={folder}/state"
        self.environment = {
            **os.environ,
            "TURBOFS_RUNTIME_DIR": str(self.run_dir),
            "XDG_CONFIG_HOME": str(folder / "conf"),
        }

    def run(self, *arguments: object, program=TURBOFS, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*program, *map(str, arguments)],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert code is None or done.returncode == code, (done.args, done.returncode, done.stdout, done.stderr)
        return done

    def json(self, *arguments: object, code: int | None = 0) -> dict:
        return json.loads(self.run(*arguments, "--json", code=code).stdout)

    def mount(self, *arguments: object, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        return self.run("mount", self.source, self.mountpoint, "-o", self.options, *arguments, code=code)

    def unmount(self) -> None:
        self.run("umount", self.mountpoint, "--timeout", f"{LIMIT_S / 2:g}s")

    def listed(self) -> dict:
        """This mount's line in `turbofs status`; other people's mounts are there too."""
        (mount,) = [m for m in self.json("status")["mounts"] if m["mountpoint"] == str(self.mountpoint)]
        return mount

    @property
    def mounted(self) -> bool:
        return str(self.mountpoint) in mount_table.turbofs_mounts()

    @property
    def record(self) -> runtime_dir.MountRecord:
        found = runtime_dir.list_records([self.run_dir])
        assert len(found) == 1
        return found[0][1]


def until(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path)
    yield place
    pids = [record.pid for _, record in runtime_dir.list_records([place.run_dir])]
    for pid in pids:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)
    if place.mounted:
        mount_point.detach(str(place.mountpoint), lazy=True)


@contextmanager
def silent_server():
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


# --- the whole way


def test_mount_use_and_unmount(place):
    told = place.run("mount", place.source, place.mountpoint, "-o", place.options, "--memory", "64MiB", "--json")
    document = json.loads(told.stdout)
    assert document["mountpoint"] == str(place.mountpoint)
    assert (place.mountpoint / "sub/file").read_bytes() == b"0123456789" * 1000
    assert place.record.pid == document["pid"]
    assert os.getsid(document["pid"]) == document["pid"], "the daemon outlives the terminal"
    assert os.readlink(f"/proc/{document['pid']}/cwd") == "/"

    mount = place.listed()
    assert (mount["state"], mount["mounted"], mount["source"]) == ("alive", True, place.source)
    status = place.json("status", place.mountpoint)
    assert 0 < status["cache"]["limit_bytes"] <= 64 << 20  # the rest is for uploads
    assert "daemon" in status
    assert place.json("status", place.mountpoint / "sub/file")["size"] == 10_000
    text = place.run("status").stdout
    assert str(place.mountpoint) in text
    assert "alive" in text

    (job,) = place.json("prefetch", place.mountpoint / "sub/file", "--wait", "--range", "0+4KiB")["jobs"]
    assert (job["state"], job["wanted_bytes"]) == ("done", 4096)
    place.json("hint", place.mountpoint / "sub/file", "prefetch=all")
    refused = place.json("hint", place.mountpoint / "sub/file", "prefetch=everything", code=2)
    assert refused["error"]["code"] == "EINVAL"
    (waited,) = place.json("wait", place.mountpoint / "sub/file")["files"]
    assert waited["durability"] == "persisted"
    assert place.json("wait", place.mountpoint / "absent", code=1)["error"]["code"] == "ENOENT"

    checks = {check["name"]: check for check in place.json("doctor", place.mountpoint)["checks"]}
    assert checks["daemon"]["verdict"] == "ok"
    assert checks["source"]["verdict"] == "ok"

    assert place.json("umount", place.mountpoint)["unmounted"] is True
    assert not place.mounted
    assert gone(document["pid"])
    assert list(place.run_dir.iterdir()) == []
    log = [json.loads(line) for line in Path(document["log"]).read_text().splitlines()]
    assert {"mounted", "unmounted"} <= {entry["event"] for entry in log}


def test_the_command_does_not_keep_its_callers_pipes_open(place):
    """`$(turbofs mount …)` ends when the mount is usable: the daemon holds none of the caller's descriptors."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe:
        command = [*TURBOFS, "mount", place.source, str(place.mountpoint), "-o", place.options]
        child = subprocess.Popen(command, env=place.environment, stdout=writing, stderr=writing, pass_fds=(writing,))
        os.close(writing)
        assert b"is mounted on" in pipe.read()
        assert child.wait() == 0
    place.unmount()


def test_commands_work_on_links_and_relative_paths(place):
    place.mount()
    (place.folder / "link").symlink_to("mnt/sub")
    assert place.json("status", place.folder / "link/file")["path"] == "/sub/file"
    place.run("umount", place.folder / "link/..", code=0)
    assert not place.mounted


def test_a_configuration_file_names_source_and_settings(place):
    file = place.folder / "c.toml"
    file.write_text(f'[mount]\nsource = "{place.source}"\nlog_dir = "{place.folder}/log"\nmemory = "48MiB"\n')
    place.run("mount", "--config", file, "-o", f"fs.state_dir={place.folder}/state", place.mountpoint)
    assert 0 < place.json("status", place.mountpoint)["cache"]["limit_bytes"] <= 48 << 20  # the rest is for uploads
    place.unmount()


def test_the_users_own_configuration_is_read_and_flags_win(place):
    (place.folder / "conf/turbofs").mkdir(parents=True)
    (place.folder / "conf/turbofs/turbofs.toml").write_text('[mount]\nmemory = "48MiB"\n[read]\nwindow = "1MiB"\n')
    place.mount("--memory", "96MiB")
    assert 0 < place.json("status", place.mountpoint)["cache"]["limit_bytes"] <= 96 << 20  # the rest is for uploads
    place.unmount()


def test_the_helper_of_mount8_mounts_with_fstab_options(place):
    options = f"rw,_netdev,nofail,{place.options},memory=64MiB"
    place.run(place.source, place.mountpoint, "-o", options, program=HELPER)
    assert (place.mountpoint / "sub/file").stat().st_size == 10_000
    place.unmount()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_in_the_foreground_systemd_is_told_and_signals_unmount(place, number):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications:
        notifications.bind(str(place.folder / "notify"))
        notifications.settimeout(LIMIT_S)
        daemon = subprocess.Popen(
            [*TURBOFS, "mount", "-f", place.source, str(place.mountpoint), "-o", place.options],
            env={**place.environment, "NOTIFY_SOCKET": str(place.folder / "notify")},
            stderr=subprocess.PIPE,
            text=True,
        )
        with daemon:
            assert notifications.recv(1000).startswith(b"READY=1")
            assert (place.mountpoint / "sub/file").exists()
            daemon.send_signal(number)
            assert notifications.recv(1000) == b"STOPPING=1"
            assert daemon.wait(LIMIT_S) == 0
            assert "Traceback" not in daemon.stderr.read()
    assert not place.mounted
    assert list(place.run_dir.iterdir()) == []


# --- ends


def test_unmounting_from_outside_ends_the_daemon(place):
    place.mount()
    pid = place.record.pid
    subprocess.run(["fusermount3", "-u", place.mountpoint], check=True)
    until(lambda: gone(pid))
    assert list(place.run_dir.iterdir()) == []


def test_a_busy_mount_stays_and_the_holder_is_named(place):
    place.mount()
    with (place.mountpoint / "sub/file").open("rb") as file:
        refused = place.json("umount", place.mountpoint, code=1)
        assert refused["error"]["code"] == "EBUSY"
        assert f"({os.getpid()}) holds {place.mountpoint}/sub/file" in refused["error"]["message"]
        assert file.read(10) == b"0123456789"
    place.unmount()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_a_mount_that_another_namespace_copied_is_told_apart(place):
    place.mount()
    pid = place.record.pid
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo; read line"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as container:
        container.stdout.readline()
        late = place.json("umount", place.mountpoint, "--timeout", "1s", code=4)
        assert not place.mounted
        assert f"mount namespaces (of processes {container.pid}" in late["error"]["message"]
        container.stdin.close()
    until(lambda: gone(pid))


def test_a_killed_daemons_mount_is_found_by_the_doctor_and_cleaned_up_by_mount(place):
    place.mount()
    os.kill(place.record.pid, signal.SIGKILL)
    until(lambda: gone(place.record.pid))
    assert place.mounted
    assert place.listed()["state"] == "dead"
    checks = place.json("doctor", place.mountpoint, code=1)["checks"]
    assert any("dead mount left over" in check["message"] for check in checks)
    assert place.run("status", place.mountpoint, code=3)
    told = place.mount()
    assert "which a dead daemon left mounted" in told.stderr
    assert (place.mountpoint / "sub/file").stat().st_size == 10_000
    assert len([e for e in mountinfo.mount_entries() if e.mountpoint == str(place.mountpoint)]) == 1
    place.unmount()


def test_a_killed_daemons_mount_is_cleaned_up_by_umount(place):
    place.mount()
    os.kill(place.record.pid, signal.SIGKILL)
    until(lambda: gone(place.record.pid))
    assert "is dead" in place.run("umount", place.mountpoint).stderr
    assert not place.mounted


def test_diagnosis_does_not_hang_with_a_stopped_daemon(place):
    """Case 14: status, doctor and the search for holders use the socket, /proc and /sys, never the mount."""
    place.mount()
    pid = place.record.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        assert place.listed()["state"] == "hanging"
        checks = place.json("doctor", place.mountpoint, code=1)["checks"]
        assert any("does not answer" in check["message"] for check in checks)
    finally:
        os.kill(pid, signal.SIGCONT)
    place.unmount()


# --- starts that fail


def test_a_second_mount_on_the_same_directory_is_busy(place):
    place.mount()
    refused = place.json("mount", place.source, place.mountpoint, "-o", place.options, code=1)
    assert refused["error"]["code"] == "EBUSY"
    assert "mounted already" in refused["error"]["message"]
    assert (place.mountpoint / "sub/file").exists()
    place.unmount()


def test_a_mount_inside_a_mount_is_refused(place):
    place.mount()
    refused = place.json("mount", "memory:", place.mountpoint / "sub", "-o", place.options, code=2)
    assert "inside the FUSE mount" in refused["error"]["message"]
    place.unmount()


def test_a_directory_with_files_can_be_mounted_on(place):
    (place.mountpoint / "below").touch()
    place.mount()
    assert not (place.mountpoint / "below").exists()
    place.unmount()
    assert (place.mountpoint / "below").exists()


def nothing_left(place):
    assert not place.mounted
    assert not place.run_dir.exists() or list(place.run_dir.iterdir()) == []
    marks = str(place.folder)
    for process in psutil.process_iter(["pid", "cmdline", "environ"]):
        if "turbofs.cli.daemon" in (process.info["cmdline"] or []):
            assert (process.info["environ"] or {}).get("TURBOFS_RUNTIME_DIR", "").startswith(marks) is False


def test_a_source_without_its_root_fails_at_once_and_leaves_nothing(place):
    refused = place.json("mount", f"{place.source}/absent", place.mountpoint, "-o", place.options, code=1)
    assert refused["error"]["code"] == "ENOENT"
    nothing_left(place)


@pytest.mark.parametrize("kind", ["closed", "silent"])
def test_an_unreachable_name_node_is_waited_for_then_exit_3(place, kind):
    with ExitStack() as stack:
        port = stack.enter_context(silent_server())
        if kind == "closed":
            stack.close()
        began = time.monotonic()
        done = place.run(
            "mount",
            f"hdfs://127.0.0.1:{port}/",
            place.mountpoint,
            "-o",
            place.options,
            "--wait",
            "2s",
            "--json",
            code=3,
        )
        took_s = time.monotonic() - began
    assert took_s < 20
    assert "not reachable" in json.loads(done.stdout)["error"]["message"]
    assert "waiting up to" in done.stderr
    nothing_left(place)


def test_interrupting_a_waiting_start_leaves_nothing(place):
    with silent_server() as port:
        command = [*TURBOFS, "mount", f"hdfs://127.0.0.1:{port}/", str(place.mountpoint), "--wait", "10m"]
        starting = subprocess.Popen([*command, "-o", place.options], env=place.environment, stderr=subprocess.PIPE)
        with starting:
            until(lambda: list(place.run_dir.glob("*/lock")))
            starting.send_signal(signal.SIGINT)
            assert starting.wait(LIMIT_S) != 0
    nothing_left(place)


def test_a_daemon_that_is_killed_while_starting_leaves_nothing(place):
    with silent_server() as port:
        command = [*TURBOFS, "mount", f"hdfs://127.0.0.1:{port}/", str(place.mountpoint), "--wait", "10m"]
        starting = subprocess.Popen(
            [*command, "-o", place.options], env=place.environment, stderr=subprocess.PIPE, text=True
        )
        with starting:
            until(lambda: psutil.Process(starting.pid).children() and list(place.run_dir.glob("*/lock")))
            (daemon,) = psutil.Process(starting.pid).children()
            daemon.kill()
            assert starting.wait(LIMIT_S) == 1
            assert "ended before the mount was usable" in starting.stderr.read()
    assert not place.mounted


# --- users


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_another_user_may_ask_and_prefetch_only_what_it_may_read(place):
    (place.tree / "secret").write_bytes(b"x" * 100)
    (place.tree / "secret").chmod(0o600)
    place.mount()
    for folder in (place.folder, *place.folder.parents):
        if folder.name.startswith(("pytest-", "test_")):
            folder.chmod(0o755)
    program = """
import sys
from pathlib import Path
from turbofs.errors import TurboError
from turbofs.wire.control_client import ControlClient
with ControlClient(Path(sys.argv[1])) as client:
    client.call("ping"); client.call("status")
    print(client.call("prefetch", {"path": "/sub/file"})["state"])
    for op, args in [("prefetch", {}), ("open", {}), ("hint", {"name": "user.turbofs.prefetch", "value": b"all"})]:
        try:
            client.call(op, {"path": "/secret", **args})
        except TurboError as error:
            print(type(error).__name__)
"""
    socket_path = runtime_dir.find_folder(str(place.mountpoint), [place.run_dir]) / runtime_dir.SOCKET_NAME
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-c", program]
    done = subprocess.run([*as_nobody, socket_path], capture_output=True, text=True, check=False, timeout=LIMIT_S)
    place.unmount()
    if "ModuleNotFoundError" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip("another user cannot read this checkout")
    assert done.stdout.split() == ["running", *["AccessDeniedError"] * 3], done.stderr


def test_open_gives_a_descriptor_past_fuse(place):
    place.mount()
    socket_path = runtime_dir.find_folder(str(place.mountpoint), [place.run_dir]) / runtime_dir.SOCKET_NAME
    with ControlClient(socket_path) as client:
        descriptor = client.open("/sub/file")
    place.unmount()
    with os.fdopen(descriptor, "rb") as file:
        assert file.read(10) == b"0123456789"
