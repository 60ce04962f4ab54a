"""Under torchrun and Ray, the run uses the started nodes and ranks, not those of the script."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.trainer import launch as launched_world
from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy

Start = Callable[..., None]


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Return a function that makes this process look like a rank of torchrun."""

    def start(nodes: int, per_node: int, rank: int = 0, ranks: int | None = None) -> None:
        for name, value in {
            "TORCHELASTIC_RUN_ID": "a job",
            "WORLD_SIZE": nodes * per_node if ranks is None else ranks,
            "LOCAL_WORLD_SIZE": per_node,
            "GROUP_WORLD_SIZE": nodes,
            "GROUP_RANK": rank // per_node,
            "RANK": rank,
            "LOCAL_RANK": rank % per_node,
        }.items():
            monkeypatch.setenv(name, str(value))

    return start


def trainer(**options: object) -> pl.Trainer:
    """Return a Trainer with the options of a script for one device of one node."""
    settings = {"devices": 1, "num_nodes": 1, "strategy": ElasticDeepSpeedStrategy(stage=3)}
    return pl.Trainer(
        **{**settings, **options},  # type: ignore[arg-type]
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
    )


@pytest.mark.parametrize(
    ("nodes", "per_node", "rank"), [(3, 2, 5), (1, 1, 0), (1, 4, 2), (2, 1, 1)]
)
@pytest.mark.parametrize("strategy", ["by name", "an object"])
def test_nodes_and_ranks_are_those_of_the_launcher(
    strategy: str, nodes: int, per_node: int, rank: int, torchrun: Start
) -> None:
    """Lightning's own check of devices times nodes must pass in each world."""
    torchrun(nodes, per_node, rank)
    run = trainer(strategy="elastic_deepspeed_stage_2") if strategy == "by name" else trainer()
    assert (run.num_nodes, run.num_devices, run.world_size) == (nodes, per_node, nodes * per_node)
    assert (run.global_rank, run.local_rank, run.node_rank) == (
        rank,
        rank % per_node,
        rank // per_node,
    )
    assert run.strategy.launcher is not None
    run.strategy.launcher.launch(lambda: None, trainer=run)


def test_nodes_of_different_sizes_are_refused(torchrun: Start) -> None:
    """Lightning computes ranks for nodes of equal size, so two ranks would get the same samples."""
    torchrun(2, 3, ranks=5)
    with pytest.raises(UnsupportedError, match="every node the same --nproc-per-node"):
        trainer()


def test_an_environment_passed_by_the_user_is_not_replaced(torchrun: Start) -> None:
    torchrun(2, 3)
    run = trainer(plugins=[LightningEnvironment()])
    assert (run.num_nodes, run.num_devices) == (1, 1)


@pytest.mark.parametrize(("option", "expected"), [(None, 5), (30, 5), (31, 31), (2, 2)])
def test_collectives_time_out_before_an_agent_does(
    option: int | None, expected: int, torchrun: Start
) -> None:
    """Unless the user sets a timeout; LightningCLI passes Lightning's default."""
    options: dict[str, Any] = {} if option is None else {"timeout": timedelta(minutes=option)}
    without_launcher = ElasticDeepSpeedStrategy(**options)
    torchrun(2, 1)
    launched = ElasticDeepSpeedStrategy(**options)
    assert launched._timeout == timedelta(minutes=expected)
    assert without_launcher._timeout == timedelta(minutes=option or 30)


@pytest.mark.parametrize(("option", "expected_s"), [(None, 300.0), (120, 7200.0)])
def test_ranks_meet_within_the_strategys_timeout(
    option: int | None, expected_s: float, torchrun: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may prepare data for an hour before the fit."""
    torchrun(1, 1)
    timeouts: list[float] = []
    monkeypatch.setattr(launched_world, "leave_shared_store", timeouts.append)
    options: dict[str, Any] = {} if option is None else {"timeout": timedelta(minutes=option)}
    strategy = trainer(strategy=ElasticDeepSpeedStrategy(**options)).strategy
    assert isinstance(strategy, ElasticDeepSpeedStrategy)
    launched_world.prepare_to_meet(strategy, strategy._timeout)
    assert timeouts == [expected_s]


@pytest.mark.parametrize(("workers", "on_node", "rank", "local"), [(3, 2, 1, 1), (3, 1, 2, 0)])
def test_ranks_are_those_of_rays_workers(
    workers: int, on_node: int, rank: int, local: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes may have different numbers of workers; each worker has its own device."""

    class RayLightningEnvironment(LightningEnvironment):
        """Returns the values of Ray's environment on a worker."""

        def world_size(self) -> int:
            return workers

        def global_rank(self) -> int:
            return rank

        def local_rank(self) -> int:
            return local

        def set_world_size(self, size: int) -> None:
            """Ignore Lightning's number."""

        def set_global_rank(self, rank: int) -> None:
            """Ignore Lightning's number."""

    module = SimpleNamespace(RayLightningEnvironment=RayLightningEnvironment)
    monkeypatch.setitem(sys.modules, "ray.train.lightning", module)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(on_node))
    monkeypatch.setenv("LOCAL_RANK", str(local))
    run = trainer(plugins=[RayLightningEnvironment()])
    assert (run.world_size, run.global_rank, run.num_devices) == (workers, rank, on_node)
    assert run.strategy.root_device.index == local
    assert run.strategy.launcher is not None
    run.strategy.launcher.launch(lambda: None, trainer=run)


def test_ray_workers_without_rays_environment_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker would train on its own."""
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace())
    monkeypatch.setattr(launched_world, "size_of_process_group", lambda: 2)
    strategy = trainer().strategy
    assert isinstance(strategy, ElasticDeepSpeedStrategy)
    with pytest.raises(UnsupportedError, match="started 2 workers, but"):
        launched_world.prepare_to_meet(strategy, strategy._timeout)


@pytest.mark.parametrize(
    ("arguments", "variable", "expected"),
    [
        (["--nnodes=1:4", "fit.py"], None, "1:4"),
        (["--nnodes", "2:8", "fit.py"], "2", "2:8"),
        (["fit.py"], "1:4", "1:4"),
        (["--nnodes=2", "fit.py"], "1:4", ""),
        (["--nnodes=2:2", "fit.py"], None, ""),
        (["--standalone", "fit.py"], None, ""),
    ],
)
def test_only_a_range_of_nodes_causes_a_warning(
    arguments: list[str], variable: str | None, expected: str
) -> None:
    assert launched_world.changing_nodes(["torchrun", *arguments], variable) == expected
