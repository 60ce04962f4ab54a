"""A Trainer of transformers, whose runs resume on any number of ranks.

``TrainerBinding`` replaces methods of one Trainer: it chooses the folder to resume from, restores
random states, and waits for saves. Everything that the engines need is in one ``Loop``.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from lightning_elastic_zero.core.grid import RankGrid
from lightning_elastic_zero.core.manifest import load_json
from lightning_elastic_zero.errors import (
    CheckpointFormatError,
    CheckpointNotFoundError,
    UnsupportedError,
)
from lightning_elastic_zero.integrations.accelerators import (
    AcceleratorBinding,
    LoopState,
    check_steps,
    fallback_remedy,
    take_device_state,
)
from lightning_elastic_zero.integrations.differences import samplers_of, warn_of_training
from lightning_elastic_zero.integrations.engines import (
    Loaded,
    Loop,
    LoopOptions,
    OnNodes,
    bound_options,
    find_checkpoint,
    is_engine,
)
from lightning_elastic_zero.integrations.node_folders import (
    checkpoint_on_nodes,
    folder_on_nodes,
    is_folder_of_nodes,
    join_nodes,
    prepare_saves,
    saving_last,
)
from lightning_elastic_zero.integrations.series import resume_folder
from lightning_elastic_zero.integrations.tensor_ranks import (
    gather_tensors,
    grid_of,
    unfit_trainer,
)
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.paths import read_file, real_path

log = logging.getLogger(__name__)

_FOLDER = "resume_from_checkpoint"
"""The argument of ``train`` that names a folder, or is True for the newest."""

_AHEAD = "steps_ahead"
"""Entry of an engine's record: its steps minus the Trainer's, after a step. It is not 0 if the run
began with a checkpoint of other software, or if a loss takes several steps of the engine."""


def bind_trainer(trainer: Any, options: LoopOptions) -> None:
    """Bind all engines that a Trainer creates, also those of sweeps.

    Raises:
        UnsupportedError: the Trainer does not run DeepSpeed, or an option does not suit it.
    """
    _check_supported(trainer, options)
    TrainerBinding(trainer, options).bind()


def _check_supported(trainer: Any, options: LoopOptions) -> None:
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
    elif (folder := folder_at(args.output_dir)).local is None:
        msg = (
            f"output_dir is {folder}: the Trainer writes files of its own, so give a path on a "
            "disk. With save_on_each_node=True, each node has its own"
        )
    elif args.save_on_each_node and args.push_to_hub and "checkpoint" in args.hub_strategy:
        msg = (
            f"hub_strategy={args.hub_strategy.value!r} uploads the folder of one node, and with "
            'save_on_each_node=True the checkpoint is on all nodes. Set hub_strategy="every_save"'
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
        msg = unfit_trainer(trainer)
    if msg:
        raise UnsupportedError(msg)


class TrainerBinding(TrainerCallback):
    """The methods of one Trainer that are replaced, and its callback.

    It refers to the Trainer weakly, so that a Trainer that is deleted frees its memory at once, as
    without this library. It keeps none of its arguments: while their configuration of DeepSpeed
    exists, transformers creates all models for it.
    """

    def __init__(self, trainer: Any, options: LoopOptions) -> None:
        self._reference = weakref.ref(trainer)
        self._class = type(trainer)
        self._options = options
        self._loaded: Loaded | None = None
        """The load of the current ``train()``."""
        self._is_training = False
        self._save: object = None
        """Identifies the save in progress; None outside of one."""
        self._ahead: int | None = None
        """The engine's steps minus the Trainer's, after the last step; None before the first."""

    @property
    def _trainer(self) -> Any:
        return self._reference()

    def bind(self) -> None:
        """Replace the methods on the instance."""
        trainer = self._trainer
        trainer.create_accelerator_and_postprocess = self.create_accelerator
        trainer.train = self.train
        trainer._save_checkpoint = self.save_checkpoint
        trainer._load_rng_state = self.load_rng_state
        trainer._load_best_model = self.load_best_model
        trainer.wait_for_save = self.wait_for_save
        trainer.elastic_options = self._options
        trainer.add_callback(self)
        for callback in trainer.callback_handler.callbacks:
            # accelerate takes the engine's step in backward, before the Trainer counts it and steps
            # the schedulers. This callback would save in between; it asks again after the step.
            if type(callback).__name__ == "JITCheckpointCallback":
                callback.on_pre_optimizer_step = TrainerCallback().on_pre_optimizer_step
        self._bind_accelerator(trainer.accelerator)

    def _bind_accelerator(self, accelerator: Any) -> None:
        if bound_options(accelerator) is not None:
            msg = "elastic() was given this Trainer's accelerator before: pass only the Trainer"
            raise UnsupportedError(msg)
        state = LoopState(accelerator)
        loop = Loop(
            batch_names=("per_device_train_batch_size", "gradient_accumulation_steps"),
            prepare=self._set_micro_batch,
            record=partial(self._record, state),
            check=check_steps,
            on_load=partial(self._on_load, state),
            foreground=self._is_foreground,
            save_in_progress=self._save_in_progress,
            shows_bars=self._shows_bars,
            remedy=fallback_remedy(self._options),
            on_nodes=self._on_nodes,
        )
        AcceleratorBinding(state, self._options, loop).bind()
        if grid_of(accelerator).tensor > 1:
            trainer = self._trainer
            trainer._track_num_input_tokens = self.track_num_input_tokens
            trainer.evaluation_loop = self.evaluation_loop
            trainer.gather_function = partial(
                accelerator.gather_for_metrics,
                use_gather_object=trainer.args.eval_use_gather_object,
            )

    # -- the Trainer's methods -------------------------------------------------------------------

    def create_accelerator(self) -> None:
        """Create the Accelerator of a trial, and bind it."""
        self._class.create_accelerator_and_postprocess(self._trainer)
        self._bind_accelerator(self._trainer.accelerator)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``Trainer.train`` with a finished folder; with ``fallback``, an intact one."""
        trainer = self._trainer
        place = _place_of_folder(self._class.train.__get__(trainer))
        asked = args[place] if place < len(args) else kwargs.get(_FOLDER)
        if trainer.args.save_on_each_node:
            asked = join_nodes(asked, trainer.args, self._options)
        if asked is True or (asked and isinstance(asked, (str, os.PathLike))):
            folder = self._folder_for(None if asked is True else Path(asked))
            if place < len(args):
                args = (*args[:place], folder, *args[place + 1 :])
            else:
                kwargs[_FOLDER] = folder
        self._is_training = True
        try:
            result = self._class.train(trainer, *args, **kwargs)
        finally:
            self._is_training, self._loaded = False, None
        self.wait_for_save()
        return result

    def _folder_for(self, asked: Path | None) -> str:
        """Return the folder to resume from; collective.

        Raises:
            ValueError: the newest is asked for, and there is none: the Trainer's error, on all
                ranks.
            CheckpointNotFoundError: none is intact.
        """
        args = self._trainer.args
        series = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-")
        if args.save_on_each_node and (asked is None or is_folder_of_nodes(asked, args)):
            grid = grid_of(self._trainer.accelerator)
            folder = folder_on_nodes(asked, args, grid, self._options)
        else:
            folder = resume_folder(asked, series, _checkpoints_of, self._options)
        if folder is None:
            msg = (
                f"No valid checkpoint found in output directory ({series.parent}): it has no "
                f"folder {series.name}<number>. Pass another folder, or begin without a checkpoint"
            )
            raise ValueError(msg)
        return folder

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a folder of the run: only repeats within it are skipped."""
        self._save = object()
        try:
            on_nodes = self._trainer.args.save_on_each_node
            with saving_last(self._trainer.model_wrapped) if on_nodes else nullcontext():
                self._class._save_checkpoint(self._trainer, *args, **kwargs)
        finally:
            self._save = None

    def load_rng_state(self, checkpoint: str | None) -> None:
        """Restore random states when the Trainer does: callbacks may draw before and after."""
        self._class._load_rng_state(self._trainer, checkpoint)
        if checkpoint is not None and self._loaded is not None:
            trainer = self._trainer
            _restore_additional_rng(trainer.args, grid_of(trainer.accelerator), self._loaded)

    def track_num_input_tokens(self, *args: Any, **kwargs: Any) -> None:
        """Count the tokens of data ranks: the Trainer adds up those of all ranks."""
        trainer, state = self._trainer, self._trainer.state
        before = state.num_input_tokens_seen
        self._class._track_num_input_tokens(trainer, *args, **kwargs)
        of_all = state.num_input_tokens_seen - before
        state.num_input_tokens_seen = before + of_all // grid_of(trainer.accelerator).tensor

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Gather from data ranks also in Seq2SeqTrainer, which gathers from all."""
        trainer = self._trainer
        if trainer.gather_function == trainer.accelerator.gather:
            trainer.gather_function = partial(gather_tensors, trainer.accelerator)
        return self._class.evaluation_loop(trainer, *args, **kwargs)

    def load_best_model(self) -> None:
        """Load the best folder, whose save may not be finished."""
        self.wait_for_save()
        self._class._load_best_model(self._trainer)

    def wait_for_save(self) -> None:
        """Wait until the last save of each engine is published; collective."""
        self._trainer.accelerator.wait_for_save()  # a trial has its own

    # -- the engines' loop -----------------------------------------------------------------------

    def _set_micro_batch(self, engine: Any) -> None:
        # With auto_find_batch_size, the configuration keeps the size that was tried first.
        if (trainer := self._trainer) is not None and trainer.args.auto_find_batch_size:
            engine.set_train_micro_batch_size(trainer._train_batch_size)

    def _is_foreground(self, path: Path) -> bool:
        # Nothing waits for a save after train(), and an upload must not begin before. A run that
        # went back has replaced the Trainer's files next to an old checkpoint already. A run that
        # stops gains nothing, and a preempted one may have no time to wait at its end.
        trainer = self._trainer
        is_in_run = trainer is not None and self._is_training and not trainer.args.push_to_hub
        is_last = is_in_run and trainer.control.should_training_stop
        return not is_in_run or is_last or folder_at(path).is_checkpoint()

    def _record(self, state: LoopState) -> Mapping[str, Any]:
        return state.record() | ({} if self._ahead is None else {_AHEAD: self._ahead})

    def _shows_bars(self) -> bool:
        return (trainer := self._trainer) is None or not trainer.args.disable_tqdm

    def _on_nodes(self, folder: Path) -> OnNodes | None:
        trainer = self._trainer
        if trainer is None or not is_folder_of_nodes(folder, trainer.args):
            return None
        return checkpoint_on_nodes(folder, trainer.args, trainer.state)

    def _save_in_progress(self) -> object:
        return self._save

    def _on_load(self, state: LoopState, loaded: Loaded) -> None:
        """Record the load, and make its folder the newest one of this run.

        The Trainer deletes the oldest, before a background save is complete; a kill during a
        deletion or save leaves an incomplete folder that is newer. Another run's folders keep
        their order.
        """
        state.on_load(loaded)
        state.restore_seeds(loaded)
        self._loaded = loaded
        if self._trainer.is_world_process_zero():
            with suppress(OSError):
                folder = real_path(loaded.load_dir)
                if folder.parent == real_path(self._trainer.args.output_dir):
                    os.utime(folder)

    # -- the callback ----------------------------------------------------------------------------

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Warn of samples and losses that differ from those of the old run, and prepare saves."""
        trainer, loaded = self._trainer, self._loaded
        self._ahead = None
        if loaded is not None:
            warn_of_training(trainer, loaded)
            if trainer.is_world_process_zero():
                _warn_of_steps(loaded, trainer.state.global_step)
        if trainer.args.save_on_each_node:
            resumed = loaded.load_dir if loaded is not None else None
            engine, options = trainer.model_wrapped, self._options
            prepare_saves(engine, resumed, trainer.args, trainer.state, options)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Compare the steps of the engine and the Trainer, which may take several in one."""
        engine, state = self._trainer.model_wrapped, self._trainer.state
        if is_engine(engine):  # not in a training loop of the user's own
            self._ahead = int(engine.global_steps) - int(state.global_step)

    def on_epoch_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:  # noqa: ARG002
        """Set the epoch of a user's sampler and batch sampler, in each run.

        Whether the Trainer and accelerate do so depends on their releases, on the number of ranks,
        and on skipped batches.
        """
        loader = self._trainer.callback_handler.train_dataloader
        if isinstance(loader, DataLoader) and hasattr(loader, "set_epoch"):  # else nobody does
            for sampler in samplers_of(loader):
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(int(state.epoch or 0))


def _warn_of_steps(loaded: Loaded, of_trainer: int) -> None:
    """Warn if the files of a folder are of different steps."""
    ahead = loaded.record.get(_AHEAD)  # DeepSpeed may have counted other steps in its own
    of_engine = loaded.result.manifest.progress.global_steps
    if ahead is not None and of_engine - ahead != of_trainer:
        log.warning(
            "%s has the engine's state of step %d, and the Trainer's of step %d, as after a save "
            "within a step or after load_best_model_at_end: the run repeats or leaves out steps, "
            "and learning rates are those of other steps. Resume from another folder",
            loaded.load_dir,
            of_engine - ahead,
            of_trainer,
        )


def _restore_additional_rng(args: Any, grid: RankGrid, loaded: Loaded) -> None:
    """Give an additional rank the random state of a saved one, and tensor ranks the same.

    All ranks of a Trainer begin with one seed, and samplers of a later ``train()`` take their
    seed from the generator: with a seed of its own, a rank would have another data order.
    """
    was, rank = loaded.grid.ranks, loaded.grid.counterpart(args.process_index, grid)
    # A folder that was saved again by fewer ranks still has old files of the others.
    if was > 1 and not (loaded.load_dir / f"rng_state_{rank}.pth").is_file():
        rank = 0
    saved = {"world_size": was, "process_index": rank, "parallel_mode": args.parallel_mode}
    of_saved = SimpleNamespace(args=SimpleNamespace(**saved))
    Trainer._load_rng_state(of_saved, str(loaded.load_dir))
    file = loaded.load_dir / (f"rng_state_{rank}.pth" if was > 1 else "rng_state.pth")
    is_own = args.process_index == rank
    take_device_state(file, args.device.type, rank, args.device, is_own=is_own)


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
