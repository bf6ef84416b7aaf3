"""What is measured, each as a context manager: a real HDFS, our mount, rclone's mount, the in-memory FUSE file.

Daemons run as processes of their own, as users run them. Every mount here gets the same kernel limits. A daemon
dies with the run (PR_SET_PDEATHSIG), its mount is taken down by itself, by SIGTERM, or else lazily.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import hdfs_native

from turbofs.bench.harness import BenchmarkError
from turbofs.bench.memory_fuse import NAME as MEMORY_FILE_NAME
from turbofs.cli.mount_point import detach
from turbofs.config import MountConfig
from turbofs.errors import TurboError
from turbofs.fuse.kernel import tune
from turbofs.mountinfo import mounts_at
from turbofs.testing.hdfs_cluster import HdfsCluster

_READY_TIMEOUT_S = 45.0
_STOP_TIMEOUT_S = 15.0
_POLL_S = 0.005
_DELETION_LIMIT_S = 60.0
_DELETION_POLL_S = 0.05
_LOG_TAIL_BYTES = 2000

RCLONE_FLAGS = {
    # Requests in order: the kernel's parallel ones (--async-read) arrive out of order, and each then costs a seek on
    # HDFS. Tried here: with it 30-60 MiB/s, without 250-300; buffers of 16, 64 and 128 MiB.
    "off": ("--vfs-cache-mode", "off", "--async-read=false", "--buffer-size", "64Mi", "--vfs-read-chunk-size", "1Gi"),
    # The cache folder is on tmpfs. Tried: buffers of 16 to 64 MiB, --vfs-read-ahead, in order and in parallel.
    "full": ("--vfs-cache-mode", "full", "--buffer-size", "64Mi", "--vfs-read-chunk-size", "128Mi"),
}
"""rclone's flags for reading, for each way of caching: the fastest that were found. All get `_RCLONE_COMMON` too."""
RCLONE_WRITE_FLAGS = {
    # Uploads begin at close (the default waits 5 s), and again soon after one that HDFS had not confirmed at once (with
    # 0 they never do). Tried: buffers of 0, 16 and 64 MiB, no modification times, fast
    # fingerprints, all within 10 %.
    "writes": ("--vfs-cache-mode", "writes", "--vfs-write-back", "1ms"),
    # The kernel gathers small requests into large ones: a quarter faster here.
    "writes-kernel": ("--vfs-cache-mode", "writes", "--vfs-write-back", "1ms", "--write-back-cache"),
}
"""The same for writing."""
_RCLONE_COMMON = ("--no-checksum", "--dir-cache-time", "1h", "--poll-interval", "0", "--config", "")


@dataclass(frozen=True)
class Mount:
    """A running daemon and the directory that it serves."""

    folder: Path
    pid: int
    log: Path

    def memory_kib(self, field: str) -> int:
        """A field of /proc/PID/status in KiB: `VmRSS` (resident now), `VmHWM` (its peak), `RssAnon`, `RssFile`."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return int(value.split()[0])
        raise BenchmarkError(f"process {self.pid} has no {field}")


@contextlib.contextmanager
def hdfs(root: Path, datanodes: int = 1) -> Iterator[HdfsCluster]:
    """A real HDFS whose data is below *root*; deleted afterwards. Three quarters of a million names fit its heap."""
    settings = {"dfs.replication": "1"}
    cluster = HdfsCluster(root, datanodes=datanodes, settings=settings, namenode_heap="512m", datanode_heap="256m")
    try:
        with cluster:
            yield cluster
    finally:
        cluster.destroy()


def native_client(cluster: HdfsCluster) -> hdfs_native.Client:
    return hdfs_native.Client(cluster.uri)


def await_no_blocks(cluster: HdfsCluster) -> None:
    """Return when no DataNode has a byte of a block any more: deleted files give their memory back a heartbeat later.

    Raises BenchmarkError where some stay.
    """
    deadline = time.monotonic() + _DELETION_LIMIT_S
    while left_bytes := _blocks_bytes(cluster):
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{left_bytes} bytes of deleted files are still there after {_DELETION_LIMIT_S:.0f} s")
        time.sleep(_DELETION_POLL_S)


def _blocks_bytes(cluster: HdfsCluster) -> int:
    total = 0
    for folder in cluster.root.glob("data*"):
        for path in folder.rglob("blk_*"):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                total += path.stat().st_size
    return total


@contextlib.contextmanager
def turbofs_mount(
    cluster: HdfsCluster, work: Path, *, memory: str, path: str = "/", staging_bytes: int | None = None
) -> Iterator[Mount]:
    """*path* of the cluster through `turbofs mount`, with an empty cache and a budget of *memory* ("512MiB").

    With *staging_bytes*, up to that much of what is written waits in a folder of *work*, where a later mount finds it.
    """
    command = [
        str(Path(sys.executable).with_name("turbofs")), "mount", f"{cluster.uri}{path}", "{folder}", "-f",
        "--memory", memory, "-o", f"mount.runtime_dir={work}/run,fs.state_dir={work}/state",
    ]  # fmt: skip
    if staging_bytes is not None:
        staging = work / "staging"
        staging.mkdir(exist_ok=True)
        command += ["--staging-dir", str(staging), "--staging-size", f"{staging_bytes >> 20}MiB"]
    environment = {**os.environ, "HADOOP_CONF_DIR": str(cluster.conf_dir)}
    # A package that was installed has its bytecode; a checkout may be told not to keep any.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(work / "bytecode")
    with _mounted("turbofs", command, work, environment) as mount:
        yield mount


@contextlib.contextmanager
def rclone_mount(cluster: HdfsCluster, work: Path, mode: str) -> Iterator[Mount]:
    """The cluster's root through `rclone mount`; *mode* is a key of RCLONE_FLAGS or RCLONE_WRITE_FLAGS."""
    if shutil.which("rclone") is None:
        raise BenchmarkError("rclone is not installed", advice="helpers/setup bench installs Debian's package")
    read_ahead = f"{MountConfig.read_ahead_kib}Ki"
    cache = work / f"rclone-{mode}-cache"
    flags = RCLONE_WRITE_FLAGS.get(mode) or ("--read-only", *RCLONE_FLAGS[mode])
    command = [
        "rclone", "mount", ":hdfs:/", "{folder}", "--hdfs-namenode", cluster.authority, "--hdfs-username", "root",
        "--cache-dir", str(cache), "--max-read-ahead", read_ahead,
        *flags, *_RCLONE_COMMON,
    ]  # fmt: skip
    try:
        with _mounted(f"rclone-{mode}", command, work, dict(os.environ)) as mount:
            yield mount
    finally:
        shutil.rmtree(cache, ignore_errors=True)


@contextlib.contextmanager
def memory_fuse(work: Path, size_bytes: int) -> Iterator[Path]:
    """The path of an in-memory file of *size_bytes* behind pyfuse3: what FUSE itself allows."""
    command = [sys.executable, "-m", "turbofs.bench.memory_fuse", "{folder}", str(size_bytes)]
    with _mounted("memory", command, work, dict(os.environ)) as mount:
        yield mount.folder / MEMORY_FILE_NAME


@contextlib.contextmanager
def _mounted(name: str, command: Sequence[str], work: Path, environment: dict[str, str]) -> Iterator[Mount]:
    """Run *command* ("{folder}" is the mount point) until the context ends. Raises BenchmarkError if it does not mount."""
    folder = work / f"{name}-mnt"
    folder.mkdir(exist_ok=True)
    log = work / f"{name}.log"
    filled = [str(folder) if part == "{folder}" else part for part in command]
    with log.open("wb") as sink:
        # setpriv and not preexec_fn: this process has threads (hdfs-native's), and Python code after fork could hang
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", *filled],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends them in order
        )
    try:
        _wait_mounted(process, folder, name, log)
        yield Mount(folder, process.pid, log)
    finally:
        _stop(process, folder)


def _wait_mounted(process: subprocess.Popen[bytes], folder: Path, name: str, log: Path) -> None:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while not mounts_at(folder):
        code = process.poll()
        if code is not None:
            raise BenchmarkError(f"{name} ended with {code} instead of mounting: {_tail(log)}")
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{name} did not mount within {_READY_TIMEOUT_S:.0f} s: {_tail(log)}")
        time.sleep(_POLL_S)
    # The same limits for every contestant, ours included: it sets them by itself, perhaps a moment later than now.
    # What the kernel refuses, it refuses to all of them alike.
    tune(folder, MountConfig.read_ahead_kib, MountConfig.max_background)
    # The mount is in the table a moment before its daemon answers; the first answer ends the wait.
    folder.stat()


def _stop(process: subprocess.Popen[bytes], folder: Path) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    while mounts_at(folder):
        try:
            detach(str(folder), lazy=True)
        except TurboError as error:
            raise BenchmarkError(f"{folder} stays mounted: {error}") from error


def _tail(log: Path) -> str:
    """The log's last line first, since reports keep one line; what led to it after."""
    lines = log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip().splitlines()
    return "\n".join(lines[-1:] + lines[:-1])
