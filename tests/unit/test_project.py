"""The project's own promises: modules stay small, documents name what exists, programs can be started."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(ROOT.glob("turbofs/**/*.py"))
DOCUMENTS = ["README.md", "CHANGELOG.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
PROGRAMS = ["helpers/setup", "helpers/test", "helpers/demo", ".ci/run", "helpers/merge_checkpoint.py"]
LARGEST_MODULE_LINES = 400


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def named_paths(document: str) -> set[str]:
    """The project's paths in the code spans and blocks of *document*: those that begin with one of its folders."""
    code = re.findall(r"`([^`\n]+)`", text(document))
    code += re.findall(r"^ {4}(\S.*)$", text(document), re.MULTILINE)
    folders = r"(?:turbofs|helpers|tests|docs|systemd|\.ci)/[\w./*@-]*\w[/*]?"
    return {path.rstrip(".") for span in code for path in re.findall(rf"(?<![\w./$-]){folders}", span)}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_stay_small_enough_to_read(module: Path) -> None:
    lines = module.read_text(encoding="utf-8").count("\n")
    assert lines <= LARGEST_MODULE_LINES, f"{lines} lines: split it by what its parts mean"


@pytest.mark.parametrize("document", ["README.md", "docs/DEVELOPMENT.md", "docs/ARCHITECTURE.md"])
def test_documents_name_paths_that_exist(document: str) -> None:
    missing = [path for path in sorted(named_paths(document)) if not list(ROOT.glob(path.rstrip("/")))]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    folder = (ROOT / document).parent
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text(document))
    assert [target for target in targets if not (folder / target).exists()] == []


def test_every_room_and_module_at_the_top_is_in_the_architecture() -> None:
    rooms = {f"turbofs/{path.parent.name}/" for path in ROOT.glob("turbofs/*/__init__.py")}
    assert rooms <= set(re.findall(r"`(turbofs/\w+/)`", text("docs/ARCHITECTURE.md")))


def test_every_module_beside_the_rooms_has_a_row_in_the_table() -> None:
    modules = {f"turbofs/{path.name}" for path in ROOT.glob("turbofs/*.py")} - {"turbofs/__init__.py"}
    assert modules <= named_paths("docs/DEVELOPMENT.md")


def test_every_folder_of_tests_is_explained() -> None:
    folders = {f"tests/{path.name}/" for path in (ROOT / "tests").iterdir() if any(path.glob("test_*.py"))}
    assert folders <= set(re.findall(r"`(tests/\w+/)`", text("docs/DEVELOPMENT.md")))


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_can_be_started(program: str) -> None:
    assert os.access(ROOT / program, os.X_OK)
    if text(program).startswith("#!/usr/bin/env bash"):
        subprocess.run(["bash", "-n", ROOT / program], check=True)


@pytest.mark.parametrize("program", ["helpers/setup", "helpers/test", "helpers/demo"])
def test_programs_explain_themselves(program: str) -> None:
    done = subprocess.run([ROOT / program, "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert program in done.stdout


def test_setup_refuses_what_it_does_not_know() -> None:
    done = subprocess.run(
        [ROOT / "helpers/setup", "everything"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "usage" in done.stderr


def test_commands_of_the_package_are_those_that_the_readme_names() -> None:
    scripts = tomllib.loads(text("pyproject.toml"))["project"]["scripts"]
    assert scripts.keys() == {"turbofs", "mount.turbofs"}
    for name in scripts:
        assert name in text("README.md")


def test_no_program_outside_the_package_is_imported_by_it() -> None:
    names = "|".join(path.stem for path in (ROOT / "helpers").glob("*.py"))
    pattern = re.compile(rf"^\s*(?:from|import) (?:helpers|tests|{names})\b", re.MULTILINE)
    assert [str(path) for path in MODULES if pattern.search(path.read_text(encoding="utf-8"))] == []


def test_plain_programs_do_not_import_turbofs() -> None:
    pattern = re.compile(r"^\s*(?:from|import) (?:turbofs|torch)\b", re.MULTILINE)
    for path in (ROOT / "helpers").glob("*.py"):
        assert not pattern.search(path.read_text(encoding="utf-8")), path.name
