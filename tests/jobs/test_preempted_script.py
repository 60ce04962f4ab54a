"""A script whose ranks Lightning starts: SIGTERM to the first rank, then a restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.jobs._job import (
    AT,
    EXAMPLE,
    NOTICED,
    STEPS,
    Undisturbed,
    arguments,
    check_steps,
    read_lines,
    repeated_steps,
    start_process,
)
from tests.support.processes import HANG_TIMEOUT_S, free_port
from tests.support.ranks import ROOT, environment

pytestmark = [pytest.mark.engine, pytest.mark.long]


def start(folder: Path, devices: int) -> subprocess.Popen[bytes]:
    """Start the example on a number of ranks, all in one process group of the system."""
    command = [
        *(sys.executable, str(ROOT / "examples" / "cli.py"), "fit"),
        *("--config", str(EXAMPLE / "fit.yaml"), *arguments(folder)),
        f"--trainer.devices={devices}",
        "--trainer.callbacks+=lightning_elastic_zero.PreemptionCheckpoint",
    ]
    settings = {"RUN_DIR": str(folder), "MASTER_PORT": str(free_port())}
    return start_process(command, folder / "log", {**environment(), **settings})


def test_a_preempted_script_exits_with_its_code_and_resumes_on_three_devices(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    (hold := tmp_path / f"hold-{AT}").touch()
    processes = [start(tmp_path, 2)]
    end = time.monotonic() + HANG_TIMEOUT_S

    def output() -> str:
        return (tmp_path / "log").read_text()

    def wait_until(condition: Callable[[], bool]) -> None:
        while not condition():
            assert time.monotonic() < end, output()[-4000:]
            time.sleep(0.1)

    try:
        wait_until(lambda: any(r.is_step and r.step >= AT for r in read_lines(tmp_path)))
        os.kill(processes[0].pid, signal.SIGTERM)
        wait_until(lambda: NOTICED in output())
        hold.unlink()
        assert processes[0].wait(HANG_TIMEOUT_S) == 75, output()[-4000:]
        processes.append(start(tmp_path, 3))
        assert processes[1].wait(HANG_TIMEOUT_S) == 0, output()[-4000:]
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    lines = read_lines(tmp_path)
    check_steps(lines, undisturbed)
    assert max(line.step for line in lines) == STEPS
    assert list(repeated_steps(lines).values()) == [0]
