"""ModelCheckpoint and ckpt_path with a folder in an object store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from uuid import uuid4

import pytest

from tests.stores._servers import with_environment
from tests.support.fits import FitSpec, fit
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine
S3 = tuple[str, Mapping[str, str]]


def names_in(url: str) -> dict[str, str]:
    """Return the names in a folder of a store, with what a link leads to."""
    from lightning_elastic_zero.storage.checkpoints import is_link, resolved, siblings
    from lightning_elastic_zero.storage.paths import parse_path

    found = sorted(siblings(parse_path(url) / "any"), key=str)
    return {path.name: resolved(path).name if is_link(path) else "" for path in found}


@pytest.mark.parametrize("async_save", [False, True], ids=["blocking", "background"])
def test_a_run_goes_on_from_its_last_checkpoint(pools: Pools, s3: S3, *, async_save: bool) -> None:
    """On another number of devices; of the best k, and of the last, one each is there."""
    bucket, environment = s3
    run = partial(with_environment, environment)
    kept = {"save_top_k": 1, "monitor": "val_loss", "save_last": True, "filename": "{step}"}
    url = f"{bucket}/{uuid4()}/kept"
    plan = FitSpec(url, checkpoint=kept, strategy={"async_save": async_save})
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
    third = pools.run(3, partial(run, partial(fit, best)))[0]
    assert third["start"] == second["end"]


def test_last_is_a_link(pools: Pools, s3: S3) -> None:
    """``last.ckpt`` names the newest of the best k; a run goes on from it."""
    bucket, environment = s3
    run = partial(with_environment, environment)
    kept = {
        "save_top_k": 1,
        "monitor": "step",
        "mode": "max",
        "filename": "{epoch}",
        "save_last": "link",
    }
    plan = FitSpec(f"{bucket}/{uuid4()}", checkpoint=kept)
    first = pools.run(2, partial(run, partial(fit, plan)))[0]
    names = pools.run(1, partial(run, partial(names_in, plan.root)))[0]
    assert names == {"epoch=0.ckpt": "", "last.ckpt": "epoch=0.ckpt"}
    resumed = replace(plan, epochs=2, ckpt_path="last", seed=1)
    second = pools.run(3, partial(run, partial(fit, resumed)))[0]
    assert second["start"] == first["end"]
    names = pools.run(1, partial(run, partial(names_in, plan.root)))[0]
    assert names["last.ckpt"] == "epoch=1.ckpt"
