"""Ranks started by torchrun or Ray Train, and SIGTERM.

An elastic launcher restarts the ranks with another number of nodes when nodes leave or join, so
``devices`` and ``num_nodes`` of the Trainer are replaced by the launcher's numbers. Each launcher
is a class, and ``LAUNCHERS`` selects that of a process or a strategy.

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
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_elastic_zero.coordination.launchers import (
    SHARED,
    leave_shared_store,
    size_of_process_group,
)
from lightning_elastic_zero.coordination.ranks import any_rank
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.trainer.lightning import is_fitting

RANKS, RANKS_OF_NODE, NODES = "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"
"""Environment variables set by torchrun for each rank; Ray sets the second one only."""

COLLECTIVE_TIMEOUT = timedelta(minutes=5)
"""Default timeout of collectives under torchrun.

If a node hangs or is disconnected, the other agents notice only when their own workers time out.
Lightning's default of 30 minutes exceeds the agents' timeouts: 10 minutes to join, 5 to exit.
"""

_RAY = "ray.train"
"""Module that a worker of Ray Train has imported."""


class Launcher:
    """The program that has started the ranks, as far as it decides about a run.

    This class decides nothing: Lightning handles its own launcher and SLURM.
    """

    timeout: timedelta | None = None
    """Default timeout of collectives; None: Lightning's."""
    sigterm_exit_code: int | None = None
    """Exit code of a process that SIGTERM ends; None: Lightning's."""

    def has_started_this_process(self) -> bool:
        """Whether the launcher waits for this process; known before a strategy is created."""
        return True

    def is_used_by(self, environment: ClusterEnvironment | None) -> bool:
        """Whether ranks are those of the launcher, by a strategy's cluster environment."""
        return True

    def nodes(self) -> int | None:
        """Return the number of nodes; None: the Trainer's."""
        return None

    def ranks_of_node(self) -> int | None:
        """Return the number of ranks on this node; None: one for each device of the Trainer."""
        return None

    def prepare_to_meet(self, timeout: timedelta | None) -> None:
        """Prepare the connection of ranks; collective. ``timeout``: of the collectives."""


class Torchrun(Launcher):
    """torchrun: its agent on each node restarts the ranks."""

    timeout = COLLECTIVE_TIMEOUT

    sigterm_exit_code = 128 + signal.SIGTERM
    """As shells report it. Lightning's is 0: the agent of a rank that ends because of another
    rank's signal would take 0 for the end of the job, and close the rendezvous."""

    @override
    def has_started_this_process(self) -> bool:
        # By this variable, torch and Lightning recognize torchrun.
        return "TORCHELASTIC_RUN_ID" in os.environ

    @override
    def is_used_by(self, environment: ClusterEnvironment | None) -> bool:
        by_torchrun = isinstance(environment, TorchElasticEnvironment)
        return by_torchrun and {RANKS, RANKS_OF_NODE, NODES} <= os.environ.keys()

    @override
    def nodes(self) -> int:
        ranks, here, nodes = (int(os.environ[name]) for name in (RANKS, RANKS_OF_NODE, NODES))
        if here * nodes != ranks:
            msg = (
                f"torchrun has started {ranks} ranks on {nodes} nodes, {here} of them on this one. "
                "Give every node the same --nproc-per-node"
            )
            raise UnsupportedError(msg)
        return nodes

    @override
    def ranks_of_node(self) -> int:
        return int(os.environ[RANKS_OF_NODE])

    @override
    def prepare_to_meet(self, timeout: timedelta | None) -> None:
        """Agree on a new store.

        If nodes may join, torchrun needs a variable, which a warning names: otherwise the agent of
        a joining node waits for an address that no longer exists.
        """
        if timeout == COLLECTIVE_TIMEOUT:
            minutes = timeout.total_seconds() / 60
            rank_zero_info(
                f"Under torchrun, collectives time out after {minutes:g} minutes. Pass `timeout` "
                "to the strategy if one rank can work alone for longer."
            )
        agent = Path(f"/proc/{os.getppid()}/cmdline")
        arguments = agent.read_text(errors="replace").split("\0") if agent.exists() else []
        nodes = changing_nodes(arguments, os.environ.get("PET_NNODES"))
        if nodes and os.environ.get(SHARED) == str(True):
            rank_zero_warn(
                f"--nnodes={nodes} lets nodes join and leave, but torchrun's agents share one "
                "store: the run will hang when a node joins. Start torchrun with "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all nodes."
            )
        leave_shared_store((timeout or COLLECTIVE_TIMEOUT).total_seconds())


class Ray(Launcher):
    """Ray Train, if the Trainer has its ``RayLightningEnvironment``."""

    @override
    def has_started_this_process(self) -> bool:
        return False  # it decides by the environment only

    @override
    def is_used_by(self, environment: ClusterEnvironment | None) -> bool:
        rays = getattr(sys.modules.get(f"{_RAY}.lightning"), "RayLightningEnvironment", None)
        return rays is not None and isinstance(environment, rays) and RANKS_OF_NODE in os.environ

    @override
    def ranks_of_node(self) -> int:
        return int(os.environ[RANKS_OF_NODE])


LAUNCHERS = (Torchrun(), Ray(), Launcher())


def _launcher_of_process() -> Launcher:
    return next(each for each in LAUNCHERS if each.has_started_this_process())


def _launcher_of(strategy: DeepSpeedStrategy) -> Launcher:
    return next(each for each in LAUNCHERS if each.is_used_by(strategy.cluster_environment))


def nodes_of_job(strategy: DeepSpeedStrategy, configured: int) -> int:
    """Return the number of nodes: that of the launcher, or else of the Trainer."""
    return _launcher_of(strategy).nodes() or configured


def devices_of_node(
    strategy: DeepSpeedStrategy, configured: list[torch.device] | None
) -> list[torch.device] | None:
    """Return a strategy's devices on this node: one per rank of the launcher, or as configured.

    CPUs are numbered too, because DeepSpeed needs each device's index.
    """
    devices, accelerator = configured, strategy.accelerator
    if devices and accelerator is not None:
        here = _launcher_of(strategy).ranks_of_node()
        if here is not None and here != len(devices):
            devices = accelerator.get_parallel_devices(accelerator.parse_devices(here))
    if devices and devices[0].type == "cpu":
        return [torch.device("cpu", index) for index in range(len(devices))]
    return devices


def with_default_timeout(options: dict[str, Any]) -> dict[str, Any]:
    """Set the launcher's default timeout of collectives in a strategy's options; return them.

    LightningCLI also passes options that are not set, so Lightning's default counts as not set.
    """
    timeout = _launcher_of_process().timeout
    default = inspect.signature(DeepSpeedStrategy.__init__).parameters["timeout"].default
    if timeout is not None and options.get("timeout", default) == default:
        options["timeout"] = timeout
    return options


def prepare_to_meet(strategy: DeepSpeedStrategy, timeout: timedelta | None) -> None:
    """Prepare the connection of ranks; collective, before ranks connect.

    ``timeout``: of the collectives; None: torch's default.

    Raises:
        UnsupportedError: Each worker of Ray Train would train on its own.
    """
    workers = size_of_process_group() if _RAY in sys.modules else None
    if workers is not None and workers != strategy.world_size:
        msg = (
            f"Ray Train has started {workers} workers, but the Trainer's world size is "
            f"{strategy.world_size}. Pass Trainer(plugins=[RayLightningEnvironment()]) from "
            "ray.train.lightning, and omit `devices` and `num_nodes`"
        )
        raise UnsupportedError(msg)
    _launcher_of(strategy).prepare_to_meet(timeout)


def changing_nodes(arguments: list[str], variable: str | None) -> str:
    """Return the range of nodes given to torchrun; empty if their number is fixed.

    ``arguments``: command line of its agent. ``variable``: ``PET_NNODES``, torchrun's default.
    """
    given = re.search(r"\n--nnodes[=\n](\S*)", "\n".join(["", *arguments]))
    nodes = given[1] if given else variable or ""
    least, _, most = nodes.partition(":")
    return nodes if most and most != least else ""


class SigtermAgreement:
    """Agreement of all ranks of a fit that one of them received SIGTERM."""

    def __init__(self) -> None:
        self._received = False

    def begin(self, trainer: pl.Trainer) -> None:
        """Replace Lightning's handler and broadcast, for a fit or an evaluation."""
        self._received = False
        loop: Any = trainer.fit_loop.epoch_loop
        connector = getattr(trainer, "_signal_connector", None)
        # Before Lightning 2.5.2, each rank ends alone, without collectives.
        if hasattr(loop, "_broadcast_sigterm_tensor") and connector is not None:
            loop._broadcast_sigterm_tensor = partial(self.stop_together, trainer)
            connector._sigterm_notifier_fn = partial(self._on_signal, trainer)

    def _on_signal(self, trainer: pl.Trainer, number: int, _: object) -> None:
        """Record the signal, and forward it to ranks that Lightning has started.

        A single device ends alone, as does each rank of an evaluation, which has no collective
        before a batch.
        """
        launcher = trainer.strategy.launcher
        if not self._received and launcher is not None:
            launcher.kill(number)
        self._received = True
        if trainer.world_size == 1 or not is_fitting(trainer):
            trainer._signal_connector.received_sigterm = True

    def stop_together(self, trainer: pl.Trainer) -> None:
        """Raise on all ranks if any rank received SIGTERM; collective."""
        if trainer.world_size == 1:
            return  # Lightning checks it.
        received = self._received or trainer.received_sigterm
        if any_rank(flag=received, device=trainer.strategy.root_device):
            trainer._signal_connector.received_sigterm = True
            with suppress(RuntimeError):  # some ranks may have ended already
                trainer.strategy.barrier()
            raise SIGTERMException


def set_exit_code(exception: BaseException) -> None:
    """Set the exit code of a process that SIGTERM ends to that of its launcher."""
    code = _launcher_of_process().sigterm_exit_code
    if isinstance(exception, SIGTERMException) and exception.code is None and code is not None:
        exception.code = code
