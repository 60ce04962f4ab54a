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


@pytest.mark.engine
@pytest.mark.long
def test_state_that_trl_does_not_save_is_named(hf_ranks: Pools, tmp_path: Path) -> None:
    """A resume within a generation shifts later ones; a moving reference model starts again."""
    args = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 4}
    case = TrainerCase(str(tmp_path), stage=2)
    _, wanted = hf_ranks.run(2, partial(programs.train_online, case))[0]
    found = {}
    for step in (4, 3):
        resume = str(tmp_path / f"checkpoint-{step}")
        case = TrainerCase(str(tmp_path), stage=2, resume=resume, args=args if step == 4 else {})
        found[step] = hf_ranks.run(2, partial(programs.train_online, case))[0]
    run, exact = found[4]
    assert exact == wanted[2:]
    (warning,) = run.warnings
    assert "TRL does not save the reference model" in warning
    run, shifted = found[3]
    assert shifted != wanted[2:]
    (warning,) = run.warnings
    assert "between two generations" in warning
    assert "Set save_steps to a multiple of 2" in warning
