"""Under torchrun and Ray the run takes the nodes and ranks that were started, not the script's."""

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
    """Make this process look like a rank of torchrun."""

    def start(nodes: int, of_node: int, rank: int = 0, ranks: int | None = None) -> None:
        for name, value in {
            "TORCHELASTIC_RUN_ID": "a job",
            "WORLD_SIZE": nodes * of_node if ranks is None else ranks,
            "LOCAL_WORLD_SIZE": of_node,
            "GROUP_WORLD_SIZE": nodes,
            "GROUP_RANK": rank // of_node,
            "RANK": rank,
            "LOCAL_RANK": rank % of_node,
        }.items():
            monkeypatch.setenv(name, str(value))

    return start


def trainer(**options: object) -> pl.Trainer:
    """Return a Trainer of a script that was written for one device of one node."""
    settings = {"devices": 1, "num_nodes": 1, "strategy": ElasticDeepSpeedStrategy(stage=3)}
    return pl.Trainer(
        **{**settings, **options},  # type: ignore[arg-type]
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
    )


@pytest.mark.parametrize(("nodes", "of_node", "rank"), [(3, 2, 5), (1, 1, 0), (1, 4, 2), (2, 1, 1)])
@pytest.mark.parametrize("strategy", ["by name", "an object"])
def test_nodes_and_ranks_are_those_of_the_launcher(
    strategy: str, nodes: int, of_node: int, rank: int, torchrun: Start
) -> None:
    """Lightning's own check of devices times nodes must hold in each world."""
    torchrun(nodes, of_node, rank)
    made = trainer(strategy="elastic_deepspeed_stage_2") if strategy == "by name" else trainer()
    assert (made.num_nodes, made.num_devices, made.world_size) == (nodes, of_node, nodes * of_node)
    assert (made.global_rank, made.local_rank, made.node_rank) == (
        rank,
        rank % of_node,
        rank // of_node,
    )
    assert made.strategy.launcher is not None
    made.strategy.launcher.launch(lambda: None, trainer=made)


def test_nodes_of_different_sizes_are_refused(torchrun: Start) -> None:
    """Lightning numbers ranks by equal nodes: two would share a sampler's position."""
    torchrun(2, 3, ranks=5)
    with pytest.raises(UnsupportedError, match="every node the same --nproc-per-node"):
        trainer()


def test_an_environment_passed_by_the_user_is_not_replaced(torchrun: Start) -> None:
    torchrun(2, 3)
    made = trainer(plugins=[LightningEnvironment()])
    assert (made.num_nodes, made.num_devices) == (1, 1)


@pytest.mark.parametrize(("given", "taken"), [(None, 5), (30, 5), (31, 31), (2, 2)])
def test_collectives_time_out_before_an_agent_does(
    given: int | None, taken: int, torchrun: Start
) -> None:
    """Unless the user sets a timeout; LightningCLI passes Lightning's default."""
    options: dict[str, Any] = {} if given is None else {"timeout": timedelta(minutes=given)}
    outside = ElasticDeepSpeedStrategy(**options)
    torchrun(2, 1)
    launched = ElasticDeepSpeedStrategy(**options)
    assert launched._timeout == timedelta(minutes=taken)
    assert outside._timeout == timedelta(minutes=given or 30)


@pytest.mark.parametrize(("given", "waited_s"), [(None, 300.0), (120, 7200.0)])
def test_ranks_meet_within_the_strategys_timeout(
    given: int | None, waited_s: float, torchrun: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may prepare data for an hour before the fit."""
    torchrun(1, 1)
    waited: list[float] = []
    monkeypatch.setattr(launched_world, "leave_shared_store", waited.append)
    options: dict[str, Any] = {} if given is None else {"timeout": timedelta(minutes=given)}
    made = trainer(strategy=ElasticDeepSpeedStrategy(**options))
    strategy = made.strategy
    assert isinstance(strategy, ElasticDeepSpeedStrategy)
    launched_world.prepare_to_meet(strategy, strategy._timeout)
    assert waited == [waited_s]


@pytest.mark.parametrize(("workers", "here", "rank", "local"), [(3, 2, 1, 1), (3, 1, 2, 0)])
def test_ray_numbers_its_workers(
    workers: int, here: int, rank: int, local: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes may have different numbers of them; each worker has its own device."""

    class RayLightningEnvironment(LightningEnvironment):
        """Answers as Ray's does on this worker."""

        def world_size(self) -> int:
            return workers

        def global_rank(self) -> int:
            return rank

        def local_rank(self) -> int:
            return local

        def set_world_size(self, size: int) -> None:
            """Take nobody's."""

        def set_global_rank(self, rank: int) -> None:
            """Take nobody's."""

    rays = SimpleNamespace(RayLightningEnvironment=RayLightningEnvironment)
    monkeypatch.setitem(sys.modules, "ray.train.lightning", rays)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    monkeypatch.setenv("LOCAL_RANK", str(local))
    made = trainer(plugins=[RayLightningEnvironment()])
    assert (made.world_size, made.global_rank, made.num_devices) == (workers, rank, here)
    assert made.strategy.root_device.index == local
    assert made.strategy.launcher is not None
    made.strategy.launcher.launch(lambda: None, trainer=made)


def test_ray_workers_without_rays_environment_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would train alone."""
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace())
    monkeypatch.setattr(launched_world, "size_of_process_group", lambda: 2)
    strategy = trainer().strategy
    assert isinstance(strategy, ElasticDeepSpeedStrategy)
    with pytest.raises(UnsupportedError, match="started 2 workers, but"):
        launched_world.prepare_to_meet(strategy, strategy._timeout)


@pytest.mark.parametrize(
    ("arguments", "variable", "found"),
    [
        (["--nnodes=1:4", "fit.py"], None, "1:4"),
        (["--nnodes", "2:8", "fit.py"], "2", "2:8"),
        (["fit.py"], "1:4", "1:4"),
        (["--nnodes=2", "fit.py"], "1:4", ""),
        (["--nnodes=2:2", "fit.py"], None, ""),
        (["--standalone", "fit.py"], None, ""),
    ],
)
def test_only_agents_whose_nodes_may_change_are_warned(
    arguments: list[str], variable: str | None, found: str
) -> None:
    assert launched_world.changing_nodes(["torchrun", *arguments], variable) == found
