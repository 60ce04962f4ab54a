"""Programs of forked processes that run the command line of the examples."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

CLI = Path(__file__).parents[2] / "examples" / "cli.py"


def run_cli(arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    """Run ``python examples/cli.py ...`` in a folder, with additional environment variables."""
    os.chdir(folder)
    os.environ.update(environment, RUN_DIR=str(folder))
    sys.path.insert(0, str(CLI.parent))
    sys.argv[:] = [str(CLI), *arguments]
    runpy.run_path(str(CLI), run_name="__main__")


def print_config(config: Path, folder: Path) -> None:
    """Print the output of ``fit --print_config``."""
    run_cli(["fit", "--config", str(config), "--print_config"], folder, {})
