"""State of transformers' Trainer outside of the engine, restored on any number of ranks."""

from __future__ import annotations

import dis
import functools
import inspect
import logging
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length

from lightning_elastic_zero.core.manifest import load_json
from lightning_elastic_zero.errors import (
    CheckpointFormatError,
    CheckpointNotFoundError,
    UnsupportedError,
)
from lightning_elastic_zero.integrations.accelerators import (
    AcceleratorBinding,
    samplers_of,
    warn_of_data,
)
from lightning_elastic_zero.integrations.engines import (
    Loaded,
    Loop,
    LoopOptions,
    bound_options,
    find_checkpoint,
)
from lightning_elastic_zero.integrations.series import resume_folder
from lightning_elastic_zero.storage.paths import read_file

log = logging.getLogger(__name__)


class ResumeCallback(TrainerCallback):
    """Completes a Trainer's resume: random states, and a warning of inexact parts."""

    def __init__(self, trainer: weakref.ref[Any]) -> None:
        self._ref = trainer
        self._loaded: Loaded | None = None

    @property
    def _trainer(self) -> Any:
        return self._ref()

    def on_load(self, loaded: Loaded) -> None:
        """Record the load, and make its folder the newest one.

        The Trainer deletes the oldest, before a background save is complete; a kill during a
        deletion or save leaves an incomplete folder that is newer.
        """
        self._loaded = loaded
        if self._trainer.is_world_process_zero():
            with suppress(OSError):
                os.utime(loaded.load_dir)

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Warn of samples and losses that differ from those of the old run."""
        loaded, trainer = self._loaded, self._trainer
        if loaded is None:
            return
        changed = loaded.differs(args.world_size, args.gradient_accumulation_steps)
        loader = trainer.callback_handler.train_dataloader
        differences = [*_generation_differences(args, state)]
        was = loaded.result.manifest.progress.global_batch_size
        if was not in (None, now := trainer.deepspeed.train_batch_size()):
            differences.append(
                f"the global batch changes from {was} to {now} samples: the Trainer computes its "
                "position in the data and the schedule from the number of steps, so it skips or "
                "repeats samples of this epoch"
            )
        else:
            differences += _epoch_differences(args, state, loader)
        if args.ignore_data_skip:
            differences.append("ignore_data_skip=True: the epoch begins again at its first sample")
        if state.epoch and state.epoch >= 1 and not has_length(loader):
            differences.append(
                "the Trainer does not find its position in a later pass over an iterable dataset "
                "without a length: define __len__"
            )
        if changed and _weighs_tokens(trainer) and not args.average_tokens_across_devices:
            differences.append(
                "average_tokens_across_devices=False: the weight of a token depends on the others "
                "of its rank, if samples differ in length. Set it to True"
            )
        if changed and getattr(args, "train_sampling_strategy", "") == "batch_rebalance":
            differences.append("batch_rebalance orders samples by the number of ranks")
        for difference in _loss_differences(trainer, loaded):
            if trainer.compute_loss_func is None:
                _warn_if_counted(trainer, difference)
            else:
                differences.append(difference)
        if loaded.world_size != args.world_size:
            _watch_evaluation(trainer, loaded)
        warn_of_data(
            loaded,
            trainer.accelerator,
            loader,
            in_epoch=bool(state.epoch and state.epoch % 1) and not args.ignore_data_skip,
            in_first_epoch=(state.epoch or 0) < 1,
            differences=differences,
        )

    def on_epoch_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:  # noqa: ARG002
        """Set the epoch of a user's sampler.

        accelerate does not do so for a loader of skipped batches.
        """
        loader = self._trainer.callback_handler.train_dataloader
        if self._loaded is not None and hasattr(loader, "set_epoch"):  # else nobody sets epochs
            _, sampler = samplers_of(loader)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(int(state.epoch or 0))

    def restore_rng(self) -> None:
        """Give an additional rank the random state of a saved one.

        All ranks of a Trainer begin with one seed, and samplers of a later ``train()`` take their
        seed from the generator: with a seed of its own, a rank would have another data order.
        """
        loaded, args = self._loaded, self._trainer.args
        if loaded is None:
            return
        was, rank = loaded.world_size, args.process_index % loaded.world_size
        # A folder that was saved again by fewer ranks still has old files of the others.
        if was > 1 and not (loaded.load_dir / f"rng_state_{rank}.pth").is_file():
            rank = 0
        saved = {"world_size": was, "process_index": rank, "parallel_mode": args.parallel_mode}
        of_saved = SimpleNamespace(args=SimpleNamespace(**saved))
        Trainer._load_rng_state(of_saved, str(loaded.load_dir))
        if args.device.type != "cpu" and args.process_index >= was:
            # The file has a state per device; each rank used its own.
            devices = torch.get_device_module(args.device)
            own = devices.get_rng_state(rank % devices.device_count())
            devices.set_rng_state(own, args.device)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Forget the load: a second ``train()`` may start without one."""
        self._loaded = None


def bind_trainer(trainer: Any, options: LoopOptions) -> None:
    """Bind all engines that a Trainer creates, also those of sweeps.

    Raises:
        UnsupportedError: the Trainer does not run DeepSpeed, or an option does not suit it.
    """
    args = trainer.args
    # With save_strategy="best", the best folder is the newest.
    keeps_best = args.metric_for_best_model and args.save_strategy != "best"
    least = 3 if keeps_best else 2  # with one that is complete, and one that is being written
    if not trainer.is_deepspeed_enabled:
        msg = (
            "elastic() was given a Trainer without DeepSpeed: pass "
            "TrainingArguments(deepspeed=<config>), or start it with accelerate launch "
            "--use_deepspeed"
        )
    elif args.save_on_each_node:
        msg = (
            "elastic() needs one output_dir that all ranks share, and save_on_each_node=True is "
            "set: set it to False, and give an output_dir on a shared filesystem"
        )
    elif trainer.accelerator.dataloader_config.split_batches:
        msg = (
            "accelerator_config sets split_batches=True: DeepSpeed then counts more samples per "
            "step than the Trainer reads, and the global batch cannot be checked. Set it to False, "
            "and divide per_device_train_batch_size by the number of ranks"
        )
    elif options.fallback and not _takes_folder(type(trainer)):
        msg = (
            f"fallback=True replaces the folder that train() is given, and {type(trainer).__name__}"
            ".train has no resume_from_checkpoint: add it, or leave out fallback"
        )
    elif options.async_save and (args.save_total_limit or least) < least:
        also = " and metric_for_best_model" if keeps_best else ""
        msg = (
            f"async_save=True with save_total_limit={args.save_total_limit}{also}: the Trainer "
            "would delete the newest complete checkpoint while the next one is being written. Set "
            f"save_total_limit={least}"
        )
    else:
        msg = ""
    if msg:
        raise UnsupportedError(msg)
    # A weak reference: a Trainer that is deleted frees its memory at once, as without this library.
    # Nothing below may hold its arguments: while their configuration of DeepSpeed exists,
    # transformers creates all models for it.
    ref = weakref.ref(trainer)
    training: list[bool] = []
    saving: list[object] = []
    callback, cls = ResumeCallback(ref), type(trainer)
    load_rng, load_best = cls._load_rng_state, cls._load_best_model

    def set_micro_batch(engine: Any) -> None:
        # With auto_find_batch_size, the configuration keeps the size that was tried first.
        if (made_for := ref()) is not None and made_for.args.auto_find_batch_size:
            engine.set_train_micro_batch_size(made_for._train_batch_size)

    def is_foreground(_: Path) -> bool:
        # Nothing waits for a save after train(), and an upload must not begin before.
        return (made_for := ref()) is None or not training or made_for.args.push_to_hub

    def shows_bars() -> bool:
        return (made_for := ref()) is None or not made_for.args.disable_tqdm

    def bind_accelerator(accelerator: Any) -> None:
        if bound_options(accelerator) is not None:
            msg = "elastic() was given this Trainer's accelerator before: pass only the Trainer"
            raise UnsupportedError(msg)
        AcceleratorBinding(
            weakref.ref(accelerator),
            options,
            Loop(
                batch_names=("per_device_train_batch_size", "gradient_accumulation_steps"),
                on_load=callback.on_load,
                foreground=is_foreground,
                save_in_progress=lambda: saving[-1] if saving else None,
                shows_bars=shows_bars,
            ),
            set_micro_batch,
        ).bind()

    def elastic_create() -> None:
        """Create the Accelerator of a trial, and bind it."""
        trainer: Any = ref()
        cls.create_accelerator_and_postprocess(trainer)
        bind_accelerator(trainer.accelerator)

    def elastic_train(*args: Any, **kwargs: Any) -> Any:
        """Call ``Trainer.train`` with a finished folder; with ``fallback``, an intact one."""
        trainer: Any = ref()
        place = _place_of_folder(cls.train.__get__(trainer))
        asked = args[place] if place < len(args) else kwargs.get(_FOLDER)
        if asked is True or (asked and isinstance(asked, (str, os.PathLike))):
            series = Path(trainer.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-")
            folder = None if asked is True else Path(asked)
            found = resume_folder(folder, series, _checkpoints_of, options)
            if found is None:  # the Trainer's error, on all ranks
                msg = (
                    f"No valid checkpoint found in output directory ({series.parent}): it has no "
                    f"folder {series.name}<number>. Pass another folder, or begin without a "
                    "checkpoint"
                )
                raise ValueError(msg)
            if place < len(args):
                args = (*args[:place], found, *args[place + 1 :])
            else:
                kwargs[_FOLDER] = found
        training.append(True)
        try:
            result = cls.train(trainer, *args, **kwargs)
        finally:
            training.clear()
        wait_for_save()
        return result

    def elastic_save(*args: Any, **kwargs: Any) -> None:
        """Save a folder of the run: only repeats within it are skipped."""
        saving.append(object())
        try:
            cls._save_checkpoint(ref(), *args, **kwargs)
        finally:
            saving.clear()

    def elastic_load_rng(checkpoint: str | None) -> None:
        """Restore random states when the Trainer does: callbacks may draw before and after."""
        load_rng(ref(), checkpoint)
        if checkpoint is not None:
            callback.restore_rng()

    def elastic_load_best() -> None:
        """Load the best folder, whose save may not be finished."""
        wait_for_save()
        load_best(ref())

    def wait_for_save() -> None:
        trainer: Any = ref()
        trainer.accelerator.wait_for_save()  # a trial has its own

    trainer.create_accelerator_and_postprocess = elastic_create
    trainer.train = elastic_train
    trainer._save_checkpoint = elastic_save
    trainer._load_rng_state = elastic_load_rng
    trainer._load_best_model = elastic_load_best
    trainer.wait_for_save = wait_for_save
    trainer.elastic_options = options
    trainer.add_callback(callback)
    bind_accelerator(trainer.accelerator)


# -- differences from the old run ------------------------------------------------------------------


_COUNT = "num_items_in_batch"
"""Argument of a loss: the labels of an optimizer step, by which the Trainer has a loss divided."""

_ACCUMULATION = {"gradient_accumulation_steps", "current_gradient_accumulation_steps"}
"""Attributes by which a loss may be divided instead."""


def _epoch_differences(args: Any, state: Any, loader: Any) -> Iterator[str]:
    """Yield a difference if epochs did not have the steps from which the Trainer counts them."""
    saved = state.epoch or 0.0
    control = state.stateful_callbacks.get("TrainerControl", {})
    stops = isinstance(control, dict) and control.get("args", {}).get("should_epoch_stop")
    if stops and saved % 1:
        yield "a callback has ended the saved epoch (should_epoch_stop): the resume continues it"
    is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
    if is_stream or not has_length(loader) or not len(loader):
        return
    batches, accumulate = len(loader), args.gradient_accumulation_steps
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
            factor *= Fraction(args.world_size, loaded.world_size)
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
    reference, own = weakref.ref(trainer), vars(trainer).get("compute_loss")

    def first_loss(*args: Any, **kwargs: Any) -> Any:
        trainer: Any = reference()
        del trainer.compute_loss
        if own is not None:
            trainer.compute_loss = own
        if kwargs.get(_COUNT) is not None and trainer.is_world_process_zero():
            log.warning(difference)
        return trainer.compute_loss(*args, **kwargs)

    trainer.compute_loss = first_loss


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
    args, best, reference = trainer.args, trainer.state.best_metric, weakref.ref(trainer)
    compares = best is not None and (args.metric_for_best_model or "").endswith("loss")
    multiplies = args.average_tokens_across_devices and _weighs_tokens(trainer)
    # A method of the user, which may record metrics, is not called twice.
    is_own = getattr(trainer.compute_loss, "__func__", None) is not Trainer.compute_loss
    if is_own or not (compares and multiplies):
        return

    def watched(
        model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        trainer: Any = reference()
        compute = functools.partial(Trainer.compute_loss, trainer, model)
        if model.training or num_items_in_batch is None:
            return compute(inputs, return_outputs, num_items_in_batch)
        del trainer.compute_loss
        other = compute({**inputs}, num_items_in_batch=2 * num_items_in_batch)  # frees its logits
        result = compute(inputs, return_outputs, num_items_in_batch)
        loss = result[0] if return_outputs else result
        if torch.allclose(loss, other) and trainer.is_world_process_zero():
            log.warning(
                "The evaluation loss of %s is multiplied by the number of ranks, because the model "
                "ignores %s: on %d ranks it cannot be compared with the best so far (%g on %d "
                "ranks). Set another metric_for_best_model. In new runs, set "
                "model.accepts_loss_kwargs = False before the Trainer is created",
                type(trainer.model).__name__,
                _COUNT,
                trainer.args.world_size,
                best,
                loaded.world_size,
            )
        return result

    trainer.compute_loss = watched


# -- folders ---------------------------------------------------------------------------------------


_FOLDER = "resume_from_checkpoint"


def _takes_folder(cls: type) -> bool:
    """Whether ``train`` of a Trainer's class accepts a folder."""
    parameters = inspect.signature(cls.train).parameters.values()  # type: ignore[attr-defined]
    return any(p.name == _FOLDER or p.kind == p.VAR_KEYWORD for p in parameters)


def _place_of_folder(train: Callable[..., Any]) -> int:
    """Return the position of the folder among the arguments of a Trainer's method ``train``.

    A subclass may pass its positional arguments on.
    """
    parameters = [*inspect.signature(train).parameters.values()]
    for index, parameter in enumerate(parameters):
        if parameter.name == _FOLDER and parameter.kind != parameter.KEYWORD_ONLY:
            return index
        passes_on = parameter.kind == parameter.VAR_POSITIONAL
        if passes_on and _FOLDER not in {other.name for other in parameters}:
            return index
    return sys.maxsize


def _checkpoints_of(folder: Path) -> list[Path]:
    """Return the engine's checkpoint in a folder; refuse one without it, or not finished."""
    state = folder / "trainer_state.json"
    try:
        load_json(read_file(state))
    except (OSError, ValueError) as error:
        msg = (
            f"{state} cannot be read ({error}): the save was not finished, or this is not a folder "
            f"{PREFIX_CHECKPOINT_DIR}-<number>"
        )
        raise CheckpointFormatError(msg) from error
    path = find_checkpoint(folder, None)
    if path is None:
        msg = f"{folder} has no DeepSpeed checkpoint: it is not finished, or has the model only"
        raise CheckpointNotFoundError(msg)
    return [Path(path)]
