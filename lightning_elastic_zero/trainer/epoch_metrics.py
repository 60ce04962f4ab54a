"""Metrics that an epoch has accumulated, as of the instant that a checkpoint is of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_elastic_zero.data_progress import Position
from lightning_elastic_zero.trainer.dataloader_resume import PendingResume
from lightning_elastic_zero.trainer.logged_results import EPOCH_END, ResumableResults, SavedResult
from lightning_elastic_zero.trainer.metric_internals import (
    continue_epoch,
    displayed_metrics,
    results_of,
)
from lightning_elastic_zero.trainer.metric_states import MetricStates, RankShare

RESULTS = "results"
"""Entry of this library's part of the checkpoint dictionary."""

RESULTS_BY_RANK = "results_of_ranks"
"""Entry of the same, once loaded on another number of ranks: the results by saving rank."""

ENDING = "plateau_epoch_pending"
"""Entry of the same: the epoch had ended, and its values were about to be looked at."""

NOT_SHARED = "have other states, or states that cannot be parted among other devices"
ONLY_AFTER = "cover the batches after the resume only"


@dataclass(frozen=True, slots=True)
class SavedMetrics:
    """What the ranks had whose part this rank takes over."""

    of_ranks: Mapping[int, Mapping[str, Any]]
    """By rank of the run that saved: what ``EpochMetrics.state`` gave there."""
    shared: RankShare | None
    """How they are shared; None on the number of ranks that saved."""
    ending: bool
    """The epoch had ended, and its values were about to be looked at."""

    @classmethod
    def of(cls, pending: PendingResume, rank: int) -> SavedMetrics:
        """Make one of what was loaded on this rank; another number of them may have saved it."""
        state, world_size, saved = pending.state, pending.world_size, pending.record.world_size
        ending = bool(state.get(ENDING))
        if saved == world_size:
            return cls({rank: state[RESULTS]} if RESULTS in state else {}, None, ending)
        of_ranks = state.get(RESULTS_BY_RANK, {})
        parts = len(range(rank % saved, world_size, saved))
        even = saved % world_size == 0 or world_size % saved == 0
        return cls(of_ranks, RankShare(rank // saved, parts, even), ending)

    def logged(self) -> dict[str, SavedResult]:
        """Return this rank's running results."""
        of_key: dict[str, list[SavedResult]] = {}
        for held in self.of_ranks.values():
            for key, result in held["logged"].items():
                of_key.setdefault(key, []).append(result)
        parts = {key: _part(results, self.shared) for key, results in of_key.items()}
        return {key: part for key, part in parts.items() if part is not None}


def _part(sources: list[SavedResult], shared: RankShare | None) -> SavedResult | None:
    """Return a rank's part of running results: sums and weights in equal shares."""
    first = sources[0]
    if shared is None:
        return first
    if first["rank_zero_only"] and shared.part:
        return None
    if first["is_metric"] or any(other["by"] != first["by"] for other in sources):
        return first
    values = torch.stack([source["value"] for source in sources])
    joined = {**first, "updates": sum(source["updates"] for source in sources)}
    parts = 1 if first["rank_zero_only"] else shared.parts
    match first["by"]:
        case "max" | "min":
            return {**joined, "value": values.amax(0) if first["by"] == "max" else values.amin(0)}
        case "sum":
            return {**joined, "value": values.sum(0) / parts}
    weight = torch.stack([source["weight"] for source in sources]).sum(0)
    mine = weight / parts
    if not weight.is_floating_point():
        mine = weight // parts + (shared.part < weight % parts).to(weight.dtype)
    value = values.sum(0)
    if parts > 1:
        value = torch.where(weight == 0, value, value * mine / weight)
    return {**joined, "value": value, "weight": mine}


def _logged_metrics(logged: Mapping[str, SavedResult]) -> set[str]:
    """Return the names of the module's metrics that were logged as such."""
    return {s["metadata"]["metric_attribute"] for s in logged.values() if s["is_metric"]}


class EpochMetrics:
    """Lightning's running results and the module's metrics, now and at the last optimizer step."""

    def __init__(self) -> None:
        self._metrics: MetricStates | None = None
        self._noted: dict[str, Any] | None = None
        self._noted_at = -1
        self._before_validation: dict[str, Any] | None = None
        self._at_end: dict[str, Any] = {}
        self._of_epoch: set[str] = set()
        """Metrics that began with the epoch, and that no validation has changed since."""

    def begin(self, trainer: pl.Trainer) -> None:
        """Begin a fit."""
        self._metrics = metrics = MetricStates(trainer.lightning_module)
        self._noted, self._noted_at, self._before_validation = None, -1, None
        self._at_end, self._of_epoch = {}, set()

        def at_end() -> None:
            self._at_end = metrics.now()

        ResumableResults.of(trainer).on_end = at_end

    def note(self, trainer: pl.Trainer) -> None:
        """Keep what there is before the first micro-batch of a window, and before its hooks."""
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        done, total = progress.current.processed, progress.total.processed
        if self._metrics is None or self._noted_at == total:
            return
        if done % trainer.accumulate_grad_batches == 0:
            if done == 0:
                self._metrics.find_new_metrics()
                self._of_epoch = {n for n, h in self._metrics.now().items() if not h["updates"]}
            results = ResumableResults.of(trainer)
            results.begin_batch()
            self._at_end = {}
            self._noted = {"logged": results.to_plain(), "metrics": self._metrics.now()}
            self._noted_at = total

    def validating(self) -> None:
        """Set the metrics aside: a run that is resumed inside a validation begins it anew."""
        self._before_validation = self._metrics.now() if self._metrics is not None else None

    def validated(self, trainer: pl.Trainer) -> None:
        """Note that the validation is over."""
        if self._noted is not None:
            self._noted["metrics"] |= self._validated_metrics(trainer)
        if self._metrics is not None and (before := self._before_validation) is not None:
            for name, held in self._metrics.now().items():
                if name not in before or held["updates"] != before[name]["updates"]:
                    self._of_epoch.discard(name)
        self._before_validation = None

    def _validated_metrics(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Return the metrics after a validation that the open window has not changed itself.

        A run that goes back to the step before the window does not validate there again.
        """
        if self._metrics is None or self._noted is None or self._before_validation is None:
            return {}
        noted, before = self._noted["metrics"], self._before_validation
        reset = self._reset_after_validation(trainer)
        return {
            name: held
            for name, held in self._metrics.now().items()
            if name in noted and name in before and name not in reset
            if noted[name]["updates"] == before[name]["updates"]
        }

    def _reset_after_validation(self, trainer: pl.Trainer) -> set[str]:
        """Return the metrics that Lightning resets right after the hooks that save."""
        if self._metrics is None:
            return set()
        results = results_of(trainer.fit_loop.epoch_loop.val_loop).values()
        return set(self._metrics.names(r.value for r in results if not r.is_tensor))

    def state(
        self, trainer: pl.Trainer, *, inside: bool, validated: bool, ending: bool
    ) -> dict[str, Any]:
        """Return what a checkpoint keeps of this rank, as plain data; nothing outside of a fit.

        Args:
            trainer: the trainer.
            inside: the checkpoint is of the step before the window that is under way.
            validated: the validation that is under way, if one is, is over.
            ending: the epoch has ended, and the hooks at its end run.
        """
        if self._metrics is None:
            return {}
        if inside and self._noted is not None:
            logged, metrics = self._noted["logged"], self._noted["metrics"]
            if validated:
                metrics = {**metrics, **self._validated_metrics(trainer)}
        else:
            logged = ResumableResults.of(trainer).to_plain()
            # An epoch's end may have reset those that were logged.
            ended = self._at_end.keys() & _logged_metrics(logged)
            metrics = {**self._metrics.now(), **{name: self._at_end[name] for name in ended}}
            if self._before_validation is not None and not validated:
                metrics = self._before_validation
            elif self._before_validation is not None:
                reset = self._reset_after_validation(trainer)
                metrics = {name: held for name, held in metrics.items() if name not in reset}
            elif ending:
                # The module's own hook, which comes after those of callbacks, resets them.
                over = self._of_epoch - _logged_metrics(logged)
                metrics = {name: held for name, held in metrics.items() if name not in over}
        plain, lacking = self._metrics.to_plain(metrics)
        return {
            RESULTS: {
                "logged": logged,
                "metrics": plain,
                "lacking": lacking,
                "of_epoch": sorted(self._of_epoch),
                **displayed_metrics(trainer),
            }
        }

    def resume_from(self, source: SavedMetrics, trainer: pl.Trainer, position: Position) -> None:
        """Go on from what was saved, at a position."""
        if self._metrics is None:
            return
        inside = position.steps > 0 or position.is_over
        if not source.of_ranks:
            if inside:
                rank_zero_info(
                    "The checkpoint holds no running results: values that are logged with "
                    f"on_epoch=True {ONLY_AFTER}, for this epoch"
                )
            return
        first = next(iter(source.of_ranks.values()))
        trainer.logged_metrics.update(first.get("log", {}))
        trainer.progress_bar_metrics.update(first.get("bar", {}))
        logged = source.logged()
        # Of an epoch that is over or starts anew, Lightning resets them.
        keeps_all = inside or source.ending
        over = _logged_metrics(logged)
        wanted = [
            {name: held for name, held in of["metrics"].items() if keeps_all or name not in over}
            for of in source.of_ranks.values()
        ]
        self._warn_metrics_reset(source, self._metrics.load_saved(wanted, source.shared))
        if inside:
            kept = {k: s for k, s in logged.items() if s["metadata"]["fx"] != EPOCH_END}
            ResumableResults.of(trainer).load_saved(kept, trainer)
            # Else the first value that is logged resets what was there.
            continue_epoch(trainer)
            self._of_epoch = set(first.get("of_epoch", ()))
            _show(trainer, ResumableResults.of(trainer), on_step=True)
        elif source.ending:
            ended = ResumableResults()
            ended.load_saved(logged, trainer)
            _show(trainer, ended, on_step=False)
            ended.reset()

    def _warn_metrics_reset(self, source: SavedMetrics, lost: list[str]) -> None:
        """Warn of metrics that begin anew."""
        lacking = {name for of in source.of_ranks.values() for name in of.get("lacking", ())}
        for names, why in (
            (sorted(lacking), "their states are not tensors, and were not saved"),
            (lost, f"they are not in the module here, {NOT_SHARED}"),
        ):
            if names:
                rank_zero_warn(f"The metrics {', '.join(names)} {ONLY_AFTER}: {why}")


def _show(trainer: pl.Trainer, results: ResumableResults, *, on_step: bool) -> None:
    """Show values to callbacks, loggers and the progress bar, as at the end of a batch or epoch."""
    values = results.metrics(on_step=on_step)
    trainer.callback_metrics.update(values["callback"])
    trainer.logged_metrics.update(values["log"])
    trainer.progress_bar_metrics.update(values["pbar"])
