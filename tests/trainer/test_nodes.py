"""ModelCheckpoint and ckpt_path with a folder on nodes, which lose their memory."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.cli import LightningCLI

from lightning_elastic_zero.checkpoint.manager import CheckpointManager
from lightning_elastic_zero.core.manifest import FORMAT, MANIFEST_NAME
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.storage import node_files
from lightning_elastic_zero.storage.store_folder import StoreFolder
from lightning_elastic_zero.trainer.model_checkpoint import ModelCheckpointHooks
from lightning_elastic_zero.trainer.preemption import PreemptionCheckpoint
from tests.support.fits import (
    Data,
    FitCase,
    RegressionNet,
    elastic,
    evaluate,
    fit,
    quiet_trainer,
)
from tests.support.launch import Job, run_ranks
from tests.support.nodes import Nodes, count_changes, enter, needs_mounts
from tests.support.outcome import captured_log, captured_warnings, error_text
from tests.support.ranks import ForkServer

LIBRARY = "lightning_elastic_zero"
EACH_STEP = {
    "every_n_train_steps": 1,
    "filename": "{step}",
    "save_top_k": 2,
    "monitor": "step",
    "mode": "max",
    "save_last": "link",
}
"""Options of the ``ModelCheckpoint`` on nodes, which saves after each of two steps of an epoch."""


@pytest.fixture
def nodes(tmp_path: Path, fork_server: ForkServer) -> Nodes:
    needs_mounts()
    return Nodes(tmp_path, fork_server)


def names(nodes: Nodes, node: int) -> list[str]:
    return sorted(path.name for path in nodes.path(node).iterdir() if path.name[0] != ".")


def fit_without_last_deletion(plan: FitCase) -> dict[str, Any]:
    """Fit as a run that is killed before its second deletion; for new ranks."""
    remove = CheckpointManager.remove

    def remove_first(manager: CheckpointManager, path: Any) -> None:
        if "step=1." in str(path):
            remove(manager, path)

    CheckpointManager.remove = remove_first  # type: ignore[method-assign,assignment]
    return fit(plan)


@pytest.mark.essential
@pytest.mark.engine
@pytest.mark.parametrize("async_save", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_lost_node_costs_no_step(nodes: Nodes, *, async_save: bool) -> None:
    """Also rank 0's: the run ends as one that was not interrupted.

    Old saves free all nodes, and the user's own files stay.
    """
    options = {"async_save": async_save}
    plan = FitCase(nodes.url, checkpoint=EACH_STEP, strategy=options, epochs=2)
    whole = replace(plan, root=str(nodes.root / "whole"), epochs=3)
    with nodes.world(0, 1) as run:
        expected = run(partial(fit, whole))[0]
        first = run(partial(fit_without_last_deletion, plan))[0]
    saved = ["last.ckpt", *(f"step={step}.ckpt" for step in (2, 3, 4))]
    assert names(nodes, 0) == names(nodes, 1) == saved
    nodes.lose(0)
    resumed = replace(plan, epochs=3, ckpt_path="last", seed=1)
    users = nodes.path(1, "step=0.ckpt")
    users.mkdir()
    users.joinpath("notes.txt").touch()
    with nodes.world(2, 1) as run:
        second = run(partial(fit, resumed))[0]
    assert second["start"] == first["end"]
    assert second["end"] == expected["end"]
    assert names(nodes, 2) == ["last.ckpt", "step=5.ckpt", "step=6.ckpt"]
    assert names(nodes, 1) == ["last.ckpt", "step=0.ckpt", "step=5.ckpt", "step=6.ckpt"]
    assert users.joinpath("notes.txt").exists()


@pytest.mark.long
@pytest.mark.engine
def test_fewer_and_more_nodes(nodes: Nodes) -> None:
    plan = FitCase(nodes.url, checkpoint=EACH_STEP, ckpt_path="last")
    with nodes.world(0, 1) as run:
        before = run(partial(fit, plan))[0]
    nodes.lose(0)
    for epochs, world in ((2, (1,)), (3, (3, 1, 0))):
        with nodes.world(*world) as run:
            resumed = run(partial(fit, replace(plan, epochs=epochs, seed=1)))[0]
        assert resumed["start"] == before["end"]
        before = resumed


def test_lightning_only_looks_at_a_dirpath(tmp_path: Path) -> None:
    url = f"node://{tmp_path}/run"
    assert ModelCheckpoint(url, save_last="link").dirpath == url
    file_system = get_filesystem(url)
    file_system.makedirs(url)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run" / ".zero-lock").mkdir(parents=True)
    assert file_system.ls(url) == []
    with pytest.raises(UnsupportedError, match="nodes have checkpoints only"):
        file_system.open(f"{url}/best_k_models.yaml", "w")


def test_a_copied_checkpoint_is_as_old_as_its_manifest(tmp_path: Path) -> None:
    """A node that has just joined has new folders."""
    older, newer = (
        tmp_path / name / "manifest.json" for name in ("on_exception.ckpt", "last.ckpt")
    )
    for file, ns in [(newer, 2 * 10**9), (older, 10**9)]:
        file.parent.mkdir()
        file.touch()
        os.utime(file, ns=(ns, ns))
    modified = get_filesystem("node:///").modified
    assert modified(f"node://{older.parent}") < modified(f"node://{newer}")


@pytest.mark.parametrize("with_names", [True, False])
def test_leftovers_are_replaced_or_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, with_names: bool
) -> None:
    """Not others: the user's, or of a callback that keeps all, or that is not here any more."""
    equals = "step=" if with_names else ""
    replaced, lost, kept = (f"{equals}{step}" for step in (1, 3, 2))
    others = [f"{equals}0", f"{equals}1-val_loss=0.5", "before-1", "best-0.5"]
    for name in (replaced, lost, kept, *others):
        folder = tmp_path / f"{name}.ckpt"
        folder.mkdir()
        (folder / MANIFEST_NAME).write_text(json.dumps({"format": FORMAT, "save_id": "0" * 32}))
    url, removed = f"node://{tmp_path}", list[str]()
    callback = ModelCheckpoint(
        url, "{step}", monitor="step", save_top_k=2, auto_insert_metric_name=with_names
    )
    callback.best_k_models = {f"{url}/{kept}.ckpt": torch.tensor(2)}
    monkeypatch.setattr(StoreFolder, "can_replace", lambda self, _: self.path.stem != lost)
    manager: Any = SimpleNamespace(remove=removed.append)
    trainer: Any = SimpleNamespace(checkpoint_callbacks=[callback])
    hooks = ModelCheckpointHooks(manager, lambda *_: None)
    hooks._loaded_ns = 2**62
    hooks._delete_leftovers(trainer, callback, f"{url}/{replaced}.ckpt")
    assert sorted(removed) == [f"{url}/{replaced}.ckpt", f"{url}/{lost}.ckpt"]


def fit_with_log(plan: FitCase) -> tuple[str, dict[str, Any], str]:
    """Return the error, the result and the warnings of a fit."""
    result: dict[str, Any] = {}
    with captured_log(LIBRARY, logging.WARNING) as log:
        error = error_text(lambda: result.update(fit(plan)))
    return error, result, "\n".join(log)


@pytest.mark.long
@pytest.mark.engine
def test_missing_nodes_are_named(nodes: Nodes) -> None:
    """Two neighbours of three are lost: the shared checkpoint is taken, and without it none."""
    shared = str(nodes.root / "shared")
    saves = partial(
        ModelCheckpoint, shared, filename="{step}", every_n_train_steps=3, save_last="link"
    )
    plan = FitCase(nodes.url, epochs=2, checkpoint=EACH_STEP, callbacks=(saves,))
    with nodes.world(0, 1, 2) as run:
        run(partial(fit, plan))
    nodes.lose(1, 2)
    alone = FitCase(nodes.url, checkpoint=EACH_STEP, ckpt_path="last", epochs=3)
    with nodes.world(0, 1) as run:
        for error, _, _ in run(partial(fit_with_log, alone)):
            assert error.startswith("CheckpointCorruptedError: ")
            assert "no checkpoint is complete. " in error
            assert f"{nodes.url}/step=4.ckpt is incomplete" in error
            assert "missing: disk-1 (now with a new folder), disk-2" in error
        resumed = replace(plan, ckpt_path="last", epochs=3)
        (error, result, log), *_ = run(partial(fit_with_log, resumed))
        assert not error
        assert result["step"] == 6
        assert "step=4.ckpt is incomplete: " in log
        assert f"Resume from {shared}/step=3.ckpt." in log
        assert names(nodes, 0) == names(nodes, 1) == ["last.ckpt", "step=5.ckpt", "step=6.ckpt"]


@dataclass(frozen=True)
class CountedFit:
    """A fit on nodes that counts the changes rank 0 makes, and is killed before one of them."""

    plan: FitCase
    folders: tuple[str, ...]
    mounted: str
    kill_at: int = -1

    def __call__(self, job: Job) -> None:
        enter(self.folders[job.rank], self.mounted)
        job.set_environment()
        changes = count_changes(self.kill_at) if job.rank == 0 else []
        job.note("end", fit(self.plan)["end"])
        job.note("changes", len(changes))


@pytest.mark.long
@pytest.mark.engine
def test_a_kill_repeats_at_most_one_step(nodes: Nodes, fork_server: ForkServer) -> None:
    """Rank 0 and its node are lost in a save, a link or a deletion; the others fail at once."""
    plan = FitCase(nodes.url, checkpoint=EACH_STEP, epochs=3)
    run = CountedFit(plan, tuple(str(nodes.disk(n)) for n in (0, 1)), str(nodes.mounted))
    nodes.mounted.mkdir()
    for node in (0, 1, 2):
        nodes.disk(node).mkdir()
    whole = run_ranks(run, 2, fork_server)
    expected, changes = whole[0].notes["end"], whole[0].notes["changes"]
    for part in (0.35, 0.5, 0.65, 0.8, 0.95):
        nodes.lose(0, 1, 2)
        killed = run_ranks(replace(run, kill_at=int(changes * part)), 2, fork_server)
        assert killed[0].returncode == -signal.SIGKILL
        assert killed[1].returncode > 0
        published = nodes.path(1).glob("step=*/manifest.json")
        steps = [int(path.parent.name[5:-5]) for path in published]
        nodes.lose(0)
        resumed = replace(plan, ckpt_path="last", seed=1)
        with nodes.world(1, 2) as of_nodes:
            (error, result, log), *_ = of_nodes(partial(fit_with_log, resumed))
        assert not error
        assert f"/step={max(steps)}.ckpt" in str(result["loaded"])
        assert "incomplete" not in log
        assert result["end"] == expected
        assert names(nodes, 1) == ["last.ckpt", "step=5.ckpt", "step=6.ckpt"]


def fill_node(plan: FitCase) -> str:
    """Fit while rank 1's node has no room after step 2."""

    def fill(trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 1:
            full = (0, "the memory of this test")
            node_files.free_bytes = lambda folder: full

    return error_text(lambda: fit(plan, LambdaCallback(on_train_batch_start=fill)))


@pytest.mark.long
@pytest.mark.engine
def test_a_full_neighbour_stops_all_ranks(nodes: Nodes) -> None:
    """The last checkpoint stays."""
    plan = FitCase(nodes.url, checkpoint=EACH_STEP, epochs=2)
    with nodes.world(0, 1, 2) as run:
        for error in run(partial(fill_node, plan)):
            assert error.startswith("SaveError: ")
            assert "the memory of this test has 0 left" in error
    with nodes.world(0, 1, 2) as run:
        error, result, _ = run(partial(fit_with_log, replace(plan, ckpt_path="last")))[0]
    assert not error
    assert f"{nodes.url}/step=2.ckpt" in result["loaded"]


def fit_on_a_bad_node(plan: FitCase, fault: str) -> tuple[str, int]:
    """Fit while rank 1's node has no room for its copies of the masters, or cannot count them."""

    def refuse(*_: object, **__: object) -> None:
        raise UnsupportedError(fault)

    if os.environ["RANK"] == "1":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(node_files, "free_bytes", lambda _: (1 << 20, "the memory of this test"))
            if fault != "no room":
                patch.setattr(LiveEngine, "rank_state", refuse)
            return fit_and_count(plan)
    return fit_and_count(plan)


def fit_and_count(plan: FitCase) -> tuple[str, int]:
    trainer, net, data, _ = plan.make()
    return error_text(lambda: trainer.fit(net, **data)), trainer.global_step


@pytest.mark.long
@pytest.mark.engine
def test_a_fit_without_room_for_the_masters_does_not_start(nodes: Nodes) -> None:
    """On no rank; unless nothing would be saved."""
    plan = FitCase(nodes.url, checkpoint=EACH_STEP)
    saves_nothing = replace(plan, checkpoint={"save_top_k": 0})
    with nodes.world(0, 1) as run:
        for error, step in run(partial(fit_on_a_bad_node, plan, "no room")):
            assert step == 0
            assert re.search(
                rf"^SaveError: .*Could not write {nodes.url}: \d+ bytes are needed, but the memory "
                rf"of this test has {1 << 20} left",
                error,
            ), error
        for error, step in run(partial(fit_on_a_bad_node, plan, "not countable")):
            assert step == 0
            assert error.startswith("UnsupportedError: ")
            assert "not countable" in error
        assert run(partial(fit_on_a_bad_node, saves_nothing, "no room")) == [("", 2)] * 2


def damage(nodes: Nodes, node: int, step: int) -> None:
    for file in nodes.path(node, f"step={step}.ckpt").rglob("*.pt"):
        data = bytearray(file.read_bytes())
        data[::64] = bytes(each ^ 1 for each in data[::64])
        file.write_bytes(data)


@pytest.mark.long
@pytest.mark.engine
def test_damage(nodes: Nodes) -> None:
    """Another node's copy is read; without one, the older checkpoint with ``fallback=True``."""
    plan = FitCase(nodes.url, checkpoint=EACH_STEP)
    with nodes.world(0, 1) as run:
        run(partial(fit, plan))
    damage(nodes, 0, 2)
    resumed = replace(plan, ckpt_path="last", epochs=1)
    with nodes.world(0, 1) as run:
        error, result, log = run(partial(fit_with_log, resumed))[0]
        assert not error
        assert f"{nodes.url}/step=2.ckpt" in result["loaded"]
        damage(nodes, 1, 2)
    with nodes.world(0, 1) as run:
        error, result, log = run(partial(fit_with_log, resumed))[0]
        assert (
            f"The newest older intact checkpoint in the same folder is {nodes.url}/step=1" in error
        )
        fallback = replace(resumed, strategy={"fallback": True})
        error, result, log = run(partial(fit_with_log, fallback))[0]
        assert not error
        assert f"{nodes.url}/step=1.ckpt" in result["loaded"]
        assert "later steps are trained again" in log


@pytest.mark.long
@pytest.mark.engine
def test_an_evaluation_of_a_checkpoint_on_other_nodes(nodes: Nodes) -> None:
    """No callback has joined its folder before."""
    plan = FitCase(nodes.url, checkpoint=EACH_STEP)
    with nodes.world(0, 1) as run:
        first = run(partial(evaluate_after_fit, plan))[0]
    nodes.lose(0)
    url = f"{nodes.url}/step=2.ckpt"
    with nodes.world(2, 3, 1) as run:
        of_url = replace(plan, ckpt_path=url, root=str(nodes.root / "other"))
        assert run(partial(evaluate, of_url, "validate"))[0]["loss"] == pytest.approx(first)
        assert run(partial(evaluate, replace(plan, ckpt_path="last"), "test"))[0]["loss"]


def evaluate_after_fit(plan: FitCase) -> float:
    fit(plan)
    loss = evaluate(replace(plan, ckpt_path=f"{plan.root}/step=2.ckpt"), "validate")["loss"]
    return float(loss)


def restarted(plan: FitCase) -> tuple[list[str], list[str]]:
    """Return the warnings and log of a fit whose launcher has restarted the job."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    trainer, net, data, _ = plan.make()
    with captured_warnings("no last checkpoint") as warned, captured_log(LIBRARY) as log:
        trainer.fit(net, **data, ckpt_path="last")
    return warned, log


@pytest.mark.long
@pytest.mark.engine
def test_a_restart_without_any_checkpoint_is_not_silent(nodes: Nodes) -> None:
    with nodes.world(0, 1) as run:
        warned, log = run(partial(restarted, FitCase(nodes.url, checkpoint=EACH_STEP)))[0]
    assert len(warned) == 1
    lost = f"{nodes.url}: none of the nodes here (disk-0, disk-1) has a checkpoint. The job was"
    assert [lost in line for line in log].count(True) == 1


@pytest.mark.long
@pytest.mark.engine
def test_an_exception_saves_on_nodes(nodes: Nodes) -> None:
    plan = FitCase(nodes.url, checkpoint={**EACH_STEP, "every_n_train_steps": 3}, epochs=2)
    with nodes.world(0, 1) as run:
        errors = run(partial(fail_after_a_step, plan))
    assert all("out of luck" in error for error in errors)
    nodes.lose(0)
    with nodes.world(2, 1) as run:
        error, result, _ = run(partial(fit_with_log, replace(plan, ckpt_path="last")))[0]
    assert not error
    assert f"{nodes.url}/on_exception.ckpt" in result["loaded"]


def fail_after_a_step(plan: FitCase) -> str:
    """Fail on all ranks, and save with a callback that deletes its checkpoint at other ends."""

    def fail(trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == 1:
            msg = "out of luck"
            raise RuntimeError(msg)

    fails = LambdaCallback(on_train_batch_start=fail)
    return error_text(lambda: fit(plan, fails, KeptOnException(plan.root)))


class KeptOnException(OnExceptionCheckpoint):
    def teardown(self, *_: Any, **__: Any) -> None:
        """Delete nothing, as in a process that ends."""


@pytest.mark.long
@pytest.mark.engine
def test_an_exception_checkpoint_needs_a_model_checkpoint(nodes: Nodes) -> None:
    """Otherwise an empty node would start from the beginning, without a word."""
    with nodes.world(0, 1) as run:
        for error in run(partial(save_only_exceptions, nodes.url)):
            assert error.startswith("UnsupportedError: ")
            assert f"OnExceptionCheckpoint('{nodes.url}') saves on nodes" in error
            assert "add one with this dirpath" in error


def save_only_exceptions(url: str) -> str:
    trainer = quiet_trainer(elastic(), OnExceptionCheckpoint(url), enable_checkpointing=True)
    return error_text(lambda: trainer.fit(RegressionNet(), Data(), ckpt_path="last"))


@pytest.mark.long
@pytest.mark.engine
def test_fallback_takes_a_shared_checkpoint(nodes: Nodes) -> None:
    """If all on nodes are damaged."""
    shared = str(nodes.root / "shared")
    saves = partial(ModelCheckpoint, shared, filename="{step}", save_top_k=-1)
    plan = FitCase(nodes.url, checkpoint=EACH_STEP, callbacks=(saves,))
    with nodes.world(0, 1) as run:
        run(partial(fit, plan))
    for node in (0, 1):
        damage(nodes, node, 1)
        damage(nodes, node, 2)
    resumed = replace(plan, ckpt_path=f"{nodes.url}/step=2.ckpt", epochs=2)
    with nodes.world(0, 1) as run:
        error = run(partial(fit_with_log, resumed))[0][0]
        assert f"The newest older intact checkpoint is {shared}/step=2.ckpt (step 2)" in error
        fallback = replace(resumed, strategy={"fallback": True})
        error, result, _ = run(partial(fit_with_log, fallback))[0]
    assert not error
    assert result["loaded"] == f"{shared}/step=2.ckpt"
    assert result["step"] == 4


@pytest.mark.long
@pytest.mark.engine
def test_a_preempted_run_saves_on_nodes(nodes: Nodes) -> None:
    checkpoint = {**EACH_STEP, "every_n_train_steps": 4}
    plan = FitCase(nodes.url, checkpoint=checkpoint, callbacks=(PreemptionCheckpoint,), epochs=3)
    with nodes.world(0, 1) as run:
        assert run(partial(fit_until_preempted, plan)) == [2, 2]
    nodes.lose(0)
    with nodes.world(2, 1) as run:
        error, result, _ = run(partial(fit_with_log, replace(plan, ckpt_path="last")))[0]
    assert not error
    assert result["loaded"] == f"{nodes.url}/last-preempted.ckpt"
    assert result["step"] == 6


def fit_until_preempted(plan: FitCase) -> int:
    """Send a signal to rank 1 in the second step; return the last one."""

    def preempt(trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == 1 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.4)  # Until the ranks' threads have agreed.

    trainer, net, data, _ = plan.make(LambdaCallback(on_train_batch_start=preempt))
    with suppress(SystemExit):
        trainer.fit(net, **data)
    return trainer.global_step


CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy:
    class_path: lightning_elastic_zero.ElasticDeepSpeedStrategy
    init_args: {stage: 2, reduce_bucket_size: 100000, allgather_bucket_size: 100000, node_copies: 2}
  callbacks:
    class_path: lightning.pytorch.callbacks.ModelCheckpoint
    init_args: {dirpath: "%s", filename: "{step}", every_n_train_steps: 1, save_last: link}
"""


@pytest.mark.long
@pytest.mark.engine
def test_a_folder_on_nodes_in_yaml(nodes: Nodes, tmp_path: Path) -> None:
    config = tmp_path / "fit.yaml"
    config.write_text(CONFIG % nodes.url)
    args = ["fit", "--config", str(config)]
    with nodes.world(0, 1) as run:
        run(partial(fit_by_cli, args))
    nodes.lose(0)
    with nodes.world(2, 1) as run:
        resumed = [*args, "--ckpt_path=last", "--trainer.max_epochs=2"]
        loaded, step = run(partial(fit_by_cli, resumed))[0]
    assert loaded == f"{nodes.url}/step=2.ckpt"
    assert step == 4


def fit_by_cli(args: list[str]) -> tuple[str, int]:
    trainer = LightningCLI(RegressionNet, Data, args=args, save_config_callback=None).trainer
    last_load = trainer.strategy.last_load  # type: ignore[attr-defined]
    return last_load.path if last_load else "", trainer.global_step
