"""One tree of errors, grouped by what the handler would do. Each class carries its errno and what the user can do.

The FUSE adapter answers `errno`; the command line prints the message, then the advice. `transient` says whether the
same act may succeed when repeated: only the retrying source looks at it.
"""

from __future__ import annotations

import errno as _errno


class TurboError(Exception):
    """Base of all errors that TurboFS raises on purpose."""

    errno: int = _errno.EIO
    transient: bool = False
    advice: str = "see the daemon's log (journalctl -u 'turbofs-mount@*') for the cause"

    def __init__(self, message: str, *, advice: str | None = None) -> None:
        super().__init__(message)
        if advice is not None:
            self.advice = advice


# --- the name or the arguments are wrong: answer at once


class NotFoundError(TurboError):
    errno = _errno.ENOENT
    advice = "check the path; names made elsewhere appear within the attribute timeout"


class AlreadyExistsError(TurboError):
    errno = _errno.EEXIST
    advice = "remove the target first, or choose another name"


class NotADirectoryTurboError(TurboError):
    errno = _errno.ENOTDIR
    advice = "a component of the path is a file"


class IsADirectoryTurboError(TurboError):
    errno = _errno.EISDIR
    advice = "name a file inside the directory"


class NotEmptyError(TurboError):
    errno = _errno.ENOTEMPTY
    advice = "delete what is inside first"


class AccessDeniedError(TurboError):
    errno = _errno.EACCES
    advice = "the identity that TurboFS uses on the source lacks permission; `turbofs doctor` names it"


class NotPermittedError(TurboError):
    errno = _errno.EPERM
    advice = "only the owner or the superuser of the source may do this"


class InvalidRequestError(TurboError):
    errno = _errno.EINVAL
    advice = "see docs/INTERFACE.md for the accepted values"


class NameTooLongError(TurboError):
    errno = _errno.ENAMETOOLONG
    advice = "the source limits the length of names and paths"


class BadNameError(TurboError):
    errno = _errno.EILSEQ
    advice = "this source takes only names that are valid UTF-8, without '/', NUL or (HDFS) ':'"


class NoSuchAttributeError(TurboError):
    errno = _errno.ENODATA
    advice = "the attribute is not set on this file or any directory above it"


class BusyError(TurboError):
    errno = _errno.EBUSY
    advice = "something else uses it; see the message for what"


class BadDescriptorError(TurboError):
    errno = _errno.EBADF
    advice = "open the file in the mode that the act needs"


class CrossDeviceError(TurboError):
    errno = _errno.EXDEV
    advice = "copy and delete instead"


# --- this source or this mount cannot do it at all


class NotSupportedError(TurboError):
    errno = _errno.ENOTSUP
    advice = "the source does not offer this; docs/SEMANTICS.md lists what each source can do"


class ReadOnlyError(TurboError):
    errno = _errno.EROFS
    advice = "mounted with --read-only; give hints on .turbofs/hints/PATH"


# --- limits


class OutOfSpaceError(TurboError):
    errno = _errno.ENOSPC
    advice = "free space, or raise the limit that the message names"


class QuotaExceededError(TurboError):
    errno = _errno.EDQUOT
    advice = "raise the directory's quota on the source, or delete old files"


class OutOfMemoryBudgetError(TurboError):
    errno = _errno.ENOMEM
    advice = "raise --memory; every buffer of the mount counts against it"


# --- the file is not what it was


class StaleFileError(TurboError):
    errno = _errno.ESTALE
    advice = "the file was replaced, changed or deleted elsewhere; open it again"


class ShortReadError(TurboError):
    """The source ended before the file's size. Never an early end of file: retried, then EIO."""

    transient = True
    advice = "a replica may be corrupt or a block missing; `hdfs fsck PATH -files -blocks` tells"


class CorruptDataError(TurboError):
    advice = "the bytes do not match their digest or checksum; another copy was tried"


class FormatError(TurboError):
    """A file's inside is not what its name says (checkpoint index, configuration, manifest)."""

    errno = _errno.EINVAL
    advice = "plain reads of the file go on; see the message for where it breaks"


# --- the other side does not answer


class SourceUnavailableError(TurboError):
    """A server is down, restarting, in safe mode or unreachable: worth a retry until the deadline."""

    transient = True
    advice = "check the service and the network; `turbofs doctor` tests each part"


class DeadlineExceededError(TurboError):
    errno = _errno.ETIMEDOUT
    advice = "the source did not answer in time; raise request_deadline_s only if it is known to be slow"


# --- the command line and the configuration


class ConfigError(TurboError):
    errno = _errno.EINVAL
    advice = "fix the named setting; `turbofs mount --help` lists all of them"


class ProtocolError(TurboError):
    """A malformed, over-long or unknown message on a socket."""

    errno = _errno.EPROTO
    advice = "client and daemon may be of different versions"


class MountError(TurboError):
    advice = "`turbofs doctor DIR` finds what commonly goes wrong"


class NotReachableError(TurboError):
    """No daemon answers where one was expected."""

    errno = _errno.ENOTCONN
    advice = "is it mounted? `turbofs status` lists the mounts of this machine"
