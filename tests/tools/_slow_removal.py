"""The command line on a disk that takes its time to remove folders: a program for torchrun."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

from lightning_elastic_zero.cli import main
from lightning_elastic_zero.selftest.work_dir import PREFIX

REMOVAL_S = 30.0
"""Of the selftest's own folder: longer than a rank takes to end, and torchrun the others."""


def make_removal_slow() -> None:
    """Make the removal of the folder slow."""
    remove = shutil.rmtree

    def remove_slowly(path: Path, **kwargs: Any) -> None:
        if path.name.startswith(PREFIX):
            time.sleep(REMOVAL_S)
        remove(path, **kwargs)

    vars(shutil)["rmtree"] = remove_slowly


if __name__ == "__main__":
    make_removal_slow()
    sys.exit(main())
