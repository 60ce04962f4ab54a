"""ModelCheckpoint and ckpt_path with a folder in an object store."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_elastic_zero.errors import ElasticZeroError
from tests.support.fits import FitCase, fit
from tests.support.ranks import Pools
from tests.support.store_servers import with_environment

pytestmark = pytest.mark.engine
S3 = tuple[str, Mapping[str, str]]


def names_in(url: str) -> dict[str, str]:
    """Return the names in a folder of a store, with the targets of links; nothing else is there."""
    from lightning_elastic_zero.storage.folders import folder_at
    from lightning_elastic_zero.storage.paths import StorePath

    folder = folder_at(url)
    assert isinstance(folder.path, StorePath)
    assert not folder.path.store.entries(folder.path.key)[1]
    return {
        entry.path.name: entry.follow_links().path.name if entry.is_link() else ""
        for entry in sorted(folder.entries(), key=str)
    }


@pytest.mark.parametrize("async_save", [False, True], ids=["blocking", "background"])
def test_a_run_continues_from_its_last_checkpoint(
    pools: Pools, s3: S3, *, async_save: bool
) -> None:
    """On another number of devices; one checkpoint of the best k and one of the last are kept."""
    bucket, environment = s3
    run = partial(with_environment, environment)
    kept = {"save_top_k": 1, "monitor": "val_loss", "save_last": True, "filename": "{step}"}
    url = f"{bucket}/{uuid4()}/kept"
    plan = FitCase(url, checkpoint=kept, strategy={"async_save": async_save})
    first = pools.run(2, partial(run, partial(fit, plan)))[0]
    assert first["best"].startswith(url)
    resumed = replace(plan, epochs=2, ckpt_path="last", seed=1)
    second = pools.run(1, partial(run, partial(fit, resumed)))[0]
    assert second["start"] == first["end"]
    assert (first["epoch"], second["epoch"]) == (1, 2)
    assert second["read"] > 0
    names = pools.run(1, partial(run, partial(names_in, url)))[0]
    assert set(names) == {"last.ckpt", second["best"].rpartition("/")[2]}
    best = replace(plan, epochs=3, ckpt_path=second["best"], seed=2)
    third = pools.run(2, partial(run, partial(fit, best)))[0]
    assert third["start"] == second["end"]


def test_a_run_in_a_new_folder_deletes_nothing_in_the_old_one(pools: Pools) -> None:
    """As on a disk: the callback still knows its best and last checkpoints there."""
    root = f"memory://{uuid4()}"
    plan = FitCase(f"{root}/old", checkpoint={"filename": "{step}", "save_last": True})
    pools.run(1, partial(fit, plan))
    before = pools.run(1, partial(names_in, plan.root))[0]
    moved = replace(plan, root=f"{root}/new", epochs=2, ckpt_path=f"{plan.root}/last.ckpt")
    pools.run(1, partial(fit, moved))
    assert pools.run(1, partial(names_in, plan.root))[0] == before
    assert len(before) == len(pools.run(1, partial(names_in, moved.root))[0]) == 2


@pytest.mark.long
@pytest.mark.parametrize("folder", ["", "/mein Lauf ä=1 #+%25&~/"], ids=["plain", "special"])
def test_last_is_a_link(pools: Pools, s3: S3, folder: str) -> None:
    """``last.ckpt`` names the newest of the best k; a run continues from it."""
    bucket, environment = s3
    run = partial(with_environment, environment)
    kept = {
        "save_top_k": 1,
        "monitor": "step",
        "mode": "max",
        "filename": "{epoch}",
        "save_last": "link",
    }
    plan = FitCase(f"{bucket}/{uuid4()}{folder}", checkpoint=kept)
    first = pools.run(2, partial(run, partial(fit, plan)))[0]
    names = pools.run(1, partial(run, partial(names_in, plan.root)))[0]
    assert names == {"epoch=0.ckpt": "", "last.ckpt": "epoch=0.ckpt"}
    resumed = replace(plan, epochs=2, ckpt_path="last", seed=1)
    second = pools.run(3, partial(run, partial(fit, resumed)))[0]
    assert second["start"] == first["end"]
    names = pools.run(1, partial(run, partial(names_in, plan.root)))[0]
    assert names["last.ckpt"] == "epoch=1.ckpt"


@pytest.mark.long
def test_last_is_the_newest_of_two_callbacks(pools: Pools, s3: S3) -> None:
    """One that saves rarely makes its link to an old checkpoint again at the end of an epoch."""
    bucket, environment = s3
    run, root = partial(with_environment, environment), f"{bucket}/{uuid4()}"
    kept: dict[str, Any] = {"save_top_k": -1, "filename": "{step}", "save_last": "link"}
    rare = partial(ModelCheckpoint, f"{root}/rare", every_n_train_steps=3, **kept)
    often = {**kept, "every_n_train_steps": 1}
    plan = FitCase(f"{root}/often", checkpoint=often, callbacks=(rare,), epochs=2)
    first = pools.run(2, partial(run, partial(fit, plan)))[0]
    resumed = replace(plan, epochs=3, ckpt_path="last", seed=1)
    second = pools.run(2, partial(run, partial(fit, resumed)))[0]
    assert second["start"] == first["end"]


def failed(plan: FitCase) -> str:
    """Return the prompt error of a fit; errors of other kinds end the test."""
    began = time.monotonic()
    try:
        fit(plan)
    except ElasticZeroError as error:
        assert time.monotonic() - began < 40.0
        return f"{type(error).__name__}: {error}"
    return ""


def test_file_urls(pools: Pools, tmp_path: Path) -> None:
    """A ``ckpt_path`` may be one. A ``dirpath`` may not, since Lightning changes it."""
    plan = FitCase(str(tmp_path / "run"))
    first = pools.run(2, partial(fit, plan))[0]
    resumed = replace(plan, epochs=2, ckpt_path=f"file://{tmp_path}/run/last.ckpt", seed=1)
    assert pools.run(1, partial(fit, resumed))[0]["start"] == first["end"]
    refused = pools.run(2, partial(failed, replace(plan, root=f"file://{tmp_path}/other")))
    assert all("Pass a path instead of a file:// URL" in each for each in refused), refused


@pytest.mark.parametrize("ckpt_path", [None, "last", "s3://no-such-bucket/run/a.ckpt"])
def test_a_missing_bucket_is_named_on_all_ranks(
    pools: Pools, s3: S3, ckpt_path: str | None
) -> None:
    """The request is not repeated, since the bucket does not appear by itself."""
    bucket, environment = s3
    root = f"{bucket}/{uuid4()}" if ckpt_path not in {None, "last"} else "s3://no-such-bucket/run"
    plan = FitCase(root, ckpt_path=ckpt_path)
    errors = pools.run(2, partial(with_environment, environment, partial(failed, plan)))
    kind = "CheckpointNotFoundError" if ckpt_path else "SaveError"
    assert all(kind in each and "no such bucket" in each for each in errors), errors


def refuse_list(plan: FitCase) -> str:
    """Fit while the store refuses rank 0's list requests."""
    from torch import distributed

    from lightning_elastic_zero.storage.object_store import ObjectStore

    def entries(store: ObjectStore, prefix: str, *_: object) -> object:
        if distributed.get_rank():
            return entries_of_store(store, prefix)
        raise PermissionError(13, "access denied", f"{store.root}/{prefix}")

    entries_of_store = ObjectStore.entries
    ObjectStore.entries = entries  # type: ignore[method-assign,assignment]
    try:
        return failed(plan)
    finally:
        ObjectStore.entries = entries_of_store  # type: ignore[method-assign]


def test_a_failed_list_of_rank_0_is_raised_on_all_ranks(pools: Pools, s3: S3) -> None:
    """The other ranks do not wait for it."""
    bucket, environment = s3
    plan = FitCase(f"{bucket}/{uuid4()}")
    errors = pools.run(2, partial(with_environment, environment, partial(refuse_list, plan)))
    assert all("access denied" in each for each in errors), errors
