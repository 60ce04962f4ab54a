"""The states of the module's torchmetrics, which neither Lightning nor ``state_dict`` keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import torch
from torch import nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.utilities import (
    dim_zero_cat,
    dim_zero_max,
    dim_zero_mean,
    dim_zero_min,
    dim_zero_sum,
)

from lightning_elastic_zero.trainer.metric_internals import (
    default_states,
    reductions,
    restore_metric,
    update_count,
)

States = Mapping[str, Mapping[str, Any]]
"""Of each metric, by its name in the module: ``updates``, ``states`` and ``others``."""

_NUMBERS = (bool, int, float)

_OF_HOOKS = ("ds_", "applied_pre_backward_ref_cnt")
"""Beginnings of attributes in which hooks of ZeRO-3 count, on modules whose forward is called."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """How ranks share what other ranks had, where another number of them saved."""

    part: int
    """Which part of it is this rank's; the first one takes what cannot be divided."""
    parts: int
    is_even: bool
    """All ranks share as much."""


class MetricStates:
    """The metrics of a module, and what they have seen."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._metrics: dict[str, Metric] = {}
        self._first: dict[str, dict[str, Any]] = {}
        self.find_new_metrics()

    def find_new_metrics(self) -> None:
        """Look for metrics that were added."""
        for name, metric in self._module.named_modules():
            if isinstance(metric, Metric) and name not in self._metrics:
                self._metrics[name] = metric
                self._first[name] = _others(metric)

    def names(self, metrics: Iterable[object]) -> set[str]:
        """Return the names of some metrics."""
        wanted = {id(metric) for metric in metrics}
        return {name for name, metric in self._metrics.items() if id(metric) in wanted}

    def now(self) -> dict[str, dict[str, Any]]:
        """Return copies of what the metrics hold."""
        return {
            name: {
                "updates": update_count(metric),
                "states": {key: _copy(getattr(metric, key)) for key in default_states(metric)},
                "others": _others(metric),
            }
            for name, metric in self._metrics.items()
        }

    def to_plain(self, states: States) -> tuple[dict[str, Any], list[str]]:
        """Return what has to be saved of the metrics, and the names of those that cannot be.

        Beside its states a metric may count in attributes; those that have changed since training
        began are told from its settings by that.
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

    def load_saved(self, sources: Sequence[States], shared: RankShare | None) -> list[str]:
        """Restore metrics from their saved states; return the names of those that cannot.

        Args:
            sources: what the ranks had whose part this rank takes over.
            shared: how; None for what this rank had itself.
        """
        self.find_new_metrics()
        lost = []
        for name in dict.fromkeys(name for source in sources for name in source):
            metric = self._metrics.get(name)
            of_metric = [source[name] for source in sources if name in source]
            held = None
            if metric is not None and all(_fits(metric, each) for each in of_metric):
                held = of_metric[0] if shared is None else _shared(metric, of_metric, shared)
            if metric is None or held is None:
                lost.append(name)
            else:
                _put(metric, held)
        return lost


@cache
def _of_all_metrics() -> frozenset[str]:
    """Return the attributes that every metric has: they hold for a moment, or are settings."""
    plain = MeanMetric()
    return frozenset(vars(plain)) - frozenset(default_states(plain))


def _others(metric: Metric) -> dict[str, Any]:
    """Return a metric's attributes that may count something."""
    return {
        key: _copy(value)
        for key, value in vars(metric).items()
        if key not in _of_all_metrics()
        and not key.startswith(_OF_HOOKS)
        and key not in default_states(metric)
        and (type(value) in _NUMBERS or type(value) is torch.Tensor)
    }


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    # What is in a list stays as it is: a metric adds to it.
    return list(value) if isinstance(value, list) else value


def _is_plain(value: object) -> bool:
    if type(value) is list:
        return all(type(each) is torch.Tensor for each in value)
    return type(value) is torch.Tensor


def _equal(value: object, other: object) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value.shape == other.shape and bool(torch.equal(value, other.to(value.device)))
    return type(value) is type(other) and value == other


def _fits(metric: Metric, held: Mapping[str, Any]) -> bool:
    """Whether saved states are those of such a metric."""
    defaults = default_states(metric)
    return defaults.keys() == held["states"].keys() and all(
        isinstance(default, list)
        or not isinstance(value, torch.Tensor)
        or not default.numel()
        or default.shape == value.shape
        for default, value in zip(defaults.values(), map(held["states"].get, defaults), strict=True)
    )


def _put(metric: Metric, held: Mapping[str, Any]) -> None:
    """Restore a metric to what it was."""
    device = torch.device("cpu") if metric.compute_on_cpu else metric.device
    states = {
        key: _at(value, device if isinstance(value, list) else metric.device)
        for key, value in held["states"].items()
    }
    others = {key: _at(value, metric.device) for key, value in held["others"].items()}
    restore_metric(metric, {**states, **others}, held["updates"])


def _at(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [each.to(device) for each in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _shared(
    metric: Metric, sources: Sequence[Mapping[str, Any]], shared: RankShare
) -> dict[str, Any] | None:
    """Return this rank's part of what other ranks' metrics held; None if it cannot be parted."""
    if any(source["others"] for source in sources):
        return None
    states = {}
    for key, by in reductions(metric).items():
        values = [source["states"][key] for source in sources]
        if by in (dim_zero_sum, dim_zero_cat):
            joined = _JOINED[by](values)
            default = default_states(metric)[key]
            states[key] = joined if shared.part == 0 else _nothing_of(joined, default)
        elif by in (dim_zero_max, dim_zero_min) or (by is dim_zero_mean and shared.is_even):
            states[key] = _JOINED[by](values)
        else:
            return None
    return {
        "updates": sum(source["updates"] for source in sources),
        "states": states,
        "others": {},
    }


def _nothing_of(joined: Any, default: Any) -> Any:
    """Return a state that adds nothing to a joined one, of the same type and dimensions.

    torchmetrics gathers what the ranks have, and hangs or crashes where dimensions differ. A list
    of a single scalar is gathered as a scalar, so an empty list is not enough.
    """
    if isinstance(joined, list):
        return [joined[0].new_empty((0, *joined[0].shape[1:]))] if joined else []
    if default.shape != joined.shape:
        return torch.zeros_like(joined)
    return default.to(joined, copy=True)  # a metric may add to it in place


def _lists(values: Sequence[Any]) -> Any:
    if isinstance(values[0], torch.Tensor):
        return torch.cat(list(values))
    return [each.reshape(each.shape or (1,)) for value in values for each in value]


_JOINED: dict[Any, Callable[[Sequence[Any]], Any]] = {
    dim_zero_sum: lambda values: reduce(torch.add, values),
    dim_zero_max: lambda values: reduce(torch.maximum, values),
    dim_zero_min: lambda values: reduce(torch.minimum, values),
    dim_zero_mean: lambda values: torch.stack(list(values)).mean(0),
    dim_zero_cat: _lists,
}
"""How a metric's state is made of those of ranks, by torchmetrics' own reductions."""
