"""The fixtures match their table, and stay small."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.formats._fixture_table import ROWS
from tests.support.foreign_checkpoints import DATA, names, unpack

BY_NAME = {row.name: row for row in ROWS}


def test_archives_and_rows_of_the_table_correspond() -> None:
    assert names() == sorted(BY_NAME)


def test_the_archives_are_small() -> None:
    sizes = [path.stat().st_size for path in DATA.iterdir()]
    assert max(sizes) <= 150_000
    assert sum(sizes) <= 4_000_000


@pytest.mark.cases(10)
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_an_archive_matches_its_row_and_is_finite(name: str, tmp_path: Path) -> None:
    row, found = BY_NAME[name], unpack(name, tmp_path)
    assert found.setup == row.setup
    assert found.about["steps"] == row.steps
    assert f"{found.about['versions']['deepspeed']}.".startswith(f"{row.release}.")
    assert found.checkpoint.is_dir()
    truth = found.truth()
    held = [value for value in truth.values() if isinstance(value, torch.Tensor)]
    assert all(bool(value.isfinite().all()) for value in held)
