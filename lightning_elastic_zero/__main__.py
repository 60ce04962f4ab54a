"""``python -m lightning_elastic_zero``: the command line."""

from __future__ import annotations

import sys

from lightning_elastic_zero.cli import main

if __name__ == "__main__":
    sys.exit(main())
