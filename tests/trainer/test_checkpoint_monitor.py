"""CheckpointMonitor logs each save and load once, with all loggers of a Trainer."""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typing_extensions import override

from lightning_elastic_zero.trainer.monitor import CheckpointMonitor
from tests.support.fits import FitCase, Watch, fit
from tests.support.ranks import Pools

LOGGERS: dict[str, Any] = {"tensorboard": TensorBoardLogger, "csv": CSVLogger}


class SizeRecorder(Watch):
    """Fails before a step; its result is the size of each remaining checkpoint in bytes."""

    def __init__(self, fails_at: int | None, case: FitCase) -> None:
        super().__init__(case)
        self.fails_at = fails_at

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.fails_at:
            raise ArithmeticError

    @override
    def seen(self, *_: Any) -> dict[str, int]:
        return {
            path.name: sum(f.stat().st_size for f in path.rglob("*.pt"))
            for path in sorted(Path(self.of.root).glob("*.ckpt"))
        }


def monitored(root: Path, *, fails_at: int | None = None, **changes: Any) -> FitCase:
    """Return a fit that saves after each step."""
    saves = {"save_top_k": -1, "every_n_train_steps": 1, "filename": "{step}", "save_last": False}
    watch = partial(SizeRecorder, fails_at)
    fields = {"epochs": 2, "checkpoint": saves, "callbacks": (CheckpointMonitor,), "watch": watch}
    return FitCase(str(root), **{**fields, **changes})


def fit_with_loggers(case: FitCase, *names: str) -> dict[str, int]:
    """Fit; return the size of each checkpoint, by name."""
    loggers = [LOGGERS[name](case.root, name=name, version="v") for name in names]
    case = replace(case, trainer={"logger": loggers or False, "log_every_n_steps": 1})
    try:
        sizes: dict[str, int] = fit(case)
    except ArithmeticError:
        sizes = case.watch(case).seen()
    return sizes


def scalars(root: Path) -> dict[str, dict[int, float]]:
    """Return TensorBoard's values by tag and step."""
    events = EventAccumulator(str(root / "tensorboard" / "v"))
    events.Reload()
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
    case = monitored(tmp_path, strategy={"async_save": background})
    sizes, _ = pools.run(2, partial(fit_with_loggers, case, *LOGGERS))
    found = scalars(tmp_path)
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
    first = monitored(tmp_path / "a", epochs=1)
    # Without loggers, the monitor does nothing.
    sizes, _ = pools.run(2, partial(fit_with_loggers, first))
    (path,) = (tmp_path / "a").glob("step=2*.ckpt")
    second = monitored(tmp_path / "b", ckpt_path=str(path))
    pools.run(1, partial(fit_with_loggers, second, "tensorboard"))
    found = scalars(tmp_path / "b")
    assert set(found) == {*tags("save", OF_A_SAVE), *tags("load", OF_A_LOAD), MEMORY}
    ((step, read),) = found["checkpoint/load_bytes"].items()
    assert step == 2
    assert 0 < read <= 2 * sizes[path.name]
    assert set(found["checkpoint/save_s"]) == {3, 4}


@pytest.mark.long
@pytest.mark.engine
def test_a_failed_run_has_logged_its_published_saves(pools: Pools, tmp_path: Path) -> None:
    case = monitored(tmp_path, fails_at=2)
    sizes, _ = pools.run(2, partial(fit_with_loggers, case, "tensorboard"))
    assert [name.split("=")[-1] for name in sizes] == ["1.ckpt", "2.ckpt"]
    assert set(scalars(tmp_path)["checkpoint/save_bytes"]) == {1, 2}


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
