"""A damaged checkpoint is refused by all ranks of a real run, whose state does not change."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.checkpoint._corruptions import KINDS, Damage
from tests.checkpoint._damaged_loads import fit_from_each, load_each, save_two
from tests.support.engines import EngineCase
from tests.support.outcome import NOTHING
from tests.support.ranks import Pools
from tests.support.tables import LOADS

pytestmark = pytest.mark.engine

COUNTS = [len(KINDS), pytest.param(60, marks=pytest.mark.long)]

Damaged = tuple[str, Damage, Path]


def damaged_copies(checkpoint: Path, other: Path, folder: Path, count: int) -> list[Damaged]:
    """Damage copies in every way in turn; return the kind, the damage and the folder."""
    kinds = list(KINDS)
    found = []
    for index in range(count):
        kind = kinds[index % len(kinds)]
        path = Path(shutil.copytree(checkpoint, folder / f"damaged-{index}.ckpt"))
        seed = f"load-{index}"
        found.append((kind, KINDS[kind][0](path, other, random.Random(seed)), path))
    print(f"seeds load-0 to load-{count - 1}")
    return found


def count_up(row: str, message: list[str], damaged: Damaged, *, as_wanted: bool = True) -> str:
    """Count a load; return the problems with its outcome."""
    kind, damage, path = damaged
    LOADS.count(row, "tried")
    refused = [text != NOTHING for text in message]
    if all(refused) and as_wanted and all(path.name in text for text in message):
        LOADS.count(row, "refused by all ranks")
        return ""
    if not any(refused) and as_wanted:
        LOADS.count(row, "harmless")
        return ""
    LOADS.count(row, "silent")
    return f"{row}: {kind}: {damage}: {message}"


@pytest.mark.long
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_refused_load_changes_no_bit_of_an_engine(
    stage: str, count: int, pools: Pools, saved: Callable[..., Path], tmp_path: Path
) -> None:
    damaged = damaged_copies(saved(stage, 3), saved(stage, 4), tmp_path, count)
    paths = tuple(str(path) for _, _, path in damaged)
    ranks = pools.run(2, partial(load_each, EngineCase(2, stage), str(saved(stage, 3)), paths))
    wrong = [
        count_up(
            f"engine, ZeRO-{stage}",
            [outcome.message for outcome in outcomes],
            one,
            as_wanted=all(outcome.as_wanted for outcome in outcomes),
        )
        for one, *outcomes in zip(damaged, *ranks, strict=True)
    ]
    assert not any(wrong), "\n".join(filter(None, wrong))


@pytest.mark.long
@pytest.mark.parametrize("count", [60])
def test_a_trainer_refuses_damage_by_name_and_resumes_from_the_intact_one(
    count: int, pools: Pools, tmp_path: Path
) -> None:
    pools.run(2, partial(save_two, str(tmp_path)))
    checkpoint, other = tmp_path / "0.ckpt", tmp_path / "1.ckpt"
    damaged = damaged_copies(checkpoint, other, tmp_path, count)
    paths = tuple(str(path) for _, _, path in damaged)
    ranks = pools.run(2, partial(fit_from_each, str(tmp_path), paths, str(checkpoint)))
    assert {message[-1] for message in ranks} == {NOTHING}
    wrong = [
        count_up("Trainer, ZeRO-2", list(message), one)
        for one, *message in zip(damaged, *(message[:-1] for message in ranks), strict=True)
    ]
    assert not any(wrong), "\n".join(filter(None, wrong))
