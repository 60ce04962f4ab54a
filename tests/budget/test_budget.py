"""What saving and loading may cost: bytes and memory in proportion to the state, never more."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.budget._budget_ranks import STATE_BYTES
from tests.timeouts import HANG_TIMEOUT_S

HERE = Path(__file__).parent
EXTRA_BYTES = 64e6
"""Memory above own state: one bounded chunk, and what Python and torch need besides."""


def run_ranks(what: str, ranks: int, stage: int, path: Path) -> list[dict[str, int]]:
    """Run ranks in processes of their own; give what each measured."""
    out = path.with_name(f"{what}-{ranks}-{stage}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(HERE / "_budget_ranks.py"), what, str(ranks), str(port)]
    process = subprocess.Popen(
        [*command, str(stage), str(path), str(out)],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(HERE.parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=HANG_TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    files = [Path(f"{out}.{rank}") for rank in range(ranks)]
    # A rank's word counts, not its exit: DeepSpeed on a CPU may abort once all is done.
    assert all(file.exists() for file in files), output.decode(errors="replace")[-3000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.engine
def test_a_rank_reads_what_it_needs_into_place(tmp_path: Path) -> None:
    """Any rank count reads the state once in all, and holds one bounded chunk more than its own.

    Bytes by the system's count of what was read, summed over ranks, at most 1.05 times the state;
    anonymous memory at most 64 MB above a rank's own state; a save of as little, and its files no
    larger than the state and a hundredth.
    """
    path = tmp_path / "big.ckpt"
    for saved in run_ranks("save", 2, 3, path):
        assert saved["extra"] < EXTRA_BYTES
        assert STATE_BYTES <= saved["written"] <= 1.01 * STATE_BYTES
    for ranks, stage in ((3, 2), (1, 3)):
        loaded = run_ranks("load", ranks, stage, path)
        assert sum(rank["read"] for rank in loaded) <= 1.05 * STATE_BYTES
        assert sum(rank["read"] for rank in loaded) >= STATE_BYTES
        for rank in loaded:
            # Not nothing either: a kernel without these counts would let everything pass.
            assert 0 < rank["extra"] < EXTRA_BYTES
    # An evaluation reads the masters, a third of the state, and no byte of optimizer state.
    evaluated = run_ranks("evaluate", 2, 3, path)
    assert sum(rank["read"] for rank in evaluated) <= 1.05 * STATE_BYTES / 3
