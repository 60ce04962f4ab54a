"""Measure how the costs of a save and of a load grow with the model and with the ranks.

    python examples/benchmarks/growth.py [--sizes 10e6 100e6] [--ranks 1 2 4 8] [--rounds 3]

A live ZeRO-3 engine saves over its last checkpoint and loads it again. For comparison, the same
bytes are written and synced raw, and read into memory. Here the ranks share one processor and one
disk, so the seconds grow with the bytes of all ranks; the ratios, the bytes relative to the state,
and the memory should stay constant. ``plan.py`` and ``agreements.py`` simulate more ranks.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from torch import distributed

sys.path.insert(0, str(Path(__file__).parent))
from raw import RawRead, RawWrite  # type: ignore[import-not-found] # scripts in this folder
from subject import (  # type: ignore[import-not-found]
    make_engine,
    rank_tensors,
    run_ranks,
    state_bytes,
    train_step,
    width_of,
)
from ways import Costs, in_turn  # type: ignore[import-not-found]

TIMEOUT_S = 1800
_TITLES = (
    "parameters, M",
    "ranks",
    "save, s",
    "times a raw write",
    "written / state",
    "memory, MB",
    "load, s",
    "times a raw read",
    "read / state",
    "memory, MB",
    "times that a rank opens files",
)


class OpenedFiles:
    """Counts how often this process opens files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._below, self.count = str(folder), 0
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: Any) -> None:
        if event == "open" and str(arguments[0]).startswith(self._below):
            self.count += 1


def measure(folder: Path, parameters: float, rounds: int) -> dict[str, Any]:
    """Measure one world; the result of rank 0 is used."""
    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint

    width, path = width_of(parameters), folder / "grown.ckpt"
    engine = make_engine(3, width)
    train_step(engine, width)
    gc.collect()
    raw = RawWrite(folder / f"raw-{distributed.get_rank()}", rank_tensors(engine))
    saves: Costs = in_turn(
        {"raw": raw.write, "ours": lambda: save_checkpoint(engine, path)}, rounds
    )
    raw.path.unlink()
    opened = OpenedFiles(path)
    load_checkpoint(engine, path)
    files = [0] * distributed.get_world_size()
    distributed.all_gather_object(files, opened.count)
    reader = RawRead(path, new_memory=False)
    loads: Costs = in_turn(
        {"raw": reader.read, "ours": lambda: load_checkpoint(engine, path)}, rounds
    )
    return {"save": saves, "load": loads, "files": max(files)}


def row(parameters: float, ranks: int, found: dict[str, Any]) -> str:
    """Return one line of the table."""
    state = state_bytes(width_of(parameters))
    cells = [f"{parameters / 1e6:.0f}", str(ranks)]
    for verb, moved in (("save", "written"), ("load", "read")):
        ours, raw = found[verb]["ours"], found[verb]["raw"]
        ratios = [a["seconds"] / b["seconds"] for a, b in zip(ours, raw, strict=True)]
        cells += [
            f"{statistics.median(c['seconds'] for c in ours):.3f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{statistics.median(c[moved] for c in ours) / state:.3f}",
            f"{max(c['memory'] for c in ours) / 1e6:.1f}",
        ]
    return "| " + " | ".join([*cells, str(found["files"])]) + " |"


def main() -> None:
    """Measure each size on each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", type=float, nargs="+", default=[10e6, 100e6])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="a disk to measure")
    options = parser.parse_args()
    print("| " + " | ".join(_TITLES) + " |")
    print("|" + "---|" * len(_TITLES))
    for parameters in options.sizes:
        for ranks in options.ranks:
            folder = Path(tempfile.mkdtemp(dir=options.folder))
            try:
                work = partial(measure, folder, parameters, options.rounds)
                found = run_ranks(ranks, work, folder, device="cpu", timeout_s=TIMEOUT_S)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            print(row(parameters, ranks, found), flush=True)


if __name__ == "__main__":
    main()
