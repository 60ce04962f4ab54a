"""A changed file is refused by name, and never read as another value."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_elastic_zero.errors import ElasticZeroError
from tests.checkpoint._corruptions import KINDS, MANIFEST, Corruption, Damage
from tests.support.state_digests import read_digests
from tests.support.tables import CORRUPTIONS

pytestmark = pytest.mark.engine

STAGES = ("1", "2", "3")

FEW = 57
"""Corruptions of each stage in ``make test``."""


def drawn(count: int) -> Iterator[tuple[str, Corruption]]:
    """Return kinds of corruption, each half as often as its share."""
    shares = [(kind, act) for kind, (act, share) in KINDS.items() for _ in range(-(-share // 2))]
    return itertools.islice(itertools.cycle(shares), count)


def judged(damaged: Path, damage: Damage, intact: dict[str, str]) -> tuple[str, str]:
    try:
        found = read_digests(damaged)
    except ElasticZeroError as error:
        message = str(error)
        names = [Path(n).name.removesuffix(".sums") for n in (damage.file, damage.other) if n]
        # Without a manifest, the error names the checkpoint.
        named = any(name in message for name in names) or damage.file == MANIFEST
        return ("refused" if named and damaged.name in message else "unnamed"), message
    return ("harmless" if found == intact else "undetected"), ""


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_corruption_is_refused_by_file_or_changes_no_value(
    stage: str,
    many: bool,
    saved: Callable[..., Path],
    tmp_path: Path,
    pytestconfig: pytest.Config,
    seed: int,
) -> None:
    count = pytestconfig.getoption("--corruptions") if many else FEW
    checkpoint, other = saved(stage, 3), saved(stage, 4)
    intact = read_digests(checkpoint)
    assert intact != read_digests(other)
    damaged = tmp_path / "damaged.ckpt"
    wrong: list[str] = []
    for index, (kind, act) in enumerate(drawn(count)):
        drawn_from = f"zero{stage}-{seed + index}"
        shutil.copytree(checkpoint, damaged)
        damage = act(damaged, other, random.Random(drawn_from))
        verdict, message = judged(damaged, damage, intact)
        shutil.rmtree(damaged)
        CORRUPTIONS.count(kind, "tried")
        CORRUPTIONS.count(kind, verdict)
        if verdict in {"undetected", "unnamed"} or (kind == "extra file" and message):
            wrong.append(f"{verdict}: {kind}, seed {drawn_from}: {damage}: {message}")
    print(f"ZeRO-{stage}: {count} seeds from zero{stage}-{seed}, {len(wrong)} undetected")
    assert not wrong, "\n".join(wrong[:20])
