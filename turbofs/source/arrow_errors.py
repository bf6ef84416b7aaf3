"""Errors of pyarrow's object-store clients → TurboError. They carry no errno, only a code inside their text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from turbofs.errors import (
    AccessDeniedError,
    ConfigError,
    NotFoundError,
    SourceUnavailableError,
    TurboError,
)
from turbofs.source.os_errors import from_os_error

_CODE = re.compile(r"AWS Error ([A-Z_]+)|google::cloud::Status\(([A-Z_]+)")
_HTTP_STATUS = re.compile(r"HTTP (?:status|response code)[: ]+(\d{3})")
_CREDENTIALS = "check the credentials in the environment (AWS_*, GOOGLE_APPLICATION_CREDENTIALS) or set `anonymous`"

_BY_CODE: Mapping[str, type[TurboError]] = MappingProxyType(
    {
        **dict.fromkeys(("NO_SUCH_BUCKET", "NO_SUCH_KEY", "RESOURCE_NOT_FOUND", "NOT_FOUND"), NotFoundError),
        **dict.fromkeys(
            (
                "ACCESS_DENIED",
                "EXPIRED_TOKEN",
                "INCOMPLETE_SIGNATURE",
                "INVALID_ACCESS_KEY_ID",
                "INVALID_CLIENT_TOKEN_ID",
                "INVALID_SIGNATURE",
                "MISSING_AUTHENTICATION_TOKEN",
                "OPT_IN_REQUIRED",
                "PERMISSION_DENIED",
                "SIGNATURE_DOES_NOT_MATCH",
                "UNAUTHENTICATED",
                "UNRECOGNIZED_CLIENT",
            ),
            AccessDeniedError,
        ),
        **dict.fromkeys(
            (
                "DEADLINE_EXCEEDED",
                "INTERNAL",
                "INTERNAL_FAILURE",
                "NETWORK_CONNECTION",
                "REQUEST_EXPIRED",
                "REQUEST_TIMEOUT",
                "RESOURCE_EXHAUSTED",
                "SERVICE_UNAVAILABLE",
                "SLOW_DOWN",
                "THROTTLING",
                "UNAVAILABLE",
            ),
            SourceUnavailableError,
        ),
    }
)


def from_arrow_error(error: OSError, act: str, path: str) -> TurboError:
    """The error to raise for *error*, met while doing *act* on *path*."""
    if error.errno is not None:
        return from_os_error(error, act, path)
    text = str(error)
    message = f"cannot {act} {path}: {text}"
    code = _CODE.search(text)
    kind = _BY_CODE.get(code[1] or code[2]) if code else None
    if kind is None:
        status = _HTTP_STATUS.search(text)
        kind = _by_http_status(int(status[1])) if status else None
    if kind is AccessDeniedError:
        return AccessDeniedError(message, advice=_CREDENTIALS)
    if kind is ConfigError:
        return ConfigError(message, advice="the bucket is in another region: set s3_region")
    return TurboError(message, advice="the object store gave this error") if kind is None else kind(message)


@contextmanager
def translated(act: str, path: str) -> Iterator[None]:
    """Inside, an error of pyarrow becomes the TurboError that `from_arrow_error` gives, chained to it."""
    try:
        yield
    except OSError as error:
        raise from_arrow_error(error, act, path) from error


def _by_http_status(status: int) -> type[TurboError] | None:
    if status in {401, 403}:
        return AccessDeniedError
    if status == 404:
        return NotFoundError
    if status in {301, 307}:
        return ConfigError
    return SourceUnavailableError if status in {408, 429} or status >= 500 else None
