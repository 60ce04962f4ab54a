"""In stage 0, all ranks hold the same state, which a checkpoint stores once."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.support.engines import EngineCase, engine_of, train, trained
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine

VALUES = 3
"""Values of each element: the master and AdamW's two moments, 4 bytes each."""


def train_and_save(setup: EngineCase, path: str) -> None:
    from lightning_elastic_zero.api import save_checkpoint

    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, 1)
        save_checkpoint(engine, path)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_replicated_state_is_written_once(precision: str, pools: Pools, tmp_path: Path) -> None:
    setup = EngineCase(4, "0", precision, hidden=600, thawed=True)
    path = tmp_path / "run.ckpt"
    pools.run(4, partial(train_and_save, setup, str(path)))
    state = 4 * VALUES * sum(p.numel() for p in trained(setup.model(0)).values())
    sizes = {file.name: file.stat().st_size for file in path.rglob("*") if file.is_file()}
    assert state <= sum(sizes.values()) < 1.2 * state, sizes
    shares = [size for name, size in sizes.items() if name.endswith("optim_states.pt")]
    assert len(shares) == 4, sizes
    assert max(shares) < 1.1 * state / 4, sizes
