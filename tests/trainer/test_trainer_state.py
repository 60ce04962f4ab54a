"""Other state of a Trainer continues: averages, progress bars, saves."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed import comm
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    LambdaCallback,
    ModelCheckpoint,
    Timer,
    TQDMProgressBar,
)
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_elastic_zero.trainer.monitor import CheckpointMonitor
from tests.support.fits import elastic, quiet_trainer
from tests.support.outcome import NOTHING, captured_log, error_text
from tests.support.ranks import Pools
from tests.trainer._recorded_data import IndexedSamples
from tests.trainer._recorded_runs import RecordingNet, recorded

pytestmark = pytest.mark.engine


class Bar(TQDMProgressBar):
    """A progress bar that records its position."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: list[tuple[int, int]] = []

    @override
    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        self.positions.append((self.train_progress_bar.n, int(self.train_progress_bar.total)))


def trainer_of(root: str, epochs: int, callbacks: list[Callback], **options: Any) -> pl.Trainer:
    every = options.pop("every", 3)
    saves = ModelCheckpoint(root, "{step}", every_n_train_steps=every, save_top_k=-1)
    strategy = elastic(stage=options.pop("stage", 2), global_batch_size=12)
    return quiet_trainer(strategy, *callbacks, saves, max_epochs=epochs, **options)


def fit(trainer: pl.Trainer, path: str | None = None, batch_size: int = 6) -> None:
    pl.seed_everything(3, verbose=False)
    data = DataLoader(IndexedSamples(53, 0.0), batch_size=batch_size, shuffle=True)
    val = DataLoader(IndexedSamples(8, 0.0), batch_size=2)
    trainer.fit(RecordingNet(recorded()), data, val, ckpt_path=path)


def with_a_bar(root: str, path: str | None) -> list[tuple[int, int]]:
    bar = Bar()
    fit(trainer_of(root, 2, [bar], enable_progress_bar=True), path, batch_size=2)
    return bar.positions


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_progress_bar_resumes_at_the_runs_position(
    world: int, worlds: Pools, tmp_path: Path
) -> None:
    """The position counts batches of the current world."""
    worlds.run(2, partial(with_a_bar, str(tmp_path), None))
    path = str(tmp_path / "step=3.ckpt")
    per_step = {1: 6, 2: 3, 3: 2}[world]
    batches = 5 * per_step
    positions = worlds.run(world, partial(with_a_bar, str(tmp_path / "on"), path))[0]
    expected = [*range(3 * per_step + 1, batches + 1), *range(1, batches + 1)]
    assert positions == [(n, batches) for n in expected]


class Own(Callback):
    """A callback whose state differs between ranks."""

    def __init__(self) -> None:
        self.rank = comm.get_rank() if comm.is_initialized() else -1

    @override
    def setup(self, *_: Any, **__: Any) -> None:
        self.rank = comm.get_rank()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rank = state_dict["rank"]


def with_own_state(root: str, path: str | None) -> tuple[int, list[str]]:
    """Fit with callbacks whose states differ between ranks; return what is loaded, and warnings."""
    own, timer = Own(), Timer()
    with captured_log("lightning_elastic_zero", logging.WARNING) as warned:
        fit(trainer_of(root, 1 if path is None else 2, [own, timer]), path)
    return own.rank, [text for text in warned if "differs between ranks" in text]


@pytest.mark.long
def test_a_callbacks_state_is_rank_0s_with_one_warning(worlds: Pools, tmp_path: Path) -> None:
    """Random states and the times of a Timer differ too, and are declared."""
    (_, (warning,)), (_, others) = worlds.run(2, partial(with_own_state, str(tmp_path), None))
    assert "The trainer's state differs between ranks: callbacks.Own on rank 1. Rank 0" in warning
    assert not others
    path = str(tmp_path / "step=3.ckpt")
    resumed = worlds.run(2, partial(with_own_state, str(tmp_path / "on"), path))
    assert [rank for rank, _ in resumed] == [0, 0]
    assert not any(warned for _, warned in resumed)


def averaged(root: str, path: str | None, stage: int = 2) -> dict[Any, Any]:
    """Fit with a moving average of the weights; return it at the start and after each step."""
    average = EMAWeightAveraging(decay=0.9)
    seen: dict[Any, Any] = {}

    def look(step: Any) -> None:
        assert average._average_model is not None
        state = average._average_model.state_dict()
        seen[step] = {name: value.tolist() for name, value in state.items()}

    looks = LambdaCallback(
        on_train_start=lambda *_: look("start"),
        on_train_batch_end=lambda trainer, *_: look(trainer.global_step),
    )
    error = error_text(lambda: fit(trainer_of(root, 2, [average, looks], stage=stage), path))
    return seen if error == NOTHING else {"error": error}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_averaged_weights_continue_bit_for_bit(world: int, worlds: Pools, tmp_path: Path) -> None:
    reference = worlds.run(2, partial(averaged, str(tmp_path), None))
    path = str(tmp_path / "step=3.ckpt")
    for rank, seen in enumerate(worlds.run(world, partial(averaged, str(tmp_path / "on"), path))):
        # Buffers differ between ranks; another world uses those of rank 0.
        expected = reference[rank if world == 2 else 0]
        assert seen["start"] == expected[3]
        assert world != 2 or seen[10] == expected[10]


class Unreadable(IndexedSamples):
    """A data set whose first sample cannot be read."""

    @override
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        raise KeyboardInterrupt


class FetchingNet(RecordingNet):
    """A net whose validation fetches its batches itself."""

    @override
    def validation_step(  # type: ignore[override]
        self, dataloader_iter: Iterator[Any]
    ) -> None:
        batch, batch_idx, _ = next(dataloader_iter)
        super().validation_step(batch, batch_idx)


def averaged_in_validation(root: str, path: str | None, stage: int, method: str) -> list[Any]:
    """Save inside a validation; return the average and the weights after the last step.

    Args:
        root: folder of the checkpoints.
        path: checkpoint to resume; then return the average and the weights at the start.
        stage: of ZeRO.
        method: ``"exception"`` raises during the validation, ``"fetch"`` before its first batch,
            ``"call"`` saves, ``"background"`` saves in the background, ``"iterator"`` at the end of
            one that fetches its batches itself.
    """
    average, seen = EMAWeightAveraging(decay=0.9), list[Any]()
    net = (FetchingNet if method == "iterator" else RecordingNet)(recorded())

    def look(*_: Any) -> None:
        assert average._average_model is not None
        state = average._average_model.state_dict()
        weights = {name: p.tolist() for name, p in net.named_parameters()}
        seen.append(({name: value.tolist() for name, value in state.items()}, weights))

    def interrupt(trainer: pl.Trainer, _module: Any, _outputs: Any, _batch: Any, i: int) -> None:
        if path is None and i == 1 and method == "exception":
            raise KeyboardInterrupt
        if path is None and i == 1 and method != "iterator":
            trainer.save_checkpoint(f"{root}/step=5.ckpt")

    def end(trainer: pl.Trainer, _: Any) -> None:
        if path is None and method == "iterator":
            trainer.save_checkpoint(f"{root}/step=5.ckpt")

    looks = LambdaCallback(
        on_train_start=look if path else None,
        on_train_batch_end=None if path else look,
        on_validation_batch_end=interrupt,
        on_validation_end=end,
    )
    saving = ModelCheckpoint(root, "{step}", every_n_train_steps=99, save_on_exception=True)
    strategy = elastic(stage=stage, global_batch_size=12, async_save=method == "background")
    trainer = quiet_trainer(strategy, average, looks, saving, max_epochs=1 + (path is not None))
    data = DataLoader(IndexedSamples(53, 0.0), batch_size=2, shuffle=True)
    kind = Unreadable if path is None and method == "fetch" else IndexedSamples
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        trainer.fit(net, data, DataLoader(kind(8, 0.0), batch_size=1), ckpt_path=path)
    return seen[-1:]


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("method", ["exception", "fetch", "call", "background", "iterator"])
def test_a_save_inside_a_validation_has_the_average_and_the_weights(
    method: str, stage: int, worlds: Pools, tmp_path: Path
) -> None:
    """The callback swaps the two for the validation."""
    saved = worlds.run(1, partial(averaged_in_validation, str(tmp_path), None, stage, method))
    path = str(tmp_path / "step=5.ckpt")
    root = str(tmp_path / "on")
    assert worlds.run(1, partial(averaged_in_validation, root, path, stage, method)) == saved


@pytest.mark.long
def test_averaging_with_zero_3_is_refused(worlds: Pools, tmp_path: Path) -> None:
    """The callback would average empty tensors."""
    for seen in worlds.run(2, partial(averaged, str(tmp_path), None, 3)):
        assert seen["error"].startswith("UnsupportedError: EMAWeightAveraging averages whole")


def inodes_of_saves(root: str, path: str | None, max_steps: int) -> dict[str, int]:
    """Fit; return the inode of each manifest, which changes with each publication."""
    fit(trainer_of(root, 2, [], max_steps=max_steps, every=1), path)
    comm.barrier()
    return {p.name: (p / "manifest.json").stat().st_ino for p in Path(root).glob("*.ckpt")}


@pytest.mark.long
def test_the_checkpoint_resumed_from_is_not_written_again(worlds: Pools, tmp_path: Path) -> None:
    """Inside the first window, the global step still equals the saved one."""
    root = str(tmp_path)
    before = worlds.run(2, partial(inodes_of_saves, root, None, 3))[0]
    path = str(tmp_path / "step=3.ckpt")
    after = worlds.run(1, partial(inodes_of_saves, root, path, -1))[0]
    assert set(before) == {"step=1.ckpt", "step=2.ckpt", "step=3.ckpt"}
    assert {name: after[name] for name in before} == before
    assert len(after) == 10


def remaining_after_fit(root: str) -> list[object]:
    """Fit with a monitor; return the remaining listeners."""
    trainer = trainer_of(root, 1, [CheckpointMonitor()])
    strategy: Any = trainer.strategy
    before = [*strategy.checkpoint_manager.listeners]
    fit(trainer)
    return [x for x in strategy.checkpoint_manager.listeners if x not in before]


def test_a_fit_leaves_no_listeners(worlds: Pools, tmp_path: Path) -> None:
    assert worlds.run(1, partial(remaining_after_fit, str(tmp_path)))[0] == []
