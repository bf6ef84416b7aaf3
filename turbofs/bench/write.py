"""Scene `write`: a mount of HDFS against hdfs-native, rclone and tmpfs.

One process writes for every contestant (`turbofs.bench.writers`), random bytes that were made before the clock starts.
After the clock, what must be on HDFS by then is read with hdfs-native and compared. Files are deleted between
the steps, and HDFS's blocks with them, so that every contestant writes into memory that was in use before.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import blake3

from turbofs.bench import isolation, services, writers
from turbofs.bench.checks import await_content, await_persisted, check_content, check_small_files
from turbofs.bench.harness import BenchmarkError, Report, Row, Samples, Scene, Settings, interleave
from turbofs.bench.payload import MIB, Payload
from turbofs.bench.write_daemon import measure_memory, measure_recovery
from turbofs.bench.write_setting import FULL, HDFS_RESERVE_BYTES, QUICK, WRITERS, Bench, early_folder
from turbofs.bench.writer_process import WriterProcess

ROWS = (
    Row("staged_vs_tmpfs", "written and closed with ack=staged / the same on tmpfs", "ratio", 0.6, "higher"),
    Row("staged_direct_vs_tmpfs", "the same with O_DIRECT, 1 MiB / the same on tmpfs", "ratio", 0.8, "higher"),
    Row("persisted_vs_native", "written and persisted / hdfs-native", "ratio", 0.9, "higher"),
    Row("persisted_vs_rclone", "the same / rclone mount, until the file is on HDFS", "ratio", 1.2, "higher"),
    Row("create_500_vs_native", "500 files of 4 KiB, 16 writers, rate / hdfs-native's", "ratio", 0.9, "higher"),
    Row("append_fsync_p50_vs_native", "4 KiB append and fsync, p50 time / write and hsync", "ratio", 2, "lower"),
    Row("recover_1gib_s", "start after SIGKILL with 1 GiB staged, until it can be read", "s", 2, "lower"),
    Row("rss_16_writers_mib", "peak resident memory, 16 writers of 1 GiB, staging not counted", "MiB", 500, "lower"),
)  # fmt: skip


def run(report: Report, settings: Settings) -> None:
    """Measure every row of the scene into *report*."""
    sizes = QUICK if settings.quick else FULL
    report.machine["hdfs"] = (
        "1 NameNode, 1 DataNode, replication 1, clients over loopback, blocks on tmpfs (16 writers: disk)"
    )
    report.machine["rounds"] = sizes.rounds
    report.machine["sizes"] = {
        "file_mib": sizes.big_bytes // MIB,
        "small_files": sizes.small_files,
        "appends": sizes.appends,
        "writers": WRITERS,
        "writers_staging_mib": sizes.staging_bytes // MIB,
    }
    with (
        isolation.work_folder(sizes.memory_bytes, HDFS_RESERVE_BYTES) as work,
        Payload(sizes.big_bytes) as payload,
        WriterProcess(payload) as writer,
    ):
        with services.hdfs(work / "hdfs") as cluster:
            bench = Bench(cluster, services.native_client(cluster), work, sizes, payload, writer)
            groups: tuple[tuple[str, tuple[str, ...], Callable[[Bench, Report], None]], ...] = (
                ("early acknowledgement", ("staged_vs_tmpfs", "staged_direct_vs_tmpfs"), measure_staged),
                ("persisted", ("persisted_vs_native", "persisted_vs_rclone"), measure_persisted),
                ("small files", ("create_500_vs_native",), measure_small_files),
                ("log", ("append_fsync_p50_vs_native",), measure_log),
                ("recovery", ("recover_1gib_s",), measure_recovery),
            )
            for title, rows, group in groups:
                report.measure(title, rows, partial(group, bench))
                bench.clear()
        report.measure("memory", ("rss_16_writers_mib",), partial(measure_memory, work, sizes, payload, writer))


def measure_staged(bench: Bench, report: Report) -> None:
    """A large file, acknowledged once it is staged, against one on tmpfs; buffered and with O_DIRECT."""

    def tmpfs(direct: bool, number: int) -> float:
        bench.contents("staged", number)
        path = bench.work / "plain.bin"
        try:
            return bench.writer.call(writers.write_file, str(path), direct=direct and _tmpfs_takes_direct(bench.work))
        finally:
            path.unlink(missing_ok=True)

    def staged(direct: bool, folder: Path, number: int) -> float:
        bench.contents("staged", number)
        path = folder / f"{'direct' if direct else 'buffered'}-{number}.bin"
        throughput = bench.writer.call(writers.write_file, str(path), direct=direct)
        await_persisted(path)
        bench.check_and_delete(f"/{folder.name}/{path.name}")
        return throughput

    with bench.mount() as mount:
        folder = early_folder(mount, "staged")
        samples = _warm_and_interleave(
            report,
            "MiB/s",
            bench.sizes.rounds,
            {
                "tmpfs": partial(tmpfs, False),
                "turbofs_staged": partial(staged, False, folder),
                "tmpfs_direct": partial(tmpfs, True),
                "turbofs_staged_direct": partial(staged, True, folder),
            },
        )
    report.baselines["staged"] = samples.document()
    report.set("staged_vs_tmpfs", samples.ratio("turbofs_staged", "tmpfs"))
    report.set("staged_direct_vs_tmpfs", samples.ratio("turbofs_staged_direct", "tmpfs_direct"))


def measure_persisted(bench: Bench, report: Report) -> None:
    """A large file until it is on HDFS: through the mount, with hdfs-native, through rclone's mount."""
    bench.client.mkdirs("/persisted", 0o755, True)

    def native(number: int) -> float:
        bench.contents("persisted", number)
        path = f"/persisted/native-{number}.bin"
        throughput = bench.writer.call(writers.write_native, bench.cluster.uri, path)
        bench.check_and_delete(path)
        return throughput

    def turbofs(mount: services.Mount, number: int) -> float:
        bench.contents("persisted", number)
        path = f"/persisted/turbofs-{number}.bin"
        throughput = bench.writer.call(writers.write_file, f"{mount.folder}{path}")
        bench.check_and_delete(path)
        return throughput

    def rclone(mount: services.Mount, mode: str, number: int) -> float:
        bench.contents("persisted", number)
        path = f"/persisted/{mode}-{number}.bin"
        local = f"{mount.folder}{path}"
        throughput = bench.writer.call(writers.write_file_until_on_hdfs, local, bench.cluster.uri, path)
        await_content(bench.client, path, bench.sizes.big_bytes, bench.digest)
        os.unlink(local)  # through the mount: its cache goes with it
        services.await_no_blocks(bench.cluster)
        return throughput

    without_rclone = shutil.which("rclone") is None
    modes = () if without_rclone else tuple(services.RCLONE_WRITE_FLAGS)
    with ExitStack() as stack:
        ours = stack.enter_context(bench.mount())
        theirs = {mode: stack.enter_context(services.rclone_mount(bench.cluster, bench.work, mode)) for mode in modes}
        steps: dict[str, Callable[[int], float]] = {"hdfs_native": native, "turbofs_persisted": partial(turbofs, ours)}
        steps |= {f"rclone_{mode}": partial(rclone, mount, mode) for mode, mount in theirs.items()}
        samples = _warm_and_interleave(report, "MiB/s", bench.sizes.rounds, steps)
    report.set("persisted_vs_native", samples.ratio("turbofs_persisted", "hdfs_native"))
    if modes:
        samples = samples.highest("rclone_best", [f"rclone_{mode}" for mode in modes])
    report.baselines["persisted"] = samples.document()
    if without_rclone:
        raise BenchmarkError("rclone is not installed", advice="helpers/setup bench installs it")
    report.set("persisted_vs_rclone", samples.ratio("turbofs_persisted", "rclone_best"))


def measure_small_files(bench: Bench, report: Report) -> None:
    """Many small files by 16 threads, each persisted when its close returns."""
    count = bench.sizes.small_files

    def step(name: str, write: Callable[[str], float], number: int) -> float:
        bench.contents("small", number)
        folder = f"/small-{name}-{number}"
        bench.client.mkdirs(folder, 0o755, True)
        rate = write(folder)
        check_small_files(bench.client, folder, bench.payload.view, count)
        bench.client.delete(folder, recursive=True)
        services.await_no_blocks(bench.cluster)
        return rate

    def native(folder: str) -> float:
        return bench.writer.call(writers.create_native, bench.cluster.uri, folder, count, WRITERS)

    with bench.mount() as mount:

        def turbofs(folder: str) -> float:
            return bench.writer.call(writers.create_files, f"{mount.folder}{folder}", count, WRITERS)

        samples = _warm_and_interleave(
            report,
            "files/s",
            bench.sizes.create_rounds,
            {"hdfs_native": partial(step, "native", native), "turbofs": partial(step, "turbofs", turbofs)},
        )
    report.baselines["small_files"] = samples.document()
    report.set("create_500_vs_native", samples.ratio("turbofs", "hdfs_native"))


def measure_log(bench: Bench, report: Report) -> None:
    """p50 of appending 4 KiB to an open log and syncing them."""
    count = bench.sizes.appends
    bench.client.mkdirs("/log", 0o755, True)

    def step(name: str, append: Callable[[str], list[float]], number: int) -> float:
        bench.contents("log", number)
        path = f"/log/{name}-{number}.log"
        taken_s = append(path)
        size_bytes = count * writers.SMALL_BYTES
        digest = blake3.blake3(bench.payload.view[:size_bytes]).hexdigest()
        check_content(bench.client, path, size_bytes, digest)
        bench.client.delete(path)
        return 1e3 * median(taken_s)

    def native(path: str) -> list[float]:
        return bench.writer.call(writers.append_native, bench.cluster.uri, path, count)

    with bench.mount() as mount:

        def turbofs(path: str) -> list[float]:
            return bench.writer.call(writers.append_file, f"{mount.folder}{path}", count)

        samples = _warm_and_interleave(
            report,
            "ms",
            bench.sizes.rounds,
            {"hdfs_native": partial(step, "native", native), "turbofs": partial(step, "turbofs", turbofs)},
        )
    services.await_no_blocks(bench.cluster)
    report.baselines["append_fsync_p50"] = samples.document()
    report.set("append_fsync_p50_vs_native", samples.ratio("turbofs", "hdfs_native"))


def _warm_and_interleave(
    report: Report, unit: str, rounds: int, steps: Mapping[str, Callable[[int], float]]
) -> Samples:
    """Every step once off the record (JVMs compile, connections open, memory is touched), then the rounds."""
    report.progress("  warming up")
    for step in steps.values():
        step(-1)
    return interleave(unit, rounds, steps, report.progress)


def _tmpfs_takes_direct(folder: Path) -> bool:
    """Whether this kernel's tmpfs can be opened with O_DIRECT (since 6.6)."""
    probe = folder / "direct-probe"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


SCENE = Scene("write", ROWS, run)
