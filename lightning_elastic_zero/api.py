"""Save and resume a plain DeepSpeed engine, without Lightning."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, fields
from typing import Any

from lightning_elastic_zero.checkpoint.file_queue import delete_at
from lightning_elastic_zero.checkpoint.load import load_engine
from lightning_elastic_zero.checkpoint.manager import CheckpointManager
from lightning_elastic_zero.checkpoint.newest import find_newest
from lightning_elastic_zero.checkpoint.nodes import NODE_COPIES, join_folder_of
from lightning_elastic_zero.checkpoint.save import save_engine
from lightning_elastic_zero.checkpoint.types import (
    CheckpointStats,
    LoadOptions,
    LoadResult,
    SaveOptions,
    SaveRequest,
)
from lightning_elastic_zero.coordination.liveness import ABSENT_TIMEOUT_S, STALL_TIMEOUT_S, Timeouts
from lightning_elastic_zero.coordination.ranks import Ranks, connect_ranks
from lightning_elastic_zero.core.options import (
    check_client_state,
    check_count,
    check_flag,
    check_rename,
)
from lightning_elastic_zero.engine.live import LiveEngine

log = logging.getLogger(__name__)

__all__ = [
    "CheckpointStats",
    "ElasticOptions",
    "LoadResult",
    "delete_checkpoint",
    "load_checkpoint",
    "newest_checkpoint",
    "save_checkpoint",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticOptions:
    """Keywords that ``ElasticDeepSpeedStrategy``, Fabric's strategy and ``elastic`` share.

    Raises:
        ValueError: An option has an invalid value.
    """

    strict_optimizer: bool = True
    """False: accept other trained parameters or other parameter groups than in the checkpoint.
    Known parameters are restored, new ones keep their weights and get fresh optimizer state, and a
    warning names them."""
    rename: Mapping[str, str] | None = None
    """Layers that have another name now, such as ``{"encoder": "backbone.encoder"}``: prefixes of
    names in the checkpoint and in the model, or patterns with ``*``."""
    allow_pickle: bool = False
    """Build Python objects of any class from hyperparameters, callback states and your own state.
    This can run code: use it only with checkpoints that you trust."""
    fallback: bool = False
    """If the checkpoint to resume from is damaged or unfinished, resume from the newest older one
    that is intact and has the same parameters, with a warning. Lightning and Fabric take it from
    the same folder, or in place of one on nodes, from those of other callbacks; a Trainer of
    transformers and accelerate take an older folder next to it. False: the error names that
    checkpoint. Only checkpoints of this library are considered. With a plain engine, tags must end
    with the step (``global_step10``), and with Fabric, names must differ by a number only
    (``step-10.ckpt``): others may belong to another engine."""
    save_module_weights: bool = False
    """Also write the low-precision weights, which can be computed from the fp32 masters.
    DeepSpeed's own loaders need them."""
    async_save: bool = False
    """Write the checkpoint while training continues, from a copy of the state in host memory.
    Without room for it on a host, or with offload to NVMe, training waits until it is written.
    ``wait_for_save()`` waits for publication."""
    node_copies: int = NODE_COPIES
    """With checkpoints on nodes (``node://``), the number of nodes that have each file.
    ``node_copies - 1`` neighbours may be lost at once."""
    stall_timeout_s: float = STALL_TIMEOUT_S
    """Seconds that a rank may work on a save or load without progress before the call fails on all
    ranks. Increase it if one call to the file system can take longer."""
    absent_timeout_s: float = ABSENT_TIMEOUT_S
    """Seconds to wait for ranks that have not entered a save or load. A warning names them after
    30 s."""

    def __post_init__(self) -> None:
        """Check the values."""
        for field in fields(self):
            if field.type == "bool":
                check_flag(field.name, getattr(self, field.name))
        check_rename(self.rename)
        check_count("node_copies", self.node_copies, least=1, unit="nodes")
        self.timeouts()

    def timeouts(self) -> Timeouts:
        """Return how long ranks wait for each other."""
        return Timeouts.of(self.stall_timeout_s, self.absent_timeout_s)

    def load_options(self, **more: Any) -> LoadOptions:
        """Return the options of a load; ``more`` are fields that this class does not have."""
        return LoadOptions(
            strict_optimizer=self.strict_optimizer,
            renamed=check_rename(self.rename),
            allow_pickle=self.allow_pickle,
            fallback=self.fallback,
            **more,
        )

    def save_options(self) -> SaveOptions:
        """Return the options of the saves of one run, which warn of each object once."""
        return SaveOptions(
            module_weights=self.save_module_weights,
            warned_objects=None if self.allow_pickle else set(),
            node_copies=self.node_copies,
        )

    def manager(self) -> CheckpointManager:
        """Return a manager of the checkpoints of a run; see ``CheckpointManager``."""
        return CheckpointManager(self.timeouts(), background=self.async_save)


def save_checkpoint(
    engine: Any,
    path: str | os.PathLike[str],
    client_state: Mapping[str, Any] | None = None,
    rank_state: Mapping[str, Any] | None = None,
    *,
    weights_only: bool = False,
    exclude_frozen_parameters: bool = False,
    save_module_weights: bool = False,
    node_copies: int = NODE_COPIES,
    stall_timeout_s: float = STALL_TIMEOUT_S,
    absent_timeout_s: float = ABSENT_TIMEOUT_S,
) -> CheckpointStats:
    """Save a DeepSpeed engine into a checkpoint that resumes on any number of devices.

    Call it on every rank, between optimizer steps. An existing checkpoint at ``path`` stays until
    the new one is complete. A directory with files that this library did not write, such as
    DeepSpeed's own tags, is refused before the first byte is written.

    Args:
        engine: Result of ``deepspeed.initialize``, with ZeRO stage 0, 1, 2 or 3.
        path: Directory of the checkpoint on a disk that all ranks share, or URL in an object
            store; equal on all ranks. Each checkpoint has its own, such as
            ``f"{folder}/step-{step}"``. ``node:///dev/shm/run/step-1`` is in the memory or on the
            disk of each node, with copies on other nodes.
        client_state: Your own state, which a load returns on every rank. Plain data is best
            (numbers, strings, tensors, lists, dicts). It should be equal on all ranks: rank 0's is
            saved, with a warning that names an entry that differs.
        rank_state: Your own state of this rank, such as random states or that of a data loader. A
            load on as many ranks (data and tensor ranks) returns it (``LoadResult.rank_state``).
        weights_only: Omit the optimizer state.
        exclude_frozen_parameters: Omit weights that the optimizer does not own.
        save_module_weights: Also write the low-precision weights, which can be computed from the
            masters. DeepSpeed's own loaders need them.
        node_copies: With ``node://``, the number of nodes that have each file. ``node_copies - 1``
            neighbours may be lost at once.
        stall_timeout_s: Seconds that a rank may work without progress before the save fails on all
            ranks. Each MiB written is progress. Increase it if one call to the file system can take
            longer.
        absent_timeout_s: Timeout for ranks that have not entered this call. A warning names them
            after 30 s.

    Returns:
        Path, duration and size of the save.

    Raises:
        ValueError: A flag is not a bool, a state is not a dict, or a timeout is not
            positive.
        UnsupportedError: The engine or a part of its state cannot be saved.
        SaveError: The checkpoint could not be written, or would replace files of others. The last
            published checkpoint is intact.
        RanksError: A rank failed, died or did not call this function.
    """
    options = SaveOptions(
        weights_only=check_flag("weights_only", weights_only),
        exclude_frozen=check_flag("exclude_frozen_parameters", exclude_frozen_parameters),
        module_weights=check_flag("save_module_weights", save_module_weights),
        node_copies=check_count("node_copies", node_copies, least=1, unit="nodes"),
    )
    client = check_client_state("client_state", client_state)
    of_rank = check_client_state("rank_state", rank_state)
    live, times = LiveEngine(engine), Timeouts.of(stall_timeout_s, absent_timeout_s)
    with closing(_ranks_to("save", live, path, times)) as ranks:
        warn_of_open_window(live, path, ranks)
        return save_engine(SaveRequest(live, path, client, options, of_rank), ranks)


def load_checkpoint(
    engine: Any,
    path: str | os.PathLike[str],
    *,
    load_optimizer_state: bool = True,
    load_hyperparameters: bool = True,
    strict: bool = True,
    strict_optimizer: bool = True,
    rename: Mapping[str, str] | None = None,
    allow_pickle: bool = False,
    fallback: bool = False,
    stall_timeout_s: float = STALL_TIMEOUT_S,
    absent_timeout_s: float = ABSENT_TIMEOUT_S,
) -> LoadResult:
    """Restore a checkpoint, saved on any number of devices, into a DeepSpeed engine.

    Call it on every rank. The engine changes only after all checks have passed on all ranks.

    Args:
        engine: Result of ``deepspeed.initialize``. An engine without optimizer gets the weights.
        path: Directory, file or URL of the checkpoint.
        load_optimizer_state: False: keep a fresh optimizer on the saved weights.
        load_hyperparameters: False: keep the configured hyperparameters and the engine's scheduler.
        strict: False: accept missing and unexpected frozen parameters and buffers, and with
            ``load_optimizer_state=False`` also trained parameters. A warning names them.
        strict_optimizer: False: accept other trained parameters or other parameter groups than in
            the checkpoint. Known parameters are restored, new ones keep their weights and get fresh
            optimizer state, and a warning names them.
        rename: Prefixes of names in the checkpoint and in the model,
            ``{"encoder": "backbone.encoder"}``, or patterns with ``*``.
        allow_pickle: Build Python objects of any class from the client state. This can run code.
        fallback: If the checkpoint is a damaged one of this library, load the newest older one in
            its folder that is intact and has the same parameters, with a warning.
        stall_timeout_s: See ``save_checkpoint``.
        absent_timeout_s: See ``save_checkpoint``.

    Returns:
        The client state, the manifest and the cost of the load.

    Raises:
        ValueError: An option has an invalid value.
        CheckpointNotFoundError: There is no checkpoint at the path.
        CheckpointFormatError: There is something else at the path.
        CheckpointMismatchError: The checkpoint does not fit the model, or lacks requested state.
        CheckpointCorruptedError: The checkpoint is damaged.
        UnsupportedError: The engine or a part of its state cannot be restored.
        RanksError: A rank failed, died or did not call this function.
    """
    options = LoadOptions(
        optimizer_state=check_flag("load_optimizer_state", load_optimizer_state),
        hyperparameters=check_flag("load_hyperparameters", load_hyperparameters),
        strict=check_flag("strict", strict),
        strict_optimizer=check_flag("strict_optimizer", strict_optimizer),
        allow_pickle=check_flag("allow_pickle", allow_pickle),
        fallback=check_flag("fallback", fallback),
        renamed=check_rename(rename),
    )
    live, times = LiveEngine(engine), Timeouts.of(stall_timeout_s, absent_timeout_s)
    with closing(_ranks_to("load", live, path, times)) as ranks:
        return load_engine(live, path, ranks, options)


def newest_checkpoint(
    *folders: str | os.PathLike[str],
    stall_timeout_s: float = STALL_TIMEOUT_S,
    absent_timeout_s: float = ABSENT_TIMEOUT_S,
) -> str | None:
    """Find the newest checkpoint of this library whose files are all there, to resume from it.

    Call it on every rank. No data is read: ``load_checkpoint`` verifies what it reads. The newest
    one is the last that was published. One of weights alone is taken only if no other is complete.

    Args:
        folders: Directories or URLs that contain checkpoints, such as ``node:///dev/shm/run`` and
            a shared disk for the case that too many nodes are lost.
        stall_timeout_s: See ``save_checkpoint``.
        absent_timeout_s: See ``save_checkpoint``.

    Returns:
        Its path or URL, or None if no folder contains a checkpoint: start training at step 0.

    Raises:
        CheckpointCorruptedError: There are checkpoints, but none is complete. The message names
            nodes that are missing.
        UnsupportedError: Nodes have folders of different runs, or share one.
        RanksError: A rank failed, died or did not call this function.
    """
    times = Timeouts.of(stall_timeout_s, absent_timeout_s)
    call = f"find the newest checkpoint in {folders}"
    with closing(connect_ranks(times, name="elastic-zero api", call=call)) as ranks:
        return find_newest(folders, ranks)


def delete_checkpoint(
    path: str | os.PathLike[str],
    *,
    stall_timeout_s: float = STALL_TIMEOUT_S,
    absent_timeout_s: float = ABSENT_TIMEOUT_S,
) -> None:
    """Delete a checkpoint of this library, or a link to one, on all nodes. Call it on every rank.

    Its name disappears in one step, before its files. A missing one counts as deleted.

    Args:
        path: Directory or URL of the checkpoint.
        stall_timeout_s: See ``save_checkpoint``.
        absent_timeout_s: See ``save_checkpoint``.

    Raises:
        SaveError: There is something else at the path, or it could not be deleted.
        RanksError: A rank failed, died or did not call this function.
    """
    times = Timeouts.of(stall_timeout_s, absent_timeout_s)
    call = f"delete {os.fspath(path)}"
    with closing(connect_ranks(times, name="elastic-zero api", call=call)) as ranks:
        join_folder_of(path, ranks)
        ranks.broadcast(call, lambda: delete_at(path, ranks.progress))


def warn_of_open_window(live: LiveEngine, path: str | os.PathLike[str], ranks: Ranks) -> bool:
    """Warn on one rank of a save within an optimizer step; return whether it is within one."""
    count = live.micro_batches_since_step()
    if count and ranks.rank == 0:
        log.warning(
            "%s is saved after %d micro-batches of an optimizer step and does not contain their "
            "gradients: after a resume the step begins again. Save when "
            "engine.is_gradient_accumulation_boundary() was true before engine.step()",
            path,
            count,
        )
    return count > 0


def _ranks_to(
    verb: str, engine: LiveEngine, path: str | os.PathLike[str], times: Timeouts
) -> Ranks:
    """Return the ranks for one call, which others may never make."""
    call = f"{verb} {os.fspath(path)} {engine.at_step()}"
    return connect_ranks(times, name="elastic-zero api", call=call)
