"""Readers of files that anybody may have written: no crash, no write, no more memory than a file's.

2,000 cases of each reader behind ``long``, or as many as ``--fuzz-cases`` says.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core._fuzz_runner import fuzz

PROGRAMS = ["_fuzz_files", "_fuzz_metadata"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_reader_reads_or_refuses(program: str, seed: int, tmp_path: Path) -> None:
    """Whatever a file holds, a reader gives the value or an error of its own."""
    fuzz(program, 250, seed, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_reader_reads_or_refuses_in_each_of_many_cases(
    program: str, pytestconfig: pytest.Config, seed: int, tmp_path: Path
) -> None:
    """Whatever a file holds, a reader gives the value or an error of its own."""
    fuzz(program, pytestconfig.getoption("--fuzz-cases"), seed, tmp_path)
