"""Structured logs: key-value pairs, as JSON or for people, also for the libraries that use Python's own logging."""

from __future__ import annotations

import logging
import logging.handlers
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from structlog.typing import Processor

_FILE_BYTES, _FILES_KEPT = 8 << 20, 2
_QUIET_LIBRARIES = ("httpx", "httpcore", "hdfs_native", "urllib3")  # they log each request at INFO


def configure(log_format: str, level: str, file: Path | None = None) -> None:
    """Send everything logged to *file*, which is rotated, or to stderr.

    *log_format* is `json`, `console` or `auto`: console on a terminal, JSON elsewhere.
    """
    to_console = log_format == "console" or (log_format == "auto" and file is None and sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderers: list[Processor] = (
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
        if to_console
        else [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
    )
    handler: logging.Handler = (
        logging.StreamHandler(sys.stderr)
        if file is None
        else logging.handlers.RotatingFileHandler(file, maxBytes=_FILE_BYTES, backupCount=_FILES_KEPT, encoding="utf-8")
    )
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for library in _QUIET_LIBRARIES:
        logging.getLogger(library).setLevel(logging.WARNING)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def default_log_folder(effective_uid: int) -> Path:
    """Where daemons in the background log."""
    if effective_uid == 0:
        return Path("/var/log/turbofs")
    import platformdirs

    return platformdirs.user_log_path("turbofs")
