"""Programs of the examples' tests: each a process group of its own, ended by its id."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.timeouts import HANG_TIMEOUT_S


def output_of(command: Sequence[str | Path], folder: Path, environment: Mapping[str, str]) -> str:
    """Run a command that has to succeed; return all that it printed."""
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=folder,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=HANG_TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, printed[-4000:]
    return printed
