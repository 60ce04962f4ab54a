"""Single files of runs that average their weights: what is trained, and the average, keep apart."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_elastic_zero.formats import WEIGHT, ReadRequest, open_checkpoint
from lightning_elastic_zero.layout import Transfer
from tests.engine._pool import Pools

pytestmark = pytest.mark.engine


def fit_averaged(path: str) -> dict[str, dict[str, torch.Tensor]]:
    """Fit with an average of the weights; give what is trained, and its average."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import WeightAveraging
    from lightning.pytorch.demos.boring_classes import BoringModel

    module, average = BoringModel(), WeightAveraging()
    held: dict[str, dict[str, torch.Tensor]] = {}

    class Look(pl.Callback):
        """Saves in the midst of training."""

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(path)
                assert average._average_model is not None
                for name, model in (("now", module), ("mean", average._average_model.module)):
                    held[name] = {k: v.detach().clone() for k, v in model.state_dict().items()}

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=4,
        limit_train_batches=4,
        limit_val_batches=0,
        callbacks=[average, Look()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    return held


def test_averaged_weights_are_not_the_trained_ones(pools: Pools, tmp_path: Path) -> None:
    """The optimizer's state belongs to what is trained; the average stays the callback's."""
    path = tmp_path / "averaged.ckpt"
    (held,) = pools.run(1, partial(fit_averaged, str(path)))
    assert not torch.equal(held["now"]["layer.weight"], held["mean"]["layer.weight"])
    reader = open_checkpoint(path)
    for name, wanted in held["now"].items():
        target = torch.empty(wanted.numel())
        run = Transfer(name, 0, wanted.numel(), 0, 0, 0, 0, 0)
        reader.read([ReadRequest(WEIGHT, run, target)], lambda _: None)
        assert torch.equal(target.view_as(wanted), wanted)
    kept = reader.module_state(0, 1).client_state
    assert kept["current_model_state"] == {}
    assert int(kept["averaging_state"]["n_averaged"]) > 0
    for name, wanted in held["mean"].items():
        assert torch.equal(kept["state_dict"][name], wanted)
    reader.close()
