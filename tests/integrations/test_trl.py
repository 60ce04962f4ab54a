"""TRL's SFTTrainer continues exactly on another number of ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.ranks import Pools

pytest.importorskip("trl")
pytest.importorskip("datasets")
pytest.importorskip("peft")

from tests.integrations import _trl_programs as programs
from tests.integrations._hf_programs import TrainerCase


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.parametrize("lora", [False, True])
def test_fine_tuning_continues_on_another_count(
    lora: bool, hf_ranks: Pools, tmp_path: Path
) -> None:
    """Stopped on 2 ranks, resumed on 3: equal state; rates and losses of an uninterrupted run."""
    reference, *_ = hf_ranks.run(
        2, partial(programs.train, TrainerCase(str(tmp_path / "whole"), state_at=(10,), lora=lora))
    )
    folder = str(tmp_path / "run")
    hf_ranks.run(2, partial(programs.train, TrainerCase(folder, stop_at=12, lora=lora)))
    run, *_ = hf_ranks.run(3, partial(programs.train, TrainerCase(folder, resume=True, lora=lora)))
    assert run.first_state.keys() == reference.states[10].keys()
    assert run.first_state
    assert all("lora" in name for name in run.first_state) == lora
    for name, tensor in reference.states[10].items():
        assert torch.equal(run.first_state[name], tensor), name
    assert sorted(run.losses) == [*range(11, 17)]
    for step, loss in run.losses.items():
        assert run.rates[step] == reference.rates[step]
        assert abs(loss - reference.losses[step]) < 2e-6, step
