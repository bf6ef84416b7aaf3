"""The reader code of the benchmarks: it reads everything, notices what is missing, and the FUSE limit is real."""

import os

import pytest

from turbofs.bench import readers, services
from turbofs.bench.harness import BenchmarkError


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(os.urandom(3 * readers.MIB + 12345))
    return path


def test_a_file_is_read_whole_in_order(file):
    pieces = []
    with readers.FileReader(file) as reader:
        assert reader.size == file.stat().st_size
        assert reader.stream() == reader.size
        reader.consume(lambda piece: pieces.append(bytes(piece)))
    assert b"".join(pieces) == file.read_bytes()


def test_throughput_is_refused_where_bytes_are_missing(file):
    with readers.FileReader(file) as reader:
        assert readers.throughput_mib_s(reader, passes=2) > 0
        reader.size += 1
        with pytest.raises(BenchmarkError, match="came back"):
            readers.throughput_mib_s(reader)


def test_latencies_are_one_a_read_and_short_reads_are_refused(file):
    with readers.FileReader(file) as reader:
        assert len(readers.latencies_s(reader, [0, 8192, 4096], 4096)) == 3
        with pytest.raises(BenchmarkError, match="offset"):
            readers.latencies_s(reader, [reader.size - 10], 4096)


def test_parallel_readers_read_every_file(tmp_path):
    paths = [tmp_path / f"{index}" for index in range(8)]
    for index, path in enumerate(paths):
        path.write_bytes(bytes(1000 * index + 1))
    assert readers.read_in_parallel(paths) == sum(1000 * index + 1 for index in range(8))


def test_a_parallel_reader_that_fails_fails_the_whole(tmp_path):
    (tmp_path / "here").write_bytes(b"x")
    with pytest.raises(FileNotFoundError):
        readers.read_in_parallel([tmp_path / "here", tmp_path / "missing"])


def test_listing_counts_every_entry_and_a_wrong_count_is_refused(tmp_path):
    for index in range(20):
        (tmp_path / f"{index}").touch()
    assert readers.seconds(lambda: readers.scan_and_stat(tmp_path), 20) > 0
    with pytest.raises(BenchmarkError, match="21 were expected"):
        readers.seconds(lambda: readers.scan_and_stat(tmp_path), 21)


@pytest.mark.mount
def test_the_in_memory_file_reads_the_same_buffered_and_direct_and_is_gone_afterwards(tmp_path):
    size_bytes = 2 * readers.MIB + 4096
    with services.memory_fuse(tmp_path, size_bytes) as path:
        folder = path.parent
        contents = []
        for direct in (True, False):
            pieces: list[bytes] = []
            with readers.FileReader(path, direct=direct) as reader:
                assert reader.size == size_bytes
                reader.consume(lambda piece, into=pieces: into.append(bytes(piece)))
            contents.append(b"".join(pieces))
        assert contents[0] == contents[1]
        assert len(set(contents[0])) == 256
    assert not services.mounts_at(folder)


@pytest.mark.mount
def test_a_daemon_that_does_not_mount_is_reported_with_its_last_words(tmp_path):
    with (
        pytest.raises(BenchmarkError, match=r"instead of mounting.*required"),
        services._mounted(
            "broken", ["python3", "-c", "raise SystemExit('DIR is required')"], tmp_path, dict(os.environ)
        ),
    ):
        pass
