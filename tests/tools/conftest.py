from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_elastic_zero.cli import main
from tests.support.plain_checkpoints import make_state, write_elastic

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command line; it returns exit code, stdout and stderr."""

    def call(*args: object) -> tuple[int, str, str]:
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as error:
            code = int(error.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def refused(run: Run) -> Callable[..., str]:
    """Return a function that runs a command line which must exit with 2; it returns stderr."""

    def call(*args: object) -> str:
        code, out, err = run(*args)
        assert (code, out) == (2, ""), (args, err)
        return err

    return call


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a small checkpoint of ZeRO-2 on two ranks."""
    return write_elastic(tmp_path / "a.ckpt", make_state())
