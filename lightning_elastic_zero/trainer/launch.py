"""Ranks started by torchrun or Ray Train, and SIGTERM.

An elastic launcher restarts the ranks with another number of nodes when nodes leave or join, so
``devices`` and ``num_nodes`` of the Trainer are replaced by the launcher's numbers.

SIGTERM: all ranks of a fit stop before the same batch. Lightning (since 2.5.2) broadcasts within
the signal handler, which can deadlock with other collectives. Here the handler only records the
signal, and the collective that Lightning performs before each batch reports it to all ranks. If
that collective fails, training ends, because ranks could otherwise wait in different collectives.
"""

from __future__ import annotations

import inspect
import os
import re
import signal
import sys
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_elastic_zero.coordination.ranks import any_rank
from lightning_elastic_zero.coordination.store import (
    SHARED,
    leave_shared_store,
    size_of_process_group,
)
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.trainer.lightning import is_fitting, note_sigterm, replace_sigterm_steps

RANKS, RANKS_OF_NODE, NODES = "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"
"""Environment variables set by torchrun for each rank; Ray sets the second one only."""

_RAYS = "ray.train.lightning"
"""Module of Ray's cluster environment, imported by its users."""

JOB = "TORCHELASTIC_RUN_ID"
"""Environment variable by which torch and Lightning recognize torchrun."""

COLLECTIVE_TIMEOUT = timedelta(minutes=5)
"""Default timeout of collectives under torchrun.

If a node hangs or is disconnected, the other agents notice only when their own workers time out.
Lightning's default of 30 minutes exceeds the agents' timeouts: 10 minutes to join, 5 to exit.
"""

_TOLD = "nodes_told"

_CONFIGURED = "_parallel_devices"
"""Lightning's own name."""


class NodesOfJob:
    """Descriptor of the number of nodes: that of torchrun, or else of the Trainer."""

    def __get__(self, strategy: DeepSpeedStrategy | None, owner: type) -> Any:
        """Return the number of nodes.

        Raises:
            UnsupportedError: Nodes have different numbers of ranks.
        """
        if strategy is None:
            return self
        if not _is_launched(strategy):
            return int(vars(strategy).get(_TOLD, 1))
        ranks, here, nodes = (int(os.environ[name]) for name in (RANKS, RANKS_OF_NODE, NODES))
        if here * nodes != ranks:
            msg = (
                f"torchrun has started {ranks} ranks on {nodes} nodes, {here} of them on this one. "
                "Give every node the same --nproc-per-node"
            )
            raise UnsupportedError(msg)
        return nodes

    def __set__(self, strategy: DeepSpeedStrategy, told: int) -> None:
        """Take the Trainer's, for when nobody has started ranks."""
        vars(strategy)[_TOLD] = told


class DevicesOfNode:
    """Descriptor of this node's devices: one per rank started by torchrun or Ray, or as configured.

    CPUs are numbered too, because DeepSpeed needs each device's index.
    """

    def __get__(self, strategy: DeepSpeedStrategy | None, owner: type) -> Any:
        """Return them, None before there are any; of the class, this descriptor."""
        if strategy is None:
            return self
        told: list[torch.device] | None = vars(strategy)[_CONFIGURED]
        accelerator = strategy.accelerator
        if told and accelerator is not None and (_is_launched(strategy) or _is_rays(strategy)):
            here = int(os.environ[RANKS_OF_NODE])
            if here != len(told):
                told = accelerator.get_parallel_devices(accelerator.parse_devices(here))
        if told and told[0].type == "cpu":
            return [torch.device("cpu", index) for index in range(len(told))]
        return told

    def __set__(self, strategy: DeepSpeedStrategy, told: list[torch.device] | None) -> None:
        """Take the Trainer's, for when nobody has started ranks."""
        vars(strategy)[_CONFIGURED] = told


def limit_waiting(options: dict[str, Any]) -> dict[str, Any]:
    """Set the default timeout of collectives in a strategy's options, under torchrun.

    LightningCLI also passes options that are not set, so Lightning's default counts as not set.
    """
    default = inspect.signature(DeepSpeedStrategy.__init__).parameters["timeout"].default
    if JOB in os.environ and options.get("timeout", default) == default:
        options["timeout"] = COLLECTIVE_TIMEOUT
    return options


def prepare_to_meet(strategy: DeepSpeedStrategy, timeout: timedelta | None) -> None:
    """Check Ray's world; under torchrun, agree on a new store. Collective, before ranks connect.

    A warning names the variable that torchrun needs where nodes may join: without it the agent of
    one that joins waits for an address that is not there, and no worker can help it.

    Args:
        strategy: one that has its cluster environment.
        timeout: of its collectives; None: torch's.

    Raises:
        RanksError: ranks did not come.
        UnsupportedError: Ray has started ranks of which the Trainer does not know.
    """
    _check_rays_world(strategy)
    if not _is_launched(strategy):
        return
    if timeout == COLLECTIVE_TIMEOUT:
        minutes = timeout.total_seconds() / 60
        rank_zero_info(
            f"Under torchrun, collectives time out after {minutes:g} minutes. Pass `timeout` to "
            "the strategy if one rank can work alone for longer."
        )
    agent = Path(f"/proc/{os.getppid()}/cmdline")
    arguments = agent.read_text(errors="replace").split("\0") if agent.exists() else []
    nodes = changing_nodes(arguments, os.environ.get("PET_NNODES"))
    if nodes and os.environ.get(SHARED) == str(True):
        rank_zero_warn(
            f"--nnodes={nodes} lets nodes join and leave, but torchrun's agents share one store: "
            "the run will hang when a node joins. Start torchrun with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all nodes."
        )
    leave_shared_store((timeout or COLLECTIVE_TIMEOUT).total_seconds())


def changing_nodes(arguments: list[str], variable: str | None) -> str:
    """Return the range of nodes that torchrun was given; nothing where their number is fixed.

    Args:
        arguments: the command line of its agent.
        variable: the environment's ``PET_NNODES``, which torchrun takes where that has none.
    """
    told = re.search(r"\n--nnodes[=\n](\S*)", "\n".join(["", *arguments]))
    nodes = told[1] if told else variable or ""
    least, _, most = nodes.partition(":")
    return nodes if most and most != least else ""


def _is_launched(strategy: DeepSpeedStrategy) -> bool:
    """Whether torchrun has started this rank, and the user has chosen no other environment."""
    by_torchrun = isinstance(strategy.cluster_environment, TorchElasticEnvironment)
    return by_torchrun and {RANKS, RANKS_OF_NODE, NODES} <= os.environ.keys()


def _is_rays(strategy: DeepSpeedStrategy) -> bool:
    """Whether Ray Train has started this rank, and the user has chosen Ray's environment."""
    environment = getattr(sys.modules.get(_RAYS), "RayLightningEnvironment", None)
    chosen = environment is not None and isinstance(strategy.cluster_environment, environment)
    return chosen and RANKS_OF_NODE in os.environ


def _check_rays_world(strategy: DeepSpeedStrategy) -> None:
    """Check that the Trainer has the ranks that Ray Train has started, and connected already.

    Raises:
        UnsupportedError: it has not; each rank would train by itself.
    """
    ranks = size_of_process_group() if _RAYS.rpartition(".")[0] in sys.modules else None
    if ranks is not None and ranks != strategy.world_size:
        msg = (
            f"Ray Train has started {ranks} workers, but the Trainer's world size is "
            f"{strategy.world_size}. Pass Trainer(plugins=[RayLightningEnvironment()]) from "
            "ray.train.lightning, and omit `devices` and `num_nodes`"
        )
        raise UnsupportedError(msg)


_SIGTERM_EXIT_CODE = 128 + signal.SIGTERM
"""What a shell tells of a process that SIGTERM has ended."""


class SigtermAgreement:
    """Whether any rank of a fit was sent a SIGTERM."""

    def __init__(self) -> None:
        self._heard = False

    def begin(self, trainer: pl.Trainer) -> None:
        """Take the place of Lightning's handler and broadcast, for a fit or an evaluation."""
        self._heard = False
        replace_sigterm_steps(
            trainer, partial(self._on_signal, trainer), partial(self.stop_together, trainer)
        )

    def _on_signal(self, trainer: pl.Trainer, number: int, _: object) -> None:
        """Note it, and pass it on to ranks that Lightning has started.

        One device, and each rank of an evaluation, which has no collective before a batch, ends by
        itself.
        """
        launcher = trainer.strategy.launcher
        if not self._heard and launcher is not None:
            launcher.kill(number)
        self._heard = True
        if trainer.world_size == 1 or not is_fitting(trainer):
            note_sigterm(trainer)

    def stop_together(self, trainer: pl.Trainer) -> None:
        """Raise on all ranks where any was sent a SIGTERM; collective, where there are several.

        Raises:
            SIGTERMException: one was.
            RuntimeError: a rank is gone, or the network.
        """
        if trainer.world_size == 1:
            return  # Lightning asks for itself.
        heard = self._heard or trainer.received_sigterm
        if any_rank(flag=heard, device=trainer.strategy.root_device):
            note_sigterm(trainer)
            with suppress(RuntimeError):  # Who is gone already has no part in it.
                trainer.strategy.barrier()
            raise SIGTERMException


def set_exit_code(exception: BaseException) -> None:
    """Set the exit code of a process that SIGTERM ends, under torchrun.

    By Lightning it ends with 0. The agent of a rank that has heard of another one's signal would
    take that for the end of the job, and end the whole rendezvous.
    """
    if isinstance(exception, SIGTERMException) and exception.code is None and JOB in os.environ:
        exception.code = _SIGTERM_EXIT_CODE
