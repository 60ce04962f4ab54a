"""Values that are one for a buffer, in checkpoints of this library: which file they are read in."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from lightning_elastic_zero.formats.deepspeed_files import optimizer_file
from lightning_elastic_zero.formats.open import open_checkpoint
from tests.tools._checkpoints import make_state, write_elastic


@pytest.mark.parametrize(("stage", "world_size"), [(1, 2), (2, 24)])
def test_a_rank_opens_no_file_for_them_but_what_it_reads(
    stage: int, world_size: int, tmp_path: Path
) -> None:
    """Every optimizer shard has the scalars of all flat buffers.

    Of 24 ranks some hold elements of the first parameter group only, and some nothing at all.
    """
    state = make_state()
    folder = write_elastic(tmp_path / "x.ckpt", state, stage, world_size)
    opened_others = 0
    for rank in range(world_size):
        with closing(open_checkpoint(folder)) as source:
            layout = source.layout()
            held = {fragment.buffer for fragment in layout.on_rank(rank)}
            source.check([rank] if held else [], [])
            for names in state.groups:
                at = next(iter(layout.covering(names[0], 0, 1)))
                assert source.scalars(at) == {"step": state.step}
                opened = {name for name in source.files._open if "optim" in name}
                mine, other = (optimizer_file(r, "bf16") for r in (rank, at.rank))
                opened_others += not held
                assert opened == {mine if held else other}
                source.files.close()
    assert bool(opened_others) == (world_size > 2)
