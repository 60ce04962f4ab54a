"""The table of a folder of dumps is read as it was written, or refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_elastic_zero.core.manifest import Parameter
from lightning_elastic_zero.core.partition import FlatBuffer
from lightning_elastic_zero.errors import CheckpointFormatError
from lightning_elastic_zero.formats.dumps import (
    TABLE_NAME,
    DumpsTable,
    describe_dumps,
    read_table,
)
from tests.support.processes import finishes

TABLE = DumpsTable(
    files={"optimizer.0.pt": 12, "model.pt": 7},
    buffers=(FlatBuffer(0, ("w",), (6,)),),
    parameters=(
        Parameter("w", (2, 3), "bfloat16", 0, ("head.w",)),
        Parameter("f", (), "bfloat16", None),
    ),
    module_buffers=("seen",),
)


def test_a_table_round_trips(tmp_path: Path) -> None:
    (tmp_path / TABLE_NAME).write_text(TABLE.to_json())
    assert read_table(tmp_path) == TABLE


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c["parameters"][0].update(shape=[2, "3"]), "Parameter.shape"),
        (lambda c: c["parameters"][0].update(name=None), "Parameter.name is None"),
        (lambda c: c["buffers"][0].update(group="0"), "FlatBuffer.group is '0'"),
        (lambda c: c.update(module_buffers="seen"), "DumpsTable.module_buffers is 'seen'"),
        (lambda c: c.update(buffers={}), "{} is not a table of FlatBuffer"),
        (lambda c: c.pop("files"), "files"),
        (lambda c: c.update(format="another"), "format and version are ('another', 2)"),
        (lambda c: c.update(format_version=1), "expected ('lightning_elastic_zero.dumps', 2)"),
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


def test_a_pipe_in_place_of_the_table_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / TABLE_NAME)

    def read() -> None:
        with pytest.raises(CheckpointFormatError, match="not a regular file"):
            read_table(tmp_path)

    assert finishes(read)
    with pytest.raises(CheckpointFormatError, match="was not written by this library"):
        describe_dumps(tmp_path, torch.nn.Linear(1, 1))
