"""Files of two saves, and missing optimizer states, are refused if they are needed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_elastic_zero.errors import CheckpointCorruptedError, CheckpointFormatError
from lightning_elastic_zero.formats.open import open_checkpoint
from tests.formats._deepspeed_writers import write
from tests.formats._fixture_table import FixtureRow, small
from tests.formats._load_assertions import around_load, refused_all, restored
from tests.formats._read_whole import read_whole
from tests.formats._restore_programs import Case
from tests.support.engines import EngineCase
from tests.support.foreign_checkpoints import Fixture, unpack
from tests.support.oracle import same_bits
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine

SOURCE = small(2, "3", grouping="two", sub_group=15)
"""ZeRO-3: two parameter groups, each in several sub-groups."""

TARGET = small(1, "2", grouping="two")
SHARDS, MODELS = "*_optim_states.pt", "*_model_states.pt"


@pytest.fixture(scope="module")
def two_tags(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the saves of one run by stock DeepSpeed, at steps 3 and 5."""
    folder = tmp_path_factory.mktemp("two")
    pools.run(2, partial(write, FixtureRow("", SOURCE, "", kind="two tags"), str(folder)))
    return folder / "checkpoint"


def mixed(two_tags: Path, folder: Path, models: str, shards: str) -> str:
    """Return a tag with the model files of one tag and the shards of another."""
    folder.mkdir()
    for tag, kind in ((models, MODELS), (shards, SHARDS)):
        for path in (two_tags / tag).glob(kind):
            shutil.copy(path, folder)
    return str(folder)


def edited(two_tags: Path, folder: Path, change: Callable[[dict[Any, Any]], object]) -> str:
    shutil.copytree(two_tags / "step3", folder)
    for path in folder.glob(SHARDS):
        tree = torch.load(path, weights_only=False)
        change(tree["optimizer_state_dict"]["optimizer_state_dict"])
        torch.save(tree, path)
    return str(folder)


def lose_a_group(held: dict[str, Any]) -> None:
    for index in held["param_groups"][1]["params"]:
        del held["state"][index]


def lose_a_sub_group(held: dict[str, Any]) -> None:
    """Delete the states of the first sub-group, as partial offload does."""
    del held["state"][held["param_groups"][0]["params"][0]]


def lose_all(held: dict[str, Any]) -> None:
    held["state"].clear()


def test_mixed_saves_and_missing_states_are_refused_by_name(
    two_tags: Path, pools: Pools, tmp_path: Path
) -> None:
    """The weights load with a fresh optimizer."""
    cases = {
        mixed(two_tags, tmp_path / "newer", "step3", "step5"): (
            "CheckpointFormatError",
            (
                "model files are of step 3",
                "model_states.pt: global_steps",
                "Adam in its optimizer shards has taken 5 steps",
            ),
        ),
        mixed(two_tags, tmp_path / "older", "step5", "step3"): (
            "CheckpointFormatError",
            ("model files are of step 5", "Adam in its optimizer shards has taken 3 steps"),
        ),
        edited(two_tags, tmp_path / "group", lose_a_group): (
            "CheckpointMismatchError",
            ("no optimizer state for parameter group 1 (", "AdamW keeps some", "partial offload"),
        ),
        edited(two_tags, tmp_path / "sub-group", lose_a_sub_group): (
            "CheckpointMismatchError",
            ("no optimizer state for ", "other parameters of the same group", "partial offload"),
        ),
        edited(two_tags, tmp_path / "all", lose_all): (
            "CheckpointMismatchError",
            ("no optimizer state for parameter group 0 (", "AdamW keeps some"),
        ),
    }
    found = refused_all(pools, TARGET, list(cases))
    for refused, (error, messages) in zip(found, cases.values(), strict=True):
        assert refused.error == error, refused.message
        assert all(part in refused.message for part in messages), refused.message
        assert "load_optimizer_state=False" in refused.message
    for path in cases:
        _, after = around_load(pools, TARGET, path, load_optimizer_state=False)
        assert not [key for key in after if key.startswith("exp_avg")]


@pytest.mark.long
def test_missing_states_of_partial_offload_are_refused(pools: Pools, tmp_path: Path) -> None:
    """DeepSpeed itself does not save these states."""
    setup = small(2, "3", sub_group=15, offload=True, ratio=0.5, optimizer="CPUAdam")
    pools.run(2, partial(write, FixtureRow("", setup, ""), str(tmp_path)))
    target = small(1, "2", optimizer="CPUAdam")
    (found,) = refused_all(pools, target, [str(tmp_path / "checkpoint")])
    assert found.error == "CheckpointMismatchError"
    assert "no optimizer state for " in found.message
    assert "partial offload" in found.message


@pytest.mark.long
def test_muons_momentum_loads_from_zero_3_and_is_refused_in_zero_1_and_2(
    pools: Pools, tmp_path: Path
) -> None:
    three = small(2, "3", grouping="two", sub_group=15, optimizer="Muon")
    target = small(1, "2", grouping="two", optimizer="Muon")
    for setup in (three, replace(three, zero="2"), replace(three, zero="2", elastic=True)):
        folder = tmp_path / str(setup)
        folder.mkdir()
        pools.run(2, partial(write, FixtureRow("", setup, ""), str(folder)))
        path = str(folder / "checkpoint")
        if setup is three:
            fixture = Fixture(folder, setup, {"steps": 3, "kind": "stock"})
            restored(pools, Case(fixture, target, path))
        else:
            (found,) = refused_all(pools, target, [path])
            assert "keeps Muon's momentum of whole parameters" in found.message


def test_the_error_names_both_files_and_suggests_no_deletion(
    two_tags: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mixed"
    shutil.copytree(two_tags / "step3", folder)
    (other,) = (two_tags / "step5").glob("*rank_1_*optim_states.pt")
    shutil.copy(other, folder)
    with (
        closing(open_checkpoint(folder)) as reader,
        pytest.raises(CheckpointFormatError, match="saved at other steps") as caught,
    ):
        reader.check_all()
    for path in folder.glob(SHARDS):
        assert path.name in str(caught.value)
    assert "Remove" not in str(caught.value)


def test_every_prefix_of_a_save_is_refused(tmp_path: Path) -> None:
    """Saves into a new tag, and over an older save. Only the complete save loads."""
    root = unpack("two-tags", tmp_path).checkpoint
    older, later = (root / tag for tag in ("step3", "step5"))
    # DeepSpeed writes the model file first.
    files = sorted(
        (f.name for f in later.glob("*.pt")), key=lambda n: n.endswith("optim_states.pt")
    )
    wanted = read_whole(later)
    for over in (False, True):
        for index in range(2 * len(files)):
            written, half = files[: index // 2 + 1], index % 2 == 0
            tag = tmp_path / f"{over} {index}"
            shutil.copytree(older, tag, ignore=None if over else lambda *_: files)
            for name in written:
                shutil.copy(later / name, tag)
            if half:
                data = (later / written[-1]).read_bytes()
                (tag / written[-1]).write_bytes(data[: len(data) // 2])
            if not half and written == files:
                found = read_whole(tag)
                assert all(same_bits(found[key], value) for key, value in wanted.items())
                continue
            with pytest.raises((CheckpointCorruptedError, CheckpointFormatError)) as caught:
                read_whole(tag)
            assert any(name in str(caught.value) for name in files), caught.value


@pytest.mark.parametrize(
    ("source", "here"), [("momentum", "AdamW"), ("zero3-ds0.19", "Momentum")], ids=str
)
def test_hyperparameters_of_another_optimizer_are_not_restored(
    source: str, here: str, pools: Pools, tmp_path: Path
) -> None:
    """The rates of another optimizer have another meaning."""
    fixture = unpack(source, tmp_path)
    target: EngineCase = replace(fixture.setup, world=1, zero="2", sub_group=10**9, optimizer=here)
    path, fresh = str(fixture.checkpoint), {"load_optimizer_state": False}
    (found,) = refused_all(pools, target, [path], **fresh)
    assert found.error == "CheckpointMismatchError", found.message
    assert "load_hyperparameters=False" in found.message
    before, after = around_load(pools, target, path, **fresh, load_hyperparameters=False)
    assert {k: v for k, v in before.items() if k.startswith("group/")} == {
        k: v for k, v in after.items() if k.startswith("group/")
    }
