"""Long work shows that it goes on, and nobody waits for what is in vain: no stall is seen in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_elastic_zero.checkpoint.background import UncopiedTensors
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.formats.torch_write import ChunkedSource
from lightning_elastic_zero.storage.leftovers import make_link, remove_leftovers
from lightning_elastic_zero.storage.publish import StagedDirectory
from tests.support.small_checkpoints import manifest_of

FILES = 7


def fill(directory: Path) -> Path:
    """Make a checkpoint of some files."""
    names = [f"checkpoint/zero_pp_rank_{n}_mp_rank_00_model_states.pt" for n in range(FILES)]
    (directory / "checkpoint").mkdir(parents=True)
    for name in names:
        (directory / name).touch()
    (directory / "manifest.json").write_text(manifest_of(dict.fromkeys(names, "")))
    return directory


def put_link(root: Path, progress: Progress) -> None:
    """Make a link take the place of a directory."""
    fill(root / "a.ckpt")
    make_link(root / "a.ckpt", fill(root / "last.ckpt"), progress)


def publish(root: Path, progress: Progress) -> None:
    """Publish over another directory."""
    fill(root / "a.ckpt")
    StagedDirectory.create(root / "a.ckpt", "5a7e").publish(progress)


def sweep(root: Path, progress: Progress) -> None:
    """Remove what a kill has left."""
    fill(root / ".zero-removed-1")
    remove_leftovers(root, progress)


@pytest.mark.parametrize("work", [put_link, publish, sweep], ids=lambda work: work.__name__)
def test_removing_shows_each_file(work: Callable[[Path, Progress], None], tmp_path: Path) -> None:
    """Whatever is removed on the way is said file by file, and is gone."""
    seen = []
    work(tmp_path, Progress(lambda: seen.append(time.monotonic())))
    assert len(seen) >= FILES
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_nobody_waits_for_what_is_read_in_vain() -> None:
    """The wait ends when all is read, when reading ends early, or when it is for nothing."""
    tensors, other = [torch.zeros(3), torch.zeros(4)], torch.zeros(3)
    live = UncopiedTensors(tensors, numel=6)  # the last element is padding
    assert live.source_of(other) is other
    sources = [live.source_of(piece) for piece in (tensors[0][:1], tensors[0][1:], tensors[1][:3])]
    for source in sources[:-1]:
        assert isinstance(source, ChunkedSource)
        list(source.chunks())
    assert isinstance(sources[-1], ChunkedSource)
    chunks = sources[-1].chunks()
    next(chunks)  # it is being written
    failed = threading.Event()
    threading.Timer(0.2, failed.set).start()
    live.wait(failed.is_set)
    assert failed.is_set()
    assert next(chunks, None) is None
    live.wait(lambda: False)

    given_up = UncopiedTensors(tensors, numel=6)
    with pytest.raises(ZeroDivisionError), given_up.reading():
        raise ZeroDivisionError
    given_up.wait(lambda: False)
    UncopiedTensors([], 0).wait(lambda: False)
