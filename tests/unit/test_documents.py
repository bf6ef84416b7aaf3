"""What docs/ promises exists: the tests that SEMANTICS names, and the names that INTERFACE documents."""

from __future__ import annotations

import ast
import dataclasses
import re
from functools import cache
from pathlib import Path

import pytest

from turbofs.config import Config, FsConfig, MountConfig, ReadConfig, SourceConfig, WriteConfig
from turbofs.fs.hint_catalogue import CATALOGUE

ROOT = Path(__file__).parents[2]
SEMANTICS = (ROOT / "docs" / "SEMANTICS.md").read_text(encoding="utf-8")
INTERFACE = (ROOT / "docs" / "INTERFACE.md").read_text(encoding="utf-8")
NAMED_TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", SEMANTICS)))
ROOMS = {"mount": MountConfig, "source": SourceConfig, "read": ReadConfig, "write": WriteConfig, "fs": FsConfig}


@cache
def names_of_tests(file: Path) -> frozenset[str]:
    if not file.exists():
        return frozenset()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


@pytest.mark.parametrize(("file", "name"), NAMED_TESTS, ids=[f"{file}::{name}" for file, name in NAMED_TESTS])
def test_every_promise_names_a_test_that_exists(file, name):
    assert name in names_of_tests(ROOT / file), f"docs/SEMANTICS.md promises {file}::{name}, which does not exist"


def test_every_numbered_promise_names_a_test():
    promises = re.split(r"\n(?=\d+\. |#)", SEMANTICS.split("\n## 1. ", 1)[1].split("\n## Planned", 1)[0])
    numbered = [promise for promise in promises if re.match(r"\d+\. ", promise)]
    assert len(numbered) > 80
    assert [promise for promise in numbered if not re.search(r"`tests/[\w/]+\.py::test_\w+`", promise)] == []


def test_promises_are_numbered_without_gaps():
    for section in re.split(r"\n## ", SEMANTICS)[1:]:
        numbers = [int(number) for number in re.findall(r"^(\d+)\. ", section.split("\n", 1)[1], re.MULTILINE)]
        assert numbers == list(range(1, len(numbers) + 1)), section.split("\n", 1)[0]


@pytest.mark.parametrize("spec", CATALOGUE.values(), ids=lambda spec: spec.attribute)
def test_every_attribute_is_documented_with_what_it_takes_and_when(spec):
    (row,) = re.findall(rf"^\| `{re.escape(spec.attribute)}` \|.*$", INTERFACE, re.MULTILINE)
    _, _, access, where, works, *_ = (cell.strip() for cell in row.split("|"))
    assert access == ("set" if spec.settable else "read")
    assert works.startswith("since" if spec.works else "planned")
    if spec.directory_only:
        assert where == "directory"


def test_no_attribute_is_documented_that_does_not_exist():
    documented = set(re.findall(r"user\.turbofs\.\w+", INTERFACE + SEMANTICS))
    assert documented <= {str(attribute) for attribute in CATALOGUE}


def config_keys():
    for room, room_class in ROOMS.items():
        for field in dataclasses.fields(room_class):
            yield room, re.sub(r"_(bytes|s|kib)$", "", field.name)


@pytest.mark.parametrize(("room", "key"), list(config_keys()))
def test_every_configuration_key_is_documented(room, key):
    table = INTERFACE.split(f"| key of `[{room}]` |", 1)[1].split("\n\n", 1)[0]
    assert re.search(rf"^\| (`\w+`, )*`{key}`[ ,]", table, re.MULTILINE), f"[{room}] {key} is not in docs/INTERFACE.md"


def test_every_room_of_the_configuration_is_looked_at():
    assert {field.name for field in dataclasses.fields(Config)} == set(ROOMS)


@pytest.mark.parametrize("document", ["SEMANTICS.md", "INTERFACE.md"])
def test_links_between_documents_lead_somewhere(document):
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert (ROOT / "docs" / target).exists(), f"docs/{document} links to {target}"
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors
