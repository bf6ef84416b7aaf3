"""Test programs of others: where they are, and how each is run on a directory.

`fsx` and `pjdfstest` are Rust programs that `helpers/setup test` builds into `.cache/tools`; the others come with the
system. A test of a program that this machine lacks is skipped, and the reason says how to get it; where
TURBOFS_REQUIRE_TOOLS is set, as `.ci/run` does, it fails instead.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from turbofs.testing.children import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
TOOLS_DIR = ROOT / ".cache" / "tools" / "bin"
REQUIRED_BY_ENVIRONMENT = "TURBOFS_REQUIRE_TOOLS"

_PJDFSTEST_PREFIX = "pjdfstest::tests::"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_VERDICT = re.compile(r"^(\S+) +(ok|FAILED|skipped)$", re.MULTILINE)
_LAST_LINES = 60


class ToolMissingError(Exception):
    """A test program is not on this machine; the message says how to get it."""


@dataclass(frozen=True)
class Verdict:
    """What `pjdfstest` said of one test: `ok`, `FAILED` or `skipped`, and why."""

    word: str
    detail: str = ""


def find_tool(name: str) -> Path:
    """The program *name*. Raises ToolMissingError where there is none, AssertionError where the environment wants it."""
    found = shutil.which(name, path=os.pathsep.join([str(TOOLS_DIR), os.environ.get("PATH", os.defpath)]))
    if found is not None:
        return Path(found)
    reason = f"there is no {name} on this machine: run helpers/setup test"
    assert not os.environ.get(REQUIRED_BY_ENVIRONMENT), reason
    raise ToolMissingError(reason)


def run_tool(
    name: str,
    *arguments: str | Path,
    cwd: Path,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> str:
    """What the program prints, once it has succeeded. Raises AssertionError, with its last lines, where it fails."""
    done = _run([find_tool(name), *arguments], cwd, limit_s, environment)
    assert done.returncode == 0, _told(done)
    return done.stdout


def run_fsx(path: Path, config: str, *, operations: int, seed: int, artifacts: Path, limit_s: float) -> None:
    """That many random operations on the file *path*, each read checked; *config* names a file in `tests/data`.

    Raises AssertionError with the last operations where a byte is wrong; what the file should hold lies in *artifacts*.
    """
    arguments: list[str | Path] = ["-N", str(operations), "-S", str(seed), "-f", DATA / config, "-P", artifacts, path]
    told = run_tool("fsx", *arguments, cwd=artifacts, limit_s=limit_s)
    assert "All operations completed A-OK!" in told, told


def run_pjdfstest(
    path: Path, *, other: Path | None = None, names: Iterable[str] = (), limit_s: float
) -> dict[str, Verdict]:
    """What each test said on the directory *path*; *names*: only these.

    *other* is a directory of another file system; without it, what crosses file systems is skipped.
    """
    arguments: list[str | Path] = ["-c", DATA / "pjdfstest.toml", "-p", path]
    if other is not None:
        arguments += ["-s", other]
    if exact := [f"{_PJDFSTEST_PREFIX}{name}" for name in names]:
        arguments += ["-e", "--", *exact]
    done = _run([find_tool("pjdfstest"), *arguments], path, limit_s, {"RUST_BACKTRACE": "0"})
    report = _COLOUR.sub("", done.stdout)
    total = re.search(r"^Summary: .* (\d+) total$", report, re.MULTILINE)
    assert total is not None, f"pjdfstest did not come to its end:\n{_told(done)}"
    verdicts: dict[str, Verdict] = {}
    parts = _VERDICT.split(report[: total.start()])[1:]
    for name, word, detail in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        verdicts[name] = Verdict(word, " ".join(detail.split()))
    assert len(verdicts) == int(total[1]), f"pjdfstest prints what is not understood here:\n{_told(done)}"
    return verdicts


def failed(verdicts: Mapping[str, Verdict]) -> dict[str, str]:
    """The tests that failed, each with what it said."""
    return {name: each.detail for name, each in verdicts.items() if each.word == "FAILED"}


def _run(
    command: Iterable[str | Path], cwd: Path, limit_s: float, environment: Mapping[str, str] | None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=limit_s,
        check=False,
        preexec_fn=die_with_parent,
    )


def _told(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stdout.splitlines()
    return f"{' '.join(done.args)} ended with {done.returncode}:\n" + "\n".join(lines[-_LAST_LINES:])
