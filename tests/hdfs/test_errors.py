"""What HDFS says, translated: texts as hdfs-native 0.14.7 and Hadoop 3.4.2 really give them."""

from __future__ import annotations

import pytest

from turbofs import errors as e
from turbofs.source.hdfs.errors import from_java, from_native, translated

TRACE = "\\n\\tat org.apache.hadoop.hdfs.server.namenode.X.y(X.java:1)"


def rpc(java_class, message):
    return RuntimeError(f'RPCError("{java_class}", "{message}{TRACE}")')


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (FileNotFoundError("File does not exist: /a\n\tat org.apache.X.y(X.java:1)"), e.NotFoundError),
        (FileNotFoundError("Path is not a file: /a\n\tat x"), e.IsADirectoryTurboError),
        (FileExistsError("/a for client 127.0.0.1 already exists"), e.AlreadyExistsError),
        (FileExistsError("Failed to APPEND_FILE /a because this file lease is currently owned by x"), e.BusyError),
        (FileExistsError("Cannot append to directory /a; already exists as a directory."), e.IsADirectoryTurboError),
        (OSError("Connection refused (os error 111)"), e.SourceUnavailableError),
        (NotImplementedError("File encryption"), e.NotSupportedError),
        (UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"), e.BadNameError),
        (RuntimeError('DataTransferError("All DataNodes failed: []")'), e.SourceUnavailableError),
        (RuntimeError('OperationFailed("Failed to complete file in time")'), e.SourceUnavailableError),
        (RuntimeError("ChecksumError"), e.CorruptDataError),
        (RuntimeError("NoSASLMechanism"), e.AccessDeniedError),
        (RuntimeError('InvalidArgument("No NameNode hosts found")'), e.ConfigError),
        (
            rpc("org.apache.hadoop.security.AccessControlException", 'Permission denied: inode=\\"/\\"'),
            e.AccessDeniedError,
        ),
        (
            rpc("org.apache.hadoop.security.AccessControlException", "user=x is not the owner of inode=f"),
            e.NotPermittedError,
        ),
        (
            rpc("org.apache.hadoop.hdfs.server.namenode.SafeModeException", "Cannot create /a."),
            e.SourceUnavailableError,
        ),
        (rpc("org.apache.hadoop.ipc.StandbyException", "not supported in state standby"), e.SourceUnavailableError),
        (rpc("org.apache.hadoop.hdfs.protocol.NSQuotaExceededException", "The NameSpace quota"), e.QuotaExceededError),
        (rpc("org.apache.hadoop.hdfs.protocol.DSQuotaExceededException", "The DiskSpace quota"), e.QuotaExceededError),
        (
            rpc("org.apache.hadoop.hdfs.protocol.FSLimitException$PathComponentTooLongException", "The maximum"),
            e.NameTooLongError,
        ),
        (rpc("java.io.IOException", "mkdirs: Pathname too long.  Limit 8000"), e.NameTooLongError),
        (rpc("org.apache.hadoop.fs.PathIsNotEmptyDirectoryException", "`/d is non empty'"), e.NotEmptyError),
        (rpc("org.apache.hadoop.fs.ParentNotDirectoryException", "/f (is not a directory)"), e.NotADirectoryTurboError),
        (rpc("org.apache.hadoop.fs.InvalidPathException", "Invalid path name /a:b"), e.BadNameError),
        (rpc("java.io.IOException", "File /f could only be written to 0 of the 1"), e.SourceUnavailableError),
        (rpc("java.io.IOException", "something new"), e.TurboError),
        (RuntimeError("not in any known form: (("), e.TurboError),
    ],
)
def test_every_error_has_its_kind(raised, kind):
    found = from_native(raised, "read", "/p")
    assert type(found) is kind
    assert "/p" in str(found)
    assert "\tat " not in str(found)
    assert "\\n" not in str(found), "no stack trace of Java's reaches the user"


def test_an_unknown_error_keeps_its_class_and_text():
    assert str(from_java("java.io.IOException", "odd\n\tat x", "stat", "/p")) == "cannot stat /p: IOException: odd"


def test_rust_escapes_are_undone():
    error = from_native(RuntimeError('RPCError("java.io.IOException", "caf\\u{e9} \\"q\\"")'), "stat", "/p")
    assert 'café "q"' in str(error)


def test_trap_1_a_panic_is_an_error_and_no_end_of_the_process():
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(e.SourceUnavailableError, match="panicked"), translated("read", "/p"):
        raise panic("Cannot read past end of the file")
    with pytest.raises(KeyboardInterrupt), translated("read", "/p"):
        raise KeyboardInterrupt
