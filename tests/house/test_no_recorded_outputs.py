"""Tests read no recorded outputs: what is computed is compared with what is computed beside it.

Processors, releases of torch and numbers of threads sum in different orders. What one of them
computed (a loss, weights after training, a checksum of either) is no measure for another. Golden
data hold the *state* that a writer's engine had in memory, and the files that it wrote of it.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tarfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
CODE = {".py", ".pyc", ".c", ".cpp"}
"""Suffixes of what is run or built, and holds no data."""

ARCHIVES = sorted(
    path
    for tests in ("foreign", "golden")
    for path in (ROOT / "tests" / tests / "data").glob("*.tar.xz")
)
SOURCES = sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")])

STATES = {"truth.pt", "later.pt"}
"""What a writer's engine held at its save, and at its second one."""

ABOUT = {"name", "shows", "kind", "path", "steps", "world", "setup", "versions"}
"""How an archive was made."""

KINDS = {"master", "weight", "frozen", "buffer", "group", "counter", "scaler", "scalar"}
"""Kinds of state that the oracle names; these are a Trainer's:"""

OF_TRAINER = {"random", "samples"}
"""Random states, indices of consumed samples; and these are element-wise ones of optimizers:"""

ELEMENTWISE = {"exp_avg", "exp_avg_sq", "momentum_buffer"}

SIGNIFICANT = 6
"""A number in a test with more digits was copied from a run."""

DIGEST = re.compile(r"[0-9a-f]{16,}")
NO_OUTPUT = {
    "50275140cd928ff04fd68cfbce3ac4026afeabd17f6aede772afae36e4f33026",  # Of a manifest's text,
    "ab" * 16,  # a placeholder there,
    "0123456789abcdef-_",  # and an alphabet to draw from.
}
"""Digests of bytes that stand in the test itself, which no processor computes otherwise."""


def wrong_in_archive(archive: Path) -> list[str]:
    """Return what a golden archive holds beside states and a checkpoint."""
    wrong = []
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name
            if name.startswith("checkpoint") or member.isdir():
                continue
            file = tar.extractfile(member)
            assert file is not None
            data = file.read()
            if name == "about.json":
                wrong += sorted(json.loads(data).keys() - ABOUT)
            elif name in STATES:
                held = torch.load(io.BytesIO(data), weights_only=True)
                wrong += [f"{name}: {key}" for key in held if not is_state(key)]
            else:
                wrong.append(name)
    return wrong


def is_state(key: str) -> bool:
    """Whether a dump's key names a piece of state."""
    kind, slash, _ = key.partition("/")
    return bool(slash) and kind in KINDS | OF_TRAINER | ELEMENTWISE


def recorded_in(source: str) -> list[str]:
    """Return the constants of a source that look like outputs of a run."""
    return [
        f"line {node.lineno}: {node.value!r}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and looks_recorded(node.value)
    ]


def looks_recorded(value: object) -> bool:
    """Whether a constant has more digits than a person writes, or is a digest."""
    if isinstance(value, float):
        return not is_short(value) and not is_rounding_of_a_short_one(value)
    if isinstance(value, str):
        found = [digits for digits in DIGEST.findall(value) if re.search("[a-f]", digits)]
        return any(not allowed(digits) for digits in found)
    return False


def is_short(value: float) -> bool:
    """Whether a person would write a number so."""
    return len(Decimal(repr(value)).normalize().as_tuple().digits) <= SIGNIFICANT


def is_rounding_of_a_short_one(value: float) -> bool:
    """Whether it is what a type of fewer bits keeps of a short number, as of 0.1."""
    short = float(f"{value:.3g}")
    types = (torch.float32, torch.float16, torch.bfloat16)
    return any(torch.tensor(short, dtype=dtype).item() == value for dtype in types)


def allowed(digits: str) -> bool:
    """Whether hexadecimal digits are no output."""
    return any(digits in known for known in NO_OUTPUT)


def files_of(folder: Path) -> Iterator[str]:
    """Name the files of a folder that hold something else than code."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix not in CODE:
            yield str(path.relative_to(ROOT))


@pytest.mark.rotating(3)
@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name.partition(".tar")[0])
def test_golden_data_hold_states_alone(archive: Path) -> None:
    """Beside a checkpoint lies what was held when it was saved, and nothing computed later."""
    assert not wrong_in_archive(archive)


def test_there_are_no_other_data() -> None:
    """No test keeps a file of its own beside its code."""
    assert set(files_of(ROOT / "tests")) == {str(path.relative_to(ROOT)) for path in ARCHIVES}


def test_no_constant_is_an_output() -> None:
    """No loss, weight or checksum of a run stands in a test or in an example."""
    found = {str(s.relative_to(ROOT)): recorded_in(s.read_text(encoding="utf-8")) for s in SOURCES}
    assert not {source: constants for source, constants in found.items() if constants}


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("continued.pt", {"dump": {"master/a": torch.zeros(2)}, "losses": [[1.5]]}),
        ("truth.pt", {"losses": [[1.5]]}),
        ("truth.pt", {"master/a": torch.zeros(2), "loss/0": torch.zeros(2)}),
        ("about.json", {"name": "x", "losses": [1.5]}),
    ],
)
def test_an_output_in_golden_data_is_found(name: str, held: Any, tmp_path: Path) -> None:  # noqa: ANN401
    """The check can fail: wherever in an archive a continuation stands, it is named."""
    if name == "about.json":
        (tmp_path / name).write_text(json.dumps(held))
    else:
        torch.save(held, tmp_path / name)
    with tarfile.open(tmp_path / "x.tar.xz", "w:xz") as tar:
        tar.add(tmp_path / name, name)
    assert wrong_in_archive(tmp_path / "x.tar.xz")


@pytest.mark.parametrize(
    "source",
    [
        "assert losses == [45.02122497558594, 51.68593215942383]",
        "assert loss == pytest.approx(45.0212249)",
        "assert xxh3(weights) == '" + "9f86d081" * 2 + "'",
        'wanted = {"loss": -0.12345678}',
    ],
)
def test_an_output_in_a_source_is_found(source: str) -> None:
    """The check can fail: what was copied from a run is named with its line."""
    assert next(found.partition(":")[0] for found in recorded_in(source)) == "line 1"


@pytest.mark.parametrize(
    "source",
    ["x = 0.001", "x = 1e-08", "x = 1_000_000_000.0", "x = 'abcd'", "x = 0.10000000149011612"],
)
def test_what_people_write_is_not_taken_for_an_output(source: str) -> None:
    """Rates, sizes and names are no outputs."""
    assert not recorded_in(source)
