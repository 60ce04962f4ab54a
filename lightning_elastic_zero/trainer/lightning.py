"""The private names of Lightning and torchmetrics that this library uses.

Derived from Lightning 2.5.0, 2.5.6 and 2.6.6. ``check_lightning_release`` checks at setup that they
exist. A name that several files need is behind a function here; see
``tests/house/test_private_names.py``.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import data
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.loops import fetchers
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_elastic_zero.core.options import check_known_options
from lightning_elastic_zero.core.requirements import LIGHTNING, missing_names, version_of
from lightning_elastic_zero.errors import UnsupportedError

RESUME_END = "_CheckpointConnector.resume_end"
"""Name of the barrier at the end of a resume, also if there is no checkpoint."""

PRIVATE_NAMES: dict[str, str] = {
    "the fit loop": "_combined_loader _combined_loader_states_to_load _data_fetcher "
    "_data_source _last_train_dl_reload_epoch _restarting _can_stop_early "
    "_should_accumulate",
    "the training epoch loop": "_batches_that_stepped _on_before_fetch _results "
    "_should_check_val_fx",
    "the fit's validation loop": "_has_run _on_evaluation_end",
    "CombinedLoader": "_iterator _mode _state_dicts",
    "a CombinedLoader's cycle": "_consumed",
    "the logger connector": "_callback_metrics _first_loop_iter _logged_metrics "
    "_progress_bar_metrics",
    "lightning.pytorch's running results": "_Metadata _ResultCollection _ResultMetric _Sync",
    "a metric of torchmetrics": "_computed _defaults _forward_cache _update_count",
    "lightning.pytorch.loops.fetchers": "_DataFetcher _PrefetchDataFetcher",
    "lightning.pytorch.trainer.call": "_call_lightning_module_hook",
    "the trainer": "_checkpoint_connector _logger_connector",
    "ModelCheckpoint": "_get_metric_interpolated_filepath_name "
    "_ModelCheckpoint__warn_if_dir_not_empty _find_last_checkpoints _link_checkpoint "
    "_monitor_candidates _save_checkpoint _should_remove_checkpoint file_exists",
    "a ModelCheckpoint": "_enable_version_counter _every_n_epochs _every_n_train_steps "
    "_last_checkpoint_saved _last_global_step_saved",
    "a LightningModule": "_current_fx_name",
    "DeepSpeedStrategy": "_auto_select_batch_size _config_initialized "
    "_format_batch_size_and_grad_accum_config _init_config_if_needed _init_optimizers "
    "_initialize_deepspeed_inference _timeout",
    "a WeightAveraging": "_average_model _swap_models",
    "a wrapped sampler": "_sampler",
    "lightning.fabric.utilities.data": "_auto_add_worker_init_fn",
}
"""By owner. All exist since 2.5.0, except ``WeightAveraging`` (2.6.0)."""

NOT_CHECKED = {
    "_defer_save_until_validation": "ModelCheckpoint, in releases that defer saves",
    "_broadcast_sigterm_tensor": "the training epoch loop, since 2.5.2: replaced if it exists",
    "_sigterm_notifier_fn": "a trainer's signal connector: replaced together with the former",
    "_signal_connector": "a trainer",
    "_resuming_from_checkpoint": "the fit loop, since 2.6; before, it always creates the iterator",
    "_iterator_finished": "torchdata, in a loader's state: a batch is drawn if it is missing",
    "_iterator": "torch's DataLoader: only written, so that new workers are started",
}
"""Optional private names: the library works without them."""

BATCH_END = "on_train_batch_end"
EPOCH_END = "on_train_epoch_end"
VALIDATION_END = "on_validation_end"
"""Names of the hooks in which a ``ModelCheckpoint`` saves."""

WEIGHT_AVERAGING: type[Any] | None = getattr(callbacks, "WeightAveraging", None)
"""Lightning's callback that averages weights; None before Lightning 2.6."""

_EXCHANGED = "elastic_zero_exchanged"
"""Attribute of a ``WeightAveraging``: whether it has exchanged the weights for the average."""

EXCLUDE_FROZEN = "exclude_frozen_parameters"
"""Argument of ``DeepSpeedStrategy`` since 2.5.5; this library also takes it in older releases."""


def check_lightning_release(trainer: pl.Trainer) -> None:
    """Refuse an unsupported release of Lightning."""
    release = version_of(LIGHTNING.package)
    reason = LIGHTNING.incompatibility(release) or "\n".join(
        filter(None, _missing(trainer, release))
    )
    if reason:
        raise UnsupportedError(reason)


def _missing(trainer: pl.Trainer, release: str) -> Iterator[str | None]:
    """Yield for each owner a sentence about missing names; None if all exist."""
    for owner, live in _owners(trainer).items():
        lost = missing_names(live, PRIVATE_NAMES[owner].split())
        yield LIGHTNING.missing_names_message(release, owner, lost)
    connector = getattr(trainer, "_checkpoint_connector", None)
    if not _says(getattr(connector, "resume_end", None), RESUME_END):
        lost = [f"barrier {RESUME_END!r}"]
        yield LIGHTNING.missing_names_message(release, "its checkpoint connector", lost)


def _owners(trainer: pl.Trainer) -> dict[str, object]:
    """Return the objects that have the names, by the owners in ``PRIVATE_NAMES``."""
    fit = trainer.fit_loop
    return {
        "the fit loop": fit,
        "the training epoch loop": fit.epoch_loop,
        "the fit's validation loop": fit.epoch_loop.val_loop,
        "CombinedLoader": CombinedLoader([]),
        "a CombinedLoader's cycle": iter(CombinedLoader([], "max_size_cycle"))._iterator,
        "the logger connector": getattr(trainer, "_logger_connector", None),
        "lightning.pytorch's running results": result,
        "a metric of torchmetrics": MeanMetric(),
        "lightning.pytorch.loops.fetchers": fetchers,
        "lightning.pytorch.trainer.call": call,
        "the trainer": trainer,
        "ModelCheckpoint": ModelCheckpoint,
        "a ModelCheckpoint": ModelCheckpoint(),
        "a LightningModule": pl.LightningModule(),
        "DeepSpeedStrategy": trainer.strategy,
        "a wrapped sampler": DistributedSamplerWrapper(range(1), num_replicas=1, rank=0).dataset,
        "lightning.fabric.utilities.data": data,
        **({"a WeightAveraging": WEIGHT_AVERAGING()} if WEIGHT_AVERAGING is not None else {}),
    }


def _says(function: object, text: str) -> bool:
    """Whether a text is among the constants of a function."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return text in getattr(code, "co_consts", ())


def split_parent_options(strategy: type, options: dict[str, Any]) -> dict[str, Any]:
    """Check the options for a strategy's parent; remove and return those of newer releases."""
    known = inspect.signature(DeepSpeedStrategy.__init__).parameters
    later = {name: options.pop(name, False) for name in {EXCLUDE_FROZEN} - known.keys()}
    check_known_options(strategy, options, known)
    return later


def run_seed() -> int:
    """Return the run's seed: that of ``seed_everything``, 0 without it."""
    return int(os.environ.get("PL_GLOBAL_SEED") or 0)


def reload_interval(trainer: pl.Trainer) -> int:
    """Return the number of epochs after which training loaders are recreated; 0: never."""
    return int(getattr(trainer, "reload_dataloaders_every_n_epochs", 0))


def combined_loader(trainer: pl.Trainer) -> CombinedLoader | None:
    """Return the training loaders as Lightning combined them; None before they exist."""
    combined: CombinedLoader | None = trainer.fit_loop._combined_loader
    return combined


def training_loaders(trainer: pl.Trainer) -> list[Any]:
    """Return the training loaders as a flat list; empty before they exist."""
    combined = combined_loader(trainer)
    return [] if combined is None else list(combined.flattened)


def repeats_shorter_loaders(combined: CombinedLoader) -> bool:
    """Whether shorter loaders restart until the longest one ends."""
    return combined._mode == "max_size_cycle"


def ends_by_one_loader(combined: CombinedLoader) -> bool:
    """Whether one of several loaders ends an epoch while others still have data."""
    return len(combined.flattened) > 1 and combined._mode in ("min_size", "max_size_cycle")


def exhausted_loaders(combined: CombinedLoader) -> list[bool]:
    """Return which loaders have restarted in this epoch; empty if loaders do not restart."""
    return list(getattr(combined._iterator, "_consumed", ()))  # other modes have none


def mark_exhausted(combined: CombinedLoader, ended: list[bool]) -> None:
    """Mark loaders that have restarted in this epoch: once all have, the epoch ends."""
    if exhausted_loaders(combined):
        iterator: Any = combined._iterator
        iterator._consumed = ended


def data_fetcher(trainer: pl.Trainer) -> Any:
    """Return the fetcher of training batches; None before an epoch."""
    return trainer.fit_loop._data_fetcher


def drop_iterator(loader: Any) -> None:
    """Remove the iterator of persistent workers from a loader, so that it starts new workers."""
    if isinstance(loader, DataLoader):
        loader._iterator = None


def logged_steps(trainer: pl.Trainer) -> int:
    """Return the number of batches counted for the loggers."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def set_logged_steps(trainer: pl.Trainer, steps: int) -> None:
    """Set the number of batches counted for the loggers."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = steps


def known_callback_metrics(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the known callback metrics; the public property may compute more."""
    return dict(trainer._logger_connector._callback_metrics)


def has_average(callback: Any) -> bool:
    """Whether a ``WeightAveraging`` holds an average: in a fit only."""
    return getattr(callback, "_average_model", None) is not None


def follow_exchanges(callback: Any) -> None:
    """Note each exchange by a ``WeightAveraging``, which does not know whether it has swapped."""
    vars(callback).update({_EXCHANGED: False, "_swap_models": partial(_exchange, callback)})


def _exchange(callback: Any, module: pl.LightningModule) -> None:
    type(callback)._swap_models(callback, module)
    vars(callback)[_EXCHANGED] = not has_exchanged(callback)


def has_exchanged(callback: Any) -> bool:
    """Whether the module has a followed callback's average, and the callback the weights."""
    return bool(vars(callback).get(_EXCHANGED))


def end_following(callback: Any) -> None:
    """End ``follow_exchanges``."""
    for name in (_EXCHANGED, "_swap_models"):
        vars(callback).pop(name, None)


def exchange_average(callback: Any, trainer: pl.Trainer) -> None:
    """Exchange the module's weights for the average of a ``WeightAveraging``, or back."""
    callback._swap_models(trainer.lightning_module)


def is_fitting(trainer: pl.Trainer) -> bool:
    """Whether a trainer runs ``fit``, and no evaluation."""
    return trainer.state.fn == TrainerFn.FITTING


def is_interrupted(trainer: pl.Trainer) -> bool:
    """Whether a trainer is handling an exception (``save_on_exception``)."""
    return trainer.state.status == TrainerStatus.INTERRUPTED


def is_ending(progress: Any) -> bool:
    """Whether a batch or epoch is done, but the hooks at its end are not."""
    return bool(progress.current.completed < progress.current.processed)


def running_hook(trainer: pl.Trainer) -> str:
    """Return the name of the hook that runs; empty between hooks."""
    return trainer.lightning_module._current_fx_name or ""


def callbacks_of(trainer: pl.Trainer) -> list[Callback]:
    """Return the trainer's callbacks, which Lightning does not declare."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def paths_of_failures(trainer: pl.Trainer) -> list[str]:
    """Return the paths to which an ``OnExceptionCheckpoint`` saves."""
    return [c.ckpt_path for c in callbacks_of(trainer) if isinstance(c, OnExceptionCheckpoint)]


def can_stop_early(trainer: pl.Trainer) -> bool:
    """Whether a requested stop is due: ``min_epochs`` and ``min_steps`` are reached."""
    return bool(trainer.fit_loop._can_stop_early)


def early_stopping_of(trainer: pl.Trainer) -> list[EarlyStopping]:
    """Return the trainer's ``EarlyStopping`` callbacks."""
    return [c for c in callbacks_of(trainer) if isinstance(c, EarlyStopping)]


def displayed_metrics(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the known values of loggers and progress bar; the public properties compute more."""
    connector = trainer._logger_connector
    log, bar = connector._logged_metrics, connector._progress_bar_metrics
    return {
        "log": {k: v.detach() for k, v in log.items() if type(v) is torch.Tensor},
        "bar": {k: float(v) for k, v in bar.items() if type(v) in (int, float)},
    }


def log_train_step(trainer: pl.Trainer) -> None:
    """Log the values of a batch, for a run that ends in ``on_train_batch_end`` of callbacks."""
    connector = trainer._logger_connector
    connector.on_batch_end()
    connector.update_train_step_metrics()


def continue_epoch(trainer: pl.Trainer) -> None:
    """Keep the first logged value from resetting those of the epoch so far."""
    trainer._logger_connector._first_loop_iter = False
