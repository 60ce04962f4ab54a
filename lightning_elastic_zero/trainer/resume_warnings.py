"""What changed between a checkpoint and the run that takes it up, said to the user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lightning_elastic_zero.data_progress import DataProgress
from lightning_elastic_zero.manifest import Plain

BATCH_COUNT_SETTINGS = ("val_check_interval", "limit_train_batches")
"""Trainer settings that, as integers, count the batches of one rank."""


def change_warnings(
    was: DataProgress, now: DataProgress, *, is_given: bool, foreign_path: str
) -> Iterator[str]:
    """Yield a sentence for all that changed since the save.

    Args:
        was: the record of the save.
        now: that of this run.
        is_given: the global batch is settled by the strategy's option.
        foreign_path: the checkpoint's path, where another program wrote it.
    """
    if text := changed_batch(was, now, is_given=is_given):
        yield text
    if not foreign_path and (text := changed_plan(was, now)):
        yield text
    yield from changed_settings(was, now)
    if foreign_path and was.accumulate > 1:
        yield (
            f"{foreign_path} was saved by a run that may have divided gradients by its "
            f"accumulation ({was.accumulate}) twice, as Lightning's DeepSpeedStrategy does; "
            "here a gradient is the mean over the global batch. Adam's moments take a few "
            "steps to follow, and gradient_clip_val may need to be larger"
        )


def changed_batch(was: DataProgress, now: DataProgress, *, is_given: bool) -> str | None:
    """Return that the global batch is another one, and what would keep it."""
    if was.global_batch_size is None or now.global_batch_size is None:
        return None
    if was.global_batch_size == now.global_batch_size:
        return None
    keep = (
        f"global_batch_size={was.global_batch_size} keeps it"
        if is_given
        else f"ElasticDeepSpeedStrategy(global_batch_size={was.global_batch_size}) keeps it on any "
        "number of devices"
    )
    return (
        f"The global batch changes from {was.global_batch_size} samples ({_devices(was)}, "
        f"accumulation {was.accumulate}) to {now.global_batch_size} ({_devices(now)}, "
        f"accumulation {now.accumulate}): learning rate, schedules and max_steps now mean "
        f"something else. {keep}."
    )


def _devices(run: DataProgress) -> str:
    return f"{run.world_size} device{'s' if run.world_size > 1 else ''}"


def changed_plan(was: DataProgress, now: DataProgress) -> str | None:
    """Return that the run is planned for another number of optimizer steps."""
    if was.planned_steps is None or now.planned_steps is None:
        return None
    if was.planned_steps == now.planned_steps:
        return None
    return (
        f"The run was planned for {was.planned_steps} optimizer steps, and is now for "
        f"{now.planned_steps}: schedules that were made for a total (OneCycleLR, cosine) go on as "
        f"saved, for {was.planned_steps}; load_hyperparameters=False lets them follow the new one."
    )


def changed_settings(was: DataProgress, now: DataProgress) -> Iterator[str]:
    """Yield which trainer settings count other amounts of data than in the saved run."""
    before = was.world_size * was.accumulate
    here = now.world_size * now.accumulate
    if was.accumulate == now.accumulate and was.global_batch_size == now.global_batch_size:
        return
    settings: Mapping[str, Plain] = was.settings or {}
    for name in BATCH_COUNT_SETTINGS:
        value = settings.get(name)
        given = (now.settings or {}).get(name)
        if (
            type(value) is int
            and type(given) is int
            and value / was.accumulate != given / now.accumulate
        ):
            yield (
                f"Trainer({name}={given}) counts batches of one device: {value / was.accumulate:g} "
                f"optimizer steps when this was saved ({before} micro-batches per step), "
                f"{given / now.accumulate:g} now ({here}). With global_batch_size it counts global "
                "batches, on any number of devices."
            )


def changed_data(was: Sequence[Mapping[str, Plain]], now: Sequence[Mapping[str, Plain]]) -> str:
    """Return how the data differs from what it was; empty where it does not, or is not known."""
    if not was:
        return ""
    if len(was) != len(now):
        return f"{len(was)} training loaders when it was saved, {len(now)} now"
    differences = [
        f"{key} was {before[key]!r}, is {here.get(key)!r}"
        for before, here in zip(was, now, strict=True)
        for key in sorted(before)
        if before[key] != here.get(key)
    ]
    return "; ".join(differences)
