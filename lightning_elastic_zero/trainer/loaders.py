"""Training loaders that resume an epoch at any sample.

A loader whose order Lightning's sampler determines gets an ``ElasticSampler``. Other loaders resume
by a ``resume_at`` method or by a state of their own. ``SampleOrderCheck`` compares the order of
users' samplers between ranks.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import suppress
from typing import Any, Protocol, TypeVar, runtime_checkable

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.grid import RankGrid
from lightning_elastic_zero.data_progress.sampler import (
    ElasticBatchSampler,
    ElasticSampler,
    derive_seed,
    torch_generators_in,
)
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.trainer.batches import BatchSettings, batch_size_of, loader_sampler
from lightning_elastic_zero.trainer.lightning import (
    drop_iterator,
    ends_by_one_loader,
    training_loaders,
)

REPRODUCIBLE = (
    "Derive the order from set_epoch(epoch), which is called before each epoch, or from a "
    "torch.Generator, random.Random or NumPy generator that the sampler keeps in an attribute"
)
"""How to make a sampler's order the same on all ranks and after a restart."""

NO_DIGEST = (
    "yields objects that cannot be compared between processes, so a different order would go "
    "unnoticed. Yield numbers, strings, or tuples, lists or dictionaries of these"
)
"""Why the order of a sampler has no digest, and the remedy."""


@runtime_checkable
class ResumesAtSample(Protocol):
    """A sampler, batch sampler, data set or loader that can start at a given sample.

    ``resume_at`` is called on every rank before the first batch after a resume, and before the
    workers start. A run that was saved at the end of an epoch passes the next epoch and 0.
    """

    def resume_at(self, epoch: int, samples: int) -> None:
        """Start the next iteration of this epoch after a number of samples.

        Args:
            epoch: Index of the epoch. Later epochs start at their beginning.
            samples: Samples of this loader that all ranks together have consumed in the epoch, a
                multiple of those of a step. If a shorter loader has started again, samples since
                then, a multiple of those of a micro-batch.
        """
        ...


@runtime_checkable
class Stateful(Protocol):
    """A loader with its own state, which Lightning saves and restores."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def elastic_loader(
    loader: object, batches: BatchSettings, rank: int, seed: int, epoch: int = 0
) -> object:
    """Return a copy of a loader with an ``ElasticSampler`` in place of its distributed sampler.

    ``loader`` is of any kind, as Lightning prepared it for training in ``epoch``. It keeps its own
    sampler if that cannot be replaced. ``seed``: of the run, for the loader's workers.
    """
    if not isinstance(loader, DataLoader):
        return loader
    copied = with_own_generator(loader, seed, rank, epoch)
    sampler, batch_sampler = loader_sampler(copied), copied.batch_sampler
    cls = type(batch_sampler)
    # torchdata has its own class for batches of consecutive samples.
    is_torchdatas = cls.__module__.startswith("torchdata.") and cls.__name__ == "BatchSampler"
    if not (batch_sampler is None or cls is BatchSampler or is_torchdatas):
        return copied
    if isinstance(copied.dataset, IterableDataset) or resumable_part_of(copied) is not None:
        return copied
    user_sampler: Sampler[Any] | None = None
    if type(sampler) is DistributedSamplerWrapper:
        dataset: Any = sampler.dataset
        user_sampler = dataset._sampler
        if not hasattr(user_sampler, "__len__"):
            return copied
    elif type(sampler) is ElasticSampler:
        user_sampler = sampler.sampler
    elif type(sampler) is not DistributedSampler:
        return copied
    if (sampler.rank, sampler.num_replicas) != (rank, batches.grid.data):
        return copied
    if batch_sampler is None:
        batches.check_fixed_batches(copied)
    elastic = ElasticSampler(
        copied.dataset,
        batches.plan_for(getattr(batch_sampler, "batch_size", None)),
        rank,
        shuffle=sampler.shuffle,
        seed=sampler.seed,
        drop_last=getattr(batch_sampler, "drop_last", copied.drop_last) or sampler.drop_last,
        sampler=user_sampler,
        seed_workers=copied.num_workers > 0,
    )
    return _with_sampler(copied, elastic)


def _with_sampler(loader: DataLoader[Any], elastic: ElasticSampler) -> DataLoader[Any]:
    """Return a copy of a loader with a sampler.

    ``DataLoader`` forbids assigning these attributes after construction, to keep them consistent.
    They are consistent here, and recreating the loader would need its constructor's arguments.
    """
    loader = _copy_of(loader)
    new: dict[str, Any] = {"sampler": elastic, "drop_last": False}
    if loader.batch_sampler is not None:
        size = elastic.plan.largest_micro_batch
        plain = BatchSampler(elastic, size, drop_last=False)
        new["batch_sampler"] = plain if elastic.plan.is_even else ElasticBatchSampler(elastic)
        new["batch_size"] = size
    for name, value in new.items():
        object.__setattr__(loader, name, value)
    # Lightning requires these two of a loader that resumes in the middle of an epoch.
    loader.state_dict = elastic.state_dict
    loader.load_state_dict = elastic.load_state_dict
    return loader


L = TypeVar("L")


def _copy_of(loader: L) -> L:
    copied = copy.copy(loader)
    drop_iterator(copied)  # persistent workers belong to the original
    return copied


def with_own_generator(loader: L, *seeds: int) -> L:
    """Return a copy of a loader that draws its workers' seeds from a separate generator.

    Otherwise each start of an iteration draws from torch's global generator, and a resumed run,
    which starts iterations at other places, would draw other numbers from then on.
    """
    if not isinstance(loader, DataLoader) or loader.generator is not None:
        return loader
    copied = _copy_of(loader)
    copied.generator = torch.Generator().manual_seed(derive_seed(*seeds))
    return copied


def generator_states(loader: object) -> dict[str, list[torch.Tensor]]:
    """Return the states of the generators that a loader uses when an iteration starts.

    ``"workers"``: of the workers' seeds; ``"order"``: of a sampler that is not replaced.
    """
    by_kind = _generators_of(loader).items()
    return {kind: [each.get_state() for each in generators] for kind, generators in by_kind}


def set_generator_states(
    loader: object, states: Mapping[str, Sequence[torch.Tensor]], *kinds: str
) -> None:
    """Restore states from ``generator_states`` of these kinds, if their number is the same."""
    for kind, generators in _generators_of(loader).items():
        saved = states.get(kind, ())
        if kind in kinds and len(saved) == len(generators):
            for generator, state in zip(generators, saved, strict=True):
                generator.set_state(state.cpu())


def _generators_of(loader: object) -> dict[str, list[torch.Generator]]:
    batches = getattr(loader, "batch_sampler", None)
    sampler = batches if batches is not None else getattr(loader, "sampler", None)
    of_order = [] if elastic_sampler_of(loader) is not None else torch_generators_in(sampler)
    generator = getattr(loader, "generator", None)
    of_workers = [generator] if isinstance(generator, torch.Generator) else []
    return {"workers": [g for g in of_workers if g not in of_order], "order": of_order}


def elastic_sampler_of(loader: object) -> ElasticSampler | None:
    """Return the ``ElasticSampler`` of a loader; None if it has none."""
    sampler = getattr(loader, "sampler", None)
    return sampler if isinstance(sampler, ElasticSampler) else None


def samples_per_step(batches: BatchSettings | None, loaders: Sequence[object]) -> list[int | None]:
    """Return the samples of each of all training loaders per optimizer step; None: unknown."""
    sizes = [batch_size_of(loader) for loader in loaders]
    # A loader without a batch size has the one that the user has declared.
    declared = None
    if batches is not None and (batches.plan is not None or not any(sizes)):
        declared = batches.global_batch_size
    counts: list[int | None] = []
    for loader, size in zip(loaders, sizes, strict=True):
        if (elastic := elastic_sampler_of(loader)) is not None:
            counts.append(elastic.plan.global_batch_size)
        elif batches is None or size is None:
            counts.append(declared)
        else:
            counts.append(size * batches.grid.data * batches.accumulate)
    return counts


def describe_loader(loader: object) -> str:
    """Return the class names of a loader and its data set."""
    data = getattr(loader, "dataset", None)
    return type(loader).__name__ + ("" if data is None else f" of {type(data).__name__}")


def length_of(loader: object) -> int | None:
    """Return the number of a loader's batches; None if it has no length."""
    if not isinstance(loader, Sized):
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def resumable_part_of(loader: object) -> ResumesAtSample | None:
    """Return the part of a loader that has a ``resume_at`` method; None if there is none."""
    parts = (getattr(loader, name, None) for name in ("batch_sampler", "sampler", "dataset"))
    return next((part for part in (loader, *parts) if isinstance(part, ResumesAtSample)), None)


class _InOwnGroup:
    """The initialization of a loader's worker, after it has left the process group of its rank.

    torchrun and others end a rank by a signal to its group. A rank that saves and ends in an
    orderly way needs its workers until then: torch raises as soon as one is gone. They end with the
    rank in any case, for which torch looks every few seconds.
    """

    def __init__(self, given: Callable[[int], object] | None) -> None:
        self.given = given

    def __call__(self, worker: int) -> None:
        with suppress(OSError):
            os.setpgid(0, 0)
        if self.given is not None:
            self.given(worker)


def keep_workers_from_signals(loader: object) -> None:
    """Keep a loader's workers from signals to the process group of this rank."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return
    if not isinstance(loader.worker_init_fn, _InOwnGroup):
        loader.worker_init_fn = _InOwnGroup(loader.worker_init_fn)


def worker_init_of(loader: object) -> object:
    """Return the ``worker_init_fn`` that a loader was given; None if it has none."""
    function = getattr(loader, "worker_init_fn", None)
    return function.given if isinstance(function, _InOwnGroup) else function


def has_own_state(loader: object) -> bool:
    """Whether a resume places a loader by its own state."""
    is_placed = elastic_sampler_of(loader) is not None or resumable_part_of(loader) is not None
    return isinstance(loader, Stateful) and not is_placed


def has_stateful_loader(trainer: pl.Trainer) -> bool:
    """Whether a training loader has its own state instead of an ``ElasticSampler``."""
    return any(
        isinstance(loader, Stateful) and elastic_sampler_of(loader) is None
        for loader in training_loaders(trainer)
    )


def load_state_at_epoch_end(
    loader: Stateful, state: Mapping[str, Any], *, ends_before_data: bool
) -> None:
    """Load a state saved at an epoch's end, so that the next iteration is the next epoch.

    For some loaders such a state is the end of the epoch, and the next iteration yields nothing;
    for others it is the beginning of the next epoch. Lightning will create one iterator from here
    on, for the next epoch. ``ends_before_data``: a limit or another loader ended the epoch before
    this loader's data.
    """
    loader.load_state_dict(dict(state))
    iterator = iter(loader)  # type: ignore[call-overload]
    if ends_before_data:
        # As in the uninterrupted run: an unfinished iterator exists, and another one is created.
        if not type(loader).__module__.startswith("torchdata."):
            rank_zero_warn(
                f"A limit ended the epoch before the data of the {describe_loader(loader)}. Its "
                "next epoch comes from its second iterator after load_state_dict and may differ "
                "from that of the uninterrupted run."
            )
        return
    try:
        next(iterator)
    except StopIteration:
        return  # the old epoch's end: the next iterator is the next epoch's
    drop_iterator(loader)
    loader.load_state_dict(dict(state))


def ends_before_data(combined: CombinedLoader, index: int, state: Mapping[str, Any] | None) -> bool:
    """Whether a limit or another loader ends an epoch before the data of a loader.

    ``state``: of the loader at an epoch's end. torchdata's contains whether the data had ended.
    """
    limit = (combined.limits or [])[index : index + 1]
    length = length_of(combined.flattened[index])
    if limit and limit[0] < (float("inf") if length is None else length):
        return True
    return ends_by_one_loader(combined) and (state or {}).get("_iterator_finished") is False


def warn_state_not_restored(loader: object, saved: RankGrid, live: RankGrid) -> None:
    """Warn of a stateful loader that starts from the beginning, because it may count epochs."""
    why = (
        f"it has one state per rank, saved on {saved}, and this run has {live}"
        if saved != live
        else "the checkpoint contains no state of it"
    )
    rank_zero_warn(
        f"The {describe_loader(loader)} starts without its saved state, so the next epoch may "
        f"differ from that of the uninterrupted run: {why}."
    )


def warn_loader_is_new(loader: object, epoch: int) -> None:
    """Warn of a stateful loader that may continue the stream of the loader before."""
    rank_zero_warn(
        f"The {describe_loader(loader)} was created for epoch {epoch} "
        "(reload_dataloaders_every_n_epochs), so it does not get the saved state of the loader "
        "before. If its data continue that loader's, samples will repeat: then set "
        "reload_dataloaders_every_n_epochs=0."
    )


class SampleOrderCheck:
    """Compares the order of users' samplers between ranks, before the first batch of each epoch.

    Not earlier, because hooks at the epoch's start may affect samplers. In each epoch, because a
    sampler may differ between ranks only from the second epoch on.
    """

    def __init__(self, get_ranks: Callable[[], Ranks]) -> None:
        self._get_ranks = get_ranks
        self._is_done = False

    def before_batch(self, trainer: pl.Trainer, batch_idx: int) -> None:
        """Compare the orders before the first batch of an epoch; collective."""
        if batch_idx and self._is_done:
            return
        self._is_done = True
        elastic = [elastic_sampler_of(loader) for loader in training_loaders(trainer)]
        users = [s for s in elastic if s is not None and s.sampler is not None]
        if not users:
            return
        of_ranks = self._get_ranks().all_gather(
            "fit: compare the order of the samples",
            lambda: [sampler.order_digest(sampler.epoch) for sampler in users],
        )
        for sampler, *digests in zip(users, *of_ranks, strict=True):
            name = type(sampler.sampler).__name__
            if not all(digests):
                msg = f"{name} {NO_DIGEST}"
                if len(digests) > 1:
                    raise UnsupportedError(msg)
                rank_zero_warn(f"A checkpoint inside an epoch will be refused on resume: {msg}")
            elif len({*digests}) > 1:
                msg = (
                    f"{name} gives each rank another order of the samples, so some samples would "
                    f"be repeated and others missed. {REPRODUCIBLE}"
                )
                raise UnsupportedError(msg)
