"""No wait of a snapshot can be left out without a test that fails (``tests/mutation/_waits``)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.engine._worker_pool import ROOT, environment
from tests.mutation._waits import WAITS
from tests.timeouts import HANG_TIMEOUT_S


@pytest.mark.long
@pytest.mark.parametrize("name", [wait.name for wait in WAITS])
def test_a_broken_wait_is_noticed(name: str) -> None:
    """It is broken in a process of its own, which has not imported the package before."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutation.waits", name],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        timeout=HANG_TIMEOUT_S,
        check=False,
    )
    told = done.stdout.decode() + done.stderr.decode()
    assert done.returncode == 0, told
    assert "1 waits broken, 0 unnoticed" in told, told
