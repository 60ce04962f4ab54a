"""Behavior that may differ between GPUs and CPUs; the same tests run on both (``--device``)."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lightning_elastic_zero.checkpoint.manager import CheckpointManager
from lightning_elastic_zero.checkpoint.types import SaveRequest
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.engine import selftest_engine
from tests.support.checkpoints import (
    STEPS,
    Continued,
    Saved,
    StateComparison,
    assert_continues,
    load,
    train_and_save,
)
from tests.support.engines import DEEPSPEEDS, Engine, EngineCase, engine_of, train
from tests.support.fits import FitCase, fit
from tests.support.fixtures import OnDevice
from tests.support.oracle import differences, dump, expected_in
from tests.support.ranks import Pools, skip_without
from tests.support.tables import STALLS
from tests.trainer.test_half_precision import Held, differing, half, half_precision_fit, wanted_of

if TYPE_CHECKING:
    from tests.integrations._hf_programs import Run as HfRun

ROUNDS, MEASURED_BYTES = 4, 64 << 20


@contextmanager
def background_saves(engine: Engine, path: str) -> Iterator[tuple[CheckpointManager, Ranks]]:
    """Yield a manager that saves in the background of an engine's training, like the strategy."""
    from lightning_elastic_zero.engine.live import LiveEngine

    manager = CheckpointManager(Timeouts(), background=True)
    manager.start(LiveEngine(engine), engine.global_rank, [Path(path).parent])
    try:
        with closing(manager.training_ranks()) as ranks:
            yield manager, ranks
    finally:
        manager.stop(interrupted=False)


def save_in_background(saved: Saved) -> bool:
    """Save in the background of training; return whether the copy is in pinned memory.

    ``saved`` contains the oracle's dump of the state at the save.
    """
    from lightning_elastic_zero.engine.live import LiveEngine

    setup = saved.setup
    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, STEPS)
        held = dump(engine, setup)
        with background_saves(engine, saved.path) as (manager, ranks):
            handle = LiveEngine(engine)
            manager.save_async(SaveRequest(handle, saved.path, {"epoch": STEPS}), ranks)
            train(engine, setup, STEPS, 2 * STEPS)
            assert manager._writer is not None
            block = manager._writer._snapshotter._memory._block
            pinned = block is not None and block.is_pinned()
            manager.wait_until_finished(ranks)
        if held is not None:
            torch.save(held, saved.dump_path)
    return pinned


@dataclass(frozen=True)
class Stall:
    """The best of some rounds, in seconds."""

    stall_s: float
    """Time for which training waited for a background save."""
    copy_s: float
    """Time to copy as many bytes from the device to the host, pinned if possible."""


def stall_and_copy(folder: str) -> Stall:
    """Measure both in turn; the first round warms up."""
    from lightning_elastic_zero.engine.live import LiveEngine

    model = selftest_engine.TrialModel(1, state_bytes=MEASURED_BYTES)
    with (
        selftest_engine.trial_engine(model, 3) as engine,
        background_saves(engine, f"{folder}/0.ckpt") as (manager, ranks),
    ):
        selftest_engine.train(engine, 0, 1)
        held = torch.zeros(MEASURED_BYTES, dtype=torch.uint8, device=engine.device)
        host = torch.zeros(MEASURED_BYTES, dtype=torch.uint8, pin_memory=held.is_cuda)
        stalls, copies = [], []
        for number in range(ROUNDS):
            began = time.perf_counter()
            host.copy_(held)
            copies.append(time.perf_counter() - began)
            path = f"{folder}/{number}.ckpt"
            manager.save_async(SaveRequest(LiveEngine(engine), path), ranks)
            selftest_engine.train(engine, number + 1, number + 2)
            manager.wait_until_finished(ranks)
            assert manager.last_save is not None
            stalls.append(manager.last_save.waited_s)
    return Stall(min(stalls[1:]), min(copies[1:]))


pytestmark = [pytest.mark.engine, pytest.mark.device]

PRECISIONS = [
    *(EngineCase(1, zero, precision) for zero in "0123" for precision in ("bf16", "fp16")),
    EngineCase(1, "B", "bf16"),
    EngineCase(2, "1", "fp16"),
    EngineCase(2, "2", "bf16"),
    EngineCase(2, "3", "bf16"),
    EngineCase(2, "B", "bf16"),
]
PARTIAL = EngineCase(1, "3", offload=True, ratio=0.5, optimizer="CPUAdam", sub_group=700)
OFFLOADED = [
    EngineCase(1, "1", offload=True),
    EngineCase(1, "2", "fp16", offload=True, pinned=False),
    EngineCase(2, "2", "bf16", offload=True),
    EngineCase(1, "3", "bf16", offload=True, offloaded_weights=True),
    EngineCase(2, "3", "bf16", offload=True, offloaded_weights=True),
    PARTIAL,
    replace(PARTIAL, world=2),
]
FUSED = [
    EngineCase(1, "0", "fp16", optimizer="FusedAdam"),
    EngineCase(1, "3", "bf16", optimizer="FusedAdam"),
    EngineCase(2, "1", optimizer="fused"),
    EngineCase(1, "3", "bf16", optimizer="fused"),
    EngineCase(1, "2", "bf16", optimizer="fused SGD"),
    EngineCase(1, "1", optimizer="ASGD"),
    EngineCase(2, "3", optimizer="ASGD"),
    EngineCase(1, "1", optimizer="fused capturable"),
    # On a CPU, torch accepts capturable=True only for its fused kernel.
    *(
        pytest.param(setup, marks=pytest.mark.gpu)
        for setup in (
            EngineCase(2, "1", optimizer="capturable"),
            EngineCase(1, "3", optimizer="capturable"),
            EngineCase(1, "1", optimizer="foreach capturable"),
            EngineCase(2, "3", optimizer="foreach capturable"),
        )
    ),
]


@pytest.mark.long
@pytest.mark.parametrize("setup", [*PRECISIONS, *OFFLOADED, *FUSED], ids=str)
def test_a_run_continues_bit_for_bit(
    setup: EngineCase, device_pools: Pools, on_device: OnDevice[Continued], tmp_path: Path
) -> None:
    """Losses and state after a resume on the device are those of the uninterrupted run."""
    if setup.optimizer in DEEPSPEEDS:
        skip_without(DEEPSPEEDS[setup.optimizer][2], device_pools)
    assert_continues(on_device, setup, tmp_path)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (EngineCase(2, "1", "fp16"), EngineCase(1, "1", "fp16")),
        (EngineCase(1, "2", "bf16"), EngineCase(2, "3", "bf16")),
        (EngineCase(2, "3", "bf16", sub_group=700), EngineCase(1, "2", "bf16", offload=True)),
        (EngineCase(1, "2", "bf16"), EngineCase(3, "3", "bf16")),
    ],
    ids=str,
)
def test_another_number_of_devices(
    source: EngineCase,
    target: EngineCase,
    on_device: OnDevice[StateComparison | None],
    tmp_path: Path,
) -> None:
    """The state of two devices is restored on one, and that of one on two and three."""
    saved = Saved(source, str(tmp_path / "saved.ckpt"))
    on_device(source.world, partial(train_and_save, saved))
    assert_same(on_device(target.world, partial(load, target, saved, steps_before=1)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("on_processors", "there"),
    [
        (EngineCase(2, "0"), EngineCase(1, "0")),
        (EngineCase(2, "1", "fp16"), EngineCase(1, "1", "fp16")),
        (EngineCase(2, "3", "bf16", sub_group=700), EngineCase(1, "3", "bf16", persistence=100)),
        (
            EngineCase(2, "1", offload=True),
            EngineCase(1, "3", offload=True, offloaded_weights=True),
        ),
    ],
    ids=str,
)
def test_two_cpu_ranks_to_one_device_and_back(
    on_processors: EngineCase,
    there: EngineCase,
    pools: Pools,
    on_device: OnDevice[StateComparison | None],
    tmp_path: Path,
) -> None:
    """Two CPU ranks get back the state that they saved, after it was on a device."""
    first = Saved(on_processors, str(tmp_path / "first.ckpt"))
    second = Saved(there, str(tmp_path / "second.ckpt"))
    pools.run(2, partial(train_and_save, first))
    verdicts = on_device(1, partial(load, there, first, steps_before=1, copy_to=second))
    assert not differences(expected_in(first.dump(), on_processors, there), second.dump())
    assert_same(verdicts)
    assert_same(pools.run(2, partial(load, on_processors, second, steps_before=1)))


@pytest.mark.long
@pytest.mark.parametrize(
    "setup",
    [
        EngineCase(1, "1", "fp16"),
        EngineCase(1, "0", optimizer="fused"),
        EngineCase(2, "3", "bf16", sub_group=700),
        EngineCase(1, "2", "bf16", offload=True),
        EngineCase(2, "1", "fp16", offload=True),
    ],
    ids=str,
)
def test_a_save_in_the_background_of_training(
    setup: EngineCase,
    device: str,
    device_pools: Pools,
    on_device: OnDevice[bool],
    tmp_path: Path,
) -> None:
    """The save has the state at its call, although the run has continued.

    State on a GPU is copied into pinned memory: other copies would not run in parallel with
    training.
    """
    saved = Saved(setup, str(tmp_path / "behind.ckpt"))
    pinned = on_device(setup.world, partial(save_in_background, saved))
    assert_same(device_pools.run(setup.world, partial(load, setup, saved)))
    if not setup.offload:
        assert pinned == [device == "cuda"] * setup.world


@pytest.mark.long
def test_a_fit_goes_to_the_device_and_back(
    pools: Pools, on_device: OnDevice[dict[str, Any]], tmp_path: Path
) -> None:
    """The strategy's own background saves: each resume starts with the saved weights."""
    plan = FitCase(str(tmp_path / "0"), strategy={"async_save": True})
    saved = pools.run(2, partial(fit, plan))[0]
    for turn, (stage, run, world) in enumerate([(3, on_device, 1), (1, pools.run, 2)], start=1):
        path, root = f"{plan.root}/last.ckpt", str(tmp_path / str(turn))
        plan = replace(plan, root=root, stage=stage, epochs=turn + 1, ckpt_path=path, seed=turn)
        resumed = run(world, partial(fit, plan))[0]
        assert resumed["start"] == saved["end"] != resumed["end"]
        saved = resumed


@pytest.mark.long
def test_a_fit_in_fp16_goes_to_the_device_and_back(
    pools: Pools, on_device: OnDevice[tuple[Held, Held]], tmp_path: Path
) -> None:
    """``16-true`` of a Trainer: each resume has the saved state, including the loss scale."""
    plan = half(tmp_path / "0", "16-true", 1)
    ends = pools.run(2, partial(half_precision_fit, plan))
    for turn, (stage, run, world) in enumerate([(3, on_device, 1), (2, pools.run, 2)], start=1):
        path = f"{plan.root}/last.ckpt"
        root = str(tmp_path / str(turn))
        resumed = replace(plan, root=root, stage=stage, epochs=turn + 1, ckpt_path=path, seed=turn)
        saved, found = ends[0][1], run(world, partial(half_precision_fit, resumed))
        for start, _ in found:
            assert not differing(wanted_of(saved, plan, resumed, start), start)
        plan, ends = resumed, found


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_hugging_face_trainer_goes_to_the_device_and_back(
    stage: int, pools: Pools, on_device: OnDevice[HfRun], tmp_path: Path
) -> None:
    """Each resume has the saved state, and the samples and rates of the uninterrupted run."""
    folder = tmp_path / "0"
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from tests.integrations._hf_programs import TrainerCase
    from tests.integrations._hf_programs import train as train_by_trainer

    whole = saved = pools.run(
        2, partial(train_by_trainer, TrainerCase(str(folder), stage, state_at=(10,)))
    )[0]
    for turn, (run, world, step) in enumerate([(on_device, 1, 10), (pools.run, 2, 15)], start=1):
        copy = tmp_path / str(turn)
        shutil.copytree(folder, copy)
        case = TrainerCase(
            str(copy), stage, resume=str(copy / f"checkpoint-{step}"), state_at=(15,)
        )
        found = run(world, partial(train_by_trainer, case))[0]
        assert found.first_state.keys() == saved.states[step].keys() != set()
        for name, tensor in saved.states[step].items():
            assert torch.equal(found.first_state[name], tensor), name
        assert found.samples == {s: whole.samples[s] for s in range(step + 1, 17)}
        assert found.rates == {s: whole.rates[s] for s in range(step + 1, 17)}
        folder, saved = copy, found


@pytest.mark.long
def test_the_stall_is_measured_with_a_copy(
    device: str, on_device: OnDevice[Stall], tmp_path: Path
) -> None:
    """The end of the test run prints both in a table; no time fails the test."""
    (found,) = on_device(1, partial(stall_and_copy, str(tmp_path)))
    assert found.stall_s > 0 < found.copy_s
    STALLS.count(device, "MiB", MEASURED_BYTES >> 20)
    STALLS.count(device, "µs of stall", round(found.stall_s * 1e6))
    STALLS.count(device, "µs of a copy", round(found.copy_s * 1e6))


def assert_same(verdicts: Sequence[object]) -> None:
    """Assert that the oracle, on rank 0, has found no difference."""
    assert isinstance(verdicts[0], StateComparison)
    verdicts[0].assert_same()
