"""`turbofs`: the commands, in groups, and what becomes of their errors."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from turbofs import __version__
from turbofs.cli import bench, conflicts, doctor, hint, mount, prefetch, status, umount, wait, working_directory
from turbofs.cli.failures import error_document, error_text, exit_code, only_turbo_error
from turbofs.cli.output import json_mode, to_json

_MOUNTS, _HINTS, _CARE = "Mounts", "Hints", "Care"

app = typer.Typer(
    name="turbofs",
    help="A mount that lets large-model training tell the storage what it will read and write, and when.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong use, 3 not reachable, 4 timed out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("mount", rich_help_panel=_MOUNTS)(mount.command)
app.command("umount", rich_help_panel=_MOUNTS)(umount.command)
app.command("status", rich_help_panel=_MOUNTS)(status.command)
app.command("hint", rich_help_panel=_HINTS)(hint.command)
app.command("prefetch", rich_help_panel=_HINTS)(prefetch.command)
app.command("wait", rich_help_panel=_HINTS)(wait.command)
app.add_typer(conflicts.app, name="conflicts", rich_help_panel=_CARE)
app.command("doctor", rich_help_panel=_CARE)(doctor.command)
app.command("bench", rich_help_panel=_CARE)(bench.command)


def _print_version(chosen: bool) -> None:
    if chosen:
        print(f"turbofs {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """The options that stand before a command."""


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit with its code; what went wrong is said in two lines, the second says what to do."""
    working_directory.leave_if_lost()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # paths that are not UTF-8 are printed byte for byte
    try:
        app(arguments)
    except Exception as error:
        cause = only_turbo_error(error)
        if cause is None:
            raise
        if json_mode():
            print(to_json(error_document(cause)))
        print(error_text(cause), file=sys.stderr)
        sys.exit(exit_code(cause))


if __name__ == "__main__":
    main()
