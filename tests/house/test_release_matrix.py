"""tests/releases runs the releases that pyproject.toml and the README promise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.releases._cells import CELLS, EXCHANGES, PINNED, REFUSED
from tests.releases._core_matrix import TESTS, deselection

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()

DEEPSPEEDS = ("0.16.0", "0.16.9", "0.17.0", "0.17.5", "0.18.4", "0.18.9", "0.19.0", "0.19.8")
LIGHTNINGS = ("2.5.0.post0", "2.5.6", "2.6.0", "2.6.6")


def promised(package: str) -> Requirement:
    found = re.search(rf'^ +"({package}[><=!][^"]*)",', PYPROJECT, re.MULTILINE)
    assert found is not None
    return Requirement(found[1])


def test_the_matrix_contains_each_minor_release() -> None:
    assert {cell.deepspeed for cell in CELLS} == {*DEEPSPEEDS}
    assert {cell.lightning for cell in CELLS} == {*LIGHTNINGS}
    assert {cell.base.python for cell in CELLS} == {"3.10", "3.11", "3.12", "3.13"}
    assert {cell.base.torch.rpartition(".")[0] for cell in CELLS} >= {"2.6", "2.9", "2.13"}
    assert len({*CELLS}) == len(CELLS)


def test_cells_are_within_the_promised_ranges() -> None:
    for package in ("deepspeed", "lightning"):
        specifier = promised(package).specifier
        assert all(specifier.contains(getattr(cell, package)) for cell in CELLS)
        lowest = min(Version(getattr(cell, package)) for cell in CELLS)
        assert str(specifier).find(f">={lowest.major}.{lowest.minor}") >= 0
    assert not promised("deepspeed").specifier.contains(REFUSED.deepspeed)
    assert min(Version(cell.base.torch) for cell in CELLS) == Version("2.6")
    assert promised("torch").specifier.contains("2.6.0")
    assert 'requires-python = ">=3.10"' in PYPROJECT


def test_the_readme_promises_the_same() -> None:
    lowest = "torch 2.6, DeepSpeed 0.16 and Lightning 2.5, or newer"
    assert lowest in " ".join(README.split())


def test_the_pinned_cell_has_the_pinned_releases() -> None:
    for pin in (f"torch=={PINNED.base.torch}", f"deepspeed=={PINNED.deepspeed}"):
        assert pin in CONSTRAINTS
    assert f"lightning=={PINNED.lightning}" in CONSTRAINTS


@pytest.mark.parametrize("package", ["deepspeed", "torch"])
def test_oldest_and_newest_releases_resume_each_other(package: str) -> None:
    releases = {
        cell: Version(cell.deepspeed if package == "deepspeed" else cell.base.torch)
        for cell in CELLS
    }
    ends = {min(releases.values()), max(releases.values())}
    assert any({releases[one], releases[other]} == ends for one, other in EXCHANGES)


def test_the_newest_release_skips_nothing() -> None:
    assert not deselection(PINNED)
    assert "not alignment" in deselection(min(CELLS, key=lambda cell: Version(cell.deepspeed)))


@pytest.mark.parametrize("test", TESTS)
def test_the_tests_of_cells_exist(test: str) -> None:
    file, _, function = test.partition("::")
    assert f"def {function or 'test_'}" in (ROOT / file).read_text(encoding="utf-8")


def rows_of_configurations() -> list[tuple[str, str]]:
    tables = (ROOT / "docs" / "configurations.md").read_text().partition("## What is refused")[0]
    rows = [line for line in tables.splitlines() if line.startswith("| ")]
    assert all(row.endswith(("| releases |", "| cells |", "| pinned |", "| |")) for row in rows)
    return [(row, row.split("|")[-2].strip()) for row in rows if not row.endswith("releases |")]


def test_the_page_of_configurations_matches_the_tests_of_cells() -> None:
    core = {test.partition("::")[0].removeprefix("tests/") for test in TESTS}
    named = {row: {*re.findall(r"`(\w+/test_\w+\.py)", row)} for row, _ in rows_of_configurations()}
    assert sum(map(bool, named.values())) > 10
    for row, releases in rows_of_configurations():
        assert not named[row] or (releases == "cells") == bool(named[row] & core), row


def test_every_supported_configuration_names_releases() -> None:
    for row, releases in rows_of_configurations():
        assert releases or re.search(r"refused|not run", row), row
