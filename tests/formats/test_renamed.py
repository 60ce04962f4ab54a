"""A checkpoint under a model's names, with the state that each rank has of its own."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from lightning_elastic_zero.core.names import mapping_to
from lightning_elastic_zero.core.progress import NO_PROGRESS
from lightning_elastic_zero.formats.client_state import split_objects
from lightning_elastic_zero.formats.elastic_write import RankWriter
from lightning_elastic_zero.formats.open import open_checkpoint
from lightning_elastic_zero.formats.renamed import RenamedReader
from tests.support.plain_checkpoints import make_state, manifest_of, rank_state


def test_the_averages_of_a_ranks_buffers_are_renamed(tmp_path: Path) -> None:
    """They are in ``state_dict``, which a user's own state may have, too: only known names."""
    state = make_state()
    manifest, files = manifest_of(state, 2, 2, rank_state=("state",)), []
    (tmp_path / "checkpoint").mkdir()
    for rank in range(2):
        client = {"state_dict": {"mean": torch.zeros(6)}} if rank == 0 else {}
        own = {"state_dict": {"mean": torch.full((6,), float(rank)), "mean.of": 3}}
        held = rank_state(state, manifest, rank)
        held = replace(held, module_buffers={}) if rank else held
        writer = RankWriter(tmp_path, manifest, rank, NO_PROGRESS)
        files += writer.write(held, split_objects(client), split_objects(own))
    (tmp_path / "manifest.json").write_text(replace(manifest, files=tuple(files)).to_json())
    (tmp_path / "latest").write_text("checkpoint")
    with closing(open_checkpoint(tmp_path)) as saved:
        names = [name.replace("mean", "center") for name in saved.manifest.names()]
        reader = RenamedReader(saved, mapping_to(names, {"mean": "center"}), "")
        shared = reader.module_state(1, 2)
    assert shared.client_state["state_dict"].keys() == {"center"}
    assert shared.rank_state["state_dict"].keys() == {"center", "mean.of"}
    assert shared.rank_state["state_dict"]["center"].tolist() == [1.0] * 6
