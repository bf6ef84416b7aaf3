"""How a starting daemon tells how it fares: to systemd (sd_notify), and to the `turbofs mount` that waits for it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Protocol

from turbofs.cli.failures import error_document, exit_code
from turbofs.cli.output import note
from turbofs.errors import TurboError


class Reporter(Protocol):
    """Who started the daemon wants to know: what it waits for, that it is usable, or why it is not."""

    def progress(self, message: str) -> None: ...
    def ready(self) -> None: ...
    def failed(self, error: TurboError) -> None: ...


class TerminalReporter:
    """In the foreground: the terminal, or the journal, reads along."""

    def progress(self, message: str) -> None:
        note(message)

    def ready(self) -> None:
        note("mounted; Ctrl-C unmounts")

    def failed(self, error: TurboError) -> None:
        """`main` prints what it is given."""


class PipeReporter:
    """In the background: one JSON object a line, through the pipe whose other end `turbofs mount` reads."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def progress(self, message: str) -> None:
        self._write({"kind": "progress", "message": message})

    def ready(self) -> None:
        self._write({"kind": "ready"})
        self._close()

    def failed(self, error: TurboError) -> None:
        document = {"kind": "error", "class": type(error).__name__, "exit_code": exit_code(error)}
        self._write(document | error_document(error))
        self._close()

    def _write(self, document: dict[str, object]) -> None:
        if self._descriptor >= 0:
            # Who started us may have gone: the mount goes on without it.
            with contextlib.suppress(BrokenPipeError):
                os.write(self._descriptor, json.dumps(document).encode() + b"\n")

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def notify_systemd(*states: str) -> None:
    """Send "READY=1", "STOPPING=1", "STATUS=…" where a service manager asked for it; nothing happens elsewhere."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    # "@" stands for the NUL byte of an abstract address.
    target = "\0" + address[1:] if address.startswith("@") else address
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto("\n".join(states).encode(), target)
