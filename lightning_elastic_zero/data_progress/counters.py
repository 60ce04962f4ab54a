"""Lightning's loop counters for a position in the data, and back.

The counters are dicts of ``ready``, ``started``, ``processed`` and ``completed`` micro-batches of
one rank. Their meaning was derived from Lightning 2.6's ``fit_loop``, ``training_epoch_loop`` and
``evaluation_loop``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from lightning_elastic_zero.core.grid import RankGrid
from lightning_elastic_zero.core.manifest import TrainingProgress
from lightning_elastic_zero.data_progress.batches import ceil_div
from lightning_elastic_zero.data_progress.position import DataPosition, Position, RunSettings

EPOCHS = "epoch_progress"
BATCHES = "epoch_loop.batch_progress"
VALIDATION = "epoch_loop.val_loop.batch_progress"
STEPS = "epoch_loop.automatic_optimization.optim_progress"
LOADER_STATES = "combined_loader"

Counters = dict[str, Any]
"""The state of Lightning's fit loop: ``checkpoint["loops"]["fit_loop"]``."""


def read_position(
    fit_loop: Mapping[str, Any], accumulate: int, *, batches: float, validating: bool = False
) -> Position:
    """Read the position of a run from Lightning's counters, rounded down to an optimizer step.

    ``batches``: micro-batches of one rank per epoch, infinite if unknown. ``validating``: the save
    may be that of a validation's end, so its batches tell whether it is finished. They do not know
    of errors after the last one, nor of a validation that has not counted its first one.
    """
    epochs, batch = fit_loop[EPOCHS]["current"], fit_loop[BATCHES]["current"]
    done = batch["processed"]
    steps = done // accumulate
    last = fit_loop[BATCHES]["is_last_batch"] and done == batch["ready"]
    is_over = done > 0 and (last or done >= batches)
    if is_over and batch["started"] == done:
        steps = ceil_div(done, accumulate)  # the last one may have fewer micro-batches
    if epochs["processed"] == epochs["ready"]:
        # At the epoch's end. max_steps and early stopping also get here in the middle of an epoch.
        if done and not is_over:
            return Position(max(epochs["processed"] - 1, 0), steps, is_validated=True)
        return Position(epochs["processed"], 0)
    if epochs["started"] < epochs["ready"]:
        # In on_train_epoch_start: the batch counters are still those of the epoch before.
        return Position(epochs["processed"], 0)
    whole = is_over or steps * accumulate == done
    validation = fit_loop[VALIDATION]["current"]
    is_finished = validation["completed"] == validation["ready"] > 0
    validated = validating and whole and is_finished and fit_loop[VALIDATION]["is_last_batch"]
    return Position(epochs["processed"], steps, is_over=is_over, is_validated=bool(validated))


def infer_position(
    fit_loop: Mapping[str, Any], progress: TrainingProgress, grid: RankGrid, global_step: int
) -> DataPosition:
    """Infer the position of a run that another program saved from Lightning's counters."""
    # DeepSpeed's config has the accumulation.
    accumulate = progress.gradient_accumulation_steps
    if accumulate <= 1:
        accumulate = _infer_accumulation(fit_loop)
    position = read_position(fit_loop, accumulate, batches=float("inf"), validating=True)
    settings = RunSettings(grid, accumulate, progress.global_batch_size)
    return DataPosition(position, global_step, settings)


def _infer_accumulation(fit_loop: Mapping[str, Any]) -> int:
    """Return the micro-batches of one rank per optimizer step.

    Exact if an epoch has at least as many steps: its last one may have fewer micro-batches.
    """
    batch, step = fit_loop[BATCHES], fit_loop[STEPS]["optimizer"]["step"]
    done, taken = batch["current"]["processed"], step["current"]["completed"]
    if earlier := step["total"]["completed"] - taken:  # of whole epochs
        return max(1, ceil_div(batch["total"]["processed"] - done, earlier))
    if not taken:
        return 1
    return ceil_div(done, taken) if batch["is_last_batch"] else max(1, done // taken)


def fit_loop_at(fit_loop: Mapping[str, Any], position: Position, *, was: int, now: int) -> Counters:
    """Return Lightning's counters for a position.

    They describe a finished epoch, or one that was left right after a batch and all its hooks
    ("restarted on last"). From this state Lightning repeats and skips nothing, once ``RunResumer``
    has set the state that only live loops have. ``was`` and ``now``: micro-batches of a rank per
    optimizer step in the saved run and in this run.
    """
    loops = copy.deepcopy(dict(fit_loop))
    batch, epochs = loops[BATCHES], loops[EPOCHS]
    in_epoch = position.steps > 0 or position.is_over
    extra = epochs["total"]["ready"] - epochs["current"]["ready"]
    entered = position.epoch + in_epoch
    for counts, more in ((epochs["current"], 0), (epochs["total"], extra)):
        counts.update(ready=entered + more, started=entered + more)
        counts.update(processed=position.epoch + more, completed=position.epoch + more)
    before, current = _batches_at(fit_loop, position, was, now)
    _set(batch["current"], current)
    _set(batch["total"], before + current)
    batch["is_last_batch"] = position.is_over
    # A validation that may be due here has begun, with none of its batches, because its metrics
    # were not saved. Once Lightning has decided by these counters, ``validation_counters_at``
    # provides the final ones.
    validation, pending = loops[VALIDATION], int(in_epoch and not position.is_validated)
    for counts in (validation["current"], validation["total"]):
        counts.update(ready=pending, started=pending, processed=0, completed=0)
    validation["is_last_batch"] = False
    # Gradients are cleared again for an open window, which is repeated.
    optimizer = loops[STEPS]["optimizer"]
    for part in ("total", "current"):
        cleared, taken = optimizer["zero_grad"][part], optimizer["step"][part]["completed"]
        cleared.update({name: min(number, taken) for name, number in cleared.items()})
    # One state per rank and worker: not applicable on another number of ranks.
    loops["state_dict"] = {k: v for k, v in loops["state_dict"].items() if k != LOADER_STATES}
    return loops


def with_loader_states(loops: Mapping[str, Any], states: list[Any]) -> dict[str, Any]:
    """Return all loops' counters with the given states of training loaders instead of others."""
    fit = loops["fit_loop"]
    module_state = {key: value for key, value in fit["state_dict"].items() if key != LOADER_STATES}
    if states:
        module_state[LOADER_STATES] = states
    return {**loops, "fit_loop": {**fit, "state_dict": module_state}}


def _batches_at(
    fit_loop: Mapping[str, Any], position: Position, was: int, now: int
) -> tuple[int, int]:
    """Return a rank's micro-batches in the epochs before a position, and in its epoch.

    With another accumulation, a short last window of an epoch counts as a complete one.
    """
    batch, epochs = fit_loop[BATCHES], fit_loop[EPOCHS]["current"]
    # Before an epoch has begun, these counters are those of the previous epoch. After a stop inside
    # an epoch, they are those of this epoch, which Lightning counts as processed.
    has_begun = epochs["started"] == epochs["ready"] > position.epoch
    in_epoch = position.steps > 0 or position.is_over or has_begun
    done = int(batch["current"]["processed"]) if in_epoch else 0
    before = int(batch["total"]["processed"]) - done
    if was != now:
        return before // was * now, position.steps * now
    is_as_saved = position.is_over and position.steps == ceil_div(done, was)
    return before, done if is_as_saved else position.steps * now


def _set(counts: dict[str, int], number: int) -> None:
    counts.update(dict.fromkeys(("ready", "started", "processed", "completed"), number))


def validation_counters_at(
    progress: Mapping[str, Any], *, began: bool, was: int, now: int
) -> Counters:
    """Return the validation's batch counters for a resumed run.

    ``began``: the last counted validation was unfinished and is repeated. ``was`` and ``now``:
    batches of a validation on a rank of the saved run and of this run; 0: unknown.
    """
    made = copy.deepcopy(dict(progress))
    if began:
        for name, number in made["current"].items():
            made["total"][name] -= number
    for counts in (made["total"], made["current"]) if was and now and was != now else ():
        counts.update({name: number * now // was for name, number in counts.items()})
    return made
