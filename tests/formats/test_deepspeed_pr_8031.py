"""Elastic ZeRO-3 checkpoints written by the code of DeepSpeed pull request 8031.

Those of the table were made by ``make_fixtures --pr-8031``. The two in ``data/pr8031`` were made by
somebody else with the same code, without code of this project; their ``truth.pt`` contains the
state of the engine that wrote them. Their model is ``Model``; the second one has two parameter
groups, two sub-groups, a frozen layer, and parameters with fewer elements than ranks.
"""

from __future__ import annotations

import logging
import shutil
import tarfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_elastic_zero.errors import CheckpointFormatError
from lightning_elastic_zero.formats.open import open_checkpoint
from lightning_elastic_zero.tools.conversion import convert_checkpoint
from lightning_elastic_zero.tools.view import open_view
from tests.formats._fixture_table import small
from tests.formats._load_assertions import refused, restored
from tests.formats._read_whole import read_whole
from tests.formats._restore_programs import Case, another
from tests.support.engines import Engine, EngineCase, engine_of
from tests.support.foreign_checkpoints import DATA, unpack
from tests.support.forked_python import forked_programs
from tests.support.oracle import dump, same_bits
from tests.support.outcome import captured_log
from tests.support.processes import output_of
from tests.support.ranks import ForkServer, Pools, environment

OF_OTHERS = ("groups-on-4", "plain-on-2")
SHARDS = "*_optim_states.pt"


def unpack_others(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return a checkpoint by another writer, and the state of its engine."""
    with tarfile.open(DATA / "pr8031" / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    truth: dict[str, Any] = torch.load(folder / "truth.pt", weights_only=True)
    return folder / "checkpoint", truth


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n = nn.Linear(5, 7), nn.LayerNorm(7)
        self.b, self.c = nn.Linear(7, 9), nn.Linear(9, 3)
        self.register_buffer("count", torch.zeros(2))


def groups_of(model: nn.Module, *, two: bool) -> list[dict[str, Any]]:
    """Return one parameter group, or those of matrices and vectors without the frozen layer."""
    if not two:
        return [{"params": list(model.parameters()), "lr": 0.5}]
    model.get_submodule("b").requires_grad_(requires_grad=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = ([p for p in trained if (p.ndim > 1) is wide] for wide in (True, False))
    return [{"params": matrices, "lr": 0.5}, {"params": vectors, "lr": 0.25}]


def held_after_load(path: str, zero: int, *, two: bool) -> dict[str, Any]:
    """Load into an engine; return its full state through DeepSpeed's functions. Collective."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    from lightning_elastic_zero.api import load_checkpoint

    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": zero, "sub_group_size": 40},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
    }
    engine: Engine
    engine, optimizer, *_ = deepspeed.initialize(
        model=model,
        model_parameters=groups_of(model, two=two),
        config=config,
        dist_init_required=False,
    )
    with captured_log("lightning_elastic_zero", logging.WARNING) as warned:
        loaded = load_checkpoint(engine, path)
    found: dict[str, Any] = {}
    for name, p in engine.module.named_parameters():
        if not p.requires_grad:
            with deepspeed.zero.GatheredParameters([p], enabled=zero == 3):
                found[f"frozen/{name}"] = p.detach().clone()
            continue
        of = {"fp32": p} if not zero else {"fp32": safe_get_full_fp32_param(p)}
        for key in ("exp_avg", "exp_avg_sq"):
            plain = optimizer.state[p][key] if not zero else None
            of[key] = safe_get_full_optimizer_state(p, key) if plain is None else plain
        found |= {f"{key}/{name}": t.detach().clone() for key, t in of.items()}
    found["steps"] = {int(state["step"]) for state in optimizer.state.values() if "step" in state}
    found["count"] = engine.module.count.clone()
    found["rates"] = [group["lr"] for group in optimizer.param_groups]
    found["warned"] = list(warned)
    found["progress"] = engine.global_steps, engine.global_samples, loaded.client_state
    engine.destroy()
    return found


@pytest.mark.parametrize("name", OF_OTHERS)
def test_the_files_contain_their_writers_state(name: str, tmp_path: Path) -> None:
    path, truth = unpack_others(name, tmp_path)
    found = read_whole(path)
    for of, states in truth["state"].items():
        for key, value in states.items():
            kind = "master" if key == "fp32" else key
            assert same_bits(found[f"{kind}/{of}"], value.flatten()), (key, of)
    with open_view(path) as checkpoint:
        assert {checkpoint.step(of) for of in truth["state"]} == {4}
        assert checkpoint.manifest.progress.global_steps == truth["global_steps"]
        assert "parameter groups and their hyperparameters" in checkpoint.reader.info.lacks


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.parametrize("name", OF_OTHERS)
def test_engines_load_the_writers_state_on_all_worlds_and_stages(
    name: str, pools: Pools, tmp_path: Path
) -> None:
    path, truth = unpack_others(name, tmp_path)
    two = len(truth["hyperparameters"]) > 1
    frozen = {k: v for k, v in read_whole(path).items() if k.startswith("frozen/")}
    assert set(frozen) == {f"frozen/{n}" for n in truth["frozen"]}
    for world, zero in product((1, 2, 3, 4), (0, 1, 2, 3)):
        of_ranks = pools.run(world, partial(held_after_load, str(path), zero, two=two))
        for rank, found in enumerate(of_ranks):
            texts = [text for text in found["warned"] if "no hyperparameters" in text]
            assert len(texts) == (rank == 0), found["warned"]
            for of, states in truth["state"].items():
                for key, value in states.items():
                    assert same_bits(found[f"{key}/{of}"], value), (world, zero, key, of)
            for key, value in frozen.items():
                assert same_bits(found[key].flatten(), value)
            assert found["steps"] == {4}
            assert found["count"].tolist() == [4.0, 4.0]
            assert found["rates"] == ([0.5, 0.25] if two else [0.5])
            samples = 4 * int(name[-1]) * 2
            assert found["progress"] == (truth["global_steps"], samples, {"mine": 3})


@pytest.mark.engine
def test_a_fixture_loads_into_stage_0(pools: Pools, tmp_path: Path) -> None:
    """Other stages and fixtures are tested with those of stock DeepSpeed."""
    fixture = unpack("elastic3-pr8031", tmp_path)
    target = replace(another(fixture.setup, 0), world=1, zero="0")
    restored(pools, Case(fixture, target, str(fixture.checkpoint), groups=False))


def held_without_optimizer(target: EngineCase, path: str, keep_fp32: bool) -> Any:
    """Load without optimizer state; return the state before and after. Collective."""
    from lightning_elastic_zero.api import load_checkpoint

    with engine_of(target, 7, tilt=3.0) as engine:
        engine._config.zero_config.load_from_fp32_weights = keep_fp32
        before = dump(engine, target)
        load_checkpoint(engine, path, load_optimizer_state=False)
        return before, dump(engine, target)


@pytest.mark.engine
def test_masters_are_fp32_unless_the_config_rounds_them(pools: Pools, tmp_path: Path) -> None:
    fixture = unpack("elastic3-pr8031", tmp_path)
    target, truth = small(1, "2", grouping="two"), fixture.truth()
    masters = {key: value for key, value in truth.items() if key.startswith("master/")}
    assert any(not same_bits(value, value.bfloat16().float()) for value in masters.values())
    for keep_fp32 in (True, False):
        program = partial(held_without_optimizer, target, str(fixture.checkpoint), keep_fp32)
        before, after = pools.run(1, program)[0]
        assert not [key for key in after if key.startswith("exp_avg")]
        assert {k: v for k, v in after.items() if k.startswith("group/")} == {
            k: v for k, v in before.items() if k.startswith("group/")
        }
        for key, value in masters.items():
            assert same_bits(after[key], value if keep_fp32 else value.bfloat16().float()), key


def edited(
    folder: Path, target: Path, rank: int, change: Callable[[dict[str, Any]], object]
) -> Path:
    """Return a copy of a tag's folder with a changed shard of one rank."""
    shutil.copytree(folder, target)
    (path,) = target.glob(f"*zero_pp_rank_{rank}_{SHARDS}")
    tree = torch.load(path, weights_only=False)
    change(tree["optimizer_state_dict"])
    torch.save(tree, path)
    return target


def cut_a_tensor(shard: dict[str, Any]) -> None:
    moments = shard["base_optimizer_state"][1]["exp_avg"]
    moments[0] = moments[0][:-1].clone()


def lose_a_tensor(shard: dict[str, Any]) -> None:
    shard["base_optimizer_state"][0]["exp_avg_sq"].pop()


def lose_a_state(shard: dict[str, Any]) -> None:
    del shard["base_optimizer_state"][1]["exp_avg"]


@pytest.mark.parametrize("change", [cut_a_tensor, lose_a_tensor, lose_a_state])
@pytest.mark.parametrize("rank", [0, 2])
def test_shards_without_their_tensors_are_refused_by_name(
    change: Callable[[dict[str, Any]], object], rank: int, tmp_path: Path
) -> None:
    path, _ = unpack_others("groups-on-4", tmp_path)
    damaged = edited(path / "elastic", tmp_path / "damaged", rank, change)
    with (
        closing(open_checkpoint(damaged)) as reader,
        pytest.raises(CheckpointFormatError) as caught,
    ):
        reader.check_all()
    assert f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" in str(caught.value)


@pytest.mark.engine
def test_sub_groups_across_two_groups_are_refused(pools: Pools, tmp_path: Path) -> None:
    """The file does not record the groups."""
    fixture = unpack("elastic3-momentum-pr8031", tmp_path)
    target = replace(fixture.setup, world=1, zero="2", grouping="two")
    found = refused(pools, target, str(fixture.checkpoint))
    assert found.error == "CheckpointMismatchError"
    assert "it was saved with other parameter groups" in found.message


def count_in_groups(shard: dict[str, Any]) -> None:
    """Count steps as apex's FusedAdam does."""
    shard["base_optimizer_state_step"] = 4
    for states in shard["base_optimizer_state"]:
        del states["step"]


def test_optimizers_that_count_in_groups_are_refused(tmp_path: Path) -> None:
    """They would restart their count at zero."""
    path, _ = unpack_others("plain-on-2", tmp_path)
    folder = path / "elastic"
    for rank in (0, 1):
        folder = edited(folder, tmp_path / f"rank {rank}", rank, count_in_groups)
    with closing(open_checkpoint(folder)) as reader:
        assert "counts steps in the parameter groups" in reader.info.unmatched
    with closing(open_checkpoint(path)) as reader:
        assert not reader.info.unmatched


@pytest.mark.parametrize("to", ["fp32", "lightning", "universal", "dcp"])
def test_conversions_contain_masters_and_frozen_weights(to: str, tmp_path: Path) -> None:
    path, truth = unpack_others("groups-on-4", tmp_path)
    convert_checkpoint(path, tmp_path / "there", to)
    with open_view(tmp_path / "there") as view:
        found = {entry.name: torch.cat(list(view.chunks(entry))) for entry in view.weights()}
    for of, states in truth["state"].items():
        assert same_bits(found[of], states["fp32"].flatten()), of
    assert set(truth["frozen"]) <= set(found)


def test_deepspeeds_script_recovers_the_weights(fork_server: ForkServer, tmp_path: Path) -> None:
    path, truth = unpack_others("groups-on-4", tmp_path)
    with forked_programs(fork_server, tmp_path / "programs") as programs:
        command = (programs / "python", "-m", "deepspeed.utils.zero_to_fp32", path, tmp_path / "o")
        output_of(command, tmp_path, environment())
    found = torch.load(tmp_path / "o" / "pytorch_model.bin", weights_only=True)
    for of, states in truth["state"].items():
        assert same_bits(found[of], states["fp32"]), of
    assert set(truth["frozen"]) <= set(found)
