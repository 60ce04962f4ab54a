"""Break the core in hundreds of small ways, and see the tests fail each time.

``make mutants`` runs it. For each change of a file, the tests of that file run until the first
failure, in a process of their own that is given the changed text. What no test notices survives: a
survivor that is not in ``_survivors`` with its reason fails the run, and so does one there that is
noticed now, or whose line is gone.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.mutation._operators import mutants_of
from tests.mutation._runner import Case, Outcome, import_for_ranks, import_for_tests, outcomes
from tests.mutation._survivors import SURVIVORS

PACKAGE = Path(__file__).parents[2] / "lightning_elastic_zero"

TESTS: dict[str, tuple[str, ...]] = {
    "layout.py": ("tests/core/test_layout.py", "tests/core/test_partition.py"),
    "partition.py": ("tests/core/test_partition.py", "tests/core/test_layout.py"),
    "manifest.py": ("tests/core/test_manifest.py", "tests/core/test_format_page.py"),
    "json_records.py": ("tests/core/test_manifest.py",),
    "data_progress/batch_plan.py": ("tests/core/test_batch_plan.py", "tests/core/test_sampler.py"),
    "data_progress/loop_counters.py": ("tests/core/test_loop_counters.py",),
    "data_progress/position.py": ("tests/core/test_loop_counters.py",),
    "data_progress/rng.py": ("tests/core/test_rng.py", "tests/core/test_sampler.py"),
    "data_progress/sample_order.py": ("tests/core/test_sampler.py",),
    "data_progress/sampler.py": ("tests/core/test_sampler.py",),
}
"""The files that decide what every value becomes, and the tests that hold them."""

_RELOADING = "tests/engine/test_reloading.py::test_a_load_"
_OPTIONS = "tests/engine/test_save_load_options.py::test_"
_REFUSED = "tests/engine/test_mismatch.py::test_"
_NEW_LAYERS = "tests/engine/test_renamed_layers.py::test_new_layers_begin_as_they_are"
_OTHER = "zero2x2-bf16-zero3x3-bf16-sub_group_700"
_BF16 = "zeroBx2-bf16"
TESTS_ON_RANKS: dict[str, tuple[str, ...]] = {
    "engine/restore.py": (
        "tests/core/test_restore_targets.py",
        "tests/core/test_replicated.py",
        "tests/core/test_infer_optimizer.py::test_what_a_group_takes_over",
        f"{_RELOADING}over_live_state_takes_its_place[{_BF16}]",
        f"{_OPTIONS}no_state_stays_no_state[{_OTHER}-2]",
        f"{_OPTIONS}no_state_stays_no_state[{_BF16}-zeroBx4-bf16-2]",
        f"{_RELOADING}that_breaks_off_leaves_the_run_as_it_was",
        f"{_RELOADING}within_an_accumulation_window[zero1x2-fp32-accumulation_2]",
        "tests/engine/test_user_state.py::test_numbers_of_numpy_come_back[zero1x2-fp32]",
        f"{_REFUSED}another_scheduler_is_refused[zero2x2-fp32]",
        "tests/engine/test_optimizers.py::test_adagrad_begins_anew",
        "tests/engine/test_optimizers.py::test_every_state_survives[Momentum-2 to 3]",
        f"{_NEW_LAYERS}[zero3x3-bf16-sub_group_700-zero1x2-bf16]",
        f"{_OPTIONS}configured_hyperparameters_with_restored_moments[{_OTHER}]",
        "tests/foreign/test_single_file.py::test_all_comes_back[bf16-zeroBx2-bf16-bucket_5000]",
        "tests/trainer/test_deepspeed_config.py::test_load_from_fp32_weights",
    ),
    "checkpoint/transfers.py": (
        "tests/core/test_transfers.py",
        f"{_OPTIONS}a_run_that_has_stepped_is_restored[{_OTHER}]",
        f"{_OPTIONS}no_state_stays_no_state[{_OTHER}-2]",
        f"{_NEW_LAYERS}[zero3x3-bf16-sub_group_700-zero1x2-bf16]",
        "tests/engine/test_optimizers.py::test_adagrad_begins_anew",
        "tests/engine/test_optimizers.py::test_every_state_survives[Momentum-2 to 3]",
    ),
    "checkpoint/loading.py": (
        f"{_OPTIONS}configured_hyperparameters_with_restored_moments[{_OTHER}]",
        f"{_OPTIONS}a_run_that_has_stepped_is_restored[{_OTHER}]",
        f"{_OPTIONS}weights_only[{_OTHER}]",
        f"{_OPTIONS}evaluation_without_an_optimizer[0-2-zero2x2-bf16]",
        f"{_RELOADING}that_breaks_off_leaves_the_run_as_it_was[zero2x2-fp32-3]",
        f"{_REFUSED}a_damaged_checkpoint_is_refused[{_BF16}-{_BF16}-flip_bit-CheckpointCorruptedError]",
        f"{_REFUSED}another_model_is_refused[{_BF16}-{_BF16}-reshaped]",
        f"{_REFUSED}another_model_is_refused[{_BF16}-{_BF16}-another optimizer]",
    ),
}
"""The same, where tests start process groups: few, one after the other, and only if asked for."""


def cases_of(files: Iterable[str], most: int, seed: int) -> list[Case]:
    """Return at most so many mutants of each file, the same ones for the same seed."""
    tests = TESTS | TESTS_ON_RANKS
    cases = []
    for file in files:
        source = (PACKAGE / file).read_text(encoding="utf-8")
        mutants = mutants_of(source)
        if len(mutants) > most:
            mutants = random.Random(seed).sample(mutants, most)
        cases += [Case(PACKAGE, file, source, tests[file], mutant) for mutant in mutants]
    return cases


def run(cases: Sequence[Case], jobs: int, *, verbose: bool) -> list[Outcome]:
    """Run all cases, printing what survives; before them, the tests of each file as it is.

    Raises:
        AssertionError: tests fail without any change.
    """
    for outcome in outcomes([*{c.file: c.unchanged() for c in cases}.values()], jobs):
        assert outcome.survived, f"{outcome.case.tests} fail as they are: {outcome.noticed_by}"
    found: list[Outcome] = []
    began = time.monotonic()
    for outcome in outcomes(cases, jobs):
        found.append(outcome)
        if outcome.survived or verbose:
            print(outcome, flush=True)
        if len(found) % 20 == 0:
            print(f"{len(found)} of {len(cases)}, {time.monotonic() - began:.0f} s", flush=True)
    return found


def verdict(found: Sequence[Outcome], files: Iterable[str]) -> list[str]:
    """Return what is wrong: survivors without a reason, and reasons without a survivor."""
    alive = {outcome.case.key for outcome in found if outcome.survived}
    # Changes of one line, or of lines of one text, may share a key: one that survives is enough.
    there = Counter(case.key for case in cases_of(files, sys.maxsize, 0))
    ran = Counter(outcome.case.key for outcome in found)
    noticed = {key for key in ran if ran[key] == there[key]} - alive
    explained = {key for key in SURVIVORS if key.partition(": ")[0] in set(files)}
    return [
        *(f"not explained in _survivors.py: {key}" for key in sorted(alive - SURVIVORS.keys())),
        *(f"noticed now, remove it from _survivors.py: {key}" for key in noticed & explained),
        *(f"no such line, remove it from _survivors.py: {key}" for key in explained - there.keys()),
    ]


def main() -> int:
    """Run the check; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="below the package; all but those with ranks")
    parser.add_argument("--most", type=int, default=25, help="mutants of each file")
    parser.add_argument("--most-on-ranks", type=int, default=24, help="where tests start ranks")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="say which test notices each")
    options = parser.parse_args()
    files = options.files or list(TESTS)
    import_for_tests()
    in_one = cases_of([f for f in files if f in TESTS], options.most, options.seed)
    on_ranks = cases_of(
        [f for f in files if f in TESTS_ON_RANKS], options.most_on_ranks, options.seed
    )
    print(
        f"{len(in_one + on_ranks)} mutants of {len(files)} files, seed {options.seed}", flush=True
    )
    found = run(in_one, options.jobs, verbose=options.verbose)
    if on_ranks:
        import_for_ranks()
        found += run(on_ranks, 1, verbose=options.verbose)
    wrong = verdict(found, files)
    print(*wrong, sep="\n")
    survived = sum(outcome.survived for outcome in found)
    print(f"{len(found)} mutants: {len(found) - survived} noticed, {survived} survive", end="")
    print(f"; {len(wrong)} lines of _survivors.py to be written or removed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
