"""Runs that average their weights: trained weights and their average are kept apart.

Real Trainers write the files, with Lightning's ``WeightAveraging``: one device, whose file contains
the average in place of the weights, and Lightning's own DeepSpeedStrategy, which drops it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from tests.formats._fixture_table import FixtureRow, small
from tests.formats._resume_programs import ResumingModel, validate
from tests.formats._trainer_writers import EveryGradientNet, OnCPU
from tests.support.engines import EngineCase
from tests.support.fits import quiet_trainer
from tests.support.foreign_checkpoints import Fixture
from tests.support.oracle import dump, same_bits
from tests.support.outcome import captured_warnings
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine

SAVED, END = 3, 5
"""Steps trained when a run is saved, and when it ends."""

ALONE = small(1, "1", "fp32")
TWO = small(2, "1", "fp32")

Weights = dict[str, torch.Tensor]
Writer = Callable[[str], tuple[dict[int, Weights], dict[int, Weights]]]


def state_of(average: EMAWeightAveraging) -> Weights:
    assert average._average_model is not None
    return {k: v.detach().clone() for k, v in average._average_model.state_dict().items()}


class Look(Callback):
    """Records weights and their average, and saves during training."""

    def __init__(
        self, setup: EngineCase, average: EMAWeightAveraging | None, path: str = ""
    ) -> None:
        self.of, self.average, self.path = setup, average, path
        self.weights: dict[int, Weights] = {}
        self.averages: dict[int, Weights] = {}

    def note(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Record this step; only rank 0 has the full weights of ZeRO-3."""
        step, engine = trainer.global_step, getattr(trainer.strategy, "deepspeed_engine", None)
        if engine is None:
            held: Any = {f"master/{k}": v for k, v in module.named_parameters() if v.requires_grad}
        else:
            held = dump(engine, self.of) or {}
        self.weights[step] = {
            key: tensor.detach().clone() for key, tensor in held.items() if key[:6] == "master"
        }
        if self.average is not None:
            self.averages[step] = state_of(self.average)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.note(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        self.note(trainer, pl_module)
        if trainer.global_step == SAVED and self.path:
            trainer.save_checkpoint(self.path)


def fit(
    setup: EngineCase, strategy: Strategy | str, look: Look, *, resume: str | None = None
) -> tuple[dict[int, Weights], dict[int, Weights]]:
    """Fit, resumed or not; return weights and averages by step. Collective."""
    module = EveryGradientNet(setup) if resume is None else ResumingModel(setup, seed=7)
    if isinstance(module, ResumingModel):
        module.first = SAVED
    callbacks = [*([look.average] if look.average else []), look]
    trainer = quiet_trainer(strategy, *callbacks, max_steps=END, use_distributed_sampler=False)
    trainer.fit(module, ckpt_path=resume)
    return look.weights, look.averages


def write_alone(path: str) -> tuple[dict[int, Weights], dict[int, Weights]]:
    """Train on one device with averaging and without DeepSpeed; save a single file."""
    return fit(ALONE, "auto", Look(ALONE, EMAWeightAveraging(decay=0.9), path))


def write_stock(path: str) -> tuple[dict[int, Weights], dict[int, Weights]]:
    """Train with averaging and Lightning's own strategy; save a directory. Collective."""
    look = Look(TWO, EMAWeightAveraging(decay=0.9), path)
    return fit(TWO, OnCPU(FixtureRow("", TWO, ""), str(Path(path).parent)), look)


def write_ours(path: str) -> tuple[dict[int, Weights], dict[int, Weights]]:
    """Train without averaging; save a directory of this library. Collective."""
    from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy

    return fit(TWO, ElasticDeepSpeedStrategy(config=TWO.config()), Look(TWO, None, path))


def continue_run(
    path: str, setup: EngineCase, *, averaging: bool
) -> tuple[dict[int, Weights], dict[int, Weights], list[str]]:
    """Resume; return weights and averages by step, and the warnings. Collective."""
    from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy

    average = EMAWeightAveraging(decay=0.9) if averaging else None
    # DeepSpeed clips by default, but the writer of the single file does not.
    config = {**setup.config(), "gradient_clipping": 0.0}
    strategy = ElasticDeepSpeedStrategy(config=config, on_unresumable_data="restart_epoch")
    with captured_warnings() as messages:
        found = fit(setup, strategy, Look(setup, average), resume=path)
    return (*found, messages)


def assert_same(wanted: Weights, found: Weights) -> None:
    assert wanted
    assert wanted.keys() == found.keys()
    assert not [name for name in wanted if not same_bits(wanted[name], found[name])]


@pytest.fixture(scope="module")
def alone(
    pools: Pools, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[int, Weights], dict[int, Weights]]:
    """Return a single file of an averaging run, and its state at each step."""
    path = str(tmp_path_factory.mktemp("alone") / "averaged.ckpt")
    ((weights, averages),) = pools.run(1, partial(write_alone, path))
    return path, weights, averages


@pytest.mark.parametrize(
    ("setup", "averaging"),
    [
        (small(1, "1", "fp32"), True),
        (small(2, "2", "fp32"), True),
        (small(2, "3", "fp32"), False),
    ],
    ids=str,
)
def test_masters_are_the_trained_weights_not_the_average(
    setup: EngineCase,
    averaging: bool,
    alone: tuple[str, dict[int, Weights], dict[int, Weights]],
    pools: Pools,
) -> None:
    path, weights, averages = alone
    means = {f"master/{k.removeprefix('module.')}": v for k, v in averages[SAVED].items()}
    assert not same_bits(weights[SAVED]["master/a.weight"], means["master/a.weight"])
    of_ranks = pools.run(setup.world, partial(continue_run, path, setup, averaging=averaging))
    found, _, messages = of_ranks[0]
    assert_same(weights[SAVED], found[SAVED])
    for name, wanted in weights[END].items():
        torch.testing.assert_close(found[END][name], wanted, rtol=1e-5, atol=1e-6)
    if averaging:
        for _, of_rank, _ in of_ranks:
            assert_same(averages[SAVED], of_rank[SAVED])
        # Buffers depend on the rank's part of the batch.
        for name in (name.replace("master/", "module.") for name in weights[END]):
            now, wanted = of_ranks[0][1][END][name], averages[END][name]
            torch.testing.assert_close(now, wanted, rtol=1e-5, atol=1e-6)
    assert any("has no WeightAveraging callback" in line for line in messages) == (not averaging)


@pytest.mark.parametrize("setup", [small(1, "2", "fp32"), small(2, "3", "fp32")], ids=str)
def test_an_evaluation_uses_the_average(
    setup: EngineCase, alone: tuple[str, dict[int, Weights], dict[int, Weights]], pools: Pools
) -> None:
    path = Path(alone[0])
    fixture = Fixture(path.parent, setup, {"path": path.name})
    for found in pools.run(setup.world, partial(validate, fixture, setup)):
        wanted = {name: alone[2][SAVED][f"module.{name}"] for name in found}
        assert_same(wanted, found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("write", "why"),
    [(write_stock, "does not save it"), (write_ours, "not created with WeightAveraging")],
)
def test_a_missing_average_starts_from_the_weights_with_a_warning(
    write: Writer, why: str, pools: Pools, tmp_path: Path
) -> None:
    path = str(tmp_path / "a.ckpt")
    weights, _ = pools.run(2, partial(write, path))[0]
    for setup in (TWO, ALONE):
        of_ranks = pools.run(setup.world, partial(continue_run, path, setup, averaging=True))
        found, averages, messages = of_ranks[0]
        assert_same(weights[SAVED], found[SAVED])
        first = {f"master/{k.removeprefix('module.')}": v for k, v in averages[SAVED].items()}
        assert_same(weights[SAVED], {k: v for k, v in first.items() if k in weights[SAVED]})
        assert any(why in line for line in messages), messages
