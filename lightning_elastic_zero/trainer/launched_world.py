"""The nodes and ranks that torchrun has started, whatever the Trainer was told.

An elastic agent starts the ranks anew when nodes are lost or come back, with another number of
them. Lightning would refuse every world but the one of ``devices`` and ``num_nodes``, which a
script cannot know. The variables are those of torch's ``elastic/agent/server/api.py``.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_elastic_zero.errors import UnsupportedError

RANKS, RANKS_OF_NODE, NODES = "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"
"""Environment variables that torchrun sets for each rank."""

_TOLD = "nodes_told"


class NodesOfJob:
    """The number of nodes: those that torchrun has started, or what the Trainer was told."""

    def __get__(self, strategy: DeepSpeedStrategy | None, owner: type) -> Any:
        """Return it; of the class, this descriptor.

        Raises:
            UnsupportedError: nodes have different numbers of ranks, which Lightning cannot number.
        """
        if strategy is None:
            return self
        if not _is_launched(strategy):
            return int(vars(strategy).get(_TOLD, 1))
        ranks, here, nodes = (int(os.environ[name]) for name in (RANKS, RANKS_OF_NODE, NODES))
        if here * nodes != ranks:
            msg = (
                f"torchrun has started {ranks} ranks on {nodes} nodes, {here} of them on this one: "
                "give every node the same --nproc-per-node"
            )
            raise UnsupportedError(msg)
        return nodes

    def __set__(self, strategy: DeepSpeedStrategy, told: int) -> None:
        """Take the Trainer's, for when nobody has started ranks."""
        vars(strategy)[_TOLD] = told


def devices_of_node(
    strategy: DeepSpeedStrategy, told: list[torch.device] | None
) -> list[torch.device] | None:
    """Return this node's devices: as many as it has ranks, where torchrun has started them.

    CPUs are numbered too: DeepSpeed wants each device's index.

    Args:
        strategy: one that has its accelerator and cluster environment, once there are devices.
        told: the devices of the Trainer's ``devices``.
    """
    accelerator = strategy.accelerator
    if told and accelerator is not None and _is_launched(strategy):
        here = int(os.environ[RANKS_OF_NODE])
        if here != len(told):
            told = accelerator.get_parallel_devices(accelerator.parse_devices(here))
    if told and told[0].type == "cpu":
        return [torch.device("cpu", index) for index in range(len(told))]
    return told


def _is_launched(strategy: DeepSpeedStrategy) -> bool:
    """Whether torchrun has started this rank, and the user has chosen no other environment."""
    by_torchrun = isinstance(strategy.cluster_environment, TorchElasticEnvironment)
    return by_torchrun and {RANKS, RANKS_OF_NODE, NODES} <= os.environ.keys()
