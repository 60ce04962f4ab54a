"""Tensor parallelism (DeepSpeed's AutoTP) under accelerate and the Trainer.

accelerate gives the tensor ranks of a data rank the same batches, but gathers results from all of
them, and the Trainer counts their tokens. Here, each data rank counts once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import gather_object
from accelerate.utils.operations import recursively_apply
from packaging.version import Version

from lightning_elastic_zero.core.grid import RankGrid
from lightning_elastic_zero.core.manifest import STAGE_WEIGHTS
from lightning_elastic_zero.core.requirements import version_of
from lightning_elastic_zero.engine.addresses import persistent_buffers
from lightning_elastic_zero.engine.tensor_parallel import SECTION, SIZE, grid_in
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.integrations.sequences import sequence_ranks

_OPTION = f"{SECTION}.{SIZE}"

_FIRST_TRANSFORMERS = "5.19"
"""The first release whose Trainer divides its losses by data ranks."""


def grid_of(accelerator: Any) -> RankGrid:
    """Return the data ranks and tensor ranks of an Accelerator."""
    return grid_in(accelerator.deepspeed_plugin.deepspeed_config, accelerator.num_processes)


def check_ranks(accelerator: Any) -> None:
    """Refuse tensor ranks that accelerate and DeepSpeed count in different ways.

    Raises UnsupportedError.
    """
    grid, ranks = grid_of(accelerator), accelerator.num_processes
    config = accelerator.deepspeed_plugin.deepspeed_config
    zero = config.get("zero_optimization") or {}
    if grid.tensor == 1:
        return
    if grid.ranks != ranks:
        msg = (
            f"{_OPTION} = {grid.tensor} does not divide the number of ranks, {ranks}: use a "
            f"multiple of {grid.tensor} ranks, or another {SIZE}"
        )
    elif (shared := sequence_ranks(accelerator)) > 1:
        msg = (
            f"{_OPTION} = {grid.tensor} together with sequence parallelism (sp_size={shared}): "
            "leave one of them out"
        )
    elif accelerator.split_batches:
        msg = (
            f"{_OPTION} = {grid.tensor} with split_batches=True: DeepSpeed counts the samples of a "
            "tensor rank as those of a data rank. Set it to False, and divide the DataLoader's "
            "batch_size by the number of data ranks"
        )
    elif zero.get("stage") == STAGE_WEIGHTS and "train_batch_size" in config:
        msg = (
            f"{_OPTION} = {grid.tensor} in ZeRO-3 with train_batch_size = "
            f"{config['train_batch_size']}, which DeepSpeed compares with both the number of all "
            "ranks and that of data ranks: remove it from DeepSpeed's configuration"
        )
    else:
        return
    raise UnsupportedError(msg)


def unfit_trainer(trainer: Any) -> str:
    """Return why a Trainer does not count data ranks, and the remedy; empty if it does."""
    size = grid_of(trainer.accelerator).tensor
    if size == 1:
        return ""
    if Version(release := version_of("transformers")) < Version(_FIRST_TRANSFORMERS):
        return (
            f"{_OPTION} = {size} with transformers {release}, whose Trainer multiplies losses by "
            f"the number of all ranks: install transformers {_FIRST_TRANSFORMERS} or newer"
        )
    if (counted := trainer.get_tp_size()) != size:
        return (
            f"{_OPTION} = {size}, but the Trainer takes the number of tensor ranks for {counted}: "
            "pass the configuration of DeepSpeed as TrainingArguments(deepspeed=...), and load the "
            "model without tp_plan"
        )
    if getattr(trainer.args, "train_sampling_strategy", "") == "batch_rebalance":
        return (
            f"{_OPTION} = {size} with train_sampling_strategy='batch_rebalance', which gives each "
            "tensor rank samples of its own: use another strategy, such as 'group_by_length'"
        )
    return ""


def check_loader(loader: object, grid: RankGrid) -> None:
    """Refuse a loader of accelerate that gives all data ranks the same samples.

    Raises UnsupportedError.
    """
    if grid.tensor > 1 and isinstance(loader, DataLoaderDispatcher):
        msg = (
            f"{_OPTION} = {grid.tensor} with a DataLoader whose batches rank 0 reads for all "
            "(dispatch_batches, the default for an iterable dataset): accelerate would give all "
            "data ranks the same samples. Set dispatch_batches=False (DataLoaderConfiguration, "
            "accelerator_config)"
        )
        raise UnsupportedError(msg)


def seed_workers(loader: Any, grid: RankGrid, rank: int) -> None:
    """Seed the workers of a Trainer's loader by the data rank: they may change samples at random.

    The Trainer seeds them by the rank.
    """
    seed = getattr(loader, "worker_init_fn", None)
    if grid.tensor > 1 and isinstance(seed, partial) and "rank" in seed.keywords:
        loader.base_dataloader.worker_init_fn = partial(seed, rank=grid.data_rank(rank))


def gather_weights(gather: Callable[[], Any], engine: Any) -> Any:
    """Gather whole weights on rank 0, and add the buffers, which DeepSpeed lacks in ZeRO-0 to 2.

    DeepSpeed leaves each shard in new memory, which the steps of BF16_Optimizer do not reach.
    """
    held = [(p, p.data) for p in engine.module.parameters() if not hasattr(p, "ds_id")]
    weights = gather()
    for parameter, data in held:
        parameter.data = data
    if weights is None:
        return None
    buffers = persistent_buffers(engine.module)
    return {**{name: buffer.detach().cpu() for name, buffer in buffers.items()}, **weights}


def gather_for_metrics(accelerator: Any, input_data: Any, use_gather_object: bool = False) -> Any:
    """Gather like the Accelerator's method, but from the first tensor rank of each data rank."""
    state = accelerator.gradient_state
    # At the end of an epoch, the last samples are repeated ones.
    stop = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
    if use_gather_object or not _has_tensors_only(input_data):
        is_first = accelerator.process_index % grid_of(accelerator).tensor == 0
        return gather_object(input_data if is_first else [])[:stop]
    return gather_tensors(accelerator, input_data, stop=stop)


def gather_tensors(accelerator: Any, tensors: Any, *, stop: int | None = None) -> Any:
    """Gather rows, up to ``stop``, from the first tensor rank of each data rank."""
    rows = partial(_of_data_ranks, grid=grid_of(accelerator), stop=stop)
    return recursively_apply(rows, accelerator.gather(tensors))


def _has_tensors_only(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _of_data_ranks(gathered: torch.Tensor, *, grid: RankGrid, stop: int | None) -> torch.Tensor:
    """Return the rows of the first tensor ranks, of rows that all ranks gave in equal number."""
    by_rank = gathered.unflatten(0, (grid.data, grid.tensor, len(gathered) // grid.ranks))
    return by_rank[:, 0].flatten(0, 1)[:stop]
