"""The private names of Lightning's running results and of torchmetrics, each behind a function.

``lightning_internals`` lists them with the others, and checks at setup that they are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.logger_connector import result
from torchmetrics import Metric

Metadata = result._Metadata
ResultCollection = result._ResultCollection
ResultMetric = result._ResultMetric
Sync = result._Sync

FORWARD_CACHE = "_forward_cache"
"""Attribute of a metric with the last step's value."""


def results_of(loop: Any) -> Any:
    """Return a loop's running results."""
    return loop._results


def set_results(loop: Any, results: ResultCollection) -> None:
    """Replace a loop's running results."""
    loop._results = results


def default_states(metric: Metric) -> dict[str, Any]:
    """Return a metric's states as they are before it has seen anything."""
    return metric._defaults


def reductions(metric: Metric) -> Mapping[str, Any]:
    """Return how each of a metric's states is put together over ranks."""
    return metric._reductions


def update_count(metric: Metric) -> int:
    """Return how often a metric was updated."""
    return int(metric._update_count)


def restore_metric(metric: Metric, attributes: Mapping[str, Any], updates: int) -> None:
    """Set a metric's states and other attributes, of which it has computed nothing yet."""
    for name, value in attributes.items():
        setattr(metric, name, value)
    metric._update_count, metric._computed = updates, None


def displayed_metrics(trainer: pl.Trainer) -> dict[str, Any]:
    """Return what loggers and the progress bar show, as plain data; the public names compute it."""
    connector = trainer._logger_connector
    log, bar = connector._logged_metrics, connector._progress_bar_metrics
    return {
        "log": {k: v.detach() for k, v in log.items() if type(v) is torch.Tensor},
        "bar": {k: float(v) for k, v in bar.items() if type(v) in (int, float)},
    }


def continue_epoch(trainer: pl.Trainer) -> None:
    """Keep the first value that is logged from resetting those of the epoch so far."""
    trainer._logger_connector._first_loop_iter = False
