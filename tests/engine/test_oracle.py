"""The oracle itself: it fails for what was not restored, and owes nothing to the library."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.engine._oracle_programs import flipped_bits_found, public_values
from tests.support import engines, oracle
from tests.support.checkpoints import Saved, fresh
from tests.support.engines import UNTRAINED, Setup
from tests.support.oracle import Dump
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine

RUNS = (
    Setup(2, "1"),
    Setup(3, "2", "bf16", alignment=True),
    Setup(4, "3", sub_group=700),
    Setup(2, "B", "bf16"),
)


def must_differ(saved: Dump) -> set[str]:
    """Return what cannot be the same by chance in a run from another seed with other rates."""
    kinds = ("master", "weight", "frozen", "buffer", "exp_avg", "exp_avg_sq", "scalar")
    differing = {k for k in saved if k.split("/")[0] in kinds}
    differing |= {k for k in saved if k.endswith(("/lr", "/weight_decay", "/betas"))}
    differing |= {"counter/global_steps", "counter/global_samples"}
    # Without a gradient the moments stay zero, wherever they come from.
    return differing - {f"exp_avg/{UNTRAINED}", f"exp_avg_sq/{UNTRAINED}"}


@pytest.mark.parametrize("setup", [*RUNS, Setup(3, "0")], ids=str)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_run_that_loaded_nothing_fails(
    setup: Setup, steps: int, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    """Of a fresh run, or one trained from another seed, every tensor that should differ does."""
    saved = saved_by(setup)
    verdict = pools.run(setup.world, partial(fresh, setup, saved, steps=steps))[0]
    assert verdict is not None
    assert must_differ(saved.dump()) <= verdict.differing.keys()


@pytest.mark.parametrize("setup", RUNS, ids=str)
def test_one_bit_on_one_rank_is_found(setup: Setup, pools: Pools) -> None:
    """The lowest bit of one master or one state, on the last rank alone, is found and named."""
    found = pools.run(setup.world, partial(flipped_bits_found, setup))[0]
    assert found is not None
    for kind, (differing, unrounded) in found.items():
        assert [name.split("/")[0] for name in differing] == [kind]
        assert list(differing.values()) == [1]
        assert bool(unrounded) == (kind == "master" and setup.precision == "fp32")


@pytest.mark.parametrize("setup", RUNS, ids=str)
def test_deepspeed_says_the_same(setup: Setup, pools: Pools) -> None:
    """What DeepSpeed's public ``safe_get_full_*`` give is what the oracle found."""
    ours, theirs = pools.run(setup.world, partial(public_values, setup))[0]
    assert ours
    assert theirs == ours


def test_the_oracle_owes_nothing_to_the_library() -> None:
    """Neither the oracle nor the runs that it looks at import the library."""
    for module in (oracle, engines, engines):
        tree = ast.parse(Path(module.__file__ or "").read_text())
        imported = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
        imported += [str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        assert not [name for name in imported if name.startswith("lightning_elastic_zero")]
