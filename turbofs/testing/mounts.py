"""Real kernel mounts for tests, each served by a process of its own, and gone when the test is.

    with workplace() as place:
        (place.source / "f").write_bytes(b"x")
        with place.mount("fs.attribute_timeout=100ms") as mount:
            mount.path ...                      # the ordinary daemon, through the command line
        with place.direct() as mount:           # the same over a source that obeys:
            mount.source.hold(["read"])         # see turbofs.testing.served_mount

A daemon dies with the test run, and after `LIFETIME_S` in any case: whoever waits for the mount then gets ENOTCONN, so
that a hanging test fails. Nothing here touches a mount; tests do, with `turbofs.testing.children` where it may hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple, cast

from turbofs.cli import mount_point, mount_table
from turbofs.testing.children import die_with_parent
from turbofs.testing.waiting import eventually
from turbofs.wire import runtime_dir
from turbofs.wire.control_client import ControlClient

LIFETIME_S = 150
"""A module of tests shares one mount at most this long."""
_START_LIMIT_S, _STOP_LIMIT_S, _COMMAND_LIMIT_S = 60.0, 20.0, 60.0
_DEFECTS = ("on a defect of TurboFS", "Traceback (most recent call last)", '"exception":')


class Request(NamedTuple):
    """An act that the mount asked of its source; the range is a read's."""

    act: str
    path: str
    start: int
    stop: int


class ObedientSource:
    """Commands to the source under a mount that `served_mount` serves."""

    def __init__(self, commands: IO[bytes], replies: IO[bytes]) -> None:
        self._commands = commands
        self._replies = replies

    def hold(self, acts: Collection[str] | None = None, *, after: int = 0) -> None:
        """Once *after* more of each have passed, these acts (None: all) hang until they are released."""
        self._call("hold", after=after, **({} if acts is None else {"acts": sorted(acts)}))

    def release(self) -> None:
        self._call("release")

    def wait_held(self, count: int = 1) -> None:
        """Return once *count* acts hang."""
        self._call("wait_held", count=count)

    def delay(self, latency_s: float) -> None:
        self._call("delay", latency_s=latency_s)

    def fail(
        self,
        acts: Collection[str],
        *,
        times: int | None = None,
        error: str = "SourceUnavailableError",
        path: str | None = None,
        short_reads: bool = False,
    ) -> None:
        """The next *times* of these acts (None: all, until `heal`) raise *error*, or come back short."""
        self._call("fail", acts=sorted(acts), times=times, error=error, path=path, short_reads=short_reads)

    def heal(self) -> None:
        self._call("heal")

    def put(self, path: str, text: str = "", *, owner: str | None = None, group: str | None = None) -> None:
        """Make a file in a `memory:` source, of that owner and group."""
        self._call("put", path=path, text=text, owner=owner, group=group)

    def requests(self, act: str | None = None, path: str | None = None) -> list[Request]:
        """What was asked so far, of one act and about one path where these are given."""
        found = [Request(*each) for each in cast("list[tuple[str, str, int, int]]", self._call("requests"))]
        return [each for each in found if act in {None, each.act} and path in {None, each.path}]

    def forget_requests(self) -> None:
        self._call("forget_requests")

    def _call(self, name: str, **arguments: object) -> object:
        self._commands.write(json.dumps({"call": name, "args": arguments}).encode() + b"\n")
        self._commands.flush()
        ready, _, _ = select.select([self._replies], [], [], _COMMAND_LIMIT_S)
        line = self._replies.readline() if ready else b""
        if not line:
            raise AssertionError(f"the source does not obey: {name} {arguments}")
        reply = json.loads(line)
        if "error" in reply:
            raise AssertionError(f"{name} {arguments}: {reply['error']}")
        return reply["result"]


@dataclass
class Mount:
    """A usable mount. `source` is there where the mount was made by `Workplace.direct`."""

    place: Workplace
    process: subprocess.Popen[bytes]
    obedient: ObedientSource | None = None

    @property
    def path(self) -> Path:
        return self.place.mountpoint

    @property
    def source(self) -> ObedientSource:
        assert self.obedient is not None, "only Workplace.direct makes mounts over an obedient source"
        return self.obedient

    def control(self) -> ControlClient:
        """A connection to the control socket; the caller closes it."""
        return ControlClient(self.place.folder / runtime_dir.SOCKET_NAME)

    def status(self, path: str | None = None) -> dict[str, object]:
        """The status document of the mount, or of one path in it."""
        with self.control() as client:
            return cast("dict[str, object]", client.call("status", {} if path is None else {"path": path}))

    def cache(self) -> dict[str, int]:
        """The statistics of the extent cache."""
        return cast("dict[str, int]", self.status()["cache"])

    def peak_resident_bytes(self) -> int:
        """The most memory that the daemon ever had."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


class Workplace:
    """A source tree, a mount point and a mount's own folders, in a directory that other users may search."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.source = root / "source"
        self.mountpoint = root / "mnt"
        self.runtime = root / "run"
        self.lifetime_s = LIFETIME_S
        self.staging = Path(tempfile.mkdtemp(prefix="turbofs-test-", dir=_memory()))
        for folder in (self.source, self.mountpoint, root / "state", root / "log"):
            folder.mkdir()
            folder.chmod(0o755)
        self.environment = {
            **os.environ,
            "TURBOFS_RUNTIME_DIR": str(self.runtime),
            "XDG_CONFIG_HOME": str(root / "config"),  # the settings of whoever runs the tests are not the tests'
        }

    @property
    def uri(self) -> str:
        return f"file://{self.source}"

    @property
    def folder(self) -> Path:
        """Where the control socket and the record of the mount are."""
        return runtime_dir.folder_of(str(self.mountpoint), self.runtime)

    @property
    def mounted(self) -> bool:
        """Whether anything of TurboFS is mounted on the mount point, dead or alive."""
        return str(self.mountpoint) in mount_table.turbofs_mounts()

    def options(self, *options: str) -> list[str]:
        """`-o` arguments: *options*, and those that keep the mount's files in this place."""
        own = [f"fs.state_dir={self.root / 'state'}", f"log_dir={self.root / 'log'}", "log_format=json"]
        if not any(option.startswith("staging_dir=") for option in options):
            own.append(f"staging_dir={self.staging}")
        return [part for option in (*own, *options) for part in ("-o", option)]

    def turbofs(self, *arguments: str, limit_s: float = _COMMAND_LIMIT_S) -> subprocess.CompletedProcess[str]:
        """Run one command of `turbofs` to its end."""
        return subprocess.run(
            [sys.executable, "-m", "turbofs.cli.app", *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=limit_s,
            check=False,
        )

    def mount_in_background(self, *options: str) -> int:
        """`turbofs mount` as a user types it; the daemon's process id."""
        done = self.turbofs("mount", self.uri, str(self.mountpoint), "--json", *self.options(*options))
        assert done.returncode == 0, done.stderr
        return int(json.loads(done.stdout)["pid"])

    @contextmanager
    def mount(self, *options: str, source: str | None = None, cwd: Path | None = None) -> Iterator[Mount]:
        """The command line's own mount, kept in the foreground."""
        command = ["turbofs.cli.app", "mount", "-f", source or self.uri, str(self.mountpoint)]
        with self._serving([*command, *self.options(*options)], cwd=cwd) as mount:
            yield mount

    @contextmanager
    def direct(
        self, *options: str, source: str | None = None, fail: Mapping[str, object] | None = None
    ) -> Iterator[Mount]:
        """A mount whose source obeys `Mount.source`; *fail*: arguments of `fail` that hold from the start."""
        command = ["turbofs.testing.served_mount", source or self.uri, str(self.mountpoint)]
        if fail is not None:
            command += ["--fail", json.dumps(fail)]
        with self._serving([*command, *self.options(*options)], obedient=True) as mount:
            yield mount

    def clean(self) -> None:
        """End what is still served here, and unmount what is still mounted."""
        for folder, record in runtime_dir.list_records([self.runtime]):
            if runtime_dir.daemon_alive(folder):  # else the number may be another process's by now
                with contextlib.suppress(ProcessLookupError):
                    os.kill(record.pid, signal.SIGKILL)
        for mountpoint in mount_table.turbofs_mounts():
            if mountpoint.startswith(f"{self.root}/"):
                mount_point.detach(mountpoint, lazy=True)

    def _record_pid(self) -> int | None:
        """The daemon whose mount was usable last: it may be dead."""
        record = runtime_dir.read_record(self.folder)
        return record.pid if record else None

    @contextmanager
    def _serving(self, command: Sequence[str], *, obedient: bool = False, cwd: Path | None = None) -> Iterator[Mount]:
        log_path = self.root / "log" / "daemon.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                env=self.environment,
                cwd=cwd,
                stdin=subprocess.PIPE if obedient else subprocess.DEVNULL,
                stdout=subprocess.PIPE if obedient else subprocess.DEVNULL,
                stderr=log,
                preexec_fn=partial(_limit_life, self.lifetime_s),  # noqa: PLW1509 - no thread runs beside
            )
        pipes = ObedientSource(process.stdin, process.stdout) if process.stdin and process.stdout else None
        mount = Mount(self, process, pipes)
        try:
            eventually(
                lambda: self._record_pid() == process.pid or process.poll() is not None,
                "the mount is usable",
                limit_s=_START_LIMIT_S,
            )
            assert process.poll() is None, f"the daemon ended: {log_path.read_text()}"
            yield mount
        finally:
            try:
                _end(process)
            finally:
                self.clean()
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        pipe.close()
        text = log_path.read_text(errors="replace")
        assert not any(sign in text for sign in _DEFECTS), f"the daemon met a defect of its own:\n{text}"


@contextmanager
def workplace() -> Iterator[Workplace]:
    """A place of its own for one test (or module), gone afterwards with whatever runs in it."""
    root = Path(tempfile.mkdtemp(prefix="turbofs-test-"))
    root.chmod(0o755)
    place = Workplace(root)
    try:
        yield place
    finally:
        place.clean()
        assert not place.mounted
        shutil.rmtree(root)
        shutil.rmtree(place.staging, ignore_errors=True)


def _memory() -> Path | None:
    """Where staging belongs: in memory, if this machine has a tmpfs for everybody."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else None


def _limit_life(lifetime_s: int) -> None:
    die_with_parent(signal.SIGTERM)  # then a daemon unmounts first
    signal.alarm(lifetime_s)  # outlives exec, and ends a process that does not expect it


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise AssertionError(f"the daemon did not end within {_STOP_LIMIT_S:g} s of SIGTERM") from None
    assert process.returncode == 0, f"the daemon ended with {process.returncode}"
