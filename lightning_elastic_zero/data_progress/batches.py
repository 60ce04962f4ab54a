"""A run's position in its data, the split of a global batch, and Lightning's loop counters.

``DataProgress`` counts samples and optimizer steps, which do not depend on the number of devices.
``BatchPlan`` divides the ``G`` samples of a step among ``W`` ranks: rank ``r`` takes samples ``r``,
``r + W``, ``r + 2W``, ... in ``A`` micro-batches. DeepSpeed averages the ranks' gradients, so a
micro-batch of ``n`` samples with a mean loss has the weight ``n * W / G``.
``read_position`` and ``fit_loop_at`` convert between a position and Lightning's counters: dicts of
``ready``, ``started``, ``processed`` and ``completed`` micro-batches of one rank. Their meaning was
derived from Lightning 2.6's ``fit_loop``, ``training_epoch_loop`` and ``evaluation_loop``.
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
    """Index of the epoch of the next step, or of the epoch that is about to end."""
    steps: int
    """Optimizer steps taken in that epoch."""
    is_over: bool = False
    """All steps of the epoch are taken, but the hooks at its end have not run."""
    is_validated: bool = False
    """The validation that is due here has run."""


@dataclass(frozen=True, slots=True)
class Consumed:
    """How much of a loader's data an epoch has consumed, over all ranks."""

    samples: int
    """In the current pass; items, if each item is a batch (``batch_size=None``)."""
    passes: int = 0
    """Completed passes before: of several loaders, the shorter ones restart."""


@dataclass(frozen=True, slots=True)
class DataProgress:
    """Position of a run in its data, as recorded in a checkpoint."""

    position: Position
    global_step: int
    """Optimizer steps of the whole run."""
    global_batch_size: int | None
    """Samples per optimizer step; None: the loader's batch size is unknown."""
    accumulate: int
    """Micro-batches of a rank per optimizer step in the saved run."""
    world_size: int
    """Data-parallel ranks of the saved run."""
    steps_per_epoch: int | None = None
    """None: the data has no length."""
    planned_steps: int | None = None
    """Planned optimizer steps of the whole run, for which schedules were created."""
    loaders: tuple[Mapping[str, Plain], ...] = ()
    """``ElasticSampler.describe`` of each training loader: seed, order, dataset length, ..."""
    orders: tuple[tuple[int, str] | None, ...] = ()
    """For each training loader, the epoch of its latest order and the order's digest; None: it has
    no ``ElasticSampler``."""
    consumed: tuple[Consumed | None, ...] = ()
    """For each training loader, how much of it the epoch has consumed; None: unknown."""
    settings: Mapping[str, Plain] | None = None
    """Trainer settings that count batches, as given."""
    seed: int | None = None
    """Seed of the sample order if the user gives none: that of ``seed_everything`` in the run's
    first fit; None: not recorded."""

    @property
    def samples(self) -> int | None:
        """Samples that the epoch has consumed over all ranks; None: unknown."""
        if self.global_batch_size is None:
            return None
        return self.position.steps * self.global_batch_size

    def consumed_of(self, loader: int, *, is_only_one: bool) -> Consumed | None:
        """Return how much of a training loader the epoch has consumed; None: unknown."""
        if self.consumed or not is_only_one:
            return self.consumed[loader] if loader < len(self.consumed) else None
        return None if self.samples is None else Consumed(self.samples)

    def to_plain(self) -> dict[str, Plain]:
        """Return plain data for the manifest."""
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
            "gradient": "mean",  # over a step's samples, independent of the accumulation
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
        """Read the result of ``to_plain``."""
        try:
            position = Position(
                int(content["epoch"]),
                int(content["epoch_steps"]),
                is_over=bool(content["epoch_is_over"]),
                is_validated=bool(content["is_validated"]),
            )
            counts = {n: int(content[n]) for n in ("global_step", "accumulate", "world_size")}
            names = ("global_batch_size", "steps_per_epoch", "planned_steps")
            optional: dict[str, Any] = {
                n: None if content[n] is None else int(content[n]) for n in names
            }
            seed = content.get("seed")
            record = cls(
                position,
                **counts,
                **optional,
                loaders=tuple(dict(loader) for loader in content["loaders"]),
                orders=tuple(
                    None if order is None else (int(order["epoch"]), str(order["digest"]))
                    for order in content.get("orders", ())
                ),
                consumed=tuple(
                    None if part is None else Consumed(int(part["samples"]), int(part["passes"]))
                    for part in content.get("consumed", ())
                ),
                settings=dict(content["settings"]),
                seed=None if seed is None else int(seed),
            )
            least = [position.epoch, position.steps, record.global_step]
            least += [n for part in record.consumed if part for n in (part.samples, part.passes)]
            if min(*least, record.accumulate - 1, record.world_size - 1) < 0:
                msg = "negative count"
                raise ValueError(msg)  # noqa: TRY301 (the file is as damaged as without the field)
        except (KeyError, TypeError, ValueError) as error:
            msg = (
                f"{where}: a field of progress.sampler is missing or invalid ({error!r}). The file "
                "is damaged: resume from another checkpoint"
            )
            raise CheckpointFormatError(msg) from error
        return record

    def at_batch_size(self, global_batch_size: int | None) -> Position:
        """Return the position in steps of another global batch, rounded down to skip no sample."""
        samples = self.samples
        if not samples or not global_batch_size:
            return self.position
        steps = samples // global_batch_size
        exact = steps * global_batch_size == samples
        return replace(
            self.position, steps=steps, is_validated=self.position.is_validated and exact
        )


MOST_SMALLER = 2
"""Equal micro-batches may need up to this factor more micro-batches than fit into memory."""

LISTED_COUNTS = 12
"""Number of device counts listed in an error message."""


def ceil_div(count: int, size: int) -> int:
    """Return ``count / size``, rounded up."""
    return -(-count // size)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How the samples of one optimizer step are divided among ranks and micro-batches."""

    global_batch_size: int
    """Samples per optimizer step, over all ranks: ``G``."""
    world_size: int
    """Data-parallel ranks: ``W``."""
    accumulate: int
    """Micro-batches of each rank per optimizer step: ``A``."""

    @property
    def is_even(self) -> bool:
        """Whether all micro-batches of all ranks have the same size."""
        return self.global_batch_size % (self.world_size * self.accumulate) == 0

    @property
    def largest_micro_batch(self) -> int:
        """Samples in the largest micro-batch of any rank."""
        return ceil_div(ceil_div(self.global_batch_size, self.world_size), self.accumulate)

    def samples_of(self, rank: int) -> int:
        """Return a rank's samples per optimizer step."""
        return len(range(rank, self.global_batch_size, self.world_size))

    def micro_batches_of(self, rank: int) -> tuple[int, ...]:
        """Return the sizes of a rank's micro-batches, in order; they differ by at most one."""
        size, larger = divmod(self.samples_of(rank), self.accumulate)
        return (size + 1,) * larger + (size,) * (self.accumulate - larger)

    def loss_weight(self, rank: int, micro_batch: int) -> float:
        """Return the weight of a micro-batch's mean loss, in addition to Lightning's ``1 / A``.

        Exactly 1.0 if all micro-batches are equal.
        """
        if self.is_even:
            return 1.0
        size = self.micro_batches_of(rank)[micro_batch]
        return size * self.world_size * self.accumulate / self.global_batch_size


def plan_batches(
    global_batch_size: int, most_samples: int, world_size: int, *, allow_uneven: bool = False
) -> BatchPlan:
    """Divide a global batch into micro-batches.

    Args:
        global_batch_size: Samples per optimizer step, over all ranks.
        most_samples: Largest micro-batch: the loader's ``batch_size``.
        world_size: Data-parallel ranks.
        allow_uneven: Micro-batches may differ by one sample if equal ones are impossible.

    Returns:
        The plan with the fewest micro-batches.

    Raises:
        UnsupportedError: It cannot be divided. The message lists device counts that fit.
    """
    plan = _even_plan(global_batch_size, most_samples, world_size)
    if plan is None and allow_uneven and global_batch_size >= world_size:
        accumulate = ceil_div(ceil_div(global_batch_size, world_size), most_samples)
        uneven = BatchPlan(global_batch_size, world_size, accumulate)
        plan = uneven if uneven.samples_of(world_size - 1) >= accumulate else None
    if plan is not None:
        return plan
    counts = [
        count
        for count in range(1, global_batch_size + 1)
        if _even_plan(global_batch_size, most_samples, count)
    ]
    # The nearest ones: on 64 devices, 1 is not a useful alternative.
    near = sorted(sorted(counts, key=lambda count: abs(count - world_size))[:LISTED_COUNTS])
    listed = ", ".join(map(str, near)) or "none"
    # Otherwise changing the batch_size does not help.
    divides = global_batch_size % world_size == 0
    change = ", or change the loader's batch_size" if divides else ""
    hint = "" if allow_uneven else "; or pass allow_uneven_batches=True"
    msg = (
        f"global_batch_size={global_batch_size} cannot be shared by {world_size} devices in equal "
        f"micro-batches of at most {most_samples} samples (the loader's batch_size). Device counts "
        f"that fit: {listed}. Use one of them{change}{hint}"
    )
    raise UnsupportedError(msg)


def _even_plan(global_batch_size: int, most_samples: int, world_size: int) -> BatchPlan | None:
    """Return the plan with the fewest equal micro-batches; None if they would be too small."""
    of_rank, rest = divmod(global_batch_size, world_size)
    if rest or not of_rank:
        return None
    fewest = ceil_div(of_rank, most_samples)
    for accumulate in range(fewest, min(MOST_SMALLER * fewest, of_rank) + 1):
        if of_rank % accumulate == 0:
            return BatchPlan(global_batch_size, world_size, accumulate)
    return None


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
    """Read the position of a run from Lightning's counters, rounded down to an optimizer step.

    ``batches``: micro-batches of one rank per epoch, infinite if unknown. ``validating``: the save
    happens inside the fit's validation.
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


def infer_progress(
    fit_loop: Mapping[str, Any], progress: TrainingProgress, world_size: int, global_step: int
) -> DataProgress:
    """Infer the progress of a run that another program saved from Lightning's counters."""
    # DeepSpeed's config has the accumulation; counters are ambiguous if epochs end within a window.
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
    own = {key: value for key, value in fit["state_dict"].items() if key != LOADER_STATES}
    if states:
        own[LOADER_STATES] = states
    return {**loops, "fit_loop": {**fit, "state_dict": own}}


def _batches_at(
    fit_loop: Mapping[str, Any], position: Position, was: int, now: int
) -> tuple[int, int]:
    """Return a rank's micro-batches in the epochs before a position, and in its epoch.

    With another accumulation, a short last window of an epoch counts as a complete one.
    """
    batch, epochs = fit_loop[BATCHES], fit_loop[EPOCHS]["current"]
    # Before an epoch has begun, these counters are those of the previous epoch.
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
