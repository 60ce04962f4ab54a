"""Sequence parallelism (Ulysses): ZeRO shards over data and sequence ranks like any others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from tests.support.checkpoints import compare_states
from tests.support.engines import GLOBAL_BATCH, Engine, EngineCase, make_optimizer
from tests.support.oracle import Dump, dump, expected_in
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine

TOKENS, LENGTH, HEADS, WIDTH = 30, 8, 2, 8


class Attention(nn.Module):
    """One layer of attention, whose heads are split over the ranks of a sequence."""

    def __init__(self, seed: int, sequence: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, TOKENS)
        self.across: Any = None
        if sequence > 1:
            from deepspeed.runtime.sequence_parallel import parallel_state_sp
            from deepspeed.sequence.layer import DistributedAttention

            group = parallel_state_sp.get_sequence_parallel_group()
            self.across = DistributedAttention(_attend, group, scatter_idx=2, gather_idx=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a score for each token of this rank's part of the sequence."""
        batch, length = x.shape
        parts = self.qkv(self.embedding(x)).view(batch, length, HEADS, 3 * WIDTH // HEADS)
        q, k, v = parts.chunk(3, dim=-1)
        found = self.across(q, k, v, 0) if self.across else _attend(q, k, v)
        return torch.as_tensor(self.out(found.reshape(batch, length, WIDTH)))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def attention(case: EngineCase, seed: int) -> nn.Module:
    return Attention(seed, case.sequence)


def over(world: int, zero: str, sequence: int = 1) -> EngineCase:
    """Return a case on data ranks times sequence ranks."""
    return EngineCase(world, zero, sequence=sequence, grouping="one", net=attention)


@contextmanager
def engine_over(setup: EngineCase, seed: int, *, mesh: bool = False) -> Iterator[Engine]:
    """Make an engine; reset DeepSpeed's global state at the end."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.utils import groups

    options: dict[str, Any] = {}
    if mesh:
        options["mesh_param"] = (setup.world // setup.sequence, setup.sequence)
    elif setup.sequence > 1:
        parallel_state_sp.initialize_sequence_parallel(setup.sequence)
        options["mpu"] = parallel_state_sp
    config = setup.config()
    config["train_micro_batch_size_per_gpu"] = GLOBAL_BATCH * setup.sequence // setup.world
    model = Attention(seed, 1 if mesh else setup.sequence)
    optimizer = make_optimizer("AdamW", [list(model.parameters())], 1.0)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False, **options
    )
    try:
        yield engine
    finally:
        engine.destroy()
        groups.mpu = groups.mesh_device = None
        parallel_state_sp._SEQUENCE_PARALLEL_GROUP = None
        parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None


def train_over(engine: Engine, setup: EngineCase, first: int, last: int) -> list[float]:
    """Train on this rank's part of the batch and of its sequences."""
    rank, losses = distributed.get_rank(), []
    at, part = divmod(rank, setup.sequence)
    size, length = GLOBAL_BATCH * setup.sequence // setup.world, LENGTH // setup.sequence
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, TOKENS, (GLOBAL_BATCH, LENGTH), generator=generator)
        mine = tokens[at * size : (at + 1) * size, part * length : (part + 1) * length]
        scores = engine(mine)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1).float(), mine.flatten())
        engine.backward(loss)
        engine.step()
        distributed.all_reduce(total := loss.detach().clone())
        losses.append(float(total) / setup.world)
    return losses


def continued_over(setup: EngineCase, path: str, *, saves: bool) -> tuple[Dump, list[float]] | None:
    """Train and save, or load into another run; return the state and the following losses."""
    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint

    with engine_over(setup, 0 if saves else 7) as engine:
        train_over(engine, setup, *((0, 3) if saves else (100, 101)))
        if not saves:
            load_checkpoint(engine, path)
        held = dump(engine, setup)
        if saves:
            save_checkpoint(engine, path)
        losses = train_over(engine, setup, 3, 5)
    return None if held is None else (held, losses)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (over(4, "2", 2), over(3, "3")),
        (over(3, "3"), over(4, "3", 2)),
        (over(4, "3", 2), over(2, "1", 2)),
    ],
    ids=str,
)
def test_sequence_ranks_restore_on_other_data_and_sequence_ranks(
    source: EngineCase, target: EngineCase, pools: Pools, tmp_path: Path
) -> None:
    path = str(tmp_path / "a.ckpt")
    saved = pools.run(source.world, partial(continued_over, source, path, saves=True))[0]
    found = pools.run(target.world, partial(continued_over, target, path, saves=False))[0]
    assert saved is not None
    assert found is not None
    wanted = expected_in(integer_counts(saved[0]), source, target)
    compare_states(wanted, integer_counts(found[0])).assert_same()
    assert found[1] == pytest.approx(saved[1], rel=1e-4)


def integer_counts(held: Dump) -> Dump:
    """Return a dump with integer counters; with sequence ranks, DeepSpeed's are floats."""
    return {k: str(int(float(v))) if k.startswith("counter/") else v for k, v in held.items()}


def refused_over(setup: EngineCase, path: str) -> str:
    from lightning_elastic_zero.api import save_checkpoint
    from lightning_elastic_zero.errors import UnsupportedError

    with engine_over(setup, 0, mesh=True) as engine:
        try:
            save_checkpoint(engine, path)
        except UnsupportedError as error:
            return str(error)
    return ""


def test_a_mesh_with_copies_on_sequence_ranks_is_refused(pools: Pools, tmp_path: Path) -> None:
    setup = over(4, "2", 2)
    for refused in pools.run(4, partial(refused_over, setup, str(tmp_path / "a.ckpt"))):
        assert "ZeRO over 2 of 4 ranks" in refused
        assert "get_sequence_data_parallel_group" in refused
    assert not list(tmp_path.iterdir())
