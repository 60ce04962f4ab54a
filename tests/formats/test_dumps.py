"""Dumps of ``optimizer.state_dict()`` made by hand are restored bit for bit, or refused.

The dumps are real. They are compared with the state in memory of the dumped engines.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from lightning_elastic_zero.core.manifest import Manifest
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ElasticZeroError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.deepspeed_files import CLASS_STUBS
from lightning_elastic_zero.formats.dumps import describe_dumps
from lightning_elastic_zero.formats.open import open_checkpoint
from lightning_elastic_zero.tools.conversion import convert_checkpoint
from lightning_elastic_zero.tools.selection import ConvertOptions
from tests.formats._load_assertions import restored
from tests.formats._restore_programs import Case
from tests.support.checkpoints import Loading, refusal
from tests.support.engines import group_members
from tests.support.foreign_checkpoints import Fixture, names, unpack
from tests.support.oracle import Dump
from tests.support.ranks import Pools

NAMES = "param_slice_mappings"
"""The entry in which DeepSpeed's ZeRO-1/2 stores names and their positions."""


def load(path: Path) -> Any:
    """Load a file without DeepSpeed's classes for scalers and positions."""
    pairs: Any = [(cls, name) for name, cls in CLASS_STUBS.items()]
    with torch.serialization.safe_globals(pairs):
        return _plain(torch.load(path, weights_only=True))


def _plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(_plain, tree))
    if type(tree) in CLASS_STUBS.values():
        return int(tree) if isinstance(tree, int) else None
    return tree


def change(path: Path, **entries: Any) -> None:
    """Save a file again with other entries, and without those that are None."""
    tree = {**load(path), **entries}
    torch.save({key: value for key, value in tree.items() if value is not None}, path)


def dumps_in(folder: Path) -> list[Path]:
    """Return the dumps in the order of ranks."""
    return sorted(folder.glob("optimizer.*.pt"))


def forget_names(folder: Path) -> None:
    """Remove the names that newer releases write into the dumps."""
    for path in dumps_in(folder):
        change(path, **{NAMES: None})


def from_stock(fixture: Fixture, folder: Path) -> Path:
    """Reduce a stock checkpoint to the files that a user would have saved by hand."""
    tag = (fixture.checkpoint / "latest").read_text().strip()
    shards = sorted((fixture.checkpoint / tag).glob("*zero_pp_rank_*_optim_states.pt"))
    for rank, path in enumerate(shards):
        torch.save(load(path)["optimizer_state_dict"], folder / f"optimizer.{rank:02d}.pt")
    torch.save(model_file(fixture.truth()), folder / "model.pt")
    return folder


def model_file(held: Dump) -> dict[str, torch.Tensor]:
    """Return the state dict of a run with this state."""
    kinds = ("weight/", "frozen/", "buffer/0/")
    found = {
        k.removeprefix(kind): v for k, v in held.items() for kind in kinds if k.startswith(kind)
    }
    return {**found, "head.weight": found["embedding.weight"]}


DUMPS = [name for name in names() if name.startswith("dumps")]
OTHER = ("dumps", "universal", "lightning", "two-tags", "stale")
STOCK = [n for n in names() if not n.startswith(OTHER) and "ds0.17" not in n and "ds0.18" not in n]
TABLE = "elastic_dumps.json"

Copy: TypeAlias = "Callable[[str], Fixture]"


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    def give(name: str) -> Fixture:
        folder = tmp_path / name
        folder.mkdir()
        return unpack(name, folder)

    return give


def describe(fixture: Fixture, **options: Any) -> Manifest:
    """Describe a fixture's dumps, with a model of other weights."""
    return describe_dumps(fixture.checkpoint, fixture.setup.model(3), **options)


def groups_of(fixture: Fixture) -> list[list[str]]:
    """Return the names in each parameter group of the run's optimizer."""
    model = fixture.setup.model(3)
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [[names[p] for p in ps] for ps in group_members(model, fixture.setup.grouping)]


def case_of(fixture: Fixture, **changes: Any) -> Case:
    target = replace(fixture.setup, **changes)
    return Case(fixture, target, str(fixture.checkpoint), counters=False, client_state={})


# -- loads -----------------------------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.parametrize("forgotten", [False, True], ids=["with-names", "without-names"])
@pytest.mark.parametrize("name", DUMPS)
def test_dumps_load_on_the_same_ranks(name: str, forgotten: bool, pools: Pools, copy: Copy) -> None:
    fixture = copy(name)
    if forgotten:
        forget_names(fixture.checkpoint)
    describe(fixture, groups=groups_of(fixture) if forgotten else None)
    restored(pools, case_of(fixture))


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "world", "zero"),
    [
        ("dumps1", 1, "3"),
        ("dumps1", 3, "2"),
        ("dumps2", 3, "3"),
        ("dumps2", 1, "1"),
        ("dumps2-two", 1, "2"),
        ("dumps2-two", 2, "3"),
        ("dumps3", 1, "3"),
        ("dumps3", 3, "1"),
        ("dumps-bf16", 1, "B"),
        ("dumps-bf16", 3, "3"),
    ],
)
def test_dumps_load_on_other_ranks_and_stages(
    name: str, world: int, zero: str, pools: Pools, copy: Copy
) -> None:
    fixture = copy(name)
    describe(fixture)
    restored(pools, case_of(fixture, world=world, zero=zero, sub_group=20))


@pytest.mark.cases(12)
@pytest.mark.parametrize("forgotten", [False, True], ids=["with-names", "without-names"])
@pytest.mark.parametrize("name", STOCK)
def test_the_found_order_is_the_one_in_deepspeeds_files(
    name: str, forgotten: bool, copy: Copy, tmp_path: Path
) -> None:
    fixture = copy(name)
    folder = tmp_path / "by hand"
    folder.mkdir()
    from_stock(fixture, folder)
    if forgotten:
        forget_names(folder)
    stock = open_checkpoint(fixture.checkpoint).manifest
    unnamed = forgotten or stock.stage == 3
    groups = groups_of(fixture) if unnamed else None
    if name.startswith("elastic3"):  # These dumps do not record the parameter groups.
        groups = [[n for names in groups_of(fixture) for n in names]]
    found = describe_dumps(folder, fixture.setup.model(3), groups=groups)
    assert found.buffers == stock.buffers
    assert [g.hyperparameters for g in found.groups] == [g.hyperparameters for g in stock.groups]
    assert found.stage == stock.stage
    shapes = {p.name: (p.shape, p.group, p.aliases) for p in stock.parameters}
    assert {p.name: (p.shape, p.group, p.aliases) for p in found.parameters} == shapes


@pytest.mark.parametrize("source", ["stock", "with-names", "without-names"])
def test_groups_have_the_optimizers_order_after_round_robin_gradients(
    source: str, copy: Copy, tmp_path: Path
) -> None:
    """The order in the flat buffers differs. torch's optimizers identify states by position."""
    fixture = copy("round-robin")
    path, groups = fixture.checkpoint, groups_of(fixture)
    if source != "stock":
        (tmp_path / "by hand").mkdir()
        path = from_stock(fixture, tmp_path / "by hand")
        if source == "without-names":
            forget_names(path)
        passed = groups if source == "without-names" else None
        describe_dumps(path, fixture.setup.model(3), groups=passed)
    with closing(open_checkpoint(path)) as reader:
        assert [[*group.names] for group in reader.manifest.groups] == groups
        assert any(
            buffer.names != group.names
            for buffer, group in zip(reader.manifest.buffers, reader.manifest.groups, strict=True)
        )
    convert_checkpoint(path, tmp_path / "a.ckpt", "lightning", ConvertOptions(optimizer=True))
    (optimizer,) = torch.load(tmp_path / "a.ckpt", weights_only=True)["optimizer_states"]
    truth = fixture.truth()
    for index, name in enumerate(chain.from_iterable(groups)):
        moments = optimizer["state"][index]["exp_avg"]
        assert torch.equal(moments.view(-1), truth[f"exp_avg/{name}"].view(-1)), name


def test_missing_state_of_dumps_is_reported(copy: Copy) -> None:
    fixture = copy("dumps2")
    weights = load(fixture.checkpoint / "model.pt")
    torch.save(
        {"state_dict": {k: v for k, v in weights.items() if k != "average"}, "epoch": 1},
        fixture.checkpoint / "model.pt",
    )
    describe(fixture)
    reader = open_checkpoint(fixture.checkpoint)
    assert reader.info.lacks == (
        "step counters",
        "the trainer's state",
        "RNG states",
        "buffers of ranks other than 0",
    )
    assert not reader.info.has_counters
    assert reader.manifest.module_buffers == (
        "seen",
        "bn.running_mean",
        "bn.running_var",
        "bn.num_batches_tracked",
    )


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"format_version": 3}, "3.*, expected .*2"),
        ({"format_version": 1}, "1.*, expected .*2"),
        ({"format": "another"}, "'another'"),
        ({"buffers": None}, "cannot be read"),
        ({"files": {"../x": 1}}, r"invalid file name '\.\./x'"),
    ],
)
def test_damaged_and_other_descriptions_are_refused(
    entries: dict[str, Any], text: str, copy: Copy
) -> None:
    fixture = copy("dumps2")
    describe(fixture)
    path = fixture.checkpoint / TABLE
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
    with pytest.raises(CheckpointFormatError, match=text):
        open_checkpoint(fixture.checkpoint)


def test_a_file_with_the_descriptions_name_is_not_overwritten(copy: Copy) -> None:
    """A description by this library is overwritten, even if it is truncated."""
    fixture = copy("dumps2")
    table = fixture.checkpoint / "elastic_dumps.json"
    table.write_text('{"mine": 1}')
    with pytest.raises(CheckpointFormatError, match=r"elastic_dumps\.json was not written by"):
        describe(fixture)
    assert table.read_text() == '{"mine": 1}'
    table.unlink()
    describe(fixture)
    table.write_text(table.read_text()[:-9])
    describe(fixture)
    assert not list(fixture.checkpoint.glob(".*.tmp"))


def test_a_model_on_the_meta_device_is_enough(copy: Copy) -> None:
    fixture = copy("dumps3")
    described = describe(fixture)
    with torch.device("meta"):
        model = fixture.setup.model(3)
    assert describe_dumps(fixture.checkpoint, model) == described


def test_dumps_may_have_any_names_in_rank_order(copy: Copy) -> None:
    fixture = copy("dumps1")
    folder = fixture.checkpoint
    for path, name in zip(dumps_in(folder), ("first", "second"), strict=True):
        path.rename(folder / name)
    (folder / "model.pt").rename(folder / "weights.bin")
    found = describe(fixture, dumps=["first", "second"], model_file="weights.bin")
    assert open_checkpoint(folder).manifest == found
    with pytest.raises(CheckpointMismatchError, match="embedding"):
        describe(fixture, dumps=["second", "first"], model_file="weights.bin")


def test_a_renamed_model_file_of_deepspeed_is_accepted(copy: Copy) -> None:
    fixture = copy("dumps1")
    folder = fixture.checkpoint
    found = describe(fixture)
    saved = folder / "mp_rank_00_model_states.pt"
    torch.save({"module": load(folder / "model.pt")}, saved)
    saved.replace(folder / "model.pt")
    assert describe(fixture).parameters == found.parameters


def of_muon(groups: list[Any], _: dict[Any, Any]) -> None:
    """Mark a group as one of Muon's, whose momenta in ZeRO-1/2 are of whole parameters."""
    groups[0]["use_muon"] = True


def global_state(_: list[Any], states: dict[Any, Any]) -> None:
    states["global"] = {"k": torch.tensor(1)}


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (of_muon, "keeps Muon's momentum of whole parameters"),
        (global_state, "belongs to no parameter (keys 'global')"),
    ],
)
def test_optimizer_state_that_cannot_be_resharded_is_named(
    edit: Callable[[list[Any], dict[Any, Any]], None], text: str, copy: Copy
) -> None:
    """A load of the optimizer state is refused with this reason, as of DeepSpeed's own files."""
    fixture = copy("dumps2")
    for path in dumps_in(fixture.checkpoint):
        held = load(path)["base_optimizer_state"]
        edit(held["param_groups"], held["state"])
        change(path, base_optimizer_state=held)
    describe(fixture)
    with closing(open_checkpoint(fixture.checkpoint)) as reader:
        assert text in reader.info.unmatched
        assert "load_optimizer_state=False" in reader.info.unmatched


# -- refusals of a description ---------------------------------------------------------------------


def moved(fixture: Fixture) -> dict[str, torch.Tensor]:
    """Return the weights of another step: each is a quarter larger."""
    held = fixture.truth()
    weights = {k: v * 1.25 for k, v in held.items() if k.startswith("weight/")}
    return model_file({**held, **weights})


def other_step(fixture: Fixture) -> None:
    """Replace the model file by that of another step."""
    torch.save(moved(fixture), fixture.checkpoint / "model.pt")


def one_element(fixture: Fixture) -> None:
    """Change the last bit of one weight."""
    path = fixture.checkpoint / "model.pt"
    weights = load(path)
    weights["b.weight"].view(torch.int16)[17, 3] ^= 1
    torch.save(weights, path)


def missing_dump(fixture: Fixture) -> None:
    dumps_in(fixture.checkpoint)[-1].unlink()


def missing_first(fixture: Fixture) -> None:
    dumps_in(fixture.checkpoint)[0].unlink()


def one_too_many(fixture: Fixture) -> None:
    """Keep a dump of a larger world."""
    shutil.copy(dumps_in(fixture.checkpoint)[0], fixture.checkpoint / "optimizer.02.pt")


def other_stage(fixture: Fixture) -> None:
    """Change the stage in the dump of one rank."""
    change(dumps_in(fixture.checkpoint)[1], zero_stage=1)


def other_run(fixture: Fixture) -> None:
    """Change one rank's masters to those of another run."""
    path = dumps_in(fixture.checkpoint)[1]
    flats = load(path)["single_partition_of_fp32_groups"]
    change(path, single_partition_of_fp32_groups=[flat + 1 for flat in flats])


def other_moments(fixture: Fixture) -> None:
    path = dumps_in(fixture.checkpoint)[1]
    state = load(path)["base_optimizer_state"]
    state["state"][0]["step"] += 1
    change(path, base_optimizer_state=state)


def no_moments(fixture: Fixture) -> None:
    """Empty one rank's states, as before the first step."""
    path = dumps_in(fixture.checkpoint)[1]
    state = load(path)["base_optimizer_state"]
    change(path, base_optimizer_state={**state, "state": {}})


def no_masters(fixture: Fixture) -> None:
    """Empty the masters, as NVMe offload does."""
    for path in dumps_in(fixture.checkpoint):
        empty = [torch.empty(0) for _ in load(path)["single_partition_of_fp32_groups"]]
        change(path, single_partition_of_fp32_groups=empty)


def no_zero(fixture: Fixture) -> None:
    for path in dumps_in(fixture.checkpoint):
        torch.save({"state": {}, "param_groups": []}, path)


def no_dumps(fixture: Fixture) -> None:
    for path in dumps_in(fixture.checkpoint):
        path.unlink()


def no_model_file(fixture: Fixture) -> None:
    (fixture.checkpoint / "model.pt").unlink()


def no_weights(fixture: Fixture) -> None:
    torch.save({"epoch": 3}, fixture.checkpoint / "model.pt")


def two_of_a_rank(fixture: Fixture) -> None:
    shutil.copy(dumps_in(fixture.checkpoint)[0], fixture.checkpoint / "optimizer.0.pt")


def cut_short(fixture: Fixture) -> None:
    path = dumps_in(fixture.checkpoint)[1]
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("harm", "error", "text"),
    [
        (
            other_step,
            CheckpointMismatchError,
            "9 of 9 parameters, rounded, .* one, .* embedding.weight, .*saved at the same step",
        ),
        (
            one_element,
            CheckpointMismatchError,
            r"1 of 9 parameters, .* model.pt, only in .*: b.weight\.",
        ),
        (missing_dump, CheckpointCorruptedError, "dumped on 2 ranks, found 1 dumps"),
        (missing_first, CheckpointCorruptedError, "dumped on 2 ranks, found 1 dumps"),
        (one_too_many, CheckpointFormatError, "found 3 dumps.*only the dumps of one run"),
        (other_stage, CheckpointFormatError, "optimizer.01.pt is of .* stage 1.*stage 2"),
        (other_run, CheckpointMismatchError, "only in the dumps of rank 1:"),
        (
            other_moments,
            CheckpointFormatError,
            "optimizer.01.pt has .*optimizer.00.pt .*saved at other steps",
        ),
        (no_moments, CheckpointFormatError, "optimizer.01.pt has the states ..,"),
        (no_masters, UnsupportedError, "optimizer.00.pt lacks the master weights: offload to NVMe"),
        (no_zero, UnsupportedError, "not from ZeRO-1, 2 or 3"),
        (no_dumps, CheckpointNotFoundError, r"contains no files optimizer.\*.pt"),
        (no_model_file, CheckpointCorruptedError, "model.pt cannot be read"),
        (no_weights, CheckpointFormatError, "model.pt contains no state dict"),
        (
            two_of_a_rank,
            CheckpointCorruptedError,
            "the rank of .* is not clear",
        ),
        (cut_short, ElasticZeroError, "optimizer.01.pt"),
    ],
)
@pytest.mark.parametrize("forgotten", [False, True], ids=["with-names", "without-names"])
def test_inconsistent_folders_are_refused_and_not_described(
    harm: Callable[[Fixture], None],
    error: type[Exception],
    text: str,
    forgotten: bool,
    copy: Copy,
) -> None:
    fixture = copy("dumps2")
    if forgotten:
        forget_names(fixture.checkpoint)
    harm(fixture)
    with pytest.raises(error, match=f"(?s){text}"):
        describe(fixture)
    assert not list(fixture.checkpoint.glob(f"*{TABLE}*"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden": 6}, "different shapes: a.weight .saved .5, 33., here .6, 33.."),
        ({"renamed": True}, "missing from the file: c.weight, c.bias"),
        ({"empty": True}, "missing from the file: empty"),
    ],
)
def test_another_architecture_is_refused_with_all_differences(
    changes: dict[str, Any], text: str, copy: Copy
) -> None:
    fixture = copy("dumps2")
    with pytest.raises(CheckpointMismatchError, match=text):
        describe_dumps(fixture.checkpoint, replace(fixture.setup, **changes).model(3))


def test_a_wrong_number_of_trained_elements_is_refused(copy: Copy) -> None:
    fixture = copy("dumps3")
    model = fixture.setup.model(3)
    model.frozen.requires_grad_(requires_grad=True)
    with pytest.raises(CheckpointMismatchError, match="contain 1,022 master weights on each rank"):
        describe_dumps(fixture.checkpoint, model)


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([["a.weight", "nobody"]], "parameters that the model does not have: nobody"),
        ([["a.weight"], ["a.weight"]], "twice: a.weight"),
        ([["a.weight"]], "has 1 parameter groups, the dumps have 2"),
        ([["a.weight"], ["a.bias"]], r"contain [\d,]+ master weights of parameter group 0, but"),
    ],
)
def test_passed_groups_are_compared_with_the_dumps(
    groups: list[list[str]], text: str, copy: Copy
) -> None:
    fixture = copy("dumps2-two")
    with pytest.raises(CheckpointMismatchError, match=text):
        describe(fixture, groups=groups)


def test_groups_in_another_order_than_the_optimizers_are_refused(copy: Copy) -> None:
    fixture = copy("dumps2-two")
    groups = [list(group.names) for group in describe(fixture).groups]
    assert [list(g.names) for g in describe(fixture, groups=groups).groups] == groups
    with pytest.raises(CheckpointMismatchError, match="of parameter group 0, but its"):
        describe(fixture, groups=groups[::-1])


def test_several_groups_without_names_must_be_passed(copy: Copy) -> None:
    fixture = copy("dumps2-two")
    forget_names(fixture.checkpoint)
    with pytest.raises(CheckpointMismatchError, match=r"do not name .* 2 .* groups.*groups="):
        describe(fixture)


def test_a_wrong_order_within_a_group_is_refused_by_name(copy: Copy) -> None:
    fixture = copy("dumps3")
    (names,) = groups_of(fixture)
    with pytest.raises(CheckpointMismatchError, match=r"rounded, differ from model\.pt: .*groups="):
        describe(fixture, groups=[names[::-1]])


# -- refusals of a load ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (missing_dump, "optimizer.01.pt cannot be read"),
        (cut_short, r"optimizer.01.pt has \d+ bytes, expected \d+"),
        (no_model_file, "model.pt cannot be read"),
    ],
)
def test_missing_or_resized_files_are_refused(
    harm: Callable[[Fixture], None], text: str, copy: Copy
) -> None:
    fixture = copy("dumps2")
    describe(fixture)
    harm(fixture)
    with pytest.raises(CheckpointCorruptedError, match=text):
        open_checkpoint(fixture.checkpoint)


def same_size_of_another_step(fixture: Fixture) -> None:
    """Overwrite the model file with that of another step, which has the same size."""
    path, later = fixture.checkpoint / "model.pt", moved(fixture)
    torch.save({name: later[name] for name in load(path)}, path)


def swapped(fixture: Fixture) -> None:
    """Swap the names of two parameters of the same size in the description."""
    path = fixture.checkpoint / TABLE
    text = path.read_text()
    for one, other in (("bn.weight", "?"), ("bn.bias", "bn.weight"), ("?", "bn.bias")):
        text = text.replace(f'"{one}"', f'"{other}"')
    path.write_text(text)


@pytest.mark.engine
@pytest.mark.parametrize("name", ["dumps2", "dumps3"])
@pytest.mark.parametrize("harm", [same_size_of_another_step, swapped])
def test_each_load_compares_masters_with_the_model_file(
    name: str, harm: Callable[[Fixture], None], pools: Pools, copy: Copy
) -> None:
    fixture = copy(name)
    weights = {
        name: tensor.clone() for name, tensor in load(fixture.checkpoint / "model.pt").items()
    }
    torch.save(
        {**weights, "head.weight": weights["embedding.weight"]}, fixture.checkpoint / "model.pt"
    )
    describe(fixture)
    harm(fixture)
    setup = replace(fixture.setup, world=1)
    found = pools.run(1, partial(refusal, setup, Loading(str(fixture.checkpoint))))[0]
    assert found.error == "CheckpointCorruptedError", found.message
    assert "do not round to" in found.message
    assert found.unchanged
