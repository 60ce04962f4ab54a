"""A worker of ``selftest`` whose loads are broken: what the test of the test is made of.

Its first world saves at one stage only, and kills and measures nothing.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.api import load_checkpoint, save_checkpoint
from lightning_elastic_zero.engine.selftest_engine import (
    TrialModel,
    join_ranks,
    train,
    trial_engine,
)
from lightning_elastic_zero.selftest import rank_tasks, worker_main
from lightning_elastic_zero.selftest.checks import checkpoint_file, saved_name
from lightning_elastic_zero.selftest.worker_protocol import Request, Sender

STAGE = 1


def save_at_one_stage(request: Request, sender: Sender) -> None:
    """Save what the real task saves first."""
    join_ranks(request.device, request.collective_timeout_s)
    with trial_engine(TrialModel(1), STAGE) as engine:
        train(engine, 0, 2)
        state = rank_tasks._digests(engine)
        for mode in ("blocking", "background"):
            name = saved_name(STAGE, mode)
            with rank_tasks._checking(sender, name):
                path = Path(request.folder) / checkpoint_file(name)
                save_checkpoint(engine, path, rank_tasks.CLIENT)
                rank_tasks._tell_state(sender, name, state)


def load_but_for_an_element(load: Any, engine: Any, path: Path) -> object:
    """Load, and change the last bit of one element of what the background checkpoint held."""
    result = load(engine, path)
    is_last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    if path.name == checkpoint_file(saved_name(STAGE, "background")) and is_last:
        (state,) = [s for p, s in engine.optimizer.optimizer.state.items() if p.numel() > 99]
        state["exp_avg"][:1].view(torch.int32)[0] ^= 1
    return result


def main(asked: int, told: int) -> None:
    """Be a worker."""
    rank_tasks.TASKS = {**rank_tasks.TASKS, "save_all": save_at_one_stage}
    vars(rank_tasks)["load_checkpoint"] = partial(load_but_for_an_element, load_checkpoint)
    worker_main.main(asked, told)
