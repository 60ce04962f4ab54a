"""What ranks do to compute how a writer's run goes on from its state, on the machine at hand.

Processors sum in different orders, so that a continuation that was computed on one cannot be
compared with what another computes: only states may be kept. Here the state that the writer held is
put into an engine by hand, and this run is trained beside the resumed one.

Nothing here may import ``lightning_elastic_zero``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import distributed

from tests.engine._oracle import Dump, differences, dump
from tests.engine._setup import Engine, Setup, engine_of, train
from tests.engine._state_writer import KERNEL_OPTIONS, write_state

MORE = 2
"""Steps that both runs train where nothing else is said."""

Losses = list[list[float]]
"""Of each rank."""

TrainOn = Callable[[Engine, Setup, int, int], list[float]]
"""Trains steps ``[first, last)``, and returns this rank's losses."""


@dataclass(frozen=True)
class ReferenceComparison:
    """How a resumed run went on, and how one did that was made to hold the writer's state."""

    lacking: dict[str, int]
    """What the other run did not hold although it was put there: must be empty."""
    losses: tuple[Losses, Losses]
    """The resumed run's, and the other's."""
    differing: dict[str, int]
    """What differs at the end, in how many bits."""
    unlike: dict[str, int]
    """What differs at the end if the writer's weights have a fresh optimizer."""

    def assert_same(self, *, stateless: bool = False) -> None:
        """Fail unless both runs went on bit for bit alike.

        Args:
            stateless: the writer's optimizer had no state yet, and was as good as a fresh one.
        """
        assert not self.lacking
        resumed, other = self.losses
        assert all(resumed)
        assert resumed == other
        assert not self.differing
        masters = [key for key in self.unlike if key.startswith("master/")]
        assert bool(masters) != stateless, "the negative control"


def compare_with_reference(
    setup: Setup,
    first: int,
    wanted: Dump | None,
    resumed: tuple[list[float], Dump | None],
    train_on: TrainOn = train,
    *,
    steps: int = MORE,
) -> ReferenceComparison | None:
    """Train a run that is made to hold the writer's state, and compare. Collective.

    Args:
        setup: of both runs.
        first: the step that the writer's run was at.
        wanted: what it held, on rank 0.
        resumed: this rank's losses of the resumed run, and what it held at the end, on rank 0.
        train_on: trains an engine as the resumed run was trained.
        steps: how many that run was trained on.
    """
    shared = [wanted]
    distributed.broadcast_object_list(shared, 0)
    held = shared[0]
    assert held is not None
    ends: list[Dump | None] = []
    with engine_of(setup, 11, tilt=3.0) as engine:
        for states in (False, True):  # First with the optimizer that it has, which is fresh.
            write_state(engine, setup, held, states=states)
            found = dump(engine, setup)
            losses = train_on(engine, setup, first, first + steps)
            ends.append(dump(engine, setup))
    everyone: list[Any] = [None] * setup.world
    distributed.all_gather_object(everyone, (resumed[0], losses))
    without, other = ends
    if wanted is None or found is None or without is None or other is None or resumed[1] is None:
        return None
    return ReferenceComparison(
        lacking=restored_differences(wanted, found),
        losses=([own for own, _ in everyone], [own for _, own in everyone]),
        differing=differences(resumed[1], other),
        unlike=differences(without, other),
    )


def restored_differences(wanted: Dump, found: Dump) -> dict[str, int]:
    """Return what differs of all that is restored."""
    return {
        key: bits
        for key, bits in differences(wanted, found).items()
        if not (key.startswith("group/") and key.endswith(KERNEL_OPTIONS))
        and not key.startswith("scaler/")  # BF16_Optimizer alone has none; no run's differs.
    }
