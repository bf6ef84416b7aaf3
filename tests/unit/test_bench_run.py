"""A whole run, as a user starts it: the last line is the result, and whatever ends it leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from turbofs.testing.hdfs_cluster import default_jars_dir

TURBOFS = str(Path(sys.executable).with_name("turbofs"))
ROWS = {
    "read": [
        "cold_seq_vs_native", "cold_seq_vs_rclone", "warm_seq_vs_tmpfs", "cached_direct_vs_limit",
        "rand4k_p50_vs_native", "list_100k_vs_native", "rss_64_readers_mib",
    ],
    "write": [
        "staged_vs_tmpfs", "staged_direct_vs_tmpfs", "persisted_vs_native", "persisted_vs_rclone",
        "create_500_vs_native", "append_fsync_p50_vs_native", "recover_1gib_s", "rss_16_writers_mib",
    ],
}  # fmt: skip

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the run's namespaces need root")


def test_an_unknown_scene_is_wrong_use():
    done = subprocess.run([TURBOFS, "bench", "fly"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "scenes: read, write" in done.stderr


@pytest.mark.parametrize("scene", ROWS)
def test_without_hdfs_every_row_is_reported_as_not_measured(tmp_path, scene):
    environment = {**os.environ, "TURBOFS_HADOOP_JARS": str(tmp_path), "TMPDIR": str(tmp_path)}
    result = tmp_path / "result.json"
    done = subprocess.run(
        [TURBOFS, "bench", scene, "--quick", "--json", str(result)],
        capture_output=True, text=True, timeout=100, check=False, env=environment,
    )  # fmt: skip
    document = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1
    assert [row["row"] for row in document["rows"]] == ROWS[scene]
    assert {row["value"] for row in document["rows"]} == {None}
    assert "helpers/setup" in done.stdout
    assert json.loads(result.read_text()) == document
    assert list(tmp_path.iterdir()) == [result]


@pytest.fixture
def short_path():
    """As tmp_path, whose length leaves no room for the path of a control socket."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.long
@pytest.mark.hdfs
@pytest.mark.mount
@pytest.mark.parametrize("scene", ROWS)
def test_a_quick_run_measures_every_row(short_path, scene):
    done = subprocess.run(
        [TURBOFS, "bench", scene, "--quick"], capture_output=True, text=True, timeout=220, check=False,
        env={**os.environ, "TMPDIR": str(short_path)},
    )  # fmt: skip
    document = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["row"] for row in document["rows"]] == ROWS[scene]
    assert all(row["value"] > 0 for row in document["rows"])
    assert document["machine"]["mode"] == "quick"
    assert list(short_path.iterdir()) == []


@pytest.mark.hdfs
@pytest.mark.mount
def test_a_killed_run_leaves_no_process_and_no_mount(tmp_path):
    if not any(default_jars_dir().glob("hadoop-hdfs-3*.jar")):
        pytest.skip("needs Hadoop's jars: helpers/setup test")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [TURBOFS, "bench", "read", "--quick"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    ) as run:
        family = []
        deadline = time.monotonic() + 60
        while not any("datanode" in " ".join(_command(one)).lower() for one in family):
            assert time.monotonic() < deadline, "no HDFS came up"
            assert run.poll() is None
            family = psutil.Process(run.pid).children(recursive=True)
            time.sleep(0.05)
        run.send_signal(signal.SIGKILL)
        run.wait(10)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
