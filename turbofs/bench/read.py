"""Scene `read`: a mount of HDFS against hdfs-native, rclone, the page cache and FUSE itself.

Cold means a mount made for this reading, so that neither the kernel nor the daemon has a byte of the file, while HDFS
has its blocks in memory (they lie on tmpfs, and are read once before). Descriptors are open before the clock starts.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import blake3
import hdfs_native

from turbofs.bench import datasets, isolation, services
from turbofs.bench.harness import BenchmarkError, Report, Row, Samples, Scene, Settings, interleave
from turbofs.bench.readers import (
    MIB,
    FileReader,
    NativeReader,
    latencies_s,
    native_list,
    read_in_parallel,
    scan_and_stat,
    seconds,
    throughput_mib_s,
)
from turbofs.bench.sampling import sampled
from turbofs.testing.hdfs_cluster import HdfsCluster

ROWS = (
    Row("cold_seq_vs_native", "cold sequential read through the mount / hdfs-native's own stream", "ratio", 0.9, "higher"),
    Row("cold_seq_vs_rclone", "the same / rclone mount (the better of vfs-cache off and full)", "ratio", 1.5, "higher"),
    Row("warm_seq_vs_tmpfs", "second read, kernel cache kept / the same file on tmpfs", "ratio", 0.9, "higher"),
    Row("cached_direct_vs_limit", "extent-cache hits, O_DIRECT 1 MiB / in-memory pyfuse3 file", "ratio", 0.8, "higher"),
    Row("rand4k_p50_vs_native", "cold random 4 KiB reads, p50 time / hdfs-native's", "ratio", 2.5, "lower"),
    Row("list_100k_vs_native", "scandir and stat of 100,000 entries, time / hdfs-native's listing", "ratio", 4, "lower"),
    Row("rss_64_readers_mib", "peak resident memory, 64 parallel readers, --memory 512MiB", "MiB", 900, "lower"),
)  # fmt: skip

_BIG = "/bench/big.bin"
_CACHED = "/bench/cached.bin"
_MANY_FILES = "/bench/parallel"
_MANY_NAMES = "/bench/names"
_RANDOM_READ_BYTES = 4096
_READERS = 64
_ROOMY = "1GiB"
"""Budget of the mounts whose speed is measured: below the default on any training node, above what a row keeps hot."""


@dataclass(frozen=True)
class Sizes:
    """How much is read. `quick` keeps every shape and shrinks the amounts."""

    rounds: int
    big_bytes: int
    cached_bytes: int
    direct_passes: int
    random_reads: int
    names: int
    reader_bytes: int

    @property
    def memory_bytes(self) -> int:
        """What a run keeps in memory: HDFS's data, tmpfs's and rclone's copies of the big file, and as much spare."""
        return 4 * self.big_bytes + self.cached_bytes + _READERS * self.reader_bytes + 512 * MIB


FULL = Sizes(
    rounds=7,
    big_bytes=1024 * MIB,
    cached_bytes=512 * MIB,
    direct_passes=4,
    random_reads=1000,
    names=100_000,
    reader_bytes=32 * MIB,
)
QUICK = Sizes(
    rounds=1,
    big_bytes=256 * MIB,
    cached_bytes=128 * MIB,
    direct_passes=4,
    random_reads=200,
    names=10_000,
    reader_bytes=8 * MIB,
)


@dataclass(frozen=True)
class Bench:
    """What the groups share: the cluster, a client of it, a folder in memory, the sizes."""

    cluster: HdfsCluster
    client: hdfs_native.Client
    work: Path
    sizes: Sizes
    digest: str
    """BLAKE3 of the big file."""

    def mount(self, memory: str = _ROOMY) -> contextlib.AbstractContextManager[services.Mount]:
        return services.turbofs_mount(self.cluster, self.work, memory=memory)


def run(report: Report, settings: Settings) -> None:
    """Measure every row of the scene into *report*."""
    sizes = QUICK if settings.quick else FULL
    with isolation.work_folder(sizes.memory_bytes) as work, services.hdfs(work / "hdfs") as cluster:
        report.machine["hdfs"] = "1 NameNode, 1 DataNode, replication 1, blocks on tmpfs, clients over loopback"
        report.machine["rounds"] = sizes.rounds
        report.machine["sizes"] = {
            "sequential_mib": sizes.big_bytes // MIB,
            "cached_mib": sizes.cached_bytes // MIB,
            "random_reads": sizes.random_reads,
            "names": sizes.names,
            "readers": _READERS,
            "reader_mib": sizes.reader_bytes // MIB,
        }
        client = services.native_client(cluster)
        report.progress(f"writing {sizes.big_bytes // MIB} MiB")
        digest = datasets.write_file(client, _BIG, sizes.big_bytes)
        bench = Bench(cluster, client, work, sizes, digest)
        groups: tuple[tuple[str, tuple[str, ...], Callable[[Bench, Report], None]], ...] = (
            ("sequential reads", ("cold_seq_vs_native", "cold_seq_vs_rclone", "warm_seq_vs_tmpfs"), measure_sequential),
            ("extent-cache hits", ("cached_direct_vs_limit",), measure_cached_direct),
            ("random reads", ("rand4k_p50_vs_native",), measure_random),
            ("listing", ("list_100k_vs_native",), measure_listing),
            ("memory", ("rss_64_readers_mib",), measure_memory),
        )
        for title, rows, group in groups:
            report.measure(title, rows, partial(group, bench))


def measure_sequential(bench: Bench, report: Report) -> None:
    """Cold and second readings of one big file; then, off the clock, that the mount's bytes are HDFS's."""
    plain = bench.work / "plain.bin"
    second: dict[str, list[float]] = {"turbofs_warm": [], "turbofs_warm_again": [], "tmpfs_again": []}

    def native(_round: int) -> float:
        with NativeReader(bench.client, _BIG) as reader:
            return throughput_mib_s(reader)

    def turbofs(_round: int) -> float:
        with bench.mount() as mount:
            path = mount.folder / _BIG.lstrip("/")
            with FileReader(path) as reader:
                cold = throughput_mib_s(reader)
            # Opened anew, as the next program would: the mount must tell the kernel that its pages still hold.
            for name in ("turbofs_warm", "turbofs_warm_again"):
                with FileReader(path) as reader:
                    second[name].append(throughput_mib_s(reader))
        return cold

    def tmpfs(_round: int) -> float:
        # Written anew: when a page is used for the second time, the kernel moves it to the active list, which costs a
        # quarter of that pass. Both sides pay it in the pass that counts (written, read; read cold, read warm), and
        # neither in the next one (`_again`), which is in the report for comparison.
        _copy_out(bench.client, _BIG, plain)
        with FileReader(plain) as reader:
            first = throughput_mib_s(reader)
        with FileReader(plain) as reader:
            second["tmpfs_again"].append(throughput_mib_s(reader))
        plain.unlink()
        return first

    def rclone(mode: str, _round: int) -> float:
        with (
            services.rclone_mount(bench.cluster, bench.work, mode) as mount,
            FileReader(mount.folder / _BIG.lstrip("/")) as reader,
        ):
            return throughput_mib_s(reader)

    try:
        native(0)  # off the record: the JVM compiles its hot paths, the blocks are in memory
        steps: dict[str, Callable[[int], float]] = {
            "hdfs_native": native,
            "turbofs_cold": turbofs,
            "tmpfs": tmpfs,
            **{name: values.__getitem__ for name, values in second.items()},
            **{f"rclone_{mode}": partial(rclone, mode) for mode in services.RCLONE_FLAGS},
        }
        without_rclone = shutil.which("rclone") is None
        if without_rclone:
            steps = {name: step for name, step in steps.items() if not name.startswith("rclone")}
        samples = interleave("MiB/s", bench.sizes.rounds, steps, report.progress)
        report.set("cold_seq_vs_native", samples.ratio("turbofs_cold", "hdfs_native"))
        report.set("warm_seq_vs_tmpfs", samples.ratio("turbofs_warm", "tmpfs"))
        if not without_rclone:
            samples = samples.highest("rclone_best", [name for name in steps if name.startswith("rclone")])
        report.baselines["sequential"] = samples.document()
        if without_rclone:
            raise BenchmarkError("rclone is not installed", advice="helpers/setup bench installs it")
        report.set("cold_seq_vs_rclone", samples.ratio("turbofs_cold", "rclone_best"))
        _check_bytes(bench)
    finally:
        plain.unlink(missing_ok=True)


def measure_cached_direct(bench: Bench, report: Report) -> None:
    """O_DIRECT readings of a file that the daemon holds in its extent cache, against a file that is memory."""
    size_bytes = bench.sizes.cached_bytes
    datasets.write_file(bench.client, _CACHED, size_bytes)
    passes = bench.sizes.direct_passes
    with ExitStack() as stack:
        stack.callback(bench.client.delete, _CACHED)
        mount = stack.enter_context(bench.mount())
        limit_path = stack.enter_context(services.memory_fuse(bench.work, size_bytes))
        cached = stack.enter_context(FileReader(mount.folder / _CACHED.lstrip("/"), direct=True))
        limit = stack.enter_context(FileReader(limit_path, direct=True))
        throughput_mib_s(cached)  # fills the cache
        throughput_mib_s(limit)
        samples = interleave(
            "MiB/s",
            bench.sizes.rounds,
            {
                "turbofs": lambda _round: throughput_mib_s(cached, passes),
                "memory_fuse": lambda _round: throughput_mib_s(limit, passes),
            },
            report.progress,
        )
    report.baselines["cached_direct"] = samples.document()
    report.set("cached_direct_vs_limit", samples.ratio("turbofs", "memory_fuse"))


def measure_random(bench: Bench, report: Report) -> None:
    """p50 of 4 KiB reads at random places of the big file, the same places for both within a round."""

    def offsets(number: int) -> list[int]:
        pages = bench.sizes.big_bytes // _RANDOM_READ_BYTES
        chosen = random.Random(number).sample(range(pages), bench.sizes.random_reads)
        return [page * _RANDOM_READ_BYTES for page in chosen]

    def native(number: int) -> float:
        with NativeReader(bench.client, _BIG) as reader:
            return 1e3 * median(latencies_s(reader, offsets(number), _RANDOM_READ_BYTES))

    def turbofs(number: int) -> float:
        with bench.mount() as mount, FileReader(mount.folder / _BIG.lstrip("/")) as reader:
            return 1e3 * median(latencies_s(reader, offsets(number), _RANDOM_READ_BYTES))

    native(-1)
    samples = interleave("ms", bench.sizes.rounds, {"hdfs_native": native, "turbofs": turbofs}, report.progress)
    report.baselines["random_4k_p50"] = samples.document()
    report.set("rand4k_p50_vs_native", samples.ratio("turbofs", "hdfs_native"))


def measure_listing(bench: Bench, report: Report) -> None:
    """Time to list a large directory with every entry's attributes, on a mount that has seen none of it."""
    names = bench.sizes.names
    report.progress(f"  creating {names} empty files")
    datasets.make_empty_files(bench.client, _MANY_NAMES, names)

    def native(_round: int) -> float:
        return seconds(lambda: native_list(bench.client, _MANY_NAMES), names)

    def turbofs(_round: int) -> float:
        with bench.mount() as mount:
            return seconds(lambda: scan_and_stat(mount.folder / _MANY_NAMES.lstrip("/")), names)

    try:
        native(-1)
        samples = interleave("s", bench.sizes.rounds, {"hdfs_native": native, "turbofs": turbofs}, report.progress)
    finally:
        bench.client.delete(_MANY_NAMES, recursive=True)
    report.baselines["listing"] = samples.document()
    report.set("list_100k_vs_native", samples.ratio("turbofs", "hdfs_native"))


def measure_memory(bench: Bench, report: Report) -> None:
    """The daemon's peak resident memory while 64 threads read a file each; one mount, since a peak needs no median."""
    report.progress(f"  writing {_READERS} files of {bench.sizes.reader_bytes // MIB} MiB")
    files = datasets.write_files(bench.client, _MANY_FILES, _READERS, bench.sizes.reader_bytes)
    try:
        with bench.mount("512MiB") as mount:
            idle_kib = mount.memory_kib("VmRSS")
            with sampled(partial(mount.memory_kib, "VmRSS")) as samples_kib:
                began = time.perf_counter()
                total_bytes = read_in_parallel([mount.folder / path.lstrip("/") for path in files])
                taken_s = time.perf_counter() - began
            report.progress(f"  {_READERS} readers together: {total_bytes / MIB / taken_s:.4g} MiB/s")
            peak_kib = mount.memory_kib("VmHWM")
    finally:
        bench.client.delete(_MANY_FILES, recursive=True)
    report.baselines["memory"] = Samples(
        "MiB",
        {
            "turbofs_before_reading": [idle_kib / 1024],
            "turbofs_typical": [median(samples_kib) / 1024] if samples_kib else [idle_kib / 1024],
            "turbofs_peak": [peak_kib / 1024],
        },
    ).document()
    report.set("rss_64_readers_mib", peak_kib / 1024)


def _copy_out(client: hdfs_native.Client, path: str, target: Path) -> None:
    with target.open("wb") as sink:
        reader = client.read(path)
        for piece in reader.read_range_stream(0, reader.size):
            sink.write(piece)


def _check_bytes(bench: Bench) -> None:
    """Fast and wrong is worth nothing: read the big file through a fresh mount and compare its digest."""
    with bench.mount() as mount, FileReader(mount.folder / _BIG.lstrip("/")) as reader:
        hasher = blake3.blake3()
        reader.consume(hasher.update)
    if hasher.hexdigest() != bench.digest:
        raise BenchmarkError("the bytes that the mount returned are not the file's", advice="a defect: report it")


SCENE = Scene("read", ROWS, run)
