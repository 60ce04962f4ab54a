"""The command itself: quick to answer, with its errors where they belong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import lightning_elastic_zero
from lightning_elastic_zero.cli import _VERBS as VERBS
from tests.timeouts import HANG_TIMEOUT_S

Run = Callable[..., tuple[int, str, str]]

HELP = """
import sys
from lightning_elastic_zero.cli import main
try:
    main({args})
except SystemExit as error:
    assert not error.code, error.code
print(*sorted({{"torch", "numpy", "lightning", "deepspeed"}} & set(sys.modules)), "loaded")
"""


def test_help_imports_nothing_that_is_dear() -> None:
    """``--help`` answers before torch is imported, and ``--version`` too."""
    for args in [["--help"], ["inspect", "--help"], ["--version"]]:
        done = subprocess.run(
            [sys.executable, "-c", HELP.format(args=args)],
            capture_output=True,
            check=True,
            text=True,
            timeout=HANG_TIMEOUT_S,
        )
        assert done.stdout.splitlines()[-1] == "loaded"


def test_the_module_is_the_command(run: Run) -> None:
    """``python -m lightning_elastic_zero`` is the same; every verb has a sentence."""
    done = subprocess.run(
        [sys.executable, "-m", "lightning_elastic_zero", "--version"],
        capture_output=True,
        check=True,
        text=True,
        timeout=HANG_TIMEOUT_S,
    )
    assert lightning_elastic_zero.__version__ in done.stdout
    code, out, _ = run("--help")
    assert code == 0
    for verb in VERBS:
        assert f" {verb} " in out


def test_a_wrong_command_line(run: Run) -> None:
    """It is an error of use: 2, like what could not be done."""
    for args in ([], ["unknown"], ["inspect"]):
        code, out, err = run(*args)
        assert (code, out) == (2, "")
        assert "usage" in err
