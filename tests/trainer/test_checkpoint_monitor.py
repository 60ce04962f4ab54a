"""CheckpointMonitor logs each save and load once, with all loggers of a Trainer."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_elastic_zero.trainer.monitor import CheckpointMonitor
from tests.support.fits import Data, RegressionNet, elastic, quiet_trainer
from tests.support.ranks import Pools


@dataclass(frozen=True)
class MonitoredFit:
    """A fit that saves after each step, with loggers."""

    root: str
    loggers: tuple[str, ...] = ("tensorboard",)
    epochs: int = 2
    fails_at: int | None = None
    async_save: bool = False
    ckpt_path: str | None = None

    def _loggers(self) -> list[Any]:
        kinds = {"tensorboard": TensorBoardLogger, "csv": CSVLogger}
        return [kinds[name](self.root, name=name, version="v") for name in self.loggers]

    def run(self) -> dict[str, int]:
        """Fit; return the size in bytes of each remaining checkpoint, by name."""
        saves = ModelCheckpoint(
            self.root, save_top_k=-1, every_n_train_steps=1, filename="{step}", save_last=False
        )

        def fail(trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == self.fails_at:
                raise ArithmeticError

        trainer = quiet_trainer(
            elastic(async_save=self.async_save),
            CheckpointMonitor(),
            LambdaCallback(on_train_batch_start=fail),
            saves,
            max_epochs=self.epochs,
            logger=self._loggers() or False,
            log_every_n_steps=1,
        )
        torch.manual_seed(0)
        try:
            trainer.fit(RegressionNet(), Data(), ckpt_path=self.ckpt_path)
        except ArithmeticError:
            assert self.fails_at is not None
        return {
            path.name: sum(f.stat().st_size for f in path.rglob("*.pt"))
            for path in sorted(Path(self.root).glob("*.ckpt"))
        }

    def _events(self) -> EventAccumulator:
        events = EventAccumulator(str(Path(self.root, "tensorboard", "v")))
        events.Reload()
        return events

    def scalars(self) -> dict[str, dict[int, float]]:
        """Return TensorBoard's values by tag and step."""
        events = self._events()
        return {
            tag: {event.step: event.value for event in events.Scalars(tag)}
            for tag in events.Tags()["scalars"]
            if tag.startswith("checkpoint/")
        }


OF_A_SAVE = {"stall_s", "s", "write_s", "publish_s", "bytes", "gb_per_s"}
OF_A_LOAD = {"s", "bytes", "gb_per_s"}
MEMORY = "checkpoint/host_memory_peak_bytes"


def tags(kind: str, names: set[str]) -> set[str]:
    return {f"checkpoint/{kind}_{name}" for name in names}


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.parametrize("background", [False, True], ids=["blocking", "behind"])
def test_each_save_is_logged_once_at_its_step(
    background: bool, pools: Pools, tmp_path: Path
) -> None:
    run = MonitoredFit(str(tmp_path), ("tensorboard", "csv"), async_save=background)
    sizes, _ = pools.run(2, run.run)
    found = run.scalars()
    assert set(found) == {*tags("save", OF_A_SAVE), MEMORY}
    on_disk = {int(name.removesuffix(".ckpt").split("=")[1]): n for name, n in sizes.items()}
    assert len(on_disk) == 4
    assert found["checkpoint/save_bytes"] == on_disk
    for step in on_disk:
        stall, total, write, publish = (
            found[f"checkpoint/save_{name}"][step]
            for name in ("stall_s", "s", "write_s", "publish_s")
        )
        assert write > 0 < publish
        assert total * 1.001 >= write + publish
        assert background or stall == total
    with Path(tmp_path, "csv", "v", "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["checkpoint/save_bytes"]]
    assert {int(row["step"]): float(row["checkpoint/save_bytes"]) for row in rows} == on_disk


@pytest.mark.long
@pytest.mark.engine
def test_a_load_is_logged_at_the_restored_step(pools: Pools, tmp_path: Path) -> None:
    first = MonitoredFit(str(tmp_path / "a"), (), epochs=1)
    sizes, _ = pools.run(2, first.run)  # Without loggers, the monitor does nothing.
    (path,) = (tmp_path / "a").glob("step=2*.ckpt")
    second = MonitoredFit(str(tmp_path / "b"), ckpt_path=str(path))
    pools.run(1, second.run)
    found = second.scalars()
    assert set(found) == {*tags("save", OF_A_SAVE), *tags("load", OF_A_LOAD), MEMORY}
    ((step, read),) = found["checkpoint/load_bytes"].items()
    assert step == 2
    assert 0 < read <= 2 * sizes[path.name]
    assert set(found["checkpoint/save_s"]) == {3, 4}


@pytest.mark.long
@pytest.mark.engine
def test_a_failed_run_has_logged_its_published_saves(pools: Pools, tmp_path: Path) -> None:
    run = MonitoredFit(str(tmp_path), fails_at=2)
    sizes, _ = pools.run(2, run.run)
    assert [name.split("=")[-1] for name in sizes] == ["1.ckpt", "2.ckpt"]
    assert set(run.scalars()["checkpoint/save_bytes"]) == {1, 2}


def test_with_another_strategy_the_monitor_warns_that_it_logs_nothing(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        callbacks=[CheckpointMonitor()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        fast_dev_run=True,
    )
    with pytest.warns(UserWarning, match="logs nothing: the strategy is SingleDeviceStrategy"):
        trainer.fit(BoringModel())
    assert trainer.global_step == 1
