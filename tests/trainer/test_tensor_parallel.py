"""Tensor parallelism in a Trainer: samples, steps and state are those of data ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import Callback, WeightAveraging
from lightning.pytorch.strategies import Strategy
from torch import distributed, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import SumMetric
from typing_extensions import override

from lightning_elastic_zero import fingerprint_checkpoint, inspect_checkpoint
from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy
from lightning_elastic_zero.trainer.tensor_parallel import _digest
from tests.support.engines import forget_tensor_ranks
from tests.support.fits import SMALL_BUCKETS, FitCase, fit, quiet_trainer
from tests.support.outcome import error_text
from tests.support.ranks import Pools
from tests.trainer._recorded_data import WIDTH, IndexedSamples
from tests.trainer._recorded_runs import RecordingNet, RunRecord, from_step, recorded

pytestmark = pytest.mark.engine

SAMPLES = 8


class CutNet(RecordingNet):
    """A net with a layer that is cut by columns, one that is cut by rows, and a norm."""

    configure_model = pl.LightningModule.configure_model

    def __init__(self, run: FitCase) -> None:
        super().__init__(run)
        torch.manual_seed(1)
        self.first: Any = nn.LayerNorm(WIDTH)
        self.up, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 1)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.counted = SumMetric()

    @override
    def loss(self, x: torch.Tensor) -> torch.Tensor:
        seen = nn.functional.dropout(self.first(x), self.of.dropout, training=self.training)
        made = self.last(torch.tanh(self.up(seen)))
        return torch.as_tensor((made.squeeze(1) - x.sum(1)).square())

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.counted.update(len(batch[0]))
        self.log("samples", float(len(batch[0])), reduce_fx="sum", sync_dist=True)
        self.log("counted", self.counted)
        gathered: Any = self.all_gather(torch.ones(1))
        self.log("gathered", gathered.sum())

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch[0])


class ShardedNet(CutNet):
    """Is created in ``configure_model``."""

    def configure_model(self) -> None:
        """Create nothing more."""


class SavesFirst(Callback):
    """Saves a resumed run before its first step."""

    def __init__(self, path: Path) -> None:
        self.path: Path | None = path

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.path is not None:
            trainer.save_checkpoint(self.path)
        self.path = None


@dataclass(frozen=True)
class Grid:
    tensor: int
    data: int
    stage: int = 2

    def __str__(self) -> str:
        return f"TP{self.tensor}xDP{self.data}-{self.stage}"

    @property
    def world(self) -> int:
        return self.tensor * self.data

    def options(self, **options: Any) -> dict[str, Any]:
        """Return the options of the strategy."""
        specs = [
            {"patterns": [".*up.weight$"], "partition_type": "column"},
            {"patterns": [".*last.weight$"], "partition_type": "row"},
        ]
        rules = {"use_default_specs": False, "layer_specs": specs}
        zero = {"stage": self.stage, "stage3_param_persistence_threshold": 0, **SMALL_BUCKETS}
        config: dict[str, Any] = {
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
        }
        if self.tensor > 1:
            config["tensor_parallel"] = {"partition_config": rules}
        return {"tensor_parallel_size": self.tensor, "config": config, **options}

    def case(self, root: Path, **changes: Any) -> FitCase:
        return recorded(**{"net": CutNet, "strategy": self.options(), "root": str(root)} | changes)


@contextmanager
def engine_forgotten() -> Iterator[None]:
    try:
        yield
    finally:
        forget_tensor_ranks()


def fit_on(run: FitCase) -> RunRecord:
    with engine_forgotten():
        return fit(run)


def record(pools: Pools, grid: Grid, run: FitCase) -> RunRecord:
    """Fit, and return the record with each sample once: it must be on all of its tensor ranks."""
    found = pools.run(grid.world, partial(fit_on, run))[0]
    once = {step: ids[:: grid.tensor] for step, ids in found.steps.items()}
    assert {step: sorted(ids * grid.tensor) for step, ids in once.items()} == found.steps
    return replace(found, steps=once)


PLAIN = Grid(1, 2)
SQUARE = Grid(2, 2)
MOMENTS = (("step 0.3", 3), ("step 1.2", 7))
"""Moments of saves, with the first step after each."""
TARGETS = [PLAIN, SQUARE, Grid(1, 3), Grid(1, 1), Grid(4, 1, 1), Grid(2, 1, 3), Grid(2, 3)]


@pytest.mark.parametrize(
    ("source", "targets", "moments"),
    [
        pytest.param(SQUARE, TARGETS[:1], MOMENTS[:1], marks=pytest.mark.essential),
        *(
            pytest.param(source, TARGETS, MOMENTS, marks=pytest.mark.long)
            for source in (SQUARE, Grid(2, 2, 3), Grid(2, 2, 0), PLAIN)
        ),
    ],
)
def test_a_run_continues_on_other_tensor_and_data_ranks(
    source: Grid,
    targets: list[Grid],
    moments: tuple[tuple[str, int], ...],
    worlds: Pools,
    tmp_path: Path,
) -> None:
    uneven = {"allow_uneven_batches": True}
    case = PLAIN.case(tmp_path, strategy=PLAIN.options(**uneven), global_batch=11)
    whole = record(worlds, PLAIN, case)
    at = tuple(moment for moment, _ in moments)
    saving = replace(case, strategy=source.options(**uneven), save=at)
    saved = record(worlds, source, saving)
    assert saved.steps == whole.steps
    assert saved.losses == pytest.approx(whole.losses, rel=1e-4)
    for moment, begin in moments:
        path = Path(saving.resumed(moment).ckpt_path or "")
        assert inspect_checkpoint(path).manifest.progress.global_batch_size == 11
        for target in targets:
            again = tmp_path / f"{target}-{begin}.ckpt"
            options = target.options(**uneven)
            run = saving.resumed(moment, strategy=options, callbacks=(partial(SavesFirst, again),))
            found = record(worlds, target, run)
            assert found.steps == from_step(whole.steps, begin), target
            assert found.losses == pytest.approx(from_step(whole.losses, begin), rel=1e-4), target
            assert fingerprint_checkpoint(again) == fingerprint_checkpoint(path), target
            is_new = any("so each rank starts a new stream" in text for text in found.messages)
            assert is_new == (replace(target, stage=source.stage) != source), target


@pytest.mark.parametrize("background", [False, True])
def test_the_same_ranks_continue_bit_for_bit(
    background: bool, worlds: Pools, tmp_path: Path
) -> None:
    """With dropout, workers and noise, whose random numbers tensor ranks share."""
    case = SQUARE.case(
        tmp_path,
        save=("step 0.3", "end"),
        dropout=0.3,
        noise=0.5,
        loader={"num_workers": 1},
        strategy=SQUARE.options(async_save=background),
        epochs=1,
    )
    whole = record(worlds, SQUARE, case)
    end = fingerprint_checkpoint(tmp_path / "end.ckpt")
    resumed = record(worlds, SQUARE, case.resumed("step 0.3", save=("end",)))
    assert resumed.losses == from_step(whole.losses, 3)
    assert fingerprint_checkpoint(tmp_path / "end.ckpt") == end


class Streamed(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    @override
    def __iter__(self) -> Iterator[Any]:
        samples = IndexedSamples(SAMPLES, 0.0)
        return (samples[index] for index in range(self.count))


def evaluate_on(run: FitCase) -> dict[str, float]:
    with engine_forgotten():
        strategy = ElasticDeepSpeedStrategy(**run.strategy)
        trainer = quiet_trainer(strategy)
        loader = DataLoader(IndexedSamples(SAMPLES, 0.0), batch_size=2)
        (values,) = trainer.validate(CutNet(run), loader, ckpt_path=run.ckpt_path, verbose=False)
        vote = trainer.strategy.reduce(torch.tensor(int(trainer.is_global_zero)), reduce_op="sum")
        # In a prediction, other data ranks have no batch. ZeRO-3 needs one on each.
        has_data = (
            strategy.zero_stage_3 or trainer.global_rank < run.strategy["tensor_parallel_size"]
        )
        one = DataLoader(Streamed(1 if has_data else 0))
        predicted: Any = trainer.predict(CutNet(run), one, ckpt_path=run.ckpt_path)
        found = {**values, "vote": vote, "predicted": predicted[0] if predicted else None}
        return {name: float(value) for name, value in found.items() if value is not None}


@pytest.mark.parametrize(
    "grids", [(SQUARE,), pytest.param((Grid(2, 1), Grid(2, 2, 3)), marks=pytest.mark.long)]
)
def test_evaluations_count_data_ranks(
    grids: tuple[Grid, ...], worlds: Pools, tmp_path: Path
) -> None:
    record(worlds, SQUARE, SQUARE.case(tmp_path, save=("end",), epochs=1))
    found = {}
    for grid in (Grid(1, 1), *grids):
        run = grid.case(tmp_path, seed=7).resumed("end", strategy=grid.options())
        found[str(grid)] = worlds.run(grid.world, partial(evaluate_on, run))
        assert [of_rank.pop("gathered") for of_rank in found[str(grid)]] == [grid.data] * grid.world
    expected = found[str(Grid(1, 1))][0]
    assert expected["samples"] == expected["counted"] == SAMPLES
    assert expected["vote"] == 1
    for of_ranks in found.values():
        for of_rank in of_ranks:
            assert of_rank == pytest.approx({name: expected[name] for name in of_rank}, rel=1e-5)


@dataclass(frozen=True)
class Texts:
    ids: list[int]
    text: str


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"x": torch.zeros(3)}, {"x": torch.ones(3)}),
        (["a question"], ["an answer"]),
        (Texts([1], "a"), Texts([1], "b")),
        ([np.zeros(2000)], [np.eye(1, 2000)[0]]),
        (torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse()),
    ],
)
def test_any_content_of_a_batch_is_compared(one: object, other: object) -> None:
    assert _digest(one) == _digest(copy.deepcopy(one)) != _digest(other)


def validate_with_noise(run: FitCase) -> float:
    with engine_forgotten():
        pl.seed_everything(run.seed, workers=True, verbose=False)
        trainer = quiet_trainer(ElasticDeepSpeedStrategy(**run.strategy))
        loader = DataLoader(IndexedSamples(SAMPLES, 0.5), num_workers=1)
        (values,) = trainer.validate(CutNet(run), loader, verbose=False)
        return values["val"]


@pytest.mark.long
def test_workers_of_tensor_ranks_draw_the_same_numbers(worlds: Pools, tmp_path: Path) -> None:
    """Otherwise, the comparison of the first batch would fail."""
    one, other = worlds.run(2, partial(validate_with_noise, Grid(2, 1).case(tmp_path)))
    assert one == other


def gathered_with_gradients(run: FitCase) -> str:
    with engine_forgotten():
        strategy = ElasticDeepSpeedStrategy(**run.strategy)
        trainer, loader = quiet_trainer(strategy), DataLoader(IndexedSamples(SAMPLES, 0.0))
        trainer.validate(CutNet(run), loader, verbose=False)
        return error_text(lambda: strategy.all_gather(torch.ones(1), sync_grads=True))


def test_gathering_with_gradients_is_refused(worlds: Pools, tmp_path: Path) -> None:
    for text in worlds.run(2, partial(gathered_with_gradients, Grid(2, 1).case(tmp_path))):
        assert "UnsupportedError: all_gather(sync_grads=True) with tensor parallelism" in text


def error_of_evaluation(run: FitCase) -> str:
    return error_text(lambda: evaluate_on(run))


def test_averaged_weights_are_refused_in_a_cut_evaluation(worlds: Pools, tmp_path: Path) -> None:
    averaged = PLAIN.case(tmp_path, save=("end",), epochs=1, callbacks=(WeightAveraging,))
    record(worlds, PLAIN, averaged)
    run = averaged.resumed("end", strategy=Grid(2, 1).options())
    for text in worlds.run(2, partial(error_of_evaluation, run)):
        assert "an evaluation with tensor parallelism cannot use" in text


class Descending(CutNet):
    """Trains with SGD, whose steps have the size of the gradients."""

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.of.rate, momentum=0.9)


def largest_difference(one: dict[int, float], other: dict[int, float]) -> float:
    assert one.keys() == other.keys()
    return max(abs(value - other[step]) for step, value in one.items())


@pytest.mark.parametrize(
    "stage", [2, *(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 1, 3))]
)
def test_gradients_are_clipped_as_on_one_tensor_rank(
    stage: int, worlds: Pools, tmp_path: Path
) -> None:
    """The norm counts weights that are cut once, and copies once."""

    def run(grid: Grid, clip: float | None = 0.5, **changes: Any) -> RunRecord:
        net = {"net": Descending, "rate": 0.05, "trainer": {"gradient_clip_val": clip}}
        return record(worlds, grid, grid.case(tmp_path, epochs=1, **net, **changes))

    plain, cut = Grid(1, 2, stage), Grid(2, 2, stage)
    clipped, free = run(plain), run(plain, None)
    rounding = largest_difference(clipped.losses, run(Grid(1, 1, stage)).losses)
    tolerance = 10 * max(rounding, 1e-7)
    assert largest_difference(clipped.losses, free.losses) > 1000 * tolerance
    whole = run(cut, save=("step 0.3", "end"))
    assert largest_difference(clipped.losses, whole.losses) < tolerance
    end = fingerprint_checkpoint(tmp_path / "end.ckpt")
    resumed = run(cut, save=("end",), ckpt_path=str(tmp_path / "step-0.3.ckpt"))
    assert resumed.losses == from_step(whole.losses, 3)
    assert fingerprint_checkpoint(tmp_path / "end.ckpt") == end


def fit_twice_on(run: FitCase, *, renews: bool) -> tuple[list[float], str]:
    """Fit for two epochs, one by one, and evaluate; return the values, and a refusal.

    ``renews``: with a new module for the second epoch.
    """
    with engine_forgotten():
        pl.seed_everything(run.seed, workers=True, verbose=False)
        net, path, values = CutNet(run), f"{run.root}/end.ckpt", []
        loader = DataLoader(IndexedSamples(24, 0.0), batch_size=4)
        for epochs in (1, 2):
            net = CutNet(run) if renews else net
            strategy = ElasticDeepSpeedStrategy(**run.strategy, global_batch_size=12)
            trainer = quiet_trainer(strategy, max_epochs=epochs)
            trainer.fit(net, loader, loader, ckpt_path=path if epochs == 2 else None)
            values.append(float(trainer.callback_metrics["val"]))
            values += [r["val"] for r in trainer.validate(net, loader, verbose=False)]
            trainer.save_checkpoint(path)
            found = trainer.validate(net, loader, ckpt_path=path, verbose=False)
            values += [r["val"] for r in found]
        plain = ElasticDeepSpeedStrategy(config=Grid(1, 1).options()["config"])
        return values, error_text(lambda: quiet_trainer(plain).validate(net, loader))


@pytest.mark.parametrize(
    ("grid", "renews"), [(Grid(2, 1), False), pytest.param(SQUARE, True, marks=pytest.mark.long)]
)
def test_a_cut_module_is_evaluated_and_trained_again(
    grid: Grid, renews: bool, worlds: Pools, tmp_path: Path
) -> None:
    """As a new module is."""
    run = partial(fit_twice_on, grid.case(tmp_path))
    values, refusal = worlds.run(grid.world, partial(run, renews=False))[0]
    assert values == pytest.approx([values[0]] * 3 + [values[3]] * 3, rel=1e-6)
    if renews:
        assert values == worlds.run(grid.world, partial(run, renews=True))[0][0]
    assert "layers that an earlier engine has cut" in refusal


def refused_on(run: FitCase) -> str:
    with engine_forgotten():
        return error_text(lambda: fit(run))


def seeded_by_rank(run: FitCase) -> str:
    class Seeds(Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            torch.manual_seed(distributed.get_rank())

    return refused_on(replace(run, callbacks=(Seeds,)))


@pytest.mark.parametrize(
    ("grid", "changes", "parts"),
    [
        (SQUARE, {"kind": "iterable"}, ("rank 1 has other samples than rank 0", "data rank 0")),
        (SQUARE, {"kind": "seeds"}, ("rank 1 has other random numbers than rank 0",)),
        (Grid(2, 2, 3), {"net": ShardedNet}, ("tensor parallelism with zero.Init",)),
        (Grid(3, 1), {"strategy": SQUARE.options()}, ("tensor_parallel_size=2 does not divide",)),
        (SQUARE, {"global_batch": 11}, ("11 cannot be shared by 2 devices", "of 2 devices")),
        (SQUARE, {"callbacks": (WeightAveraging,)}, ("but tensor parallelism cuts them: use one",)),
    ],
)
def test_what_tensor_ranks_cannot_share_is_refused(
    grid: Grid, changes: dict[str, Any], parts: tuple[str, ...], worlds: Pools, tmp_path: Path
) -> None:
    by_rank = changes.get("kind") == "seeds"
    run = grid.case(tmp_path, **({} if by_rank else changes))
    for text in worlds.run(grid.world, partial(seeded_by_rank if by_rank else refused_on, run)):
        print(text)
        assert all(part in text for part in parts), text


def test_the_option_and_the_config_must_agree() -> None:
    config = {"tensor_parallel": {"autotp_size": 4}}
    assert ElasticDeepSpeedStrategy(config=config).config == config
    made = ElasticDeepSpeedStrategy(config={"tensor_parallel": {}}, tensor_parallel_size=2)
    assert made.config == {"tensor_parallel": {"autotp_size": 2}}
    assert "tensor_parallel" not in (ElasticDeepSpeedStrategy().config or {})
    with pytest.raises(ValueError, match="but config has tensor_parallel"):
        ElasticDeepSpeedStrategy(config=config, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        ElasticDeepSpeedStrategy(tensor_parallel_size=0)


def test_the_option_is_set_in_yaml() -> None:
    parser = ArgumentParser()
    parser.add_argument("--strategy", type=Strategy)
    kind, options = ElasticDeepSpeedStrategy, {"stage": 2, "tensor_parallel_size": 2}
    name = f"{kind.__module__}.{kind.__qualname__}"
    given = {"strategy": {"class_path": name, "init_args": options}}
    assert parser.parse_object(given).strategy.init_args.tensor_parallel_size == 2
