"""`turbofs bench SCENE`: TurboFS and its baselines side by side."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer


def command(
    scene: Annotated[str, typer.Argument(metavar="SCENE", show_default=False, help="What to measure: read or write.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="One round, smaller sizes, within a minute: for the eye.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the JSON object to FILE too.")
    ] = None,
) -> None:
    """Measure SCENE against its baselines; prints a table and, as its last line, one JSON object.

    A full run takes up to 15 minutes and ends with 0 where every row meets its bar, else with 1.
    """
    # By name: the benchmarks stand above the command line (they start it), so it must not import them.
    benchmarks = importlib.import_module("turbofs.bench.command")
    raise typer.Exit(benchmarks.run(scene, quick=quick, json_file=json_file))
