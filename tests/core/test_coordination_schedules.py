"""Jobs drawn at random: whatever happens, all ranks hear the same in bounded time."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_elastic_zero.errors import SaveError
from tests.core._cluster import TICK_S, Cluster, Pauses, Rank, raising
from tests.core._cluster_steps import (
    KINDS,
    at_work,
    meet,
)


class Stop(NamedTuple):
    """A rank that is stopped, or whose store does not answer, from one tick to another."""

    rank: int
    begin: int
    ticks: int
    held: bool


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a job: what fails, who works for how long, who is stopped when, who looks first."""
    size = draw(st.integers(2, 5))
    ranks = st.integers(0, size - 1)
    ticks = st.integers(0, 40)
    stops = st.builds(Stop, ranks, st.integers(0, 80), ticks, st.booleans())
    step = st.fixed_dictionaries(
        {
            "kind": st.sampled_from(KINDS),
            "raises": st.sets(ranks, max_size=2),
            "busy": st.dictionaries(ranks, ticks, max_size=2),
            "late": st.dictionaries(ranks, ticks, max_size=1),
        }
    )
    return {
        "size": size,
        "steps": draw(st.lists(step, min_size=1, max_size=4)),
        "stops": draw(st.lists(stops, max_size=3)),
        "dead": draw(st.none() | st.tuples(ranks, st.integers(0, 80))),
        "orders": draw(st.lists(st.permutations(range(size)), min_size=1, max_size=5)),
    }


@settings(max_examples=60)
@given(schedules())
def test_whatever_happens_all_ranks_hear_the_same_in_bounded_time(plan: dict[str, Any]) -> None:
    """Of each step, and when nobody is stopped any more the next one succeeds.

    A rank that the store does not answer gives up by itself, whatever the others hear.
    """
    job = Cluster(plan["size"])
    found: list[dict[int, dict[str, Any]]] = [{} for _ in plan["steps"]]
    # Whoever raises what the others have finished is alone with its next step, if they make none.
    undisturbed_s = job.now_s + TICK_S * max(
        (s.begin + s.ticks + 1 for s in plan["stops"]), default=0
    )

    def program(rank: Rank) -> Pauses[Any]:
        for number, step in enumerate(plan["steps"]):
            yield from rank.sleep(TICK_S * step["late"].get(rank.rank, 0))
            error = SaveError("disk") if rank.rank in step["raises"] else None
            found[number][rank.rank] = yield from rank.step(
                step["kind"],
                f"step {number}",
                raising(error) if error else None,
                lambda s: at_work(s, rank, TICK_S * step["busy"].get(rank.rank, 0)),  # noqa: B023
            )
        if plan["dead"] is not None:
            return []
        yield from rank.sleep(undisturbed_s - job.now_s)
        return (yield from meet(rank))

    job.start(program)
    for tick in range(1500):
        gone = {plan["dead"][0]} if plan["dead"] and tick >= plan["dead"][1] else set()
        now = [stop for stop in plan["stops"] if stop.begin <= tick < stop.begin + stop.ticks]
        job.stopped = gone | {stop.rank for stop in now if not stop.held}
        job.held = {stop.rank for stop in now if stop.held}
        if all(rank.done for rank in job.ranks if rank.rank not in job.stopped) and not now:
            break
        job.tick(plan["orders"][tick % len(plan["orders"])])
    job.finish()
    away_s = TICK_S * sum(stop.ticks for stop in plan["stops"]) + 40 * TICK_S * len(plan["steps"])
    times = job.times
    limit_s = away_s + times.absent_timeout_s + times.stall_timeout_s + times.heartbeat_timeout_s
    for number, outcomes in enumerate(found):
        heard = {
            rank: outcome
            for rank, outcome in outcomes.items()
            if "store has not answered" not in outcome.get("message", "")
        }
        messages = {outcome.get("message") for outcome in heard.values()}
        assert len(messages) <= 1, (number, outcomes)
        if plan["steps"][number]["raises"] - {0} and plan["steps"][number]["kind"] != "broadcast":
            assert None not in messages, (number, outcomes)
        assert all(outcome["seconds"] < limit_s for outcome in outcomes.values()), outcomes
