"""What POSIX says of names, modes, owners and times holds in the mount (`pjdfstest`), but for what is listed here."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest

from turbofs.testing.tools import failed, run_pjdfstest
from turbofs.testing.trees import FILE, HDFS, PLAIN, writable_tree

pytestmark = pytest.mark.mount

MISSING_TYPES = {"fifo", "mkfifo", "block", "char", "socket", "mknod", "linked"}
"""Words in the names of tests that make a fifo, a device or a socket, or count hard links: the mount has none of these."""
LINK_TYPES = {"symlink", "eloop", "nofollow"}
"""Words in the names of tests that make symbolic links, which HDFS has not."""

_HARD_LINK = "makes a hard link, which the mount answers with ENOTSUP"
_SYMLINK = "makes a symbolic link, which HDFS has not"
_CHANGE_TIME = "HDFS keeps no change time: what is shown is the modification time, which chmod does not move"
_SET_ID_BITS = "the test sets all bits of a mode, and HDFS keeps no set-user-id and set-group-id bits: ENOTSUP"
_EVERYWHERE = {
    "rename::preserve_metadata::regular": _HARD_LINK,
    "unlink::unchanged_ctime_failed::regular": _HARD_LINK,
    "unlink::update_ctime_success::regular": _HARD_LINK,
    "ftruncate::unchanged_ctime_failed": "a new file without a byte is made on the source at its close, with the times of then",
}
EXCLUSIONS: dict[str, dict[str, str]] = {
    PLAIN: {},
    FILE: _EVERYWHERE,
    HDFS: _EVERYWHERE
    | {
        "chmod::change_perm::dir": _SYMLINK,
        "chmod::change_perm::regular": _SYMLINK,
        "chmod::clear_isgid_bit": _SET_ID_BITS,
        "mkdir::uid_gid_eq_euid_egid": _SET_ID_BITS,
        "open::uid_gid_eq_euid_egid": _SET_ID_BITS,
        "chmod::update_ctime::dir": _CHANGE_TIME,
        "chmod::update_ctime::regular": _CHANGE_TIME,
        "rename::updates_link_parent": "HDFS counts no links of directories: what is shown is always 1",
    },
}
"""Tests that fail, and the property of the source or of the contract that makes them fail. One that passes fails here."""
MOST_EXCLUSIONS = 25


LARGE = {"open::interact_2gb"}
"""Tests that leave 2 GiB of zeros on the source, several times over on HDFS."""


def tries_a_missing_type(name, kind):
    """The one rule for types of files that the source of this kind has not: by the words in the name of the test."""
    syscall, *rest = name.split("::")
    words = {syscall, *re.split(r"::|_", "::".join(rest))}
    if kind == PLAIN:
        return False
    return bool(words & (MISSING_TYPES | (LINK_TYPES if kind == HDFS else set()))) or syscall == "link"


@pytest.fixture(scope="module")
def elsewhere():
    """A directory that all users may search, on another file system than the trees."""
    with tempfile.TemporaryDirectory(prefix="turbofs-elsewhere-") as folder:
        path = Path(folder)
        path.chmod(0o755)
        yield path


@pytest.fixture(scope="module")
def names():
    """All tests that there are: those that run on a plain directory."""
    with writable_tree(PLAIN) as plain:
        return list(run_pjdfstest(plain.path, limit_s=60))


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users: needs root")
@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.long)], ids=["small", "large"])
def test_posix_holds(tree, need_tool, elsewhere, request, large):
    need_tool("pjdfstest")
    known = [name for name in request.getfixturevalue("names") if not tries_a_missing_type(name, tree.kind)]
    assert set(known) > LARGE
    assert len(EXCLUSIONS[tree.kind]) <= MOST_EXCLUSIONS
    assert set(EXCLUSIONS[tree.kind]) <= set(known), "an exclusion names no test, or one that the rule for types covers"
    tried = [name for name in known if (name in LARGE) == large]
    excluded = [name for name in tried if name in EXCLUSIONS[tree.kind]]
    result = failed(run_pjdfstest(tree.path, other=elsewhere, names=tried, limit_s=120))
    wrong = [f"{name}: {why}" for name, why in result.items() if name not in excluded]
    wrong += [f"{name}: passes, exclude it no longer" for name in excluded if name not in result]
    assert not wrong, "\n".join(["POSIX does not hold:", *wrong])
