"""A store that does not answer, or refuses: one prompt error on all ranks, with its cause."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lightning_elastic_zero.coordination.liveness import STALL_TIMEOUT_S
from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.storage import object_store
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.ownership import new_id
from lightning_elastic_zero.storage.paths import StorePath
from lightning_elastic_zero.storage.store_checkpoints import StagedObjects
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.fits import FitCase, error_of, fit
from tests.support.processes import free_port
from tests.support.ranks import Pools
from tests.support.store_servers import (
    make_bucket,
    moto_server,
    require_credentials,
    s3_environment,
    with_environment,
)

pytest.importorskip("obstore")


@pytest.fixture
def endpoint() -> str:
    """Return an endpoint that refuses connections."""
    return f"http://127.0.0.1:{free_port()}"


@pytest.mark.long
def test_the_requests_of_an_outage_share_one_time_limit(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that clean up after the first one are not repeated; a later one is."""
    retry_s = 3.0
    for name, value in s3_environment(endpoint).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_store, "RETRY_S", retry_s)
    monkeypatch.setattr(object_store, "_AWAY_S", 1000.0)
    target = StorePath(f"s3://{new_id()}", "run/a.ckpt")

    def seconds_of_a_failure() -> float:
        began = time.monotonic()
        with pytest.raises(SaveError, match=rf"{endpoint}/.*Connection refused"):
            StagedObjects.create(target, new_id())
        return time.monotonic() - began

    assert seconds_of_a_failure() >= retry_s
    assert seconds_of_a_failure() < retry_s
    monkeypatch.setattr(object_store, "_AWAY_S", 0.0)
    assert seconds_of_a_failure() >= retry_s


def test_a_store_that_answers_again_is_used_at_once(
    moto_port: int, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Including right after the error of an outage."""
    for name, value in s3_environment(proxy.url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_store, "RETRY_S", 1.0)
    bucket = f"outage-{new_id()}"
    make_bucket(moto_port, bucket)
    path = StorePath(f"s3://{bucket}", "object")
    proxy.reset(Fault("503", number=1, times=1_000_000))
    with pytest.raises(OSError, match="SlowDown"):
        path.store.put(path.key, b"content")
    proxy.reset()
    path.store.put(path.key, b"content")
    assert path.store.get(path.key)[0] == b"content"


def test_a_request_without_an_answer_is_repeated(
    moto_port: int, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of all attempts leaves time for several, and stays, as machines may pause."""
    for name, value in s3_environment(proxy.url).items():
        monkeypatch.setenv(name, value)
    assert 2 * object_store._REQUEST_S <= object_store.RETRY_S
    monkeypatch.setattr(object_store, "_REQUEST_S", 1.0)
    bucket = f"outage-{new_id()}"
    make_bucket(moto_port, bucket)
    path = StorePath(f"s3://{bucket}", "object")
    for call in (lambda: path.store.put(path.key, b"content"), lambda: path.store.get(path.key)):
        proxy.reset(Fault("slow response", number=1, delay_s=4.0))
        call()
        assert len(proxy.requests) > 1


def test_the_deletion_of_a_name_is_not_repeated(
    moto_port: int,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was carried out, and another process may have published under the name since."""
    for name, value in s3_environment(proxy.url).items():
        monkeypatch.setenv(name, value)
    bucket = f"outage-{new_id()}"
    make_bucket(moto_port, bucket)
    target = StorePath(f"s3://{bucket}", "run/a.ckpt")
    save_id = new_id()
    staged = StagedObjects.create(target, save_id)
    manifest = {"format": "lightning_elastic_zero", "save_id": save_id, "files": []}
    staged.seal(json.dumps(manifest).encode())
    staged.put_in_place()
    proxy.reset(Fault("response lost", method="POST", key=r"\?delete"))
    assert not folder_at(target).delete()
    assert proxy.counts()["POST"] == 2  # of the name, and of the owner object
    assert "its manifest may stay" in caplog.text
    assert not folder_at(target).exists()


def timed_error_of(plan: FitCase) -> tuple[float, str]:
    """Return the time until a fit fails, and its error."""
    began = time.monotonic()
    error = error_of(plan)
    return time.monotonic() - began, error


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.parametrize("ckpt_path", [None, "last", "run/a.ckpt"])
def test_an_endpoint_that_does_not_answer_is_named_on_all_ranks(
    own_pools: Pools, endpoint: str, ckpt_path: str | None
) -> None:
    """With the default timeouts, before rank 0 counts as stalled."""
    root = f"s3://{new_id()}"
    plan = FitCase(f"{root}/run", ckpt_path=ckpt_path)
    if ckpt_path not in {None, "last"}:
        plan = replace(plan, ckpt_path=f"{root}/{ckpt_path}", checkpoint={"save_top_k": 0})
    call = partial(with_environment, s3_environment(endpoint), partial(timed_error_of, plan))
    for seconds, error in own_pools.run(3, call):
        assert endpoint in error, error
        assert "Connection refused" in error, error
        assert seconds < STALL_TIMEOUT_S + 10, error


def error_with_credentials(plan: FitCase, of_ranks: Sequence[Mapping[str, str]]) -> str:
    """Return the error of a fit with the credentials of each rank."""
    from torch import distributed

    return with_environment(of_ranks[distributed.get_rank()], partial(error_of, plan))


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.parametrize("wrong", [(0, 1), (1,)], ids=["all ranks", "one rank"])
def test_wrong_credentials_are_named_on_all_ranks(
    own_pools: Pools, tmp_path: Path, wrong: tuple[int, ...]
) -> None:
    """Even if only one rank's are wrong: the error says more than that it sees no file."""
    pytest.importorskip("moto.server")
    with moto_server(tmp_path / "log") as port:
        make_bucket(port, "guarded")
        right = require_credentials(port)
        plan = FitCase("s3://guarded/run")
        other = {**right, "AWS_ACCESS_KEY_ID": "AKIAWRONGWRONGWRONGW"}
        of_ranks = [other if rank in wrong else right for rank in range(2)]
        for error in own_pools.run(2, partial(error_with_credentials, plan, of_ranks)):
            assert "access denied" in error, error
            assert "InvalidAccessKeyId" in error, error
        own_pools.run(3, partial(with_environment, right, partial(fit, plan)))
