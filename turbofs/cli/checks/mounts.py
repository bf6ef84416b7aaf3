"""The mounts of this machine: dead ones, and how far the kernel reads ahead. From /proc, /sys and sockets only."""

from __future__ import annotations

from pathlib import Path

from turbofs.cli.checks.result import CheckResult, fail, ok, warn
from turbofs.cli.status import list_mounts
from turbofs.mountinfo import MountEntry


def alive(mountpoint: str | None = None, mounts: list[dict[str, object]] | None = None) -> list[CheckResult]:
    """One result a mount, or for *mountpoint* alone: does its daemon answer? *mounts*: as `list_mounts` gave them."""
    name = "daemon"
    known = list_mounts() if mounts is None else mounts
    found = [mount for mount in known if mountpoint in {None, mount["mountpoint"]}]
    if not found:
        if mountpoint is None:
            return [ok(name, "no mounts")]
        return [fail(name, f"{mountpoint} is not mounted", f"`turbofs mount SOURCE {mountpoint}`")]
    return [_daemon(name, mount) for mount in found]


def _daemon(name: str, mount: dict[str, object]) -> CheckResult:
    place, state = mount["mountpoint"], mount["state"]
    if state == "alive":
        return ok(name, f"{place}: daemon {mount['pid']} answers")
    if state == "hanging":
        advice = f"its log says what it waits for; `kill -9 {mount['pid']}` ends it, then mount again, which cleans up"
        return fail(name, f"{place}: daemon {mount['pid']} does not answer", advice)
    if state == "unknown":
        advice = "if it is not another user's, its daemon is gone: `turbofs mount` on it cleans up"
        return warn(name, f"{place}: mounted, but its control socket is not to be found", advice)
    if mount["mounted"]:
        return fail(
            name, f"{place}: a dead mount left over", f"`turbofs umount {place}`, or mount again, which cleans up"
        )
    return warn(name, f"{place}: its daemon ended without cleaning up", f"`turbofs mount {mount['source']} {place}`")


def read_ahead(entry: MountEntry, wanted_kib: int, sys_root: Path = Path("/sys")) -> CheckResult:
    """The kernel's read-ahead of a mount, which decides how fast one sequential reader can be."""
    name = "read-ahead"
    file = sys_root / "class/bdi" / entry.device / "read_ahead_kb"
    try:
        found_kib = int(file.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        return warn(name, f"{entry.mountpoint}: cannot read {file}: {error}", "is /sys mounted here?")
    if found_kib < wanted_kib:
        return warn(
            name,
            f"{entry.mountpoint}: {found_kib} KiB, wanted {wanted_kib} KiB: sequential readers are slower",
            f"as root: `echo {wanted_kib} > {file}`",
        )
    return ok(name, f"{entry.mountpoint}: {found_kib} KiB")
