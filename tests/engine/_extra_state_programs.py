"""What ranks do with modules that keep more than parameters and buffers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed, nn

from tests.support.engines import Engine, Setup, engine_of, train

STEPS = 2


class Keeping(nn.Module):
    """A module that keeps one value, which is not plain data where a class says so."""

    def __init__(self, value: object = None) -> None:
        super().__init__()
        self.value = value
        self.register_buffer("flag", torch.zeros(1))

    def get_extra_state(self) -> object:
        """Return it."""
        return self.value

    def set_extra_state(self, state: object) -> None:
        """Take it back; nothing else is taken for a number."""
        if isinstance(self.value, int) and not isinstance(state, int):
            msg = f"wants a number, not {state!r}"
            raise TypeError(msg)
        self.value = state


class _Told(logging.Handler):
    """Keeps the texts of what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.texts.append(record.getMessage())


def _model(setup: Setup, values: dict[str, Any]) -> Any:
    """Return a model with modules that keep values, two of them deeper down."""
    model = setup.model(0)
    model.kept = nn.ModuleDict({name: Keeping(value) for name, value in values.items()})
    return model


def _values(rank: int) -> dict[str, Any]:
    return {
        "scales": {"amax": torch.tensor([1.5, 2.5]), "steps": 7, "names": ["a", "b"]},
        "bytes": torch.arange(5, dtype=torch.uint8),
        "rank": rank,
    }


def save_extra_states(setup: Setup, folder: str) -> None:
    """Save a run by this library, by DeepSpeed itself, and by torch where weights are whole."""
    from lightning_elastic_zero.api import save_checkpoint

    with engine_of(setup, 0, model=_model(setup, _values(distributed.get_rank()))) as engine:
        train(engine, setup, 0, STEPS)
        save_checkpoint(engine, f"{folder}/ours.ckpt", {"mine": 1})
        save_checkpoint(engine, f"{folder}/weights.ckpt", weights_only=True)
        engine.save_checkpoint(f"{folder}/stock", tag="tag")
        if setup.stage < 3 and distributed.get_rank() == 0:
            torch.save({"state_dict": engine.module.state_dict()}, f"{folder}/single.pt")


def load_extra_states(
    setup: Setup, paths: Sequence[str], values: dict[str, Any], **options: Any
) -> list[tuple[Any, list[str]]]:
    """Load each into a model that keeps other values; give those it has then, or the error.

    Beside each the warnings of it that name extra states.
    """
    found = []
    for path in paths:
        with engine_of(setup, 1, model=_model(setup, values)) as engine:
            told = _Told()
            log = logging.getLogger("lightning_elastic_zero.checkpoint.save")
            log.addHandler(told)
            try:
                outcome = _loaded(engine, path, options)
            finally:
                log.removeHandler(told)
            found.append((outcome, told.texts))
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
