"""`turbofs doctor [SOURCE|DIR]`: finds what commonly goes wrong, and never touches a mount itself."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from turbofs import settings
from turbofs.cli import mount_table
from turbofs.cli.checks import fuse, memory, mounts
from turbofs.cli.checks.result import CheckResult, Verdict
from turbofs.cli.failures import FAILED
from turbofs.cli.output import JsonOption, emit
from turbofs.cli.working_directory import absolute
from turbofs.config import Config
from turbofs.errors import TurboError
from turbofs.wire import runtime_dir

_SIGNS = {Verdict.OK: "ok  ", Verdict.WARN: "warn", Verdict.FAIL: "FAIL"}


def command(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[SOURCE|DIR]", show_default=False, help="A source or a mount to look at too."),
    ] = None,
    config_file: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="As for mount.")] = None,
    json: JsonOption = False,
) -> None:
    """Check this machine; with SOURCE or DIR also that source or mount. Exits with 1 where something fails."""
    results = examine(target, config_file)
    emit({"checks": [asdict(result) for result in results]}, lambda: "\n".join(map(_line, results)))
    if any(result.verdict is Verdict.FAIL for result in results):
        raise typer.Exit(FAILED)


def examine(target: str | None, config_file: Path | None = None) -> list[CheckResult]:
    """All checks that apply to *target*: a source's URI, a mount point (or a path below), or None for the machine."""
    is_source = target is not None and (":" in target.split("/", 1)[0])
    mountpoint = None if target is None or is_source else _mountpoint(target)
    source = target if is_source else _source_of(mountpoint)
    config = _config(source, mountpoint, config_file)
    uid = os.geteuid()
    results = [fuse.device(), fuse.helper(uid), fuse.user_allow_other(uid)]
    results.append(memory.budget(config.read.memory_bytes or 0))
    results += mounts.alive(mountpoint)
    for place, entry in mount_table.turbofs_mounts().items():
        if mountpoint in {None, place}:
            results.append(mounts.read_ahead(entry, config.mount.read_ahead_kib))
    if source is not None:
        results += _source_checks(source, config)
    return results


def _source_checks(uri: str, config: Config) -> list[CheckResult]:
    import trio

    return trio.run(_examine_source, uri, config)


async def _examine_source(uri: str, config: Config) -> list[CheckResult]:
    import trio

    from turbofs.cli.checks import source as checks
    from turbofs.cli.checks.result import fail
    from turbofs.source.registry import open_source

    try:
        source = open_source(uri, config.source, trio.CapacityLimiter(config.source.threads))
    except TurboError as error:
        return [fail("source", str(error), error.advice)]
    try:
        results = [await checks.reachable(source)]
        results += await checks.web(source.describe())
        if results[0].verdict is Verdict.OK:
            results += await checks.files(source)
        return results
    finally:
        await source.aclose()


def _mountpoint(directory: str) -> str:
    """The mount point at or above *directory*; where there is none, *directory* itself, which the checks report."""
    found = mount_table.resolve(directory, mount_table.known_mountpoints())
    return found if isinstance(found, str) else found.mountpoint


def _source_of(mountpoint: str | None) -> str | None:
    if mountpoint is None:
        return None
    folder = runtime_dir.find_folder(mountpoint)
    record = runtime_dir.read_record(folder) if folder is not None else None
    entry = mount_table.turbofs_mounts().get(mountpoint)
    return record.source if record else entry.source if entry else None


def _config(source: str | None, mountpoint: str | None, config_file: Path | None) -> Config:
    files = [*settings.default_files(), *([Path(absolute(str(config_file)))] if config_file else [])]
    place: settings.Values = {
        ("mount", "source"): source or "memory:",
        ("mount", "mountpoint"): Path(mountpoint or "/"),
    }
    return settings.build_config(*(settings.load_file(file) for file in files), place)


def _line(result: CheckResult) -> str:
    advice = f"\n      {result.advice}" if result.advice else ""
    return f"{_SIGNS[result.verdict]}  {result.name}: {result.message}{advice}"
