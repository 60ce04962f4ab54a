"""A script whose ranks Lightning starts itself: SIGTERM to the first one, then the same again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.elastic._job import (
    EXAMPLE,
    STEPS,
    Undisturbed,
    arguments,
    check_steps,
    read_lines,
    steps_taken_again,
)
from tests.support.processes import HANG_TIMEOUT_S, free_port
from tests.support.ranks import ROOT, environment

pytestmark = [pytest.mark.engine, pytest.mark.long]

AT = 12

NOTICED = "all ranks save and end after this batch"
"""What a rank writes when it receives the signal."""


def start(folder: Path, devices: int) -> subprocess.Popen[bytes]:
    """Start the example on as many ranks, all in one process group."""
    command = [
        *(sys.executable, str(ROOT / "examples" / "cli.py"), "fit"),
        *("--config", str(EXAMPLE / "fit.yaml"), *arguments(folder)),
        f"--trainer.devices={devices}",
        "--trainer.callbacks+=lightning_elastic_zero.PreemptionCheckpoint",
    ]
    settings = {"RUN_DIR": str(folder), "MASTER_PORT": str(free_port())}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment(), **settings},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def test_a_preempted_script_exits_with_its_code_and_resumes_on_three_devices(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    (hold := tmp_path / f"hold-{AT}").touch()
    processes = [start(tmp_path, 2)]
    try:
        end = time.monotonic() + HANG_TIMEOUT_S
        while not any(line.is_step and line.step >= AT for line in read_lines(tmp_path)):
            assert time.monotonic() < end, (tmp_path / "log").read_text()[-4000:]
            time.sleep(0.1)
        os.kill(processes[0].pid, signal.SIGTERM)
        while NOTICED not in (tmp_path / "log").read_text():
            assert time.monotonic() < end, (tmp_path / "log").read_text()[-4000:]
            time.sleep(0.1)
        hold.unlink()
        code = processes[0].wait(HANG_TIMEOUT_S)
        assert code == 75, (tmp_path / "log").read_text()[-4000:]
        processes.append(start(tmp_path, 3))
        assert processes[1].wait(HANG_TIMEOUT_S) == 0, (tmp_path / "log").read_text()[-4000:]
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    lines = read_lines(tmp_path)
    check_steps(lines, undisturbed)
    assert max(line.step for line in lines) == STEPS
    assert list(steps_taken_again(lines).values()) == [0]
