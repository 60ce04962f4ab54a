"""Tensor parallelism of a Trainer: its data ranks, and the checks that their ranks do the same.

The tensor ranks of a data rank hold parts of one model, so they need the same samples and random
numbers. Whatever counts samples counts data ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import xxhash
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from torch import nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_elastic_zero.coordination.ranks import Ranks, gather_from_group
from lightning_elastic_zero.core.grid import RankGrid
from lightning_elastic_zero.core.options import check_count
from lightning_elastic_zero.data_progress.sampler import collect_rng_states
from lightning_elastic_zero.engine.tensor_parallel import (
    SECTION,
    SIZE,
    grid_in,
    tensor_group,
)
from lightning_elastic_zero.errors import UnsupportedError

OPTION = "tensor_parallel_size"
"""The strategy's option."""


def with_tensor_ranks(config: dict[str, Any], size: object) -> dict[str, Any]:
    """Return DeepSpeed's config with the strategy's option ``tensor_parallel_size``.

    Raises ValueError if the option is invalid, or the config has another number of tensor ranks.
    """
    if (tensor := check_count(OPTION, size, least=1, unit="tensor ranks") or 1) == 1:
        return config
    section = config.get(SECTION) or {}
    if section.get(SIZE, tensor) != tensor:
        msg = f"{OPTION}={tensor}, but config has {SECTION}.{SIZE} = {section[SIZE]}: omit one"
        raise ValueError(msg)
    return {**config, SECTION: {**section, SIZE: tensor}}


def grid_of(trainer: pl.Trainer) -> RankGrid:
    """Return the data ranks and tensor ranks of a Trainer."""
    return grid_in(getattr(trainer.strategy, "config", None), trainer.world_size)


def data_rank_of(trainer: pl.Trainer) -> int:
    """Return the data rank of this process."""
    return grid_of(trainer).data_rank(trainer.global_rank)


def check_divisible(trainer: pl.Trainer) -> None:
    """Refuse a number of devices that tensor ranks do not divide."""
    grid = grid_of(trainer)
    if grid.ranks != trainer.world_size:
        msg = (
            f"{OPTION}={grid.tensor} does not divide the number of devices, "
            f"{trainer.world_size}: use a multiple of {grid.tensor} devices, or another {OPTION}"
        )
        raise UnsupportedError(msg)


def seed_workers(loader: object, trainer: pl.Trainer) -> None:
    """Seed a loader's workers by the data rank, as Lightning does afterwards by the rank."""
    _auto_add_worker_init_fn(loader, data_rank_of(trainer))


def count_data_ranks(module: nn.Module, grid: RankGrid) -> None:
    """Let torchmetrics in a module gather the states of data ranks, not those of all ranks."""
    function = _OfDataRanks(grid.tensor) if grid.tensor > 1 else None
    for metric in module.modules():
        # An earlier run with another number of tensor ranks may have set it.
        if isinstance(metric, Metric) and isinstance(metric.dist_sync_fn, _OfDataRanks | None):
            metric.dist_sync_fn = function


class _OfDataRanks:
    """torchmetrics' function that gathers a state, without the copies of tensor ranks."""

    def __init__(self, tensor_ranks: int) -> None:
        self._tensor_ranks = tensor_ranks

    def __call__(self, state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        gathered: list[torch.Tensor] = gather_all_tensors(state, group)
        return gathered if group is not None else gathered[:: self._tensor_ranks]


class SameBatchCheck:
    """Compares the first batch of each stage, and of training the random states, between ranks.

    Different samples on the ranks of one data rank would silently train another model. Tensors,
    arrays, texts and numbers are compared, in dicts, lists, tuples and dataclasses.
    """

    def __init__(self, get_ranks: Callable[[], Ranks]) -> None:
        self._get_ranks = get_ranks
        self._done: set[object] = set()

    def before_batch(self, trainer: pl.Trainer, engine: Any, batch: object) -> None:
        """Compare a batch before it is used; collective in the first one of each stage."""
        grid, stage = grid_of(trainer), trainer.state.stage
        if grid.tensor == 1 or stage is None or stage in self._done:
            return
        self._done.add(stage)
        mine = {"samples": _digest(batch)}
        if trainer.training:
            states = collect_rng_states(trainer.strategy.root_device)
            # Others may draw on rank 0 only, and have no effect on the model.
            mine["random numbers"] = _digest([states[k] for k in states if k not in _OTHERS])
            step = f"compare the first batch of tensor ranks ({stage.value})"
            of_ranks = dict(enumerate(self._get_ranks().all_gather(step, lambda: mine)))
        else:  # Another data rank may have no batch, for example in a prediction.
            first = grid.data_rank(trainer.global_rank) * grid.tensor
            of_ranks = dict(enumerate(gather_from_group(mine, tensor_group(engine)), first))
        for rank, digests in of_ranks.items():
            first = rank - rank % grid.tensor
            if differing := [what for what in digests if digests[what] != of_ranks[first][what]]:
                msg = (
                    f"rank {rank} has other {' and other '.join(differing)} than rank {first} in "
                    f"its first batch ({stage.value}), but both are tensor ranks of data rank "
                    f"{grid.data_rank(rank)}. Give own samplers and data sets the num_replicas and "
                    "rank of trainer.distributed_sampler_kwargs, and derive seeds from this rank"
                )
                raise UnsupportedError(msg)


_OTHERS = ("python", "numpy")


def _digest(batch: object) -> str:
    digest = xxhash.xxh3_128()
    for leaf in _leaves(batch):
        if isinstance(leaf, np.ndarray) and leaf.dtype != object:  # Its repr is shortened.
            digest.update(f"{leaf.dtype} {leaf.shape} ".encode() + leaf.tobytes())
        elif isinstance(leaf, (str, bytes, int, float, np.ndarray)):
            digest.update(repr(leaf).encode(errors="replace"))
        # The bytes of nested and quantized tensors cannot be read.
        elif isinstance(leaf, torch.Tensor) and not (leaf.is_nested or leaf.is_quantized):
            dense = leaf.detach().cpu()
            dense = dense if dense.layout is torch.strided else dense.to_dense()
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)} ".encode())
            digest.update(dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _leaves(tree: Any) -> Iterator[Any]:
    """Yield what is in dicts, lists, tuples and dataclasses, and copy none of them."""
    if isinstance(tree, Mapping):
        parts: Iterable[Any] = tree.values()
    elif isinstance(tree, list | tuple):
        parts = tree
    elif is_dataclass(tree):
        parts = (getattr(tree, field.name, None) for field in fields(tree))
    else:
        yield tree
        return
    for part in parts:
        yield from _leaves(part)
