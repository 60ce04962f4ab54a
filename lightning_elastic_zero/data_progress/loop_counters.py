"""Lightning's loop counters, read as a position, and written for a position on other devices.

Lightning counts each rank's micro-batches, and tells from small differences between the counters
where it was stopped. Which numbers make it go on rightly was read in its ``fit_loop``,
``training_epoch_loop`` and ``evaluation_loop`` (2.6); the names below are theirs. All the counters
are dicts of ``ready``, ``started``, ``processed`` and ``completed``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from lightning_elastic_zero.data_progress.batch_plan import ceil_div
from lightning_elastic_zero.data_progress.position import DataProgress, Position
from lightning_elastic_zero.manifest import Progress

EPOCHS = "epoch_progress"
BATCHES = "epoch_loop.batch_progress"
VALIDATION = "epoch_loop.val_loop.batch_progress"
STEPS = "epoch_loop.automatic_optimization.optim_progress"
LOADER_STATES = "combined_loader"

Counters = dict[str, Any]
"""The state of Lightning's fit loop: ``checkpoint["loops"]["fit_loop"]``."""


def read_position(
    fit_loop: Mapping[str, Any], accumulate: int, *, batches: float, validating: bool
) -> Position:
    """Read where a run stands, floored to the last optimizer step.

    Args:
        fit_loop: Lightning's counters.
        accumulate: micro-batches per optimizer step.
        batches: micro-batches of one rank per epoch; infinite if unknown.
        validating: the save happens inside the fit's validation.
    """
    epochs, batch = fit_loop[EPOCHS]["current"], fit_loop[BATCHES]["current"]
    done = batch["processed"]
    steps = done // accumulate
    last = fit_loop[BATCHES]["is_last_batch"] and done == batch["ready"]
    is_over = done > 0 and (last or done >= batches)
    if is_over and batch["started"] == done:
        steps = ceil_div(done, accumulate)  # the last one may be of fewer micro-batches
    if epochs["processed"] == epochs["ready"]:
        # The epoch's end has been reached. max_steps and early stopping get here in mid-epoch too.
        if done and not is_over:
            return Position(max(epochs["processed"] - 1, 0), steps, is_validated=True)
        return Position(epochs["processed"], 0)
    if epochs["started"] < epochs["ready"]:
        # In on_train_epoch_start: the batch counters are still those of the epoch before.
        return Position(epochs["processed"], 0)
    whole = is_over or steps * accumulate == done
    validated = validating and _is_finished(fit_loop[VALIDATION]) and whole
    return Position(epochs["processed"], steps, is_over=is_over, is_validated=validated)


def _is_finished(progress: Mapping[str, Any]) -> bool:
    """Whether a validation has run all its batches."""
    current = progress["current"]
    return bool(progress["is_last_batch"] and current["completed"] == current["ready"] > 0)


def infer_progress(
    fit_loop: Mapping[str, Any], progress: Progress, world_size: int, global_step: int
) -> DataProgress:
    """Infer how far a run is that another program saved, from what it counted."""
    # DeepSpeed's own config says it; counters cannot where epochs end within a window.
    accumulate = max(1, progress.gradient_accumulation_steps)
    taken = fit_loop[STEPS]["optimizer"]["step"]["total"]["completed"]
    if accumulate == 1 and taken:
        accumulate = max(1, fit_loop[BATCHES]["total"]["processed"] // taken)
    position = read_position(fit_loop, accumulate, batches=float("inf"), validating=True)
    return DataProgress(
        position,
        global_step=global_step,
        global_batch_size=progress.global_batch_size,
        accumulate=accumulate,
        world_size=world_size,
    )


def fit_loop_at(fit_loop: Mapping[str, Any], position: Position, *, was: int, now: int) -> Counters:
    """Write Lightning's counters for a position.

    The epoch is shown as finished, or as one that was left right after a batch whose hooks have all
    run ("restarted on last"): of all states this is the one from which Lightning does nothing twice
    and skips nothing, once ``RunResumer`` has set what only live loops have.

    Args:
        fit_loop: the counters as saved.
        position: where to go on.
        was: micro-batches of a rank per optimizer step when it was saved.
        now: the same, here.
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
    _set_validation(loops[VALIDATION], pending=in_epoch and not position.is_validated)
    _drop_begun_window(loops[STEPS]["optimizer"])
    # Per rank and worker, and of another number of them: never to be applied by position in a list.
    loops["state_dict"] = {k: v for k, v in loops["state_dict"].items() if k != LOADER_STATES}
    return loops


def with_loader_states(loops: Mapping[str, Any], states: list[Any]) -> dict[str, Any]:
    """Return all loops' counters with these states of the training loaders, and no others."""
    fit = loops["fit_loop"]
    own = {key: value for key, value in fit["state_dict"].items() if key != LOADER_STATES}
    if states:
        own[LOADER_STATES] = states
    return {**loops, "fit_loop": {**fit, "state_dict": own}}


def _batches_at(
    fit_loop: Mapping[str, Any], position: Position, was: int, now: int
) -> tuple[int, int]:
    """Return a rank's micro-batches of the epochs before a position's, and of its own.

    An epoch's last window may have fewer than the others: how many of another accumulation there
    would have been is not known, and it counts as a whole one.
    """
    batch, epochs = fit_loop[BATCHES], fit_loop[EPOCHS]["current"]
    # Before an epoch's first step its window may have begun; before that, these are the last one's.
    has_begun = epochs["started"] == epochs["ready"] > epochs["processed"]
    in_epoch = position.steps > 0 or position.is_over or has_begun
    done = int(batch["current"]["processed"]) if in_epoch else 0
    before = int(batch["total"]["processed"]) - done
    if was != now:
        return before // was * now, position.steps * now
    is_as_saved = position.is_over and position.steps == ceil_div(done, was)
    return before, done if is_as_saved else position.steps * now


def _set(counts: dict[str, int], number: int) -> None:
    counts.update(dict.fromkeys(("ready", "started", "processed", "completed"), number))


def _drop_begun_window(optimizer: dict[str, Any]) -> None:
    """Count gradients as cleared for the windows whose step was taken: the others begin anew."""
    for part in ("total", "current"):
        cleared, taken = optimizer["zero_grad"][part], optimizer["step"][part]["completed"]
        cleared.update({name: min(number, taken) for name, number in cleared.items()})


def validation_counters_at(
    progress: Mapping[str, Any], *, began: bool, was: int, now: int
) -> Counters:
    """Write the counters of validation's batches as they are where a run goes on.

    Args:
        progress: them as saved.
        began: the validation that is counted last had begun and is made anew.
        was: batches of a validation on a rank of the run that saved; 0 where it is not known.
        now: the same, here.
    """
    made = copy.deepcopy(dict(progress))
    if began:
        for name, number in made["current"].items():
            made["total"][name] -= number
    for counts in (made["total"], made["current"]) if was and now and was != now else ():
        counts.update({name: number * now // was for name, number in counts.items()})
    return made


def _set_validation(progress: dict[str, Any], *, pending: bool) -> None:
    """Show a validation as begun, so that it runs if one is due here; or as not begun.

    Nothing of it counts as done: it starts at its first batch, since its metrics were not saved.
    ``validation_counters_at`` says what is counted once Lightning has decided by this.
    """
    for counts in (progress["current"], progress["total"]):
        _set(counts, 0)
        counts.update(ready=int(pending), started=int(pending))
    progress["is_last_batch"] = False
