"""Loaders as Lightning prepared them, made resumable; and the seeds of their orders and workers."""

from __future__ import annotations

from weakref import ref

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_elastic_zero.data_progress.position import DataPosition
from lightning_elastic_zero.data_progress.sampler import derive_seed
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.trainer.batches import BatchController, BatchSettings, batch_size_of
from lightning_elastic_zero.trainer.lightning import run_seed, training_loaders
from lightning_elastic_zero.trainer.loaders import (
    elastic_loader,
    elastic_sampler_of,
    generator_states,
    set_generator_states,
    with_own_generator,
)
from lightning_elastic_zero.trainer.tensor_parallel import data_rank_of


class PreparedLoaders:
    """Makes the loaders of a fit resumable, as Lightning creates them."""

    def __init__(self, batches: BatchController) -> None:
        self._batches = batches
        self._seeds: dict[int, int] = {}
        """By index of a training loader, the run's seed for its order if the user gives none."""
        self._new_generators: list[dict[str, list[torch.Tensor]]] = []
        """States of the generators of each training loader when it was made."""
        self._validation_loaders: list[ref[DataLoader[object]]] = []
        """Loaders of validations with a generator of this library; a second fit may use them again.

        Before 2.7, torch allows no weak references to generators.
        """

    def begin(self) -> None:
        """Begin a fit."""
        self._seeds, self._new_generators = {}, []

    def process(self, loader: object, trainer: pl.Trainer) -> object:
        """Return a resumable version of a loader that Lightning has prepared."""
        if (batches := self._batches.current) is None:
            return loader
        rank = data_rank_of(trainer)
        if not trainer.training:
            return self._process_validation(loader, trainer, rank)
        if len(self._new_generators) >= len(training_loaders(trainer)) > 0:
            self._new_generators = []  # the loaders are recreated
        index = len(self._new_generators)
        loader = elastic_loader(loader, batches, rank, run_seed(), trainer.current_epoch)
        if (elastic := elastic_sampler_of(loader)) is None:
            batches.check_fixed_batches(loader)
        else:
            if not index:
                _check_same_batch_size(loader, batches)
            if elastic.seed == run_seed():
                elastic.seed = self._seeds.setdefault(index, run_seed())
        self._new_generators.append(generator_states(loader))
        return loader

    def _process_validation(self, loader: object, trainer: pl.Trainer, rank: int) -> object:
        copied = with_own_generator(loader, run_seed(), rank)
        if copied is not loader and isinstance(copied, DataLoader) and copied.generator is not None:
            known = [each for each in self._validation_loaders if each() is not None]
            self._validation_loaders = [*known, ref(copied)]
            self.seed_validation(trainer)
        return copied

    def seed_validation(self, trainer: pl.Trainer) -> None:
        """Seed the workers of a validation after the next batch, as any resumed run does."""
        done = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        seed = derive_seed(run_seed(), data_rank_of(trainer), done)
        for reference in self._validation_loaders:
            if (loader := reference()) is not None and loader.generator is not None:
                loader.generator.manual_seed(seed)

    def has_run_seed(self, index: int, seed: int) -> bool:
        """Whether the seed of a training loader's order is the run's, and not the user's."""
        return self._seeds.get(index) == seed

    def continue_seeds(self, saved: DataPosition) -> None:
        """Use the seeds of a saved run for training loaders that are made later."""
        for index, loader in enumerate(saved.loaders):
            if loader.has_run_seed and loader.seed is not None:
                self._seeds[index] = loader.seed

    def restore_new_generators(self, trainer: pl.Trainer) -> None:
        """Reset the generators of the training loaders, whose first iterator is recreated."""
        for loader, states in zip(training_loaders(trainer), self._new_generators, strict=False):
            set_generator_states(loader, states, "workers", "order")


def _check_same_batch_size(loader: object, batches: BatchSettings) -> None:
    plan, elastic = batches.plan, elastic_sampler_of(loader)
    # A loader without a batch size has batches for items.
    if plan is None or elastic is None or elastic.plan == plan or not batch_size_of(loader):
        return
    msg = (
        f"global_batch_size={plan.global_batch_size}: train_dataloader now returns another "
        f"batch_size, which would make it {elastic.plan.global_batch_size}. Return the same "
        "batch_size in every call"
    )
    raise UnsupportedError(msg)
