"""A checkpoint of several tensor ranks: the files of each are a checkpoint of its shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from lightning_elastic_zero.core.cuts import Cut
from lightning_elastic_zero.core.layout import Fragment, Layout, ShardedLayout, Transfer
from lightning_elastic_zero.core.manifest import Manifest, Shard, TensorParallel
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.core.tensors import Scalar
from lightning_elastic_zero.formats.reader import (
    CheckpointReader,
    Location,
    SharedState,
    SourceInfo,
)

T = TypeVar("T")


def whole_manifest(
    shards: Sequence[Manifest], cuts: Mapping[str, tuple[Cut, tuple[int, ...]]]
) -> Manifest:
    """Return the manifest of whole parameters from those of each tensor rank's shards.

    ``cuts`` are by the parameter's name, with its whole shape.
    """
    first, *others = shards
    parallel = TensorParallel(
        len(shards),
        tuple(cut for cut, _ in cuts.values()),
        tuple(Shard(shard.buffers) for shard in others),
    )
    parameters = tuple(
        replace(p, shape=cuts[p.name][1] if p.name in cuts else p.shape) for p in first.parameters
    )
    return replace(first, parameters=parameters, tensor_parallel=parallel)


class ShardedReader(CheckpointReader):
    """The open files of all tensor ranks, which are neighbours: ``rank % len(shards)``.

    ``shards`` read the files of one tensor rank each; their ranks are data ranks.
    """

    def __init__(self, manifest: Manifest, shards: Sequence[CheckpointReader]) -> None:
        self.manifest = manifest
        self.info = _joined_info([shard.info for shard in shards])
        self.files = shards[0].files
        self._shards = shards

    def _at(self, rank: int) -> tuple[int, CheckpointReader]:
        """Return a rank's data rank and the reader of its tensor rank."""
        data_rank, tensor_rank = divmod(rank, len(self._shards))
        return data_rank, self._shards[tensor_rank]

    def bind(self, live: Manifest) -> None:
        """Match the shards of formats without names, of which the parameter groups may change."""
        before = self._shards[0].manifest
        for shard in self._shards:
            shard.bind(live)
        self.info = _joined_info([shard.info for shard in self._shards])
        if self._shards[0].manifest is not before:
            shapes = {p.name: p.shape for p in self.manifest.parameters}
            cuts = {c.name: (c, shapes[c.name]) for c in self.manifest.tensor_parallel.cuts}
            self.manifest = whole_manifest([shard.manifest for shard in self._shards], cuts)

    # -- checks and verification -----------------------------------------------------------------

    def check_files(self) -> None:
        for shard in self._shards:
            shard.check_files()

    def names(self) -> Sequence[str]:
        return self._of_all(lambda shard: shard.names())

    def recorded_bytes(self, name: str) -> int | None:
        sizes = (shard.recorded_bytes(name) for shard in self._shards)
        return next((size for size in sizes if size is not None), None)

    def verify(self, rank: int, world_size: int, progress: Progress) -> list[str]:
        return self._of_all(lambda shard: shard.verify(rank, world_size, progress))

    def verify_whole(self, rank: int, world_size: int, progress: Progress) -> list[str]:
        return self._of_all(lambda shard: shard.verify_whole(rank, world_size, progress))

    def _of_all(self, call: Callable[[CheckpointReader], Iterable[T]]) -> list[T]:
        return [found for shard in self._shards for found in call(shard)]

    def check(self, masters: Sequence[int], frozen: Sequence[int]) -> None:
        size = len(self._shards)
        for index, shard in enumerate(self._shards):
            mine = ([r // size for r in ranks if r % size == index] for ranks in (masters, frozen))
            shard.check(*mine)

    # -- runs of elements ------------------------------------------------------------------------

    def layout_of(self, manifest: Manifest) -> Layout:
        pairs = zip(self._shards, manifest.shards(), strict=True)
        return ShardedLayout([shard.layout_of(of_shard) for shard, of_shard in pairs])

    def frozen_layout_of(self, manifest: Manifest) -> Layout:
        pairs = zip(self._shards, manifest.shards(), strict=True)
        return ShardedLayout([shard.frozen_layout_of(of_shard) for shard, of_shard in pairs])

    def locate(self, key: str, transfer: Transfer) -> Location:
        rank, shard = self._at(transfer.source_rank)
        return shard.locate(key, transfer._replace(source_rank=rank))

    def locate_rounded(self, transfer: Transfer) -> Location | None:
        rank, shard = self._at(transfer.source_rank)
        return shard.locate_rounded(transfer._replace(source_rank=rank))

    def locate_module_weights(self, transfer: Transfer) -> Location | None:
        rank, shard = self._at(transfer.source_rank)
        return shard.locate_module_weights(transfer._replace(source_rank=rank))

    @property
    def weights_differ(self) -> bool:
        return super().weights_differ or any(shard.weights_differ for shard in self._shards)

    @property
    def other_steps(self) -> str:
        return _first(shard.other_steps for shard in self._shards)

    @property
    def counts_steps(self) -> bool:
        return all(shard.counts_steps for shard in self._shards)

    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        rank, shard = self._at(at.rank)
        return shard.scalars(replace(at, rank=rank))

    # -- shared state ----------------------------------------------------------------------------

    def optimizer_state(self) -> Mapping[Any, Any] | None:
        return self._shards[0].optimizer_state()

    def engine_state(self) -> SharedState:
        return self._shards[0].engine_state()

    def module_state(self, rank: int, world_size: int) -> SharedState:
        shared = self._shards[0].module_state(0, 0)
        if world_size != self.manifest.world_size * len(self._shards):
            return shared
        data_rank, shard = self._at(rank)
        return shard.with_own_state(shared, data_rank)

    def module_buffers(self) -> Mapping[str, torch.Tensor]:
        return self._shards[0].module_buffers()

    def trainer_entry(self, name: str) -> object:
        return self._shards[0].trainer_entry(name)

    def close(self) -> None:
        for shard in self._shards:
            shard.close()


def _joined_info(of_shards: Sequence[SourceInfo]) -> SourceInfo:
    """Return the kind of a checkpoint, with the doubts about any tensor rank's files."""
    return replace(
        of_shards[0],
        mixed=_first(info.mixed for info in of_shards),
        unmatched=_first(info.unmatched for info in of_shards),
        incomplete=_first(info.incomplete for info in of_shards),
    )


def _first(texts: Iterable[str]) -> str:
    return next(filter(None, texts), "")
