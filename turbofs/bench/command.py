"""One run of one scene: into the namespaces, measure, print, judge."""

from __future__ import annotations

import time
from pathlib import Path

from turbofs.bench import isolation, machine, read, write
from turbofs.bench.harness import MEASUREMENT_ERRORS, Report, Scene, Settings, report_progress
from turbofs.errors import InvalidRequestError

SCENES: dict[str, Scene] = {scene.name: scene for scene in (read.SCENE, write.SCENE)}


def run(scene_name: str, *, quick: bool = False, json_file: Path | None = None) -> int:
    """Measure a scene and print its report; returns the exit code.

    0 where every row meets its bar; of a quick run also where rows miss theirs, as long as all were measured.
    Raises InvalidRequestError for a scene that does not exist.
    """
    scene = SCENES.get(scene_name)
    if scene is None:
        raise InvalidRequestError(f"there is no scene {scene_name!r}", advice=f"scenes: {', '.join(sorted(SCENES))}")
    if json_file is not None:
        json_file.touch()  # an unwritable place shows now, not after a quarter of an hour
    code = isolation.enter(_arguments(scene_name, quick=quick, json_file=json_file))
    if code is not None:
        return code
    report = measure(scene, Settings(quick=quick))
    report.print()
    if json_file is not None:
        json_file.write_text(report.json_line() + "\n")
    return 0 if report.passed() or (quick and not report.notes) else 1


def measure(scene: Scene, settings: Settings) -> Report:
    """Run *scene*; whatever could not be measured is a row without a value."""
    report = Report(scene.name, scene.rows, {**machine.describe(), "mode": "quick" if settings.quick else "full"})
    began = time.monotonic()
    try:
        scene.run(report, settings)
    except MEASUREMENT_ERRORS as error:
        # The services that all groups share did not come up.
        report_progress(f"failed: {error}")
        for row in scene.rows:
            report.notes.setdefault(row.name, str(error))
    report.machine["seconds"] = round(time.monotonic() - began)
    return report


def _arguments(scene_name: str, *, quick: bool, json_file: Path | None) -> list[str]:
    return [
        scene_name,
        *(["--quick"] if quick else []),
        *(["--json", str(json_file.absolute())] if json_file is not None else []),
    ]
