"""A Trainer that goes on with other parameters than it was saved with (``strict_optimizer``)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.ranks import Pools
from tests.trainer._other_parameters import (
    KEYS,
    MiddleFit,
    Seen,
    finetuning_refusal,
    fit,
    refusal,
)

pytestmark = pytest.mark.engine

KNOWN = ("first.weight", "first.bias", "last.weight", "last.bias")
GONE = ("gone.weight", "gone.bias")
NEW = ("new.weight", "new.bias")
MIDDLE = ("middle.weight", "middle.bias")
LENIENT = {"strict_optimizer": False}


def assert_restored(seen: Seen, saved: Seen) -> None:
    """Fail unless masters and moments of the known parameters are those saved, bit for bit."""
    for name in KNOWN:
        for key in KEYS:
            assert saved.end[name, key].any()
            assert torch.equal(seen.start[name, key], saved.end[name, key]), (name, key)


def assert_fresh(seen: Seen, name: str) -> None:
    """Fail unless a parameter begins without moments, and is trained from there."""
    assert not seen.start[name, "exp_avg"].any()
    assert not seen.start[name, "exp_avg_sq"].any()
    assert not torch.equal(seen.end[name, "master"], seen.start[name, "master"])


def assert_told(told: list[str], *names: str) -> None:
    """Fail unless each name is warned of once, and no parameter that was restored."""
    assert [sum(name in text for text in told) for name in names] == [1] * len(names), told
    assert not [text for text in told if any(name in text for name in KNOWN)]


def refuse(worlds: Pools, world: int, plan: MiddleFit, *names: str) -> None:
    """Fail unless a resume is refused on every rank, by the names, with the option that helps."""
    for message in worlds.run(world, partial(refusal, plan)):
        assert message.startswith("CheckpointMismatchError")
        assert "strict_optimizer=False" in message
        assert all(name in message for name in names)


@pytest.mark.parametrize(
    ("source", "ranks", "target", "more"), [(2, 2, 3, 3), (3, 3, 1, 2), (1, 1, 2, 2)]
)
def test_known_parameters_go_on_and_others_are_listed(
    source: int, ranks: int, target: int, more: int, worlds: Pools, tmp_path: Path
) -> None:
    """A layer that was added begins anew, one that was removed stays out, the rest is restored."""
    first = MiddleFit(str(tmp_path / "run"), source, "gone")
    saved = worlds.run(ranks, partial(fit, first))[0]
    again = first.resumed(stage=target, middle="new")
    refuse(worlds, more, again, *NEW, *GONE)
    other = MiddleFit(str(tmp_path / "other"), target, "new", seed=2)
    configured = worlds.run(more, partial(fit, other))[0].start
    found = worlds.run(more, partial(fit, replace(again, strategy=LENIENT)))
    for seen in found:
        assert {name for name, _ in seen.start} == {*KNOWN, *NEW}
        assert_restored(seen, saved)
        for name in NEW:
            assert torch.equal(seen.start[name, "master"], configured[name, "master"])
            assert_fresh(seen, name)
    assert_told(found[0].warned, *NEW, *GONE)


@pytest.mark.parametrize(
    ("source", "ranks", "target", "more"), [(2, 2, 3, 3), (3, 3, 2, 1), (3, 2, 3, 3), (2, 3, 2, 2)]
)
def test_a_layer_that_is_trained_later_begins_on_its_weights(
    source: int, ranks: int, target: int, more: int, worlds: Pools, tmp_path: Path
) -> None:
    """Unfrozen between two fits: its weights are those saved, its moments begin; and it is named.

    A callback that has unfrozen it before the save makes no difference: DeepSpeed did not train
    it, so that a resume as the fit began needs no option.
    """
    first = MiddleFit(str(tmp_path / "run"), source, trains=False, thawed_in=1, epochs=2)
    saved = worlds.run(ranks, partial(fit, first))[0]
    assert {name for name, _ in saved.end} == {*KNOWN}
    as_before = first.resumed(stage=target, root=str(tmp_path / "as before"), thawed_in=2)
    for seen in worlds.run(more, partial(fit, as_before)):
        assert_restored(seen, saved)
        for name in MIDDLE:
            for weights in seen.weights:
                assert torch.equal(weights[name], saved.weights[1][name])
    again = first.resumed(stage=target, trains=True)
    refuse(worlds, more, again, *MIDDLE)
    found = worlds.run(more, partial(fit, replace(again, strategy=LENIENT)))
    for seen in found:
        assert {name for name, _ in seen.start} == {*KNOWN, *MIDDLE}
        assert_restored(seen, saved)
        for name in MIDDLE:
            assert torch.equal(seen.start[name, "master"], saved.weights[1][name])
            assert_fresh(seen, name)
    assert_told(found[0].warned, *MIDDLE)


@pytest.mark.parametrize(("source", "ranks", "target", "more"), [(2, 2, 3, 3), (3, 3, 2, 2)])
def test_a_layer_that_is_frozen_later_keeps_its_weights(
    source: int, ranks: int, target: int, more: int, worlds: Pools, tmp_path: Path
) -> None:
    """Its weights are the masters that were saved; its moments stay out, and it is named."""
    first = MiddleFit(str(tmp_path / "run"), source)
    saved = worlds.run(ranks, partial(fit, first))[0]
    again = first.resumed(stage=target, trains=False)
    refuse(worlds, more, again, *MIDDLE)
    found = worlds.run(more, partial(fit, replace(again, strategy=LENIENT)))
    for seen in found:
        assert {name for name, _ in seen.start} == {*KNOWN}
        assert_restored(seen, saved)
        for name in MIDDLE:
            for weights in seen.weights:
                assert torch.equal(weights[name], saved.end[name, "master"])
    assert_told(found[0].warned, *MIDDLE)


@pytest.mark.parametrize("stage", [2, 3])
def test_lightnings_finetuning_is_refused_by_lightning(
    stage: int, worlds: Pools, tmp_path: Path
) -> None:
    """On each rank, before there is an engine, in a first fit and in one that resumes."""
    first = MiddleFit(str(tmp_path / "run"), stage)
    for plan in (first, first.resumed()):
        for message in worlds.run(2, partial(finetuning_refusal, plan)):
            assert message.startswith("NotImplementedError")
            assert "does not support running with the DeepSpeed strategy" in message
