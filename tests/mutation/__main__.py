"""Break the core in hundreds of small ways, and see the tests fail each time.

``make mutants`` runs it. Each change is made in a copy of the checkout, and the tests of that file
run there until the first failure. What no test notices survives: a survivor that is not in
``_survivors`` with its reason fails the run, and so does one there that is noticed now.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutation._operators import Mutant, mutants_of
from tests.mutation._survivors import SURVIVORS

ROOT = Path(__file__).parents[2]
PACKAGE = "lightning_elastic_zero"

TESTS: dict[str, tuple[str, ...]] = {
    "layout.py": ("tests/core/test_layout.py", "tests/core/test_partition.py"),
    "partition.py": ("tests/core/test_partition.py", "tests/core/test_layout.py"),
    "manifest.py": ("tests/core/test_manifest.py", "tests/core/test_format_page.py"),
    "json_records.py": ("tests/core/test_manifest.py",),
    "compatibility.py": ("tests/core/test_compatibility.py",),
    "data_progress/batch_plan.py": ("tests/core/test_batch_plan.py", "tests/core/test_sampler.py"),
    "data_progress/loop_counters.py": ("tests/core/test_loop_counters.py",),
    "data_progress/position.py": ("tests/core/test_loop_counters.py",),
    "data_progress/sampler.py": ("tests/core/test_sampler.py",),
    "engine/restore.py": (
        "tests/engine/test_reloading.py",
        "tests/engine/test_mismatch.py",
        "tests/engine/test_matrix.py",
    ),
}
"""The files that decide what every value becomes, and the tests that hold them."""

STARTS_RANKS = ("engine/",)
"""Files whose tests start process groups: one after the other, and only a few of their mutants."""

MUTANT_TIMEOUT_S = 240.0
"""A mutant that hangs is noticed."""


@dataclass(frozen=True, slots=True)
class Case:
    """One mutant of one file."""

    file: str
    mutant: Mutant

    @property
    def key(self) -> str:
        """What the table of survivors calls it."""
        return f"{self.file}: {self.mutant.name()}"


def chosen(files: Iterable[str], most: int, most_with_ranks: int, seed: int) -> list[Case]:
    """Return at most so many mutants of each file, the same ones for the same seed."""
    cases = []
    for file in files:
        source = (ROOT / PACKAGE / file).read_text(encoding="utf-8")
        mutants = mutants_of(source)
        limit = most_with_ranks if file.startswith(STARTS_RANKS) else most
        if len(mutants) > limit:
            mutants = random.Random(seed).sample(mutants, limit)
        cases += [Case(file, mutant) for mutant in mutants]
    return cases


def copy_of_checkout(folder: Path) -> Path:
    """Copy what the tests need, once for each worker."""
    for name in (PACKAGE, "tests", "docs"):
        shutil.copytree(
            ROOT / name,
            folder / name,
            ignore=shutil.ignore_patterns("__pycache__", "*.tar.xz"),
        )
    for name in ("pyproject.toml", "README.md"):
        shutil.copy2(ROOT / name, folder / name)
    return folder


def survives(case: Case, checkout: Path) -> bool:
    """Return whether all tests of the file pass with it."""
    path = checkout / PACKAGE / case.file
    original = path.read_text(encoding="utf-8")
    path.write_text(case.mutant.applied_to(original), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:randomly"]
    options = ["-m", "not long and not gpu", "-o", f"cache_dir={checkout / '.pytest'}"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(checkout / ".hypothesis"),
    }
    process = subprocess.Popen(
        [*command, *options, "--hypothesis-seed=0", *TESTS[case.file]],
        cwd=checkout,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(MUTANT_TIMEOUT_S) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        path.write_text(original, encoding="utf-8")


def survivors_of(cases: list[Case], jobs: int, folder: Path) -> list[Case]:
    """Run all cases, ``jobs`` at a time, and return those that no test noticed."""
    free = [copy_of_checkout(folder / str(i)) for i in range(jobs)]
    done, began = 0, time.monotonic()

    def look(case: Case) -> bool:
        nonlocal done
        checkout = free.pop()
        try:
            survived = survives(case, checkout)
        finally:
            free.append(checkout)
        done += 1
        if survived:
            print(f"survived  {case.file}:{case.mutant.line}  {case.mutant.name()}", flush=True)
        if done % 20 == 0:
            print(f"{done} of {len(cases)} in {time.monotonic() - began:.0f} s", flush=True)
        return survived

    with ThreadPoolExecutor(jobs) as pool:
        return [case for case, alive in zip(cases, pool.map(look, cases), strict=True) if alive]


def main() -> int:
    """Run the check; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", default=list(TESTS), help="below the package")
    parser.add_argument("--most", type=int, default=40, help="mutants of each file")
    parser.add_argument("--most-with-ranks", type=int, default=12, help="where tests start ranks")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    cases = chosen(options.files, options.most, options.most_with_ranks, options.seed)
    print(f"{len(cases)} mutants of {len(options.files)} files, seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        alive = survivors_of(cases, options.jobs, Path(folder))
    new = [case.key for case in alive if case.key not in SURVIVORS]
    # Lines of the same text share a key: one that survives is enough.
    gone = {case.key for case in cases} & SURVIVORS.keys() - {case.key for case in alive}
    print(f"{len(cases) - len(alive)} of {len(cases)} noticed, {len(alive)} survive")
    for key in new:
        print(f"not explained in _survivors.py: {key}")
    for key in sorted(gone):
        print(f"noticed now, remove it from _survivors.py: {key}")
    return 1 if new or gone else 0


if __name__ == "__main__":
    sys.exit(main())
