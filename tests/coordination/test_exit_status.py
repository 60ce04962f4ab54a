"""A finished rank exits with its own status, whatever its threads still have to do.

CPython ends a thread that returns from C++ to an interpreter that is shutting down. In the middle
of C++, this aborts the process (SIGABRT, 134), which a launcher takes for a failed job. Here,
threads are delayed on purpose, so that it happens whenever nothing waits for them.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.ranks import ROOT, environment

WORLD = 2
STATUS = {
    "left_open": 0,
    "closed": 0,
    "destroyed": 0,
    "exits": 0,
    "raises": 1,
    # The host of the store is stopped, and answers while the rank that waits for its thread ends.
    "host_is_stopped": 0,
}


def statuses(wanted: dict[str, int], timeout_s: float) -> dict[str, list[int]]:
    """Return the exit statuses of ranks, by the program of ``_exit_programs`` that they run.

    The fork server cannot run them: with all of its imports, the hooks at exit take so long that
    gloo's workers finish before the end of the interpreter.
    """
    call = [sys.executable, "-m", "tests.coordination._exit_programs", json.dumps(wanted)]
    done = subprocess.run(
        call, cwd=ROOT, env=environment(), capture_output=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, list[int]] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def ends() -> dict[str, list[int]]:
    return statuses(dict.fromkeys(STATUS, 1), 280)


@pytest.mark.long
@pytest.mark.parametrize("program", STATUS)
def test_a_rank_exits_with_its_own_status(program: str, ends: dict[str, list[int]]) -> None:
    """Even if a worker of gloo still holds the tensors of the last collective."""
    assert ends[program] == [STATUS[program]] * WORLD


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_rank_of_many_aborts_at_exit(pytestconfig: pytest.Config) -> None:
    """For comparison, it prints how many ranks abort without this library."""
    worlds = int(pytestconfig.getoption("--exits"))
    found = statuses({"left_open": worlds, "stock": 10}, 3500)
    for program, ended in found.items():
        print(f"{program}: {sum(map(bool, ended))} of {len(ended)} aborted")
    assert found["left_open"] == [0] * worlds * WORLD
