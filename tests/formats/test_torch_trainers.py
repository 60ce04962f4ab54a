"""``trainer.fit(ckpt_path=...)`` continues from single files and directories of torch."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from typing_extensions import override

from tests.formats import _torch_writers as writers
from tests.formats._load_assertions import as_fixture
from tests.formats._resume_programs import Look, Resumed, ResumingModel, resume, validate
from tests.formats._torch_writers import Run, held, keep
from tests.formats._trainer_writers import DECAY, EveryGradientNet, Watch
from tests.support.engines import EngineCase, Net
from tests.support.fits import quiet_trainer
from tests.support.foreign_checkpoints import Fixture
from tests.support.oracle import Dump, differences, same_bits
from tests.support.ranks import Pools


class Keep(pl.Callback):
    """Records the state at the end of training."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        keep(held(pl_module, trainer.optimizers[0], self.run), self.run)


def fit_ddp(run: Run) -> None:
    """Fit, and save in the middle of an epoch. Collective."""
    warnings.simplefilter("ignore")
    setup = EngineCase(run.world, hidden=5)
    options = {"max_steps": run.steps, "use_distributed_sampler": False}
    trainer = quiet_trainer("ddp", Watch(), Keep(run), **options)
    trainer.fit(EveryGradientNet(setup, hidden=setup.hidden))
    trainer.save_checkpoint(run.path)


def start(path: str, target: EngineCase, options: dict[str, Any]) -> tuple[int, Dump | None]:
    """Fit one step from a checkpoint; return the step and the state before it. Collective."""
    from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy

    warnings.simplefilter("ignore")
    look = Look(target)
    strategy = ElasticDeepSpeedStrategy(config=target.config(), **options)
    trainer = quiet_trainer(strategy, look, max_steps=1, use_distributed_sampler=False)
    trainer.fit(ResumingModel(target, seed=7, hidden=target.hidden), ckpt_path=path)
    return look.step, look.before


pytestmark = pytest.mark.engine

TARGET = EngineCase(3, "3", bucket=5000, hidden=5)


@pytest.fixture(scope="session")
def fitted(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Fixture:
    """Return a checkpoint of DDP on two devices after three steps of an epoch."""
    run = Run(str(tmp_path_factory.mktemp("ddp") / "file"), 2)
    pools.run(2, partial(fit_ddp, run))
    fixture = as_fixture(run)
    fixture.checkpoint.symlink_to(run.path)
    return fixture


def test_fit_continues_from_a_ddp_checkpoint(fitted: Fixture, pools: Pools) -> None:
    path = str(fitted.checkpoint)
    resumed = pools.run(3, partial(resume, fitted, TARGET, path))[0]
    assert isinstance(resumed, Resumed)
    assert not resumed.differing
    assert resumed.step == fitted.setup_steps
    assert resumed.callback == {"rank": 0, "common": [1, 2.5, "three"]}
    assert resumed.mine["tensor"].tolist() == [0, 1, 2]
    assert resumed.rates == pytest.approx([1e-3 * DECAY**step for step in (3, 4)])
    resumed.compare_with_reference.assert_same()


def test_validate_uses_the_weights_of_the_ddp_run(fitted: Fixture, pools: Pools) -> None:
    truth = fitted.truth()
    for weights in pools.run(3, partial(validate, fitted, TARGET)):
        assert len(weights) > 8
        for name, weight in weights.items():
            wanted = truth.get(f"weight/{name}", truth.get(f"frozen/{name}"))
            assert isinstance(wanted, torch.Tensor)
            assert same_bits(wanted, weight), name


@pytest.mark.parametrize("full", [False, True])
def test_a_bare_state_dict_starts_a_new_run(
    full: bool, fitted: Fixture, pools: Pools, tmp_path: Path
) -> None:
    """Lightning's ``load_full_weights`` changes nothing."""
    tree = torch.load(fitted.checkpoint, weights_only=True)
    path = str(tmp_path / "weights.bin")
    torch.save(tree["state_dict"], path)
    options = {"load_optimizer_state": False, "load_full_weights": full}
    step, before = pools.run(3, partial(start, path, TARGET, options))[0]
    assert step == 0
    assert before is not None
    assert not differences(_masters(fitted.truth()), _masters(before))


@pytest.mark.long
def test_a_dcp_directory_restores_weights_and_optimizer(pools: Pools, tmp_path: Path) -> None:
    """Loops start from the beginning."""
    run = Run(str(tmp_path / "alone"))
    pools.run(1, partial(writers.save_tree, run, state_dicts))
    step, before = pools.run(3, partial(start, run.path, EngineCase(3, "2", bucket=5000), {}))[0]
    assert step == 0
    assert before is not None
    held = torch.load(run.truth_path, weights_only=True)
    assert not differences(_masters(held), _masters(before))
    moments = {k: v for k, v in held.items() if k.startswith("exp_avg")}
    assert len(moments) == 18
    assert not differences(moments, {k: before[k] for k in moments})


def state_dicts(model: Net, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _masters(held: Dump) -> Dump:
    kinds = ("master/", "frozen/", "buffer/0/")
    return {k: v for k, v in held.items() if k.startswith(kinds)}
