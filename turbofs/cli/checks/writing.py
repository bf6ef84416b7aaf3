"""Will what is written arrive? What the daemons say of their writing, and what this kernel lets them see."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

from turbofs.cli.checks import staging
from turbofs.cli.checks.result import CheckResult, fail, ok, warn
from turbofs.fs.openers import fdinfo_names_inodes
from turbofs.model import ROOT, Attributes


def mount(mountpoint: str, status: Mapping[str, object], daemon_uid: int, budget_bytes: int) -> list[CheckResult]:
    """The checks of one mount that is alive, from its `status` document; nothing where it does not write."""
    writing = status.get("writing")
    if not isinstance(writing, dict) or status.get("read_only"):
        return []
    results = [*_broken(mountpoint, writing), *_parked(mountpoint, writing)]
    area = writing.get("staging")
    if isinstance(area, dict) and isinstance(area.get("directory"), str):
        directory = Path(area["directory"])
        results.append(staging.place(directory, daemon_uid))
        used, limit = area.get("used_bytes"), area.get("limit_bytes")
        if isinstance(used, int) and isinstance(limit, int):
            results.append(staging.room(directory, used, limit, budget_bytes))
    return results


def closes(daemon_uid: int, *, lets_others_in: bool) -> CheckResult:
    """Whether the daemon can tell the last close of a file from that of a duplicate."""
    name = "last close"
    if not fdinfo_names_inodes():
        return warn(
            name,
            f"Linux {platform.release()} does not tell which files a process has open: each close publishes, also one of "
            "a duplicated or inherited descriptor",
            "use Linux 5.14 or later, or save to a temporary name and rename",
        )
    if daemon_uid != 0 and lets_others_in:
        return warn(
            name,
            "a daemon that is not root's cannot tell which files other users' processes have open: each of their closes "
            "publishes",
            "run the mount as root, where other users write",
        )
    return ok(name, "told from the close of a duplicate")


def identity(source: Mapping[str, object], top: Attributes) -> list[CheckResult]:
    """Whether what users create can be given to them. *source* describes it, *top* is of the file system's own root.

    Nothing where the source has no identity of its own. On HDFS the root belongs to the superuser, who alone may give
    files away.
    """
    user = source.get("user")
    if not isinstance(user, str):
        return []
    name = "identity"
    short = user.partition("@")[0].partition("/")[0]  # a Kerberos principal
    if short == top.owner:
        return [ok(name, f"{user} owns {ROOT}: what users create is given to them")]
    return [
        warn(
            name,
            f"{user} does not own {ROOT} (that is {top.owner}), so it is hardly the superuser and cannot chown to others: "
            f"what users create on the mount belongs to {short}",
            f'run the mount as HDFS\'s superuser ([source] user = "{top.owner}", or its keytab), or one mount for each '
            "user",
        )
    ]


def _broken(mountpoint: str, writing: Mapping[str, object]) -> list[CheckResult]:
    found = writing.get("broken")
    if not isinstance(found, list) or not found:
        return []
    first = found[0]
    return [
        fail(
            "broken files",
            f"{mountpoint}: {len(found)} acknowledged, but not on the source, such as {first.get('path')}: "
            f"{first.get('error')}",
            f"`turbofs status {mountpoint}` lists them, `turbofs conflicts ls {mountpoint}` the bytes that were kept;"
            " save them again",
        )
    ]


def _parked(mountpoint: str, writing: Mapping[str, object]) -> list[CheckResult]:
    count = writing.get("conflicts")
    if not isinstance(count, int) or not count:
        return []
    advice = f"`turbofs conflicts ls {mountpoint}`, then `publish` or `drop` each; until then they take room in staging"
    return [warn("conflicts", f"{mountpoint}: {count} saved files could not be published and wait for you", advice)]
