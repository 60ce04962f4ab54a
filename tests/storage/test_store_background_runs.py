"""Runs that save to a store in the background: killed, or with workers forked during a save."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.fits import FitCase, fit
from tests.support.processes import HANG_TIMEOUT_S
from tests.support.ranks import Pools
from tests.support.store_servers import make_bucket, s3_environment, with_environment

pytestmark = [pytest.mark.engine, pytest.mark.long]

KEPT = {"save_top_k": 2, "monitor": "step", "mode": "max", "filename": "{step}"}
LINKED = {**KEPT, "save_last": "link", "every_n_train_steps": 1}


@pytest.fixture
def bucket(moto_port: int) -> str:
    """Return the name of a new bucket."""
    name = f"runs-{uuid4()}"
    make_bucket(moto_port, name)
    return name


def verified(url: str) -> list[tuple[str, bool]]:
    """Return the checkpoints of a folder, and whether each is intact."""
    from lightning_elastic_zero import verify_checkpoint
    from lightning_elastic_zero.storage.folders import folder_at

    # A killed save leaves objects that no manifest lists.
    found = [each for each in sorted(folder_at(url).entries(), key=str) if each.is_checkpoint()]
    return [(each.path.name, verify_checkpoint(str(each)).is_sound) for each in found]


def test_workers_are_forked_while_a_save_is_in_flight(
    own_pools: Pools, proxy: FaultProxy, bucket: str
) -> None:
    """They share no connection with the save: the run ends, and all checkpoints are intact."""
    run = partial(with_environment, s3_environment(proxy.url))
    options: dict[str, Any] = {"epochs": 3, "checkpoint": LINKED, "strategy": {"async_save": True}}
    workers = {"num_workers": 2, "multiprocessing_context": "fork"}
    plan = FitCase(f"s3://{bucket}/workers", loader=workers, **options)
    proxy.reset(Fault("slow response", method="PUT", key="checkpoint/", times=10_000, delay_s=1.0))
    found = own_pools.run(2, partial(run, partial(fit, plan)))[0]
    assert len(proxy.injected) > 6
    proxy.reset()
    without_workers = own_pools.run(
        2, partial(run, partial(fit, FitCase(f"s3://{bucket}/alone", **options)))
    )
    assert found["end"] == without_workers[0]["end"]
    intact = own_pools.run(1, partial(run, partial(verified, plan.root)))[0]
    assert intact == [("last.ckpt", True), ("step=5.ckpt", True), ("step=6.ckpt", True)]
    resumed = replace(plan, epochs=4, ckpt_path="last", seed=1)
    assert own_pools.run(2, partial(run, partial(fit, resumed)))[0]["start"] == found["end"]


@pytest.mark.parametrize("key", [r"step=3\.ckpt/.*model_states", r"step=3\.ckpt/manifest"])
@pytest.mark.parametrize("kind", ["kill before execution", "kill after execution"])
def test_a_run_killed_during_a_background_save_continues(
    own_pools: Pools, proxy: FaultProxy, bucket: str, kind: str, key: str
) -> None:
    """From the last published checkpoint, to the weights of a run that was not killed."""
    run = partial(with_environment, s3_environment(proxy.url))
    plan = FitCase(f"s3://{bucket}/run", epochs=3, checkpoint=LINKED, strategy={"async_save": True})
    undisturbed = replace(plan, root=f"s3://{bucket}/whole")
    wanted = own_pools.run(2, partial(run, partial(fit, undisturbed)))[0]
    world = own_pools.start(2)

    def kill() -> None:
        for pid in world.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    proxy.on_kill = kill
    proxy.reset(Fault(kind, method="PUT", key=key))
    try:
        for connection in world.ranks:
            connection.send(partial(run, partial(fit, plan)))
        world.results(HANG_TIMEOUT_S)
    finally:
        proxy.on_kill = None
        world.end()
    assert len(proxy.injected) == 1
    proxy.reset()
    resumed = replace(plan, ckpt_path="last", seed=1)
    found = own_pools.run(2, partial(run, partial(fit, resumed)))[0]
    assert found["read"] > 0
    assert found["end"] == wanted["end"]
    intact = dict(own_pools.run(1, partial(run, partial(verified, plan.root)))[0])
    assert intact.pop("last.ckpt")
    assert {"step=5.ckpt", "step=6.ckpt"} <= intact.keys()
    assert all(intact.values())
