"""What the system says of a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from lightning_elastic_zero.core.processes import ProcessKey, ProcessState, machine, start_time

WAIT_S = 20.0

pytestmark = pytest.mark.skipif(
    start_time(os.getpid()) is None, reason="this system does not tell when a process has started"
)


def wait_for(found: Callable[[], ProcessState], wanted: ProcessState) -> None:
    """Wait until the system says so."""
    end = time.monotonic() + WAIT_S
    while found() is not wanted:
        assert time.monotonic() < end, found()
        time.sleep(0.01)


def test_states_of_a_process() -> None:
    """It runs, is stopped, runs again; it has ended before its parent takes note, and after."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
    )
    try:
        key = replace(
            ProcessKey.of_this_process(), pid=child.pid, started=start_time(child.pid) or ""
        )
        assert key.state() is ProcessState.RUNNING
        os.kill(child.pid, signal.SIGSTOP)
        wait_for(key.state, ProcessState.STOPPED)
        os.kill(child.pid, signal.SIGCONT)
        wait_for(key.state, ProcessState.RUNNING)
        os.kill(child.pid, signal.SIGKILL)
        wait_for(key.state, ProcessState.ENDED)
    finally:
        child.kill()
        child.wait(WAIT_S)
    assert key.state() is ProcessState.ENDED


def test_this_process_runs() -> None:
    """Its key is the same at each look, and of this machine."""
    key = ProcessKey.of_this_process()
    assert key == ProcessKey.of_this_process()
    assert key.pid == os.getpid()
    assert len(machine().split(" ")) >= 2
    assert key.state() is ProcessState.RUNNING


def test_a_number_that_was_given_out_again() -> None:
    """Another process has the number of one that has ended."""
    key = ProcessKey.of_this_process()
    assert replace(key, started=str(int(key.started) - 1)).state() is ProcessState.ENDED


@pytest.mark.parametrize("change", [{"machine": "another"}, {"started": ""}])
def test_nothing_is_known_of_other_machines(change: dict[str, str]) -> None:
    """Nor of a process whose machine did not tell when it has started."""
    state = replace(ProcessKey.of_this_process(), **change).state()  # type: ignore[arg-type]
    assert state is ProcessState.UNKNOWN
