"""What ranks do whose states are put elsewhere by hand, or lie in files."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.engines import Engine, Setup, engine_of, swap_folder, train


@dataclass(frozen=True)
class OffloadedSave:
    """A run that saved before, while, and after its states were on the host."""

    refusal: str
    """How a load was refused meanwhile."""
    losses: list[float]
    """After the reload."""


def save_offloaded(setup: Setup, folder: str, states: tuple[str, ...]) -> OffloadedSave:
    """Save, offload states, save again, reload them and train on."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
    from deepspeed.runtime.zero.offload_states import offload_adam_states, reload_adam_states

    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint
    from lightning_elastic_zero.errors import ElasticZeroError

    model = setup.model(0)
    if setup.zero == "3":  # DeepSpeed's ``offload_states`` fails with frozen weights.
        model.frozen = torch.nn.Identity()  # type: ignore[assignment]
    with engine_of(setup, 0, model=model) as engine:
        train(engine, setup, 0, 2)
        save_checkpoint(engine, f"{folder}/before.ckpt")
        engine.offload_states(include=[OffloadStateTypeEnum(state) for state in states])
        if setup.zero == "3":  # It would do so by itself for FusedAdam.
            offload_adam_states(engine.optimizer.optimizer, "cpu")
        save_checkpoint(engine, f"{folder}/while.ckpt")
        try:
            load_checkpoint(engine, f"{folder}/before.ckpt")
        except ElasticZeroError as error:
            refusal = f"{type(error).__name__}: {error}"
        engine.reload_states()
        if setup.zero == "3":
            reload_adam_states(engine.optimizer.optimizer, "cpu")
        save_checkpoint(engine, f"{folder}/after.ckpt")
        load_checkpoint(engine, f"{folder}/while.ckpt")
        return OffloadedSave(refusal, train(engine, setup, 2, 4))


def rates_of_both(setup: Setup, path: str, *, saves: bool) -> list[tuple[float, float]]:
    """Save a run that a schedule has slowed down, or load it; return the rates of both.

    DeepSpeed's second one has its own for the first group, which no schedule changes.
    """
    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint

    with engine_of(setup, 0 if saves else 7, tilt=1.0 if saves else 3.0) as engine:
        optimizer = engine.optimizer
        if saves:
            for group in optimizer.optimizer.param_groups:
                group["lr"] /= 2
            train(engine, setup, 0, 1)
            save_checkpoint(engine, path)
        else:
            load_checkpoint(engine, path)
        main = optimizer.optimizer.param_groups
        backup = getattr(optimizer, "backup_optimizer", optimizer.optimizer).param_groups
        return [(one["lr"], other["lr"]) for one, other in zip(main, backup, strict=True)]


def called_before_any_change(setup: Setup) -> tuple[list[bool], bool]:
    """Return whether each call before a step found the masters as they were, and they changed."""
    from lightning_elastic_zero.engine.step import add_step_pre_hook

    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, 1)
        # As bits: padding is NaN.
        flats = engine.optimizer.fp32_partitioned_groups_flat
        masters = [flat.detach().view(torch.int32) for flat in flats]
        before = [flat.clone() for flat in masters]

        def as_before() -> bool:
            return all(torch.equal(flat, was) for flat, was in zip(masters, before, strict=True))

        found: list[bool] = []
        remove = add_step_pre_hook(engine, lambda: found.append(as_before()) if not found else None)
        train(engine, setup, 1, 2)
        remove()
        return found, not as_before()


def tensors_of(checkpoint: Path) -> dict[str, Any]:
    """Return every tensor of a checkpoint's files, by file and place."""
    found: dict[str, Any] = {}

    def walk(value: object, place: str) -> None:
        if isinstance(value, torch.Tensor):
            found[place] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{place}/{key}")
        elif isinstance(value, (list, tuple)):
            for index, inner in enumerate(value):
                walk(inner, f"{place}/{index}")

    for path in sorted(checkpoint.rglob("*_states.pt")):
        walk(torch.load(path, weights_only=True), path.name)
    return found


def elements_in_memory(setup: Setup, path: str) -> list[int]:
    """Load over a run that has stepped; return what of its swapped state is in memory.

    Before the load, after it, and after one more step.
    """
    from lightning_elastic_zero.api import load_checkpoint

    def held() -> int:
        optimizer = engine.optimizer
        flats = enumerate(optimizer.fp32_partitioned_groups_flat)
        swapped = [flat for i, flat in flats if optimizer._swappable_optimizer_subgroup(i)]
        assert swapped
        states = [v for f in swapped for v in optimizer.optimizer.state[f].values()]
        return sum(t.numel() for t in (*swapped, *states) if torch.is_tensor(t) and t.ndim)

    with engine_of(setup, 7) as engine:
        train(engine, setup, 0, 1)
        found = [held()]
        load_checkpoint(engine, path)
        found.append(held())
        train(engine, setup, 3, 4)
        return [*found, held()]


def save_without_swap_files(engine: Engine, path: str) -> object:
    """Lose the files of one rank, and save."""
    from lightning_elastic_zero.api import save_checkpoint

    if engine.global_rank == 1:
        shutil.rmtree(swap_folder())
    return save_checkpoint(engine, path)
