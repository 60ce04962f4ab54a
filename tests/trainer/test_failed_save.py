"""ModelCheckpoint names no checkpoint that could not be saved."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.outcome import error_text
from tests.support.ranks import Pools
from tests.trainer._async_save import AsyncSaveSpec, StepActor

pytestmark = pytest.mark.engine


class FailsFrom(StepActor):
    """Lets saves fail from a step on, and logs a decreasing value in each epoch."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.log("falls", -float(trainer.current_epoch))
        if trainer.current_epoch == 2 and self.gate is not None:
            self.gate.fails_on = 1


def fail_in_the_third_epoch(run: AsyncSaveSpec, options: dict[str, Any]) -> dict[str, Any]:
    """Save at the end of each epoch; return the callback's paths at the end."""
    run.gate.touch()
    trainer, net, data, director = run.make()
    kept = ModelCheckpoint(dirpath=f"{run.root}/kept", filename="{step}", **options)
    trainer.callbacks = [FailsFrom(director.gate, {}), kept]  # type: ignore[attr-defined]
    said = error_text(lambda: trainer.fit(net, data))
    names = {"best": kept.best_model_path, "last": kept.last_model_path}
    ranked = {Path(path).name: float(score) for path, score in kept.best_k_models.items()}
    best = kept.best_model_score
    score = None if best is None else float(best)
    return {"names": names, "ranked": ranked, "score": score, "said": said}


@pytest.mark.parametrize(
    ("options", "best"),
    [
        ({"monitor": "falls", "save_top_k": 3}, "step=4.ckpt"),
        ({"monitor": "falls", "mode": "max", "save_top_k": 3}, "step=2.ckpt"),
        ({"save_top_k": 1, "save_last": "link"}, ""),
    ],
    ids=["best", "worst", "newest"],
)
def test_model_checkpoint_does_not_name_a_failed_save(
    options: dict[str, Any], best: str, pools: Pools, tmp_path: Path
) -> None:
    run = AsyncSaveSpec(str(tmp_path), gated=True, epochs=4)
    for seen in pools.run(2, partial(fail_in_the_third_epoch, run, options)):
        assert "the disk is broken" in seen["said"]
        named = seen["names"]
        assert Path(named["best"]).name == best
        assert all(Path(path, "manifest.json").is_file() for path in named.values() if path)
        assert not seen["ranked"].keys() & {"step=6.ckpt", "step=8.ckpt"}
        assert seen["score"] == (seen["ranked"][best] if best else None)
