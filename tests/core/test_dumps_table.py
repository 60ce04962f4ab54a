"""The table of a folder of dumps is read as it was written, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_elastic_zero.errors import CheckpointFormatError
from lightning_elastic_zero.formats.dumps import (
    TABLE_NAME,
    BufferRow,
    DumpsTable,
    ParameterRow,
    SizedFile,
    read_table,
)

TABLE = DumpsTable(
    dumps=(SizedFile("optimizer.0.pt", 12),),
    model=SizedFile("model.pt", 7),
    flats=(BufferRow(0, (ParameterRow("w", (2, 3), ("head.w",)),)),),
    frozen=(ParameterRow("f", ()),),
    module_buffers=("seen",),
    absent_buffers=(),
)


def test_a_table_round_trips(tmp_path: Path) -> None:
    (tmp_path / TABLE_NAME).write_text(TABLE.to_json())
    assert read_table(tmp_path) == TABLE


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c["frozen"][0].update(shape="23"), "ParameterRow.shape is '23'"),
        (lambda c: c["flats"][0]["parameters"][0].update(shape=[2, "3"]), "ParameterRow.shape"),
        (lambda c: c["frozen"][0].update(name=None), "ParameterRow.name is None"),
        (lambda c: c["frozen"][0].update(aliases="ab"), "ParameterRow.aliases is 'ab'"),
        (lambda c: c["flats"][0].update(group="0"), "BufferRow.group is '0'"),
        (lambda c: c["model"].update(size_bytes=7.9), "SizedFile.size_bytes is 7.9"),
        (lambda c: c.update(module_buffers="seen"), "DumpsTable.module_buffers is 'seen'"),
        (lambda c: c.update(dumps={}), "{} is not a table of SizedFile"),
        (lambda c: c.pop("model"), "model"),
    ],
)
def test_a_value_of_another_type_is_refused(
    edit: Callable[[Any], object], message: str, tmp_path: Path
) -> None:
    content = json.loads(TABLE.to_json())
    edit(content)
    (tmp_path / TABLE_NAME).write_text(json.dumps(content))
    with pytest.raises(CheckpointFormatError, match="cannot be read") as caught:
        read_table(tmp_path)
    assert message in str(caught.value)
    assert str(tmp_path / TABLE_NAME) in str(caught.value)
