"""From errors to what a person sees: one message, what to do, and the exit code."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from turbofs.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    NotReachableError,
    SourceUnavailableError,
    TurboError,
)

DONE, FAILED, WRONG_USE, NOT_REACHABLE, TIMED_OUT = 0, 1, 2, 3, 4


def exit_code(error: TurboError) -> int:
    """0 done, 1 failed, 2 wrong use, 3 not reachable, 4 timed out."""
    if isinstance(error, ConfigError | InvalidRequestError):
        return WRONG_USE
    if isinstance(error, NotReachableError | SourceUnavailableError):
        return NOT_REACHABLE
    if isinstance(error, DeadlineExceededError):
        return TIMED_OUT
    return FAILED


def error_document(error: TurboError) -> dict[str, object]:
    """What `--json` prints for *error*."""
    code = errno.errorcode.get(error.errno, "EIO")
    return {"error": {"code": code, "message": str(error), "advice": error.advice, "exit_code": exit_code(error)}}


def error_text(error: TurboError) -> str:
    return f"turbofs: {error}\n  {error.advice}"


def turbo_errors(error: BaseException) -> Iterator[TurboError]:
    """The TurboErrors in *error*, which nurseries may have wrapped in groups."""
    if isinstance(error, TurboError):
        yield error
    elif isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from turbo_errors(inner)


def only_turbo_error(error: BaseException) -> TurboError | None:
    """The first TurboError, if *error* holds nothing else: a defect beside it must show as one."""
    found = list(turbo_errors(error))
    return found[0] if found and len(found) == _leaves(error) else None


def _leaves(error: BaseException) -> int:
    return sum(map(_leaves, error.exceptions)) if isinstance(error, BaseExceptionGroup) else 1
