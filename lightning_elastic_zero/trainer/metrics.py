"""Metrics accumulated within an epoch: saved with a checkpoint and continued after a resume.

``self.log(..., on_epoch=True)`` adds to a running result, and torchmetrics in the module accumulate
states. Lightning saves neither. A run resumed in the middle of an epoch on the same number of
devices continues both, so that the epoch's values, and decisions by schedulers and callbacks, equal
those of the uninterrupted run. On another number they begin again, with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, TypedDict

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.trainer.connectors.logger_connector import result as running
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torchmetrics import MeanMetric, Metric
from typing_extensions import override

from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.data_progress.position import Position
from lightning_elastic_zero.trainer.lightning import (
    EPOCH_END,
    continue_epoch,
    displayed_metrics,
)

_OPTIONS = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)
"""Fields of Lightning's metadata about how a value is logged; plain data."""

SavedResult = Mapping[str, Any]
"""A running result as plain data; see ``_plain``."""

_NUMBERS = (bool, int, float)

_OF_HOOKS = ("ds_", "applied_pre_backward_ref_cnt")
"""Prefixes of attributes that DeepSpeed's ZeRO-3 hooks add to modules."""


class MetricState(TypedDict):
    """State of a metric, as plain data."""

    updates: int
    states: Mapping[str, Any]
    """Those that the metric has declared: tensors and lists of tensors."""
    others: Mapping[str, Any]
    """Numbers and tensors in its other attributes."""


States = Mapping[str, MetricState]
"""By a metric's name in the module."""


@dataclass(frozen=True, slots=True)
class SavedMetrics:
    """The metrics in a loaded checkpoint."""

    results: Mapping[str, Any] | None
    """This rank's result of ``EpochMetrics.state``; on another number of ranks that of rank 0."""
    ending: bool
    """The epoch had ended, but the hooks at its end had not all run."""
    is_same_world: bool
    """The saved run had the same number of ranks."""


class EpochMetrics:
    """Lightning's running results and the module's metrics."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._module = trainer.lightning_module
        self._metrics: dict[str, Metric] = {}
        self._first_others: dict[str, Mapping[str, Any]] = {}
        """Of each metric, ``others`` when it was first seen."""
        self._find_new_metrics()
        self._begun_at = -1
        """Batches before the epoch that has begun."""
        self._before_validation: States | None = None
        self._at_end: States = {}
        """States at the epoch's end, before Lightning resets them."""
        self._of_epoch: set[str] = set()
        """Metrics that were empty at the epoch's start and unchanged by validations."""

        def at_end() -> None:
            self._at_end = self._now()

        ResumableResults.of(trainer).on_end = at_end

    def begin_batch(self, trainer: pl.Trainer) -> None:
        """Begin an epoch at its first batch, once."""
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        if progress.current.processed or self._begun_at == progress.total.processed:
            return
        self._begun_at = progress.total.processed
        self._find_new_metrics()
        self._of_epoch = {n for n, state in self._now().items() if not state["updates"]}
        self._at_end = {}
        ResumableResults.of(trainer).begin_epoch()

    def validating(self) -> None:
        """Copy the metrics, because a run resumed inside a validation repeats it."""
        self._before_validation = self._now()

    def validated(self) -> None:
        """Find the metrics that the validation has changed."""
        if (before := self._before_validation) is not None:
            for name, state in self._now().items():
                if name not in before or state["updates"] != before[name]["updates"]:
                    self._of_epoch.discard(name)
        self._before_validation = None

    def _reset_after_validation(self, trainer: pl.Trainer) -> set[str]:
        """Return the metrics that Lightning will reset right after the hooks that save."""
        results: Any = trainer.fit_loop.epoch_loop.val_loop._results.values()
        logged = {id(result.value) for result in results if not result.is_tensor}
        return {name for name, metric in self._metrics.items() if id(metric) in logged}

    def state(
        self, trainer: pl.Trainer, *, validated: bool, ending: bool, is_complete: bool
    ) -> dict[str, Any]:
        """Return this rank's metrics for a checkpoint, as plain data.

        ``validated``: the running validation is over. ``ending``: the epoch has
        ended, and the hooks at its end run. ``is_complete``: all batches of the epoch are done.
        """
        logged = ResumableResults.of(trainer).to_plain()
        # An epoch's end may have reset those that were logged.
        ended = self._at_end.keys() & _logged_metrics(logged)
        metrics: States = {**self._now(), **{name: self._at_end[name] for name in ended}}
        if self._before_validation is not None and not validated:
            metrics = self._before_validation
        elif self._before_validation is not None:
            reset = self._reset_after_validation(trainer)
            metrics = {name: state for name, state in metrics.items() if name not in reset}
        elif ending:
            # The module's own hook, which runs after those of callbacks, resets them.
            over = self._of_epoch - _logged_metrics(logged)
            metrics = {name: state for name, state in metrics.items() if name not in over}
        plain, lacking = self._to_plain(metrics)
        values, are_of_all = _known_values(trainer) if is_complete else ({}, True)
        return {
            "logged": logged,
            "metrics": plain,
            "lacking": lacking,
            "of_epoch": sorted(self._of_epoch),
            "values": values,
            "values_of_all": are_of_all,
            **displayed_metrics(trainer),
        }

    def resume_from(
        self, saved: SavedMetrics, trainer: pl.Trainer, position: Position, *, starts_over: bool
    ) -> None:
        """Restore saved metrics at a position. ``starts_over``: the saved epoch is repeated."""
        inside = position.steps > 0 or position.is_over
        if saved.results is None:
            if inside:
                rank_zero_info(
                    "The checkpoint contains no running results: this epoch's values logged with "
                    "on_epoch=True cover only the batches after the resume"
                )
            return
        results = saved.results
        trainer.logged_metrics.update(results["log"])
        trainer.progress_bar_metrics.update(results["bar"])
        logged: dict[str, SavedResult] = results["logged"]
        # Lightning resets them at the end and at the start of an epoch.
        is_needed = inside or (saved.ending and saved.is_same_world)
        over = set() if is_needed else _logged_metrics(logged)
        if starts_over:
            over |= set(results["of_epoch"])
        metrics = {name: state for name, state in results["metrics"].items() if name not in over}
        if not saved.is_same_world:
            trainer.callback_metrics.update(results["values"])
            is_new = inside or not results["values_of_all"]
            _warn_of_new_metrics(logged if is_new else {}, metrics)
            return
        for names, why in (
            (results["lacking"], "their states are not tensors and were not saved"),
            (self._load_saved(metrics), "missing in the module, or with other states"),
        ):
            if names:
                text = f"The metrics {', '.join(names)} cover only the batches after the resume"
                rank_zero_warn(f"{text}: {why}.")
        if inside:
            kept = {k: s for k, s in logged.items() if s["metadata"]["fx"] != EPOCH_END}
            ResumableResults.of(trainer).load_saved(kept, trainer)
            # Otherwise the first logged value resets the restored ones.
            continue_epoch(trainer)
            self._of_epoch = set(results["of_epoch"])
            _show(trainer, ResumableResults.of(trainer).metrics(on_step=True))
        elif saved.ending:
            ended = ResumableResults()
            ended.load_saved(logged, trainer)
            _show(trainer, ended.metrics(on_step=False))
            ended.reset()

    def _find_new_metrics(self) -> None:
        for name, metric in self._module.named_modules():
            if isinstance(metric, Metric) and name not in self._metrics:
                self._metrics[name] = metric
                self._first_others[name] = _others(metric)

    def _now(self) -> dict[str, MetricState]:
        return {
            name: {
                "updates": metric._update_count,
                "states": {key: _copy(getattr(metric, key)) for key in metric._defaults},
                "others": _others(metric),
            }
            for name, metric in self._metrics.items()
        }

    def _to_plain(self, states: States) -> tuple[dict[str, MetricState], list[str]]:
        """Return the states to save, and the names of metrics that cannot be saved.

        A metric may also count in plain attributes. Those that have changed since training began
        are saved; the others are settings.
        """
        plain: dict[str, MetricState] = {}
        lacking = []
        for name, state in states.items():
            others = {
                key: value
                for key, value in state["others"].items()
                if not _equal(value, self._first_others[name].get(key))
            }
            if not all(map(_is_plain, state["states"].values())):
                lacking.append(name)
            elif state["updates"] or others:
                plain[name] = {
                    "updates": state["updates"],
                    "states": state["states"],
                    "others": others,
                }
        return plain, lacking

    def _load_saved(self, metrics: States) -> list[str]:
        """Restore metrics from saved states; return the names of misfits."""
        self._find_new_metrics()
        lost = []
        for name, state in metrics.items():
            metric = self._metrics.get(name)
            if metric is None or not _fits(metric, state):
                lost.append(name)
            else:
                _put(metric, state)
        return lost


def _warn_of_new_metrics(logged: Mapping[str, SavedResult], metrics: States) -> None:
    """Warn of values that begin again, because each rank of the saved run had its own part."""
    all_metadata = [result["metadata"] for result in logged.values()]
    values = {each["name"] for each in all_metadata if each["on_epoch"]}
    if names := sorted({*values, *metrics}):
        rank_zero_warn(
            "The saved run had another number of devices: logged values and metrics of this epoch "
            "cover only the batches after the resume, or those of one device if the epoch is over "
            f"({format_names(names, 10)}), and so do decisions of schedulers and callbacks that "
            "monitor them."
        )


@cache
def _of_all_metrics() -> frozenset[str]:
    """Return the attributes that every metric has: settings and temporary values."""
    plain = MeanMetric()
    return frozenset(vars(plain)) - frozenset(plain._defaults)


def _others(metric: Metric) -> dict[str, Any]:
    return {
        key: _copy(value)
        for key, value in vars(metric).items()
        if key not in _of_all_metrics()
        and not key.startswith(_OF_HOOKS)
        and key not in metric._defaults
        and (type(value) in _NUMBERS or type(value) is torch.Tensor)
    }


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    # Metrics append to lists and do not change their elements.
    return list(value) if isinstance(value, list) else value


def _is_plain(value: Any) -> bool:
    return all(type(each) is torch.Tensor for each in (value if type(value) is list else [value]))


def _equal(value: object, other: object) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value.shape == other.shape and bool(torch.equal(value, other.to(value.device)))
    return type(value) is type(other) and value == other


def _fits(metric: Metric, state: MetricState) -> bool:
    defaults, states = metric._defaults, state["states"]
    return defaults.keys() == states.keys() and all(
        default.shape == states[key].shape
        for key, default in defaults.items()
        if isinstance(default, torch.Tensor) and default.numel()
        if isinstance(states[key], torch.Tensor)
    )


def _put(metric: Metric, state: MetricState) -> None:
    device = torch.device("cpu") if metric.compute_on_cpu else metric.device
    states = {
        key: move_data_to_device(value, device if isinstance(value, list) else metric.device)
        for key, value in state["states"].items()
    }
    others = move_data_to_device(state["others"], metric.device)
    _restore(metric, {**states, **others}, state["updates"])


def _restore(metric: Metric, attributes: Mapping[str, Any], updates: int) -> None:
    for name, value in attributes.items():
        setattr(metric, name, value)
    metric._update_count, metric._computed = updates, None


class ResumableResults(running._ResultCollection):
    """Lightning's running results, which can continue from saved ones.

    A value may be logged with other options than in the saved run, for example ``prog_bar``.
    Lightning refuses such a change within a run, so the first call of ``log`` recreates a restored
    result with the new options.
    """

    def __init__(self) -> None:
        super().__init__(training=True)
        self._given: dict[str, SavedResult] = {}
        self._at_end: dict[str, SavedResult] = {}
        self.on_end: Callable[[], None] = lambda: None
        """Called at an epoch's end, before Lightning computes its values and resets them."""

    @classmethod
    def of(cls, trainer: pl.Trainer) -> ResumableResults:
        """Return the training loop's results, replaced by an object of this class."""
        loop = trainer.fit_loop.epoch_loop
        results = loop._results
        if not isinstance(results, cls):
            others, results = results, cls()
            results.update(others)
            loop._results = results
        return results

    def begin_epoch(self) -> None:
        """Discard the results of the previous epoch's end."""
        self._at_end = {}

    def to_plain(self) -> dict[str, SavedResult]:
        """Return the running results, or those of the epoch's end if they are already reset.

        Lightning replaces these tensors instead of changing them, so they are not copied.
        """
        running = {key: _plain(result) for key, result in self.items() if not result.has_reset}
        return {**running, **self._at_end}

    def load_saved(self, saved: Mapping[str, SavedResult], trainer: pl.Trainer) -> None:
        """Continue from saved results, except metrics that are not in the module."""
        modules = dict(trainer.lightning_module.named_modules())
        for key, of_key in saved.items():
            metric = modules.get(of_key["metadata"]["metric_attribute"] or "")
            if of_key["is_metric"] and not isinstance(metric, Metric):
                continue
            self._given[key] = of_key
            if of_key["is_grouped"]:
                continue  # its group of ranks is unknown until it is logged again
            by = "mean" if of_key["is_metric"] else of_key["by"]
            meta = running._Metadata(**of_key["metadata"], reduce_fx=getattr(torch, by))
            meta.sync = running._Sync(
                _should=of_key["is_synced"],
                fn=trainer.strategy.reduce,
                rank_zero_only=of_key["rank_zero_only"],
            )
            result = running._ResultMetric(meta, not of_key["is_metric"])
            if of_key["is_metric"]:
                result.value = metric
            _fill(result, of_key, trainer.strategy.root_device)
            self[key] = result

    @override
    @torch.compiler.disable
    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if (key := f"{fx}.{name}") in self._given:
            self.pop(key, None)  # recreated with the current options
        super().log(fx, name, value, *args, **kwargs)

    @override
    @torch.compiler.disable
    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        self._at_end.pop(key, None)
        if (saved := self._given.pop(key, None)) is not None:
            result = self[key]
            if (_reduction(result), not result.is_tensor) == (saved["by"], saved["is_metric"]):
                _fill(result, saved, value.device)
            else:
                rank_zero_warn(
                    f"{result.meta.name} is now reduced by {_reduction(result)} and was reduced by "
                    f"{saved['by']} in the saved run: this epoch's value covers only the batches "
                    "after the resume."
                )
        super().update_metrics(key, value, batch_size)

    @override
    def metrics(self, on_step: bool) -> Any:
        if not on_step:
            # Computing values over all ranks changes their weights in place.
            new = {k: r for k, r in self.items() if not r.has_reset and k not in self._at_end}
            if new and not self._at_end:
                self.on_end()
            for key, result in new.items():
                self._at_end[key] = {name: _copy(v) for name, v in _plain(result).items()}
        return super().metrics(on_step)

    @override
    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        super().reset(metrics, fx)
        if metrics is None and fx is None:
            for key in self._given:
                self.pop(key, None)  # the next epoch may use other options
            self._given = {}


def _logged_metrics(logged: Mapping[str, SavedResult]) -> set[str]:
    return {s["metadata"]["metric_attribute"] for s in logged.values() if s["is_metric"]}


def _known_values(trainer: pl.Trainer) -> tuple[dict[str, torch.Tensor], bool]:
    """Return the values of an epoch by name, and whether they are those of all ranks.

    A save must not wait for ranks that do not save, so a value that Lightning has not computed yet
    is this rank's own.
    """
    live, known = ResumableResults.of(trainer), ResumableResults()
    known.load_saved(live.to_plain(), trainer)
    are_of_all = True
    for key, result in [*known.items()]:
        if not result.meta.on_epoch:
            continue
        result._computed = live[key]._computed
        if result._computed is None:
            are_of_all = trainer.world_size == 1
            result._computed = _own_value(result, is_only_rank=are_of_all)
        if not isinstance(result._computed, torch.Tensor):
            del known[key]
    values: dict[str, torch.Tensor] = known.metrics(on_step=False)["callback"]
    return values, are_of_all


def _own_value(result: running._ResultMetric, *, is_only_rank: bool) -> Any:
    """Return the value of a running result on this rank; None if there is none."""
    if not result.is_tensor:
        metric: Any = result.value
        parts = sum(isinstance(part, Metric) for part in metric.modules())
        if not metric._update_count or (parts > 1 and not is_only_rank):
            return None  # it would call methods of its parts, which communicate
        with suppress(Exception):  # of a user's class, maybe for the few samples of one rank
            # The method of the object communicates.
            return type(metric).compute(metric)
        return None
    mean = result.meta.is_mean_reduction
    return result.value / result.cumulated_batch_size if mean else result.value


def _show(trainer: pl.Trainer, values: Any) -> None:
    """Publish values to callbacks, loggers and the progress bar, as Lightning does."""
    trainer.callback_metrics.update(values["callback"])
    trainer.logged_metrics.update(values["log"])
    trainer.progress_bar_metrics.update(values["pbar"])


def _reduction(result: running._ResultMetric) -> str:
    return str(result.meta.reduce_fx.__name__) if result.is_tensor else "a metric"


def _plain(result: running._ResultMetric) -> dict[str, Any]:
    meta, latest = result.meta, result._forward_cache
    return {
        "metadata": {name: getattr(meta, name) for name in _OPTIONS},
        "by": _reduction(result),
        "is_metric": not result.is_tensor,
        "is_synced": bool(meta.sync.should),
        "is_grouped": meta.sync.group is not None,
        "rank_zero_only": bool(meta.sync.rank_zero_only),
        "value": result.value.detach() if result.is_tensor else None,
        "weight": getattr(result, "cumulated_batch_size", None),
        "latest": latest.detach() if isinstance(latest, torch.Tensor) else None,
        "updates": result._update_count,
    }


def _fill(result: running._ResultMetric, saved: SavedResult, device: torch.device) -> None:
    of_tensor = {"value": saved["value"], "cumulated_batch_size": saved["weight"]}
    sums = {k: v.to(device) for k, v in of_tensor.items() if result.is_tensor and v is not None}
    latest = saved["latest"]
    latest = None if latest is None else latest.to(device)
    _restore(result, {**sums, "_forward_cache": latest}, saved["updates"])
    result.has_reset = False
