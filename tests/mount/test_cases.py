"""What users of such mounts ran into with other systems, each as a program of theirs does it.

The behaviour that is named here is promised in docs/SEMANTICS.md, and tested there piece by piece; these are the whole
stories, through an ordinary mount. Programs that need a library of machine learning run where it is installed.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys

import pytest

from turbofs.testing.children import Child, in_child
from turbofs.testing.conformance_base import content
from turbofs.testing.mounts import workplace
from turbofs.testing.waiting import eventually
from turbofs.testing.writing import (
    Watcher,
    acknowledge,
    broken_error,
    content_or_none,
    durability,
    outcome,
    temporaries,
    write_all,
    write_fd,
)

pytestmark = pytest.mark.mount

MIB = 1 << 20
WEIGHTS = content(5 * MIB + 4, seed=1)
OLDER = content(3 * MIB, seed=2)
USER = 54321


@pytest.fixture(scope="module")
def mount():
    with workplace() as place, place.direct("memory=256MiB", "write.drain=1s") as made:
        yield made


def safetensors_of(data):
    """A file with one tensor: the header's length, the header, the bytes."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    return struct.pack("<Q", len(header)) + header + data


def test_safetensors_that_extends_its_new_file_and_maps_it_is_saved(corner):
    """Case 1: the writer extends the new file with ftruncate, then fills it through memory."""
    source, shown = corner
    expected = safetensors_of(WEIGHTS)
    fd = os.open(shown / "model.safetensors", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    os.ftruncate(fd, len(expected))
    with mmap.mmap(fd, len(expected)) as mapped:
        for start in range(0, len(expected), MIB):
            mapped[start : start + MIB] = expected[start : start + MIB]
        mapped.flush()
    os.close(fd)
    assert (source / "model.safetensors").read_bytes() == expected
    assert in_child((shown / "model.safetensors").read_bytes) == expected
    fd = os.open(shown / "model.safetensors", os.O_RDWR)  # and again, over the existing one, which is longer
    os.ftruncate(fd, 1000)
    os.ftruncate(fd, 2000)
    os.close(fd)
    assert (source / "model.safetensors").read_bytes() == expected[:1000] + bytes(1000)


def test_safetensors_library_saves_and_loads(corner):
    """Case 1, by the library itself."""
    numpy_format = pytest.importorskip("safetensors.numpy")
    numpy = pytest.importorskip("numpy")
    source, shown = corner
    tensors = {f"layer.{n}": numpy.arange(100_000, dtype=numpy.float32) + n for n in range(5)}
    numpy_format.save_file(tensors, shown / "model.safetensors")
    for root in (source, shown):
        loaded = numpy_format.load_file(root / "model.safetensors")
        assert all((loaded[name] == tensor).all() for name, tensor in tensors.items())


def test_save_by_rename_and_chmod_works_also_of_an_open_file(corner):
    """Case 2: written beside the target, given its mode, and renamed over it while it is still open."""
    source, shown = corner
    (source / "model").write_bytes(OLDER)
    reader = os.open(shown / "model", os.O_RDONLY)
    with Watcher(lambda: content_or_none(source / "model")) as watcher:
        fd = os.open(shown / "model.tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        write_fd(fd, WEIGHTS)
        os.fchmod(fd, 0o640)
        os.fsync(fd)
        os.rename(shown / "model.tmp", shown / "model")
        os.close(fd)
    assert watcher.seen == [OLDER, WEIGHTS]
    assert os.pread(reader, len(OLDER), 0) == OLDER
    os.close(reader)
    for root in (source, shown):
        assert (root / "model").read_bytes() == WEIGHTS
        assert stat.S_IMODE((root / "model").stat().st_mode) == 0o640


def test_moving_a_directory_is_one_act_and_a_racing_loser_is_told(mount, corner):
    """Case 5: ranks race to rename a checkpoint; nothing is copied."""
    source, shown = corner
    (shown / "step.tmp").mkdir()
    for number in range(10):
        write_all(shown / "step.tmp" / f"{number}", WEIGHTS[: 1000 * number])
    mount.source.forget_requests()

    def rename():
        return outcome(os.rename, shown / "step.tmp", shown / "step")

    ranks = [Child(rename) for _ in range(4)]
    outcomes = []
    for rank in ranks:
        with rank:
            outcomes.append(rank.result())
    assert sorted(outcomes, key=str) == [errno.ENOENT] * 3 + [None], "the losers hear that it is gone"
    acts = [each.act for each in mount.source.requests()]
    assert acts.count("create") == acts.count("read") == acts.count("delete") == 0
    assert sorted(os.listdir(source / "step")) == [f"{number}" for number in range(10)]


def test_appended_event_log_is_followed_elsewhere(corner):
    """Case 6: a dashboard follows a log that is flushed every few records: no holes, no step back."""
    source, shown = corner
    records = [struct.pack("<Q", number) + b"event" * (1 + number % 50) for number in range(120)]
    whole = b"".join(records)
    look = Watcher(lambda: content_or_none(source / "events") or b"")
    with look as dashboard, (shown / "events").open("ab") as log:
        done = 0
        for number, record in enumerate(records):
            log.write(record)
            done += len(record)
            if number % 10 == 9:
                log.flush()
                os.fsync(log.fileno())
                assert (source / "events").stat().st_size >= done
    assert dashboard.seen[-1] == whole
    assert all(whole.startswith(seen) for seen in dashboard.seen)
    assert [len(seen) for seen in dashboard.seen] == sorted(len(seen) for seen in dashboard.seen)
    with (shown / "events").open("ab") as log:  # a restarted job goes on where the old one ended
        log.write(b"restarted")
    assert (source / "events").read_bytes() == whole + b"restarted"


def test_tensorboard_log_is_whole(corner):
    """Case 6, by the library itself."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    source, shown = corner
    with tensorboard.SummaryWriter(str(shown), flush_secs=1) as writer:
        for step in range(50):
            writer.add_scalar("loss", 1.0 / (step + 1), step)
        writer.flush()
    (name,) = os.listdir(source)
    assert (source / name).read_bytes() == (shown / name).read_bytes()
    assert (source / name).stat().st_size > 1000


@pytest.mark.parametrize("how", ["close", "fsync"])
def test_failed_save_is_never_called_successful(mount, corner, how):
    """Case 7: the source takes no bytes: the program hears of it, and no empty file is left."""
    source, shown = corner
    mount.source.fail(["write", "complete", "sync"], error="QuotaExceededError")
    fd = os.open(shown / "model", os.O_WRONLY | os.O_CREAT, 0o644)
    write_fd(fd, WEIGHTS)
    if how == "fsync":
        assert outcome(os.fsync, fd) == errno.EDQUOT
    assert outcome(os.close, fd) == errno.EDQUOT
    assert not (source / "model").exists()
    assert broken_error(mount, shown / "model")


def test_waiting_rank_sees_the_new_checkpoint_at_once(corner, place):
    """Case 13: ranks on two nodes poll for a file; both see it, whole, as soon as the saver's close returns."""
    source, shown = corner
    with place.mount(source=f"file://{source}") as second:
        for step in range(10):
            assert not (second.path / f"step-{step}").exists()
            assert not (shown / f"step-{step}").exists()
            write_all(shown / f"step-{step}", WEIGHTS[: 1000 * step])
            for rank in (second.path, shown):
                assert in_child((rank / f"step-{step}").read_bytes) == WEIGHTS[: 1000 * step]


def test_failed_close_leaves_nothing_behind(mount, corner):
    """Case 17: no half file, no temporary one, and the next writer is not kept out."""
    source, shown = corner
    mount.source.fail(["complete"], error="TurboError")
    assert outcome(write_all, shown / "model", WEIGHTS) == errno.EIO
    mount.source.heal()
    eventually(lambda: os.listdir(source) == [], "nothing is left")
    write_all(shown / "other", WEIGHTS)
    assert (source / "other").read_bytes() == WEIGHTS


def test_orphans_of_a_killed_daemon_are_swept(place):
    """Case 17: what a daemon that was killed left half written goes at the next start; other people's files stay."""
    (place.source / "step").mkdir()
    (place.source / "step" / ".turbofs-notes").write_text("theirs")
    with place.direct("write.drain=1s") as mount:
        mount.source.hold(["complete"])
        with Child(lambda: write_all(mount.path / "step" / "model", WEIGHTS)):
            mount.source.wait_held()
            assert temporaries(place.source)
            mount.process.kill()
            mount.process.wait()
    with place.mount():
        eventually(lambda: temporaries(place.source) == [], "the orphan is swept")
    assert os.listdir(place.source / "step") == [".turbofs-notes"]


def test_unmount_writes_back_what_was_not(place):
    """Case 20: unmounting right after a save drops nothing."""
    (place.source / "step").mkdir()
    place.mount_in_background()
    acknowledge(place.mountpoint / "step")
    for number in range(20):
        write_all(place.mountpoint / "step" / f"{number}", WEIGHTS[number : number + 2 * MIB])
    done = place.turbofs("umount", str(place.mountpoint))
    assert done.returncode == 0, done.stderr
    assert [(place.source / "step" / f"{n}").read_bytes() for n in range(20)] == [
        WEIGHTS[n : n + 2 * MIB] for n in range(20)
    ]


def test_saved_files_can_be_read_by_whom_the_mode_says(corner):
    """Case 22: modes and owners are what was asked for; nothing becomes 0600 on the way."""
    source, shown = corner
    source.chmod(0o777)

    def save():
        os.umask(0o022)
        with (shown / "model.tmp").open("wb") as file:
            file.write(WEIGHTS)
        os.replace(shown / "model.tmp", shown / "model")

    in_child(save, uid=USER)
    for root in (source, shown):
        assert stat.S_IMODE((root / "model").stat().st_mode) == 0o644
        assert (root / "model").stat().st_uid == USER
    assert in_child((shown / "model").read_bytes, uid=USER + 1) == WEIGHTS


def test_subprocess_in_the_middle_of_a_save_publishes_nothing(corner):
    """Case 26: nvidia-smi, git, a data loader: whatever a training job starts while a file is open."""
    source, shown = corner
    (source / "model").write_bytes(OLDER)
    with Watcher(lambda: content_or_none(source / "model")) as watcher:
        fd = os.open(shown / "model", os.O_WRONLY | os.O_TRUNC)
        os.set_inheritable(fd, True)
        for start in range(0, len(WEIGHTS), MIB):
            os.write(fd, WEIGHTS[start : start + MIB])
            subprocess.run(
                [sys.executable, "-c", f"import os; os.close({fd})"], close_fds=False, check=True, timeout=60
            )
        os.close(fd)
    assert watcher.seen == [OLDER, WEIGHTS]


def test_node_that_dies_after_an_early_acknowledgement_leaves_a_loadable_checkpoint(place):
    """Case 27: the tracker file is written and the old checkpoint removed; then the node is gone for ever."""
    job = place.source / "job"
    (job / "step-1").mkdir(parents=True)
    (job / "step-1" / "model").write_bytes(OLDER)
    (job / "latest").write_text("step-1")
    with place.direct("write.drain=1s") as mount:
        shown = mount.path / "job"
        acknowledge(shown)
        for held, expected in (("rename", OLDER), ("nothing", WEIGHTS)):
            if held != "nothing":
                mount.source.hold([held])
            shutil.rmtree(shown / "step-2", ignore_errors=True)
            (shown / "step-2").mkdir()
            acknowledge(shown / "step-2")
            write_all(shown / "step-2" / "model", WEIGHTS)
            write_all(shown / "latest.tmp", b"step-2")
            os.replace(shown / "latest.tmp", shown / "latest")
            if held == "nothing":
                mount.source.release()
                eventually(lambda: durability(shown / "latest") == "persisted", "all is persisted")
            newest = (job / "latest").read_text()
            assert (job / newest / "model").read_bytes() == expected
        mount.process.send_signal(signal.SIGKILL)
        mount.process.wait()


def test_old_node_that_comes_back_does_not_overwrite_a_newer_save(place):
    """Case 28: the job was restarted elsewhere, and saved the same step again."""
    (place.source / "step-7").mkdir()
    with place.direct("write.drain=1s") as mount:
        acknowledge(mount.path / "step-7")
        mount.source.hold(["rename"])
        write_all(mount.path / "step-7" / "model", OLDER)
        mount.process.kill()
        mount.process.wait()
    (place.source / "step-7" / "model").write_bytes(WEIGHTS)  # by the restarted job
    with place.mount() as mount:
        eventually(lambda: mount.status()["writing"]["conflicts"] == 1, "the old bytes are parked")
        assert durability(mount.path / "step-7" / "model") == "broken"
        assert (place.source / "step-7" / "model").read_bytes() == WEIGHTS
        listed = place.turbofs("conflicts", "ls", str(mount.path))
        assert "/step-7/model" in listed.stdout
    assert (place.source / "step-7" / "model").read_bytes() == WEIGHTS


# --- frameworks, where they are installed


def test_torch_saves_and_loads(corner):
    torch = pytest.importorskip("torch")
    source, shown = corner
    state = {"w": torch.arange(500_000, dtype=torch.float32), "step": 7}
    torch.save(state, shown / "model.pt")
    with (shown / "stream.pt").open("wb") as file:
        torch.save(state, file)
    for path in (shown / "model.pt", shown / "stream.pt", source / "model.pt", source / "stream.pt"):
        loaded = torch.load(path, weights_only=True, mmap=path.parent == shown)
        assert loaded["step"] == 7
        assert torch.equal(loaded["w"], state["w"])


def test_torch_distributed_checkpoint_saves_and_loads(mount, corner):
    torch = pytest.importorskip("torch")
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    source, shown = corner
    state = {f"layer.{n}": torch.arange(100_000, dtype=torch.float32) + n for n in range(5)}
    for early in (False, True):
        folder = f"step-{early:d}"
        (shown / folder).mkdir()
        if early:
            acknowledge(shown / folder)
        checkpoint.save(state, checkpoint_id=str(shown / folder))
        assert mount.place.turbofs("wait", str(shown / folder)).returncode == 0
        for root in (shown, source):
            loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            checkpoint.load(loaded, checkpoint_id=str(root / folder))
            assert all(torch.equal(loaded[name], state[name]) for name in state)
