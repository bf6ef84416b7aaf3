"""The writer code of the benchmarks: it writes all of it, in another process, and the checks notice what differs."""

import os

import blake3
import pytest

from turbofs.bench import checks, isolation, writers
from turbofs.bench.harness import BenchmarkError
from turbofs.bench.payload import MIB, Payload, rotated
from turbofs.bench.sampling import sampled
from turbofs.bench.writer_process import WriterProcess
from turbofs.testing.waiting import eventually


@pytest.fixture
def payload():
    with Payload(3 * MIB) as one:
        one.fill(1)
        yield one


def test_bytes_are_a_function_of_the_seed_and_do_not_repeat(payload):
    first = bytes(payload.view)
    payload.fill(2)
    second = bytes(payload.view)
    payload.fill(1)
    assert bytes(payload.view) == first != second
    assert first[:MIB] != first[MIB : 2 * MIB]


@pytest.mark.parametrize("shift_bytes", [0, MIB, 2 * MIB])
def test_rotated_bytes_are_whole_and_have_the_digest_that_is_given_for_them(payload, shift_bytes):
    content = b"".join(rotated(payload.view, shift_bytes))
    assert content == bytes(payload.view[shift_bytes:]) + bytes(payload.view[:shift_bytes])
    assert payload.digest(shift_bytes) == blake3.blake3(content).hexdigest()


@pytest.mark.parametrize("size_bytes", [0, -MIB, MIB + 1])
def test_a_size_that_does_not_rotate_in_whole_chunks_is_refused(size_bytes):
    with pytest.raises(ValueError, match="multiple"):
        Payload(size_bytes)


@pytest.mark.parametrize("direct", [False, True])
def test_a_file_is_written_whole(tmp_path, payload, direct):
    path = tmp_path / "file"
    assert writers.write_file(payload.view, str(path), direct=direct, shift_bytes=MIB) > 0
    assert path.read_bytes() == b"".join(rotated(payload.view, MIB))


def test_a_file_that_is_there_is_not_written_over(tmp_path, payload):
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        writers.write_file(payload.view, str(tmp_path / "file"))


def test_writes_that_are_cut_short_are_continued(tmp_path, payload, monkeypatch):
    whole = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: whole(descriptor, data[: 1 + len(data) // 3]))
    writers.write_file(payload.view, str(tmp_path / "file"))
    monkeypatch.undo()
    assert (tmp_path / "file").read_bytes() == bytes(payload.view)


def test_several_writers_write_different_files(tmp_path, payload):
    assert writers.write_files(payload.view, str(tmp_path), 3, MIB) > 0
    contents = [(tmp_path / writers.writer_name(index)).read_bytes() for index in range(3)]
    assert contents == [b"".join(rotated(payload.view, index * MIB)) for index in range(3)]
    assert len(set(contents)) == 3


def test_small_files_and_a_log_hold_what_is_expected_of_them(tmp_path, payload):
    assert writers.create_files(payload.view, str(tmp_path), 40, 4) > 0
    assert len(list(tmp_path.iterdir())) == 40
    for index in range(40):
        assert (tmp_path / writers.small_name(index)).read_bytes() == bytes(writers.small_content(payload.view, index))
    log = tmp_path / "log"
    assert len(writers.append_file(payload.view, str(log), 5)) == 5
    assert log.read_bytes() == bytes(payload.view[: 5 * writers.SMALL_BYTES])


def test_a_writer_thread_that_fails_fails_the_whole(tmp_path, payload):
    (tmp_path / writers.small_name(3)).touch()
    with pytest.raises(FileExistsError):
        writers.create_files(payload.view, str(tmp_path), 8, 2)


def test_another_process_writes_the_same_bytes_and_raises_what_failed_there(tmp_path, payload):
    with WriterProcess(payload) as process:
        payload.fill(7)
        process.call(writers.write_file, str(tmp_path / "file"))
        with pytest.raises(FileNotFoundError):
            process.call(writers.write_file, str(tmp_path / "nowhere" / "file"))
    assert (tmp_path / "file").read_bytes() == bytes(payload.view)


def test_a_file_is_awaited_until_it_can_be_read(tmp_path, payload):
    path = tmp_path / "file"
    writers.write_file(payload.view, str(path))
    checks.await_readable(path, payload.view)
    os.truncate(path, MIB)
    with pytest.raises(BenchmarkError, match="came back with"):
        checks.await_readable(path, payload.view)


@pytest.mark.parametrize("offset", [0, MIB + MIB // 2, 3 * MIB - 1])
def test_wrong_bytes_after_a_restart_are_not_waited_away(tmp_path, payload, offset):
    path = tmp_path / "file"
    writers.write_file(payload.view, str(path))
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes([payload.view[offset] ^ 1]))
    with pytest.raises(BenchmarkError, match="other bytes"):
        checks.await_readable(path, payload.view)


def test_a_broken_file_is_reported_with_its_reason(tmp_path):
    path = tmp_path / "file"
    path.touch()
    try:
        os.setxattr(path, "user.turbofs.durability", b"persisted")
    except OSError:
        pytest.skip("this file system has no user attributes")
    checks.await_persisted(path)
    os.setxattr(path, "user.turbofs.durability", b"broken")
    os.setxattr(path, "user.turbofs.last_error", b"out of quota")
    with pytest.raises(BenchmarkError, match="out of quota"):
        checks.await_persisted(path)


def test_samples_are_taken_until_the_context_ends():
    with sampled(lambda: 7, interval_s=0.001) as samples:
        eventually(lambda: len(samples) > 2, "three samples are taken")
    assert set(samples) == {7}


def test_a_disk_that_is_too_small_is_refused_with_what_to_do():
    with pytest.raises(BenchmarkError, match="MiB free") as caught, isolation.disk_folder(1 << 60):
        pass
    assert "TMPDIR" in caught.value.advice


def test_a_folder_on_disk_is_gone_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr(isolation.tempfile, "tempdir", str(tmp_path))
    with isolation.disk_folder(MIB) as folder:
        (folder / "file").write_bytes(b"x")
    assert list(tmp_path.iterdir()) == []
