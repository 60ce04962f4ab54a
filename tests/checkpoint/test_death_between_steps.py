"""If a rank dies between two steps, the others end at once, without waiting for a timeout."""

from __future__ import annotations

import os
import signal
import time
import warnings
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback

from tests.support.deterministic_training import DeterministicModel
from tests.support.fits import elastic, quiet_trainer
from tests.support.launch import Job, run_ranks
from tests.support.processes import PROMPT_TIMEOUT_S
from tests.support.ranks import ForkServer


class KillAfterStep(Callback):
    """Kills a rank after the first step; the others continue when it is gone."""

    def __init__(self, folder: str, job: Job, dies: int) -> None:
        self.pid, self.job, self.dies = Path(folder) / "pid", job, dies

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if self.job.rank == self.dies:
            self.pid.write_text(str(os.getpid()))
        trainer.strategy.barrier()
        if self.job.rank == self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        while not _is_gone(self.pid.read_text()):
            time.sleep(0.01)
        # gloo has then seen its sockets close. Rank 0 continues first: its broadcast fails before
        # it is sent, so no rank will ever receive it.
        time.sleep(0.5 if self.job.rank == 0 else 1.5)


def _is_gone(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def lose_a_rank(folder: str, dies: int, stage: int, job: Job) -> None:
    warnings.simplefilter("ignore")
    job.set_environment()
    callback = KillAfterStep(folder, job, dies)
    strategy = elastic(stage=stage, async_save=True)
    trainer = quiet_trainer(strategy, callback, max_steps=3)
    try:
        trainer.fit(DeterministicModel())
    except RuntimeError as error:
        job.note("raised", str(error))
        raise


pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("dies", "stage"),
    [
        (2, 1),
        *(
            pytest.param(dies, stage, marks=pytest.mark.long)
            for dies in range(4)
            for stage in (0, 1, 3)
            if (dies, stage) != (2, 1)
        ),
    ],
)
def test_ranks_end_when_another_dies_between_steps(
    dies: int, stage: int, fork_server: ForkServer, tmp_path: Path
) -> None:
    """Lightning hides a failed broadcast; a rank could wait in a later collective."""
    program = partial(lose_a_rank, str(tmp_path), dies, stage)
    ranks = run_ranks(program, 4, fork_server, store_of_launcher=True, timeout_s=PROMPT_TIMEOUT_S)
    codes = {rank: result.returncode for rank, result in enumerate(ranks)}
    assert codes.pop(dies) == -signal.SIGKILL
    assert set(codes.values()) == {1}, ranks
    for rank in codes:
        raised = ranks[rank].notes["raised"]
        assert "gloo" in raised  # a connection that was lost
        assert "Timed out" not in raised
