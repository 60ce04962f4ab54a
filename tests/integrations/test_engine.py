"""A plain engine with the line saves and loads elastic checkpoints, under DeepSpeed's folders."""

from __future__ import annotations

import dataclasses
import inspect
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_elastic_zero import (
    ElasticDeepSpeedFabricStrategy,
    ElasticDeepSpeedStrategy,
    elastic,
    wrap_initialize,
)
from lightning_elastic_zero.api import ElasticOptions
from lightning_elastic_zero.errors import UnsupportedError
from tests.support.launch import run_ranks
from tests.support.ranks import ForkServer, Pools

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.integrations import _engine_programs as programs


@pytest.mark.engine
@pytest.mark.parametrize(
    ("stage", "world", "wrapped"),
    [(2, 3, False), (3, 3, True), (1, 1, False), (3, 1, False), (2, 1, True)],
)
def test_an_engine_continues_on_other_counts(
    stage: int, world: int, wrapped: bool, hf_ranks: Pools, tmp_path: Path
) -> None:
    """``latest`` and tags have DeepSpeed's meaning; state is equal bit for bit."""
    folder = str(tmp_path)
    wanted, *_ = hf_ranks.run(2, partial(programs.save, folder, stage, wrapped=wrapped))
    assert (tmp_path / "latest").read_text() == "global_step2/checkpoint"
    found, path, client_state = hf_ranks.run(world, partial(programs.load, folder, stage))[0]
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    assert path == f"{folder}/global_step2"
    assert client_state == {"step": 2}
    tagged = hf_ranks.run(world, partial(programs.load, folder, stage, "global_step1"))[0]
    assert tagged[2] == {"step": 1}


@pytest.mark.parametrize("fails", [False, True])
def test_the_save_of_a_collected_engine_is_waited_for_at_exit(
    fails: bool, fork_server: ForkServer, tmp_path: Path
) -> None:
    """And its failure is reported."""
    program = partial(programs.forget_save, str(tmp_path), fails=fails)
    [ended] = run_ranks(program, 1, fork_server)
    assert ended.notes == {"is collected": True}, ended.stderr
    assert (tmp_path / "global_step0" / "manifest.json").exists() is not fails
    assert ("No space left on device" in ended.stderr) is fails


@pytest.mark.parametrize("raises", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_end_of_a_script_waits_for_its_last_save(
    raises: bool, fork_server: ForkServer, tmp_path: Path
) -> None:
    """As long as it takes; after an exception, for a limited time."""
    program = partial(programs.end_during_save, str(tmp_path), raises=raises)
    [ended] = run_ranks(program, 1, fork_server)
    assert (tmp_path / "global_step0" / "manifest.json").exists() is not raises, ended.stderr
    assert ("Cancelled the save of" in ended.stderr) is raises
    assert ("The end of the process waits for the save of" in ended.stderr) is not raises


@pytest.mark.engine
def test_latest_names_a_tag_with_a_slash(hf_ranks: Pools, tmp_path: Path) -> None:
    tags = ("step10", "tuned/step10")
    found = hf_ranks.run(1, partial(programs.save_tags, str(tmp_path), *tags))[0]
    assert found["tag"] == "tuned/step10"


@pytest.mark.engine
def test_loads_that_cannot_be_intended_are_refused(hf_ranks: Pools, tmp_path: Path) -> None:
    """A load function, another global batch, and a missing tag."""
    hf_ranks.run(2, partial(programs.save, str(tmp_path), 2))
    function, batch, tag = hf_ranks.run(3, partial(programs.refusals, str(tmp_path)))[0]
    assert "UnsupportedError: load_checkpoint(custom_load_fn=...)" in function
    assert "this run has 30" in batch
    assert "train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2" in batch
    assert tag.startswith("CheckpointNotFoundError")


@pytest.mark.engine
def test_a_load_waits_for_the_background_save(hf_ranks: Pools, tmp_path: Path) -> None:
    """It loads the new save, not the one that this replaces."""
    found = hf_ranks.run(2, partial(programs.load_while_saving, str(tmp_path)))[0]
    assert found == [({"step": 2}, 2)]


@pytest.mark.long
@pytest.mark.engine
def test_a_save_within_a_step_causes_a_warning(hf_ranks: Pools, tmp_path: Path) -> None:
    """Gradients are not saved; ``elastic`` warns once, ``save_checkpoint`` in each call."""
    first, second = hf_ranks.run(2, partial(programs.save_within, str(tmp_path)))
    words = "is saved after 1 micro-batches of an optimizer step"
    saved = [f"{tmp_path}/{name} {words}" for name in ("global_step0", "other")]
    assert [text[: len(begins)] for text, begins in zip(first, saved, strict=True)] == saved
    assert second == []


@pytest.mark.engine
@pytest.mark.long
def test_a_schedule_that_depends_on_the_ranks_causes_a_warning(
    hf_ranks: Pools, tmp_path: Path
) -> None:
    """Its function is this run's: it gives another rate at the saved step."""
    folder = str(tmp_path)
    assert hf_ranks.run(2, partial(programs.load_schedule, folder, saves=True)) == [[], []]
    first, *others = hf_ranks.run(3, partial(programs.load_schedule, folder, saves=False))
    words = "LambdaLR of this run has other settings"
    jump = "the learning rate jumps from 0.00916667 to 0.00944444"
    assert [words in warning and jump in warning for warning in first] == [True]
    assert others == [[], []]
    assert hf_ranks.run(2, partial(programs.load_schedule, folder, saves=False)) == [[], []]


@pytest.mark.engine
def test_loading_only_weights_keeps_the_counters(hf_ranks: Pools, tmp_path: Path) -> None:
    """Like DeepSpeed's ``load_module_only``."""
    hf_ranks.run(2, partial(programs.save, str(tmp_path), 2))
    assert hf_ranks.run(3, partial(programs.load_module_only, str(tmp_path)))[0] == (0, 0)
    # An engine without optimizer gets the weights, and makes no steps whose size could change.
    assert all(hf_ranks.run(1, partial(programs.load_for_inference, str(tmp_path))))


@pytest.mark.engine
def test_a_folder_of_two_checkpoints_is_refused(hf_ranks: Pools, tmp_path: Path) -> None:
    """If DeepSpeed has saved later into a folder of this library, neither is loaded silently."""
    hf_ranks.run(2, partial(programs.save, str(tmp_path), 2))
    over = partial(programs.save_stock_over, str(tmp_path), "global_step2")
    for failure in hf_ranks.run(2, over)[0]:
        assert "CheckpointFormatError" in failure
        assert "move *.pt" in failure


@pytest.mark.long
@pytest.mark.engine
def test_fallback_skips_a_folder_of_two_checkpoints(hf_ranks: Pools, tmp_path: Path) -> None:
    """A damaged checkpoint is not replaced by one into whose folder DeepSpeed has saved."""
    hf_ranks.run(2, partial(programs.save, str(tmp_path), 2))
    shard = next((tmp_path / "global_step2").rglob("*optim_states.pt"))
    shard.write_bytes(shard.read_bytes()[:-1])
    over = partial(programs.save_stock_over, str(tmp_path), "global_step1")
    for failure in hf_ranks.run(2, over)[0]:
        assert "fallback=True found no older intact checkpoint" in failure


@pytest.mark.engine
def test_fallback_never_loads_another_engine(hf_ranks: Pools, tmp_path: Path) -> None:
    """Two engines of equal shapes save into one folder; tags show whose a save is."""
    saves = partial(programs.fall_back_beside_another_engine, str(tmp_path))
    for older, none_left, without_step in hf_ranks.run(2, saves):
        assert older == "('critic', 1)"
        for failure in (none_left, without_step):
            assert "fallback=True found no older intact checkpoint" in failure


@pytest.mark.long
@pytest.mark.engine
def test_long_saves_and_loads_show_bars(hf_ranks: Pools, tmp_path: Path) -> None:
    """On a terminal, on rank 0, as under Lightning."""
    first, second = hf_ranks.run(2, partial(programs.shown_on_a_terminal, str(tmp_path)))
    assert "Writing a checkpoint" in first
    assert "Reading a checkpoint" in first
    assert not second


@pytest.mark.engine
def test_ranks_must_save_into_one_folder(hf_ranks: Pools, tmp_path: Path) -> None:
    """Temporary folders per worker, as in Ray's template, are refused at once on all ranks."""
    for failure, seconds in hf_ranks.run(
        3, partial(programs.save_to_several_folders, str(tmp_path))
    ):
        assert "SaveError" in failure
        assert f"saves to {tmp_path}/worker-1/global_step0" in failure
        assert f"rank 0 to {tmp_path}/worker-0/global_step0" in failure
        assert "below RunConfig(storage_path=...)" in failure
        assert seconds < 10
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.engine
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("tag", [None, "global_step2"])
def test_a_script_without_the_line_fails(
    stage: int, world: int, tag: str | None, hf_ranks: Pools, tmp_path: Path
) -> None:
    """Stock DeepSpeed never trains on fresh weights from our folders."""
    hf_ranks.run(2, partial(programs.save, str(tmp_path), stage))
    load = partial(programs.failure_of, str(tmp_path), stage, tag=tag, bound=False)
    assert all(hf_ranks.run(world, load))


def test_other_objects_are_refused() -> None:
    """The message names the accepted objects."""
    with pytest.raises(TypeError, match="elastic\\(\\) was given a dict: it takes"):
        elastic({})
    with pytest.raises(ValueError, match="fallback='yes'"):
        elastic({}, fallback="yes")
    with pytest.raises(TypeError, match="'falback'"):
        elastic({}, falback=True)


def test_copies_are_refused_where_nothing_is_on_nodes() -> None:
    for call in (partial(elastic, {}), wrap_initialize):
        with pytest.raises(ValueError, match="node_copies=3 has no effect here"):
            call(node_copies=3)


def test_background_saves_of_any_program_are_refused() -> None:
    """With ``save_total_limit=1``, a Trainer deletes the only complete checkpoint meanwhile."""
    with pytest.raises(UnsupportedError, match=r"elastic\(trainer, async_save=True\)"):
        wrap_initialize(async_save=True)


def test_entry_points_share_their_options() -> None:
    """``help`` shows the same keywords, with the same defaults."""
    entries = (
        elastic,
        wrap_initialize,
        ElasticDeepSpeedStrategy.__init__,
        ElasticDeepSpeedFabricStrategy.__init__,
    )
    for entry in entries:
        shown = inspect.signature(entry).parameters
        for field in dataclasses.fields(ElasticOptions):
            assert shown[field.name].default == field.default
