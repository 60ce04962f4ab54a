"""A Trainer whose nodes have an ``output_dir`` each continues exactly when nodes are lost."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_elastic_zero.checkpoint.manager import CheckpointManager
from lightning_elastic_zero.checkpoint.nodes import join_folder
from lightning_elastic_zero.coordination.ranks import OneRank
from lightning_elastic_zero.core.manifest import FORMAT, MANIFEST_NAME
from lightning_elastic_zero.storage import node_files
from lightning_elastic_zero.storage.node_store import NodeStore
from lightning_elastic_zero.storage.paths import NODES, StorePath
from tests.support.launch import Job, run_ranks
from tests.support.nodes import Nodes, count_changes, enter, needs_mounts
from tests.support.outcome import error_text
from tests.support.ranks import ForkServer, Pools

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from lightning_elastic_zero.integrations import node_folders
from lightning_elastic_zero.integrations.engines import LoopOptions
from tests.integrations._hf_programs import (
    Run,
    StoppedError,
    TrainerCase,
    close,
    failure_of,
    library_warnings,
    make_trainer,
    push,
    train,
    train_to_end,
)
from tests.integrations._sequence_programs import SharedCase, train_shared
from tests.integrations.test_trainer import assert_continues, assert_equal

pytestmark = pytest.mark.engine


@pytest.fixture
def nodes(tmp_path: Path, fork_server: ForkServer, hf_ranks: Pools) -> Nodes:
    needs_mounts()
    return Nodes(tmp_path, fork_server)


@pytest.fixture(scope="module")
def whole(hf_ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run of eight steps that was not interrupted, on a shared disk."""
    folder = tmp_path_factory.mktemp("whole")
    return hf_ranks.run(2, partial(train, case_in(folder, state_at=(*range(1, 9),))))[0]


def case_in(folder: Path, args: dict[str, Any] | None = None, **case: Any) -> TrainerCase:
    given = {"num_train_epochs": 1, **(args or {})}
    return TrainerCase(str(folder / "out"), dropout=0.1, args=given, **case)


def case_on(nodes: Nodes, args: dict[str, Any] | None = None, **case: Any) -> TrainerCase:
    return case_in(nodes.mounted, {"save_on_each_node": True, **(args or {})}, **case)


@dataclass(frozen=True)
class OnNodes:
    """A call in each rank, with its number on its node."""

    case: TrainerCase
    local_ranks: tuple[int, ...] = ()
    """Those of all ranks; empty: each is alone on its node."""
    call: Callable[[Any], Any] = field(default=train)

    def __call__(self) -> Any:
        local = self.local_ranks[int(os.environ["RANK"])] if self.local_ranks else 0
        os.environ["LOCAL_RANK"] = str(local)
        return self.call(self.case)


def saved(nodes: Nodes, node: int) -> list[str]:
    return sorted(path.parent.name for path in nodes.disk(node).glob("out/_nodes/*/manifest.json"))


@pytest.mark.essential
def test_a_lost_node_costs_no_step(nodes: Nodes, whole: Run) -> None:
    """Also rank 0's, with a new node in its place. The user's own files stay."""
    limit = {"save_total_limit": 1}
    with nodes.world(0, 1) as run:
        run(OnNodes(case_on(nodes, limit, stop_at=5)))
    assert saved(nodes, 0) == saved(nodes, 1) == ["checkpoint-5"]
    nodes.lose(0)
    out = nodes.disk(1) / "out"
    users = [out / "_nodes" / "checkpoint-5" / "notes.txt", out / "checkpoint-8" / "global_step"]
    for file in users:
        file.parent.mkdir(exist_ok=True)
        file.touch()
    with nodes.world(2, 1) as run:
        resumed, *_ = run(OnNodes(case_on(nodes, limit, resume=True)))
    assert_equal(resumed.first_state, whole.states[5])
    assert_continues(resumed, whole, range(6, 9))
    assert resumed.draws[6] == whole.draws[6]
    for node in (1, 2):
        assert saved(nodes, node) == ["checkpoint-8"]
        folders = nodes.disk(node).joinpath("out").glob("checkpoint-*")
        assert [path.name for path in folders] == ["checkpoint-8"]
    assert all(file.is_file() for file in users)


def train_as_scripts_do(case: TrainerCase) -> Run:
    """Resume from the last folder that this node has."""
    run, folder = Run(), Path(case.output_dir)
    with library_warnings() as run.warnings:
        trainer = make_trainer(case, run)
        found = get_last_checkpoint(case.output_dir) if folder.is_dir() else None
        with suppress(StoppedError):
            trainer.train(resume_from_checkpoint=found)
        close(trainer)
    return run


@pytest.mark.long
def test_a_new_node_has_no_last_folder(nodes: Nodes, whole: Run) -> None:
    with nodes.world(0, 1) as run:
        run(OnNodes(case_on(nodes, stop_at=5), call=train_as_scripts_do))
    with nodes.world(1, 2) as run:
        resumed, *_ = run(OnNodes(case_on(nodes), call=train_as_scripts_do))
    assert_continues(resumed, whole, range(6, 9))
    differs = f"({nodes.mounted}/out/checkpoint-5, None)"
    assert [differs in line for line in resumed.warnings].count(True) == 1


@pytest.mark.long
def test_a_start_on_a_new_node_without_a_folder_warns(nodes: Nodes) -> None:
    """Rank 0 may have looked for the last folder; where all nodes have it, the start is wanted."""
    with nodes.world(0, 1) as run:
        run(OnNodes(case_on(nodes, stop_at=5)))
    for on, warns in (((0, 1), False), ((2, 1), True)):
        with nodes.world(*on) as run:
            begun, *_ = run(OnNodes(case_on(nodes, stop_at=1)))
        text = f"although other nodes have {nodes.mounted}/out/checkpoint-5"
        assert any(text in line for line in begun.warnings) == warns


@pytest.mark.long
def test_fewer_and_more_nodes(
    nodes: Nodes, hf_ranks: Pools, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also several ranks on a node, and nodes whose ranks were others before.

    The state is that of ranks on a shared disk; dropout depends on their number.
    """
    shared = tmp_path_factory.mktemp("shared")
    args = {"save_steps": 2}
    steps = ((3, None, 2, (0, 0, 1), (0, 1, 0)), (1, 2, 4, (1,), (0,)), (2, 4, None, (2, 1), ()))
    for world, resume, stop, on, local_ranks in steps:
        more = {"resume": bool(resume), "stop_at": stop, "state_at": (4,)}
        wanted = hf_ranks.run(world, partial(train, case_in(shared, args, **more)))[0]
        with nodes.world(*on) as run:
            found = run(OnNodes(case_on(nodes, args, **more), local_ranks))[0]
        assert found.first_state.keys() == wanted.first_state.keys()
        if resume:
            assert_equal(found.first_state, wanted.first_state)
        assert found.samples == wanted.samples
        assert found.losses == wanted.losses
        assert found.draws == wanted.draws
    assert saved(nodes, 2) == saved(nodes, 1) == [f"checkpoint-{step}" for step in (2, 4, 6, 8)]


@pytest.mark.long
def test_tensor_ranks_become_data_ranks(nodes: Nodes, hf_ranks: Pools, tmp_path: Path) -> None:
    """Each data rank has drawn another count of random numbers, and continues with the next."""
    cut = SharedCase(f"{tmp_path}/whole", 2, samples=24, tensor=2, micro=(2, 3), state_at=(3,))
    whole = hf_ranks.run(4, partial(train_shared, cut))
    cut = replace(cut, output_dir=f"{nodes.mounted}/out", args={"save_on_each_node": True})
    with nodes.world(0, 0, 1, 1) as run:
        run(OnNodes(replace(cut, stop_at=3), (0, 1, 0, 1), train_shared))
    nodes.lose(1)
    with nodes.world(2, 0) as run:
        resumed = run(OnNodes(replace(cut, tensor=1, resume=True), (), train_shared))
    assert_equal(resumed[0].first_state, whole[0].states[3])
    assert resumed[0].samples == {4: whole[0].samples[4]}
    assert [r.draws[4] for r in resumed] == [whole[rank].draws[4] for rank in (0, 2)]


@pytest.mark.long
@pytest.mark.parametrize("async_save", [False, True])
def test_the_best_model_is_loaded_on_a_new_node(
    nodes: Nodes, tmp_path: Path, hf_ranks: Pools, *, async_save: bool
) -> None:
    """It is kept although ``save_total_limit`` would delete it, and is not on the node's disk."""
    args = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,  # The first one is the best.
        "save_total_limit": 3,
    }
    case: dict[str, Any] = {"evaluate": True, "options": {"async_save": async_save}}
    wanted = hf_ranks.run(2, partial(train, case_in(tmp_path, args, **case)))[0]
    with nodes.world(0, 1) as run:
        run(OnNodes(case_on(nodes, args, stop_at=4, **case)))
    nodes.lose(0)
    with nodes.world(2, 1) as run:
        found = run(OnNodes(case_on(nodes, args, resume=True, **case)))[0]
    assert_equal(found.states[-1], wanted.states[-1])
    kept = ["checkpoint-2", "checkpoint-6", "checkpoint-8"]
    assert saved(nodes, 1) == saved(nodes, 2) == kept


class LossOfSteps(TrainerCallback):
    """Replaces the losses of evaluations: of the saved ones, that of step 2 is the best."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        metrics["eval_loss"] = {2: 2.0, 5: 1.0}.get(state.global_step, 3.0)


def train_with_losses(case: TrainerCase) -> Run:
    run = Run()
    trainer = make_trainer(case, run)
    trainer.add_callback(LossOfSteps())
    return train_to_end(trainer, case, run)


@pytest.mark.long
def test_the_best_saved_model_is_kept(nodes: Nodes) -> None:
    """A step without a save is better."""
    args = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": False,
        "save_total_limit": 2,
    }
    case = case_on(nodes, args, evaluate=True, state_at=(2,))
    with nodes.world(0, 1) as run:
        found = run(OnNodes(case, call=train_with_losses))[0]
    assert_equal(found.states[-1], found.states[2])
    assert saved(nodes, 0) == saved(nodes, 1) == ["checkpoint-2", "checkpoint-8"]


def train_without_deletions(case: TrainerCase) -> Run:
    """Train as a run that is killed before each deletion; for new ranks."""
    CheckpointManager.remove = lambda *_: None  # type: ignore[method-assign]
    return train(case)


@pytest.mark.long
def test_a_resume_deletes_what_a_killed_run_was_about_to_delete(nodes: Nodes) -> None:
    """The first save needs its room. Going back to an older checkpoint deletes nothing before."""
    args = {"save_steps": 2, "save_total_limit": 1}
    with nodes.world(0, 1) as run:
        run(OnNodes(case_on(nodes, args, stop_at=4), call=train_without_deletions))
    assert saved(nodes, 0) == saved(nodes, 1) == ["checkpoint-2", "checkpoint-4"]
    back = str(nodes.mounted / "out/checkpoint-2")
    with nodes.world(0, 1) as run:
        run(OnNodes(case_on(nodes, args, stop_at=3, resume=back)))
    assert saved(nodes, 0) == saved(nodes, 1) == ["checkpoint-2", "checkpoint-4"]
    with nodes.world(1, 0) as run:
        run(OnNodes(case_on(nodes, args, stop_at=5, resume=True)))
    assert saved(nodes, 0) == saved(nodes, 1) == ["checkpoint-4"]


@pytest.mark.parametrize(
    ("resumed", "kept"), [("checkpoint-6", [2, 6]), ("checkpoint-4", [2, 4, 6]), ("", [2, 4, 6])]
)
@pytest.mark.cases(3)
def test_training_begins_with_the_best_and_the_newest_checkpoint(
    resumed: str, kept: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a save, if the newest is resumed. A moved folder has the best step only."""
    monkeypatch.setattr(node_folders, "check_room_to_train", lambda *_: None)
    folder = folder_on_one_node(tmp_path, 2, 4, 6)
    args = SimpleNamespace(
        output_dir=str(tmp_path), save_strategy="steps", save_only_model=False, save_total_limit=2
    )
    state = SimpleNamespace(best_model_checkpoint=None, best_global_step=2)
    loaded = tmp_path / resumed if resumed else None
    node_folders.prepare_saves(None, loaded, args, state, LoopOptions())
    assert isinstance(folder.store, NodeStore)
    folder.store.leave(folder.key)
    left = sorted(path.parent.name for path in tmp_path.glob("_nodes/*/manifest.json"))
    assert left == [f"checkpoint-{step}" for step in kept]


def folder_on_one_node(path: Path, *steps: int) -> StorePath:
    """Join the folder of a Trainer, and write the manifests of checkpoints in this order."""
    folder = StorePath(NODES, path.as_posix()[1:]) / "_nodes"
    join_folder(folder, OneRank(), 1)
    for step in steps:
        commit = {"format": FORMAT, "save_id": f"{step:032}", "files": []}
        manifest = folder / f"checkpoint-{step}" / MANIFEST_NAME
        folder.store.swap(manifest.key, json.dumps(commit).encode(), None)
    return folder


def test_a_run_that_went_back_deletes_what_it_has_left(tmp_path: Path) -> None:
    """It was resumed from step 10, which is older than those of the steps it repeats."""
    folder = folder_on_one_node(tmp_path, 10, 95, 100, 15)
    args = SimpleNamespace(save_total_limit=2)
    state = SimpleNamespace(best_model_checkpoint=None, best_global_step=None)
    replaced = node_folders._replaced_by(folder / "checkpoint-15", args, state)
    assert isinstance(folder.store, NodeStore)
    folder.store.leave(folder.key)
    assert {path.name for path in replaced} == {"checkpoint-95", "checkpoint-100"}


class NoteSaves(TrainerCallback):
    """Reports each step before it begins, and each save that has returned."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.job.note("begun", state.global_step + 1)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.job.note("saved", state.global_step)


@dataclass(frozen=True)
class KilledTraining:
    """Training on two nodes, of which rank 0's is killed before one of its changes of nodes."""

    case: TrainerCase
    folders: tuple[str, ...]
    mounted: str
    kill_at: int = -1

    def __call__(self, job: Job) -> None:
        enter(self.folders[job.rank], self.mounted)
        job.set_environment()
        os.environ["LOCAL_RANK"] = "0"
        run = Run()
        trainer = make_trainer(self.case, run)
        trainer.add_callback(NoteSaves(job))
        changes = count_changes(self.kill_at if job.rank == 0 else -1)
        train_to_end(trainer, self.case, run)
        job.note("changes", len(changes))


@pytest.mark.long
@pytest.mark.parametrize("async_save", [False, True])
def test_a_kill_repeats_no_step_that_was_saved(
    nodes: Nodes, fork_server: ForkServer, whole: Run, *, async_save: bool
) -> None:
    """Rank 0 and its node are lost in a save or a deletion."""
    args = {"save_steps": 1, "save_total_limit": 2}
    case = case_on(nodes, args, options={"async_save": async_save})
    disks = nodes.disk(0), nodes.disk(1), nodes.disk(2)
    for folder in (nodes.mounted, *disks):
        folder.mkdir()
    killed = KilledTraining(case, (str(disks[0]), str(disks[1])), str(nodes.mounted))
    changes = run_ranks(killed, 2, fork_server)[0].notes["changes"]
    for part in (0.35, 0.55, 0.8):
        nodes.lose(0, 1, 2)
        run = replace(killed, kill_at=int(changes * part))
        lost, left = run_ranks(run, 2, fork_server)
        assert lost.returncode == -signal.SIGKILL
        assert left.returncode > 0
        newest = max(int(name.rpartition("-")[2]) for name in saved(nodes, 1))
        assert newest >= lost.notes["saved"] - async_save
        assert newest >= lost.notes["begun"] - 1 - async_save
        nodes.lose(0)
        with nodes.world(1, 2) as on:
            resumed = on(OnNodes(replace(case, resume=True)))[0]
        assert_equal(resumed.first_state, whole.states[newest])
        assert_continues(resumed, whole, range(newest + 1, 9))
        assert saved(nodes, 1) == saved(nodes, 2) == ["checkpoint-7", "checkpoint-8"]


@pytest.mark.long
def test_lost_files_are_named(nodes: Nodes, whole: Run) -> None:
    """With two of three nodes lost, nothing starts at step 0; a shared checkpoint can be passed."""
    case = case_on(nodes, stop_at=5)
    with nodes.world(0, 1, 2) as run:
        run(OnNodes(case))
    nodes.lose(1, 2)
    with nodes.world(0, 1) as run:
        for error in run(OnNodes(case_on(nodes, resume=True), call=failure_of)):
            assert error.startswith("CheckpointNotFoundError: ")
            assert f"node://{nodes.mounted}/out/_nodes/checkpoint-5 is incomplete: " in error
            assert "missing: disk-1 (now with a new folder), disk-2" in error


def train_without_room(case: TrainerCase) -> str:
    """Train while rank 1's node has less room than its copies of the masters need."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            patch.setattr(node_files, "free_bytes", lambda _: (1 << 20, "the memory of this test"))
        return failure_of(case)


@pytest.mark.long
def test_training_without_room_for_the_masters_does_not_start(nodes: Nodes) -> None:
    """On no rank; unless nothing would be saved."""
    with nodes.world(0, 1) as run:
        for error in run(OnNodes(case_on(nodes), call=train_without_room)):
            assert error.startswith("SaveError: ")
            assert "bytes are needed, but the memory of this test has 1048576 left" in error
        case = case_on(nodes, {"save_strategy": "no"})
        assert run(OnNodes(case, call=train_without_room)) == ["", ""]
    assert not list(nodes.disk(0).glob("out/checkpoint-*"))


@pytest.mark.long
def test_a_damaged_checkpoint_is_left_out_with_fallback(nodes: Nodes) -> None:
    args = {"save_steps": 2}
    with nodes.world(0, 1) as run:
        run(OnNodes(case_on(nodes, args, stop_at=5)))
        for node in (0, 1):
            for file in nodes.disk(node).glob("out/_nodes/checkpoint-4/**/*optim_states.pt"):
                file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    case: dict[str, Any] = {"resume": True, "options": {"fallback": True}}
    with nodes.world(1, 0) as run:
        resumed = run(OnNodes(case_on(nodes, args, **case)))[0]
    assert min(resumed.samples) == 3
    assert any("_nodes/checkpoint-2, because " in line for line in resumed.warnings)


def error_of_push(case: TrainerCase) -> str:
    return error_text(lambda: push(case))


@pytest.mark.long
def test_an_upload_of_checkpoints_is_refused(nodes: Nodes) -> None:
    """It would contain a part of the state only."""
    case = case_on(nodes, {"push_to_hub": True, "hub_strategy": "all_checkpoints"})
    with nodes.world(0, 1) as run:
        for error in run(OnNodes(case, call=error_of_push)):
            assert "hub_strategy='all_checkpoints' uploads the folder of one node" in error
