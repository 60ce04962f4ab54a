"""axolotl finds the plugin by its name, and its Trainer continues elastically."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.ranks import Pools

pytest.importorskip("transformers")
pytest.importorskip("axolotl.integrations.base")

from tests.integrations import _axolotl_programs as programs
from tests.integrations._hf_programs import TrainerCase


@pytest.mark.engine
@pytest.mark.long
def test_the_plugin_binds_the_trainer(hf_ranks: Pools, tmp_path: Path) -> None:
    """Stopped on 2 ranks, resumed on 3: state bit for bit, the same samples and rates."""
    full_run, *_ = hf_ranks.run(
        2, partial(programs.train, TrainerCase(str(tmp_path / "whole"), state_at=(10,)))
    )
    folder = str(tmp_path / "run")
    hf_ranks.run(2, partial(programs.train, TrainerCase(folder, stop_at=12)))
    run, *_ = hf_ranks.run(3, partial(programs.train, TrainerCase(folder, resume=True)))
    assert run.first_state.keys() == full_run.states[10].keys()
    for name, tensor in full_run.states[10].items():
        assert torch.equal(run.first_state[name], tensor), name
    for step in range(11, 17):
        assert run.samples[step] == full_run.samples[step], step
        assert run.rates[step] == full_run.rates[step], step
