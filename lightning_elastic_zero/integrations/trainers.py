"""State of transformers' Trainer outside of the engine, restored on any number of ranks."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length

from lightning_elastic_zero.checkpoint.fallback import verify_share
from lightning_elastic_zero.coordination.ranks import Ranks
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
    newest_intact,
)
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
        """Warn of samples that differ from those of the old run."""
        loaded, trainer = self._loaded, self._trainer
        if loaded is None:
            return
        changed = loaded.differs(args.world_size, args.gradient_accumulation_steps)
        differences = []
        was = loaded.result.manifest.progress.global_batch_size
        if was not in (None, now := trainer.deepspeed.train_batch_size()):
            differences.append(
                f"the global batch changes from {was} to {now} samples: the Trainer computes its "
                "position in the data and the schedule from the number of steps, so it skips or "
                "repeats samples of this epoch"
            )
        if args.ignore_data_skip:
            differences.append("ignore_data_skip=True: the epoch begins again at its first sample")
        loader = trainer.callback_handler.train_dataloader
        if state.epoch and state.epoch >= 1 and not has_length(loader):
            differences.append(
                "the Trainer does not find its position in a later pass over an iterable dataset "
                "without a length: define __len__"
            )
        weighs_tokens = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func
        if changed and weighs_tokens and not args.average_tokens_across_devices:
            differences.append(
                "average_tokens_across_devices=False: the weight of a token depends on the others "
                "of its rank, if samples differ in length. Set it to True"
            )
        if changed and getattr(args, "train_sampling_strategy", "") == "batch_rebalance":
            differences.append("batch_rebalance orders samples by the number of ranks")
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
            verify = _verify if options.fallback else _check_finished
            found = newest_intact(folder, series, verify, options)
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


def _check_finished(folder: Path, _: Ranks) -> Path:
    """Return DeepSpeed's checkpoint in a folder; refuse one without it, or not finished."""
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
    return Path(path)


def _verify(folder: Path, ranks: Ranks) -> None:
    """Verify the files that a resume reads; each rank verifies its part of the state."""
    verify_share(_check_finished(folder, ranks), ranks)
