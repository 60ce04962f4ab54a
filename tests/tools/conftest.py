from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_elastic_zero.cli import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs a command line; it returns exit code, stdout and stderr."""

    def call(*args: str | Path) -> tuple[int, str, str]:
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as error:
            code = int(error.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call
