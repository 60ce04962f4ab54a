"""Readers given invalid files: no crash, no write, and no more memory than the file's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.formats._fuzz_runner import fuzz
from tests.support.ranks import ForkServer


@pytest.mark.cases(1)
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("program", ["_fuzz_files", "_fuzz_metadata"])
@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_reader_reads_or_refuses(
    many: bool,
    program: str,
    pytestconfig: pytest.Config,
    seed: int,
    fork_server: ForkServer,
    tmp_path: Path,
) -> None:
    count = pytestconfig.getoption("--fuzz-cases") if many else 250
    fuzz(program, count, seed, tmp_path, fork_server)
