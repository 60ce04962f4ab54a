"""A pipe in the place of any file of a checkpoint holds nobody up: nobody would write into it."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from lightning_elastic_zero.errors import ElasticZeroError
from lightning_elastic_zero.storage.existing_target import inspect_target
from lightning_elastic_zero.tools.conversion import convert_checkpoint
from lightning_elastic_zero.tools.verification import verify_checkpoint
from tests.foreign._fixtures import unpack
from tests.timeouts import PROMPT_TIMEOUT_S
from tests.tools._checkpoints import make_state, write_elastic


def ends(work: Callable[[], object]) -> bool:
    """Whether work ends, well or by an error of ours; a thread that does not is left behind."""

    def run() -> None:
        with suppress(ElasticZeroError):
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PROMPT_TIMEOUT_S)
    return not thread.is_alive()


@pytest.mark.parametrize("kind", ["own", "zero3-ds0.19", "universal", "dcp"])
def test_no_pipe_is_waited_for(kind: str, tmp_path: Path) -> None:
    """Not in a load, nor where a save looks at what lies at its target."""
    whole = write_elastic(tmp_path / "own.ckpt", make_state())
    if kind in {"universal", "dcp"}:
        convert_checkpoint(whole, tmp_path / kind, kind)
        whole = tmp_path / kind
    elif kind != "own":
        whole = unpack(kind, tmp_path / kind).checkpoint
    files = sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file())
    assert files
    for name in files:
        damaged = tmp_path / "damaged.ckpt"
        shutil.copytree(whole, damaged)
        (damaged / name).unlink()
        os.mkfifo(damaged / name)
        assert ends(partial(verify_checkpoint, damaged)), name
        assert ends(partial(inspect_target, damaged)), name
        shutil.rmtree(damaged)
