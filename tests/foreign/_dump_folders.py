"""Folders of dumps as other hands would have left them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.formats.deepspeed_files import CLASS_STUBS
from tests.foreign._fixtures import Fixture
from tests.support.oracle import Dump

NAMES = "param_slice_mappings"
"""Where DeepSpeed's ZeRO-1/2 leaves names in its state, beside their places."""


def load(path: Path) -> Any:
    """Load a file without DeepSpeed's classes: scalers, and places."""
    pairs: Any = [(cls, name) for name, cls in CLASS_STUBS.items()]
    with torch.serialization.safe_globals(pairs):
        return _plain(torch.load(path, weights_only=True))


def _plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(_plain, tree))
    if type(tree) in CLASS_STUBS.values():
        return int(tree) if isinstance(tree, int) else None
    return tree


def change(path: Path, **entries: Any) -> None:
    """Save a file again with other entries, and without those that are None."""
    tree = {**load(path), **entries}
    torch.save({key: value for key, value in tree.items() if value is not None}, path)


def dumps_in(folder: Path) -> list[Path]:
    """Return the dumps, by rank."""
    return sorted(folder.glob("optimizer.*.pt"))


def forget_names(folder: Path) -> None:
    """Remove the names that newer releases write to the dumps."""
    for path in dumps_in(folder):
        change(path, **{NAMES: None})


def from_stock(fixture: Fixture, folder: Path) -> Path:
    """Reduce a stock checkpoint to the files that a user would have saved by hand."""
    tag = (fixture.checkpoint / "latest").read_text().strip()
    shards = sorted((fixture.checkpoint / tag).glob("*zero_pp_rank_*_optim_states.pt"))
    for rank, path in enumerate(shards):
        torch.save(load(path)["optimizer_state_dict"], folder / f"optimizer.{rank:02d}.pt")
    torch.save(model_file(fixture.truth()), folder / "model.pt")
    return folder


def model_file(held: Dump) -> dict[str, torch.Tensor]:
    """Return the state dict of a run with this state."""
    kinds = ("weight/", "frozen/", "buffer/0/")
    found = {
        k.removeprefix(kind): v for k, v in held.items() for kind in kinds if k.startswith(kind)
    }
    return {**found, "head.weight": found["embedding.weight"]}
