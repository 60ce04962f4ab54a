"""Checkpoints of stock DeepSpeed are restored bit for bit, on any number of devices.

DeepSpeed 0.16 to 0.19 wrote them (``make_fixtures``). They are compared with the state in memory of
the engines that wrote them, as found by the oracle, which reads no files.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from tests.formats._load_assertions import warnings_of_load
from tests.formats._restore_programs import (
    Case,
    Outcome,
    another,
    restore,
    resumed_with_scheduler,
    saved_with_scheduler,
)
from tests.support.engines import EngineCase
from tests.support.foreign_checkpoints import Fixture, names, unpack
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine

Unpack: TypeAlias = "Callable[[str], Fixture]"

OTHER_KINDS = ("dumps", "lightning", "universal-corrupt")
CLIENT_STATE: dict[str, dict[str, Any]] = {"accelerate2": {}, "transformers2": {}}
"""Client states of the writers that saved no epoch."""

STOCK = [n for n in names() if not n.startswith(OTHER_KINDS)]


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Unpack:
    """Return a fixture, unpacked once per session."""
    known: dict[str, Fixture] = {}

    def get(name: str) -> Fixture:
        if name not in known:
            known[name] = unpack(name, tmp_path_factory.mktemp(name))
        return known[name]

    return get


def case_of(fixture: Fixture, name: str, **changes: Any) -> Case:
    values: dict[str, Any] = {
        "fixture": fixture,
        "target": fixture.setup,
        "path": str(fixture.checkpoint),
        "groups": "elastic" not in name,
        **({} if name not in CLIENT_STATE else {"client_state": CLIENT_STATE[name]}),
    }
    return Case(**{**values, **changes})


def run(pools: Pools, case: Case) -> Outcome:
    outcome = pools.run(case.target.world, partial(restore, case))[0]
    assert outcome is not None
    # How a step is computed (foreach, fused) is a setting of the live run, and not restored.
    for key in [k for k in outcome.verdict.differing if k.endswith("/fused")]:
        del outcome.verdict.differing[key]
    return outcome


@pytest.mark.parametrize(
    "name",
    [
        "zero2-ds0.16",
        *(pytest.param(n, marks=pytest.mark.long) for n in STOCK if n != "zero2-ds0.16"),
    ],
)
def test_a_stock_checkpoint_continues_as_its_writer_on_the_same_world(
    name: str, pools: Pools, unpacked: Unpack
) -> None:
    fixture = unpacked(name)
    outcome = run(pools, case_of(fixture, name, continues=True))
    outcome.verdict.assert_same()
    assert outcome.compare_with_reference is not None
    outcome.compare_with_reference.assert_same(stateless=fixture.setup_steps == 0)


@pytest.mark.long
@pytest.mark.parametrize("name", ["zero1-ds0.19", "zero2-ds0.16", "zero3-ds0.19"])
def test_another_order_of_sums_changes_losses_only(
    name: str, pools: Pools, unpacked: Unpack
) -> None:
    case = case_of(unpacked(name), name, continues=True)
    outcomes = [run(pools, case), run(pools, replace(case, other_order=True))]
    for outcome in outcomes:
        outcome.verdict.assert_same()
        assert outcome.compare_with_reference is not None
        outcome.compare_with_reference.assert_same()
    one, other = (
        o.compare_with_reference.losses for o in outcomes if o.compare_with_reference is not None
    )
    assert one != other


NEWEST_AND_OLDEST = [n for n in STOCK if not n.endswith(("0.17", "0.18"))]


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        *((name, [STOCK.index(name)]) for name in NEWEST_AND_OLDEST),
        *(pytest.param(name, range(12), marks=pytest.mark.long) for name in STOCK),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} targets",
)
def test_a_stock_checkpoint_loads_on_another_world_and_stage(
    name: str, turns: Sequence[int], pools: Pools, unpacked: Unpack
) -> None:
    fixture = unpacked(name)
    for turn in turns:
        target = another(fixture.setup, turn)
        run(pools, case_of(fixture, name, target=target)).verdict.assert_same()


@pytest.mark.parametrize("elastic", [True, False])
def test_the_schedule_continues(elastic: bool, pools: Pools, tmp_path: Path) -> None:
    """Including without restored groups, since elastic checkpoints contain no hyperparameters."""
    writer, steps = EngineCase(2, "2", elastic=elastic), 5
    rates = pools.run(2, partial(saved_with_scheduler, writer, str(tmp_path), steps))[0]
    assert len(set(rates)) > steps, rates
    for target in (EngineCase(2, "2"), EngineCase(1, "1")):
        found = pools.run(
            target.world, partial(resumed_with_scheduler, target, str(tmp_path), steps)
        )
        assert found == [rates[steps:]] * target.world


@pytest.mark.parametrize("checksums", [False, True])
def test_one_line_names_the_number_of_files_without_checksums(
    checksums: bool, pools: Pools, unpacked: Unpack, tmp_path: Path
) -> None:
    fixture = unpacked("zero2-ds0.19")
    path = shutil.copytree(fixture.checkpoint, tmp_path / "a")
    torch.serialization.set_crc32_options(compute_crc32=checksums)
    files = list(path.rglob("*.pt"))
    for file in files:
        torch.save(torch.load(file, weights_only=False), file)
    torch.serialization.set_crc32_options(compute_crc32=True)
    of_ranks = pools.run(fixture.setup.world, partial(warnings_of_load, fixture.setup, str(path)))
    found = [text for texts in of_ranks for text in texts if "checksums" in text]
    assert len(found) == (not checksums)
    assert all(f"{path}: {len(files)} of its files have no checksums" in text for text in found)


def test_a_tags_folder_selects_the_tag(pools: Pools, unpacked: Unpack) -> None:
    """Even if ``latest`` names another tag."""
    fixture = unpacked("two-tags")
    named = (Path(fixture.checkpoint) / "latest").read_text()
    tags = sorted(p.name for p in fixture.checkpoint.iterdir() if p.is_dir())
    assert len(tags) == 2
    assert named == tags[0]
    case = case_of(fixture, "two-tags", path=str(fixture.checkpoint / tags[1]))
    assert run(pools, case).verdict.differing, "the tag that was saved later holds other state"
    later = fixture.folder / "of the later tag"
    later.mkdir()
    (later / "truth.pt").symlink_to(fixture.folder / "later.pt")
    run(pools, replace(case, fixture=replace(fixture, folder=later))).verdict.assert_same()
