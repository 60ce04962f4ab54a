"""Compare saving and loading with other software and with the machine's limits, in one run.

    python examples/benchmarks/save_load.py [--parameters 100e6] [--pairs 4:4 4:2] [--rounds 5]

Compared are stock DeepSpeed, its Universal Checkpoints, ``torch.distributed.checkpoint``
(FSDP2), and raw copies, writes and reads of the same bytes. Saves take turns in one world of ranks.
Each load runs as in a resume: in new processes whose optimizer has no state yet. All saves are
synced, those of other software by the benchmark. Times on a shared machine vary, so the report
gives ratios round by round, with median, minimum and maximum.
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
    Costs,
    Setting,
    load_once,
    measure_saves,
    ways_to_load,
)

TIMEOUT_S = 3600


def convert(source: Path, rounds: int) -> list[dict[str, float]]:
    """Convert stock DeepSpeed's checkpoint to a Universal one, once per round.

    One more conversion is not timed: it measures disk space, which takes time.
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
    """Measure saves, conversions, and loads."""
    run = partial(run_ranks, folder=setting.folder, device=setting.device, timeout_s=TIMEOUT_S)
    figures: dict[str, dict[str, Any]] = {"save": {}, "convert": {}, "load": {}}
    for ranks in sorted({source for source, _ in pairs}):
        figures["save"] |= run(ranks, partial(measure_saves, setting, ranks))
        print(f"saved on {ranks} ranks", file=sys.stderr)
    for source in sorted({source for source, to in pairs if universal and source != to}):
        for case in setting.cases:
            stock = case.file(setting.folder, "stock", source)
            figures["convert"][f"{case.name}, {source} ranks"] = convert(stock, setting.rounds)
    for source, ranks in pairs:
        for case in setting.cases:
            costs: Costs = {way: [] for way in ways_to_load(setting, case, source, ranks)}
            for _ in range(setting.rounds):
                for way, of_way in costs.items():
                    of_way.append(run(ranks, partial(load_once, setting, case, source, way)))
            figures["load"][f"{case.name}, {source} to {ranks}"] = costs
            print(f"loaded {case.name}, {source} to {ranks}", file=sys.stderr)
    return figures


def rank_pair(text: str) -> tuple[int, int]:
    """Return the two numbers of ``4:2``."""
    saved, loaded = map(int, text.split(":"))
    return saved, loaded


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--stages", type=int, nargs="+", default=[3, 2], choices=(1, 2, 3))
    parser.add_argument("--precisions", nargs="+", default=["fp32"])
    pairs = [(4, 4), (4, 2)]
    parser.add_argument("--pairs", type=rank_pair, nargs="+", default=pairs, metavar="SAVED:LOADED")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--no-universal", action="store_true", help="skip Universal Checkpoints")
    parser.add_argument("--folder", type=Path, default=None, help="where to save")
    parser.add_argument("--out", type=Path, default=Path(".cache/bench"), help="JSON, table, plot")
    return parser.parse_args()


def main() -> None:
    """Measure, and write the report."""
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
