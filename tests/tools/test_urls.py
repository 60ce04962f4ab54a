"""The commands read checkpoints of an object store."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest

from lightning_elastic_zero.checkpoint.fallback import find_fallback
from lightning_elastic_zero.checkpoint.types import LoadOptions
from lightning_elastic_zero.cli import main
from lightning_elastic_zero.coordination.ranks import OneRank
from lightning_elastic_zero.storage.paths import StorePath, parse_path
from tests.support.checkpoints import Saved, train_and_save
from tests.support.engines import EngineCase
from tests.support.ranks import Pools
from tests.support.store_servers import with_environment

pytestmark = pytest.mark.engine


def test_without_obstore_the_command_that_installs_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert main(["inspect", f"memory://{uuid4()}/step-3"]) == 2
    assert "is not installed: pip install obstore s3fs\n" in capsys.readouterr().err


@pytest.mark.long
def test_commands_take_urls(
    pools: Pools,
    s3: tuple[str, Mapping[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A missing checkpoint is named, and a local copy is a checkpoint too."""
    bucket, environment = s3
    folder = f"{bucket}/{uuid4()}"
    url = f"{folder}/step-3"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    local = Saved(EngineCase(2, "2"), str(tmp_path / "local.ckpt"))
    pools.run(2, partial(train_and_save, local))
    save = partial(with_environment, environment, partial(_save_to, local.setup, url))
    requests = pools.run(2, save)[0]
    assert 10 < requests < 60, requests
    assert main(["inspect", url, "--files"]) == 0
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt" in capsys.readouterr().out
    assert main(["verify", url]) == 0
    assert main(["diff", url, local.path]) == 0
    assert main(["convert", url, str(tmp_path / "w.safetensors"), "--to", "safetensors"]) == 0
    capsys.readouterr()
    assert main(["fingerprint", "--tensors", url, local.path]) == 0
    prints = capsys.readouterr().out.split(url)
    assert prints[0] in prints[1], "the fingerprints differ"
    for verb in (["convert", local.path, url, "--to", "fp32"], ["selftest", "--dir", folder]):
        assert main(verb) == 2
        assert "is in an object store. Choose a path on a file system" in capsys.readouterr().err
    assert main(["inspect", f"{folder}/step-4"]) == 2
    assert (
        f"there is no checkpoint at {folder}/step-4. {folder} contains" in capsys.readouterr().err
    )
    assert main(["inspect", "s3://no-such-bucket/step-4"]) == 2
    assert "s3://no-such-bucket: no such bucket. Check" in capsys.readouterr().err
    _download(url, tmp_path / "copy")
    assert main(["verify", str(tmp_path / "copy")]) == 0
    assert main(["diff", url, str(tmp_path / "copy")]) == 0
    _upload(Path(local.path), f"{folder}/from-a-disk")
    assert main(["verify", f"{folder}/from-a-disk"]) == 0
    assert main(["diff", url, f"{folder}/from-a-disk"]) == 0
    _copy_damaged(url, f"{folder}/step-5")
    capsys.readouterr()
    assert main(["verify", "--newest-sound", folder]) == 0
    found = capsys.readouterr()
    assert found.out.strip() == f"{folder}/from-a-disk"
    assert f"{folder}/step-5" in found.err
    older = find_fallback(f"{folder}/step-5", OneRank(), lambda _: True, LoadOptions())
    assert older is not None
    assert older[0] == found.out.strip()


def _save_to(setup: EngineCase, url: str) -> int:
    """Save; return the number of requests of all ranks."""
    from lightning_elastic_zero.api import save_checkpoint
    from tests.support.checkpoints import STEPS
    from tests.support.engines import engine_of, train

    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, STEPS)
        return save_checkpoint(engine, url).requests


def _copy_damaged(url: str, target: str) -> None:
    source, copy = parse_path(url), parse_path(target)
    assert isinstance(source, StorePath)
    assert isinstance(copy, StorePath)
    for found in source.store.objects_below(source.key):
        data = source.store.get(found.key)[0]
        if found.key.endswith("optim_states.pt"):
            data = data.replace(b"\0", b"\1", 1)
        source.store.put(found.key.replace(source.key, copy.key), data)


def _upload(folder: Path, url: str) -> None:
    target = parse_path(url)
    assert isinstance(target, StorePath)
    for path in folder.rglob("*"):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            target.store.put((target / name).key, path.read_bytes())


def _download(url: str, folder: Path) -> None:
    path = parse_path(url)
    assert isinstance(path, StorePath)
    for found in path.store.objects_below(path.key):
        target = folder / found.key.removeprefix(f"{path.key}/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.store.get(found.key)[0])
