"""The mount's daemon: builds the object graph, serves until it is told to stop, and leaves nothing behind.

`turbofs mount -f` runs it in its own process. Otherwise `turbofs mount` starts `python -m turbofs.cli.daemon FD`,
writes the configuration to its standard input as JSON, and reads from pipe FD how it fares (`notify.PipeReporter`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog
import trio

from turbofs.cli import allocator, logs
from turbofs.cli.failures import FAILED, only_turbo_error
from turbofs.cli.notify import PipeReporter, Reporter, notify_systemd
from turbofs.config import Config, SourceConfig
from turbofs.errors import TurboError
from turbofs.fs.control_ops import ControlOps
from turbofs.fs.filesystem import FileSystem
from turbofs.fs.hint_store import HintStore, state_directory, state_file
from turbofs.fuse import mount as fuse_mount
from turbofs.metrics import Metrics
from turbofs.model import ROOT, Attributes
from turbofs.settings import from_document
from turbofs.source.base import Source
from turbofs.source.registry import open_source
from turbofs.source.retrying import RetryingSource
from turbofs.wire import runtime_dir
from turbofs.wire.control_server import ControlServer
from turbofs.write.opening import open_staging, staging_place

SourceOpener = Callable[[str, SourceConfig, trio.CapacityLimiter], Source]

_log = structlog.get_logger("turbofs.cli.daemon")  # not __main__, as which it runs in the background
_SILENCE_S = 1.0  # what takes longer than that wants an explanation
_GC_THRESHOLD = 100_000  # objects between collections; Python's 700 costs a listing a fifth of its time
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


async def serve(config: Config, reporter: Reporter, opener: SourceOpener = open_source) -> None:
    """Serve one mount until it is unmounted or a stop signal comes. Raises the TurboError that prevents it.

    *opener* is for tests, which put sources that misbehave under a real mount.
    """
    mount = config.mount
    base = mount.runtime_dir or runtime_dir.runtime_base()
    stop = _Stop()
    async with trio.open_nursery() as nursery:
        await nursery.start(_stop_on_signal, stop)
        with runtime_dir.held(str(mount.mountpoint), base) as folder:
            limiter = trio.CapacityLimiter(config.source.threads)
            metrics = Metrics()
            source = RetryingSource(opener(mount.source, config.source, limiter), config.source, metrics=metrics)
            try:
                root: Attributes | None = None
                with stop.ends():
                    await _connect(source, mount.wait_s, reporter)
                    root = await source.stat_exact(ROOT)
                if root is not None:
                    await _serve_source(source, root, config, folder, metrics, reporter, stop)
            finally:
                if not stop.requested:
                    notify_systemd("STOPPING=1")
                await source.aclose()
        nursery.cancel_scope.cancel()


async def _serve_source(
    source: Source,
    root: Attributes,
    config: Config,
    folder: Path,
    metrics: Metrics,
    reporter: Reporter,
    stop: _Stop,
) -> None:
    mount = config.mount
    record = runtime_dir.MountRecord(os.getpid(), mount.source, str(mount.mountpoint), time.time())
    socket_path = folder / runtime_dir.SOCKET_NAME

    def ready() -> None:
        runtime_dir.write_record(folder, record)
        notify_systemd("READY=1", f"STATUS={mount.source} on {mount.mountpoint}")
        _log.info("mounted", source=mount.source, mountpoint=str(mount.mountpoint))
        reporter.ready()

    state = state_directory(config.fs, mount.mountpoint)
    hints = await trio.to_thread.run_sync(HintStore.open, state_file(state))
    staging = None
    if not mount.read_only:
        place = staging_place(config.write, folder.name, folder.parent, state)
        staging = await trio.to_thread.run_sync(open_staging, config.write, place, state)
    async with trio.open_nursery() as nursery:
        filesystem = FileSystem(
            source,
            config,
            root,
            nursery=nursery,
            metrics=metrics,
            hints=hints,
            control_path=socket_path,
            staging=staging,
        )
        identity: dict[str, object] = {"source": mount.source, "mountpoint": str(mount.mountpoint)}
        ops = ControlOps(filesystem, identity, deadline_s=config.fs.request_deadline_s)
        await nursery.start(ControlServer(socket_path, ops).serve)
        try:
            # Only the serving ends at a signal: what is staged is written afterwards, by tasks of this nursery, and the
            # control socket tells how far that is.
            with stop.ends():
                await fuse_mount.serve(filesystem, config, ready)
        finally:
            _log.info("unmounted", mountpoint=str(mount.mountpoint))
        nursery.cancel_scope.cancel()


async def _connect(source: RetryingSource, wait_s: float, reporter: Reporter) -> None:
    """Reach *source* within *wait_s*, saying what is waited for: soon, and again for each new reason."""
    told: set[str] = set()

    def tell(reason: str, left_s: float) -> None:
        if reason not in told:
            told.add(reason)
            reporter.progress(f"waiting up to {left_s:.0f} s for {source.uri}: {reason}")
            notify_systemd(f"STATUS=waiting for {source.uri}")

    async def tell_silence() -> None:
        await trio.sleep(_SILENCE_S)
        if not told:
            tell("no answer yet", wait_s - _SILENCE_S)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell_silence)
        await source.connect(wait_s=wait_s, progress=lambda error, left_s: tell(str(error), left_s))
        nursery.cancel_scope.cancel()


class _Stop:
    """What a stop signal ends: whatever is inside `ends()` when it comes, or is entered afterwards."""

    def __init__(self) -> None:
        self.requested = False
        self._scope: trio.CancelScope | None = None

    def request(self) -> None:
        self.requested = True
        if self._scope is not None:
            self._scope.cancel()

    @contextlib.contextmanager
    def ends(self) -> Iterator[None]:
        with trio.CancelScope() as self._scope:
            if self.requested:
                self._scope.cancel()
            yield


async def _stop_on_signal(stop: _Stop, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    with trio.open_signal_receiver(*_STOP_SIGNALS) as signals:
        task_status.started()
        async for number in signals:
            _log.info("stopping", signal=signal.Signals(number).name)
            notify_systemd("STOPPING=1")
            stop.request()


def run(config: Config, reporter: Reporter) -> None:
    """Serve in this process. Raises the TurboError that ended it; *reporter* has been told before."""
    # A daemon must not keep a directory busy, least of all one in its own mount.
    os.chdir("/")
    # What start-up made stays for good; and a listing makes objects by the hundred thousand, none of them in cycles.
    allocator.keep_freed_memory()
    _allow_many_files()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    try:
        trio.run(serve, config, reporter)
    except BaseException as error:
        cause = only_turbo_error(error)
        if cause is None:
            raise
        _log.error("mount failed", error=str(cause))
        reporter.failed(cause)
        raise cause from error


def _allow_many_files() -> None:
    """Raise the soft limit of descriptors to the hard one: each file open on a local source takes one.

    The usual soft limit of 1024 is for programs that use select(); nothing here does, and nothing is started from here.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a container may forbid it: then the limit stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> int:
    """The child of `turbofs mount`: `python -m turbofs.cli.daemon FD`."""
    reporter = PipeReporter(int(sys.argv[1]))
    request = json.load(sys.stdin)
    os.set_inheritable(int(sys.argv[1]), False)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    faulthandler.enable()
    config = from_document(request["config"])
    logs.configure(config.mount.log_format, config.mount.log_level, Path(request["log_file"]))
    try:
        run(config, reporter)
    except TurboError:
        return FAILED  # told through the pipe, and logged
    except Exception:  # noqa: BLE001 - whoever started us must hear of it, whatever it is
        _log.exception("the daemon failed")
        reporter.failed(TurboError("the daemon failed on a defect of its own", advice=f"see {request['log_file']}"))
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
