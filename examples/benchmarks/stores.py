"""Compare with torch.distributed.checkpoint on an S3 server on this machine (moto).

    python examples/benchmarks/stores.py [--parameters 4e6] [--pairs 2:2 2:3] [--rounds 3]

Both save and load the same model with Adam: this library under ZeRO-3, and
``torch.distributed.checkpoint`` (DCP) under FSDP2 with ``FsspecWriter`` and ``FsspecReader``. Each
measurement has new processes. Times are taken without a proxy, requests and bytes in one more run
behind a proxy that counts them. A pair is the number of ranks that save and of those that load.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
from report import machine  # type: ignore[import-not-found]
from save_load import rank_pair  # type: ignore[import-not-found]
from subject import (  # type: ignore[import-not-found]
    make_engine,
    make_fsdp,
    run_ranks,
    state_bytes,
    train_step,
    width_of,
)
from torch import distributed
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from tests.support.fault_proxy import FaultProxy
from tests.support.store_servers import make_bucket, moto_server, s3_environment

BUCKET = "bench"
OURS, DCP = "this library", "torch.distributed.checkpoint"


def timed(work: Callable[[], object]) -> float:
    """Return the seconds until all ranks have finished the call."""
    distributed.barrier()
    began = time.perf_counter()
    work()
    distributed.barrier()
    return time.perf_counter() - began


def ours(action: str, width: int, url: str) -> float:
    """Save or load with this library on a rank."""
    from lightning_elastic_zero import load_checkpoint, save_checkpoint

    engine = make_engine(3, width)
    train_step(engine, width)
    call = save_checkpoint if action == "save" else load_checkpoint
    return timed(partial(call, engine, url))


def dcp(action: str, width: int, url: str) -> float:
    """Save or load with DCP on a rank."""
    parts = make_fsdp(width, "cpu", trained=True)

    def save() -> None:
        weights, state = get_state_dict(*parts)
        save_dcp({"model": weights, "optimizer": state}, storage_writer=FsspecWriter(url))

    def load() -> None:
        weights, state = get_state_dict(*parts)
        load_dcp({"model": weights, "optimizer": state}, storage_reader=FsspecReader(url))
        set_state_dict(*parts, model_state_dict=weights, optim_state_dict=state)

    return timed(save if action == "save" else load)


def in_environment(variables: Mapping[str, str], work: Callable[[], float]) -> float:
    """Call a function in a rank with the environment variables of the server."""
    os.environ.update(variables)
    return work()


WAYS = {OURS: ours, DCP: dcp}


def measure(
    options: argparse.Namespace, folder: Path, direct: str, proxy: FaultProxy
) -> dict[str, Any]:
    """Measure all methods: saves of each number of ranks, then loads."""
    width = width_of(options.parameters)
    saves = sorted({saved for saved, _ in options.pairs})
    figures: dict[str, Any] = {}
    steps = [("save", saved, saved) for saved in saves]
    steps += [("load", saved, loaded) for saved, loaded in options.pairs]
    for action, saved, ranks in steps:
        name = f"{action}, {saved} to {ranks} ranks" if action == "load" else f"save, {saved} ranks"
        figures[name] = {way: {"seconds": []} for way in WAYS}
        for number in range(options.rounds + 1):
            counted = number == options.rounds
            variables = s3_environment(proxy.url if counted else direct)
            for way, work in WAYS.items():
                # Into an empty folder each time: DCP does not delete files of other ranks.
                place = f"{way.split()[0]}-{saved}" + (f"-{number}" if action == "save" else "-0")
                url = f"s3://{BUCKET}/{place}/step.ckpt"
                call = partial(in_environment, variables, partial(work, action, width, url))
                proxy.reset()
                seconds = run_ranks(ranks, call, folder, device="cpu", timeout_s=600)
                found = figures[name][way]
                if not counted:
                    found["seconds"].append(seconds)
                    continue
                found["requests"] = dict(proxy.counts())
                found["bytes"] = sum(proxy.bytes_by_method().values())
        print(name, json.dumps(figures[name]), file=sys.stderr)
    return figures


def table(figures: dict[str, Any], size: float) -> str:
    """Return the result in Markdown."""
    lines = ["| | way | MB/s | ratio of times, DCP / ours | bytes / state | requests |"]
    lines.append("|---|---|---:|---:|---:|---|")
    for name, ways in figures.items():
        both = zip(ways[DCP]["seconds"], ways[OURS]["seconds"], strict=True)
        ratios = [theirs / own for theirs, own in both]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        for way, found in ways.items():
            requests = ", ".join(f"{n} {verb}" for verb, n in sorted(found["requests"].items()))
            speed = size / statistics.median(found["seconds"]) / 1e6
            ratio = spread if way == OURS else ""
            volume = found["bytes"] / size
            lines.append(f"| {name} | {way} | {speed:.0f} | {ratio} | {volume:.3f} | {requests} |")
    return "\n".join(lines)


def main() -> None:
    """Start the server, measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parameters", type=float, default=4e6)
    parser.add_argument("--pairs", type=rank_pair, nargs="+", default=[(2, 2), (2, 3)])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    size = state_bytes(width_of(options.parameters))
    with tempfile.TemporaryDirectory() as name, moto_server(Path(name) / "log") as port:
        make_bucket(port, BUCKET)
        with FaultProxy(port) as proxy:
            figures = measure(options, Path(name), f"http://127.0.0.1:{port}", proxy)
    print(json.dumps(machine("cpu")))
    print(f"{size / 1e6:.0f} MB of state")
    print(table(figures, size))


if __name__ == "__main__":
    main()
