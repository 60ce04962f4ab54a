"""Validations inside accumulation windows, in runs that are resumed before and inside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torchmetrics
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from typing_extensions import override

from tests.support.fits import FitCase
from tests.support.ranks import Pools
from tests.trainer._recorded_runs import RecordingNet, RunRecord, from_step, recorded

pytestmark = pytest.mark.engine


def _processed_batches(trainer: pl.Trainer) -> int:
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    return int(progress.total.processed)


class Counter(Callback):
    """Counts validations, saves in a validation or after a micro-batch, and ends a run early."""

    def __init__(self, path: Path, saves_at: int, saves_in: str, dies_at: int) -> None:
        self.path = path
        self.saves_at, self.saves_in, self.dies_at = saves_at, saves_in, dies_at
        self.began, self.ended = 0, 0

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"began": self.began, "ended": self.ended}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.began, self.ended = state_dict["began"], state_dict["ended"]

    def _save(self, trainer: pl.Trainer, moment: str) -> None:
        if (_processed_batches(trainer), moment) == (self.saves_at, self.saves_in):
            trainer.save_checkpoint(self.path)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.began += 1

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.ended += 1
        self._save(trainer, "validation")

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._save(trainer, "training")

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if _processed_batches(trainer) == self.dies_at:
            raise KeyError


class Net(RecordingNet):
    """A net with a metric that only validations update, and that is never reset."""

    def __init__(self, run: FitCase) -> None:
        super().__init__(run)
        self.validated = torchmetrics.SumMetric()

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.validated.update(self.loss(batch[0]).mean())


def in_window(
    root: Path,
    *,
    dies_at: int = -1,
    accumulate: int = 4,
    interval: int = 6,
    saves_at: int = 8,
    saves_in: str = "training",
    every_n_epochs: int | None = 1,
    patience: int = 4,
    min_epochs: int | None = None,
    by_steps: bool = False,
) -> FitCase:
    """Return a fit without a global batch, so that integer intervals count micro-batches.

    Args:
        root: folder of its saves.
        dies_at: micro-batches after which it ends.
        accumulate: micro-batches per step; an epoch has 24 on each rank.
        interval: micro-batches between validations.
        saves_at: micro-batches after which it saves.
        saves_in: ``"training"``, or the ``"validation"`` then.
        every_n_epochs: ``check_val_every_n_epoch`` of the Trainer.
        patience: validations until ``EarlyStopping``.
        min_epochs: of the Trainer.
        by_steps: whether a third ModelCheckpoint saves after each step, once the metric exists.
    """
    saves = partial(ModelCheckpoint, root, monitor="val", save_top_k=3)
    third = partial(saves, filename="third {step}", every_n_train_steps=1, save_top_k=-1)
    fixed = {"save_last": True, "enable_version_counter": False}
    return recorded(
        root=str(root),
        length=96,
        epochs=3,
        global_batch=None,
        validate=True,
        dropout=0.2,
        net=Net,
        callbacks=(
            partial(EarlyStopping, "val", patience=patience, min_delta=100.0),
            partial(Counter, root / "mine.ckpt", saves_at, saves_in, dies_at),
            *([third] if by_steps else []),
            partial(saves, filename="first {step}"),
            partial(saves, filename="second {step}", mode="max", **fixed),
        ),
        trainer={
            "accumulate_grad_batches": accumulate,
            "val_check_interval": interval,
            "check_val_every_n_epoch": every_n_epochs,
            "min_epochs": min_epochs,
        },
    )


@dataclass(frozen=True)
class Decisions:
    record: RunRecord
    counted: tuple[int, int]
    stopping: dict[str, Any]
    best: list[dict[str, float]]
    """Names and scores of the best checkpoints of each ModelCheckpoint."""
    metrics: dict[str, float]
    validated: float


def decided(run: FitCase) -> Decisions | None:
    """Fit; return nothing if the run has died."""
    made = run.make()
    try:
        made.trainer.fit(made.net, **made.data, ckpt_path=run.ckpt_path)
    except KeyError:
        return None
    stopping, counter, *others = made.trainer.callbacks  # type: ignore[attr-defined]
    saves = [each for each in others if isinstance(each, ModelCheckpoint)]
    return Decisions(
        made.watch.seen(made, []),
        (counter.began, counter.ended),
        {k: float(v) for k, v in stopping.state_dict().items() if not isinstance(v, str | None)},
        [{Path(p).name: float(s) for p, s in each.best_k_models.items()} for each in saves],
        {name: float(value) for name, value in made.trainer.callback_metrics.items()},
        float(made.net.validated.compute()),
    )


CASES: dict[str, dict[str, Any]] = {
    "after one": {},
    "over epochs": {"every_n_epochs": None},
    "at a step and inside": {"interval": 2, "saves_in": "validation", "dies_at": 9},
    "before it": {"saves_at": 4},
    "several in a window": {"accumulate": 8, "interval": 3},
    "a save that waits for it": {"saves_at": 4, "by_steps": True},
    "a stop that waits for min_epochs": {
        "interval": 18,
        "saves_at": 44,
        "patience": 1,
        "min_epochs": 2,
    },
}
"""Fields of each fit; ``dies_at``: of the one that is resumed, by default as soon as it saves."""


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decisions_are_those_of_an_uninterrupted_run(
    case: dict[str, Any], worlds: Pools, tmp_path: Path
) -> None:
    reference, seen = reference_and_resumed(case, worlds, tmp_path)
    assert seen.counted == reference.counted
    assert seen.stopping == reference.stopping
    assert seen.record.global_step == reference.record.global_step
    assert seen.metrics == reference.metrics
    assert seen.validated == reference.validated
    first = min(seen.record.steps)
    assert seen.record.steps == from_step(reference.record.steps, first)
    assert seen.record.losses == from_step(reference.record.losses, first)
    # Otherwise, the interrupted run has also saved after the checkpoint.
    if "dies_at" not in case:
        assert seen.best == reference.best
        names = [
            sorted(p.name for p in (tmp_path / folder).glob("*.ckpt"))
            for folder in ("resumed", "whole")
        ]
        assert names[0] == names[1]


@pytest.mark.long
@pytest.mark.parametrize("saves_in", ["validation", "training"])
def test_a_validation_in_a_repeated_window_is_counted_twice(
    saves_in: str, worlds: Pools, tmp_path: Path
) -> None:
    """Saved at its end, or before it in the same window: the weights are those of the step."""
    case = {"saves_at": 6, "saves_in": saves_in, "dies_at": 7, "patience": 99}
    reference, seen = reference_and_resumed(case, worlds, tmp_path)
    more = 1 if saves_in == "validation" else 0
    assert seen.counted == (reference.counted[0] + more, reference.counted[1] + more)
    first = min(seen.record.steps)
    assert first == 1
    assert seen.record.steps == from_step(reference.record.steps, first)


def reference_and_resumed(
    case: dict[str, Any], worlds: Pools, folder: Path
) -> tuple[Decisions, Decisions]:
    """Return an uninterrupted run, and one that is resumed from the save of a run that ended."""
    lives = {**case, "dies_at": -1}
    (reference, *_) = worlds.run(2, partial(decided, in_window(folder / "whole", **lives)))
    root = folder / "resumed"
    dying = in_window(root, **{"dies_at": case.get("saves_at", 8), **case})
    assert worlds.run(2, partial(decided, dying)) == [None, None]
    again = replace(in_window(root, **lives), ckpt_path=str(root / "mine.ckpt"))
    (seen, *_) = worlds.run(2, partial(decided, again))
    assert reference is not None
    assert seen is not None
    return reference, seen
