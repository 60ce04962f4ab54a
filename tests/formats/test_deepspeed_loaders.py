"""DeepSpeed's own loaders restore this library's checkpoints.

No release of DeepSpeed restores elastic ZeRO-3 checkpoints; the code of its pull request 8031
does. The tests of that loader save with the installed DeepSpeed and load in other processes with
the pull request's code. They are skipped without the option ``--pr-8031=FOLDER``, where
``pip install --no-deps --target FOLDER CHECKOUT`` has installed ``refs/pull/8031/head`` of
DeepSpeed. The first run compiles its operators into FOLDER. Without the option, ZeRO-3 shards are
compared with one that the pull request's code wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from tests.support.checkpoints import (
    Saved,
    found_after_load,
    found_by_deepspeed,
    saved_after_deepspeed,
    train_and_save,
)
from tests.support.engines import BUFFERS, EngineCase
from tests.support.foreign_checkpoints import unpack
from tests.support.forked_python import forked_programs
from tests.support.oracle import Dump, differences, expected_in, same_bits
from tests.support.processes import output_of
from tests.support.ranks import ForkServer, Pools, environment

pytestmark = pytest.mark.engine


def wanted_in(saved: Saved, target: EngineCase) -> Dump:
    """Return the state that a run must have after a load by DeepSpeed.

    Elastic checkpoints of DeepSpeed have no hyperparameters. In ZeRO-1 and 2 there is one model
    file, so that all ranks get the buffers of rank 0; in ZeRO-3 each rank reads its own.
    """
    held = saved.dump()
    wanted = expected_in(held, saved.setup, target)
    for rank in range(target.world):
        file = rank if target.zero == "3" else 0
        for name in target.buffers_kept:
            wanted[f"buffer/{rank}/{name}"] = held[f"buffer/{file}/{name}"]
    excluded = ["group/"]
    if saved.options.get("exclude_frozen_parameters"):
        excluded.append("frozen/")
    if target.zero == "3" and target.precision != "fp32":
        excluded.append("buffer/")  # DeepSpeed 0.19.2 casts the module's buffers to 16 bits.
    return {k: v for k, v in wanted.items() if not k.startswith(tuple(excluded))}


def assert_restored(saved: Saved, target: EngineCase, pools: Pools) -> None:
    """Load with DeepSpeed, and compare each element with the state of the saving engine."""
    found = pools.run(target.world, partial(found_by_deepspeed, target, saved))[0]
    assert found is not None
    wanted = wanted_in(saved, target)
    assert not differences(wanted, {k: v for k, v in found.items() if k in wanted})


FUSED = EngineCase(2, "1", optimizer="FusedAdam", alignment=True)
ELASTIC = (
    pytest.param(FUSED, marks=pytest.mark.essential),
    pytest.param(EngineCase(2, "2", "bf16", empty=True), marks=pytest.mark.essential),
    EngineCase(3, "2", "bf16", optimizer="FusedAdam", round_robin=True),
    EngineCase(3, "1", optimizer="Momentum"),
    EngineCase(2, "2", optimizer="CPUAdam", offload=True),
    EngineCase(4, "1", "bf16", optimizer="AMSGrad", alignment=True, grouping="one"),
    EngineCase(2, "1", "fp16", optimizer="FusedAdam"),
)


@pytest.mark.parametrize("setup", ELASTIC, ids=str)
def test_deepspeed_loads_elastic_zero_1_and_2_on_the_same_count(
    setup: EngineCase, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    saved = saved_by(setup, save_module_weights=True)
    assert_restored(saved, replace(setup, elastic=True), pools)


@pytest.mark.parametrize(
    "setup", [FUSED, EngineCase(3, "2", "bf16", optimizer="Momentum")], ids=str
)
def test_deepspeed_loads_zero_1_and_2_without_elastic_checkpoint(
    setup: EngineCase, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    """DeepSpeed's loader would append the padding of the flat buffer to scalar states."""
    assert_restored(saved_by(setup, save_module_weights=True), setup, pools)


@pytest.mark.long
def test_a_run_continued_by_deepspeed_loads_from_either_save(
    pools: Pools, saved_by: Callable[..., Saved], tmp_path: Path
) -> None:
    """DeepSpeed's loader adds a dimension to the step of torch's AdamW, and both saves keep it."""
    saved, elastic = saved_by(AT_HOME, save_module_weights=True), replace(AT_HOME, elastic=True)
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    program = partial(saved_after_deepspeed, elastic, saved, ours, theirs)
    held = pools.run(AT_HOME.world, program)[0]
    assert held is not None
    target = EngineCase(3, "3")
    wanted = expected_in(held, AT_HOME, target)
    for path, lacks in ((ours, ()), (theirs, ("group/", "buffer/"))):
        look = partial(found_after_load, target, Saved(AT_HOME, path), {})
        outcome = pools.run(target.world, look)[0]
        assert outcome is not None
        found = outcome[1]
        kept = {key: value for key, value in wanted.items() if not key.startswith(lacks)}
        assert not differences(kept, {key: found[key] for key in kept})


AT_HOME = EngineCase(2, "2")

Structure: TypeAlias = "dict[Any, Any] | list[Any] | tuple[Any, ...] | str"


def structure(value: Any) -> Structure:
    """Return keys, lengths, types and shapes of a tree, and its numbers."""
    if isinstance(value, dict):
        return {key: structure(item) for key, item in value.items()}
    if isinstance(value, list):
        return [structure(item) for item in value]
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape)
    return repr(value)


def shard_structures(checkpoint: str, *, sizes: bool) -> list[Structure]:
    """Return the structure of each rank's optimizer states, in a rank with DeepSpeed's classes.

    Args:
        checkpoint: its directory.
        sizes: include the sizes of state tensors. If a parameter ends before the last rank, the
            pull request writes padding of other ranks, which its loader ignores.
    """
    found = []
    for path in sorted(Path(checkpoint).rglob("*_optim_states.pt")):
        state = torch.load(path, weights_only=False)["optimizer_state_dict"]
        state["zero_stage"] = int(state["zero_stage"])  # DeepSpeed's enumeration.
        if not sizes:
            for states in state["base_optimizer_state"]:
                lists = [value for value in states.values() if isinstance(value, list)]
                for tensors in lists:
                    tensors[:] = [tensor[:0] for tensor in tensors]
        found.append(structure({key: v for key, v in state.items() if key != "loss_scaler"}))
    return found


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("elastic3-pr8031", True, marks=pytest.mark.essential),
        pytest.param("elastic3x4-pr8031", False, marks=pytest.mark.long),
        pytest.param("elastic3-momentum-pr8031", False, marks=pytest.mark.long),
    ],
)
def test_zero_3_files_have_the_structure_of_pull_request_8031(
    name: str, sizes: bool, pools: Pools, tmp_path: Path
) -> None:
    """Except for the loss scaler, which is plain data here."""
    fixture = unpack(name, tmp_path)
    saved = Saved(replace(fixture.setup, elastic=False), str(tmp_path / "ours"))
    pools.run(saved.setup.world, partial(train_and_save, saved, steps=fixture.setup_steps))
    look = partial(shard_structures, sizes=sizes)
    wanted = pools.run(1, partial(look, str(fixture.checkpoint)))[0]
    assert len(wanted) == saved.setup.world
    assert pools.run(1, partial(look, saved.path))[0] == wanted


FUSED_3 = EngineCase(2, "3", optimizer="FusedAdam", sub_group=700, persistence=0)
BF16_3 = EngineCase(4, "3", "bf16", optimizer="FusedAdam", sub_group=1, persistence=0)


def in_pr_8031(setup: EngineCase, world: int) -> EngineCase:
    """Return the run that the pull request's code restores.

    Its DeepSpeed (0.19.2) waits only for the last of several gathers, and on CPU ranks they finish
    in any order. The oracle would read weights that have not arrived.
    """
    return replace(setup, world=world, elastic=True, sequential=True)


@pytest.mark.parametrize(
    "setup",
    [
        FUSED_3,
        BF16_3,
        EngineCase(3, "3", optimizer="Momentum", grouping="one", persistence=0),
        EngineCase(2, "3", "bf16", optimizer="AdamW", sub_group=700, persistence=0),
        EngineCase(2, "3", "fp16", optimizer="FusedAdam", persistence=0),
    ],
    ids=str,
)
def test_pull_request_8031_loads_zero_3_on_the_same_count(
    setup: EngineCase, pr_8031: Pools, saved_by: Callable[..., Saved]
) -> None:
    saved = saved_by(setup, save_module_weights=True)
    assert_restored(saved, in_pr_8031(setup, setup.world), pr_8031)


@pytest.mark.parametrize(
    ("setup", "world"),
    [
        (FUSED_3, 1),
        (BF16_3, 2),
        (BF16_3, 3),
        (BF16_3, 1),
        (EngineCase(3, "3", optimizer="Momentum", grouping="one", persistence=0), 2),
        (EngineCase(2, "3", "bf16", optimizer="AdamW", sub_group=700, persistence=0), 1),
    ],
    ids=str,
)
def test_pull_request_8031_loads_zero_3_on_fewer_ranks(
    setup: EngineCase, world: int, pr_8031: Pools, saved_by: Callable[..., Saved]
) -> None:
    """The loader reads frozen weights only in pieces for the current number of ranks.

    They are excluded here. It fails on more ranks even with its own checkpoints, since the new
    ranks have no model file. It also needs the same parameters in each sub-group, whose size counts
    the elements of one rank.
    """
    saved = saved_by(setup, save_module_weights=True, exclude_frozen_parameters=True)
    assert_restored(saved, in_pr_8031(setup, world), pr_8031)


RUNS = (
    EngineCase(2, "1", empty=True),
    EngineCase(3, "1", "bf16", alignment=True),
    EngineCase(3, "2", "bf16", round_robin=True),
    EngineCase(2, "2", offload=True),
    EngineCase(3, "3", sub_group=700),
    EngineCase(4, "3", "bf16"),
    EngineCase(3, "B", "bf16"),
    EngineCase(3, "0", empty=True),
    EngineCase(2, "0", "bf16"),
)


def expected(saved: Saved) -> dict[str, torch.Tensor]:
    """Return the state that the oracle found in the saving run, as a state dict."""
    held = saved.dump()
    masters = {k.removeprefix("master/"): v for k, v in held.items() if k.startswith("master/")}
    frozen = {k.removeprefix("frozen/"): v for k, v in held.items() if k.startswith("frozen/")}
    empty = {k.removeprefix("weight/"): v for k, v in held.items() if "/empty" in k}
    buffers = {name: held[f"buffer/0/{name}"] for name in BUFFERS}
    tied = {"head.weight": masters["embedding.weight"]}
    return {**empty, **frozen, **buffers, **masters, **tied}


def assert_exact(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert not [name for name, w in wanted.items() if not same_bits(found[name], w)]


def recovered(path: str, *, exclude_frozen: bool) -> dict[str, Any]:
    """Run DeepSpeed's function, in a rank since this process does not import DeepSpeed."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = get_fp32_state_dict_from_zero_checkpoint(path, exclude_frozen_parameters=exclude_frozen)
    return dict(found)


def converted(path: str, output: str) -> dict[str, Any]:
    """Run Lightning's function; return its result and its file."""
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    found: dict[str, Any] = convert_zero_checkpoint_to_fp32_state_dict(path, output)
    return found


@pytest.mark.parametrize("setup", RUNS, ids=str)
def test_deepspeeds_function_recovers_the_weights(
    setup: EngineCase, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    saved = saved_by(setup)
    wanted = expected(saved)
    program = partial(recovered, saved.path, exclude_frozen=False)
    assert_exact(pools.run(1, program)[0], wanted)
    program = partial(recovered, saved.path, exclude_frozen=True)
    excluded = ("frozen.weight", "frozen.bias", "empty")
    trained = {name: tensor for name, tensor in wanted.items() if name not in excluded}
    assert_exact(pools.run(1, program)[0], trained)


@pytest.mark.long
@pytest.mark.parametrize("setup", RUNS, ids=str)
def test_lightnings_function_recovers_and_writes_the_same_weights(
    setup: EngineCase, pools: Pools, saved_by: Callable[..., Saved], tmp_path: Path
) -> None:
    saved = saved_by(setup)
    output = tmp_path / "weights.pt"
    found = pools.run(1, partial(converted, saved.path, str(output)))[0]
    assert_exact(found["state_dict"], expected(saved))
    assert_exact(torch.load(output, weights_only=False)["state_dict"], expected(saved))


@pytest.mark.long
@pytest.mark.skipif(find_spec("huggingface_hub") is None, reason="the script imports it")
@pytest.mark.parametrize("setup", [RUNS[1], RUNS[4], RUNS[6]], ids=str)
def test_the_script_in_the_checkpoint_recovers_the_weights(
    setup: EngineCase, saved_by: Callable[..., Saved], fork_server: ForkServer, tmp_path: Path
) -> None:
    saved = saved_by(setup)
    with forked_programs(fork_server, tmp_path / "programs") as programs:
        command = (programs / "python", "zero_to_fp32.py", ".", tmp_path)
        output_of(command, Path(saved.path), environment())
    found = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    # It writes a tied weight under one of its names, and frozen weights in fp32.
    tied = found.get("head.weight", found.get("embedding.weight"))
    wanted = {n: t.float() if "frozen" in n else t for n, t in expected(saved).items()}
    assert_exact({**found, "head.weight": tied, "embedding.weight": tied}, wanted)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"weights_only": True}, {"save_module_weights": True}])
@pytest.mark.parametrize("setup", RUNS, ids=str)
def test_every_file_loads_with_weights_only(
    setup: EngineCase, options: dict[str, bool], saved_by: Callable[..., Saved]
) -> None:
    saved = saved_by(setup, **options)
    files = sorted(Path(saved.path).rglob("*.pt"))
    assert sum(f.name.endswith("_optim_states.pt") for f in files) == setup.world
    assert sum(f.name.endswith("_model_states.pt") for f in files) >= 1
    for path in files:
        assert isinstance(torch.load(path, weights_only=True), dict)


@pytest.mark.long
@pytest.mark.parametrize("setup", [RUNS[2], RUNS[6]], ids=str)
def test_module_weights_are_in_the_model_file_on_request_only(
    setup: EngineCase, saved_by: Callable[..., Saved]
) -> None:
    kept, lean = saved_by(setup, save_module_weights=True), saved_by(setup)
    held = kept.dump()
    names = [k.removeprefix("weight/") for k in held if k.startswith("weight/")]
    modules = [
        torch.load(Path(s.path, "checkpoint/mp_rank_00_model_states.pt"), weights_only=True)
        for s in (kept, lean)
    ]
    assert all(same_bits(modules[0]["module"][n], held[f"weight/{n}"]) for n in names)
    assert not set(names) & modules[1]["module"].keys()
