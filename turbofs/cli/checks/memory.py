"""Does the budget fit what this process may use?"""

from __future__ import annotations

from pathlib import Path

from turbofs.cli.checks.result import CheckResult, fail, ok, warn
from turbofs.limits import memory_limit
from turbofs.units import format_size

_BASE_BYTES = 256 << 20  # Python, the clients and their threads, beside the budget


def budget(budget_bytes: int, root: Path = Path("/")) -> CheckResult:
    """The memory budget against the tightest limit, with room for the programs that read."""
    name = "memory"
    limit = memory_limit(root)
    found = f"budget {format_size(budget_bytes)}, limit {format_size(limit.limit_bytes)} ({limit.origin})"
    advice = "lower --memory, or raise the cgroup's limit"
    if budget_bytes + _BASE_BYTES > limit.limit_bytes:
        return fail(name, f"{found}: the daemon would be killed", advice)
    if budget_bytes > limit.limit_bytes // 2:
        return warn(name, f"{found}: less than half is left for the programs that read", advice)
    return ok(name, found)
