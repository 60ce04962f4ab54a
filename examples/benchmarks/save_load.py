"""Measure saving and loading beside other software and the machine's limits, in one run.

    python examples/benchmarks/save_load.py [--parameters 10e6] [--pairs 4:4 4:2] [--rounds 5]

Each pair of rank counts, each ZeRO stage, fp32 and bf16: save, save in the background, load; and in
turn with them stock DeepSpeed, its Universal Checkpoints, ``torch.distributed.checkpoint`` (FSDP2),
and what the machine can do at most: to copy, to write and sync, and to read the same bytes. What is
reported are medians, and ratios round by round with their least and greatest: single times on a
shared machine mean little. All saves are synced, other software's files by the benchmark.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from probe import folder_bytes, temporary_disk  # type: ignore[import-not-found]
from report import machine, table, write_plot  # type: ignore[import-not-found]
from subject import run_ranks, state_bytes, width_of  # type: ignore[import-not-found]
from ways import (  # type: ignore[import-not-found]
    TAG,
    UNIVERSAL,
    Case,
    Setting,
    measure_loads,
    measure_saves,
)

TIMEOUT_S = 3600


def convert(source: Path, rounds: int) -> list[dict[str, float]]:
    """Convert stock DeepSpeed's checkpoint to a Universal one, as often as is asked for.

    Once more, the files are looked at meanwhile, which would slow down what is timed.
    """
    target = source / UNIVERSAL
    seconds = []
    for _ in range(rounds):
        shutil.rmtree(target, ignore_errors=True)
        began = time.perf_counter()
        _convert_once(source, target)
        seconds.append(time.perf_counter() - began)
    shutil.rmtree(target)
    with temporary_disk(source) as temporary:
        _convert_once(source, target)
    disk = folder_bytes(target)
    return [{"seconds": s, "disk": disk, "temporary_disk": temporary[0]} for s in seconds]


def _convert_once(source: Path, target: Path) -> None:
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(source / TAG), "--output_folder", str(target)]
    command += ["--inject_missing_state"]
    subprocess.run(command, check=True, timeout=TIMEOUT_S, capture_output=True)


def measure(
    setting: Setting, pairs: list[tuple[int, int]], *, universal: bool
) -> dict[str, dict[str, Any]]:
    """Measure all of it: the worlds that save, conversions, the worlds that load."""
    run = partial(run_ranks, folder=setting.folder, device=setting.device, timeout_s=TIMEOUT_S)
    figures: dict[str, dict[str, Any]] = {"save": {}, "convert": {}, "load": {}}
    for ranks in sorted({source for source, _ in pairs}):
        figures["save"] |= run(ranks, partial(measure_saves, setting, ranks))
        print(f"saved on {ranks} ranks", file=sys.stderr)
    for source in sorted({source for source, to in pairs if universal and source != to}):
        for case in setting.cases:
            stock = case.file(setting.folder, "stock", source)
            figures["convert"][f"{case.name}, {source} ranks"] = convert(stock, setting.rounds)
    for ranks in sorted({to for _, to in pairs}):
        sources = tuple(source for source, to in pairs if to == ranks)
        figures["load"] |= run(ranks, partial(measure_loads, setting, ranks, sources))
        print(f"loaded on {ranks} ranks", file=sys.stderr)
    return figures


def rank_pair(text: str) -> tuple[int, int]:
    """Return the two numbers of ``4:2``."""
    saved, loaded = map(int, text.split(":"))
    return saved, loaded


def parse_options() -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parameters", type=float, default=10e6)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3], choices=(1, 2, 3))
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    pairs = [(4, 4), (4, 2), (2, 4), (4, 3), (8, 6)]
    parser.add_argument("--pairs", type=rank_pair, nargs="+", default=pairs, metavar="SAVED:LOADED")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--no-universal", action="store_true", help="convert nothing")
    parser.add_argument("--folder", type=Path, default=None, help="a disk to measure")
    parser.add_argument("--out", type=Path, default=Path(".cache/bench"), help="JSON, table, plot")
    return parser.parse_args()


def main() -> None:
    """Run the ranks, and report what they measured."""
    options = parse_options()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    cases = tuple(Case(s, p) for s in options.stages for p in options.precisions)
    setting = Setting(folder, options.parameters, options.rounds, options.device, cases)
    began = time.monotonic()
    try:
        figures = measure(setting, options.pairs, universal=not options.no_universal)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result = {
        "machine": machine(options.device),
        "state_bytes": state_bytes(width_of(options.parameters)),
        "rounds": options.rounds,
        "seconds": time.monotonic() - began,
        "figures": figures,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "figures.json").write_text(json.dumps(result, indent=1))
    text = table(result)
    (options.out / "figures.md").write_text(text)
    write_plot(result, options.out / "figures.png")
    print(text)
    print(f"written: {options.out}/figures.json, figures.md, figures.png")


if __name__ == "__main__":
    main()
