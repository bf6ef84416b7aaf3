"""Start a daemon that outlives this process, and wait until its mount is usable."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import turbofs.errors
from turbofs.cli import mount_point
from turbofs.config import Config
from turbofs.errors import ConfigError, DeadlineExceededError, MountError, TurboError
from turbofs.settings import to_document

_GRACE_S = 60.0  # beyond --wait: starting Python, a JVM for libhdfs, and the mount itself
_STOP_LIMIT_S = 15.0


def start(config: Config, log_file: Path, say: Callable[[str], None]) -> int:
    """Start the daemon of *config*; returns its process id when the mount is usable.

    *say* is told what the daemon waits for. Raises what kept it from starting; then nothing of it is left.
    """
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        log = log_file.open("ab")
    except OSError as error:
        raise ConfigError(f"cannot log to {log_file}: {error.strerror}", advice="set log_dir under [mount]") from error
    reading, writing = os.pipe()
    with log, open(reading, "rb", closefd=True) as messages:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "turbofs.cli.daemon", str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,  # crash traces; what it logs goes to the same file
            start_new_session=True,
            pass_fds=(writing,),
            cwd="/",
        )
        os.close(writing)
        try:
            assert daemon.stdin is not None
            # A daemon that died already says why in its log; the message below names that.
            with contextlib.suppress(BrokenPipeError), daemon.stdin as request:
                request.write(json.dumps({"config": to_document(config), "log_file": str(log_file)}).encode())
            _await_ready(messages.fileno(), config.mount.wait_s + _GRACE_S, say, log_file)
        except BaseException:
            _stop(daemon)
            mount_point.detach_leftover(str(config.mount.mountpoint), config.mount.runtime_dir)
            raise
    daemon.returncode = 0  # it lives on: keeps Popen from warning that nobody waited for it
    return daemon.pid


def _await_ready(descriptor: int, limit_s: float, say: Callable[[str], None], log_file: Path) -> None:
    for message in _messages(descriptor, time.monotonic() + limit_s):
        if message["kind"] == "ready":
            return
        if message["kind"] == "progress":
            say(str(message["message"]))
        else:
            raise _relayed(message)
    raise MountError("the daemon ended before the mount was usable", advice=f"see {log_file}")


def _messages(descriptor: int, deadline: float) -> Iterator[dict[str, object]]:
    buffered = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise DeadlineExceededError(
                    "the daemon did not come up in time", advice="see its log for what it waits for"
                )
            data = os.read(descriptor, 1 << 16)
            if not data:
                return
            *lines, buffered = (buffered + data).split(b"\n")
            for line in lines:
                yield json.loads(line)


def _relayed(message: dict[str, object]) -> TurboError:
    details = message.get("error")
    assert isinstance(details, dict)
    kind = getattr(turbofs.errors, str(message.get("class")), TurboError)
    error: TurboError = kind(str(details["message"]), advice=str(details["advice"]))
    return error


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    """End a daemon that has not come up: it unmounts if it is given the time."""
    if daemon.poll() is None:
        daemon.terminate()
    try:
        daemon.wait(_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
