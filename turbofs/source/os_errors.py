"""OSError → TurboError, by errno: one table for every source that ends in system calls or in a client made of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from turbofs.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    BadNameError,
    BusyError,
    CrossDeviceError,
    InvalidRequestError,
    IsADirectoryTurboError,
    NameTooLongError,
    NoSuchAttributeError,
    NotADirectoryTurboError,
    NotEmptyError,
    NotFoundError,
    NotPermittedError,
    NotSupportedError,
    OutOfSpaceError,
    QuotaExceededError,
    ReadOnlyError,
    SourceUnavailableError,
    StaleFileError,
    TurboError,
)

_BY_ERRNO: Mapping[int, type[TurboError]] = MappingProxyType(
    {
        errno.ENOENT: NotFoundError,
        errno.EEXIST: AlreadyExistsError,
        errno.ENOTDIR: NotADirectoryTurboError,
        errno.EISDIR: IsADirectoryTurboError,
        errno.ENOTEMPTY: NotEmptyError,
        errno.EACCES: AccessDeniedError,
        errno.EPERM: NotPermittedError,
        errno.EINVAL: InvalidRequestError,
        errno.ELOOP: InvalidRequestError,
        errno.ENAMETOOLONG: NameTooLongError,
        errno.EILSEQ: BadNameError,
        errno.ENODATA: NoSuchAttributeError,
        errno.EBUSY: BusyError,
        errno.ETXTBSY: BusyError,
        errno.EXDEV: CrossDeviceError,
        errno.ENOTSUP: NotSupportedError,
        errno.ENOSYS: NotSupportedError,
        errno.ENXIO: NotSupportedError,
        errno.EROFS: ReadOnlyError,
        errno.ENOSPC: OutOfSpaceError,
        errno.EDQUOT: QuotaExceededError,
        errno.ESTALE: StaleFileError,
        # A tree on the network whose server is away: these pass once it is back.
        errno.ETIMEDOUT: SourceUnavailableError,
        errno.ECONNREFUSED: SourceUnavailableError,
        errno.ECONNRESET: SourceUnavailableError,
        errno.ECONNABORTED: SourceUnavailableError,
        errno.ENOTCONN: SourceUnavailableError,
        errno.ESHUTDOWN: SourceUnavailableError,
        errno.EHOSTDOWN: SourceUnavailableError,
        errno.EHOSTUNREACH: SourceUnavailableError,
        errno.ENETDOWN: SourceUnavailableError,
        errno.ENETUNREACH: SourceUnavailableError,
        errno.EREMOTEIO: SourceUnavailableError,
        errno.EAGAIN: SourceUnavailableError,
    }
)

_READ_ONLY_ADVICE = "the source's own file system is read-only; remount it writable"


def from_os_error(error: OSError, act: str, path: str) -> TurboError:
    """The error to raise for *error*, met while doing *act* ("open", "list", …) on *path*.

    An errno that is not in the table becomes a TurboError that carries it.
    """
    number = error.errno or errno.EIO
    message = f"cannot {act} {path}: {os.strerror(number)}"
    if number == errno.EROFS:
        return ReadOnlyError(message, advice=_READ_ONLY_ADVICE)
    kind = _BY_ERRNO.get(number)
    if kind is not None:
        return kind(message)
    other = TurboError(message, advice="the operating system gave this error; its own log may say more")
    other.errno = number
    return other


@contextmanager
def translated(act: str, path: str) -> Iterator[None]:
    """Inside, an OSError becomes the TurboError that `from_os_error` gives, chained to it."""
    try:
        yield
    except OSError as error:
        raise from_os_error(error, act, path) from error
