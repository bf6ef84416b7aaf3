"""What HDFS says went wrong, in the words of TurboFS.

The NameNode answers with a Java class and a message, whichever client carried them: hdfs-native as the text of a
Python exception (`RPCError("java.io.IOException", "…")`, or a subclass of OSError for the commonest), WebHDFS as JSON.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager

from turbofs.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    BadNameError,
    BusyError,
    ConfigError,
    CorruptDataError,
    InvalidRequestError,
    IsADirectoryTurboError,
    NameTooLongError,
    NotADirectoryTurboError,
    NotEmptyError,
    NotFoundError,
    NotPermittedError,
    NotSupportedError,
    OutOfSpaceError,
    QuotaExceededError,
    ShortReadError,
    SourceUnavailableError,
    StaleFileError,
    TurboError,
)

_BY_CLASS: dict[str, type[TurboError]] = {
    "AccessControlException": AccessDeniedError,
    "AlreadyBeingCreatedException": BusyError,
    "AuthorizationException": AccessDeniedError,
    "BlockMissingException": SourceUnavailableError,
    "ConnectException": SourceUnavailableError,
    "DSQuotaExceededException": QuotaExceededError,
    "FileAlreadyExistsException": AlreadyExistsError,
    "FileNotFoundException": NotFoundError,
    "HadoopIllegalArgumentException": InvalidRequestError,
    "IllegalArgumentException": InvalidRequestError,
    "InvalidPathException": BadNameError,
    "LeaseExpiredException": StaleFileError,
    "MaxDirectoryItemsExceededException": OutOfSpaceError,
    "NSQuotaExceededException": QuotaExceededError,
    "NoRouteToHostException": SourceUnavailableError,
    "NotReplicatedYetException": SourceUnavailableError,
    "ParentNotDirectoryException": NotADirectoryTurboError,
    "PathComponentTooLongException": NameTooLongError,
    "PathIsNotDirectoryException": NotADirectoryTurboError,
    "PathIsNotEmptyDirectoryException": NotEmptyError,
    "QuotaByStorageTypeExceededException": QuotaExceededError,
    "QuotaExceededException": QuotaExceededError,
    "RecoveryInProgressException": BusyError,
    "RetriableException": SourceUnavailableError,
    "SafeModeException": SourceUnavailableError,
    "SocketTimeoutException": SourceUnavailableError,
    "StandbyException": SourceUnavailableError,
    "UnsupportedActionException": NotSupportedError,
    "UnsupportedOperationException": NotSupportedError,
}

# The NameNode throws a plain IOException (or a class that says too little) for many things; only the text tells.
_BY_TEXT: tuple[tuple[str, type[TurboError]], ...] = (
    ("Path is not a file", IsADirectoryTurboError),
    ("(is not a directory)", NotADirectoryTurboError),
    ("already exists as a directory", IsADirectoryTurboError),
    ("lease is currently owned by", BusyError),
    ("is already the current lease holder", BusyError),
    ("is trying to recreate file", BusyError),
    ("Pathname too long", NameTooLongError),
    ("is not the owner of", NotPermittedError),
    ("Non-super user", NotPermittedError),
    ("Superuser privilege is required", NotPermittedError),
    ("destination directory is not empty", NotEmptyError),
    ("is a directory or file under source", InvalidRequestError),
    ("Requested replication factor", InvalidRequestError),
    ("out of the range", ShortReadError),
    ("could only be written to", SourceUnavailableError),
    ("Could not obtain block", SourceUnavailableError),
    ("Name node is in safe mode", SourceUnavailableError),
    ("not supported in state standby", SourceUnavailableError),
)

# hdfs-native's own errors, by the name of its variant.
_BY_VARIANT: dict[str, type[TurboError]] = {
    "BlocksNotFound": SourceUnavailableError,
    "ChecksumError": CorruptDataError,
    "DataTransferError": SourceUnavailableError,
    "GSSAPIError": AccessDeniedError,
    "InvalidArgument": ConfigError,
    "InvalidPath": BadNameError,
    "InvalidRPCResponse": SourceUnavailableError,
    "NoSASLMechanism": AccessDeniedError,
    "OperationFailed": SourceUnavailableError,
    "SASLError": AccessDeniedError,
    "UrlParseError": ConfigError,
    "XmlParseError": ConfigError,
}

_VARIANT = re.compile(r"(\w+)(?:\((.*)\))?\Z", re.DOTALL)
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


@contextmanager
def translated(act: str, path: str) -> Iterator[None]:
    """Raise what hdfs-native raises inside as a TurboError that says which act on which path failed."""
    try:
        yield
    except TurboError:
        raise
    except Exception as error:
        raise from_native(error, act, path) from error
    except BaseException as error:
        # A Rust panic arrives as a BaseException of pyo3's, which would otherwise take the whole process down.
        if type(error).__name__ == "PanicException":
            raise SourceUnavailableError(f"cannot {act} {path}: hdfs-native panicked: {error}") from error
        raise


def from_native(error: Exception, act: str, path: str) -> TurboError:
    """The TurboError for an exception of hdfs-native's (or of pyarrow's libhdfs)."""
    text = _first_line(str(error))
    if isinstance(error, UnicodeError):
        return BadNameError(f"cannot {act} {path!r}: {text}")
    if isinstance(error, NotImplementedError):
        return NotSupportedError(f"cannot {act} {path}: hdfs-native does not support {text}")
    if isinstance(error, FileNotFoundError):
        return from_java("FileNotFoundException", text, act, path)
    if isinstance(error, FileExistsError):
        return from_java("FileAlreadyExistsException", text, act, path)
    if isinstance(error, IsADirectoryError):
        return IsADirectoryTurboError(_message(act, path, text))
    if isinstance(error, PermissionError):
        return AccessDeniedError(_message(act, path, text))
    if isinstance(error, OSError):
        return SourceUnavailableError(_message(act, path, text))
    variant = _VARIANT.match(str(error))
    if variant is None:
        return TurboError(_message(act, path, text))
    name, inside = variant[1], variant[2] or ""
    quoted = [_unquote(found) for found in _QUOTED.findall(inside)]
    if name in {"RPCError", "FatalRPCError"} and len(quoted) == 2:
        return from_java(quoted[0], quoted[1], act, path)
    return _BY_VARIANT.get(name, TurboError)(_message(act, path, _first_line(quoted[0]) if quoted else text))


def from_java(java_class: str, message: str, act: str, path: str) -> TurboError:
    """The TurboError for an exception that the NameNode or a DataNode answered with."""
    name = re.split(r"[.$]", java_class)[-1]
    text = _first_line(message)
    kind = next((kind for part, kind in _BY_TEXT if part in text), None) or _BY_CLASS.get(name, TurboError)
    return kind(_message(act, path, text if name in _BY_CLASS else f"{name}: {text}"))


def _message(act: str, path: str, text: str) -> str:
    return f"cannot {act} {path}" if text in {"", path} else f"cannot {act} {path}: {text}"


def _first_line(text: str) -> str:
    """Without Java's stack trace, which hdfs-native appends to the message."""
    return re.split(r"\n\s*at |\\n\\tat ", text, maxsplit=1)[0].strip()


def _unquote(text: str) -> str:
    """A Rust debug string; its escapes are Python's but for the braces of \\u{…}."""
    plain = re.sub(r"\\u\{([0-9a-fA-F]{1,8})\}", lambda found: f"\\U{found[1]:0>8}", text)
    try:
        return str(ast.literal_eval(plain))
    except (SyntaxError, ValueError):
        return text.strip('"')
