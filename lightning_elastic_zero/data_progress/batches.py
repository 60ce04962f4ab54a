"""A run's position for the manifest, in units that no number of devices changes.

The split of a global batch into ranks and their micro-batches. Pure arithmetic.

With ``G`` samples per optimizer step on ``W`` ranks, rank ``r`` takes samples ``r``, ``r + W``,
``r + 2W``, ... of the step's block, in ``A`` micro-batches. DeepSpeed gives the mean of the ranks'
gradients, and each rank's gradient is a sum over its micro-batches. So a micro-batch of ``n``
samples, whose loss is the mean over them, counts with ``n * W / G``, and the gradient is the mean
over the global batch, whatever the split.

Lightning's loop counters, read as a position, and written for a position on other devices.

Lightning counts each rank's micro-batches, and tells from small differences between the counters
where it was stopped. Which numbers make it go on rightly was read in its ``fit_loop``,
``training_epoch_loop`` and ``evaluation_loop`` (2.6); the names below are theirs. All the counters
are dicts of ``ready``, ``started``, ``processed`` and ``completed``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_elastic_zero.core.manifest import Plain, TrainingProgress
from lightning_elastic_zero.errors import CheckpointFormatError, UnsupportedError


@dataclass(frozen=True, slots=True)
class Position:
    """A place between two optimizer steps of a run."""

    epoch: int
    """Index of the epoch that the next step belongs to, or that is about to end."""
    steps: int
    """Optimizer steps taken in that epoch."""
    is_over: bool = False
    """All steps of the epoch are taken, and what belongs to its end is still to come."""
    is_validated: bool = False
    """The validation that was due here is over."""


@dataclass(frozen=True, slots=True)
class Consumed:
    """How much of a loader's data an epoch has consumed, on all ranks together."""

    samples: int
    """Of its current pass; items where each item is a batch (``batch_size=None``)."""
    passes: int = 0
    """Whole passes before: of several loaders the shorter ones begin again."""


@dataclass(frozen=True, slots=True)
class DataProgress:
    """What a checkpoint says of the data, and of how far the run is in it."""

    position: Position
    global_step: int
    """Optimizer steps of the whole run."""
    global_batch_size: int | None
    """Samples per optimizer step; None where the loader does not say its batch size."""
    accumulate: int
    """Micro-batches of a rank per optimizer step, in the run that saved."""
    world_size: int
    """Of the run that saved."""
    steps_per_epoch: int | None = None
    """None: the data has no length."""
    planned_steps: int | None = None
    """Optimizer steps of the whole run as it was planned: what schedules were made for."""
    loaders: tuple[Mapping[str, Plain], ...] = ()
    """A fingerprint of each training loader's sampler: seed, order, dataset length, ..."""
    orders: tuple[tuple[int, str] | None, ...] = ()
    """For each training loader, the epoch that its order was made for last and the order's digest;
    None where its order is its own."""
    consumed: tuple[Consumed | None, ...] = ()
    """For each training loader, what the epoch has consumed of it; None: not known."""
    gradient: str = "mean"
    """Of a step: the mean over its samples, whatever the accumulation."""
    settings: Mapping[str, Plain] | None = None
    """Trainer settings that count batches, as they were given."""
    seed: int | None = None
    """The seed that orders the samples where the user gives none: that of ``seed_everything`` in
    the run's first fit; None in checkpoints of before it was recorded."""

    @property
    def samples(self) -> int | None:
        """Samples of the epoch that all ranks together have consumed."""
        if self.global_batch_size is None:
            return None
        return self.position.steps * self.global_batch_size

    def consumed_of(self, loader: int, *, is_only_one: bool) -> Consumed | None:
        """Return what the epoch has consumed of a training loader; None: not known."""
        if self.consumed or not is_only_one:
            return self.consumed[loader] if loader < len(self.consumed) else None
        return None if self.samples is None else Consumed(self.samples)

    def to_plain(self) -> dict[str, Plain]:
        """Return what the manifest holds."""
        position = self.position
        return {
            "epoch": position.epoch,
            "epoch_steps": position.steps,
            "epoch_samples": self.samples,
            "epoch_is_over": position.is_over,
            "is_validated": position.is_validated,
            "global_step": self.global_step,
            "global_batch_size": self.global_batch_size,
            "accumulate": self.accumulate,
            "world_size": self.world_size,
            "steps_per_epoch": self.steps_per_epoch,
            "planned_steps": self.planned_steps,
            "gradient": self.gradient,
            "settings": dict(self.settings or {}),
            "seed": self.seed,
            "loaders": [dict(loader) for loader in self.loaders],
            "orders": [
                None if order is None else {"epoch": order[0], "digest": order[1]}
                for order in self.orders
            ],
            "consumed": [
                None if part is None else {"samples": part.samples, "passes": part.passes}
                for part in self.consumed
            ],
        }

    @classmethod
    def from_plain(cls, content: Mapping[str, Any], where: str) -> DataProgress:
        """Read what ``to_plain`` gave.

        Raises:
            CheckpointFormatError: a field is missing or no number.
        """
        try:
            counts = [int(content[name]) for name in ("epoch", "epoch_steps", "global_step")]
            shape = [int(content[name]) for name in ("accumulate", "world_size")]
            record = cls(
                Position(
                    counts[0],
                    counts[1],
                    is_over=bool(content["epoch_is_over"]),
                    is_validated=bool(content["is_validated"]),
                ),
                global_step=counts[2],
                global_batch_size=_optional(content["global_batch_size"]),
                accumulate=shape[0],
                world_size=shape[1],
                steps_per_epoch=_optional(content["steps_per_epoch"]),
                planned_steps=_optional(content["planned_steps"]),
                loaders=tuple(dict(loader) for loader in content["loaders"]),
                # Checkpoints of before this was recorded lack it.
                orders=tuple(_order(order) for order in content.get("orders", ())),
                consumed=tuple(_consumed(part) for part in content.get("consumed", ())),
                gradient=str(content["gradient"]),
                settings=dict(content["settings"]),
                seed=_optional(content.get("seed")),
            )
        except (KeyError, TypeError, ValueError) as error:
            msg = (
                f"{where}: a field of progress.sampler is missing or invalid ({error!r}): the file "
                "is damaged; resume from another checkpoint"
            )
            raise CheckpointFormatError(msg) from error
        parts = [n for part in record.consumed if part for n in (part.samples, part.passes)]
        if min(*counts, *parts, *(number - 1 for number in shape)) < 0:
            msg = f"{where} has a negative count in progress.sampler: the file is damaged"
            raise CheckpointFormatError(msg)
        return record

    def at_batch_size(self, global_batch_size: int | None) -> Position:
        """Return the position in steps of another global batch, rounded down: none is skipped."""
        samples = self.samples
        if not samples or not global_batch_size:
            return self.position
        steps = samples // global_batch_size
        exact = steps * global_batch_size == samples
        return replace(
            self.position, steps=steps, is_validated=self.position.is_validated and exact
        )


def _order(content: Any) -> tuple[int, str] | None:
    return None if content is None else (int(content["epoch"]), str(content["digest"]))


def _consumed(content: Any) -> Consumed | None:
    return None if content is None else Consumed(int(content["samples"]), int(content["passes"]))


def _optional(value: Any) -> int | None:
    return None if value is None else int(value)


MOST_SMALLER = 2
"""Equal micro-batches may be so many times smaller than what fits; then unequal ones are meant."""

LISTED_COUNTS = 12
"""How many device counts an error message names."""


def ceil_div(count: int, size: int) -> int:
    """Return how many parts of at most ``size`` make up ``count``."""
    return -(-count // size)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How the samples of one optimizer step are spread."""

    global_batch_size: int
    """Samples per optimizer step, over all ranks: ``G``."""
    world_size: int
    """Data-parallel ranks: ``W``."""
    accumulate: int
    """Micro-batches of each rank per optimizer step: ``A``."""

    @property
    def is_even(self) -> bool:
        """Whether all micro-batches of all ranks have one size."""
        return self.global_batch_size % (self.world_size * self.accumulate) == 0

    @property
    def largest_micro_batch(self) -> int:
        """Samples in the largest micro-batch of any rank."""
        return ceil_div(ceil_div(self.global_batch_size, self.world_size), self.accumulate)

    def samples_of(self, rank: int) -> int:
        """Return a rank's samples per optimizer step."""
        return len(range(rank, self.global_batch_size, self.world_size))

    def micro_batches_of(self, rank: int) -> tuple[int, ...]:
        """Return the sizes of a rank's micro-batches, in order: they differ by one at most."""
        size, larger = divmod(self.samples_of(rank), self.accumulate)
        return (size + 1,) * larger + (size,) * (self.accumulate - larger)

    def loss_weight(self, rank: int, micro_batch: int) -> float:
        """Return what a micro-batch's mean loss counts with, beside Lightning's ``1 / A``.

        1 where all micro-batches are equal, and exactly so.
        """
        if self.is_even:
            return 1.0
        size = self.micro_batches_of(rank)[micro_batch]
        return size * self.world_size * self.accumulate / self.global_batch_size


def plan_batches(
    global_batch_size: int, most_samples: int, world_size: int, *, allow_uneven: bool = False
) -> BatchPlan:
    """Cut a global batch into micro-batches that fit.

    Args:
        global_batch_size: samples per optimizer step, over all ranks.
        most_samples: of a micro-batch: the loader's ``batch_size``, which is what fits into memory.
        world_size: data-parallel ranks.
        allow_uneven: micro-batches may differ by one sample where equal ones do not come out.

    Raises:
        UnsupportedError: it cannot be cut so; the message names device counts that fit.
    """
    plan = _even_plan(global_batch_size, most_samples, world_size)
    if plan is None and allow_uneven and global_batch_size >= world_size:
        accumulate = ceil_div(ceil_div(global_batch_size, world_size), most_samples)
        uneven = BatchPlan(global_batch_size, world_size, accumulate)
        plan = uneven if uneven.samples_of(world_size - 1) >= accumulate else None
    if plan is None:
        raise UnsupportedError(
            _refusal(global_batch_size, most_samples, world_size, allow_uneven=allow_uneven)
        )
    return plan


def _even_plan(global_batch_size: int, most_samples: int, world_size: int) -> BatchPlan | None:
    """Return the plan of the fewest equal micro-batches, if one is not too wasteful."""
    of_rank, rest = divmod(global_batch_size, world_size)
    if rest or not of_rank:
        return None
    fewest = ceil_div(of_rank, most_samples)
    for accumulate in range(fewest, min(MOST_SMALLER * fewest, of_rank) + 1):
        if of_rank % accumulate == 0:
            return BatchPlan(global_batch_size, world_size, accumulate)
    return None


def _refusal(
    global_batch_size: int, most_samples: int, world_size: int, *, allow_uneven: bool
) -> str:
    """Return why a global batch cannot be cut, and what helps."""
    counts = [
        count
        for count in range(1, global_batch_size + 1)
        if _even_plan(global_batch_size, most_samples, count)
    ]
    # The nearest ones: nobody on 64 devices wants to hear of 1.
    near = sorted(sorted(counts, key=lambda count: abs(count - world_size))[:LISTED_COUNTS])
    listed = ", ".join(map(str, near)) or "none"
    # Otherwise no batch_size helps.
    divides = global_batch_size % world_size == 0
    change = ", or change the loader's batch_size" if divides else ""
    hint = "" if allow_uneven else "; or pass allow_uneven_batches=True"
    return (
        f"global_batch_size={global_batch_size} cannot be shared by {world_size} devices in equal "
        f"micro-batches of at most {most_samples} samples (the loader's batch_size). Device counts "
        f"that fit: {listed}. Use one of them{change}{hint}"
    )


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
    fit_loop: Mapping[str, Any], progress: TrainingProgress, world_size: int, global_step: int
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
