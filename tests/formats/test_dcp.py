"""Directories of ``torch.distributed.checkpoint`` are restored bit for bit on any device count.

FSDP2 writes them over gloo on two and three ranks: a real Trainer with ModelParallelStrategy, the
layout of Lightning's FSDPStrategy, that of plain torch and that of its tutorial. They are compared
with the state in memory of the writers.
"""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_elastic_zero.core.layout import Transfer
from lightning_elastic_zero.core.manifest import (
    Group,
    Manifest,
    Parameter,
    TrainingProgress,
    Writer,
)
from lightning_elastic_zero.core.progress import NO_PROGRESS
from lightning_elastic_zero.errors import CheckpointCorruptedError
from lightning_elastic_zero.formats.dcp_read import read_metadata
from lightning_elastic_zero.formats.newest import verify_share
from lightning_elastic_zero.formats.open import open_checkpoint
from tests.formats import _torch_writers as writers
from tests.formats._load_assertions import (
    TARGETS,
    assert_restored,
    refused,
    refused_all,
    warnings_of_load,
)
from tests.formats._torch_writers import Run
from tests.support.engines import EngineCase, Net
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine


Tree = dict[str, Any]


@pytest.fixture(scope="session")
def sharded(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Return the checkpoint of a world in a layout, made once per session."""
    folder = tmp_path_factory.mktemp("sharded")
    made: dict[tuple[str, int], Run] = {}

    def get(layout: str, world: int) -> Run:
        if (layout, world) not in made:
            run = Run(str(folder / f"{len(made)}.any"), world)
            columns = layout == "columns"
            write = (
                writers.save_columns if columns else partial(writers.save_sharded, layout=layout)
            )
            pools.run(world, partial(write, run))
            made[layout, world] = run
        return made[layout, world]

    return get


def rest_of(layout: str, run: Run) -> dict[str, Any]:
    if layout == "model parallel":
        found: dict[str, Any] = torch.load(Path(run.path) / "meta.pt", weights_only=True)
        return found
    return writers.lightning_rest(run) if layout == "fsdp" else {"epoch": 1}


CASES = [
    *(("fsdp", 2, target) for target in TARGETS),
    *(("model parallel", 3, target) for target in TARGETS),
    ("plain", 2, TARGETS[2]),
    ("flattened", 3, TARGETS[1]),
    ("app", 2, TARGETS[0]),
    ("fsdp", 3, EngineCase(2, "B", "bf16", bucket=5000)),
]


@pytest.mark.parametrize(("layout", "world", "target"), CASES, ids=str)
def test_a_sharded_checkpoint_restores_all_state(
    layout: str, world: int, target: EngineCase, pools: Pools, sharded: Callable[..., Run]
) -> None:
    run = sharded(layout, world)
    # Lightning saves counters; plain torch does not.
    counters = "global_step" in rest_of(layout, run)
    assert_restored(pools, run, target, rest_of(layout, run), counters=counters)


@pytest.mark.parametrize("target", TARGETS[1:], ids=str)
def test_chunks_of_columns_are_joined(
    target: EngineCase, pools: Pools, sharded: Callable[..., Run]
) -> None:
    assert_restored(pools, sharded("columns", 2), target, {}, counters=False)


def alone(
    pools: Pools,
    folder: Path,
    make_tree: Callable[[Net, torch.optim.Optimizer], Tree],
    **options: Any,
) -> Run:
    run = Run(str(folder / "alone"), 1, **options)
    pools.run(1, partial(writers.save_tree, run, make_tree))
    return run


def by_position(model: Net, optimizer: torch.optim.Optimizer) -> Tree:
    return {"weights": model.state_dict(), "adam": optimizer.state_dict(), "note": {"of": [1, "2"]}}


def averaged(model: Net, optimizer: torch.optim.Optimizer) -> Tree:
    return {"model": model.state_dict(), "ema": model.state_dict(), "o": optimizer.state_dict()}


def averaged_in_part(model: Net, optimizer: torch.optim.Optimizer) -> Tree:
    return {**by_position(model, optimizer), "ema": {"a.weight": model.a.weight}}


def weights_at_the_top(model: Net, _: torch.optim.Optimizer) -> Tree:
    return dict(model.state_dict())


def two_optimizers(model: Net, optimizer: torch.optim.Optimizer) -> Tree:
    return {**by_position(model, optimizer), "other": optimizer.state_dict()}


@pytest.mark.long
@pytest.mark.parametrize("make_tree", [by_position, averaged_in_part])
def test_state_dicts_saved_from_one_rank_are_recognized(
    make_tree: Callable[[Net, torch.optim.Optimizer], Tree], pools: Pools, tmp_path: Path
) -> None:
    run = alone(pools, tmp_path, make_tree)
    assert_restored(pools, run, TARGETS[1], {"note": {"of": [1, "2"]}}, counters=False)


# -- the order of entries from several ranks ------------------------------------------------------


def _layers(count: int = 5) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = {}
    for index in range(count):
        named[f"layers.{index}.weight"] = torch.full((8, 8), float(index))
        named[f"layers.{index}.bias"] = torch.full((8,), float(index))
    return named


def save_replicated(path: str) -> list[str]:
    """Save as DDP does: the same on each rank, states by position. Return the order on disk."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_saver import save

    named = {name: torch.nn.Parameter(tensor) for name, tensor in _layers().items()}
    optimizer = torch.optim.Adam(named.values(), lr=0.0)
    for parameter in named.values():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    for index, parameter in enumerate(named.values()):
        optimizer.state[parameter]["exp_avg"].fill_(index)
        optimizer.state[parameter]["exp_avg_sq"].fill_(100 + index)
    model = {name: parameter.detach() for name, parameter in named.items()}
    save({"model": model, "optim": optimizer.state_dict()}, checkpoint_id=path)
    metadata = FileSystemReader(path).read_metadata()
    return [key for key in metadata.state_dict_metadata if key.startswith("model.")]


def _live_layers() -> Manifest:
    parameters = tuple(Parameter(n, tuple(t.shape), "float32", 0) for n, t in _layers().items())
    return Manifest(
        save_id="",
        stage=1,
        world_size=1,
        precision="fp32",
        master_dtype="float32",
        parameters=parameters,
        groups=(Group(tuple(_layers()), {}, ()),),
        buffers=(),
        module_buffers=(),
        files=(),
        progress=TrainingProgress(),
        writer=Writer(),
    )


def test_replicated_states_are_matched_by_position_not_file_order(
    pools: Pools, tmp_path: Path
) -> None:
    """Ranks balance the writing by load, in another order than the model's."""
    path = tmp_path / "replicated"
    on_disk = pools.run(2, partial(save_replicated, str(path)))[0]
    assert on_disk != [f"model.{name}" for name in _layers()], "the order is the model's own here"
    reader = open_checkpoint(path)
    reader.bind(_live_layers())
    assert not reader.info.unmatched
    for index, (name, tensor) in enumerate(_layers().items()):
        for key, expected in (("", float(name.split(".")[1])), ("exp_avg", index)):
            target = torch.empty(tensor.numel())
            run = Transfer(name, 0, tensor.numel(), 0, index, 0, 0, 0)
            reader.read([run], [{key: target}], NO_PROGRESS)
            assert torch.equal(target, torch.full_like(target, expected)), (name, key)
    reader.close()


@pytest.mark.long
def test_states_of_unknown_order_are_refused(pools: Pools, tmp_path: Path) -> None:
    """Without the planner's notes positions have no meaning, but names still do."""
    path = tmp_path / "replicated"
    pools.run(2, partial(save_replicated, str(path)))
    metadata = pickle.loads((path / ".metadata").read_bytes())  # noqa: S301 (just written)
    del metadata.planner_data["model.layers.0.weight"]
    # The tree stays known, except for its order.
    metadata.state_dict_metadata["model.layers.0.weight"] = metadata.state_dict_metadata.pop(
        "model.layers.0.weight"
    )
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    found = read_metadata(path)
    assert {leaf.key for leaf in found.leaves} == set(metadata.state_dict_metadata)
    assert not found.ordered


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_tree", "options", "change", "messages"),
    [
        (averaged, {}, {}, ("model (11 of 11), ema (11 of 11)", "several of them contain")),
        (averaged, {}, {"renamed": True}, ("model (9 of 11)", "none of them contains")),
        (two_optimizers, {}, {}, ("2 optimizers (adam, other)", "load_optimizer_state=False")),
        (weights_at_the_top, {}, {}, ("has no optimizer state",)),
        (by_position, {}, {"grouping": "swapped"}, ("groups of 3, 6 parameters",)),
        (by_position, {"everything": False}, {}, ("no state for never",)),
        (by_position, {}, {"optimizer": "Momentum"}, ("this run's SGD",)),
    ],
)
def test_unmatched_entries_are_refused_by_name(
    make_tree: Callable[[Net, torch.optim.Optimizer], Tree],
    options: dict[str, Any],
    change: dict[str, Any],
    messages: tuple[str, ...],
    pools: Pools,
    tmp_path: Path,
) -> None:
    run = alone(pools, tmp_path, make_tree, **options)
    found = refused(pools, replace(TARGETS[1], **change), run.path)
    assert found.error == "CheckpointMismatchError", found.message
    assert all(part in found.message for part in messages), found.message


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("fsdp", {"hidden": 64}, "a.weight (saved (65, 33), here (64, 33))"),
        ("fsdp", {"grouping": "swapped"}, "in parameter group 0 here, in 1 when saved"),
        ("fsdp", {"grouping": "three"}, "saved with 2 parameter groups, here are 3"),
        ("flattened", {"grouping": "one"}, "were saved with the hyperparameters"),
    ],
)
def test_other_shapes_and_groups_are_refused_by_name(
    layout: str, change: dict[str, Any], message: str, pools: Pools, sharded: Callable[..., Run]
) -> None:
    path = sharded(layout, 2 if layout == "fsdp" else 3).path
    found = refused(pools, replace(TARGETS[1], **change), path)
    assert found.error == "CheckpointMismatchError", found.message
    assert message in found.message


@pytest.mark.long
def test_swapped_averages_are_refused(
    pools: Pools, sharded: Callable[..., Run], tmp_path: Path
) -> None:
    """Lightning's WeightAveraging swaps average and weights, and chunks contain one of them."""
    path = tmp_path / "averaged"
    shutil.copytree(sharded("fsdp", 2).path, path)
    state = torch.load(path / "meta.pt", weights_only=True)
    torch.save({**state, "averaging_state": {"n_averaged": torch.tensor(3)}}, path / "meta.pt")
    found = refused(pools, TARGETS[1], str(path))
    assert found.error == "CheckpointMismatchError", found.message
    assert "is the average of WeightAveraging" in found.message


def _lose(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()


def _cut(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-10])


def _flip(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - of this test
    largest = max(metadata.storage_data.values(), key=lambda info: info.length)
    path = folder / largest.relative_path
    data = bytearray(path.read_bytes())
    data[largest.offset + largest.length // 2] ^= 1
    path.write_bytes(data)


def _forget(folder: Path) -> None:
    (folder / ".metadata").unlink()


def _garble(folder: Path) -> None:
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes()[:1000])


class _Harm:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def _harm(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(_Harm()))


def _point_elsewhere(folder: Path) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - of this test
    for info in metadata.storage_data.values():
        info.relative_path = "../" + info.relative_path
    path.write_bytes(pickle.dumps(metadata))


def _objects(folder: Path) -> None:
    state = torch.load(folder / "meta.pt", weights_only=True)
    torch.save({**state, "hparams": argparse.Namespace(lr=1)}, folder / "meta.pt")


def _take_back(folder: Path) -> None:
    """Leave Lightning's file of an earlier save."""
    state = torch.load(folder / "meta.pt", weights_only=True)
    torch.save({**state, "global_step": writers.STEPS - 1}, folder / "meta.pt")
    os.utime(folder / "meta.pt", (1.0, 1.0))


DAMAGED: list[tuple[Callable[[Path], None], str, str]] = [
    (_lose, "CheckpointCorruptedError", "__1_0.distcp (missing)"),
    (_cut, "CheckpointCorruptedError", "bytes)"),
    (_flip, "CheckpointCorruptedError", ".distcp is damaged at bytes"),
    (_forget, "CheckpointCorruptedError", "no .metadata"),
    (_garble, "CheckpointCorruptedError", ".metadata is damaged"),
    (_harm, "UnsupportedError", "mkdir"),
    (_point_elsewhere, "CheckpointFormatError", "outside its directory"),
    (_objects, "UnsupportedError", "argparse.Namespace"),
    (_take_back, "CheckpointFormatError", "but meta.pt is of step 2, and older than .metadata"),
]


def test_damage_is_refused_before_any_change(
    pools: Pools, sharded: Callable[..., Run], tmp_path: Path
) -> None:
    folders = [tmp_path / str(index) for index in range(len(DAMAGED))]
    for folder, (damage, *_) in zip(folders, DAMAGED, strict=True):
        shutil.copytree(sharded("fsdp", 2).path, folder)
        damage(folder)
    refusals = refused_all(pools, TARGETS[1], [str(folder) for folder in folders])
    for folder, found, (_, error, message) in zip(folders, refusals, DAMAGED, strict=True):
        assert found.error == error, found.message
        assert message in found.message
        assert str(folder) in found.message
    assert not Path("harm").exists()


def test_a_save_without_its_last_file_is_refused_or_a_warning(
    pools: Pools, sharded: Callable[..., Run], tmp_path: Path
) -> None:
    """Lightning writes the trainer's state last, so a killed save lacks it."""
    folder = tmp_path / "killed"
    shutil.copytree(sharded("fsdp", 2).path, folder)
    (folder / "meta.pt").unlink()
    with pytest.raises(CheckpointCorruptedError, match="which Lightning writes last, is missing"):
        verify_share(folder, 0, 1, NO_PROGRESS)
    found = refused(pools, TARGETS[1], str(folder))
    assert found.error == "CheckpointCorruptedError", found.message
    assert "is missing" in found.message
    assert "load_optimizer_state=False" in found.message
    target = replace(TARGETS[1], world=1)
    load = partial(warnings_of_load, target, str(folder), load_optimizer_state=False)
    (texts,) = pools.run(1, load)
    assert any("which Lightning writes last, is missing" in text for text in texts), texts


@pytest.mark.long
def test_a_load_warns_of_files_written_after_the_metadata(pools: Pools, tmp_path: Path) -> None:
    run = alone(pools, tmp_path, weights_at_the_top)
    written_s = (Path(run.path) / ".metadata").stat().st_mtime + 3600
    os.utime(Path(run.path) / "__0_0.distcp", (written_s, written_s))
    target = replace(TARGETS[1], world=1)
    load = partial(warnings_of_load, target, run.path, load_optimizer_state=False)
    (texts,) = pools.run(1, load)
    assert any("__0_0.distcp: written after .metadata" in text for text in texts), texts


@pytest.mark.long
def test_allow_pickle_restores_the_trainers_objects(
    pools: Pools, sharded: Callable[..., Run], tmp_path: Path
) -> None:
    run = sharded("fsdp", 2)
    folder = tmp_path / "copy"
    shutil.copytree(run.path, folder)
    _objects(folder)
    other = replace(run, path=str(folder))
    Path(other.truth_path).symlink_to(run.truth_path)
    wanted = {**rest_of("fsdp", run), "hparams": argparse.Namespace(lr=1)}
    assert_restored(pools, other, TARGETS[1], wanted, options={"allow_pickle": True})


@pytest.mark.long
def test_excluded_tensors_are_reported(pools: Pools, tmp_path: Path) -> None:
    run = alone(pools, tmp_path, averaged_in_part)
    reader = open_checkpoint(Path(run.path))
    assert reader.info.kind == "directory of torch.distributed.checkpoint"
    assert "the tensors of ema" in reader.info.lacks
