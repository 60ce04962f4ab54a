"""The constructor checks its options by name."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from lightning.pytorch.strategies import StrategyRegistry

from lightning_elastic_zero.api import load_checkpoint, save_checkpoint
from lightning_elastic_zero.registry import STRATEGY_ARGUMENTS
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.trainer.batches import UserSettings
from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy

FLAGS = [
    "allow_uneven_batches",
    "load_optimizer_state",
    "load_hyperparameters",
    "save_module_weights",
    "allow_pickle",
    "fallback",
    "async_save",
]
NUMBERS = {
    "global_batch_size": (0, -6, 6.0, "6", True, [6]),
}


def refused(name: str, value: object, *allowed: str) -> None:
    """Fail unless the constructor refuses a value, and names the option, value and alternatives."""
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")) as raised:
        ElasticDeepSpeedStrategy(**{name: value})  # type: ignore[arg-type]
    assert all(text in str(raised.value) for text in allowed), raised.value


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("load_optimiser_state", "load_optimizer_state"),
        ("global_batchsize", "global_batch_size"),
        ("zero_stage", "stage"),
        ("qqq", ""),
    ],
)
def test_a_misspelled_option_is_refused_with_a_suggestion(name: str, suggestion: str) -> None:
    """Options of this library and of Lightning."""
    message = f"ElasticDeepSpeedStrategy has no option {name!r}"
    message += f". Did you mean {suggestion!r}?" if suggestion else ""
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        ElasticDeepSpeedStrategy(**{name: False})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["bogus", None, "Refuse", "", True, ["refuse"]])
def test_unknown_values_of_on_unresumable_data_are_refused(value: object) -> None:
    refused("on_unresumable_data", value, "'refuse'", "'restart_epoch'")


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in NUMBERS.items() for v in vs])
def test_numbers_must_be_whole_and_large_enough(name: str, value: object) -> None:
    """For a string, as from YAML, the error mentions the quotes."""
    refused(name, value, "whole number", "None")
    if isinstance(value, str):
        refused(name, value, "quotes")


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", ["false", 0, 1, None])
def test_flags_must_be_booleans(name: str, value: object) -> None:
    """The text `"false"` would be true in Python."""
    refused(name, value, "True or False")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "global_batch_size": np.int64(6),
            "on_unresumable_data": "restart_epoch",
        },
        {"global_batch_size": None, "async_save": True},
        dict.fromkeys(FLAGS, True),
    ],
)
def test_numpy_integers_and_all_defaults_are_accepted(options: dict[str, Any]) -> None:
    strategy = ElasticDeepSpeedStrategy(**options)
    size = strategy._batches._global_batch_size
    assert size is None or (type(size) is int and size == 6)


@pytest.mark.parametrize(
    "name", ["weights_only", "exclude_frozen_parameters", "save_module_weights"]
)
def test_plain_saves_check_options_before_the_engine(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='yes'"):
        save_checkpoint(None, "never.ckpt", **{name: "yes"})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["load_optimizer_state", "strict", "allow_pickle", "fallback"])
def test_plain_loads_check_options_before_the_engine(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='yes'"):
        load_checkpoint(None, "never.ckpt", **{name: "yes"})  # type: ignore[arg-type]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])  # noqa: S301 - our own data
def test_a_strategy_can_be_pickled_and_copied_without_sharing(copied: Callable[[Any], Any]) -> None:
    original = ElasticDeepSpeedStrategy(
        stage=3,
        global_batch_size=6,
        async_save=True,
        on_unresumable_data="restart_epoch",
    )
    original.checkpoint_manager._queue.begin_save(folder_at("/nowhere/new.ckpt"))
    original.checkpoint_manager._queue.delete("/nowhere/old.ckpt")
    assert original.checkpoint_manager._queue._deletions
    other: Any = copied(original)
    assert type(other).__name__ == "ElasticDeepSpeedStrategy"
    assert other._batches._global_batch_size == 6
    assert other.config["zero_optimization"]["stage"] == 3
    manager = other.checkpoint_manager
    assert manager._background
    assert other._resumer._on_unresumable_data == "restart_epoch"
    assert not manager._queue._deletions
    assert other._checkpoints._hooks._manager is manager
    assert other._checkpoints._hooks._link.__self__ is other._checkpoints
    assert other._checkpoints._get_ranks.__self__ is other
    assert other._checkpoints._resumer is other._resumer
    assert other._resumer._batches is other._resumer.recorder._batches is other._batches
    assert other._checkpoints._settings is other._batches.settings


def test_the_class_and_subclasses_register_our_names() -> None:
    class Own(ElasticDeepSpeedStrategy):
        """A user's subclass."""

    registry = type(StrategyRegistry)()
    Own.register_strategies(registry)
    assert registry.keys() == STRATEGY_ARGUMENTS.keys()
    assert type(registry.get("elastic_deepspeed_stage_2")) is Own


class _Settings:
    def __init__(self) -> None:
        self.accumulate_grad_batches, self.limit_train_batches = 1, 2


def test_the_users_settings_are_restored_after_a_fit() -> None:
    """A save after the fit uses those of the fit."""
    settings, trainer = UserSettings(), cast("Any", _Settings())
    for _fit in range(2):
        settings.make(trainer, "accumulate_grad_batches", 3)
        settings.make(
            trainer, "limit_train_batches", settings.get(trainer, "limit_train_batches") * 3
        )
        with settings.reapplied(trainer):
            assert vars(trainer) == {"accumulate_grad_batches": 3, "limit_train_batches": 6}
        assert vars(trainer) == {"accumulate_grad_batches": 3, "limit_train_batches": 6}
        for _twice in range(2):
            settings.restore(trainer)
            assert vars(trainer) == {"accumulate_grad_batches": 1, "limit_train_batches": 2}
        with settings.reapplied(trainer):
            assert vars(trainer) == {"accumulate_grad_batches": 3, "limit_train_batches": 6}
        assert vars(trainer) == {"accumulate_grad_batches": 1, "limit_train_batches": 2}
    trainer.limit_train_batches = 6  # Now the user's value, although equal to the replacement of 2.
    assert settings.get(trainer, "limit_train_batches") == 6
