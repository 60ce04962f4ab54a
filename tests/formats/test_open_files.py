from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.errors import CheckpointFormatError
from lightning_elastic_zero.formats.open import check_unmixed
from lightning_elastic_zero.formats.torch_read import MAX_OPEN, foreign_files
from tests.support.small_checkpoints import fill


def _is_open(path: Path) -> bool:
    links = list(Path("/proc/self/fd").iterdir())
    return any(link.exists() and link.resolve() == path.resolve() for link in links)


def test_a_refused_file_is_refused_again(tmp_path: Path) -> None:
    name = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
    torch.save({"a": torch.ones(3)}, tmp_path / name.format(1))
    path = (tmp_path / name.format(1)).rename(tmp_path / name.format(0))
    files = foreign_files(tmp_path, check_names=True)
    for _ in range(2):
        with pytest.raises(CheckpointFormatError, match="was saved as"):
            files.get(path.name)
        assert not _is_open(path)
    files.close()


def test_the_least_recently_used_file_is_closed(tmp_path: Path) -> None:
    names = [f"{index}.pt" for index in range(6)]
    for name in names:
        torch.save({"n": name}, tmp_path / name)
    files = foreign_files(tmp_path)
    for name in names:
        assert files.tree(name) == {"n": name}
        assert files.tree(names[0]) == {"n": names[0]}
    found = [files.get(name) for name in (*names[-MAX_OPEN + 1 :], names[0])]
    assert [file.tree for file in found] == [{"n": n} for n in (*names[-MAX_OPEN + 1 :], names[0])]
    assert sum(_is_open(tmp_path / name) for name in names) == MAX_OPEN
    files.close()
    assert not any(_is_open(tmp_path / name) for name in names)


def test_the_search_for_files_of_deepspeed_reports_progress(tmp_path: Path) -> None:
    """With thousands of ranks it takes longer than a stall may."""
    path, checked = fill(tmp_path / "a.ckpt", "text"), list[None]()
    for rank in range(3):
        (path / f"checkpoint/zero_pp_rank_{rank}_mp_rank_00_model_states.pt").touch()
    check_unmixed(path, Progress(lambda: checked.append(None)))
    assert len(checked) == 4
