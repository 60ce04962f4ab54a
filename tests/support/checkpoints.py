"""Functions that ranks run to save, load and compare checkpoints of real engines."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from tests.support.engines import BUFFERS, Engine, EngineCase, engine_of, inner_of, train
from tests.support.oracle import (
    PADDING,
    Dump,
    ReferenceComparison,
    compare_with_reference,
    differences,
    dump,
    expected_in,
    held_values,
    positions,
    tensors_in,
    unrounded,
)
from tests.support.processes import PROMPT_TIMEOUT_S

STEPS = 3
"""Steps trained before a save."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint, with the oracle's dump of the engine that saved it."""

    setup: EngineCase
    path: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dump_path(self) -> str:
        return f"{self.path}.dump"

    def dump(self) -> Dump:
        found: Dump = torch.load(self.dump_path, weights_only=True)
        return found


@dataclass(frozen=True)
class StateComparison:
    tensors: int
    """Number of tensors compared."""
    differing: dict[str, int]
    """Number of differing bits of each entry that differs."""
    unrounded: list[str]
    """Weights that differ from their rounded masters."""

    def assert_same(self) -> None:
        assert self.tensors > 0
        assert not self.differing
        assert not self.unrounded


def compare_states(wanted: Dump, found: Dump) -> StateComparison:
    wanted, found = comparable(wanted, found), comparable(found, wanted)
    return StateComparison(tensors_in(wanted), differences(wanted, found), unrounded(found))


def comparable(held: Dump, other: Dump) -> Dump:
    """Keep the loss scaler entries that both dumps have; BF16_Optimizer has none."""
    one, two = ({k for k in d if k.startswith("scaler/")} for d in (held, other))
    changes = [
        d.get("scaler/dynamic", d.get("scaler/dynamic_loss_scale", "False")) for d in (held, other)
    ]
    if one == two and changes[0] == changes[1]:
        return held
    shared = one & two & {"scaler/grad_scaler"}
    if changes == ["True", "True"]:
        shared |= {"scaler/cur_iter", "scaler/cur_scale", "scaler/last_overflow_iter"}
    return {k: v for k, v in held.items() if not k.startswith("scaler/") or k in shared}


def save(engine: Engine, saved: Saved) -> None:
    from lightning_elastic_zero.api import save_checkpoint

    before = dump(engine, saved.setup)
    save_checkpoint(engine, saved.path, {"epoch": STEPS}, **saved.options)
    after = dump(engine, saved.setup)
    if before is not None and after is not None:
        assert not differences(before, after), "saving changed the engine"
        torch.save(before, saved.dump_path)


def train_and_save(saved: Saved, *, steps: int = STEPS, seed: int = 0) -> None:
    with engine_of(saved.setup, seed) as engine:
        train(engine, saved.setup, 0, steps)
        save(engine, saved)


def load(
    setup: EngineCase,
    saved: Saved,
    *,
    options: Mapping[str, Any] | None = None,
    steps_before: int = 0,
    copy_to: Saved | None = None,
    late: bool = False,
) -> StateComparison | None:
    """Load into a run with another seed and hyperparameters; ``late`` uses the copy engine."""
    from lightning_elastic_zero.api import load_checkpoint
    from tests.support.late_saves import load_late, save_late

    with engine_of(setup, 7, tilt=3.0) as engine:
        train(engine, setup, 100, 100 + steps_before)
        if late:
            client_state = load_late(engine, saved)
        else:
            client_state = load_checkpoint(engine, saved.path, **(options or {})).client_state
        assert client_state["epoch"] == STEPS
        assert engine.module.scratch.tolist() == [7.0] * 3, "scratch is not persistent"
        assert_complete_windows(engine)
        assert_zero_padding(engine, setup)
        found = dump(engine, setup)
        if copy_to is not None:
            (save_late if late else save)(engine, copy_to)
    if found is None:
        return None
    wanted = expected_in(saved.dump(), saved.setup, setup)
    if saved.setup.optimizer != setup.optimizer:
        wanted, found = of_any_adam(wanted), of_any_adam(found)
    return compare_states(wanted, found)


def of_any_adam(held: Dump) -> Dump:
    """Keep the state that all Adam variants share; DeepSpeed's count steps as integers."""
    shared = ("/lr", "/betas", "/eps", "/weight_decay", "/initial_lr")
    held = {k: v for k, v in held.items() if not k.startswith("group/") or k.endswith(shared)}
    steps = {
        key: str(float(value.removeprefix("tensor(").removesuffix(")")))
        for key, value in held.items()
        if key.startswith("scalar/step/")
    }
    return held | steps


def assert_complete_windows(engine: Engine) -> None:
    assert engine.micro_steps == engine.global_steps * engine.gradient_accumulation_steps()


def assert_zero_padding(engine: Engine, setup: EngineCase) -> None:
    """Fail unless the padding of masters and states is zero; it was NaN before."""
    for places, (flat, states) in zip(positions(setup), held_values(engine, setup), strict=True):
        for held in (flat, *states.values()):
            if torch.is_tensor(held) and held.ndim and held.shape == flat.shape:
                assert not held.flatten()[places == PADDING].any()


def fresh(setup: EngineCase, saved: Saved, *, steps: int) -> StateComparison | None:
    """Compare an engine that loads nothing: the negative control."""
    with engine_of(setup, 7, tilt=3.0) as engine:
        train(engine, setup, 100, 100 + steps)
        found = dump(engine, setup)
    if found is None:
        return None
    return compare_states(expected_in(saved.dump(), saved.setup, setup), found)


def found_after_load(
    setup: EngineCase,
    saved: Saved,
    options: Mapping[str, Any],
    *,
    steps_before: int = 0,
    steps_after: int = 0,
) -> tuple[Dump, Dump] | None:
    """Return dumps of a run from before the load, and from after it (and after more steps)."""
    from lightning_elastic_zero.api import load_checkpoint

    with engine_of(setup, 7, tilt=3.0) as engine:
        train(engine, setup, 100, 100 + steps_before)
        before = dump(engine, setup)
        load_checkpoint(engine, saved.path, **options)
        train(engine, setup, STEPS, STEPS + steps_after)
        after = dump(engine, setup)
    return None if before is None or after is None else (before, after)


def found_by_deepspeed(setup: EngineCase, saved: Saved) -> Dump | None:
    with engine_of(setup, 7) as engine:
        if setup.zero == "3":
            assert hasattr(engine.optimizer, "_elastic_load_state_dict"), "not pull request 8031"
        scaler = engine.optimizer.loss_scaler
        path, client_state = engine.load_checkpoint(saved.path)
        assert path
        assert client_state["epoch"] == STEPS
        # As docs/format.md recommends.
        vars(scaler).update(client_state["elastic_zero"]["loss_scaler"])
        engine.optimizer.loss_scaler = scaler
        for state in inner_of(engine).state.values():
            # DeepSpeed's ZeRO-1/2 loader adds a dimension to the scalar step of torch optimizers.
            if torch.is_tensor(step := state.get("step")) and step.numel() == 1:
                state["step"] = step.view(())
        return dump(engine, setup)


def saved_after_deepspeed(setup: EngineCase, saved: Saved, ours: str, theirs: str) -> Dump | None:
    """Load with DeepSpeed, train on, save with both libraries; return the saved state."""
    from lightning_elastic_zero.api import save_checkpoint

    with engine_of(setup, 7) as engine:
        assert engine.load_checkpoint(saved.path)[0]
        train(engine, setup, STEPS, STEPS + 2)
        save_checkpoint(engine, ours)
        engine.save_checkpoint(theirs)
        for state in inner_of(engine).state.values():
            if torch.is_tensor(step := state.get("step")):
                state["step"] = step.reshape(())
        return dump(engine, setup)


@dataclass(frozen=True)
class Refusal:
    error: str
    message: str
    seconds: float
    unchanged: bool
    """The engine's state was the same before and after."""


def refusal(
    setup: EngineCase,
    act: Callable[[Engine], object],
    *,
    steps: int = 1,
    look: bool = True,
    prepare: Callable[[Engine], object] | None = None,
) -> Refusal:
    """Call ``act``, which must be refused, after training; compare the state before and after."""
    with engine_of(setup, 7, tilt=3.0) as engine:
        if prepare is not None:
            prepare(engine)
        train(engine, setup, 100, 100 + steps)
        before = dump(engine, setup) if look else None
        began = time.monotonic()
        try:
            act(engine)
        except Exception as error:  # noqa: BLE001 - the test checks it
            raised: Exception | None = error
        else:
            raised = None
        seconds = time.monotonic() - began
        after = dump(engine, setup) if look else None
    changed = before is not None and after is not None and differences(before, after)
    return Refusal(type(raised).__name__, str(raised), seconds, not changed)


@dataclass(frozen=True)
class Loading:
    path: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, engine: Engine) -> object:
        from lightning_elastic_zero.api import load_checkpoint

        return load_checkpoint(engine, self.path, **self.options)


class LoadingWithoutSchedule(Loading):
    """A load that must not change the engine's scheduler and learning rates."""

    def __call__(self, engine: Engine) -> object:
        def rates() -> object:
            lrs = [group["lr"] for group in engine.optimizer.param_groups]
            return dict(engine.lr_scheduler.state_dict()), lrs

        before = rates()
        loaded = super().__call__(engine)
        assert rates() == before
        return loaded


@dataclass(frozen=True)
class Saving:
    path: str

    def __call__(self, engine: Engine) -> object:
        from lightning_elastic_zero.api import save_checkpoint

        return save_checkpoint(engine, self.path)


def evaluated_weights(setup: EngineCase, saved: Saved) -> dict[str, Any]:
    import deepspeed

    from lightning_elastic_zero.api import load_checkpoint

    config = setup.config()
    if setup.zero == "0":
        del config["zero_optimization"]
    engine, *_ = deepspeed.initialize(model=setup.model(7), config=config, dist_init_required=False)
    load_checkpoint(engine, saved.path)
    parameters = dict(engine.module.named_parameters())
    buffers = dict(engine.module.named_buffers())
    context = (
        deepspeed.zero.GatheredParameters(list(parameters.values()))
        if setup.zero == "3"
        else contextlib.nullcontext()
    )
    with context:
        found = {f"weight/{name}": p.tolist() for name, p in parameters.items()}
    engine.destroy()
    return {**found, **{f"buffer/{name}": buffers[name].tolist() for name in BUFFERS}}


def group_origins_of(
    setup: EngineCase, path: str, options: dict[str, Any]
) -> tuple[int | None, ...]:
    from lightning_elastic_zero.api import load_checkpoint

    with engine_of(setup, 7) as engine:
        return load_checkpoint(engine, path, **options).group_origins


def save_different_buffers(setup: EngineCase, path: str) -> None:
    """Save a run whose last rank has a buffer of another shape."""
    from lightning_elastic_zero.api import save_checkpoint

    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, 1)
        if engine.global_rank == setup.world - 1:
            engine.module.average = torch.full((1,), 0.5)
        save_checkpoint(engine, path)


@dataclass(frozen=True)
class Scheduler:
    kind: str

    def __call__(self, engine: Engine) -> None:
        from deepspeed.runtime.lr_schedules import WarmupLR

        inner = inner_of(engine)
        if self.kind == "warm-up":
            engine.lr_scheduler = WarmupLR(inner, warmup_num_steps=10)
        else:
            engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)


LAST = 2 * STEPS + 1
"""The last step of all runs."""


@dataclass(frozen=True)
class Continued:
    losses: tuple[list[float], list[float]]
    differing: dict[str, int]

    def assert_same(self) -> None:
        uninterrupted, resumed = self.losses
        assert resumed == uninterrupted
        assert not self.differing


def same_world(setup: EngineCase, saved: Saved) -> Continued:
    """Continue once after the save, and once after a load of the checkpoint."""
    from lightning_elastic_zero.api import load_checkpoint

    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, STEPS)
        save(engine, saved)
        uninterrupted = train(engine, setup, STEPS, LAST)
        wanted = dump(engine, setup)
    with engine_of(setup, 7, tilt=3.0) as engine:
        load_checkpoint(engine, saved.path)
        resumed = train(engine, setup, STEPS, LAST)
        found = dump(engine, setup)
    differing = differences(wanted, found) if wanted and found else {}
    return Continued((uninterrupted, resumed), differing)


def uninterrupted_masters(setup: EngineCase, path: str) -> None:
    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, LAST)
        _save_masters(dump(engine, setup), path)


def resumed_masters(setup: EngineCase, saved: Saved, path: str) -> ReferenceComparison | None:
    """Resume on another world, save the masters, and compare with a run from the oracle's state."""
    from lightning_elastic_zero.api import load_checkpoint

    with engine_of(setup, 7, tilt=3.0) as engine:
        load_checkpoint(engine, saved.path)
        losses = train(engine, setup, STEPS, LAST)
        found = dump(engine, setup)
    _save_masters(found, path)
    wanted = expected_in(saved.dump(), saved.setup, setup) if found is not None else None
    return compare_with_reference(setup, STEPS, wanted, (losses, found), steps=LAST - STEPS)


def _save_masters(found: Dump | None, path: str) -> None:
    if found is not None:
        torch.save({k: v for k, v in found.items() if k.startswith("master/")}, path)


def differing_files(one: Path, other: Path) -> list[str]:
    return [*_differing(files_of(one), files_of(other), "")]


def files_of(checkpoint: Path) -> dict[str, Any]:
    """Read all saved values except the ids of the save."""
    found: dict[str, Any] = {}
    for file in sorted(checkpoint.rglob("*.pt")):
        found[file.name] = _without_ids(torch.load(file, weights_only=True))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    return found | {
        "manifest": {k: v for k, v in manifest.items() if k not in ("save_id", "files", "digest")}
    }


def _without_ids(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return (
            str(tree.dtype),
            tuple(tree.shape),
            tree.contiguous().view(-1).view(torch.uint8).tolist(),
        )
    if isinstance(tree, dict):
        return {k: _without_ids(v) for k, v in tree.items() if k not in ("save_id", "pickle")}
    if isinstance(tree, (list, tuple)):
        return [_without_ids(v) for v in tree]
    return tree


def _differing(one: Any, other: Any, path: str) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            yield from _differing(one.get(key), other.get(key), f"{path}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from _differing(*pair, f"{path}/{index}")
    elif one != other:
        yield path


RunOnRanks: TypeAlias = Callable[[int, Callable[[], Any]], list[Any]]
"""Runs a call on all ranks of a world, as ``Pools.run`` does."""


def assert_restored(run: RunOnRanks, target: EngineCase, saved: Saved, **options: Any) -> None:
    comparison = run(target.world, partial(load, target, saved, **options))[0]
    assert comparison is not None
    comparison.assert_same()


def assert_refused(
    run: RunOnRanks,
    target: EngineCase,
    act: Callable[[Engine], object],
    *texts: str,
    error: str = "CheckpointMismatchError",
    **options: Any,
) -> list[str]:
    """Fail unless every rank refuses with these texts in bounded time and keeps its state.

    Returns each rank's message.
    """
    found = run(target.world, partial(refusal, target, act, **options))
    assert [refused.error for refused in found] == [error] * target.world, found
    assert all(text in refused.message for text in texts for refused in found), found[0].message
    assert all(refused.seconds < PROMPT_TIMEOUT_S for refused in found)
    assert all(refused.unchanged for refused in found)
    return [refused.message for refused in found]


def assert_continues(
    run: RunOnRanks,
    setup: EngineCase,
    folder: Path,
    program: Callable[[EngineCase, Saved], Continued] = same_world,
) -> None:
    saved = Saved(setup, str(folder / "half.ckpt"))
    for continued in run(setup.world, partial(program, setup, saved)):
        continued.assert_same()
