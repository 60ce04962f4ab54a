"""Each file of a checkpoint, missing: it is named as missing, or nothing is lost with it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_elastic_zero.tools.fingerprint import fingerprint_checkpoint
from tests.tools._kinds import FOREIGN, KINDS, Kind
from tests.tools.test_every_kind import names_of

Run = Callable[..., tuple[int, str, str]]

HARMLESS = re.compile(
    # The tag, where there is only one.
    r"(.*/)?latest|latest_universal"
    # What accelerate, and the trainer of transformers, read beside DeepSpeed's files.
    r"|scheduler\.(bin|pt)|random_states_\d+\.pkl|rng_state_\d+\.pth|training_args\.bin"
    r"|trainer_state\.json|model\.safetensors|zero_to_fp32\.py"
    # Of buffers, frozen weights and second names the model file holds what is loaded.
    r"|step3_universal/zero/(average|seen|bn\.(running_\w+|num_\w+)|frozen\.\w+|head\.weight)/fp32\.pt"
)
"""Names, below the checkpoint, of files without which all of the state is there."""


def _without_each(path: Path) -> Iterator[Path]:
    """Yield each file of a checkpoint while it has another name."""
    away = path.parent / "away"
    for file in [p for p in sorted(path.rglob("*")) if p.is_file()] if path.is_dir() else [path]:
        file.rename(away)
        yield file
        away.rename(file)


def check_without_each(kind: Kind, folder: Path, run: Run) -> None:
    """Ask about a checkpoint that lacks a file, for each of its files."""
    path = kind.make(folder)
    assert run("verify", path)[0] == 0
    whole = fingerprint_checkpoint(path)
    for file in _without_each(path):
        code, out, err = run("verify", path)
        below = file.relative_to(path.parent if path.is_file() else path).as_posix()
        if HARMLESS.fullmatch(below):
            assert code == 0, (below, err)
            assert fingerprint_checkpoint(path) == whole, below
            assert run("inspect", path)[0] == 0, below
        elif file == path:
            assert (code, out) == (2, "")
            assert f"there is no checkpoint at {path}" in err
        elif file.name == "elastic_dumps.json":
            assert (code, out) == (2, "")  # Dumps that nobody has described are no checkpoint.
            assert "becomes one by describe_dumps" in err
        else:
            assert (code, out) == (1, ""), (below, err)
            assert "DAMAGED" in err
            assert file.name in err, below
            # Of files that are called alike, the right one.
            assert file.parent.name in err or not below.startswith("zero/"), (below, err)
            assert re.search("missing|cannot be read", err), err
    assert fingerprint_checkpoint(path) == whole


@pytest.mark.parametrize("kind", KINDS, ids=names_of)
def test_a_missing_file_is_named(kind: Kind, tmp_path: Path, run: Run) -> None:
    """Of every kind that this library, or plain torch, writes."""
    check_without_each(kind, tmp_path, run)


# With another checkpoint, or what a larger world had left of one, in the same folder.
NOT_ALONE = {"universal-beside", "two-tags", "stale2", "stale3"}
ALONE = [kind for kind in FOREIGN if kind.name not in NOT_ALONE]


@pytest.mark.cases(6)
@pytest.mark.parametrize("kind", ALONE, ids=names_of)
def test_a_missing_file_of_others_is_named(kind: Kind, tmp_path: Path, run: Run) -> None:
    """Of what DeepSpeed, Lightning, transformers and accelerate wrote, too."""
    check_without_each(kind, tmp_path, run)
