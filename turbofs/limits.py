"""How much memory this process may use: the cgroup's limit (version 1, 2 or both), else the machine's memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

GIB = 1 << 30
DEFAULT_SHARE = 4  # a quarter: the training process beside the mount needs the rest
DEFAULT_CEILING_BYTES = 8 * GIB  # more buys nothing: the kernel's page cache holds what is read again
FALLBACK_BYTES = 4 * GIB  # neither cgroup nor /proc/meminfo can be read


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The tightest limit found, and the file that says so."""

    limit_bytes: int
    origin: str


def default_memory_bytes(root: Path = Path("/")) -> int:
    """The memory budget of a mount whose configuration names none."""
    return min(memory_limit(root).limit_bytes // DEFAULT_SHARE, DEFAULT_CEILING_BYTES)


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """The tightest memory limit on this process. *root* stands for "/" (tests put a tree of their own there)."""
    limits = [limit for limit in (_machine(root), *_cgroups(root)) if limit is not None]
    return min(limits, key=lambda limit: limit.limit_bytes, default=MemoryLimit(FALLBACK_BYTES, "an assumption"))


def _machine(root: Path) -> MemoryLimit | None:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemTotal":
            kib = rest.split()[0] if rest.split() else ""
            return MemoryLimit(int(kib) * 1024, "MemTotal") if kib.isdigit() else None
    return None


def _cgroups(root: Path) -> list[MemoryLimit | None]:
    """Limits of this process's cgroup and of all above it: each of them binds."""
    found: list[MemoryLimit | None] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        if hierarchy == "0" and not controllers:
            # A machine that runs both versions mounts version 2 one level deeper.
            for top in (root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"):
                found += [_limit(folder / "memory.max", root) for folder in _upwards(top, path)]
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            found += [_limit(folder / "memory.limit_in_bytes", root) for folder in _upwards(top, path)]
    return found


def _upwards(top: Path, path: str) -> list[Path]:
    """*top*/*path* and every folder above it down to *top*.

    In a container the path may be the host's: then only *top*, which is the container's own group, exists.
    """
    parts = [part for part in PurePosixPath(path).parts if part not in {"/", ".."}]
    return [top.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _limit(file: Path, root: Path) -> MemoryLimit | None:
    text = _read(file).strip()
    # "max" (version 2) and a number near 2^63 (version 1) mean that there is none; MemTotal undercuts the latter.
    return MemoryLimit(int(text), f"/{file.relative_to(root)}") if text.isdigit() else None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
