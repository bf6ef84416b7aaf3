"""What every scene shares: rows with bars, interleaved rounds, medians, the table and the final JSON line.

A scene declares its rows and measures them in groups. Within a group all contestants take turns (A B C A B C …), so
that whatever disturbs the machine disturbs all of them; a row's value is the median over the rounds of the ratio
inside one round. A group that fails leaves its rows without a value, never out of the report.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import rich.box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from turbofs.errors import TurboError


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a scene's table: a figure and the bar that it must reach."""

    name: str
    what: str
    unit: str
    """`ratio`, `MiB`, …: the unit of value and bar."""
    bar: float
    better: Literal["lower", "higher"]

    def met_by(self, value: float) -> bool:
        return value <= self.bar if self.better == "lower" else value >= self.bar


class BenchmarkError(TurboError):
    """A contestant or a service did not do what the measurement needs."""

    advice = "the message names what failed; `turbofs doctor` and helpers/setup bench find what is missing"


# What a measurement may run into on a sane machine: a missing program, a dead daemon, a time-out, a full disk. Other
# exceptions are defects of the benchmark and end it.
MEASUREMENT_ERRORS = (TurboError, OSError, RuntimeError, TimeoutError)

Progress = Callable[[str], None]


def report_progress(message: str) -> None:
    """A line for people on stderr: stdout holds the result only."""
    print(f"bench: {message}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Samples:
    """Values of each contestant, one a round; every list has the same length. `unit` is that of the values."""

    unit: str
    values: Mapping[str, Sequence[float]]

    def median(self, contestant: str) -> float:
        return median(self.values[contestant])

    def ratio(self, contestant: str, baseline: str) -> float:
        """Median over the rounds of contestant/baseline within one round."""
        return median(
            ours / theirs for ours, theirs in zip(self.values[contestant], self.values[baseline], strict=True)
        )

    def highest(self, name: str, of: Sequence[str]) -> Samples:
        """These samples and a contestant *name* that has, in each round, the highest value of the contestants *of*."""
        best = [max(round_values) for round_values in zip(*(self.values[one] for one in of), strict=True)]
        return Samples(self.unit, {**self.values, name: best})

    def document(self) -> dict[str, object]:
        """For the JSON line: the median and all values of each contestant."""
        return {
            "unit": self.unit,
            **{
                name: {"median": _rounded(median(values)), "values": [_rounded(value) for value in values]}
                for name, values in self.values.items()
            },
        }


def interleave(
    unit: str, rounds: int, steps: Mapping[str, Callable[[int], float]], progress: Progress = report_progress
) -> Samples:
    """Run every step once a round, in the given order; a step takes the round's number and returns its value."""
    values: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name, step in steps.items():
            values[name].append(step(number))
        shown = ", ".join(f"{name} {of[-1]:.4g}" for name, of in values.items())
        progress(f"  round {number + 1}/{rounds}: {shown} {unit}")
    return Samples(unit, values)


@dataclass
class Report:
    """The result of one run of a scene, filled group by group."""

    scene: str
    rows: Sequence[Row]
    machine: dict[str, object]
    values: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    """Why a row has no value, by the row's name."""
    baselines: dict[str, object] = field(default_factory=dict)
    """What the ratios are made of: absolute figures of all contestants, by group."""
    progress: Progress = report_progress

    def set(self, row: str, value: float) -> None:
        if row not in {one.name for one in self.rows}:
            raise KeyError(f"scene {self.scene} has no row {row}")
        self.values[row] = value

    def measure(self, title: str, rows: Sequence[str], group: Callable[[Report], None]) -> None:
        """Run one group, which sets *rows*; where it fails the rest of the report goes on without them."""
        self.progress(title)
        began = time.monotonic()
        try:
            group(self)
        except MEASUREMENT_ERRORS as error:
            reason = f"{type(error).__name__}: {error}"
            self.progress(f"  failed: {_first_line(reason)}")
            for row in rows:
                if row not in self.values:
                    self.notes[row] = _first_line(reason)
        else:
            self.progress(f"  took {time.monotonic() - began:.0f} s")

    def passed(self) -> bool:
        return all(self.ok(row) for row in self.rows)

    def ok(self, row: Row) -> bool:
        return row.name in self.values and row.met_by(self.values[row.name])

    def document(self) -> dict[str, object]:
        return {
            "scene": self.scene,
            "rows": [
                {
                    "row": row.name,
                    "value": _rounded(self.values[row.name]) if row.name in self.values else None,
                    "unit": row.unit,
                    "bar": row.bar,
                    "better": row.better,
                    "ok": self.ok(row),
                }
                for row in self.rows
            ],
            "baselines": self.baselines,
            "machine": self.machine,
        }

    def json_line(self) -> str:
        return json.dumps(self.document())

    def table(self) -> Table:
        table = Table(title=f"scene {self.scene}", box=rich.box.SIMPLE_HEAD, title_justify="left")
        for heading, justify in (("row", "left"), ("value", "right"), ("bar", "right"), ("", "left"), ("what", "left")):
            table.add_column(heading, justify=justify, overflow="fold", no_wrap=heading != "what")  # type: ignore[arg-type]
        for row in self.rows:
            value = f"{self.values[row.name]:.3g}" if row.name in self.values else "–"
            sign = "≤" if row.better == "lower" else "≥"
            unit = "" if row.unit == "ratio" else f" {row.unit}"
            verdict = "ok" if self.ok(row) else "missed" if row.name in self.values else "not measured"
            what = escape(self.notes.get(row.name, row.what))  # messages may hold what rich takes for markup
            table.add_row(row.name, f"{value}{unit}", f"{sign} {row.bar:g}{unit}", verdict, what)
        return table

    def print(self) -> None:
        """The table for people, the absolute figures, and as the last line the JSON object."""
        console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 140)
        console.print(self.table())
        for group, figures in self.baselines.items():
            if isinstance(figures, dict):
                shown = ", ".join(
                    f"{name} {value['median']:.4g}" for name, value in figures.items() if isinstance(value, dict)
                )
                console.print(f"{group} ({figures.get('unit', '')}): {shown}", markup=False, highlight=False)
        print(self.json_line(), flush=True)


@dataclass(frozen=True)
class Settings:
    """How large a run is. `quick` runs are for the eye: one round, smaller sizes, at most 60 s."""

    quick: bool = False


@dataclass(frozen=True)
class Scene:
    """A named set of rows and the function that measures them into a report."""

    name: str
    rows: Sequence[Row]
    run: Callable[[Report, Settings], None]


def _first_line(reason: str) -> str:
    """Without the stack that HDFS's errors carry, also where a client escapes their line breaks."""
    return reason.splitlines()[0].partition("\\n")[0]


def _rounded(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")
