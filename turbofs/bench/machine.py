"""What a figure was measured on. A ratio carries over to other machines, the absolute figures do not."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

from turbofs import __version__


def describe() -> dict[str, object]:
    """CPUs, memory, kernel and the versions of what takes part."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": _field(Path("/proc/cpuinfo"), "model name"),
        "memory_gib": round(int(_field(Path("/proc/meminfo"), "MemTotal").split()[0]) / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "turbofs": __version__,
        "hdfs_native": version("hdfs-native"),
        "pyfuse3": version("pyfuse3"),
        "rclone": _rclone_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def _field(path: Path, name: str) -> str:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "0"


def _rclone_version() -> str | None:
    if shutil.which("rclone") is None:
        return None
    lines = subprocess.run(["rclone", "version"], capture_output=True, text=True, check=False).stdout.splitlines()
    return lines[0].removeprefix("rclone ") if lines else None
