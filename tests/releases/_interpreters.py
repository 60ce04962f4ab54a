"""Other Pythons, where a machine has them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ASK_TIMEOUT_S = 300.0

VERSION = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
"""Debian's Python may have no ensurepip, without which it makes no environment."""


@cache
def interpreter(version: str) -> str | None:
    """Return a Python of a version that can make environments; None where there is none.

    Looked for are ``pythonX.Y`` on PATH and what pyenv has installed.
    """
    return next((path for path in _candidates(version) if _says(path) == version), None)


def _candidates(version: str) -> Iterator[str]:
    for folder in os.environ["PATH"].split(os.pathsep):
        # A shim of pyenv's is there for versions that are not active too, and fails.
        if found := shutil.which(f"python{version}", path=folder):
            yield found
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    newest_first = sorted(root.glob(f"versions/{version}.*/bin/python"), reverse=True)
    yield from map(str, newest_first)


def _says(python: str) -> str:
    """Return which version an interpreter is; nothing where it does not start."""
    try:
        done = subprocess.run(
            [python, "-c", VERSION],
            capture_output=True,
            text=True,
            check=False,
            timeout=ASK_TIMEOUT_S,
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
