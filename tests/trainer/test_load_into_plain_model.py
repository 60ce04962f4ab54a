"""Weights into a plain model, as the documentation says: no DeepSpeed, no strategy of ours."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

from tests.support.fits import Data, FitSpec, RegressionNet, evaluate, fit
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(("stage", "weights_only"), [(1, False), (2, True), (3, False), (3, True)])
def test_converted_weights_load_into_a_plain_model(
    stage: int, weights_only: bool, worlds: Pools, tmp_path: Path
) -> None:
    """As a file for `load_from_checkpoint` and any Trainer; or as a state dict."""
    plan = FitSpec(str(tmp_path), stage, checkpoint={"save_weights_only": weights_only})
    path = worlds.run(2, partial(fit, plan))[0]["best"]
    plan = FitSpec(str(tmp_path), stage, ckpt_path=path, seed=5)
    wanted = worlds.run(1, partial(evaluate, plan, "test"))[0]["loss"]

    single = str(tmp_path / "model.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        convert_zero_checkpoint_to_fp32_state_dict(path, single)
        net = RegressionNet.load_from_checkpoint(single)
        state = get_fp32_state_dict_from_zero_checkpoint(path)
        other = RegressionNet(seed=7)
        other.configure_model()
        other.load_state_dict(state)
        trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
        loaded = trainer.test(net, Data(), verbose=False)
        named = trainer.test(RegressionNet(seed=9), Data(), ckpt_path=single, verbose=False)
    for name, value in net.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    for found in (loaded, named):
        assert found[0]["test_loss"] == pytest.approx(wanted, rel=1e-5)
