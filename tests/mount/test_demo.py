"""helpers/demo on its default, on a local SOURCE and on a real HDFS; and what it leaves, also when it cannot go on."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from turbofs.testing.hdfs_cluster import HdfsCluster

ROOT = Path(__file__).resolve().parents[2]
EVERY_TENSOR = "verified 94 tensors by BLAKE3"
SAVED = r"model\.safetensors: 465,072 bytes, BLAKE3 e449e16a0e81c5a9"
"""The merged checkpoint, as the source has it after its daemon was killed: always the same bytes."""

pytestmark = pytest.mark.mount


def demo(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the demo with its temporary files under *tmp_path*, so that what it leaves there shows."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment.pop("HADOOP_CONF_DIR", None)
    command = [sys.executable, str(ROOT / "helpers" / "demo.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=180, check=False)


def assert_everything_worked(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr + done.stdout
    assert EVERY_TENSOR in done.stdout
    assert re.search(SAVED, done.stdout), done.stdout
    assert "All of it worked" in done.stdout


def processes_of(tmp_path: Path) -> list[int]:
    """Those that `demo` started, and what they started: the killed daemon's successor must be gone as well."""
    mark = f"TMPDIR={tmp_path}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def mounts_under(folder: Path) -> list[str]:
    points = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return [point for point in points if point.startswith(f"{folder}/")]


def test_the_default_verifies_every_tensor_and_leaves_nothing(tmp_path: Path) -> None:
    done = demo(tmp_path)
    assert_everything_worked(done)
    assert mounts_under(tmp_path) == []
    assert processes_of(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_keep_leaves_it_mounted_and_says_how_to_end_it(tmp_path: Path) -> None:
    done = demo(tmp_path, "--keep")
    try:
        assert done.returncode == 0, done.stderr + done.stdout
        (mountpoint,) = mounts_under(tmp_path)
        assert (Path(mountpoint) / "checkpoints" / "step_1000" / ".metadata").stat().st_size > 0
        assert (Path(mountpoint) / "merged" / "model.safetensors").stat().st_size == 465_072
        (command,) = re.findall(r"^  (\S*turbofs umount .*)$", done.stdout, re.MULTILINE)
        subprocess.run(command.split(), check=True, capture_output=True, timeout=60)
        assert mounts_under(tmp_path) == []
    finally:
        for point in mounts_under(tmp_path):
            subprocess.run(["fusermount3", "-u", "-z", point], check=False)


def test_a_local_source_is_used_and_left_as_it_was(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "mine").write_text("untouched")
    done = demo(tmp_path, f"file://{source}")
    assert_everything_worked(done)
    assert [path.name for path in source.iterdir()] == ["mine"]


@pytest.mark.hdfs
def test_the_same_on_hdfs(tmp_path: Path, hdfs: HdfsCluster, hdfs_dir: str) -> None:
    done = demo(tmp_path, f"{hdfs.uri}{hdfs_dir}", "--web", f"{hdfs.host}:{hdfs.http_port}")
    assert_everything_worked(done)
    assert mounts_under(tmp_path) == []
    assert processes_of(tmp_path) == []
    assert "turbofs-demo-" not in hdfs.shell("-ls", hdfs_dir)


def test_a_source_that_is_not_there_fails_clearly(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    done = demo(tmp_path, f"file://{tmp_path}/file/below")
    assert done.returncode == 1
    assert "Step 1 failed" in done.stderr
    assert "Nothing is left mounted" in done.stderr
    assert mounts_under(tmp_path) == []


def test_wrong_use(tmp_path: Path) -> None:
    assert demo(tmp_path, "ftp://somewhere").returncode == 2
