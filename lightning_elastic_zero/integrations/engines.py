"""The two checkpoint methods of a DeepSpeed engine, with its folders and tags.

``engine.save_checkpoint(save_dir, tag)`` writes a checkpoint of this library into ``save_dir/tag``
and its name into ``save_dir/latest``, and ``load_checkpoint`` reads every kind of checkpoint from
there. The methods are bound on the instance; no class and no module is changed.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lightning_elastic_zero.api import ElasticOptions, warn_of_open_window
from lightning_elastic_zero.checkpoint.load import load_engine
from lightning_elastic_zero.checkpoint.types import LoadResult, SaveRequest
from lightning_elastic_zero.coordination.ranks import Ranks, connect_ranks
from lightning_elastic_zero.core.grid import RankGrid
from lightning_elastic_zero.core.manifest import MANIFEST_NAME, Manifest
from lightning_elastic_zero.core.options import check_client_state
from lightning_elastic_zero.core.progress import (
    Progress,
    ShowBytes,
    is_terminal,
    showing,
    tqdm_bar,
)
from lightning_elastic_zero.core.save_files import LATEST
from lightning_elastic_zero.data_progress.batches import plan_batches
from lightning_elastic_zero.engine.buffers import optimizer_wrapper
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.engine.support import check_supported
from lightning_elastic_zero.engine.tensor_parallel import engine_grid, global_batch
from lightning_elastic_zero.errors import (
    DAMAGE_ERRORS,
    CheckpointMismatchError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.deepspeed_files import LATEST_UNIVERSAL, is_deepspeed
from lightning_elastic_zero.formats.open import check_unmixed, resolve_latest
from lightning_elastic_zero.integrations.series import OWN_SUFFIX, series_of
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.own_files import is_checkpoint, latest_in
from lightning_elastic_zero.storage.paths import AnyPath, StorePath, check_local_path, parse_path

log = logging.getLogger(__name__)

RECORD = "lightning_elastic_zero"
"""Key of this package's own entry in the client state of an engine."""

SEQUENCE_RANKS = "sequence_ranks"
"""Entry of the record: how many ranks share a sequence (accelerate's ``sp_size``)."""

_SCHEDULE = "schedule"
"""Entry of the record: the settings of DeepSpeed's own scheduler."""

OTHER_OPTIONS = (
    "elastic() or wrap_initialize() was called before on this object, or on an engine of it, with "
    "other options: pass all options in one call"
)


def is_a(value: object, package: str, name: str) -> bool:
    """Whether an object has a class, without importing the class's module."""
    classes = ((cls.__module__.split(".")[0], cls.__name__) for cls in type(value).__mro__)
    return (package, name) in classes


def is_engine(value: object) -> bool:
    """Whether an object is a DeepSpeed engine."""
    return is_a(value, "deepspeed", "DeepSpeedEngine")


def bound_options(value: object) -> LoopOptions | None:
    """Return the options of an engine, Accelerator or Trainer that is elastic already."""
    options: LoopOptions | None = getattr(value, "__dict__", {}).get("elastic_options")
    return options


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions(ElasticOptions):
    """The keywords of ``elastic``."""

    allow_global_batch_change: bool = False
    """Load a checkpoint that was saved with another number of samples per optimizer step. False:
    refuse it, and name the settings that keep the number."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A successful load, from which a loop restores its own state."""

    load_dir: Path
    """As the loop passed it."""
    result: LoadResult
    record: Mapping[str, Any]
    """This package's entry in the client state; empty for checkpoints of other software."""

    @property
    def grid(self) -> RankGrid:
        """Ranks of the run that saved; each may have files of the loop."""
        return self.result.manifest.grid

    @property
    def sequence_ranks(self) -> int | None:
        """Ranks that shared a sequence in the run that saved; None if it is not recorded."""
        return self.record.get(SEQUENCE_RANKS)

    @property
    def accumulate(self) -> int:
        """Micro-batches per optimizer step in the run that saved."""
        return max(1, self.result.manifest.progress.gradient_accumulation_steps)

    def differs(self, grid: RankGrid, accumulate: int, sequence_ranks: int) -> bool:
        """Whether this run divides its steps differently among data ranks and micro-batches."""
        was = (self.grid.data, self.accumulate, self.sequence_ranks or sequence_ranks)
        return was != (grid.data, accumulate, sequence_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnNodes:
    """The checkpoint of a ``save_dir`` that each node has for itself."""

    path: StorePath
    rank_state: Callable[[], Mapping[str, Any]]
    """Called on every rank at a save; returns files of the loop, as state of this rank."""
    replaced: Callable[[], Iterable[AnyPath]]
    """Called on rank 0 after a save; returns checkpoints that the loop does not keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """How a training loop uses the checkpoint methods of its engines."""

    batch_names: tuple[str, str] = (
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    )
    """The user's names of micro-batch size and accumulation, for messages."""
    prepare: Callable[[Any], None] = lambda _: None
    """Called with each engine before its methods are replaced."""
    record: Callable[[], Mapping[str, Any]] = dict
    """Called at each save; the result comes back in ``Loaded.record``."""
    on_load: Callable[[Loaded], None] = lambda _: None
    """Called on every rank after each load."""
    check: Callable[[Any, Manifest], None] = lambda *_: None
    """Called on every rank with ``load_dir/tag`` before state changes; raises if the loop's own
    files in ``load_dir`` do not belong to the checkpoint."""
    foreground: Callable[[Any], bool] = lambda _: False
    """Whether training waits for a save to a path although ``async_save`` is set."""
    save_in_progress: Callable[[], object] = lambda: None
    """Identifies the loop's own save; None outside of one. Within one, a save is skipped if it
    repeats the last (same folder, step and options): the Trainer saves twice if ZeRO-3 weights are
    not gathered."""
    is_plain: bool = False
    """The loop may be any program's, and only its engines are elastic."""
    whole_folder: bool = False
    """``save_dir`` itself is the checkpoint, and the tag is ignored."""
    on_nodes: Callable[[Any], OnNodes | None] = lambda _: None
    """Returns where on nodes the checkpoint of a ``save_dir`` is; None: below ``save_dir``."""
    shows_bars: Callable[[], bool] = lambda: True
    """Whether the loop shows progress bars."""
    remedy: str = ""
    """Appended to the error of a damaged checkpoint."""


class _Save(NamedTuple):
    """A call of ``save``, to recognise its repetition."""

    of_loop: object
    path: AnyPath
    global_steps: int
    micro_steps: int
    exclude_frozen: bool


class EngineCheckpoints:
    """Saves and loads one engine; ``bind`` replaces the engine's methods."""

    def __init__(self, engine: Any, options: LoopOptions, loop: Loop) -> None:
        self._engine = engine
        self._options = options
        self._loop = loop
        self._last_save: _Save | None = None
        self._is_warned = False
        self._save_options = options.save_options()
        self._manager = options.manager()

    def bind(self) -> None:
        """Replace the engine's methods by ``save`` and ``load``, with DeepSpeed's signatures.

        Raises UnsupportedError for tensor parallelism in a form that cannot be saved.
        """
        engine = self._engine
        if engine_grid(engine).tensor > 1:  # Others are checked at the first save or load.
            with self._ranks("set up", "tensor parallelism") as ranks:
                ranks.run_all("check the engine", partial(check_supported, engine))
        self._loop.prepare(engine)
        for name, method in (("save_checkpoint", self.save), ("load_checkpoint", self.load)):
            original = types.MethodType(getattr(type(engine), name), engine)
            # transformers inspects the signature.
            setattr(engine, name, functools.wraps(original)(partial(method)))
        engine.wait_for_save = self.wait
        engine.elastic_options = self._options

    # -- saving ----------------------------------------------------------------------------------

    def save(
        self,
        save_dir: str | os.PathLike[str],
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save into ``save_dir/tag``, as ``DeepSpeedEngine.save_checkpoint`` does.

        Raises:
            SaveError, UnsupportedError, RanksError: see ``save_checkpoint`` of this package.
        """
        engine = self._engine
        folder = self._folder_at(save_dir)
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        state = dict(check_client_state("client_state", client_state))
        this_save = _Save(
            self._loop.save_in_progress(),
            folder / tag,
            engine.global_steps,
            engine.micro_steps,
            exclude_frozen_parameters,
        )
        if this_save.of_loop is not None and not state and this_save == self._last_save:
            return True
        live = LiveEngine(engine)
        if record := {**self._loop.record(), **_settings_of(engine.lr_scheduler)}:
            state[RECORD] = record
        options = replace(self._save_options, exclude_frozen=exclude_frozen_parameters)
        on_nodes = self._loop.on_nodes(folder)
        with self._ranks("save", folder / tag) as ranks:
            step = f"save {tag}: choose a folder"
            self._last_save = None
            if not self._is_warned:
                self._is_warned = warn_of_open_window(live, str(folder / tag), ranks)
            target = on_nodes.path if on_nodes else folder
            name, waits = ranks.broadcast(step, lambda: self._choose(target, tag))
            path = str(target / name if name else target)
            if not waits:
                self._manager.start(live, ranks.rank)
            of_rank = (
                ranks.run_all(f"save {path}: read files", on_nodes.rank_state) if on_nodes else {}
            )
            request = SaveRequest(live, path, state, options, of_rank)
            self._manager.save_async(request, ranks, self._bar(ranks), blocking=waits)
            if save_latest and name:
                self._manager.link(path, str(folder / LATEST), ranks)
            for old in on_nodes.replaced() if on_nodes and ranks.rank == 0 else ():
                self._manager.remove(str(old))
        self._last_save = this_save
        return True

    def _choose(self, folder: AnyPath, tag: str) -> tuple[str, bool]:
        """Return the name of the folder for a tag, and whether training waits for the save."""
        is_whole = self._loop.whole_folder or folder_at(folder).local is None
        name = "" if is_whole else _free_name(check_local_path(folder), tag)
        path = folder / name if name else folder
        return name, not self._options.async_save or self._loop.foreground(path)

    def wait(self) -> None:
        """Wait until the last save is published; collective.

        Raises:
            ElasticZeroError: it failed; the checkpoint before it is intact.
        """
        if self._options.async_save:
            with self._ranks("wait for", "the last save") as ranks:
                self._manager.wait_until_finished(ranks)

    def stop(self) -> None:
        """Wait for the last save without the other ranks, and release its memory.

        Raises:
            ElasticZeroError: as ``wait``.
        """
        if (failure := self._manager.stop(interrupted=False)) is not None:
            raise failure

    # -- loading ---------------------------------------------------------------------------------

    def load(
        self,
        load_dir: str | os.PathLike[str],
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: object = None,
    ) -> tuple[str, dict[str, Any]] | tuple[None, None]:
        """Load from ``load_dir``, as ``DeepSpeedEngine.load_checkpoint`` does.

        Returns:
            The checkpoint's directory and its client state. ``(None, None)``, with a warning, if no
            tag is given and the folder has no checkpoint.

        Raises:
            UnsupportedError: ``custom_load_fn`` is given.
            CheckpointMismatchError: the checkpoint does not fit the model, or another number of
                samples per optimizer step.
            CheckpointFormatError: DeepSpeed has written into a checkpoint of this library.
            ElasticZeroError: as ``load_checkpoint`` of this package.
        """
        if custom_load_fn is not None:
            msg = (
                "load_checkpoint(custom_load_fn=...) is not supported: this library restores the "
                "weights itself. Leave the argument out, and map names by elastic(..., rename={})"
            )
            raise UnsupportedError(msg)
        folder = self._folder_at(load_dir)
        live = LiveEngine(self._engine)
        optimizer = load_optimizer_states and not load_module_only
        tag = None if tag is None else str(tag)
        options = self._options.load_options(
            optimizer_state=optimizer,
            hyperparameters=optimizer or (load_lr_scheduler_states and not load_module_only),
            counters=not load_module_only,
            lr_scheduler=load_lr_scheduler_states,
            strict=load_module_strict,
            check=partial(self._check, folder / (tag or ""), optimizer=optimizer),
        )
        self.wait()  # the checkpoint may still be in flight
        with self._ranks("load", folder / (tag or LATEST)) as ranks:
            step = f"load {folder}: find the checkpoint"
            path = ranks.broadcast(step, lambda: self._find(folder, tag, ranks.progress))
            if path is None:
                log.warning(
                    "%s has no file %r and no checkpoint: nothing was loaded. Pass the folder that "
                    "save_checkpoint was given, or a tag",
                    folder,
                    LATEST,
                )
                return None, None
            # Fabric does not count steps.
            in_series = series_of(parse_path(path), counts_steps=not self._loop.whole_folder)
            options = replace(options, in_series=in_series)
            try:
                with self._bar(ranks) as show:
                    result = load_engine(live, path, ranks, replace(options, show=show))
            except DAMAGE_ERRORS as error:
                if not self._loop.remedy:
                    raise
                msg = f"{error}\n{self._loop.remedy}"
                raise type(error)(msg) from error
        self._last_save = None
        record = result.client_state.pop(RECORD, {})
        if ranks.rank == 0:
            self._announce(result)
        loaded = Loaded(Path(load_dir), result, record if isinstance(record, dict) else {})
        if optimizer and load_lr_scheduler_states:
            self._warn_of_schedule(loaded)
        self._loop.on_load(loaded)
        return result.stats.path, dict(result.client_state)

    def _folder_at(self, path: str | os.PathLike[str]) -> AnyPath:
        """Return the folder that a loop passes; most loops write other files next to it."""
        return parse_path(path) if self._loop.whole_folder else check_local_path(path)

    def _find(self, folder: AnyPath, tag: str | None, progress: Progress) -> str | None:
        """Return the path of the checkpoint to load; None if there is none."""
        if on_nodes := self._loop.on_nodes(folder):
            return str(on_nodes.path)
        is_whole = self._loop.whole_folder
        path = str(folder) if is_whole else find_checkpoint(check_local_path(folder), tag)
        if path is not None:
            check_unmixed(parse_path(path), progress)
        return path

    def _check(self, path: Any, manifest: Manifest, *, optimizer: bool) -> None:
        """Refuse a checkpoint that does not fit the loop, at ``load_dir/tag``."""
        self._loop.check(path, manifest)
        if not optimizer or not optimizer_wrapper(self._engine):
            return
        if self._loop.is_plain:
            self._check_step_counter(path, manifest)
        self._check_global_batch(manifest)

    def _announce(self, result: LoadResult) -> None:
        """Report the load in one line, also if the user has not configured ``logging``."""
        manifest, engine, stats = result.manifest, self._engine, result.stats
        saved = f"saved on {manifest.grid} with ZeRO-{manifest.stage}"
        # Under Fabric, the configured batch size need not be the loader's.
        per_step = f", {global_batch(engine)} samples per step"
        text = (
            f"Loaded {stats.path} ({result.source_summary or saved}) on "
            f"{engine_grid(engine)} at step {engine.global_steps}"
            f"{'' if self._loop.whole_folder else per_step}: {stats.bytes / 1e6:.1f} MB in "
            f"{stats.seconds:.2f} s"
        )
        if log.isEnabledFor(logging.INFO) and log.hasHandlers():
            log.info(text)
        else:
            sys.stderr.write(f"{text}\n")

    def _warn_of_schedule(self, loaded: Loaded) -> None:
        """Warn if a scheduler of this run's configuration continues with other rates."""
        engine, scheduler = self._engine, self._engine.lr_scheduler
        is_same = loaded.grid.ranks == engine_grid(engine).ranks
        if scheduler is None or is_same or engine.global_rank:
            return
        was = loaded.record.get(_SCHEDULE, {})
        now = _settings_of(scheduler).get(_SCHEDULE, {})
        changes = [
            f"{name} changes from {was[name]} to {now[name]}"
            for name in sorted(was.keys() & now.keys())
            if was[name] != now[name]
        ]
        if loaded.result.manifest.progress.global_steps and not changes:
            rates = _configured_rates(scheduler)
            groups = zip(engine.optimizer.param_groups, rates, strict=False)
            changes = [
                f"the learning rate jumps from {group['lr']:g} to {rate:g}"
                for group, rate in groups
                if not math.isclose(group["lr"], rate, rel_tol=1e-6)
            ]
        if changes:
            log.warning(
                "%s of this run has other settings than that of %s, which %d ranks saved: %s. Give "
                "it the settings of that run. accelerate divides the total_num_steps of a "
                "DummyScheduler by the number of ranks: multiply it by accelerator.num_processes",
                type(scheduler).__name__,
                loaded.load_dir,
                loaded.grid.ranks,
                "; ".join(changes),
            )

    def _check_step_counter(self, path: Path, manifest: Manifest) -> None:
        """Refuse a state of accelerate on another number of ranks or micro-batches.

        Each rank of ``load_state`` reads its own counter of micro-batches, which additional ranks
        lack: the ranks would wait for each other.

        Raises:
            UnsupportedError: it is one.
        """
        accumulate = max(1, manifest.progress.gradient_accumulation_steps)
        was = (manifest.grid, accumulate)
        engine = self._engine
        now = (engine_grid(engine), engine.gradient_accumulation_steps())
        if was == now or not (path.parent / "random_states_0.pkl").is_file():
            return
        msg = (
            f"{path.parent} is a state of accelerate, saved on {was[0]} with {was[1]} "
            f"micro-batches per step; this run has {now[0]} and {now[1]}. wrap_initialize() and "
            "elastic(engine) restore only the engine, not accelerate's counters and schedulers: "
            "call elastic(accelerator), or resume with the saved numbers"
        )
        raise UnsupportedError(msg)

    def _check_global_batch(self, manifest: Manifest) -> None:
        """Refuse a checkpoint with another number of samples per optimizer step.

        Raises:
            CheckpointMismatchError: it differs, and the options do not allow that.
        """
        was, engine = manifest.progress.global_batch_size, self._engine
        now, data_ranks = global_batch(engine), _data_ranks(engine)
        if was is None or was == now or self._options.allow_global_batch_change:
            return
        micro = engine.train_micro_batch_size_per_gpu()
        accumulate = engine.gradient_accumulation_steps()
        names, ranks = self._loop.batch_names, engine_grid(engine).ranks
        counted = f"{ranks} ranks" if ranks == data_ranks else f"{data_ranks} data ranks"
        msg = (
            f"the checkpoint was saved with {was} samples per optimizer step on "
            f"{manifest.grid.ranks} ranks; this run has {now} ({names[0]}={micro} x "
            f"{names[1]}={accumulate} x {counted}). The learning rate schedule, the steps "
            "per epoch and the position in the data depend on it. "
            f"{_keeping(was, micro, data_ranks, names)} "
            "Or pass elastic(..., allow_global_batch_change=True)"
        )
        raise CheckpointMismatchError(msg)

    def _ranks(self, verb: str, path: object) -> closing[Ranks]:
        """Return the ranks for one call, which other ranks may never make."""
        call = f"{verb} {path} at step {self._engine.global_steps}"
        return closing(connect_ranks(self._options.timeouts(), "elastic-zero engine", call))

    def _bar(self, ranks: Ranks) -> AbstractContextManager[ShowBytes]:
        is_shown = ranks.rank == 0 and is_terminal() and self._loop.shows_bars()
        return showing(tqdm_bar if is_shown else None)


def _settings_of(scheduler: Any) -> dict[str, Any]:
    """Return the settings of a scheduler of DeepSpeed, whose state has its position only."""
    if type(scheduler).__module__.split(".")[0] != "deepspeed":
        return {}
    position = scheduler.state_dict()
    settings = {
        name: value
        for name, value in vars(scheduler).items()
        if isinstance(value, (int, float, str)) and name not in position and name[0] != "_"
    }
    return {_SCHEDULE: settings}


def _configured_rates(scheduler: Any) -> list[float]:
    """Return the rates at a scheduler's position by this run's settings, if it computes them."""
    if type(scheduler).__module__.split(".")[0] == "deepspeed":
        return [float(rate) for rate in scheduler.get_lr()]
    functions = getattr(scheduler, "lr_lambdas", None)
    if not is_a(scheduler, "torch", "LambdaLR") or functions is None:
        return []
    pairs = zip(scheduler.base_lrs, functions, strict=True)
    return [rate * function(scheduler.last_epoch) for rate, function in pairs]


def _data_ranks(engine: Any) -> int:
    """Return the ranks that share a global batch; the ranks of one sequence count once."""
    of_rank = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
    return global_batch(engine) // int(of_rank)


def _keeping(samples: int, micro: int, data_ranks: int, names: tuple[str, str]) -> str:
    """Return the settings that keep a global batch on a number of data ranks."""
    try:
        plan = plan_batches(samples, micro, data_ranks)
    except UnsupportedError:
        counts = [n for n in range(1, samples + 1) if samples % n == 0]
        near = sorted(sorted(counts, key=lambda count: abs(count - data_ranks))[:4])
        of_rank, rest = divmod(samples, data_ranks)
        if rest:
            listed = ", ".join(map(str, near))
            return (
                f"{samples} samples cannot be shared by {data_ranks} data ranks: use {listed} of "
                "them."
            )
        return f"To keep {samples}, set {names[0]}={of_rank}, {names[1]}=1."
    return (
        f"To keep {samples}, set {names[0]}={plan.largest_micro_batch}, "
        f"{names[1]}={plan.accumulate}."
    )


def _free_name(folder: Path, tag: str) -> str:
    """Return the name of the folder to save a tag into: DeepSpeed's own files are not replaced."""
    path = folder / tag
    if is_deepspeed(path) and not is_checkpoint(path):
        log.warning(
            "%s was written by DeepSpeed and is kept: this save goes to %s%s",
            path,
            path,
            OWN_SUFFIX,
        )
        return f"{tag}{OWN_SUFFIX}"
    return tag


def find_checkpoint(folder: Path, tag: str | None) -> str | None:
    """Return the path of the checkpoint for a folder and a tag; None if there is none."""
    folder_at(folder).repair()
    if tag is not None:
        return str(checkpoint_of_tag(folder, tag))
    marks = (LATEST, MANIFEST_NAME, LATEST_UNIVERSAL, ".metadata")
    known = folder.is_file() or any((folder / mark).exists() for mark in marks)
    if not known:
        return None
    if (name := latest_in(folder)) and is_checkpoint(folder / name):
        return str(folder / name)  # DeepSpeed saved into it later, which a load refuses.
    return str(resolve_latest(folder))


def checkpoint_of_tag(folder: Path, tag: str) -> Path:
    """Return the checkpoint of a tag in a folder.

    If both DeepSpeed and this library have saved one, the later save counts.
    """
    stock, elastic = folder / tag, folder / f"{tag}{OWN_SUFFIX}"
    if is_checkpoint(elastic) and _written(elastic) >= _written(stock):
        return elastic
    return stock


def _written(folder: Path) -> float:
    """Return when the newest file of a tag was written, in seconds; -1 if there is none."""
    if is_checkpoint(folder):
        return (folder / MANIFEST_NAME).stat().st_mtime
    return max((file.stat().st_mtime for file in folder.glob("*.pt")), default=-1.0)
