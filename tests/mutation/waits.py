"""Break each wait of ``_waits`` once, and see a test fail: ``python -m tests.mutation.waits``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.mutation.__main__ import PACKAGE
from tests.mutation._operators import Mutant
from tests.mutation._runner import Case, Outcome, import_for_ranks, import_for_tests, outcomes
from tests.mutation._waits import WAITS, Wait


def case_of(wait: Wait) -> Case:
    """Return a wait, broken.

    Raises:
        ValueError: it does not stand once in its file.
    """
    source = (PACKAGE / wait.file).read_text(encoding="utf-8")
    if source.count(wait.written) != 1:
        msg = f"{wait.name}: {wait.file} has {source.count(wait.written)} of {wait.written!r}"
        raise ValueError(msg)
    start = source.index(wait.written)
    line = source.count("\n", 0, start) + 1
    mutant = Mutant(start, start + len(wait.written), line, wait.broken, wait.name)
    return Case(PACKAGE, wait.file, source, wait.tests, mutant)


def run(waits: Sequence[Wait], jobs: int) -> list[Outcome]:
    """Break each of them; print what notices it.

    Raises:
        AssertionError: tests fail without any change.
    """
    cases = [case_of(wait) for wait in waits]
    for outcome in outcomes([*{case.tests: case.unchanged() for case in cases}.values()], jobs):
        assert outcome.survived, f"{outcome.case.tests} fail as they are: {outcome.noticed_by}"
    names = {case.text(): wait.name for case, wait in zip(cases, waits, strict=True)}
    found = []
    for outcome in outcomes(cases, jobs):
        found.append(outcome)
        by = "SURVIVED" if outcome.survived else outcome.noticed_by
        print(f"{names[outcome.case.text()]}: {by}", flush=True)
    return found


def main() -> int:
    """Run the check; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="those whose name has one of these in it")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    wanted = [w for w in WAITS if not options.names or any(n in w.name for n in options.names)]
    import_for_tests()
    if any("tests/engine" in test or "tests/trainer" in test for w in wanted for test in w.tests):
        import_for_ranks()
    survived = sum(outcome.survived for outcome in run(wanted, options.jobs))
    print(f"{len(wanted)} waits broken, {survived} unnoticed")
    return 1 if survived or not wanted else 0


if __name__ == "__main__":
    sys.exit(main())
