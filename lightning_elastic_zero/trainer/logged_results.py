"""Lightning's running results of an epoch: kept with a checkpoint, and continued from there.

``self.log(..., on_epoch=True)`` adds to a running result, which Lightning does not save. A run that
is resumed in mid-epoch goes on from the saved one, so that the epoch's value, and what schedulers
and callbacks decide by it, are those of the run that was not stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torchmetrics import Metric
from typing_extensions import override

from lightning_elastic_zero.trainer.metric_internals import (
    FORWARD_CACHE,
    Metadata,
    ResultCollection,
    ResultMetric,
    Sync,
    restore_metric,
    results_of,
    set_results,
    update_count,
)

EPOCH_END = "on_train_epoch_end"

_SAID = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)
"""Of how a value is logged: plain data, by the names of Lightning's metadata."""

SavedResult = Mapping[str, Any]
"""A running result as plain data; see ``_plain``."""


class ResumableResults(ResultCollection):
    """Lightning's running results, which can go on from saved ones.

    How a value is logged may be another way than when it was saved (on the progress bar, say).
    Within a run Lightning refuses that, so what was saved gives way to what is logged first.
    """

    def __init__(self) -> None:
        super().__init__(training=True)
        self._given: dict[str, SavedResult] = {}
        self._at_end: dict[str, SavedResult] = {}
        self.on_end: Callable[[], None] = lambda: None
        """Called at an epoch's end, before Lightning looks at its values and resets them."""

    @classmethod
    def of(cls, trainer: pl.Trainer) -> ResumableResults:
        """Return the training loop's results, which are of this class from now on."""
        loop = trainer.fit_loop.epoch_loop
        results = results_of(loop)
        if not isinstance(results, cls):
            others, results = results, cls()
            results.update(others)
            set_results(loop, results)
        return results

    def begin_batch(self) -> None:
        """Discard what was at the end of the epoch before."""
        self._at_end = {}

    def to_plain(self) -> dict[str, SavedResult]:
        """Return what is summed up so far, also where the epoch's end has reset it already.

        Lightning puts new tensors into the places of these: they are not changed later.
        """
        running = {key: _plain(result) for key, result in self.items() if not result.has_reset}
        return {**running, **self._at_end}

    def load_saved(self, saved: Mapping[str, SavedResult], trainer: pl.Trainer) -> None:
        """Go on from what was saved; metrics that are not in the module are left out."""
        modules = dict(trainer.lightning_module.named_modules())
        for key, of_key in saved.items():
            metric = modules.get(of_key["metadata"]["metric_attribute"] or "")
            if of_key["is_metric"] and not isinstance(metric, Metric):
                continue
            self._given[key] = of_key
            if of_key["is_grouped"]:
                continue  # the group is known when it is logged next
            result = ResultMetric(_metadata(of_key, trainer), not of_key["is_metric"])
            if of_key["is_metric"]:
                result.value = metric
            _fill(result, of_key, trainer.strategy.root_device)
            self[key] = result

    @override
    @torch.compiler.disable  # type: ignore[untyped-decorator] # torch does not say
    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if (key := f"{fx}.{name}") in self._given:
            self.pop(key, None)  # made anew, as it is logged now
        super().log(fx, name, value, *args, **kwargs)

    @override
    @torch.compiler.disable  # type: ignore[untyped-decorator] # torch does not say
    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        self._at_end.pop(key, None)
        if (saved := self._given.pop(key, None)) is not None:
            result = self[key]
            if (_reduction(result), not result.is_tensor) == (saved["by"], saved["is_metric"]):
                _fill(result, saved, value.device)
            else:
                rank_zero_warn(
                    f"{result.meta.name} is logged by {_reduction(result)} now, and was by "
                    f"{saved['by']} when the checkpoint was saved: this epoch's value covers the "
                    "batches after the resume only"
                )
        super().update_metrics(key, value, batch_size)

    @override
    def metrics(self, on_step: bool) -> Any:
        if not on_step:
            # To compute values over all ranks changes their weights in place.
            new = {k: r for k, r in self.items() if not r.has_reset and k not in self._at_end}
            if new and not self._at_end:
                self.on_end()
            self._at_end |= {key: _copied(_plain(result)) for key, result in new.items()}
        return super().metrics(on_step)

    @override
    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        super().reset(metrics, fx)
        if metrics is None and fx is None:
            if lost := [key for key, saved in self._given.items() if saved["is_grouped"]]:
                rank_zero_warn(
                    f"{', '.join(lost)}: logged over a group of ranks before the resume and not "
                    "after it, so that the epoch has no value of it"
                )
            for key in self._given:
                self.pop(key, None)  # the next epoch may log it another way
            self._given = {}


def _reduction(result: ResultMetric) -> str:
    return str(result.meta.reduce_fx.__name__) if result.is_tensor else "a metric"


def _plain(result: ResultMetric) -> dict[str, Any]:
    """Return a running result as plain data."""
    meta, latest = result.meta, getattr(result, FORWARD_CACHE)
    return {
        "metadata": {name: getattr(meta, name) for name in _SAID},
        "by": _reduction(result),
        "is_metric": not result.is_tensor,
        "is_synced": bool(meta.sync.should),
        "is_grouped": meta.sync.group is not None,
        "rank_zero_only": bool(meta.sync.rank_zero_only),
        "value": result.value.detach() if result.is_tensor else None,
        "weight": getattr(result, "cumulated_batch_size", None),
        "latest": latest.detach() if isinstance(latest, torch.Tensor) else None,
        "updates": update_count(result),
    }


def _copied(saved: SavedResult) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in saved.items()}


def _metadata(saved: SavedResult, trainer: pl.Trainer) -> Metadata:
    """Return how a value was logged, in this run's terms."""
    by = "mean" if saved["is_metric"] else saved["by"]
    meta = Metadata(**saved["metadata"], reduce_fx=getattr(torch, by))
    meta.sync = Sync(
        _should=saved["is_synced"],
        fn=trainer.strategy.reduce,
        rank_zero_only=saved["rank_zero_only"],
    )
    return meta


def _fill(result: ResultMetric, saved: SavedResult, device: torch.device) -> None:
    """Replace a running result by the saved one."""
    of_tensor = {"value": saved["value"], "cumulated_batch_size": saved["weight"]}
    sums = {k: v.to(device) for k, v in of_tensor.items() if result.is_tensor and v is not None}
    latest = saved["latest"]
    latest = None if latest is None else latest.to(device)
    restore_metric(result, {**sums, FORWARD_CACHE: latest}, saved["updates"])
    result.has_reset = False
