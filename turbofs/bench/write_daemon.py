"""The rows of scene `write` that are about the daemon itself: how soon it is back, and how much memory it takes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import blake3

from turbofs.bench import isolation, services, writers
from turbofs.bench.checks import await_persisted, await_readable, check_content
from turbofs.bench.harness import BenchmarkError, Report, Samples, interleave
from turbofs.bench.payload import Payload
from turbofs.bench.readers import FileReader
from turbofs.bench.sampling import sampled
from turbofs.bench.write_setting import MEMORY, WRITERS, Bench, Sizes, early_folder
from turbofs.bench.writer_process import WriterProcess
from turbofs.testing.hdfs_cluster import HdfsCluster


def measure_recovery(bench: Bench, report: Report) -> None:
    """Time from the start of a daemon until a file that a killed one had staged can be read."""
    samples = interleave("s", bench.sizes.recover_rounds, {"turbofs": partial(_recovery_s, bench)}, report.progress)
    report.baselines["recovery"] = samples.document()
    report.set("recover_1gib_s", samples.median("turbofs"))


def _recovery_s(bench: Bench, number: int) -> float:
    bench.contents("recovery", number)
    data = bench.payload.view
    path = f"/recovery/{number}.bin"
    with bench.mount() as mount:
        early_folder(mount, "recovery")
        descriptor = os.open(f"{mount.folder}{path}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with _held(bench.cluster):
            try:
                writers.write_open_file(data, descriptor)
            finally:
                os.close(descriptor)
            os.kill(mount.pid, signal.SIGKILL)
    bench.cluster.wait_ready()
    with contextlib.suppress(FileNotFoundError):
        bench.client.get_file_info(path)
        raise BenchmarkError("the file was on HDFS before its daemon was killed, so there was nothing to recover")
    began = time.perf_counter()
    with bench.mount() as mount:
        await_readable(mount.folder / path.lstrip("/"), data)
        taken_s = time.perf_counter() - began
        with FileReader(mount.folder / path.lstrip("/")) as reader:
            hasher = blake3.blake3()
            reader.consume(hasher.update)
        if hasher.hexdigest() != bench.digest:
            raise BenchmarkError("the recovered bytes are not what was written", advice="a defect: report it")
        await_persisted(mount.folder / path.lstrip("/"))
        bench.check_and_delete(path)
    return taken_s


def measure_memory(work: Path, sizes: Sizes, payload: Payload, writer: WriterProcess, report: Report) -> None:
    """The daemon's peak memory, apart from staging, while 16 threads write a large file each; HDFS's data on disk."""
    shift_bytes = sizes.big_bytes // WRITERS
    with isolation.disk_folder(sizes.disk_bytes) as disk, services.hdfs(disk / "hdfs") as cluster:
        client = services.native_client(cluster)
        client.mkdirs("/many", 0o755, True)
        with services.turbofs_mount(cluster, work, memory=MEMORY, staging_bytes=sizes.staging_bytes) as mount:
            idle_kib = _beyond_staging_kib(mount)
            with sampled(partial(_beyond_staging_kib, mount)) as samples_kib:
                throughput = writer.call(writers.write_files, f"{mount.folder}/many", WRITERS, shift_bytes)
            report.progress(f"  {WRITERS} writers together: {throughput:.4g} MiB/s")
            for index in range(WRITERS):
                name = writers.writer_name(index)
                check_content(client, f"/many/{name}", sizes.big_bytes, payload.digest(index * shift_bytes))
    peak_kib = max(samples_kib, default=idle_kib)
    report.baselines["memory"] = Samples(
        "MiB",
        {
            "turbofs_before_writing": [idle_kib / 1024],
            "turbofs_typical": [median(samples_kib or [idle_kib]) / 1024],
            "turbofs_peak": [peak_kib / 1024],
        },
    ).document()
    report.set("rss_16_writers_mib", peak_kib / 1024)


@contextlib.contextmanager
def _held(cluster: HdfsCluster) -> Iterator[None]:
    """HDFS answers nothing as long as the context lasts."""
    daemons = [daemon for daemon in (cluster.namenode, *cluster.workers) if daemon is not None]
    try:
        for daemon in daemons:
            daemon.freeze()
        yield
    finally:
        for daemon in daemons:
            daemon.thaw()


def _beyond_staging_kib(mount: services.Mount) -> int:
    """What the daemon has resident apart from shared memory: staging is tmpfs, whose pages count as that."""
    return mount.memory_kib("RssAnon") + mount.memory_kib("RssFile")
