"""Readers given invalid files: no crash, no write, and no more memory than the file's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core._fuzz_runner import fuzz

PROGRAMS = ["_fuzz_files", "_fuzz_metadata"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_reader_reads_or_refuses(program: str, seed: int, tmp_path: Path) -> None:
    fuzz(program, 250, seed, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_reader_reads_or_refuses_in_each_of_many_cases(
    program: str, pytestconfig: pytest.Config, seed: int, tmp_path: Path
) -> None:
    fuzz(program, pytestconfig.getoption("--fuzz-cases"), seed, tmp_path)
