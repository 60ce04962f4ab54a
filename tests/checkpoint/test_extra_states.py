"""State that modules keep with ``get_extra_state`` is restored on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from tests.support.engines import Engine, EngineCase, engine_of, train
from tests.support.outcome import captured_log
from tests.support.ranks import Pools

STEPS = 2


class Keeping(nn.Module):
    """A module that keeps one value; in some classes the value is not plain data."""

    def __init__(self, value: object = None) -> None:
        super().__init__()
        self.value = value
        self.register_buffer("flag", torch.zeros(1))

    def get_extra_state(self) -> object:
        return self.value

    def set_extra_state(self, state: object) -> None:
        if isinstance(self.value, int) and not isinstance(state, int):
            msg = f"wants a number, not {state!r}"
            raise TypeError(msg)
        self.value = state


class Adding(nn.Linear):
    """A layer whose class adds an entry to ``state_dict``, as quantized layers do."""

    def __init__(self, **added: float) -> None:
        super().__init__(2, 2)
        self.added = added
        self.calls = 0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.calls += 1
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({f"{prefix}{name}": value for name, value in self.added.items()})


def _model(setup: EngineCase, values: dict[str, Any]) -> Any:
    """Return a model with modules that keep values, two of them nested deeper."""
    model = setup.model(0)
    model.kept = nn.ModuleDict({name: Keeping(value) for name, value in values.items()})
    return model


def _values(rank: int) -> dict[str, Any]:
    return {
        "scales": {"amax": torch.tensor([1.5, 2.5]), "steps": 7, "names": ["a", "b"]},
        "bytes": torch.arange(5, dtype=torch.uint8),
        "rank": rank,
    }


def save_extra_states(setup: EngineCase, folder: str) -> None:
    """Save a run with this library, with DeepSpeed, and with torch if weights are not sharded."""
    from lightning_elastic_zero.api import save_checkpoint

    with engine_of(setup, 0, model=_model(setup, _values(distributed.get_rank()))) as engine:
        train(engine, setup, 0, STEPS)
        save_checkpoint(engine, f"{folder}/ours.ckpt", {"mine": 1})
        save_checkpoint(engine, f"{folder}/weights.ckpt", weights_only=True)
        engine.save_checkpoint(f"{folder}/stock", tag="tag")
        if setup.stage < 3 and distributed.get_rank() == 0:
            torch.save({"state_dict": engine.module.state_dict()}, f"{folder}/single.pt")


def save_added_entries(setup: EngineCase, path: str) -> list[str]:
    """Save a model twice with layers of which one adds an entry; return the warnings."""
    from lightning_elastic_zero.api import ElasticOptions
    from lightning_elastic_zero.checkpoint.save import save_engine
    from lightning_elastic_zero.checkpoint.types import SaveRequest
    from lightning_elastic_zero.coordination.ranks import connect_ranks
    from lightning_elastic_zero.engine.live import LiveEngine

    model: Any = setup.model(0)
    model.kept = nn.ModuleList([Adding(scale=2.0), Adding()])
    options = ElasticOptions(allow_pickle=True).save_options()
    with (
        engine_of(setup, 0, model=model) as engine,
        captured_log("lightning_elastic_zero.checkpoint.extra_state") as warned,
    ):
        train(engine, setup, 0, 1)
        ranks, calls = connect_ranks(), []
        for _ in range(2):
            save_engine(SaveRequest(LiveEngine(engine), path, {}, options), ranks)
            calls.append([layer.calls for layer in model.kept])
        ranks.close()
        assert calls[0] == calls[1]
    return warned


def load_extra_states(
    setup: EngineCase, paths: Sequence[str], values: dict[str, Any], **options: Any
) -> list[tuple[Any, list[str]]]:
    """Load each into a model with other values; return its values or the error, and warnings."""
    found = []
    for path in paths:
        with (
            engine_of(setup, 1, model=_model(setup, values)) as engine,
            captured_log("lightning_elastic_zero.checkpoint.extra_state") as warned,
        ):
            found.append((_loaded(engine, path, options), warned))
    return found


def _loaded(engine: Engine, path: str, options: dict[str, Any]) -> object:
    from lightning_elastic_zero.api import load_checkpoint
    from lightning_elastic_zero.errors import ElasticZeroError

    try:
        client = load_checkpoint(engine, path, **options).client_state
    except ElasticZeroError as error:
        return f"{type(error).__name__}: {error}"
    assert not [key for key in client if "extra" in key], client
    return {name: part.value for name, part in engine.module.kept.items()}


pytestmark = pytest.mark.engine

RUNS = [
    (EngineCase(2, "2"), EngineCase(3, "3", sub_group=700)),
    (EngineCase(3, "3"), EngineCase(1, "1")),
    (EngineCase(2, "1", "bf16"), EngineCase(2, "0")),
]
EMPTY: dict[str, Any] = {"scales": None, "bytes": None, "rank": None}


@pytest.mark.parametrize(("source", "target"), RUNS, ids=str)
def test_extra_states_are_restored_per_rank_or_from_rank_0(
    source: EngineCase, target: EngineCase, pools: Pools, tmp_path: Path
) -> None:
    """Per rank on as many ranks; files of other software contain the states of rank 0."""
    pools.run(source.world, partial(save_extra_states, source, str(tmp_path)))
    paths = sorted(map(str, tmp_path.iterdir()))
    assert len(paths) == 3 + (source.stage < 3)
    call = partial(load_extra_states, target, paths, EMPTY, load_optimizer_state=False)
    for rank, of_rank in enumerate(pools.run(target.world, call)):
        for path, (found, warned) in zip(paths, of_rank, strict=True):
            assert isinstance(found, dict), (path, found)
            scales = found["scales"]
            assert torch.equal(scales.pop("amax"), torch.tensor([1.5, 2.5]))
            assert scales == {"steps": 7, "names": ["a", "b"]}
            assert torch.equal(found["bytes"], torch.arange(5, dtype=torch.uint8))
            as_many = source.world == target.world
            assert found["rank"] == (rank if as_many and path.endswith(".ckpt") else 0), path
            assert not warned


@pytest.mark.long
def test_extra_states_of_only_model_or_checkpoint_cause_a_warning(
    pools: Pools, tmp_path: Path
) -> None:
    source, target = EngineCase(2, "2"), EngineCase(2, "3")
    pools.run(source.world, partial(save_extra_states, source, str(tmp_path)))
    values = {"scales": None, "bytes": None, "other": "as it is"}
    path = [str(tmp_path / "ours.ckpt")]
    call = partial(load_extra_states, target, path, values, strict=False)
    for rank, [(found, warned)] in enumerate(pools.run(target.world, call)):
        assert found["scales"]["steps"] == 7
        assert found["other"] == "as it is"
        texts = " | ".join(warned)
        assert ("keep their current one: kept.other._extra_state" in texts) == (rank == 0)
        assert ("accepts through set_extra_state: kept.rank._extra_state" in texts) == (rank == 0)


@pytest.mark.long
def test_the_error_of_set_extra_state_is_raised_on_all_ranks(pools: Pools, tmp_path: Path) -> None:
    source, target = EngineCase(2, "2"), EngineCase(2, "1")
    pools.run(source.world, partial(save_extra_states, source, str(tmp_path)))
    path = [str(tmp_path / "ours.ckpt")]
    bad = partial(load_extra_states, target, path, {**EMPTY, "scales": 1})
    for [(error, _)] in pools.run(target.world, bad):
        assert "set_extra_state of kept.scales (Keeping) raised TypeError: wants a number" in error
    moved = {"scales": None, "bytes": None, "moved": None}
    rename = {"kept.rank": "kept.moved"}
    call = partial(load_extra_states, target, path, moved, rename=rename)
    for rank, [(found, warned)] in enumerate(pools.run(target.world, call)):
        assert (found["moved"], warned) == (rank, [])


@pytest.mark.cases(2)
@pytest.mark.parametrize("setup", [EngineCase(2, "2"), EngineCase(2, "3")], ids=str)
def test_entries_that_only_state_dict_has_are_warned_of(
    setup: EngineCase, pools: Pools, tmp_path: Path
) -> None:
    """Once in a run."""
    warned, others = pools.run(2, partial(save_added_entries, setup, str(tmp_path / "a.ckpt")))
    assert not others
    (text,) = warned
    assert "not saved: kept.0.scale;" in text
    assert "get_extra_state" in text
