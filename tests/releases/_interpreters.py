"""Find other Python interpreters on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

VERSION_TIMEOUT_S = 300.0

VERSION = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
"""Fails without ensurepip, which venv needs and Debian's Python may lack."""


@cache
def interpreter(version: str) -> str | None:
    """Return a Python of a version that can create environments, or None.

    The search includes ``pythonX.Y`` on PATH and the installations of pyenv.
    """
    return next((path for path in _candidates(version) if _version(path) == version), None)


def _candidates(version: str) -> Iterator[str]:
    for folder in os.environ["PATH"].split(os.pathsep):
        # pyenv's shims exist also for inactive versions, for which they fail.
        if found := shutil.which(f"python{version}", path=folder):
            yield found
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    newest_first = sorted(root.glob(f"versions/{version}.*/bin/python"), reverse=True)
    yield from map(str, newest_first)


def _version(python: str) -> str:
    """Return the version of an interpreter, or an empty text if it does not start."""
    try:
        done = subprocess.run(
            [python, "-c", VERSION],
            capture_output=True,
            text=True,
            check=False,
            timeout=VERSION_TIMEOUT_S,
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
