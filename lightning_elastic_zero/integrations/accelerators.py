"""An Accelerator, whose states are saved and loaded on any number of ranks.

``AcceleratorBinding`` replaces methods of one Accelerator, which handle its folders and engines.
``LoopState`` is the state of a loop of accelerate outside of its engines.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.checkpointing import load_accelerator_state
from accelerate.data_loader import SeedableRandomSampler, SkipBatchSampler
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import MODEL_NAME, RNG_STATE_NAME, DeepSpeedSchedulerWrapper, DistributedType
from packaging.version import Version
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from lightning_elastic_zero.coordination.ranks import connect_ranks
from lightning_elastic_zero.core.manifest import Manifest, load_json
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ElasticZeroError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.open import open_checkpoint
from lightning_elastic_zero.integrations.differences import (
    length_of,
    samplers_of,
    skip_differences,
    warn_of_data,
)
from lightning_elastic_zero.integrations.engines import (
    OTHER_OPTIONS,
    SEQUENCE_RANKS,
    EngineCheckpoints,
    Loaded,
    Loop,
    LoopOptions,
    bound_options,
    checkpoint_of_tag,
    is_engine,
)
from lightning_elastic_zero.integrations.sequences import (
    batch_sampler_of,
    is_adapter,
    sequence_ranks,
    shared_loader,
)
from lightning_elastic_zero.integrations.series import folders_of, resume_folder
from lightning_elastic_zero.integrations.tensor_ranks import (
    check_loader,
    check_ranks,
    gather_for_metrics,
    gather_weights,
    grid_of,
    seed_workers,
)
from lightning_elastic_zero.storage.file_write import replace_durably
from lightning_elastic_zero.storage.own_files import is_checkpoint
from lightning_elastic_zero.storage.paths import read_file

log = logging.getLogger(__name__)

_SCHEDULERS, _LOADERS, _SEEDS = "schedulers", "loaders", "seeds"
"""Entries of an engine's record: how accelerate's schedulers are stepped; epochs of its loaders;
the seeds of their orders."""

_UNITS = "elastic_units"
"""Attribute of a scheduler that is stepped as in the old run."""

_ORIGINAL = "elastic_original"
"""Attribute of a converted function: the user's function, for another load."""

_MICRO_BATCH = "train_micro_batch_size_per_gpu"
"""Entry of DeepSpeed's configuration; if it is ``auto``, accelerate takes it from the loaders."""

_STEPS = "lightning_elastic_zero.json"
"""File next to accelerate's own: the step of each engine at which they were written."""

_REMEDY = (
    "With elastic(..., fallback=True), resume_from_checkpoint and load_state take the newest "
    "intact folder with a lower number"
)

_FIRST_STATES = f"{RNG_STATE_NAME}_0.pkl"
"""The file of rank 0's random states, which each save writes last."""

_BY_RANKS = (
    "accelerate steps a LambdaLR once per rank, and its function does not count steps of all "
    "ranks. Multiply its numbers of steps (warm-up, total) by accelerator.num_processes"
)
_BY_CALLS = (
    "accelerate steps this LambdaLR once for each call of step(), and its function depends on the "
    "number of ranks or micro-batches. Call step() once per optimizer step, and count optimizer "
    "steps in the function"
)


def bind_accelerator(accelerator: Any, options: LoopOptions) -> None:
    """Bind ``load_state``, ``save_state``, and all present and future engines.

    Raises:
        UnsupportedError: the Accelerator does not run DeepSpeed, its release is too old, or it has
            prepared loaders whose batches ranks share.
    """
    if accelerator._dataloaders and (shared := sequence_ranks(accelerator)) > 1:
        msg = (
            f"elastic() was called after accelerator.prepare(), with sequence parallelism (sp_size="
            f"{shared}): the loop has DeepSpeed's loader, which cannot be resumed within an epoch. "
            "Call elastic(accelerator) before prepare()"
        )
        raise UnsupportedError(msg)
    state = LoopState(accelerator)
    loop = Loop(
        batch_names=("the DataLoader's batch_size", "gradient_accumulation_steps"),
        record=state.record,
        check=check_steps,
        on_load=state.on_load,
        foreground=_is_replaced,
        remedy=fallback_remedy(options),
    )
    AcceleratorBinding(state, options, loop).bind()


def fallback_remedy(options: LoopOptions) -> str:
    """Return the remedy of a damaged checkpoint."""
    return "" if options.fallback else _REMEDY


class AcceleratorBinding:
    """The methods of one Accelerator that are replaced, and the engines that it has prepared."""

    def __init__(self, state: LoopState, options: LoopOptions, loop: Loop) -> None:
        self._state = state
        self._options = options
        # Checkpoints next to an engine's may be those of other engines.
        self._engine_options = replace(options, fallback=False)
        self._loop = loop
        self._engines: dict[int, EngineCheckpoints] = {}
        """Engines that the Accelerator has prepared and not freed, by ``id``."""
        self._last_folder: Path | None = None
        """The folder of the last load or save of this run."""

    @property
    def _accelerator(self) -> Any:
        return self._state.accelerator

    def bind(self) -> None:
        """Replace the methods on the instance.

        Raises:
            UnsupportedError: the Accelerator does not run DeepSpeed, or its release is too old.
        """
        accelerator = self._accelerator
        _check_supported(accelerator)
        for loader in accelerator._dataloaders:
            self._use_tensor_ranks(loader)
        methods = [
            self._prepare,
            self._prepare_data_loader,
            self._deepspeed_ulysses_dl_adapter,
            self._load_state,
            self._save_state,
            self._free_memory,
        ]
        if grid_of(accelerator).tensor > 1:
            methods += [self._gather_for_metrics, self._get_state_dict]
        for method in methods:
            name = method.__name__.removeprefix("_")
            bound = partial(method, getattr(accelerator, name))
            setattr(accelerator, name, functools.wraps(getattr(accelerator, name))(bound))
        accelerator.wait_for_save = self.wait
        accelerator.elastic_options = self._options
        self._bind_engines(accelerator._models)

    def wait(self) -> None:
        """Wait until the last save of each engine is published; collective."""
        for checkpoints in self._engines.values():
            checkpoints.wait()

    # -- engines ---------------------------------------------------------------------------------

    def _prepare(self, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_auto = self._accelerator.deepspeed_plugin.is_auto(_MICRO_BATCH)
        prepared = prepare(*args, **kwargs)
        each = prepared if isinstance(prepared, tuple) else (prepared,)
        self._bind_engines(each)
        each = tuple(map(self._with_epochs, each))
        if engines := [*filter(is_engine, each)]:
            pairs = zip(args, each, strict=True)
            loaders = [p for p in pairs if isinstance(p[0], DataLoader) and p[0].batch_size]
            counted = engines[0].train_micro_batch_size_per_gpu()
            check = partial(_check_counted, self._accelerator, loaders, counted, is_auto=is_auto)
            if loaders:
                _before_first_step(self._accelerator, check)
        return each if isinstance(prepared, tuple) else each[0]

    def _prepare_data_loader(self, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loader = prepare(*args, **kwargs)
        self._use_tensor_ranks(loader)
        return loader

    def _use_tensor_ranks(self, loader: Any) -> None:
        grid = grid_of(self._accelerator)
        check_loader(loader, grid)
        seed_workers(loader, grid, self._accelerator.process_index)

    def _deepspeed_ulysses_dl_adapter(
        self, adapt: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        return self._with_epochs(adapt(*args, **kwargs))

    def _with_epochs(self, prepared: Any) -> Any:
        """Return what accelerate has prepared, with a loader of its own for an adapter."""
        if not is_adapter(prepared):
            return prepared
        shared = shared_loader(prepared, self._accelerator.process_index)
        loaders = self._accelerator._dataloaders
        loaders[:] = [shared if loader is prepared.dl else loader for loader in loaders]
        return shared

    def _bind_engines(self, prepared: Any) -> None:
        for engine in prepared:
            if not is_engine(engine) or id(engine) in self._engines:
                continue
            if (before := bound_options(engine)) is not None:
                if before not in (self._options, self._engine_options, LoopOptions()):
                    raise ValueError(OTHER_OPTIONS)
                engine.wait_for_save()
            checkpoints = EngineCheckpoints(engine, self._engine_options, self._loop)
            self._engines[id(engine)] = checkpoints
            checkpoints.bind()

    def _gather_for_metrics(self, _: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return gather_for_metrics(self._accelerator, *args, **kwargs)

    def _get_state_dict(
        self, get: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return gather_weights(partial(get, model, *args, **kwargs), model)

    def _free_memory(self, free: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        while self._engines:
            self._engines.popitem()[1].stop()
        return free(*args, **kwargs)

    # -- loading ---------------------------------------------------------------------------------

    def _load_state(
        self, load: Callable[..., Any], input_dir: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        self._state.loaded = None
        configuration = self._accelerator.project_configuration
        series = Path(self._accelerator.project_dir or "", "checkpoints", "checkpoint_")
        is_named = configuration.automatic_checkpoint_naming
        named: list[str] = []
        if input_dir is not None or is_named:
            if self._options.fallback:
                asked = None if input_dir is None else Path(input_dir).expanduser()
                input_dir = resume_folder(asked, series, self._checkpoints_of, self._options)
            call = f"load_state from {input_dir or series.parent}"
            timeouts = self._options.timeouts()
            with closing(connect_ranks(timeouts, "elastic-zero engine", call)) as ranks:
                if is_named:  # rank 0's, because a network file system may list others elsewhere
                    named = ranks.broadcast(call, lambda: [*map(str, folders_of(series))])
                input_dir = str(input_dir or next(iter(named), f"{series}<number>"))
                ranks.run_all(call, partial(self._check_folder, Path(input_dir).expanduser()))
        loaded = load(input_dir, *args, **kwargs)
        if (state := self._state).loaded is not None:
            self._last_folder = state.loaded.load_dir
            state.restore(state.loaded)
        if named:  # else the next saves are older than those that exist, and are deleted first
            newest = int(Path(named[0]).name.removeprefix(series.name))
            configuration.iteration = max(configuration.iteration, newest + 1)
        return loaded

    def _check_folder(self, folder: Path) -> None:
        """Refuse a folder with more engines than are prepared: their models would start fresh.

        Raises:
            CheckpointNotFoundError: this rank does not see the folder.
            CheckpointMismatchError: the folder has engines that are not prepared.
        """
        if not folder.is_dir():
            msg = (
                f"{folder} does not exist, or is not a folder: check the path, its permissions, "
                "and that its file system is mounted on each node"
            )
            raise CheckpointNotFoundError(msg)
        prepared = {_tag(index) for index in range(len(self._accelerator._models))}
        saved = {path.name for path in folder.glob(f"{MODEL_NAME}*") if path.is_dir()}
        saved = {name for name in saved if re.fullmatch(rf"{MODEL_NAME}(_\d+)?", name)}
        if missing := sorted(saved - prepared):
            msg = (
                f"{folder} has {', '.join(missing)}, and {len(prepared)} models are prepared: call "
                "accelerator.prepare() with all models before load_state(). To load only some, call"
                f" engine.load_checkpoint(folder, {MODEL_NAME!r}) on each engine"
            )
            raise CheckpointMismatchError(msg)

    def _checkpoints_of(self, folder: Path) -> list[Path]:
        """Return the engines' checkpoints in a folder; refuse one that is not finished."""
        tags = map(_tag, range(len(self._accelerator._models)))
        return _finished_checkpoints(folder, tags, allow_pickle=self._options.allow_pickle)

    # -- saving ----------------------------------------------------------------------------------

    def _save_state(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.wait()  # accelerate deletes old checkpoints before it saves a new one
        project = self._accelerator.project_configuration
        limit = project.total_limit
        if project.automatic_checkpoint_naming and limit is not None:
            project.total_limit = self._limit_of_folders(limit)
        try:
            folder = save(*args, **kwargs)
        finally:
            project.total_limit = limit
        self._last_folder = Path(folder)
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            self._write_steps(Path(folder))
        return folder

    def _limit_of_folders(self, limit: int) -> int:
        """Return a limit with which accelerate deletes only folders that are not needed.

        It counts all names, also of unfinished folders, and deletes those with the lowest numbers
        before it saves. Only finished folders count here. The newest of them is kept, and that of
        the last load or save.
        """
        if not self._accelerator.is_main_process:
            return limit
        series = Path(self._accelerator.project_dir, "checkpoints", "checkpoint_")
        folders = folders_of(series)[::-1]
        finished = [folder for folder in folders if _is_finished(folder)]
        kept = {*finished[-1:], *(f for f in folders if _is_same(f, self._last_folder))}
        kept |= {*finished[max(0, len(finished) - limit + 1) :]}
        needless = 0
        for folder in folders:
            if folder in kept:
                break
            needless += 1
        return len([*series.parent.glob("*")]) + 1 - needless

    def _write_steps(self, folder: Path) -> None:
        """Record the step of each engine at which accelerate has written its own files."""
        models = enumerate(self._accelerator._models)
        steps = {_tag(index): int(model.global_steps) for index, model in models}
        replace_durably(folder / _STEPS, json.dumps(steps).encode())


def _check_supported(accelerator: Any) -> None:
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        msg = (
            f"elastic() was given an Accelerator of type {accelerator.distributed_type}: it "
            "must run DeepSpeed. Pass deepspeed_plugin=DeepSpeedPlugin(...), or start the "
            "script with accelerate launch --use_deepspeed"
        )
        raise UnsupportedError(msg)
    if Version(accelerate.__version__) < Version("1.15"):
        msg = (
            f"accelerate {accelerate.__version__} repeats the first epoch's order after a "
            "resume in a later epoch: install accelerate 1.15 or newer"
        )
        raise UnsupportedError(msg)
    check_ranks(accelerator)


def _tag(index: int) -> str:
    """Return accelerate's tag of an engine."""
    return f"{MODEL_NAME}_{index}" if index else str(MODEL_NAME)


def _is_finished(folder: Path) -> bool:
    """Whether a folder of accelerate has all that its save writes; files are not verified."""
    try:
        if not (folder / _STEPS).is_file():
            engine = checkpoint_of_tag(folder, str(MODEL_NAME))
            return not is_checkpoint(engine) and (folder / _FIRST_STATES).is_file()
        _finished_checkpoints(folder, load_json(read_file(folder / _STEPS)))
    except (OSError, ValueError, ElasticZeroError):
        return False
    return True


def _finished_checkpoints(
    folder: Path, tags: Iterable[str], *, allow_pickle: bool = False
) -> list[Path]:
    """Return the engines' checkpoints of given tags; refuse a folder that is not finished."""
    paths = {tag: checkpoint_of_tag(folder, tag) for tag in tags}
    for tag, path in paths.items():
        with closing(open_checkpoint(path, allow_pickle=allow_pickle)) as source:
            check_steps(folder / tag, source.manifest)
    return [*paths.values()]


def _is_replaced(path: Path) -> bool:
    """Whether a save of an engine replaces one, or accelerate's own files next to it."""
    return is_checkpoint(path) or (path.parent / _FIRST_STATES).is_file()


def _is_same(folder: Path, other: Path | None) -> bool:
    return other is not None and other.exists() and folder.samefile(other)


def check_steps(path: Path, manifest: Manifest) -> None:
    """Refuse an engine's checkpoint next to files of accelerate from another step.

    Args:
        path: the engine's tag in the folder, as accelerate names it.
        manifest: that of the checkpoint which is loaded for the tag.

    Raises:
        CheckpointCorruptedError: a save was interrupted.
    """
    if not path.name.startswith(MODEL_NAME):
        return  # the Trainer's
    found = checkpoint_of_tag(path.parent, path.name)
    if not is_checkpoint(found):
        return  # DeepSpeed's
    record = path.parent / _STEPS
    others = load_json(read_file(record)).get(path.name) if record.is_file() else None
    if (step := manifest.progress.global_steps) != others:
        of_step = f"step {others}" if others is not None else "another step, or not complete"
        msg = (
            f"{found} is of step {step}, and accelerate's files in {path.parent} are of {of_step}: "
            "a save into this folder was interrupted. Load another folder, and save each state "
            "into a new one"
        )
        raise CheckpointCorruptedError(msg)


class LoopState:
    """What accelerate keeps in units of one run or in files per rank."""

    def __init__(self, accelerator: Any) -> None:
        # Its engines refer to this object, and DeepSpeed never frees an engine that has trained:
        # the Accelerator with its loaders must not live as long.
        self._reference = weakref.ref(accelerator)
        self.loaded: Loaded | None = None
        """The first engine's load within ``load_state``."""

    @property
    def accelerator(self) -> Any:
        """The Accelerator, which has no types; None if it was freed."""
        return self._reference()

    def record(self) -> dict[str, Any]:
        """Return how schedulers are stepped, epochs and seeds of loaders, and sequence ranks."""
        if (accelerator := self.accelerator) is None:  # The user has kept the engine only.
            return {}
        epochs, seeds = dict[str, list[int]](), dict[str, list[int | None]]()
        for loader in accelerator._dataloaders:
            described = _describe_loader(loader)
            epochs.setdefault(described, []).append(self._epoch_of(loader))
            seeds.setdefault(described, []).append(_seed_of(loader))
        counts = (accelerator.num_processes, accelerator.gradient_accumulation_steps)
        return {
            _SCHEDULERS: [_units_of(scheduler, *counts) for scheduler in self._schedulers()],
            _LOADERS: epochs,
            _SEEDS: seeds,
            SEQUENCE_RANKS: sequence_ranks(accelerator),
        }

    def _epoch_of(self, loader: Any) -> int:
        """Return a loader's epoch: after the last batch, the next one, which it counts later."""
        # The newest one may be another loader that a break has left.
        begun = reversed(self.accelerator.gradient_state.dataloader_references)
        newest = next((b for b in begun if b is loader or _skips_batches_of(b, loader)), None)
        return getattr(loader, "iteration", 0) + getattr(newest, "end_of_dataloader", 0)

    def on_load(self, loaded: Loaded) -> None:
        """Keep the first engine's load, which all of accelerate's state is converted from."""
        if self.loaded is None:
            self.loaded = loaded

    def _schedulers(self) -> list[AcceleratedScheduler]:
        """Return the schedulers that accelerate saves, in its order."""
        prepared = self.accelerator._schedulers
        return [s for s in prepared if not isinstance(s, DeepSpeedSchedulerWrapper)]

    def restore(self, loaded: Loaded) -> None:
        """Convert schedulers, epochs and the counter of micro-batches; restore random states."""
        self._restore_schedulers(loaded)
        # Each rank has a file. All take rank 0's counter: with different ones, they would end their
        # windows at different batches.
        self._restore_counter(loaded, _load_rank_state(loaded, 0).get("step"))
        self._restore_epochs(loaded)
        self.restore_seeds(loaded)
        # An additional rank takes another's random state, since all ranks began with one seed.
        rank, device = self.accelerator.process_index, self.accelerator.device
        counterpart = loaded.grid.counterpart(rank, grid_of(self.accelerator))
        _load_rank_state(loaded, counterpart)
        file, is_own = loaded.load_dir / f"{RNG_STATE_NAME}_{counterpart}.pkl", counterpart == rank
        entry = f"torch_{device.type}_manual_seed"
        take_device_state(file, entry, counterpart, device, is_own=is_own)
        _before_first_step(self.accelerator, partial(self._at_first_step, loaded))

    def _restore_schedulers(self, loaded: Loaded) -> None:
        accelerator, was = self.accelerator, loaded.grid.ranks
        now, accumulate = accelerator.num_processes, accelerator.gradient_accumulation_steps
        recorded = loaded.record.get(_SCHEDULERS, [])
        for index, scheduler in enumerate(self._schedulers()):
            saved = _own_units(scheduler, was, loaded.accumulate)
            if index < len(recorded):
                saved = Units(*map(int, recorded[index]))
            _convert(scheduler, saved, _own_units(scheduler, now, accumulate))
            if was != now and accelerator.is_main_process:
                remedy = _BY_RANKS if _counts_ranks(scheduler) else _BY_CALLS
                for jump in _jumps(scheduler.scheduler):
                    log.warning("The learning rate jumps from %g to %g: " + remedy, *jump)  # noqa: G003

    def _restore_counter(self, loaded: Loaded, micro_batches: int | None) -> None:
        if micro_batches is None:
            return
        steps, in_window = divmod(micro_batches, loaded.accumulate)
        self.accelerator.step = steps * self.accelerator.gradient_accumulation_steps
        if in_window and self.accelerator.is_main_process:
            log.warning(
                "%s was saved after %d of %d micro-batches of an optimizer step and does not "
                "contain their gradients: the step is repeated",
                loaded.load_dir,
                in_window,
                loaded.accumulate,
            )

    def _restore_epochs(self, loaded: Loaded) -> None:
        """Set the epochs of the loaders, which accelerate counts from 0."""
        unknown = []
        for loader, epoch in self._saved(loaded, _LOADERS):
            if epoch is None and not isinstance(samplers_of(loader)[1], SequentialSampler):
                unknown.append(_describe_loader(loader))
            elif epoch is not None and hasattr(loader, "set_epoch"):
                loader.set_epoch(epoch)
        if unknown and self.accelerator.is_main_process:
            log.warning(
                "%s does not contain the epochs of the loaders (%s): they begin with the first "
                "epoch's order, unless the loop calls set_epoch(epoch) before skip_first_batches",
                loaded.load_dir,
                ", ".join(unknown),
            )

    def restore_seeds(self, loaded: Loaded) -> None:
        """Continue the saved order of each loader: batches of another one would be skipped."""
        for loader, seed in self._saved(loaded, _SEEDS):
            now = _seed_of(loader)
            if seed is None or now in (None, seed):
                continue
            samplers_of(loader)[1].initial_seed = seed
            if self.accelerator.is_main_process:
                log.warning(
                    "This run has the seed %d for the order of samples (%s), and %s was saved with "
                    "%d: the saved order continues. Set data_seed=%d (TrainingArguments, "
                    "DataLoaderConfiguration), or the same seed in each run",
                    now,
                    _describe_loader(loader),
                    loaded.load_dir,
                    seed,
                    seed,
                )

    def _saved(self, loaded: Loaded, entry: str) -> Iterator[tuple[Any, Any]]:
        """Yield each loader and its value in an entry of the record; None if it has none."""
        saved = loaded.record.get(entry, {})
        values = {described: iter(of_loaders) for described, of_loaders in saved.items()}
        for loader in self.accelerator._dataloaders:
            yield loader, next(values.get(_describe_loader(loader), iter(())), None)

    def _at_first_step(self, loaded: Loaded) -> None:
        """Warn of differences in the data, and count skipped loaders' epochs."""
        accelerator = self.accelerator
        self._warn_of_position(loaded, accelerator.gradient_state.active_dataloader)
        for begun in accelerator.gradient_state.dataloader_references:
            for prepared in accelerator._dataloaders:
                if _skips_batches_of(begun, prepared):
                    begun.end = partial(_end_and_count, begun.end, begun, prepared)

    def _warn_of_position(self, loaded: Loaded, loader: Any) -> None:
        """Warn if the loop's position in a loader, or its order, is not the saved one."""
        accelerator, steps = self.accelerator, loaded.result.manifest.progress.global_steps
        done = steps * accelerator.gradient_accumulation_steps
        differences: list[str] = []
        skipped, batches = 0, None
        if isinstance(loader, DataLoader):
            batches, _ = samplers_of(loader)
            sampler = batch_sampler_of(loader)
            skips: Any = sampler if isinstance(sampler, SkipBatchSampler) else loader
            skipped = getattr(skips, "skip_batches", 0)  # the loader's, of a stream
            whole = loader if skips is loader else sampler.batch_sampler
            per_epoch = length_of(whole) or sys.maxsize  # the first epoch may be the only one
            epochs = loaded.record.get(_LOADERS, {}).get(_describe_loader(loader), [])
            if not epochs or done // per_epoch in epochs:  # else the loop leaves epochs early
                old = steps * loaded.accumulate
                differences += skip_differences(skipped, old, done, per_epoch)
        from_or_to_one = (loaded.grid.data == 1) != (grid_of(accelerator).data == 1)
        if from_or_to_one and hasattr(batches, "set_epoch"):
            differences.append(
                f"accelerate calls {type(batches).__name__}.set_epoch on one rank only: give "
                "the method another name, and call it at the start of each epoch"
            )
        warn_of_data(
            loaded,
            accelerator,
            loader,
            in_epoch=skipped > 0,
            in_first_epoch=skipped >= done,  # batches of earlier epochs are not skipped
            differences=differences,
        )


def _before_first_step(accelerator: Any, action: Callable[[], None]) -> None:
    """Call ``action`` before the next ``backward``, when the loop's loader is known."""
    backward = accelerator.backward

    @functools.wraps(backward)
    def first(*args: Any, **kwargs: Any) -> Any:
        accelerator.backward = backward
        action()
        return backward(*args, **kwargs)

    accelerator.backward = first


def _check_counted(
    accelerator: Any, loaders: list[tuple[Any, Any]], counted: int, *, is_auto: bool
) -> None:
    """Refuse a micro-batch size that accelerate has taken from another loader than the loop's.

    Only a warning, if the configuration has another size, with which DeepSpeed alone trains too; or
    if several loaders have been begun: the last of them need not be the loop's.

    Args:
        accelerator: accelerate's, of the engine.
        loaders: those that were prepared with the engine, each as the user's and as prepared.
        counted: the engine's micro-batch size.
        is_auto: whether accelerate has taken it from the loaders.

    Raises:
        UnsupportedError: checkpoints would record another number of samples per step.
    """
    ranks = accelerator.num_processes if accelerator.split_batches else 1
    references = accelerator.gradient_state.dataloader_references
    *others, begun = [each for each in references if each is not None] or [None]
    source = "another one of the same prepare() gives" if is_auto else "the configuration has"
    for loader, prepared in loaders:
        size = loader.batch_size // ranks
        if size != counted and (begun is prepared or _skips_batches_of(begun, prepared)):
            msg = (
                f"the training loader gives a rank {size} samples, but {source} {counted}, which "
                f"is taken for {_MICRO_BATCH}: checkpoints would record another number of samples "
                f"per step. Set {_MICRO_BATCH}={size} in DeepSpeed's configuration. To load a "
                "checkpoint that has recorded the wrong number, also pass "
                "allow_global_batch_change=True once"
            )
            if is_auto and not others:
                raise UnsupportedError(msg)
            if accelerator.is_main_process:
                log.warning("If the loader that was begun last is the training loader: %s", msg)


def _load_rank_state(loaded: Loaded, rank: int) -> dict[str, Any]:
    """Restore the random states of a saved rank; return the rest of its file."""
    state: dict[str, Any] = load_accelerator_state(
        loaded.load_dir, [], [], [], [], process_index=rank, scaler=None
    )
    return state


def take_device_state(
    file: Path, entry: str, rank: int, device: torch.device, *, is_own: bool
) -> None:
    """Give this rank's device the random state that the device of a saved rank had.

    ``entry`` of the rank's ``file`` has a state for each device of its node, and it used one.
    ``is_own``: the rank has the same number, and its software has restored the states of devices by
    their numbers, which is right on nodes with as many devices.
    """
    if device.type == "cpu" or not file.is_file():
        return
    if (states := accelerate.utils.load(file).get(entry)) is None:
        return
    # A Trainer with one device outside of a distributed job saves that device's state alone.
    of_devices = [states] if isinstance(states, torch.Tensor) else states
    module = torch.get_device_module(device)
    if not (is_own and len(of_devices) == module.device_count()):
        module.set_rng_state(of_devices[rank % len(of_devices)], device)


def _describe_loader(loader: Any) -> str:
    """Describe a loader independently of the number of ranks and the order of preparation."""
    kind = type(samplers_of(loader)[1]).__name__
    if isinstance(loader.dataset, IterableDataset) or not isinstance(loader.dataset, Sized):
        return kind
    return f"{kind} of {len(loader.dataset)} samples"


def _seed_of(loader: Any) -> int | None:
    """Return the seed of a loader's shuffled order, to which the epoch is added."""
    sampler = samplers_of(loader)[1]
    return int(sampler.initial_seed) if isinstance(sampler, SeedableRandomSampler) else None


def _skips_batches_of(loader: Any, prepared: Any) -> bool:
    """Whether ``skip_first_batches`` made ``loader`` from ``prepared``."""
    for name in ("batch_sampler", "sampler"):
        sampler, whole = getattr(loader, name, None), getattr(prepared, name, None)
        if isinstance(sampler, SkipBatchSampler) and sampler.batch_sampler is whole:
            return True
    skips = getattr(loader, "skip_batches", 0)  # of an iterable dataset
    return bool(skips and loader is not prepared and loader.dataset is prepared.dataset)


def _end_and_count(end: Callable[[], None], loader: Any, prepared: Any) -> None:
    """Count the end of a loader's epoch for the prepared loader that it was made from."""
    end()
    prepared.iteration = loader.iteration


@dataclass(frozen=True, slots=True)
class Units:
    """How accelerate counts one optimizer step in a user's scheduler."""

    steps: int
    """Calls of ``step()``, usually one per rank."""
    extra_counts: int
    """Further increments of ``_step_count``: one per micro-batch before the last."""


def _units_of(scheduler: AcceleratedScheduler, ranks: int, accumulate: int) -> list[int]:
    """Return the units of a scheduler, as plain data."""
    units = vars(scheduler).get(_UNITS) or _own_units(scheduler, ranks, accumulate)
    return [units.steps, units.extra_counts]


def _own_units(scheduler: AcceleratedScheduler, ranks: int, accumulate: int) -> Units:
    """Return the units in which accelerate itself steps a scheduler."""
    # False also if the plugin has its default, True: accelerate 1.15 reads other values only.
    adjusts = scheduler.gradient_state.adjust_scheduler
    return Units(ranks, accumulate - 1 if adjusts else 0)


def _convert(scheduler: AcceleratedScheduler, saved: Units, own: Units) -> None:
    """Make a loaded scheduler continue from the old run's position.

    accelerate calls ``step()`` once per rank, and constants from the checkpoint (``T_max``,
    ``total_steps``) count these calls. So the scheduler is stepped as often as in the old run.
    Functions (``LambdaLR``) are this run's and receive this run's steps.
    """
    for name in ("step", _UNITS):  # of an earlier load
        vars(scheduler).pop(name, None)
    if not _counts_ranks(scheduler):
        saved = own  # accelerate does not multiply its steps
    _scale(scheduler.scheduler, saved.steps, own.steps)
    if saved != own:
        vars(scheduler).update({"step": partial(_step, scheduler, saved), _UNITS: saved})


def _counts_ranks(scheduler: AcceleratedScheduler) -> bool:
    """Whether accelerate steps a scheduler once per rank, not once per call."""
    return scheduler.step_with_optimizer and not scheduler.split_batches


def _scale(scheduler: Any, saved: int, now: int) -> None:
    """Convert the steps that functions receive, also in nested schedulers."""
    for nested in getattr(scheduler, "_schedulers", ()):
        _scale(nested, saved, now)
    if _has_functions_of_this_run(scheduler):
        scheduler.lr_lambdas = [_scaled(function, saved, now) for function in scheduler.lr_lambdas]


def _jumps(scheduler: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the last and the current rate of each function whose rate has changed."""
    for nested in getattr(scheduler, "_schedulers", ()):
        yield from _jumps(nested)
    # ChainedScheduler has no last_epoch.
    if isinstance(scheduler, LambdaLR) and (step := scheduler.last_epoch) > 0:
        for was, rate, function in zip(
            scheduler._last_lr, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
        ):
            if not math.isclose(was, now := rate * function(step), rel_tol=1e-6):
                yield was, now


def _scaled(function: Callable[[int], float], saved: int, now: int) -> Callable[[int], float]:
    """Return a function of the old run's steps; the original if the counts are equal."""
    original: Callable[[int], float] = getattr(function, _ORIGINAL, function)
    if saved == now:
        return original

    def scaled(step: int) -> float:
        return original(step * now // saved)

    setattr(scaled, _ORIGINAL, original)
    return scaled


def _has_functions_of_this_run(scheduler: Any) -> bool:
    """Whether a scheduler computes rates with functions that its state lacks."""
    functions = getattr(scheduler, "lr_lambdas", None)
    if functions is None:
        return False
    kept = scheduler.state_dict().get("lr_lambdas") or []
    return not any(kept)


def _step(scheduler: Any, units: Units, *args: Any, **kwargs: Any) -> None:
    """``AcceleratedScheduler.step``, called as often per optimizer step as in the old run."""
    skipped = any(optimizer.step_was_skipped for optimizer in scheduler.optimizers)
    if skipped or not scheduler.gradient_state.sync_gradients:
        return
    inner = scheduler.scheduler
    if hasattr(inner, "_step_count"):  # SequentialLR and ReduceLROnPlateau have none
        inner._step_count += units.extra_counts
    total = getattr(inner, "total_steps", None)
    for _ in range(units.steps):
        if total is None or inner._step_count <= total:
            inner.step(*args, **kwargs)
