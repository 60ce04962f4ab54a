"""Time the fingerprint of a state in a save and a load, compared with one read of the memory.

    python examples/benchmarks/fingerprint.py [--parameters 100e6] [--ranks 2] [--rounds 9]

Real engines of ZeRO-3 in fp32 with Adam save and load with and without a fingerprint, in turn. For
comparison, torch sums the same masters and moments, which also reads each byte once. The results
are medians in milliseconds per gigabyte of the state of all ranks.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import torch
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


def measure(folder: Path, width: int, rounds: int) -> Costs:
    """Measure all methods in this world."""
    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint
    from lightning_elastic_zero.checkpoint.fingerprint import rank_part
    from lightning_elastic_zero.engine.live import LiveEngine

    engine = make_engine(3, width)
    train_step(engine, width)
    tensors = rank_tensors(engine)
    live = LiveEngine(engine)
    state = live.rank_state(exclude_frozen=False, keep_module_weights=False)
    rank = torch.distributed.get_rank()

    def read() -> None:
        for tensor in tensors:
            tensor.sum()

    ways: dict[str, Callable[[], object]] = {
        "read the memory once": read,
        "fingerprint": lambda: rank_part(live.describe(), state, rank),
    }
    costs = in_turn(ways, rounds)
    works: dict[str, Callable[..., object]] = {"save": save_checkpoint, "load": load_checkpoint}
    for name, work in works.items():
        # Saves and loads are separate, since the disk is busy for a while after a save.
        ways = {
            name: partial(work, engine, folder / "without"),
            f"{name}, fingerprint=True": partial(work, engine, folder / "with", fingerprint=True),
        }
        costs |= in_turn(ways, rounds)
    return costs


def main() -> None:
    """Run the ranks, and print their measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--folder", type=Path, default=None, help="a disk to measure")
    options = parser.parse_args()
    folder, width = Path(tempfile.mkdtemp(dir=options.folder)), width_of(options.parameters)
    work = partial(measure, folder, width, options.rounds)
    try:
        costs = run_ranks(options.ranks, work, folder, device=options.device, timeout_s=TIMEOUT_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    gigabytes = state_bytes(width) / 1e9
    print(f"{gigabytes:.2f} GB of state on {options.ranks} ranks, {options.rounds} rounds")
    for name, found in costs.items():
        seconds = [cost["seconds"] for cost in found]
        middle, least, most = (
            f"{1000 * of(seconds) / gigabytes:.1f}" for of in (statistics.median, min, max)
        )
        print(f"{name:24} {middle:>8} ms per GB ({least} to {most})")


if __name__ == "__main__":
    main()
