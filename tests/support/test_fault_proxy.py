"""The proxy applies its faults to requests, and changes nothing else."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest

from tests.support.fault_proxy import KINDS, STATUSES, Fault, FaultProxy
from tests.support.store_servers import make_bucket

pytest.importorskip("obstore")
import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

BODY = bytes(range(256)) * 40


@pytest.fixture(scope="module")
def bucket(moto_port: int) -> str:
    """Return a bucket for this file."""
    make_bucket(moto_port, "proxied")
    return "proxied"


@pytest.fixture
def store(bucket: str, proxy: FaultProxy) -> Any:
    """Return a client behind the proxy that does not retry."""
    return client(bucket, proxy.url)


def client(bucket: str, url: str) -> Any:
    """Return a client that does not retry."""
    return S3Store(
        bucket,
        endpoint=url,
        access_key_id="test",
        secret_access_key="test",  # noqa: S106 - moto does not check it
        region="us-east-1",
        client_options={"allow_http": True, "timeout": "20s"},
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
    )


@pytest.fixture
def direct(bucket: str, moto_port: int) -> Any:
    """Return a client without the proxy."""
    return client(bucket, f"http://127.0.0.1:{moto_port}")


def test_requests_pass_unchanged(store: S3Store, proxy: FaultProxy) -> None:
    """Puts, conditions, streams, ranges, lists and deletes work, and are counted with bytes."""
    obstore.put(store, "a/one", BODY, mode="create")
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        obstore.put(store, "a/one", b"", mode="create")
    with obstore.open_writer(store, "a/two", buffer_size=5 << 20) as writer:
        writer.write(bytes(6 << 20))
    assert bytes(obstore.get_range(store, "a/one", start=5, end=300)) == BODY[5:300]
    assert obstore.head(store, "a/two")["size"] == 6 << 20
    found = [item["path"] for batch in obstore.list(store, "a") for item in batch]
    assert sorted(found) == ["a/one", "a/two"]
    obstore.delete(store, found)
    assert proxy.counts()["PUT"] == 4
    assert proxy.counts()["HEAD"] == 1
    assert proxy.bytes_by_method()["PUT"] >= len(BODY) + (6 << 20)
    assert not proxy.injected


@pytest.mark.parametrize("kind", KINDS)
def test_each_fault_of_a_write(
    kind: str, store: S3Store, direct: S3Store, proxy: FaultProxy
) -> None:
    """A fault of a PUT is an error unless it is slow; the store has executed it or not."""
    killed = []
    proxy.on_kill = lambda: killed.append(1)
    obstore.put(direct, "key", b"old")
    proxy.reset(Fault(kind, method="PUT", key="key", delay_s=0.5))
    began = time.monotonic()
    harmless = kind in {"slow response", "truncated body", "shortened body", "changed byte"}
    if harmless:
        obstore.put(store, "key", BODY)
    else:
        with pytest.raises(BaseError):
            obstore.put(store, "key", BODY)
    executed = {"response lost", "500 after execution", "kill after execution", "executed late"}
    with proxy.late:  # moto fails if it reads an object that it is writing
        found = bytes(obstore.get(direct, "key").bytes())
    assert found == (BODY if harmless or kind in executed else b"old")
    assert bool(killed) == kind.startswith("kill")
    assert kind != "slow response" or time.monotonic() - began >= 0.5
    assert (len(proxy.injected) == 1) == (not harmless or kind == "slow response")
    obstore.put(store, "key", BODY)


@pytest.mark.parametrize("kind", KINDS)
def test_each_fault_of_a_read(
    kind: str, store: S3Store, direct: S3Store, proxy: FaultProxy
) -> None:
    """A fault of a GET is an error, is slow, or changes the bytes."""
    obstore.put(direct, "key", BODY)
    proxy.reset(Fault(kind, number=1, delay_s=0.5))
    found: bytes | str
    try:
        found = bytes(obstore.get(store, "key").bytes())
    except BaseError as error:
        found = type(error).__name__
    if kind == "slow response":
        assert found == BODY
    elif kind == "shortened body":
        assert found == BODY[: len(BODY) // 2]
    elif kind == "changed byte":
        assert isinstance(found, bytes)
        assert sum(a != b for a, b in zip(found, BODY, strict=True)) == 1
    else:
        assert isinstance(found, str), kind
    assert [str(request.fault) for request in proxy.requests] == [kind]
    assert bytes(obstore.get(store, "key").bytes()) == BODY


def test_consecutive_requests_fail(store: S3Store, proxy: FaultProxy) -> None:
    """A fault can last for several requests."""
    proxy.reset(Fault("503", method="PUT", key="twice", nth=2, times=2))
    results = []
    for _ in range(4):
        try:
            obstore.put(store, "twice", b"x")
        except BaseError:
            results.append(503)
        else:
            results.append(200)
    assert results == [200, 503, 503, 200]
    assert [request.status for request in proxy.requests] == results


def test_unknown_kinds_are_refused() -> None:
    """A misspelled fault would never be injected."""
    with pytest.raises(ValueError, match="unknown fault '504'"):
        Fault("504")
    assert set(STATUSES) < set(KINDS)
