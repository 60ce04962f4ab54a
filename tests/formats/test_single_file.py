"""Single files of Lightning and torch are restored bit for bit on any number of devices.

They are compared with the state in memory of the writers: real Trainers (DDP, FSDP2, one device),
FSDP2 over gloo, and plain torch.
"""

from __future__ import annotations

import argparse
import fractions
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.formats import _torch_writers as writers
from tests.formats._load_assertions import (
    TARGETS,
    around_load,
    assert_restored,
    refused,
    refused_all,
)
from tests.formats._torch_writers import Run
from tests.support.checkpoints import (
    Saved,
    compare_states,
    evaluated_weights,
    train_and_save,
)
from tests.support.engines import EngineCase, engine_of, group_members
from tests.support.oracle import Dump, differences, expected_in
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine

WRITERS: dict[str, tuple[int, Callable[[Run], None], dict[str, Any]]] = {
    "ddp": (2, writers.fit_lightning, {}),
    "one device": (1, writers.fit_lightning, {}),
    "fsdp on 2": (2, partial(writers.fit_lightning, sharded="file"), {}),
    "fsdp on 3, by name": (3, writers.save_fsdp_full, {}),
    "bf16": (1, writers.save_alone, {"dtype": "bfloat16"}),
    "own order": (1, writers.save_alone, {"grouping": "reversed"}),
    "frozen too": (1, writers.save_alone, {"grouping": "every"}),
    "frozen in two": (1, writers.save_alone, {"grouping": "every two"}),
    "plain SGD": (1, writers.save_alone, {"optimizer": "SGD"}),
    "momentum": (1, writers.save_alone, {"optimizer": "Momentum"}),
    "named": (1, writers.save_alone, {"optimizer": "Momentum", "named": True}),
    "never": (1, writers.fit_lightning, {"everything": False}),
    "weights": (1, partial(writers.fit_lightning, weights_only=True), {}),
}


@pytest.fixture(scope="session")
def run_of(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Return a writer's checkpoint, made once per session."""
    folder = tmp_path_factory.mktemp("single")
    made: dict[str, Run] = {}

    def get(name: str) -> Run:
        if name not in made:
            world, write, options = WRITERS[name]
            made[name] = Run(str(folder / f"{len(made)}.any"), world, **options)
            pools.run(world, partial(write, made[name]))
        return made[name]

    return get


def rest_of(path: str) -> dict[str, Any]:
    """Return the expected client state, read without the library."""
    tree = torch.load(path, weights_only=True)
    return {k: v for k, v in tree.items() if k not in ("state_dict", "optimizer_states")}


CASES = [
    *((name, target) for name in ("ddp", "fsdp on 2") for target in TARGETS),
    ("one device", TARGETS[1]),
    ("fsdp on 3, by name", TARGETS[0]),
    ("bf16", EngineCase(2, "B", "bf16", bucket=5000)),
    ("ddp", EngineCase(2, "3", "bf16", bucket=5000)),
    ("own order", replace(TARGETS[1], grouping="reversed")),
    ("own order", replace(TARGETS[2], grouping="reversed")),
    ("frozen too", replace(TARGETS[0], grouping="one")),
    ("plain SGD", replace(TARGETS[1], optimizer="SGD")),
    ("momentum", replace(TARGETS[2], optimizer="Momentum")),
    ("named", replace(TARGETS[1], optimizer="Momentum")),
]


@pytest.mark.parametrize(("name", "target"), CASES, ids=str)
def test_a_single_file_restores_all_state(
    name: str, target: EngineCase, pools: Pools, run_of: Callable[[str], Run]
) -> None:
    run = run_of(name)
    assert_restored(pools, run, target, rest_of(run.path))


@pytest.mark.long
def test_the_comparison_detects_a_run_that_loaded_nothing(
    pools: Pools, run_of: Callable[[str], Run]
) -> None:
    target = TARGETS[1]
    wanted = torch.load(run_of("ddp").truth_path, weights_only=True)
    before, after = around_load(pools, target, run_of("ddp").path)
    assert len(differences(expected_in(wanted, EngineCase(1), target), before)) > 40
    assert not compare_states(expected_in(wanted, EngineCase(1), target), after).differing


# -- weights alone -----------------------------------------------------------------------------


def assert_weights(pools: Pools, target: EngineCase, path: str, truth: Dump) -> None:
    """Assert that weights and buffers are the writer's, and that the optimizer is fresh."""
    _, after = around_load(pools, target, path, load_optimizer_state=False)
    wanted = expected_in({k: v for k, v in truth.items() if _is_weight(k)}, EngineCase(1), target)
    assert not differences(wanted, {k: v for k, v in after.items() if _is_weight(k)})
    assert not any(key.startswith(("exp_avg", "scalar")) for key in after)


def _is_weight(key: str) -> bool:
    return key.startswith(("master/", "weight/", "frozen/", "buffer/"))


@pytest.mark.parametrize("name", ["weights", "never"])
def test_files_without_optimizer_state_load_their_weights_on_request(
    name: str, pools: Pools, run_of: Callable[[str], Run]
) -> None:
    run, target = run_of(name), TARGETS[1]
    found = refused(pools, target, run.path)
    assert found.error == "CheckpointMismatchError"
    message = "has no optimizer state" if name == "weights" else "has no state for never"
    assert message in found.message
    assert "load_optimizer_state=False" in found.message
    truth = torch.load(run.truth_path, weights_only=True)
    assert_weights(pools, target, run.path, truth)


@pytest.mark.long
def test_an_evaluating_engine_gets_weights_and_buffers(
    pools: Pools, run_of: Callable[[str], Run]
) -> None:
    run = run_of("ddp")
    truth = torch.load(run.truth_path, weights_only=True)
    for setup in (EngineCase(2, "3"), EngineCase(1, "0")):
        saved = Saved(setup, run.path)
        found = pools.run(setup.world, partial(evaluated_weights, setup, saved))[0]
        assert len(found) > 15
        for key, value in found.items():
            kind, _, name = key.partition("/")
            held = truth[f"buffer/0/{name}"] if kind == "buffer" else None
            if held is None:
                held = truth.get(f"weight/{name}", truth.get(f"frozen/{name}"))
            assert held.tolist() == value, key


@pytest.mark.long
def test_a_file_of_lightnings_converter_loads_its_weights(pools: Pools, tmp_path: Path) -> None:
    saved = Saved(EngineCase(2, "3", bucket=5000), str(tmp_path / "a.ckpt"))
    pools.run(2, partial(train_and_save, saved))
    path = str(tmp_path / "consolidated")
    pools.run(1, partial(consolidate, saved.path, path))
    truth = saved.dump()
    for target in (TARGETS[0], TARGETS[2]):
        assert_weights(pools, target, path, truth)
    assert "load_optimizer_state=False" in refused(pools, TARGETS[0], path).message


def consolidate(directory: str, path: str) -> None:
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    convert_zero_checkpoint_to_fp32_state_dict(directory, path)


# -- refusals ------------------------------------------------------------------------------------


Tree = dict[str, Any]


def _one_name(tree: Tree) -> None:
    del tree["state_dict"]["embedding.weight"]


def _extra(tree: Tree) -> None:
    tree["state_dict"]["surplus"] = torch.ones(2)


def _lacking(tree: Tree) -> None:
    del tree["state_dict"]["average"], tree["state_dict"]["a.weight"]


def _objects(tree: Tree) -> None:
    tree["hyper_parameters"] = {"args": argparse.Namespace(lr=1.0), "tilt": TILT}


TILT = fractions.Fraction(1, 3)

CHANGED: dict[str, tuple[Callable[[Tree], object], str, tuple[str, ...]]] = {
    "untied": (
        lambda tree: tree["state_dict"].update(
            {"head.weight": tree["state_dict"]["head.weight"] + 1}
        ),
        "CheckpointMismatchError",
        ("embedding.weight and head.weight", "untie"),
    ),
    "surplus": (_extra, "CheckpointMismatchError", ("not in the model: surplus",)),
    "lacking": (
        _lacking,
        "CheckpointMismatchError",
        ("missing from the checkpoint: a.weight", "buffers missing from the checkpoint: average"),
    ),
    "no tensor": (
        lambda tree: tree["state_dict"].update({"a.words": "text"}),
        "UnsupportedError",
        ("'a.words' is a str",),
    ),
    "no weights": (
        lambda tree: tree.update(weights=tree.pop("state_dict")),
        "CheckpointFormatError",
        ("no `state_dict`", "'weights'"),
    ),
    "two optimizers": (
        lambda tree: tree["optimizer_states"].extend(tree["optimizer_states"]),
        "CheckpointMismatchError",
        ("the states of 2 optimizers", "load_optimizer_state=False"),
    ),
    "objects": (
        _objects,
        "UnsupportedError",
        ("argparse.Namespace", "allow_pickle=True", "add_safe_globals"),
    ),
}


def changed(run: Run, path: Path, change: Callable[[Tree], object]) -> str:
    """Write a changed copy of a writer's file."""
    tree = torch.load(run.path, weights_only=True)
    change(tree)
    torch.save(tree, path)
    return str(path)


def test_unmatched_entries_are_refused_with_a_remedy(
    pools: Pools, run_of: Callable[[str], Run], tmp_path: Path
) -> None:
    run = run_of("ddp")
    paths = [changed(run, tmp_path / name, change) for name, (change, *_) in CHANGED.items()]
    for path, found, (_, error, names) in zip(
        paths, refused_all(pools, TARGETS[1], paths), CHANGED.values(), strict=True
    ):
        assert path in found.message
        assert found.error == error, found.message
        assert all(name in found.message for name in names), found.message


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ddp", {"grouping": "swapped"}, "groups of 3, 6 parameters (0 of them"),
        ("ddp", {"grouping": "three"}, "saved with 2 parameter groups, here are 3"),
        ("ddp", {"hidden": 64}, "a.weight (saved (65, 33), here (64, 33))"),
        ("ddp", {"optimizer": "Momentum"}, "this run's SGD"),
        ("momentum", {}, "this run's AdamW"),
        ("plain SGD", {}, "this run's AdamW"),
        ("ddp", {"renamed": True}, "missing from the checkpoint: c.weight"),
        ("fsdp on 3, by name", {"grouping": "swapped"}, "in parameter group 0 here, in 1 when"),
        ("frozen in two", {}, "of them without state"),
    ],
)
def test_another_runs_positions_shapes_and_groups_are_refused(
    name: str, change: dict[str, Any], message: str, pools: Pools, run_of: Callable[[str], Run]
) -> None:
    found = refused(pools, replace(TARGETS[1], **change), run_of(name).path)
    assert found.error == "CheckpointMismatchError", found.message
    assert message in found.message


@pytest.mark.long
def test_hyperparameters_of_groups_without_known_members_are_refused(
    pools: Pools, run_of: Callable[[str], Run]
) -> None:
    """Their rates and weight decay would be those of other groups."""
    target, path = replace(TARGETS[1], grouping="swapped"), run_of("ddp").path
    found = refused(pools, target, path, load_optimizer_state=False)
    assert found.error == "CheckpointMismatchError", found.message
    assert "2 parameter groups that identify their members by positions" in found.message
    options = {"load_optimizer_state": False, "load_hyperparameters": False}
    around_load(pools, target, path, **options)


def _flip(data: bytearray) -> None:
    data[len(data) // 2] ^= 4


def _truncate(data: bytearray) -> None:
    del data[len(data) // 2 :]


def _replace(data: bytearray) -> None:
    data[:] = b"no checkpoint"


DAMAGED: list[tuple[Callable[[bytearray], None], str]] = [
    (_flip, "CheckpointCorruptedError"),
    (_truncate, "CheckpointFormatError"),
    (_replace, "CheckpointFormatError"),
]


def test_damaged_files_are_refused_by_path(
    pools: Pools, run_of: Callable[[str], Run], tmp_path: Path
) -> None:
    paths: list[str] = []
    for damage, _ in DAMAGED:
        data = bytearray(Path(run_of("ddp").path).read_bytes())
        damage(data)
        paths.append(str(tmp_path / f"{len(paths)}"))
        Path(paths[-1]).write_bytes(data)
    for path, found, (_, error) in zip(
        paths, refused_all(pools, TARGETS[1], paths), DAMAGED, strict=True
    ):
        assert found.error == error, found.message
        assert path in found.message


@pytest.mark.long
def test_options_allow_pickle_tied_names_and_surplus(
    pools: Pools, run_of: Callable[[str], Run], tmp_path: Path
) -> None:
    run = run_of("ddp")
    objects = changed(run, tmp_path / "objects", _objects)
    tree = torch.load(objects, weights_only=False)
    wanted = {k: v for k, v in tree.items() if k not in ("state_dict", "optimizer_states")}
    for path, rest, options in (
        (objects, wanted, {"allow_pickle": True}),
        (changed(run, tmp_path / "one", _one_name), rest_of(run.path), {}),
        (changed(run, tmp_path / "more", _extra), rest_of(run.path), {"strict": False}),
    ):
        other = replace(run, path=path)
        Path(other.truth_path).symlink_to(run.truth_path)
        assert_restored(pools, other, TARGETS[1], rest, options=options)


@pytest.mark.long
def test_a_bare_state_dict_loads_its_weights(
    pools: Pools, run_of: Callable[[str], Run], tmp_path: Path
) -> None:
    run = run_of("ddp")
    tree = torch.load(run.path, weights_only=True)
    torch.save(dict(tree["state_dict"]), tmp_path / "bare.bin")
    truth = torch.load(run.truth_path, weights_only=True)
    assert_weights(pools, TARGETS[2], str(tmp_path / "bare.bin"), truth)


# -- order -----------------------------------------------------------------------------------------


def groups_of(setup: EngineCase) -> tuple[list[list[str]], list[list[str]]]:
    """Return the names of each group, as the engine reports them and as they were passed."""
    from lightning_elastic_zero.engine.live import LiveEngine

    model = setup.model(0)
    names = {id(p): name for name, p in model.named_parameters()}
    given = [[names[id(p)] for p in ps] for ps in group_members(model, setup.grouping)]
    with engine_of(setup, 0, model=model) as engine:
        reported = [list(group.names) for group in LiveEngine(engine).describe().groups]
    return reported, given


@pytest.mark.long
@pytest.mark.parametrize("setup", [*TARGETS, EngineCase(2, "B", "bf16", bucket=5000)], ids=str)
def test_groups_have_the_optimizers_order(setup: EngineCase, pools: Pools) -> None:
    """The order of the module and round robin do not change it."""
    reported, given = pools.run(
        setup.world, partial(groups_of, replace(setup, grouping="reversed"))
    )[0]
    assert reported == given
