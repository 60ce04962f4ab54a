"""Make the checkpoints of the table with the installed DeepSpeed.

    python -m tests.formats.make_fixtures [--pr-8031 CHECKOUT] [name ...]

Without names, it makes the missing checkpoints of the rows that need this release and the other
installed packages. Other releases need their own environments, with the same torch: install
``deepspeed==0.16.9`` (0.17.6, 0.18.9, 0.19.8), and Accelerate and Transformers for their rows.

The rows of DeepSpeed pull request 8031 need a checkout of its last commit, which replaces the
installed release: ``refs/pull/8031/head`` of deepspeedai/DeepSpeed, commit 0d95e79b6.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import metadata, util
from pathlib import Path

from tests.formats._deepspeed_writers import write, write_larger
from tests.formats._fixture_table import PR_8031, ROWS, FixtureRow
from tests.formats._packing import pack
from tests.formats._trainer_writers import accelerate, fit
from tests.support.foreign_checkpoints import DATA
from tests.support.ranks import ROOT, Pools, environment

TIMEOUT_S = 300.0
COPIED = ("zero_to_fp32.py", "zero_to_torch.py")
"""DeepSpeed's scripts, which it copies into each checkpoint."""


def versions(release: str) -> dict[str, str]:
    """Return the versions of the writing software."""
    packages = ("deepspeed", "torch", "lightning", "accelerate", "transformers")
    found = {name: metadata.version(name) for name in packages if util.find_spec(name)}
    return {**found, "deepspeed": PR_8031} if release == PR_8031 else found


def run_checkout(path: Path) -> None:
    """Make the ranks import DeepSpeed from a checkout, and compile its operators separately."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])
    os.environ["TORCH_EXTENSIONS_DIR"] = str(ROOT / ".cache" / "torch_extensions" / "pr-8031")
    os.chdir(path)  # DeepSpeed reads version.txt there.


def make(row: FixtureRow, pools: Pools, folder: Path) -> None:
    """Make one row's files in a folder."""
    if row.kind == "stale":
        pools.run(row.setup.world + 1, partial(write_larger, row, str(folder)), TIMEOUT_S)
    pools.run(row.setup.world, partial(program(row), row, str(folder)), TIMEOUT_S)
    for script in COPIED:
        for copy in (folder / "checkpoint").rglob(script):
            copy.unlink()
    if row.kind.startswith("universal"):
        convert(row, folder / "checkpoint")
    about = {
        "name": row.name,
        "shows": row.shows,
        "kind": row.kind,
        "path": row.path,
        "steps": row.steps,
        "world": row.setup.world,
        "setup": asdict(row.setup),
        "versions": versions(row.release),
    }
    (folder / "about.json").write_text(json.dumps(about, indent=2) + "\n")


def program(row: FixtureRow) -> Callable[[FixtureRow, str], None]:
    """Return the program of the ranks."""
    if row.kind == "transformers":
        from tests.formats._transformers_writer import train

        return train
    return {"lightning": fit, "accelerate": accelerate}.get(row.kind, write)


def convert(row: FixtureRow, path: Path) -> None:
    """Make a Universal Checkpoint with DeepSpeed's own tool."""
    source = path / f"step{row.steps}"
    folders = ["--input_folder", str(source), "--output_folder", f"{source}_universal"]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    module = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    done = subprocess.run(
        [*module, *folders, *workers, "--inject_missing_state"],
        env=environment(),
        timeout=TIMEOUT_S,
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        msg = f"ds_to_universal: {done.stderr[-3000:]}"
        raise RuntimeError(msg)
    if row.kind == "universal":
        shutil.rmtree(source)
        (path / "latest").unlink()


def wanted(names: list[str], checkout: Path | None) -> list[FixtureRow]:
    """Return the rows to make with this release."""
    installed = PR_8031 if checkout else ".".join(metadata.version("deepspeed").split(".")[:2])
    missing = [row for row in ROWS if not (DATA / f"{row.name}.tar.xz").exists()]
    rows = [row for row in ROWS if row.name in names] if names else missing
    needed = {"accelerate": "accelerate", "transformers": "transformers"}
    not_installed = [kind for kind, package in needed.items() if not util.find_spec(package)]
    return [row for row in rows if row.release == installed and row.kind not in not_installed]


def main(names: list[str], checkout: Path | None) -> int:
    """Make the selected fixtures; return the number of rows that failed."""
    DATA.mkdir(exist_ok=True)
    if checkout:
        run_checkout(checkout)
    pools, failed = Pools(), 0
    try:
        for row in wanted(names, checkout):
            folder = Path(tempfile.mkdtemp(prefix="ez-foreign-"))
            try:
                make(row, pools, folder)
                pack(folder, DATA / f"{row.name}.tar.xz")
                size = (DATA / f"{row.name}.tar.xz").stat().st_size
                print(f"{row.name}: {size} bytes", flush=True)
            except Exception as error:  # noqa: BLE001 (continue with the other rows)
                failed += 1
                print(f"{row.name} failed: {str(error)[-300:]}", flush=True)
            finally:
                shutil.rmtree(folder)
    finally:
        pools.close()
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pr-8031", type=Path, help="a checkout of DeepSpeed pull request 8031")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    sys.exit(main(arguments.names, arguments.pr_8031 and arguments.pr_8031.resolve()))
