"""Time saving and loading beside stock DeepSpeed: same engine, same ranks, same disk, same run.

    python examples/benchmarks/save_load.py [--stage 3] [--ranks 2] [--megabytes 400] [--rounds 5]

The two are timed in turn, and what is printed are medians and the median of the ratios pair by
pair: single times on a shared machine mean little. "With fsync" ends when the bytes are on the
disk: this library's saves always do; stock DeepSpeed's files are synced by the benchmark. "Without"
ends when the system has taken the bytes: here this library's fsync is switched off.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from torch import nn
from torch.multiprocessing.spawn import spawn

TIMEOUT_S = 1500
BYTES_PER_PARAMETER = 12  # fp32 master and Adam's two moments
LAYERS = 8


class Mlp(nn.Module):
    """Square layers, so that all of the state is in matrices as it is in a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.pow(2).mean()


def make_engine(stage: int, width: int) -> Any:  # noqa: ANN401 - DeepSpeed is untyped
    """Build an engine with Adam."""
    import deepspeed  # noqa: PLC0415 - after the process group's variables are set

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    module = Mlp(width)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine


def train_step(engine: Any, width: int) -> None:  # noqa: ANN401
    """Take one step, so that the optimizer has its state."""
    engine.backward(engine(torch.randn(1, width)))
    engine.step()


@contextmanager
def without_fsync() -> Iterator[None]:
    """Let fsync return at once: to time the bytes' way into the system alone."""
    real = os.fsync
    os.fsync = lambda descriptor: None  # type: ignore[assignment]  # noqa: ARG005
    try:
        yield
    finally:
        os.fsync = real


def sync_tree(folder: Path) -> None:
    """Bring stock DeepSpeed's files to the disk, this rank's share of them."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for file in sorted(p for p in folder.rglob("*") if p.is_file())[rank::ranks]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that all ranks took together."""
    torch.distributed.barrier()
    began = time.perf_counter()
    work()
    torch.distributed.barrier()
    return time.perf_counter() - began


def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Time all of it, in turn, on this rank."""
    from lightning_elastic_zero import load_checkpoint, save_checkpoint  # noqa: PLC0415

    engine = make_engine(options.stage, options.width)
    train_step(engine, options.width)
    ours, stock = folder / "ours.ckpt", folder / "stock.ckpt"

    def save_stock(*, synced: bool) -> None:
        engine.save_checkpoint(str(stock), tag="checkpoint")
        if synced:
            sync_tree(stock)

    figures: dict[str, list[float]] = {}
    for _ in range(options.rounds + 1):
        rounds = {
            "save with fsync, ours": lambda: save_checkpoint(engine, ours),
            "save with fsync, stock": lambda: save_stock(synced=True),
            "save without fsync, stock": lambda: save_stock(synced=False),
            "load, ours": lambda: load_checkpoint(engine, ours),
            "load, stock": lambda: engine.load_checkpoint(str(stock)),
        }
        for name, work in rounds.items():
            figures.setdefault(name, []).append(timed(work))
        with without_fsync():
            seconds = timed(lambda: save_checkpoint(engine, ours))
        figures.setdefault("save without fsync, ours", []).append(seconds)
    return {name: seconds[1:] for name, seconds in figures.items()}  # the first round warms up


def work_as(rank: int, options: argparse.Namespace, port: int, folder: Path) -> None:
    """Be one rank."""
    variables = {"RANK": rank, "WORLD_SIZE": options.ranks, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    sys.stdout = sys.stderr  # DeepSpeed prints on every rank
    from lightning_elastic_zero.engine import use_accelerator  # noqa: PLC0415

    use_accelerator("cpu")
    import deepspeed  # noqa: PLC0415

    deepspeed.init_distributed("gloo")
    figures = measure(options, folder)
    if rank == 0:
        (folder / "figures.json").write_text(json.dumps(figures))


def report(options: argparse.Namespace, figures: dict[str, list[float]], state_bytes: int) -> None:
    """Print medians and ratios."""
    print(
        f"ZeRO-{options.stage}, {options.ranks} ranks, {state_bytes / 1e6:.0f} MB of state, "
        f"{options.rounds} rounds, seconds are medians"
    )
    print(f"{'':22}{'ours':>9}{'stock':>9}{'ours/stock':>12}{'ours GB/s':>11}")
    for what in ("save with fsync", "save without fsync", "load"):
        ours, stock = figures[f"{what}, ours"], figures[f"{what}, stock"]
        ratio = statistics.median(a / b for a, b in zip(ours, stock, strict=True))
        mine, theirs = statistics.median(ours), statistics.median(stock)
        speed = state_bytes / mine / 1e9
        print(f"{what:22}{mine:9.3f}{theirs:9.3f}{ratio:12.2f}{speed:11.2f}")


def main() -> None:
    """Run the ranks, and print what they measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=400, help="of optimizer state, all ranks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="a disk to measure")
    options = parser.parse_args()
    numel = options.megabytes * 1e6 / BYTES_PER_PARAMETER
    options.width = int((numel / LAYERS) ** 0.5)
    state_bytes = LAYERS * (options.width**2 + options.width) * BYTES_PER_PARAMETER
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        ranks = (options, port, folder)
        context = spawn(work_as, ranks, nprocs=options.ranks, join=False)  # type: ignore[no-untyped-call]
        deadline = time.monotonic() + TIMEOUT_S
        while not context.join(timeout=max(deadline - time.monotonic(), 0)):
            if time.monotonic() > deadline:
                sys.exit(f"the ranks took more than {TIMEOUT_S} s")
        report(options, json.loads((folder / "figures.json").read_text()), state_bytes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
