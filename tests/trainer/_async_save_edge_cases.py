"""Modules, callbacks and objects with which saving behind training is hard."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_elastic_zero.storage import publish
from lightning_elastic_zero.storage.checksums import write_durably
from tests.support.checkpoints import files_of
from tests.support.fits import RegressionNet
from tests.support.ranks import Pools
from tests.trainer._async_save import (
    HELD_S,
    AsyncSaveSpec,
    Gate,
    elastic_strategy_of,
    in_background,
    is_published,
    open_later,
)


class Clipping(RegressionNet):
    """Saves at its second step, where gradients are clipped."""

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        assert self.trainer is not None
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, SaveOnce):
                callback.act(self.trainer)


class ByHand(RegressionNet):
    """Calls DeepSpeed's engine itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Step without the strategy."""
        loss = self._loss(batch)
        engine: Any = self.trainer.model
        engine.backward(loss)
        engine.step()
        loop = self.trainer.fit_loop.epoch_loop.manual_optimization
        loop.optim_step_progress.increment_completed()
        return loss


class SaveOnce(Callback):
    """Saves the second time, with the copying thread paused for a second."""

    def __init__(self, run: AsyncSaveSpec) -> None:
        self.run, self.times = run, 0

    def act(self, trainer: pl.Trainer) -> None:
        self.times += 1
        if self.times != 2:
            return
        if (writer := elastic_strategy_of(trainer)._manager._writer) is not None:
            writer._snapshotter._thread.submit(time.sleep, 1.0)
        open_later(self.run.gate, 1.0)
        trainer.save_checkpoint(str(Path(self.run.root) / "a.ckpt"))


class BeforeStep(SaveOnce):
    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        self.act(trainer)


class AfterBatch(SaveOnce):
    """Saves after a batch: the next step is the first that could tear the snapshot."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self.act(trainer)


SAVE_POINTS: dict[str, tuple[type[RegressionNet], type[SaveOnce]]] = {
    "before the step": (RegressionNet, BeforeStep),
    "clipping": (Clipping, SaveOnce),
    "by hand": (ByHand, AfterBatch),
}


SAVES_IN_S = 60.0
"""A fit that takes longer hangs."""


def save_at(run: AsyncSaveSpec, saver: type[SaveOnce]) -> None:
    """Save once at a place in the loop."""
    trainer, net, data, director = run.make()
    trainer.callbacks.append(saver(run))  # type: ignore[attr-defined]
    # Muon is compiled by torch otherwise, which takes each process a minute.
    with torch.compiler.set_stance("force_eager"):
        trainer.fit(net, data)
    assert not director.errors


def check_same_as_blocking_save(
    stage: int,
    max_snapshot_bytes: int | None,
    place: tuple[type[RegressionNet], type[SaveOnce]],
    pools: Pools,
    tmp_path: Path,
) -> None:
    """Compare a background save with a blocking one."""
    found = {}
    for name in ("blocking", "behind"):
        run = AsyncSaveSpec(str(tmp_path / name), stage, async_save=name == "behind", gated=True)
        run.net, run.max_snapshot_bytes = place[0], max_snapshot_bytes
        pools.run(2, partial(save_at, run, place[1]), SAVES_IN_S)
        found[name] = files_of(tmp_path / name / "a.ckpt")
    assert found["behind"].keys() == found["blocking"].keys()
    for file, tree in found["blocking"].items():
        assert found["behind"][file] == tree, file


class HeldManifest:
    """Replaces `write_durably`: the first manifest of a writer waits."""

    def __init__(self) -> None:
        self.free, self.held = threading.Event(), False

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        def write(path: Path, data: bytes) -> None:
            if path.name == "manifest.json" and in_background() and not self.held:
                self.held = True
                self.free.wait(HELD_S)
            write_durably(path, data)

        patch.setattr(publish, "write_durably", write)


class UnrestorableError(Exception):
    """Can be pickled but not unpickled, as many exceptions."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


class UnrestorableState(Callback):
    """Has such an object in its state for a while."""

    strange: UnrestorableError | None = UnrestorableError("a", "b")

    def state_dict(self) -> dict[str, Any]:
        return {"last_error": self.strange}


class Slow(Gate):
    """Pauses the writer that pickles it."""

    def __reduce__(self) -> Any:
        if in_background():
            time.sleep(0.1)
        return Slow, (self.path, self.fails_on)


class StepLoggingNet(RegressionNet):
    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        self.log("count", float(self.global_step))
        return self._loss(batch)


CALLBACKS: dict[str, list[dict[str, Any]]] = {
    "two of the same name": [{"monitor": "val_loss", "mode": "max"}, {"every_n_epochs": 1}],
    "one name for three": [
        {
            "filename": "best",
            "save_top_k": 3,
            "every_n_train_steps": 1,
            "monitor": "count",
            "mode": "min",
        }
    ],
}


def best_of(run: AsyncSaveSpec, callbacks: str) -> dict[str, bool]:
    """Train with slow writers; return each callback's best checkpoint after all ranks ended."""
    folder = Path(run.root) / "kept"
    made = [ModelCheckpoint(dirpath=folder, **options) for options in CALLBACKS[callbacks]]
    trainer, net, data, director = run.make()
    director.gate = Slow(str(run.gate))
    trainer.callbacks.extend(made)  # type: ignore[attr-defined]
    trainer.fit(net, data)
    best = [Path(callback.best_model_path) for callback in made]
    return {path.name: is_published(path) for path in best}
