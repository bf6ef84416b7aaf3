"""`turbofs mount SOURCE DIR`: checks, then the daemon, here or in the background."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from turbofs import settings
from turbofs.cli import mount_point
from turbofs.cli.output import JsonOption, emit, note
from turbofs.cli.working_directory import absolute
from turbofs.config import Config
from turbofs.errors import ConfigError
from turbofs.fuse.kernel import allows_others
from turbofs.wire import runtime_dir


def command(
    first: Annotated[
        str,
        typer.Argument(metavar="[SOURCE]", show_default=False, help="What to mount; may come from the configuration."),
    ],
    second: Annotated[
        str | None, typer.Argument(metavar="DIR", show_default=False, help="An existing directory.")
    ] = None,
    foreground: Annotated[
        bool, typer.Option("-f", "--foreground", help="Stay in the foreground, log to stderr.")
    ] = False,
    wait: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long to wait for a source that is down (30s).")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Budget of all buffers (a quarter of the memory limit, at most 8GiB)."),
    ] = None,
    staging_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Where written bytes wait for the source (a folder of the mount on tmpfs)."),
    ] = None,
    staging_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Most bytes that may wait there; beyond it a write is answered ENOSPC."),
    ] = None,
    read_only: Annotated[bool | None, typer.Option("--read-only", help="Refuse changes.")] = None,
    allow_other: Annotated[
        bool | None, typer.Option(help="Let other users in, by the permissions of files (root: yes).")
    ] = None,
    client: Annotated[str | None, typer.Option(metavar="native|libhdfs", help="How HDFS bytes are read.")] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("-o", metavar="OPT,…", help="The same names, and any key of the configuration as ROOM.KEY=VALUE."),
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="A TOML file, read after the system's and the user's."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Mount SOURCE on DIR; returns when the mount is usable and leaves its daemon behind.

    SOURCE: hdfs://HOST[:PORT]/PATH, hdfs://NAMESERVICE/PATH, file:///PATH, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX.
    """
    source, directory = (None, first) if second is None else (first, second)
    flags = settings.flag_values(
        source=source,
        wait=wait,
        memory=memory,
        staging_dir=staging_dir,
        staging_size=staging_size,
        read_only=read_only,
        allow_other=allow_other,
        client=client,
    )
    config = load_config(flags, options or [], config_file, directory)
    mount(config, foreground=foreground)


def load_config(flags: settings.Values, options: list[str], config_file: Path | None, directory: str) -> Config:
    """The configuration of one mount: *flags* over *options* over files; *directory* as the user wrote it."""
    files = [*settings.default_files(), *([Path(absolute(str(config_file)))] if config_file is not None else [])]
    place: settings.Values = {("mount", "mountpoint"): Path(os.path.normpath(absolute(directory)))}
    layers = [settings.load_file(file) for file in files]
    asked = settings.parse_options(options) | flags
    if asked.get(("mount", "allow_other")) and os.geteuid() != 0 and not allows_others():
        raise ConfigError(
            "--allow-other: /etc/fuse.conf does not let users do that",
            advice="as root, add the line `user_allow_other` to /etc/fuse.conf",
        )
    return settings.build_config(*layers, asked, place)


def mount(config: Config, *, foreground: bool) -> None:
    """Mount as *config* says. Raises the TurboError that prevents it, and leaves nothing behind then."""
    config, base = check(config), _base(config)
    place = str(config.mount.mountpoint)
    if foreground:
        _in_foreground(config)
        return
    from turbofs.cli import background
    from turbofs.cli.logs import default_log_folder

    folder = config.mount.log_dir or default_log_folder(os.geteuid())
    log_file = folder / f"{runtime_dir.mount_name(place, base)}.log"
    pid = background.start(config, log_file, note)
    document = {"mountpoint": place, "source": config.mount.source, "pid": pid, "log": str(log_file)}
    emit(document, lambda: f"{config.mount.source} is mounted on {place} (daemon {pid}, log {log_file})")


def check(config: Config) -> Config:
    """*config* with its mount point resolved, once source and mount point are found to be usable. Raises TurboError.

    Knows the source by its name only: it is not asked.
    """
    from turbofs.source.uri import parse_source_uri

    parse_source_uri(config.mount.source)
    place = mount_point.prepare(str(config.mount.mountpoint), config.mount.source, note, _base(config))
    if config.write.staging_dir is not None:
        mount_point.check_staging(str(config.write.staging_dir), place, config.mount.source)
    return settings.with_mountpoint(config, Path(place))


def _base(config: Config) -> Path:
    return config.mount.runtime_dir or runtime_dir.runtime_base()


def _in_foreground(config: Config) -> None:
    from turbofs.cli import daemon, logs
    from turbofs.cli.notify import TerminalReporter

    logs.configure(config.mount.log_format, config.mount.log_level)
    daemon.run(config, TerminalReporter())
