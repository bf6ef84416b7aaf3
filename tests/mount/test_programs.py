"""Programs that check their own files find them whole in the mount: `fio --verify`, git, SQLite."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from contextlib import closing

import pytest

from turbofs.testing.tools import run_tool
from turbofs.testing.trees import FILE, HDFS, PLAIN, writable_tree

pytestmark = pytest.mark.mount

GIT_FILES = {PLAIN: 300, FILE: 300, HDFS: 40}
GIT_COMMITS = 40
GIT_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_AUTHOR_NAME": "test",
    "GIT_AUTHOR_EMAIL": "test@localhost",
    "GIT_COMMITTER_NAME": "test",
    "GIT_COMMITTER_EMAIL": "test@localhost",
    "GIT_TERMINAL_PROMPT": "0",
}


# --- fio: every block carries a checksum and the place where it belongs


def takes_direct(folder):
    try:
        os.close(os.open(folder / "direct", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("direct", [0, 1], ids=["buffered", "direct"])
@pytest.mark.parametrize("pattern", ["write", "randwrite"])
def test_fio_finds_every_block_that_it_wrote(tree, need_tool, tmp_path, pattern, direct):
    need_tool("fio")
    if tree.kind == PLAIN and direct and not takes_direct(tree.path):
        pytest.skip("tmpfs takes no O_DIRECT on this kernel")
    size = "48m" if pattern == "write" else "16m"
    block = "256k" if pattern == "write" else "16k"
    arguments = [
        "--name=verify",
        f"--filename={tree.path / f'fio-{pattern}-{direct}'}",
        f"--rw={pattern}",
        f"--size={size}",
        f"--bs={block}",
        f"--direct={direct}",
        "--ioengine=psync",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--fallocate=none",
        "--end_fsync=1",
    ]
    # The first reads through the descriptor that wrote; the second opens the file anew.
    run_tool("fio", *arguments, cwd=tmp_path, limit_s=60)
    run_tool("fio", *arguments, "--verify_only", cwd=tmp_path, limit_s=60)


# --- git: its objects name their own digests, and it maps, renames and locks files


def git(*arguments, cwd):
    return run_tool("git", *arguments, cwd=cwd, limit_s=100, environment=GIT_ENVIRONMENT)


def make_repository(folder, files):
    """A bare repository with that many files in directories, some executable, and history: by one stream, in no time."""
    git("init", "--quiet", "--bare", "--initial-branch=main", ".", cwd=folder)
    stream = []
    for commit in range(GIT_COMMITS):
        message = f"commit {commit}"
        stream.append(f"commit refs/heads/main\ncommitter test <test@localhost> {commit} +0000\n")
        stream.append(f"data {len(message)}\n{message}\n")
        for number in range(commit, files, 1 if commit == 0 else GIT_COMMITS):
            text = f"file {number} as of commit {commit}\n" * (1 + number % 200)
            mode = "100755" if number % 50 == 0 else "100644"
            stream.append(f"M {mode} inline folder-{number % 17}/sub-{number % 3}/file-{number}\n")
            stream.append(f"data {len(text)}\n{text}\n")
    subprocess.run(
        ["git", "fast-import", "--quiet"], input="".join(stream).encode(), cwd=folder, check=True, timeout=60
    )


def test_git_clones_commits_and_checks(tree, need_tool, tmp_path):
    need_tool("git")
    make_repository(tmp_path, GIT_FILES[tree.kind])
    clone = tree.path / "clone"
    # Not as a copy of files: the objects come as a pack, which git indexes in the mount.
    git("clone", "--quiet", "--no-local", tmp_path, clone, cwd=tree.path)
    assert sum(1 for path in clone.glob("folder-*/**/*") if path.is_file()) == GIT_FILES[tree.kind]
    git("fsck", "--full", "--strict", cwd=clone)
    assert git("status", "--porcelain", cwd=clone) == ""
    (clone / "added").write_text("new\n")
    (clone / "folder-1/sub-1/file-1").write_text("changed\n")
    git("mv", "folder-2/sub-2/file-2", "moved", cwd=clone)
    git("add", "--all", cwd=clone)
    git("commit", "--quiet", "--message=here", cwd=clone)
    git("gc", "--quiet", cwd=clone)
    git("fsck", "--full", "--strict", cwd=clone)
    assert git("status", "--porcelain", cwd=clone) == ""
    assert git("rev-list", "--count", "HEAD", cwd=clone).strip() == str(GIT_COMMITS + 1)


# --- SQLite: journals, locks and syncs in its default mode


@pytest.fixture
def own_tree(request, kind):
    """A tree of this test's own, for it mounts anew."""
    with writable_tree(kind, request.getfixturevalue("hdfs") if kind == HDFS else None) as made:
        yield made


@pytest.mark.parametrize(
    ("kind", "transactions"),
    [
        (PLAIN, 1000),
        (FILE, 200),
        pytest.param(FILE, 1000, marks=pytest.mark.long),
        pytest.param(HDFS, 50, marks=pytest.mark.hdfs),
    ],
)
def test_sqlite_is_whole_after_many_transactions(own_tree, transactions):
    path = own_tree.path / "database"
    wanted = {}

    def check(database):
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert dict(database.execute("SELECT number, body FROM entry")) == wanted

    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE entry (number INTEGER PRIMARY KEY, body BLOB)")
        for number in range(transactions):
            wanted[number] = os.urandom(number % 700)
            wanted[number // 2] = os.urandom(100)
            with database:
                database.execute("INSERT INTO entry VALUES (?, ?)", (number, wanted[number]))
                database.execute("UPDATE entry SET body = ? WHERE number = ?", (wanted[number // 2], number // 2))
        database.execute("DELETE FROM entry")
        database.rollback()
        check(database)
        assert database.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert os.listdir(own_tree.path) == ["database"]
    own_tree.remount()
    with closing(sqlite3.connect(path)) as database:
        check(database)
