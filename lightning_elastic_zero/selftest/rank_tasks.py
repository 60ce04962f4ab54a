"""The tasks of the ranks of a world: save, load, measure, and one of them dies."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.api import engine_handle, load_checkpoint, save_checkpoint
from lightning_elastic_zero.checkpoint.manager import CheckpointManager
from lightning_elastic_zero.checkpoint.types import SaveOptions
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.coordination.ranks import connect_ranks
from lightning_elastic_zero.core.manifest import STAGES
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.engine.selftest_engine import (
    TrialModel,
    gather_full_state,
    join_ranks,
    train,
    trial_engine,
)
from lightning_elastic_zero.errors import ElasticZeroError
from lightning_elastic_zero.selftest.checks import (
    GOOD,
    MODES,
    NEXT_SAVE,
    NEXT_STAGE,
    checkpoint_file,
    returned_name,
    saved_name,
)
from lightning_elastic_zero.selftest.kill_during_save import die_during_save
from lightning_elastic_zero.selftest.throughput import measure
from lightning_elastic_zero.selftest.worker_protocol import Request, Sender, State

CLIENT = {"epoch": 3, "samples": (1, 2, 3), "name": "selftest"}
"""What stands for a trainer's state."""

_OTHER_SEED, _OTHER_RATES = 7, 3.0


def save_all(request: Request, sender: Sender) -> None:
    """Save at each stage, blocking and in the background; then measure; then die, on one rank."""
    join_ranks(request.device, request.collective_timeout_s)
    folder = Path(request.folder)
    for stage in STAGES:
        with trial_engine(TrialModel(1), stage) as engine:
            train(engine, 0, 2)
            name = saved_name(stage, "blocking")
            with _checking(sender, name):
                state = _digests(engine)
                save_checkpoint(engine, folder / checkpoint_file(name), CLIENT)
                _require_same(state, _digests(engine), "saving has changed the engine")
                _tell_state(sender, name, state)
            train(engine, 2, 3)
            name = saved_name(stage, "background")
            with _checking(sender, name):
                state = _digests(engine)
                _save_behind(engine, folder / checkpoint_file(name))
                _tell_state(sender, name, state)
    measure(request, sender)
    with trial_engine(TrialModel(1), 1) as engine:
        train(engine, 0, 2)
        with _checking(sender, GOOD):
            _tell_state(sender, GOOD, _digests(engine))
            save_checkpoint(engine, folder / checkpoint_file(GOOD), CLIENT)
        train(engine, 2, 3)
        die_during_save(engine, folder, sender)


def load_all(request: Request, sender: Sender) -> None:
    """Load all of it into other engines, each at its stage; save once more what was loaded."""
    join_ranks(request.device, request.collective_timeout_s)
    folder = Path(request.folder)
    for stage in STAGES:
        with trial_engine(TrialModel(_OTHER_SEED), stage, tilt=_OTHER_RATES) as engine:
            for mode in MODES:
                train(engine, 100, 101)
                name = saved_name(stage, mode)
                if name not in request.expected:
                    continue
                with _checking(sender, name):
                    _load(engine, folder, name, request.expected[name])
                if mode == "blocking":
                    again = returned_name(stage)
                    with _checking(sender, again):
                        _tell_state(sender, again, _digests(engine))
                        save_checkpoint(engine, folder / checkpoint_file(again), CLIENT)
    if GOOD not in request.expected:
        return
    with trial_engine(TrialModel(_OTHER_SEED), 1, tilt=_OTHER_RATES) as engine:
        with _checking(sender, GOOD):
            _load(engine, folder, GOOD, request.expected[GOOD])
        with _checking(sender, NEXT_SAVE):
            save_checkpoint(engine, folder / checkpoint_file(GOOD), CLIENT)


def load_again(request: Request, sender: Sender) -> None:
    """Load what the second world has saved, at another stage."""
    join_ranks(request.device, request.collective_timeout_s)
    for stage in STAGES:
        name = returned_name(stage)
        if name not in request.expected:
            continue
        with trial_engine(TrialModel(_OTHER_SEED), NEXT_STAGE[stage], tilt=_OTHER_RATES) as engine:
            train(engine, 100, 101)
            with _checking(sender, name):
                _load(engine, Path(request.folder), name, request.expected[name])


TASKS: Mapping[str, Callable[[Request, Sender], None]] = {
    task.__name__: task for task in (save_all, load_all, load_again)
}


def _save_behind(engine: Any, path: Path) -> None:
    """Save in the background, as the strategy does, while the engine takes a step."""
    handle = engine_handle(engine)
    manager = CheckpointManager(Timeouts(), background=True)
    manager.start(handle, engine.global_rank, [path.parent])
    try:
        with closing(manager.training_ranks()) as ranks:
            manager.save_async(handle, path, ranks, CLIENT, SaveOptions())
            train(engine, 3, 4)
            manager.wait_until_finished(ranks)
    finally:
        manager.stop(interrupted=False)


def _load(
    engine: Any,
    folder: Path,
    name: str,
    expected: State,
) -> None:
    """Load a checkpoint, and compare all that the engine then holds.

    Raises:
        ElasticZeroError: something differs.
    """
    result = load_checkpoint(engine, folder / checkpoint_file(name))
    _require_same(expected, _digests(engine), "after the load these are not what was saved")
    if {key: result.client_state.get(key) for key in CLIENT} != CLIENT:
        msg = f"the trainer's state came back as {result.client_state}, not as {CLIENT}"
        raise ElasticZeroError(msg)


def _digests(engine: Any) -> dict[str, str]:
    """Return what an engine holds, each tensor by its type, shape and a digest of its bits.

    Collective.

    Raises:
        RanksError: on some rank, weights are not their masters; on all of them, since all make the
            same calls after it.
    """
    held: dict[str, torch.Tensor | str] = {}
    problem: ElasticZeroError | None = None
    try:
        held = gather_full_state(engine)
    except ElasticZeroError as error:
        problem = error

    def agree() -> None:
        if problem is not None:
            raise problem

    with closing(connect_ranks(Timeouts(), "elastic-zero selftest state")) as ranks:
        ranks.run_all("read what the engine holds", agree)
    return {
        name: _digest(value) if isinstance(value, torch.Tensor) else value
        for name, value in held.items()
    }


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    number = hashlib.blake2b(data, digest_size=16).hexdigest()
    return f"{tensor.dtype} {tuple(tensor.shape)} {number}"


def _require_same(wanted: State, found: State, what: str) -> None:
    """Compare two states.

    Raises:
        ElasticZeroError: they differ; the message names what does.
    """
    names = sorted(wanted.keys() | found.keys())
    if differing := [n for n in names if wanted.get(n) != found.get(n)]:
        msg = f"{what}: {len(differing)} of {len(names)} differ: {format_names(differing, 4)}"
        raise ElasticZeroError(msg)


def _tell_state(sender: Sender, name: str, state: State) -> None:
    """Report what is saved, on one rank: all have the same but for their buffers."""
    if sender.rank == 0:
        sender.saved(name, state)


@contextmanager
def _checking(sender: Sender, check: str) -> Iterator[None]:
    """Make a check in here: an error of the library's, which all ranks raise, is told."""
    try:
        yield
    except (ElasticZeroError, OSError) as error:
        sender.checked(check, f"{type(error).__name__}: {error}")
    else:
        sender.checked(check)
