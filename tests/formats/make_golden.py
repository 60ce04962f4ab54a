"""Make the golden checkpoints, which earlier code writes in this library's own format.

Until the first release, a change of format 1 makes them again:

    DS_ACCELERATOR=cpu python -m tests.formats.make_golden tests/formats/data/golden
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path

from tests.formats._golden_run import STEPS, GoldenRun, fit
from tests.formats._packing import pack
from tests.support.processes import free_port

TIMEOUT_S = 900.0
RUNS = {
    "zero1": GoldenRun(1, 2, "32-true"),
    "zero2": GoldenRun(2, 2, "bf16-true"),
    "zero3": GoldenRun(3, 2, "bf16-true"),
}


IMPORTED = ("deepspeed.runtime.zero.muon.muon_optimizer", "lightning.pytorch")
"""Modules that take seconds to import, imported once for all ranks."""


def on_ranks(world: int, work: Callable[[], None]) -> None:
    for module in IMPORTED:
        importlib.import_module(module)
    fork, port = multiprocessing.get_context("fork"), free_port()
    ranks = [fork.Process(target=be_rank, args=(rank, world, port, work)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(TIMEOUT_S)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    if any(codes):
        msg = f"exit codes of ranks: {codes}"
        raise RuntimeError(msg)


def be_rank(rank: int, world: int, port: int, work: Callable[[], None]) -> None:
    import deepspeed

    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_SIZE": "1"}
    os.environ.update(where | own)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    work()


def save_all(folder: Path) -> None:
    for name, run in RUNS.items():
        fit(replace(run, save=str(folder / name)))


def about(name: str) -> str:
    run = RUNS[name]
    content = {
        "name": name,
        "shows": "format 1, written by an earlier state of this library",
        "kind": "elastic",
        "steps": STEPS,
        "world": run.world,
        "setup": {"stage": run.stage, "precision": run.precision},
        "versions": {name: metadata.version(name) for name in ("deepspeed", "torch", "lightning")},
    }
    return json.dumps(content, indent=2) + "\n"


def make(data: Path) -> None:
    data.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="ez-golden-"))
    try:
        for name in RUNS:
            (folder / name).mkdir()
        on_ranks(2, partial(save_all, folder))
        for name in RUNS:
            (folder / name / "checkpoint" / "zero_to_fp32.py").unlink()
            (folder / name / "about.json").write_text(about(name))
            pack(folder / name, data / f"{name}.tar.xz")
            print(name, (data / f"{name}.tar.xz").stat().st_size, flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
