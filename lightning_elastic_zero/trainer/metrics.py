"""Metrics accumulated within an epoch: saved with a checkpoint and continued after a resume.

``self.log(..., on_epoch=True)`` adds to a running result, and torchmetrics in the module accumulate
states. Lightning saves neither. A run resumed in the middle of an epoch continues both, so that the
epoch's values, and decisions by schedulers and callbacks, equal those of the uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.trainer.connectors.logger_connector import result as running
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torchmetrics import MeanMetric, Metric
from torchmetrics.utilities import (
    dim_zero_cat,
    dim_zero_max,
    dim_zero_mean,
    dim_zero_min,
    dim_zero_sum,
)
from typing_extensions import override

from lightning_elastic_zero.data_progress.batches import Position
from lightning_elastic_zero.trainer.lightning import continue_epoch, displayed_metrics

EPOCH_END = "on_train_epoch_end"

_OPTIONS = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)
"""Fields of Lightning's metadata about how a value is logged; plain data."""

SavedResult = Mapping[str, Any]
"""A running result as plain data; see ``_plain``."""

RESULTS = "results"
"""Entry of this library's state in a checkpoint: the metrics of a rank."""

RESULTS_BY_RANK = "results_of_ranks"
"""The same after a load on another number of ranks: by rank of the saved run."""

ENDING = "plateau_epoch_pending"
"""Entry of the same: the epoch had ended, but the hooks at its end had not all run."""


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

    def begin_batch(self) -> None:
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


States = Mapping[str, Mapping[str, Any]]
"""By a metric's name in the module: its ``updates``, ``states`` and ``others`` (attributes)."""

_NUMBERS = (bool, int, float)

_OF_HOOKS = ("ds_", "applied_pre_backward_ref_cnt")
"""Prefixes of attributes that DeepSpeed's ZeRO-3 hooks add to modules."""


@dataclass(frozen=True, slots=True)
class SavedMetrics:
    """Metrics of the saving ranks whose states this rank takes over."""

    of_ranks: Mapping[int, Mapping[str, Any]]
    """Results of ``EpochMetrics.state``, by rank of the saved run."""
    ending: bool
    """The epoch had ended, but the hooks at its end had not all run."""
    is_own: bool = True
    """The number of ranks is the same, and these are this rank's own states."""
    part: int = 0
    """Index of this rank's part of the states; part 0 receives what cannot be divided."""
    parts: int = 1
    is_even: bool = True
    """All ranks have the same number of parts."""

    @classmethod
    def of(
        cls, state: Mapping[str, Any], saved_world_size: int, world_size: int, rank: int
    ) -> SavedMetrics:
        """Select the metrics for this rank from the result of ``RunRecorder.state_dict``."""
        ending, saved = bool(state.get(ENDING)), saved_world_size
        if saved == world_size:
            return cls({rank: state[RESULTS]} if RESULTS in state else {}, ending)
        return cls(
            state.get(RESULTS_BY_RANK, {}),
            ending,
            is_own=False,
            part=rank // saved,
            parts=len(range(rank % saved, world_size, saved)),
            is_even=saved % world_size == 0 or world_size % saved == 0,
        )

    def logged(self) -> dict[str, SavedResult]:
        """Return this rank's running results."""
        of_key: dict[str, list[SavedResult]] = {}
        for held in self.of_ranks.values():
            for key, result in held["logged"].items():
                of_key.setdefault(key, []).append(result)
        parts = {key: self._part(results) for key, results in of_key.items()}
        return {key: part for key, part in parts.items() if part is not None}

    def _part(self, sources: list[SavedResult]) -> SavedResult | None:
        """Return this rank's part of a running result: sums and weights are divided equally."""
        first = sources[0]
        if self.is_own:
            return first
        if first["rank_zero_only"] and self.part:
            return None
        if first["is_metric"] or any(other["by"] != first["by"] for other in sources):
            return first
        values = torch.stack([source["value"] for source in sources])
        joined = {**first, "updates": sum(source["updates"] for source in sources)}
        parts = 1 if first["rank_zero_only"] else self.parts
        match first["by"]:
            case "max":
                return {**joined, "value": values.amax(0)}
            case "min":
                return {**joined, "value": values.amin(0)}
            case "sum":
                return {**joined, "value": values.sum(0) / parts}
        weight = torch.stack([source["weight"] for source in sources]).sum(0)
        mine = weight / parts
        if not weight.is_floating_point():
            mine = weight // parts + (self.part < weight % parts).to(weight.dtype)
        value = values.sum(0)
        if parts > 1:
            value = torch.where(weight == 0, value, value * mine / weight)
        return {**joined, "value": value, "weight": mine}

    def metric_states(
        self, metric: Metric, sources: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any] | None:
        """Return this rank's part of a metric's states; None if they cannot be divided."""
        if self.is_own:
            return sources[0]
        if any(source["others"] for source in sources):
            return None
        states = {}
        for key, by in metric._reductions.items():
            values = [source["states"][key] for source in sources]
            if by in (dim_zero_sum, dim_zero_cat):
                # torch.sum would change the type of integers.
                joined = reduce(torch.add, values) if by is dim_zero_sum else _concatenate(values)
                empty = _nothing_of(joined, metric._defaults[key])
                states[key] = joined if self.part == 0 else empty
            elif by in (dim_zero_max, dim_zero_min) or (by is dim_zero_mean and self.is_even):
                states[key] = by(torch.stack(values))
            else:
                return None
        updates = sum(source["updates"] for source in sources)
        return {"updates": updates, "states": states, "others": {}}


def _nothing_of(joined: Any, default: Any) -> Any:
    """Return a neutral state of the same type and dimensions as a joined one.

    torchmetrics gathers the ranks' states, and hangs or crashes if their dimensions differ. A list
    of a single scalar is gathered as a scalar, so an empty list is not sufficient.
    """
    if isinstance(joined, list):
        return [joined[0].new_empty((0, *joined[0].shape[1:]))] if joined else []
    if default.shape != joined.shape:
        return torch.zeros_like(joined)
    return default.to(joined, copy=True)  # a metric may add to it in place


def _concatenate(values: Sequence[Any]) -> Any:
    if isinstance(values[0], torch.Tensor):
        return torch.cat(list(values))
    return [each.reshape(each.shape or (1,)) for value in values for each in value]


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


def _fits(metric: Metric, held: Mapping[str, Any]) -> bool:
    defaults, states = metric._defaults, held["states"]
    return defaults.keys() == states.keys() and all(
        default.shape == states[key].shape
        for key, default in defaults.items()
        if isinstance(default, torch.Tensor) and default.numel()
        if isinstance(states[key], torch.Tensor)
    )


def _put(metric: Metric, held: Mapping[str, Any]) -> None:
    device = torch.device("cpu") if metric.compute_on_cpu else metric.device
    states = {
        key: move_data_to_device(value, device if isinstance(value, list) else metric.device)
        for key, value in held["states"].items()
    }
    others = move_data_to_device(held["others"], metric.device)
    _restore(metric, {**states, **others}, held["updates"])


def _restore(metric: Metric, attributes: Mapping[str, Any], updates: int) -> None:
    for name, value in attributes.items():
        setattr(metric, name, value)
    metric._update_count, metric._computed = updates, None


def _logged_metrics(logged: Mapping[str, SavedResult]) -> set[str]:
    return {s["metadata"]["metric_attribute"] for s in logged.values() if s["is_metric"]}


class EpochMetrics:
    """Lightning's running results and the module's metrics, now and at the last optimizer step."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._module = trainer.lightning_module
        self._metrics: dict[str, Metric] = {}
        self._first: dict[str, dict[str, Any]] = {}
        self._find_new_metrics()
        self._noted: dict[str, Any] | None = None
        self._noted_at = -1
        self._before_validation: dict[str, Any] | None = None
        self._at_end: dict[str, Any] = {}
        self._of_epoch: set[str] = set()
        """Metrics that were empty at the epoch's start and unchanged by validations."""

        def at_end() -> None:
            self._at_end = self._now()

        ResumableResults.of(trainer).on_end = at_end

    def note(self, trainer: pl.Trainer) -> None:
        """Copy the metrics before the first micro-batch of a window and before its hooks."""
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        done, total = progress.current.processed, progress.total.processed
        if self._noted_at == total:
            return
        if done % trainer.accumulate_grad_batches == 0:
            if done == 0:
                self._find_new_metrics()
                self._of_epoch = {n for n, h in self._now().items() if not h["updates"]}
            results = ResumableResults.of(trainer)
            results.begin_batch()
            self._at_end = {}
            self._noted = {"logged": results.to_plain(), "metrics": self._now()}
            self._noted_at = total

    def validating(self) -> None:
        """Copy the metrics, because a run resumed inside a validation repeats it."""
        self._before_validation = self._now()

    def validated(self, trainer: pl.Trainer) -> None:
        """Update the copies at the end of a validation."""
        if self._noted is not None:
            self._noted["metrics"] |= self._validated_metrics(trainer)
        if (before := self._before_validation) is not None:
            for name, held in self._now().items():
                if name not in before or held["updates"] != before[name]["updates"]:
                    self._of_epoch.discard(name)
        self._before_validation = None

    def _validated_metrics(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Return the metrics after a validation, except those that the open window has changed.

        A run that goes back to the step before the window does not repeat the validation.
        """
        if self._noted is None or self._before_validation is None:
            return {}
        noted, before = self._noted["metrics"], self._before_validation
        reset = self._reset_after_validation(trainer)
        return {
            name: held
            for name, held in self._now().items()
            if name in noted and name in before and name not in reset
            if noted[name]["updates"] == before[name]["updates"]
        }

    def _reset_after_validation(self, trainer: pl.Trainer) -> set[str]:
        """Return the metrics that Lightning will reset right after the hooks that save."""
        results: Any = trainer.fit_loop.epoch_loop.val_loop._results.values()
        logged = {id(result.value) for result in results if not result.is_tensor}
        return {name for name, metric in self._metrics.items() if id(metric) in logged}

    def state(
        self, trainer: pl.Trainer, *, inside: bool, validated: bool, ending: bool
    ) -> dict[str, Any]:
        """Return this rank's metrics for a checkpoint, as plain data.

        ``inside``: the run is inside a window, and the checkpoint is of the step before it.
        ``validated``: all batches of the running validation are done. ``ending``: the epoch has
        ended, and the hooks at its end run.
        """
        if inside and self._noted is not None:
            logged, metrics = self._noted["logged"], self._noted["metrics"]
            if validated:
                metrics = {**metrics, **self._validated_metrics(trainer)}
        else:
            logged = ResumableResults.of(trainer).to_plain()
            # An epoch's end may have reset those that were logged.
            ended = self._at_end.keys() & _logged_metrics(logged)
            metrics = {**self._now(), **{name: self._at_end[name] for name in ended}}
            if self._before_validation is not None and not validated:
                metrics = self._before_validation
            elif self._before_validation is not None:
                reset = self._reset_after_validation(trainer)
                metrics = {name: held for name, held in metrics.items() if name not in reset}
            elif ending:
                # The module's own hook, which runs after those of callbacks, resets them.
                over = self._of_epoch - _logged_metrics(logged)
                metrics = {name: held for name, held in metrics.items() if name not in over}
        plain, lacking = self._to_plain(metrics)
        return {
            RESULTS: {
                "logged": logged,
                "metrics": plain,
                "lacking": lacking,
                "of_epoch": sorted(self._of_epoch),
                **displayed_metrics(trainer),
            }
        }

    def resume_from(
        self, source: SavedMetrics, trainer: pl.Trainer, position: Position, *, starts_over: bool
    ) -> None:
        """Restore saved metrics at a position. ``starts_over``: the saved epoch is repeated."""
        inside = position.steps > 0 or position.is_over
        if not source.of_ranks:
            if inside:
                rank_zero_info(
                    "The checkpoint contains no running results: this epoch's values logged with "
                    "on_epoch=True cover only the batches after the resume"
                )
            return
        first = next(iter(source.of_ranks.values()))
        trainer.logged_metrics.update(first.get("log", {}))
        trainer.progress_bar_metrics.update(first.get("bar", {}))
        logged = source.logged()
        # Lightning resets them at the end and at the start of an epoch.
        keeps_all = inside or source.ending
        over = _logged_metrics(logged)
        if starts_over:
            over |= set(first.get("of_epoch", ()))
        wanted = [
            {name: held for name, held in of["metrics"].items() if keeps_all or name not in over}
            for of in source.of_ranks.values()
        ]
        lost = self._load_saved(wanted, source)
        lacking = {name for of in source.of_ranks.values() for name in of.get("lacking", ())}
        for names, why in (
            (sorted(lacking), "their states are not tensors and were not saved"),
            (lost, "missing in the module, with other states, or not divisible among the devices"),
        ):
            if names:
                text = f"The metrics {', '.join(names)} cover only the batches after the resume"
                rank_zero_warn(f"{text}: {why}.")
        if inside:
            kept = {k: s for k, s in logged.items() if s["metadata"]["fx"] != EPOCH_END}
            ResumableResults.of(trainer).load_saved(kept, trainer)
            # Otherwise the first logged value resets the restored ones.
            continue_epoch(trainer)
            self._of_epoch = set(first.get("of_epoch", ()))
            _show(trainer, ResumableResults.of(trainer), on_step=True)
        elif source.ending:
            ended = ResumableResults()
            ended.load_saved(logged, trainer)
            _show(trainer, ended, on_step=False)
            ended.reset()

    def _find_new_metrics(self) -> None:
        for name, metric in self._module.named_modules():
            if isinstance(metric, Metric) and name not in self._metrics:
                self._metrics[name] = metric
                self._first[name] = _others(metric)

    def _now(self) -> dict[str, dict[str, Any]]:
        return {
            name: {
                "updates": metric._update_count,
                "states": {key: _copy(getattr(metric, key)) for key in metric._defaults},
                "others": _others(metric),
            }
            for name, metric in self._metrics.items()
        }

    def _to_plain(self, states: States) -> tuple[dict[str, Any], list[str]]:
        """Return the states to save, and the names of metrics that cannot be saved.

        A metric may also count in plain attributes. Those that have changed since training began
        are saved; the others are settings.
        """
        plain, lacking = {}, []
        for name, held in states.items():
            others = {
                key: value
                for key, value in held["others"].items()
                if not _equal(value, self._first[name].get(key))
            }
            if not all(map(_is_plain, held["states"].values())):
                lacking.append(name)
            elif held["updates"] or others:
                plain[name] = {**held, "others": others}
        return plain, lacking

    def _load_saved(self, sources: Sequence[States], saved: SavedMetrics) -> list[str]:
        """Restore metrics from the saving ranks' states; return the names of misfits."""
        self._find_new_metrics()
        lost = []
        for name in dict.fromkeys(name for source in sources for name in source):
            metric = self._metrics.get(name)
            of_metric = [source[name] for source in sources if name in source]
            held = None
            if metric is not None and all(_fits(metric, each) for each in of_metric):
                held = saved.metric_states(metric, of_metric)
            if metric is None or held is None:
                lost.append(name)
            else:
                _put(metric, held)
        return lost


def _show(trainer: pl.Trainer, results: ResumableResults, *, on_step: bool) -> None:
    """Publish values to callbacks, loggers and the progress bar, as Lightning does."""
    values = results.metrics(on_step=on_step)
    trainer.callback_metrics.update(values["callback"])
    trainer.logged_metrics.update(values["log"])
    trainer.progress_bar_metrics.update(values["pbar"])
