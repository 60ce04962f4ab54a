"""After any failing request, the checkpoint is the old or the new one; no error is silent."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.storage._store_ranks import (
    NEW,
    OLD,
    load_during_overwrite,
    load_repeatedly,
    load_state,
    prepare,
    save_repeatedly,
    save_state,
)
from tests.storage._store_runs import LOAD, OVERWRITE, PHASES, SAVE, StoreRuns, store_environment
from tests.support.engines import EngineCase
from tests.support.fault_proxy import BODY_FAULTS, KINDS, STATUSES, Fault, FaultProxy
from tests.support.processes import HANG_TIMEOUT_S
from tests.support.ranks import ForkServer, Pools
from tests.support.store_servers import make_bucket, s3_environment
from tests.support.tables import STORE_FAULTS

pytestmark = pytest.mark.engine

pytest.importorskip("obstore")
boto3 = pytest.importorskip("boto3")

KILLS = tuple(kind for kind in KINDS if kind.startswith("kill"))
ANSWERS = (*STATUSES, "500 after execution")
CONNECTIONS = tuple(kind for kind in KINDS if kind not in {*KILLS, *ANSWERS})
OUTAGES = ("reset", "503")


@pytest.fixture
def runs(
    fork_server: ForkServer,
    moto_port: int,
    proxy: FaultProxy,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Iterator[StoreRuns]:
    """Return runs with their own bucket and ranks: two, unless a test sets another number."""
    bucket = f"faults-{abs(hash(request.node.name))}"
    make_bucket(moto_port, bucket)
    direct = s3_environment(f"http://127.0.0.1:{moto_port}")
    with store_environment(direct):
        pools = Pools(fork_server)
        client = boto3.client("s3", endpoint_url=direct["AWS_ENDPOINT_URL"])
        runs = StoreRuns(
            pools, proxy, bucket, EngineCase(getattr(request, "param", 2), "2"), client
        )
        try:
            runs.begin(str(tmp_path))
            yield runs
        finally:
            pools.close()


@pytest.mark.long
@pytest.mark.parametrize("kinds", [ANSWERS, CONNECTIONS], ids=["answers", "connections"])
@pytest.mark.parametrize("phase", PHASES)
def test_each_request_fails_once_in_each_way(
    phase: str, kinds: tuple[str, ...], runs: StoreRuns
) -> None:
    """Every request of a save, an overwrite and a load, and every fault."""
    for request in runs.requests_of(phase):
        for kind in kinds:
            # The order of two ranks' requests may change; the method shows whether there is a body.
            if request.method in {"GET", "POST"} or kind not in BODY_FAULTS:
                runs.fail(phase, Fault(kind, request.number, delay_s=0.7))
    assert not runs.wrong, "\n".join(runs.wrong)


@pytest.mark.long
@pytest.mark.parametrize("kind", KILLS)
@pytest.mark.parametrize("phase", [SAVE, OVERWRITE, LOAD])
def test_a_kill_at_each_request(phase: str, kind: str, runs: StoreRuns) -> None:
    """All ranks are killed before or after the store executes a request."""
    for request in runs.requests_of(phase):
        runs.kill(phase, Fault(kind, request.number))
    assert not runs.wrong, "\n".join(runs.wrong)


@pytest.mark.long
@pytest.mark.parametrize("phase", PHASES)
def test_an_outage_that_does_not_end(phase: str, runs: StoreRuns) -> None:
    """All requests from one on fail: the error is raised on all ranks, after bounded retries.

    After the commit, requests only remove objects that are no longer needed.
    """
    requests = runs.requests_of(phase)
    commits = [
        each.number
        for each in requests
        if "state.ckpt/manifest.json" in each.target and (each.method == "PUT" or phase == LOAD)
    ]
    for number in sorted({1, len(requests) // 2, commits[-1], len(requests)}):
        for kind in OUTAGES:
            must_raise = phase == LOAD or number <= commits[-1]
            fault = Fault(kind, number, times=1_000_000)
            runs.fail(phase, fault, f"{kind}, from then on", must_raise=must_raise)
    assert not runs.wrong, "\n".join(runs.wrong)


@pytest.mark.long
@pytest.mark.parametrize("runs", [1], indirect=True)
def test_two_runs_race_for_one_name(runs: StoreRuns) -> None:
    """At most one of two overlapping saves succeeds; the last successful one is published."""
    settings, rounds = runs.settings, 12
    worlds = [runs.pools.start(1), runs.pools.start(1)]
    try:
        for world in worlds:
            world.ranks[0].send(partial(prepare, settings, (OLD, NEW)))
        for world in worlds:
            world.results(HANG_TIMEOUT_S)
        wins = []
        for _ in range(rounds):
            for world, state in zip(worlds, (OLD, NEW), strict=True):
                world.ranks[0].send(partial(save_state, settings, runs.url, state))
            answers = [world.results(HANG_TIMEOUT_S)[0] for world in worlds]
            assert [kind for kind, _ in answers] == ["value", "value"], answers
            errors = [outcome.error for _, outcome in answers]
            won = [state for state, error in zip((OLD, NEW), errors, strict=True) if not error]
            STORE_FAULTS.count("two runs save to one name", "tried")
            STORE_FAULTS.count("two runs save to one name", "succeeded", by=len(won))
            STORE_FAULTS.count("two runs save to one name", "raised", by=2 - len(won))
            assert won, errors
            assert runs.published() in won, errors
            assert all("another process" in error for error in errors if error), errors
            assert not runs.leftovers(), errors
            wins.append(won)
        assert [OLD] in wins or [NEW] in wins, "the saves never overlapped"
        assert not runs.wrong
    finally:
        for world in worlds:
            world.end()


@pytest.mark.long
@pytest.mark.parametrize("runs", [1], indirect=True)
def test_readers_during_overwrites(runs: StoreRuns) -> None:
    """Each load gets the complete old or new checkpoint."""
    runs.set_up("overwrite")
    writer, reader = runs.pools.start(1), runs.pools.start(1)
    try:
        writer.ranks[0].send(partial(save_repeatedly, runs.settings, runs.url, (NEW, OLD) * 20))
        reader.ranks[0].send(partial(load_repeatedly, runs.settings, runs.url, 30))
        (kind, saves), (other, loads) = (
            world.results(HANG_TIMEOUT_S)[0] for world in (writer, reader)
        )
    finally:
        writer.end()
        reader.end()
    assert (kind, other) == ("value", "value"), (saves, loads)
    assert not [outcome.error for outcome in saves if outcome.error]
    errors = [outcome.error for outcome in loads if outcome.error]
    row = "loads during overwrites"
    STORE_FAULTS.count(row, "tried", by=len(loads))
    STORE_FAULTS.count(row, "succeeded", by=len(loads) - len(errors))
    STORE_FAULTS.count(row, "raised", by=len(errors))
    assert not errors
    assert {outcome.held for outcome in loads} == {f"state {OLD}", f"state {NEW}"}


def test_some_requests_fail(runs: StoreRuns) -> None:
    """A few faults in requests for the manifest and the files."""
    for kind in ("response lost", "503", "412"):
        runs.fail("overwrite", Fault(kind, method="PUT", key=r"state\.ckpt/manifest\.json"))
    runs.fail(LOAD, Fault("truncated body", method="GET", key="optim_states"))
    assert not runs.wrong, "\n".join(runs.wrong)


def test_a_load_starts_again_when_its_checkpoint_is_replaced(runs: StoreRuns) -> None:
    """All ranks load the new one."""
    other = f"s3://{runs.bucket}/run/new.ckpt"
    for url, state in ((runs.url, OLD), (other, NEW)):
        runs.pools.run(2, partial(save_state, runs.settings, url, state))
    outcomes = runs.pools.run(2, partial(load_during_overwrite, runs.settings, runs.url, other))
    assert [outcome.error for outcome in outcomes] == ["", ""]
    assert outcomes[0].held == f"state {NEW}"


def test_several_ranks_do_not_save_into_memory(runs: StoreRuns) -> None:
    """Each rank would have its own store."""
    for call in (partial(save_state, state=NEW), load_state):
        outcomes = runs.pools.run(2, partial(call, runs.settings, "memory://box/state.ckpt"))
        assert all("is in the memory of one process, but 2 ranks" in o.error for o in outcomes)


@pytest.mark.parametrize("runs", [1], indirect=True)
def test_a_store_that_ignores_conditions_is_refused(runs: StoreRuns) -> None:
    """The error names the bucket. Only the check's object is written, and deleted again."""
    runs.proxy.drops_conditions = True
    before = runs.keys()
    [outcome] = runs.pools.run(1, partial(save_state, runs.settings, runs.url, NEW))
    assert f"s3://{runs.bucket} does not support conditional writes" in outcome.error
    assert runs.keys() == before
