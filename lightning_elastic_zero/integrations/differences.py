"""How a resumed run differs from the run that saved: a warning for each difference.

Of accelerate's data: ``warn_of_data``. Of a Trainer's data and losses: ``warn_of_training``.
"""

from __future__ import annotations

import dis
import inspect
import logging
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    SeedableRandomSampler,
    SkipBatchSampler,
)
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_elastic_zero.core.manifest import STAGE_WEIGHTS
from lightning_elastic_zero.engine.tensor_parallel import global_batch
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.integrations.engines import Loaded
from lightning_elastic_zero.integrations.sequences import batch_sampler_of, sequence_ranks
from lightning_elastic_zero.integrations.tensor_ranks import grid_of

log = logging.getLogger(__name__)

_COUNT = "num_items_in_batch"
"""Argument of a loss: the labels of an optimizer step, by which the Trainer has a loss divided."""

_ACCUMULATION = {"gradient_accumulation_steps", "current_gradient_accumulation_steps"}
"""Attributes by which a loss may be divided instead."""


def warn_of_data(
    loaded: Loaded,
    accelerator: Any,
    loader: object,
    *,
    in_epoch: bool,
    in_first_epoch: bool,
    differences: Iterable[str] = (),
) -> None:
    """Warn, on one rank, of reasons why later samples may differ from those of the old run.

    Args:
        loaded: the load.
        accelerator: accelerate's, of this run.
        loader: the training DataLoader, as accelerate has prepared it, or another.
        in_epoch: whether batches of the resumed epoch are skipped.
        in_first_epoch: whether that epoch is the first.
        differences: additional reasons from the caller.

    Raises:
        UnsupportedError: this number of ranks would get unequal numbers of batches.
    """
    reasons = [*differences]
    accumulate, shared = accelerator.gradient_accumulation_steps, sequence_ranks(accelerator)
    grid = grid_of(accelerator)
    changed = loaded.differs(grid, accumulate, shared)
    reasons += _sequence_differences(loaded, accelerator)
    is_stateful = loader is not None and accelerator.dataloader_config.use_stateful_dataloader
    if is_stateful and (changed or loaded.grid != grid):
        reasons.append("use_stateful_dataloader keeps one rank's position, which no other can use")
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        if loaded.grid.data != grid.data:
            _check_equal_epochs(loader)
        _, sampler = samplers_of(loader)
        own_generator = getattr(sampler, "generator", None)  # a new one in each process
        is_reset = own_generator is not None and not hasattr(sampler, "set_epoch")
        if changed or in_epoch or (is_reset and not in_first_epoch):
            counts = (loaded.grid.data, grid.data)
            reasons += _order_differences(loader, *counts, in_first_epoch=in_first_epoch)
        samples = loaded.result.manifest.progress.global_batch_size
        if changed and samples:
            rounds = {max(1, samples // accumulate) * shared}
            rounds.add(max(1, samples // loaded.accumulate) * (loaded.sequence_ranks or shared))
            reasons += _remainders(loader, samples, rounds, is_filled=accelerator.even_batches)
    elif isinstance(loader, DataLoader) and (changed or in_epoch):
        reasons.append(
            "an iterable dataset is read again up to the resumed batch: some samples are repeated "
            "and others left out, unless its order is the same in each run"
            f"{' and does not depend on ranks, micro-batch size and workers' if changed else ''}"
        )
    if reasons and accelerator.is_main_process:
        log.warning(
            "This run has %d ranks, %s was saved on %d: %s",
            grid.ranks,
            loaded.load_dir,
            loaded.grid.ranks,
            "; ".join(reasons),
        )


def _sequence_differences(loaded: Loaded, accelerator: Any) -> Iterator[str]:
    """Yield differences because of sequence parallelism."""
    was, shared = loaded.sequence_ranks, sequence_ranks(accelerator)
    manifest, plugin = loaded.result.manifest, accelerator.deepspeed_plugin
    # The old run's reduction is not recorded: it is taken for this run's.
    reduction = plugin.deepspeed_config.get("zero_optimization") or {}
    before = _gradient_factor(manifest.stage, was or shared, reduction)
    now = _gradient_factor(plugin.zero_stage, shared, reduction)
    if was is not None and (manifest.stage, was) != (plugin.zero_stage, shared):
        if before is None or now is None:
            yield (
                "with reduce_scatter: false, ZeRO-3 multiplies gradients of parameters with up to "
                "reduce_bucket_size elements by sp_size, and others by 1. So clipping acts on "
                "other norms, and Adam's moments are of another scale. Set reduce_scatter to true"
            )
        elif before != now:
            yield (
                f"DeepSpeed multiplies gradients by {now} instead of {before} (by sp_size; in "
                "ZeRO-3 with reduce_scatter, by 1), so clipping acts on other norms, and Adam's "
                f"moments are of the old scale. Multiply the loss by {Fraction(before, now)} in "
                "this run"
            )
    micro_steps = manifest.progress.global_steps * loaded.accumulate
    if was is None and micro_steps % shared and accelerator.num_processes > shared:
        yield (
            "it was saved without elastic(), after a number of micro-batches that is not a "
            f"multiple of sp_size={shared}: up to {shared - 1} batches of each rank are repeated "
            "and as many are left out"
        )


def _gradient_factor(stage: int, shared: int, reduction: Mapping[str, Any]) -> int | None:
    """Return by what DeepSpeed multiplies the gradients of sequences that ranks share.

    It averages them over data ranks, as if each rank had a part of the sum. But the Trainer's loss
    is a mean that has passed all ranks of a sequence. ZeRO-3's ``reduce_scatter`` does not. Without
    it, the factor depends on the parameter: then None.
    """
    if stage != STAGE_WEIGHTS or shared == 1:
        return shared
    of_buckets = reduction.get("contiguous_gradients", True)
    return None if of_buckets and not reduction.get("reduce_scatter", True) else 1


def _order_differences(loader: Any, was: int, now: int, *, in_first_epoch: bool) -> Iterator[str]:
    """Yield reasons for other samples in a resumed epoch, given both numbers of ranks."""
    if isinstance(loader, DataLoaderDispatcher) and now > 1:
        yield (
            "with dispatch_batches=True, accelerate skips too few batches of a resumed epoch: set "
            "it to False"
        )
    batches, sampler = samplers_of(loader)
    has_epochs = hasattr(loader, "set_epoch") and hasattr(loader.dataset, "set_epoch")
    is_never_called = was == now > 1 and isinstance(sampler, SeedableRandomSampler)
    is_seeded = sampler is not batches and hasattr(sampler, "set_epoch")
    if has_epochs and is_seeded and not is_never_called:
        yield (
            f"accelerate calls {type(loader.dataset).__name__}.set_epoch in some epochs only, "
            "depending on the number of ranks and on skipped batches: give the method another "
            "name, and call it at the start of each epoch"
        )
    if isinstance(sampler, RandomSampler) and not hasattr(sampler, "set_epoch"):
        yield (
            "the shuffled order has no seed of its own: set use_seedable_sampler=True "
            "(DataLoaderConfiguration, accelerator_config) in the run that saves too"
        )
    elif not isinstance(sampler, SequentialSampler) and not hasattr(sampler, "set_epoch"):
        if was == now and in_first_epoch and _seeds_itself(loader, sampler):
            return
        yield (
            f"the order of {type(sampler).__name__} cannot be repeated from the epoch's number, and"
            " a resumed epoch may have other samples: use a sampler whose set_epoch(epoch) seeds "
            "the order"
        )


def _seeds_itself(loader: Any, sampler: Any) -> bool:
    """Whether a new process gets the same first order, as with TRL's RepeatSampler."""
    # accelerate gives one to samplers without a generator.
    others = (None, getattr(loader, "synchronized_generator", None))
    seeds = (getattr(sampler, name, None) for name in ("seed", "generator"))
    return any(all(seed is not other for other in others) for seed in seeds)


def _check_equal_epochs(loader: Any) -> None:
    """Refuse a number of ranks that get unequal numbers of batches in an epoch."""
    shard = batch_sampler_of(loader)
    while isinstance(shard, SkipBatchSampler):
        shard = shard.batch_sampler
    is_shard = isinstance(shard, BatchSamplerShard) and not shard.split_batches
    if not is_shard or shard.even_batches or shard.drop_last:
        return
    batches, data_ranks = length_of(shard.batch_sampler), shard.num_processes
    if batches % data_ranks:
        msg = (
            f"even_batches=False with {batches} batches in an epoch on {data_ranks} data ranks: "
            "ranks would get unequal numbers of batches, and wait for each other at its end. Set "
            "even_batches or drop_last to True, or use a number of data ranks that divides "
            f"{batches}"
        )
        raise UnsupportedError(msg)


def _remainders(loader: Any, samples: int, rounds: set[int], *, is_filled: bool) -> Iterator[str]:
    """Yield differences at the end of an epoch.

    Args:
        loader: the DataLoader.
        samples: those of an optimizer step.
        rounds: samples that all ranks read at a time, in both runs: those of a micro-step; with
            sequence parallelism, of ``sp_size`` micro-steps.
        is_filled: whether all ranks read full batches at the end of an epoch, too.
    """
    batches, sampler = samplers_of(loader)
    counted = sampler.dataset if isinstance(sampler, DistributedSampler) else sampler
    each = getattr(batches, "batch_size", None) or 0 if sampler is batches else 1
    count = length_of(counted) * each
    rest = count % samples
    if not any(count % each for each in rounds):
        return
    if (unit := math.lcm(samples, *rounds)) > samples:
        yield (
            f"{count} samples are not a multiple of {unit}, which all ranks read in sp_size "
            f"micro-steps: epochs may end at another step. Leave out {count % unit} samples"
        )
    elif getattr(batches, "drop_last", False):
        yield (
            f"{count} samples are not a multiple of the {samples} of a step, and drop_last makes "
            "the steps of an epoch depend on the number of ranks: epochs may end at another step. "
            f"Leave out {rest} samples"
        )
    else:
        effect = (
            "the last step of an epoch is filled up with other samples"
            if is_filled
            else "in an epoch's last step, the weight of a sample depends on the micro-batch size"
        )
        yield f"{count} samples are not a multiple of the {samples} of a step: {effect}"


def samplers_of(loader: Any) -> tuple[Any, Any]:
    """Return the batch sampler and the sampler of a loader that accelerate has prepared."""
    batches = batch_sampler_of(loader)
    while hasattr(batches, "batch_sampler"):  # shards, and skipped batches
        batches = batches.batch_sampler
    return batches, getattr(batches, "sampler", batches)


def length_of(value: Any) -> int:
    """Return the length of a loader or sampler; 0 if it is not known."""
    with suppress(TypeError, AttributeError, NotImplementedError):  # a wrapper asks another object
        return len(value)
    return 0


def skip_differences(skipped: int, old: int, now: int, per_epoch: int) -> Iterator[str]:
    """Yield a difference if the skipped batches are the old run's.

    Args:
        skipped: batches that ``skip_first_batches`` skips.
        old: batches of a rank before the save, in the old run.
        now: batches of a rank for the same samples, in this run.
        per_epoch: batches of a rank in an epoch of this run.
    """
    if (old - skipped) % per_epoch == 0 and (now - skipped) % per_epoch:
        yield (
            f"{skipped} batches of the epoch are skipped, which is the number of the run that "
            f"saved; to continue with its next sample, skip {now % per_epoch}: multiply the "
            "optimizer steps by this run's gradient_accumulation_steps"
        )


def warn_of_training(trainer: Any, loaded: Loaded) -> None:
    """At the start of training, warn of samples and losses that differ from the old run's."""
    args, state = trainer.args, trainer.state
    loader = trainer.callback_handler.train_dataloader
    differences = [*_data_differences(trainer, loaded, loader)]
    for difference in _loss_differences(trainer, loaded):
        if trainer.compute_loss_func is None:
            _warn_if_counted(trainer, difference)
        else:
            differences.append(difference)
    if loaded.grid.data != grid_of(trainer.accelerator).data:
        _watch_evaluation(trainer, loaded)
    warn_of_data(
        loaded,
        trainer.accelerator,
        loader,
        in_epoch=bool(state.epoch and state.epoch % 1) and not args.ignore_data_skip,
        in_first_epoch=(state.epoch or 0) < 1,
        differences=differences,
    )


def _data_differences(trainer: Any, loaded: Loaded, loader: Any) -> Iterator[str]:
    """Yield reasons why the samples of this run, or their weights, are not the old run's."""
    args, state = trainer.args, trainer.state
    yield from _generation_differences(args, state)
    was = loaded.result.manifest.progress.global_batch_size
    if was not in (None, now := global_batch(trainer.deepspeed)):
        yield (
            f"the global batch changes from {was} to {now} samples: the Trainer computes its "
            "position in the data and the schedule from the number of steps, so it skips or "
            "repeats samples of this epoch"
        )
    else:
        yield from _epoch_differences(args, state, loader)
    if args.ignore_data_skip:
        yield "ignore_data_skip=True: the epoch begins again at its first sample"
    if state.epoch and state.epoch >= 1 and not length_of(loader):
        yield (
            "the Trainer does not find its position in a later pass over an iterable dataset "
            "without a length: define __len__"
        )
    shared = sequence_ranks(trainer.accelerator)
    grid = grid_of(trainer.accelerator)
    if not loaded.differs(grid, args.gradient_accumulation_steps, shared):
        return
    if _weighs_tokens(trainer) and not args.average_tokens_across_devices:
        yield (
            "average_tokens_across_devices=False: the weight of a token depends on the others "
            "of its rank, if samples differ in length. Set it to True"
        )
    if getattr(args, "train_sampling_strategy", "") == "batch_rebalance":
        yield "batch_rebalance orders samples by the number of ranks"


def _epoch_differences(args: Any, state: Any, loader: Any) -> Iterator[str]:
    """Yield a difference if epochs did not have the steps from which the Trainer counts them."""
    saved = state.epoch or 0.0
    control = state.stateful_callbacks.get("TrainerControl", {})
    stops = isinstance(control, dict) and control.get("args", {}).get("should_epoch_stop")
    if stops and saved % 1:
        yield "a callback has ended the saved epoch (should_epoch_stop): the resume continues it"
    is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
    batches, accumulate = length_of(loader), args.gradient_accumulation_steps
    if is_stream or not batches:
        return
    steps = -(-batches // accumulate)
    epoch, step = divmod(state.global_step, steps)
    resumed = epoch + step * accumulate / batches
    # The last steps may be smaller, depending on the number of ranks, which is less than a step.
    if abs(resumed - saved) * steps > 1 - 1e-6:
        yield (
            f"the checkpoint was saved at epoch {saved:.2f} and the Trainer resumes at epoch "
            f"{resumed:.2f}, which it computes from {state.global_step} steps with {steps} per "
            "epoch: a callback has ended an epoch (should_epoch_stop), or the dataset has changed"
        )


def _generation_differences(args: Any, state: Any) -> Iterator[str]:
    """Yield what TRL's online methods and moving reference models do not save."""
    passes = getattr(args, "num_iterations", None) or 1
    every = (getattr(args, "steps_per_generation", None) or 0) * passes
    if every and state.global_step * args.gradient_accumulation_steps % every:
        steps = math.lcm(every, args.gradient_accumulation_steps)
        yield (
            "the checkpoint was saved between two generations, and TRL does not save completions: "
            "it generates them again, and later generations are shifted. Set save_steps to a "
            f"multiple of {steps // args.gradient_accumulation_steps}"
        )
    synchronized = getattr(args, "sync_ref_model", None)
    if synchronized and state.global_step >= args.ref_model_sync_steps:
        yield (
            "sync_ref_model=True: TRL does not save the reference model, which starts again from "
            "its initial weights"
        )


def _weighs_tokens(trainer: Any) -> bool:
    """Whether the Trainer has losses divided by the labels of an optimizer step."""
    return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func)


def _loss_differences(trainer: Any, loaded: Loaded) -> Iterator[str]:
    """Yield a difference if a user's loss is a mean that the Trainer takes for a sum's share.

    It then adds up the means of all micro-batches, and its own ``compute_loss`` multiplies them by
    the number of ranks.
    """
    args, function = trainer.args, trainer.compute_loss_func
    if getattr(trainer, "loss_is_scaled_for_ga", None) is not None or not _weighs_tokens(trainer):
        return
    factor = Fraction(args.gradient_accumulation_steps, loaded.accumulate)
    if _ignores_count(trainer.compute_loss):
        name = f"{type(trainer).__name__}.compute_loss"
    elif function is not None and _ignores_count(function):
        name = getattr(function, "__name__", "compute_loss_func")
        if args.average_tokens_across_devices:
            factor *= Fraction(grid_of(trainer.accelerator).data, loaded.grid.data)
    else:
        return
    if factor != 1:
        yield (
            f"{name} does not use {_COUNT}, so the Trainer does not divide its loss by the number "
            f"of micro-batches: if it is a mean, gradients are {factor} times those of the old "
            f"run. Multiply the loss by {1 / factor} in this run; in new runs, divide it by "
            "self.current_gradient_accumulation_steps"
        )


def _warn_if_counted(trainer: Any, difference: str) -> None:
    """Warn at the first loss if the Trainer has counted labels.

    It divides the loss of batches without ``labels``.
    """
    before = vars(trainer).get("compute_loss")
    trainer.compute_loss = partial(_first_loss, weakref.ref(trainer), before, difference)


def _first_loss(
    reference: weakref.ref[Any], before: Any, difference: str, *args: Any, **kwargs: Any
) -> Any:
    """Restore ``compute_loss``, warn if labels were counted, and call it."""
    trainer: Any = reference()
    del trainer.compute_loss
    if before is not None:
        trainer.compute_loss = before
    if kwargs.get(_COUNT) is not None and trainer.is_world_process_zero():
        log.warning(difference)
    return trainer.compute_loss(*args, **kwargs)


def _ignores_count(function: Any) -> bool:
    """Whether a function reads neither ``num_items_in_batch`` nor the accumulation."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    read: set[object] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD"):
            value = instruction.argval
            read.update(value if isinstance(value, tuple) else (str(value),))
    parameters = inspect.signature(function).parameters.values()
    passed_on = {p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    return read.isdisjoint({_COUNT, *_ACCUMULATION, *passed_on})


def _watch_evaluation(trainer: Any, loaded: Loaded) -> None:
    """Warn, at the first evaluation, if its loss cannot be compared with the best one so far.

    ``compute_loss`` multiplies by the number of ranks, as the model has divided by the labels of
    all ranks. A model with ``**kwargs`` may ignore their number: then the loss is a mean already.
    """
    args, best = trainer.args, trainer.state.best_metric
    compares = best is not None and (args.metric_for_best_model or "").endswith("loss")
    multiplies = args.average_tokens_across_devices and _weighs_tokens(trainer)
    # A method of the user, which may record metrics, is not called twice.
    is_trainers = getattr(trainer.compute_loss, "__module__", "") == "transformers.trainer"
    if is_trainers and compares and multiplies:
        trainer.compute_loss = partial(_watched_loss, weakref.ref(trainer), best, loaded)


def _watched_loss(
    reference: weakref.ref[Any],
    best: float,
    loaded: Loaded,
    model: Any,
    inputs: Any,
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:
    """Call ``Trainer.compute_loss``; in the first evaluation, twice, and compare the results."""
    trainer: Any = reference()
    compute = partial(type(trainer).compute_loss, trainer, model)
    if model.training or num_items_in_batch is None:
        return compute(inputs, return_outputs, num_items_in_batch)
    del trainer.compute_loss
    other = compute({**inputs}, num_items_in_batch=2 * num_items_in_batch)  # frees its logits
    result = compute(inputs, return_outputs, num_items_in_batch)
    loss = result[0] if return_outputs else result
    if torch.allclose(loss, other) and trainer.is_world_process_zero():
        log.warning(
            "The evaluation loss of %s is multiplied by the number of ranks, because the model "
            "ignores %s: on %d ranks it cannot be compared with the best so far (%g on %d ranks). "
            "Set another metric_for_best_model. In new runs, set model.accepts_loss_kwargs = False "
            "before the Trainer is created",
            type(trainer.model).__name__,
            _COUNT,
            grid_of(trainer.accelerator).data,
            best,
            loaded.grid.data,
        )
    return result
