"""Namespaces of a run's own, so that whatever dies leaves no mount, process or data behind.

The run starts itself again under `unshare` in a mount and a PID namespace. Its data lives on a tmpfs that only this
mount namespace sees. When the run ends, also by SIGKILL, the kernel kills every process of the PID namespace and,
with the last of them, drops every mount: HDFS, the daemons, the FUSE mounts and the data. Where namespaces are not
permitted (a container without CAP_SYS_ADMIN) the run goes on without, and cleans up by itself as long as it lives.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from turbofs.bench.harness import BenchmarkError

_INSIDE = "TURBOFS_BENCH_FOLDER"
"""Set inside the namespaces: the empty folder, made outside, on which the run mounts its tmpfs."""
_UNSHARE = (
    "setpriv",
    "--pdeathsig",
    "KILL",
    "unshare",
    "--mount",
    "--propagation",
    "slave",  # what is unmounted outside goes here too; a copy would keep its daemon alive
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)


def enter(arguments: Sequence[str]) -> int | None:
    """Run `turbofs bench ARGUMENTS…` inside new namespaces and return its exit code.

    None where this process is inside already, or must do without namespaces.
    """
    if os.environ.get(_INSIDE) or not _available():
        return None
    command = [*_UNSHARE, sys.executable, "-m", "turbofs.bench", *arguments]
    with (
        tempfile.TemporaryDirectory(prefix="turbofs-bench-") as folder,
        subprocess.Popen(command, env={**os.environ, _INSIDE: folder}) as child,
    ):
        return _wait(child)


@contextlib.contextmanager
def work_folder(size_bytes: int, promised_bytes: int = 0) -> Iterator[Path]:
    """An empty folder for *size_bytes* of data in memory, gone when the context or the process ends.

    *promised_bytes* are free there besides, on paper: for whoever wants to see more room than it will use. Inside the
    namespaces it is a tmpfs mounted for this run; otherwise a folder on /dev/shm. Raises BenchmarkError where the
    machine has too little memory for the data.
    """
    with _sigterm_as_exit():
        _require_memory(size_bytes)
        parent = os.environ.get(_INSIDE, "/dev/shm")
        if _INSIDE in os.environ:
            options = f"mode=0755,size={size_bytes + promised_bytes}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "turbofs-bench", parent], check=True)
        # Short where it lies in a folder of the run: the path of a control socket has 107 characters at most.
        prefix = "" if _INSIDE in os.environ else "turbofs-bench-"
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # Daemons drop or map privileges by themselves; the folder holds nothing that is secret.
        folder.chmod(0o755)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def disk_folder(size_bytes: int) -> Iterator[Path]:
    """An empty folder for *size_bytes* of data on the disk of the temporary directory, gone as `work_folder` is.

    Inside the namespaces it is a file system in a file that has no name any more. Raises BenchmarkError where the disk
    has too little room.
    """
    free_bytes = shutil.disk_usage(tempfile.gettempdir()).free
    if free_bytes < size_bytes:
        raise BenchmarkError(
            f"{tempfile.gettempdir()} has {free_bytes >> 20} MiB free, the data needs {size_bytes >> 20} MiB",
            advice="free some space, or set TMPDIR to a folder on a larger disk",
        )
    with tempfile.TemporaryDirectory(prefix="turbofs-bench-disk-") as name:
        folder = Path(name)
        mounted = _INSIDE in os.environ and _mount_image(folder, size_bytes)
        try:
            (folder / "data").mkdir()
            yield folder / "data"
        finally:
            if mounted:
                subprocess.run(["umount", "--lazy", name], check=True)


def _mount_image(folder: Path, size_bytes: int) -> bool:
    """Mount an empty file system for *size_bytes* on *folder*; False where this machine lends no loop device."""
    if shutil.which("mkfs.ext4") is None or not Path("/dev/loop-control").exists():
        return False
    with tempfile.NamedTemporaryFile(prefix="turbofs-bench-", suffix=".img", delete=False) as image:
        os.truncate(image.fileno(), size_bytes + size_bytes // 10)  # inodes and the like take a few hundredths
    try:
        # no journal, nothing reserved: the data lives as long as the run
        if _done("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", "-E", "nodiscard", image.name) is None:
            return False
        # direct: the pages are in memory once, not twice
        device = _done("losetup", "--find", "--show", "--direct-io=on", image.name)
        if device is None:
            return False
        mounted = _done("mount", device.strip(), str(folder)) is not None
        _done("losetup", "--detach", device.strip())  # takes effect when the mount goes
        return mounted
    finally:
        os.unlink(image.name)


def _done(*command: str) -> str | None:
    """What *command* printed; None where it failed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def _available() -> bool:
    """Whether `unshare` may make these namespaces here."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("setpriv", "unshare"))):
        return False
    return subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False).returncode == 0


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Wait for *child*; SIGTERM kills it, and with it its namespaces. Ctrl-C reaches it by itself."""

    def end(_signum: int, _frame: FrameType | None) -> None:
        child.kill()

    signal.signal(signal.SIGTERM, end)
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:  # the child has it too, and tidies up
            continue


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Let SIGTERM unwind the contexts. The first process of a PID namespace would ignore it otherwise."""

    def end(_signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _require_memory(size_bytes: int) -> None:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    if available_bytes < size_bytes:
        raise BenchmarkError(
            f"{available_bytes >> 20} MiB of memory are available, the data needs {size_bytes >> 20} MiB",
            advice="free some memory, or use --quick, which needs less",
        )
