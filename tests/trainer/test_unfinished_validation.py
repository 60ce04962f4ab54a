"""A validation that an exception has ended is run again by the resumed run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from typing_extensions import override

from tests.support.fits import FitCase, error_of
from tests.support.ranks import Pools
from tests.trainer._recorded_data import IndexedSamples
from tests.trainer._recorded_runs import (
    RecordingNet,
    RunRecord,
    from_step,
    gather_record,
    record,
    recorded,
)

pytestmark = pytest.mark.engine


class Score(MeanMetric):
    def __init__(self, before: Callable[[], None]) -> None:
        super().__init__()
        self.before = before

    @override
    def compute(self) -> torch.Tensor:
        self.before()
        return super().compute()


class FailingNet(RecordingNet):
    """Fails in the validation of epoch 1."""

    def __init__(self, place: str, run: FitCase) -> None:
        super().__init__(run)
        self.place = place
        self.score = Score(partial(self.fail_in, "metric"))

    def fail_in(self, place: str) -> None:
        if self.place == place and self.trainer.current_epoch == 1:
            raise KeyError(place)

    @override
    def val_dataloader(self) -> Any:
        self.fail_in("loader")
        return DataLoader(IndexedSamples(8, 0.0), batch_size=2)

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.score.update(self.loss(batch[0]))
        self.log("score", self.score)

    @override
    def on_validation_epoch_end(self) -> None:
        self.fail_in("hook")


def failing(place: str, root: Path) -> FitCase:
    """Return a fit that fails after step 10, in a place of its second validation, and saves."""
    return recorded(
        root=str(root),
        epochs=3,
        net=partial(FailingNet, place),
        callbacks=(partial(OnExceptionCheckpoint, str(root)),),
        trainer={"reload_dataloaders_every_n_epochs": 1, "enable_checkpointing": True},
    )


def assert_validated_again(seen: RunRecord, worlds: Pools) -> None:
    """Compare the record of a resume with that of a run that does not fail."""
    whole = failing("", Path())
    reference = record(worlds, 2, replace(whole, callbacks=()))
    first = reference.events.index("validate at 10")
    assert seen.events == reference.events[first:]
    assert seen.validated == from_step(reference.validated, 10)
    assert seen.steps == from_step(reference.steps, 10)
    assert seen.losses == from_step(reference.losses, 10)
    assert seen.loops == {moment: reference.loops[moment] for moment in seen.loops}


@pytest.mark.parametrize("place", ["hook", "metric", "loader"])
def test_a_failed_validation_is_run_again(place: str, worlds: Pools, tmp_path: Path) -> None:
    """Also if its last batch was done, or if it had not begun."""
    fails = failing(place, tmp_path)
    assert worlds.run(2, partial(error_of, fails)) == [f"KeyError: '{place}'"] * 2
    resumed = fails.resumed("on_exception", net=partial(FailingNet, ""))
    assert_validated_again(record(worlds, 2, resumed), worlds)


def fitted_again(run: FitCase) -> RunRecord:
    """Fit until it fails, and resume with the same Trainer; return the record of the resume."""
    made = run.make()
    with pytest.raises(KeyError):
        made.trainer.fit(made.net, **made.data)
    for seen in (made.net.ids, made.watch.events, made.watch.loops, made.watch.validated):
        seen.clear()
    made.net.place = ""
    made.trainer.fit(made.net, **made.data, ckpt_path=run.path("on_exception"))
    return gather_record(made.trainer, made.net, made.watch)


def test_the_same_trainer_runs_it_again(worlds: Pools, tmp_path: Path) -> None:
    (seen, *_) = worlds.run(2, partial(fitted_again, failing("hook", tmp_path)))
    assert_validated_again(seen, worlds)
