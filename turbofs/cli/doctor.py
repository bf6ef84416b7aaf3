"""`turbofs doctor [SOURCE|DIR]`: finds what commonly goes wrong, and never touches a mount itself."""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from turbofs import settings
from turbofs.cli import mount_table
from turbofs.cli.checks import fuse, memory, mounts, staging, writing
from turbofs.cli.checks.result import CheckResult, Verdict
from turbofs.cli.failures import FAILED
from turbofs.cli.output import JsonOption, emit
from turbofs.cli.status import list_mounts, mount_status
from turbofs.cli.working_directory import absolute
from turbofs.config import Config
from turbofs.errors import TurboError
from turbofs.fuse.kernel import may_allow_others
from turbofs.wire import runtime_dir

if TYPE_CHECKING:
    from turbofs.source.base import Source

_IDENTITY_S = 10.0
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
    known = list_mounts()
    results += mounts.alive(mountpoint, known)
    for place, entry in mount_table.turbofs_mounts().items():
        if mountpoint in {None, place}:
            results.append(mounts.read_ahead(entry, config.mount.read_ahead_kib))
    results += _writing_checks(known, mountpoint, config)
    if source is not None:
        results += _source_checks(source, config)
    return results


def _writing_checks(known: list[dict[str, object]], mountpoint: str | None, config: Config) -> list[CheckResult]:
    if config.mount.read_only:
        return []
    uid, budget_bytes = os.geteuid(), config.read.memory_bytes or 0
    results = [writing.closes(uid, lets_others_in=config.mount.allow_other and may_allow_others())]
    for mount in known:
        place = str(mount["mountpoint"])
        if mount["state"] == "alive" and mountpoint in {None, place}:
            with contextlib.suppress(TurboError):  # it has ended since, and `daemon` is about that
                results += writing.mount(place, mount_status(place), _owner(mount["pid"], uid), budget_bytes)
    directory = config.write.staging_dir
    if directory is None and mountpoint is not None:
        # Costs a while to import, and needs a working directory that exists.
        from turbofs.fs.hint_store import state_directory
        from turbofs.write.opening import staging_place

        base = runtime_dir.runtime_base()
        state = state_directory(config.fs, Path(mountpoint))
        directory = staging_place(config.write, runtime_dir.mount_name(mountpoint, base), base, state)
    if directory is not None:
        results += [staging.usable(directory), *staging.leftover(directory, mountpoint)]
        if not any(result.name == staging.NAME for result in results):
            results.append(staging.place(directory, uid))
    return results


def _owner(pid: object, default: int) -> int:
    """The user of the process *pid*."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return default


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
            if not config.mount.read_only:
                results += await _identity(source, uri, config)
        return results
    finally:
        await source.aclose()


async def _identity(source: Source, uri: str, config: Config) -> list[CheckResult]:
    """Whose files are that users create: told by the owner of the whole file system's root."""
    import trio

    from turbofs.model import ROOT
    from turbofs.source.registry import open_source
    from turbofs.source.uri import parse_source_uri

    if not isinstance(source.describe().get("user"), str):
        return []
    parsed = parse_source_uri(uri)
    top = open_source(f"{parsed.scheme}://{parsed.authority}/", config.source, trio.CapacityLimiter(4))
    try:
        with trio.move_on_after(_IDENTITY_S):
            return writing.identity(source.describe(), await top.stat(ROOT))
    except TurboError:
        return []  # the checks above have said what is wrong with the source
    finally:
        await top.aclose()
    return []


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
