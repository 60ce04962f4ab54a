"""A first run prints two lines of this library, and hides known warnings of others."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

from lightning_elastic_zero.trainer.fit_warnings import FILTERED_WARNINGS, hide_known_warnings
from tests.support.processes import free_port, output_of
from tests.support.ranks import environment

FIRST_RUN = """
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning_elastic_zero import ElasticDeepSpeedStrategy

if __name__ == "__main__":
    model = BoringModel()
    data = torch.utils.data.DataLoader(RandomDataset(32, 64), batch_size=4)
    strategy = ElasticDeepSpeedStrategy(stage=3, global_batch_size=16)
    trainer = Trainer(strategy=strategy, devices=2, accelerator="cpu", max_epochs=1, logger=False,
        enable_progress_bar=False)
    trainer.fit(model, data, ckpt_path="last")
"""

OURS = (
    "Global batch of 16: 2 devices x 2 micro-batches of 4 samples",
    "No checkpoint was loaded: training starts from step 0.",
)


@pytest.mark.long
@pytest.mark.engine
def test_a_first_run_prints_two_lines_of_ours_and_no_known_warnings(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(FIRST_RUN)
    settings = {"MASTER_PORT": str(free_port()), "PYTHONWARNINGS": ""}
    printed = output_of((sys.executable, "first.py"), tmp_path, {**environment(), **settings})
    print(printed)
    lines = printed.splitlines()
    for line in OURS:
        assert lines.count(line) == 1, printed
    assert not [line for line in lines if "is deprecated" in line]


def is_shown(category: type[Warning], module: str) -> bool:
    """Warn as a module does; return whether the warning passes the filters."""
    text = {
        "torch.distributed.c10d_logger": "`torch.distributed.broadcast` is deprecated. Use",
        "lightning.pytorch.loops.training_epoch_loop": (
            "You're resuming from a checkpoint that ended before the epoch ended and"
        ),
        "lightning.pytorch.utilities._pytree": "`isinstance(treespec, LeafSpec)` is deprecated",
    }[module.replace("\\", "")]
    with warnings.catch_warnings(record=True) as seen:
        try:
            warnings.warn_explicit(text, category, "x.py", 1, module.replace("\\", ""))
        except Warning:
            return True
    return bool(seen)


@pytest.mark.parametrize(("category", "_", "module"), FILTERED_WARNINGS)
def test_known_warnings_are_hidden(category: type[Warning], _: str, module: str) -> None:
    """Filters of the user take precedence."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        assert is_shown(category, module)
        hide_known_warnings()
        hidden = [*warnings.filters]
        hide_known_warnings()
        assert [*warnings.filters] == hidden
        assert not is_shown(category, module)
        warnings.simplefilter("error", category)
        assert is_shown(category, module)


WITH_PYTORCH_LIGHTNING = """
import pytorch_lightning
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_elastic_zero import ElasticDeepSpeedStrategy
from pytorch_lightning.demos.boring_classes import BoringModel as OtherModel

options = dict(accelerator="cpu", devices=1, max_steps=2, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0)
trainer = pl.Trainer(strategy="elastic_deepspeed_stage_2", **options)
trainer.fit(BoringModel())
print("result:", trainer.global_step, "steps")
try:
    pl.Trainer(strategy="elastic_deepspeed_stage_2", **options).fit(OtherModel())
except TypeError as error:
    print("result:", error)
"""


@pytest.mark.long
@pytest.mark.engine
def test_pytorch_lightning_may_be_imported_but_its_modules_are_refused(tmp_path: Path) -> None:
    command = (sys.executable, "-W", "ignore", "-c", WITH_PYTORCH_LIGHTNING)
    printed = output_of(command, tmp_path, environment())
    results = [line for line in printed.splitlines() if line.startswith("result:")]
    assert results[0] == "result: 2 steps"
    assert "switch to a single import style" in results[1]
