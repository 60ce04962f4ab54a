"""The mutants that need not be noticed are of lines that are there, in files that are mutated."""

from __future__ import annotations

from tests.mutation.__main__ import PACKAGE, TESTS, TESTS_ON_RANKS
from tests.mutation._operators import mutants_of
from tests.mutation._survivors import SURVIVORS
from tests.mutation._waits import WAITS
from tests.mutation.waits import case_of


def test_each_survivor_is_of_a_line_that_is_there() -> None:
    """``make mutants`` says so too, but only of the files that it is asked for."""
    there = {
        f"{file}: {mutant.name()}"
        for file in (*TESTS, *TESTS_ON_RANKS)
        for mutant in mutants_of((PACKAGE / file).read_text(encoding="utf-8"))
    }
    assert SURVIVORS.keys() <= there


def test_each_wait_that_is_broken_is_there() -> None:
    """Once in its file, and broken it is a program still."""
    assert len({wait.name for wait in WAITS}) == len(WAITS)
    for wait in WAITS:
        compile(case_of(wait).text(), wait.file, "exec")
