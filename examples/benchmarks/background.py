"""Time the stall of a save, and the slowdown of training by a background save.

    python examples/benchmarks/background.py [--stage 3] [--ranks 2] [--megabytes 400] [--rounds 7]

One engine, one disk, one run. Every method runs once in each round. The output is medians, and
medians of the ratios of each round. For comparison, the state of all ranks (masters, Adam's two
moments and the module's weights) is copied in memory, the minimal cost of a snapshot. Without the
weights, which a save compares with the masters instead of writing them, it is written and synced
raw, one file per rank, the minimal cost of a save.

With ``--nodes``, each rank is on a node of its own (root may give it mounts), and saves with a copy
on the next one. For comparison, "one copy" is the same save without the other copy.

``torch.distributed.checkpoint`` gets the same tensors of each rank, as plain tensors under the
rank's name, so that its planner does not move them to other ranks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict_saver import async_save

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
from raw import RawWrite  # type: ignore[import-not-found] # a script in this folder
from subject import (  # type: ignore[import-not-found]
    BYTES_PER_PARAMETER,
    NO_ROOM,
    make_engine,
    rank_tensors,
    run_ranks,
    state_bytes,
    sync_tree,
    width_of,
)

TIMEOUT_S = 1500
TRAIN_S = 0.5
"""Seconds of steps without a save, in each round."""

WRITER_NICE = 10
"""Niceness of the library's writer thread."""

BASELINES = {
    "step": "step, nothing written",
    "in training": "raw write in training",
    "until": "raw write and fsync",
    "raw": "raw write and fsync",
    "ours blocking": "ours blocking, stall, one copy",
    "": "copy in memory",
}
"""The method with which a method is compared, by a substring of its name; the first match."""

Figures = dict[str, list[float]]


def on_node(folder: Path) -> str:
    """Give this rank a disk of its own; return the URL of the folder where it is."""
    from tests.support.nodes import enter

    disk, local = folder / f"disk-{distributed.get_rank()}", folder / "local"
    disk.mkdir()
    local.mkdir(exist_ok=True)
    enter(str(disk), str(local))
    return f"node://{local}"


def time_slowest_rank(work: Callable[[], object]) -> float:
    """Return the seconds until the slowest rank has finished the call."""
    distributed.barrier()
    began = time.perf_counter()
    work()
    seconds = torch.tensor(time.perf_counter() - began)
    distributed.all_reduce(seconds, op=distributed.ReduceOp.MAX)
    return float(seconds)


class BenchmarkEngine:
    """One rank's engine, and all methods of saving it."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        from lightning_elastic_zero.checkpoint.manager import CheckpointManager
        from lightning_elastic_zero.checkpoint.types import SaveOptions, SaveRequest
        from lightning_elastic_zero.coordination.liveness import Timeouts
        from lightning_elastic_zero.coordination.ranks import connect_ranks
        from lightning_elastic_zero.engine.live import LiveEngine

        self.engine = make_engine(options.stage, options.width)
        self.batch = torch.randn(options.batch, options.width)
        self.folder = folder
        self.step()
        self.ranks = connect_ranks()
        handle = LiveEngine(self.engine)
        self.request = SaveRequest(handle, folder / "ours.ckpt")
        self.one_copy: SaveRequest | None = None
        if options.nodes:
            url = on_node(folder)
            self.request = SaveRequest(handle, f"{url}/run/ours.ckpt")
            alone = SaveOptions(node_copies=1)
            self.one_copy = SaveRequest(handle, f"{url}/alone/ours.ckpt", options=alone)
        self.manager = CheckpointManager(Timeouts(), background=True)
        self.manager.start(handle, distributed.get_rank())
        self.gloo = distributed.new_group(backend="gloo")
        self.tensors = rank_tensors(self.engine)
        self.raw = RawWrite(folder / f"raw-{distributed.get_rank()}", self.tensors)
        state = handle.rank_state(exclude_frozen=False, keep_module_weights=False)
        self.state = [*state.large_tensors()]
        self.copied = [torch.zeros_like(t) for t in self.state]
        self.spare = [torch.zeros_like(t) for t in self.tensors]
        self.raw_spare = RawWrite(folder / f"spare-{distributed.get_rank()}", self.spare)
        self.pending: Any = None

    def step(self) -> None:
        """Take a training step."""
        self.engine.backward(self.engine(self.batch))
        self.engine.step()

    def copy(self) -> None:
        """Copy the state within memory."""
        for to, source in zip(self.copied, self.state, strict=True):
            to.copy_(source)

    def save_stock(self) -> None:
        """Save like stock DeepSpeed, with the fsync that it leaves to the system."""
        self.engine.save_checkpoint(str(self.folder / "stock"), tag="checkpoint")
        sync_tree(self.folder / "stock")

    def save_blocking(self) -> None:
        """Save while training waits."""
        self.manager.save(self.request, self.ranks)

    def save_async(self) -> None:
        """Save in the background."""
        if not self.manager.save_async(self.request, self.ranks):
            raise RuntimeError(NO_ROOM)

    def wait_until_finished(self) -> None:
        """Wait for the background save."""
        self.manager.wait_until_finished(self.ranks)

    def save_dcp(self) -> None:
        """Save like torch.distributed.checkpoint in the background."""
        rank = distributed.get_rank()
        state = {f"{rank}.{i}": t.detach() for i, t in enumerate(self.tensors)}
        target = self.folder / "dcp"
        self.pending = async_save(state, checkpoint_id=target, process_group=self.gloo)

    def finish_dcp(self) -> None:
        """Wait for its background save."""
        self.pending.result()


def measure(options: argparse.Namespace, folder: Path) -> tuple[Figures, int]:
    """Time all methods in turn on this rank."""
    subject = BenchmarkEngine(options, folder)
    figures: Figures = {}
    for _ in range(options.rounds + 1):
        for name, seconds in one_round(subject).items():
            figures.setdefault(name, []).append(seconds)
    written = subject.manager.last_save
    subject.manager.stop(interrupted=False)
    subject.ranks.close()
    first = {"ours background, stall, first time": figures["ours background, stall"][:1]}
    size_bytes = written.bytes if written is not None else 0
    return {**first, **{name: seconds[1:] for name, seconds in figures.items()}}, size_bytes


def one_round(subject: BenchmarkEngine) -> dict[str, float]:
    """Run every method once."""
    found = {"raw write and fsync": time_slowest_rank(subject.raw.write)}
    found["stock DeepSpeed, stall"] = time_slowest_rank(subject.save_stock)
    if (alone := subject.one_copy) is not None:
        save = partial(subject.manager.save, alone, subject.ranks)
        found["ours blocking, stall, one copy"] = time_slowest_rank(save)
    found["ours blocking, stall"] = time_slowest_rank(subject.save_blocking)
    # Just before: caches and the processor's speed affect both.
    found["copy in memory"] = time_slowest_rank(subject.copy)
    found["ours background, stall"] = time_slowest_rank(subject.save_async)
    found["ours background, until published"] = found["ours background, stall"] + time_slowest_rank(
        subject.wait_until_finished
    )
    found["dcp async_save, stall"] = time_slowest_rank(subject.save_dcp)
    found["dcp async_save, until done"] = found["dcp async_save, stall"] + time_slowest_rank(
        subject.finish_dcp
    )
    until = time.perf_counter() + TRAIN_S
    found["step, nothing written"] = mean_step(subject, lambda: time.perf_counter() > until)
    subject.save_async()
    found["step, ours writing"] = mean_step(subject, lambda: not writing(subject))
    subject.wait_until_finished()
    figures = subject.manager.last_save
    # Timed by itself, like the others: this thread checks only after whole steps.
    found["ours, until published in training"] = figures.seconds if figures is not None else 0.0
    found["ours while training, stall in all"] = figures.waited_s if figures is not None else 0.0
    began, ended = time.perf_counter(), []
    subject.save_dcp()
    subject.pending.add_done_callback(lambda _: ended.append(time.perf_counter()))
    found["step, dcp writing"] = mean_step(subject, lambda: bool(subject.pending.done()))
    subject.finish_dcp()
    found["dcp, until done in training"] = ended[0] - began
    for name, nice in {"": 0, f", nice {WRITER_NICE}": WRITER_NICE}.items():
        seconds, step = write_raw_in_training(subject, nice)
        found[f"raw write in training{name}"] = seconds
        found[f"step, raw writing{name}"] = step
    return found


def write_raw_in_training(subject: BenchmarkEngine, nice: int) -> tuple[float, float]:
    """Write a copy of the state raw in a thread during steps; return its seconds and a step's."""
    seconds: list[float] = []

    def write() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
        began = time.perf_counter()
        subject.raw_spare.write()
        seconds.append(time.perf_counter() - began)

    distributed.barrier()
    thread = threading.Thread(target=write)
    thread.start()
    step = mean_step(subject, lambda: not thread.is_alive())
    thread.join()
    return seconds[0], step


def writing(subject: BenchmarkEngine) -> bool:
    """Return whether a background save is in progress."""
    writer = subject.manager._writer  # noqa: SLF001 (no public access)
    return writer is not None and writer.busy


def mean_step(subject: BenchmarkEngine, is_done: Callable[[], bool]) -> float:
    """Return the mean time of steps until a rank is done."""
    distributed.barrier()
    began, steps = time.perf_counter(), 0
    while True:
        subject.step()
        steps += 1
        done = torch.tensor(float(is_done()))
        distributed.all_reduce(done, op=distributed.ReduceOp.MAX)
        if done:
            return (time.perf_counter() - began) / steps


def main() -> None:
    """Run the ranks, and print their measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=400, help="of optimizer state, all ranks")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=8, help="samples per step and rank")
    parser.add_argument("--nodes", action="store_true", help="save on node://")
    parser.add_argument("--folder", type=Path, default=None, help="a disk to measure")
    options = parser.parse_args()
    options.width = width_of(options.megabytes * 1e6 / BYTES_PER_PARAMETER)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        work = partial(measure, options, folder)
        measured = run_ranks(options.ranks, work, folder, device="cpu", timeout_s=TIMEOUT_S)
        report(options, measured[0], state_bytes(options.width), measured[1])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def report(options: argparse.Namespace, figures: Figures, size_bytes: int, written: int) -> None:
    """Print medians and ratios."""
    print(
        f"ZeRO-{options.stage}, {options.ranks} ranks, {size_bytes / 1e6:.0f} MB of state, "
        f"{options.rounds} rounds, seconds are medians; ours wrote {written / size_bytes:.4f} "
        "times the state"
    )
    print(f"{'':36}{'seconds':>9}{'GB/s':>7}{'times minimum':>17}")
    for name, seconds in figures.items():
        middle = statistics.median(seconds)
        speed = "" if "step" in name else f"{size_bytes / middle / 1e9:.2f}"
        bases = (base for word, base in BASELINES.items() if word in name and base in figures)
        base = figures[next(bases)]
        ratio = statistics.median(a / b for a, b in zip(seconds, base, strict=False))
        print(f"{name:36}{middle:9.4f}{speed:>7}{ratio:17.2f}")


if __name__ == "__main__":
    main()
