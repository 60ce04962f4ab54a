"""accelerate's own loop continues exactly on any number of ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_elastic_zero.errors import CheckpointCorruptedError
from tests.support.ranks import Pools
from tests.support.small_checkpoints import fill

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from lightning_elastic_zero.integrations.accelerators import _is_finished, check_steps
from tests.integrations._accelerate_programs import (
    LoopCase,
    fall_back_with_two_engines,
    first_step_with_evaluation,
    is_freed,
    load_unseen,
    loop,
    refusals,
    rotate_unfinished,
    save_named,
    stock_failure,
    two_engines,
)
from tests.integrations._hf_programs import Run

pytestmark = pytest.mark.engine

Reference = Callable[..., tuple[Path, list[Run]]]


@pytest.fixture(scope="session")
def whole_loop(hf_ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return a run of 12 steps that saved at step 8, in the second epoch; made once."""
    made: dict[str, tuple[Path, list[Run]]] = {}

    def get(world: int = 2, **case: Any) -> tuple[Path, list[Run]]:
        name = f"{world}-{sorted(case.items())}"
        if name not in made:
            folder = tmp_path_factory.mktemp("accelerate")
            run = LoopCase(folder=str(folder), save_at=(8,), state_at=(8,), **case)
            made[name] = (folder, hf_ranks.run(world, partial(loop, run)))
        return made[name]

    return get


def assert_continues(run: Run, reference: Run, steps: range) -> None:
    """Assert that samples and rates equal those of the reference, and losses up to sum order."""
    for step in steps:
        assert run.samples[step] == reference.samples[step], step
        assert run.rates[step] == pytest.approx(reference.rates[step], rel=1e-12, abs=1e-15), step
        assert abs(run.losses[step] - reference.losses[step]) < 2e-6, step
    assert sorted(run.samples) == [*steps]


QUICK = (2, 3, "cosine")
"""Other tests use its whole run, too."""

CASES = [
    (stage, world, schedule)
    for stage in (1, 2, 3)
    for world in (3, 1)
    for schedule in ("lambda", "cosine", "onecycle")
] + [(2, 1, "sequential"), (2, 3, "plateau"), (2, 3, "multiplicative"), (2, 3, "chained")]


@pytest.mark.parametrize(
    ("stage", "world", "schedule"),
    [QUICK, *(pytest.param(*case, marks=pytest.mark.long) for case in CASES if case != QUICK)],
)
def test_a_loop_continues_exactly_on_other_counts(
    stage: int, world: int, schedule: str, whole_loop: Reference, hf_ranks: Pools
) -> None:
    """State is equal bit for bit; samples, rates and losses continue."""
    folder, (full_run, *_) = whole_loop(stage=stage, schedule=schedule)
    case = LoopCase(stage=stage, schedule=schedule, load=f"{folder}/step_8", start=8)
    run, *_ = hf_ranks.run(world, partial(loop, case))
    assert run.first_state.keys() == full_run.states[8].keys()
    for name, tensor in full_run.states[8].items():
        assert torch.equal(run.first_state[name], tensor), name
    assert_continues(run, full_run, range(9, 13))
    assert run.warnings == []


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"fallback": True}])
def test_a_loop_whose_engine_was_elastic_continues(
    options: dict[str, Any], whole_loop: Reference, hf_ranks: Pools
) -> None:
    """An earlier ``wrap_initialize`` does not replace the Accelerator's own part."""
    folder, (full_run, *_) = whole_loop(stage=2, schedule="cosine")
    case = LoopCase(schedule="cosine", load=f"{folder}/step_8", start=8, wrapped=True)
    run, *_ = hf_ranks.run(3, partial(loop, replace(case, options=options)))
    assert_continues(run, full_run, range(9, 13))


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["lambda", "cosine", "onecycle"])
def test_a_loop_is_resized_twice(
    schedule: str, whole_loop: Reference, hf_ranks: Pools, tmp_path: Path
) -> None:
    """3 ranks, then 2, then 1: the schedule is that of 3 ranks."""
    folder, (full_run, *_) = whole_loop(world=3, schedule=schedule)
    second = LoopCase(
        schedule=schedule,
        load=f"{folder}/step_8",
        start=8,
        folder=str(tmp_path),
        save_at=(10,),
    )
    run, *_ = hf_ranks.run(2, partial(loop, second))
    assert_continues(run, full_run, range(9, 13))
    third = LoopCase(schedule=schedule, load=f"{tmp_path}/step_10", start=10)
    run, *_ = hf_ranks.run(1, partial(loop, third))
    assert_continues(run, full_run, range(11, 13))


def test_additional_ranks_draw_the_same_random_numbers(
    whole_loop: Reference, hf_ranks: Pools
) -> None:
    """A rank without a saved random state gets that of a rank that saved one."""
    folder, _ = whole_loop(stage=2, schedule="cosine")
    case = LoopCase(schedule="cosine", load=f"{folder}/step_8", start=8, steps=9)
    runs = hf_ranks.run(3, partial(loop, case))
    assert len({run.draws[-1] for run in runs}) == 1
    fresh = hf_ranks.run(3, partial(loop, LoopCase(steps=0)))
    assert fresh[0].draws[-1] != runs[0].draws[-1]


@pytest.mark.parametrize("schedule", ["onecycle", pytest.param("cosine", marks=pytest.mark.long)])
def test_a_stock_folder_is_resumed(schedule: str, whole_loop: Reference, hf_ranks: Pools) -> None:
    """``pytorch_model`` by stock DeepSpeed is loaded on another count."""
    folder, (full_run, *_) = whole_loop(stage=2, schedule=schedule, bound=False)
    case = LoopCase(schedule=schedule, load=f"{folder}/step_8", start=8)
    run, *_ = hf_ranks.run(3, partial(loop, case))
    for name, tensor in full_run.states[8].items():
        assert torch.equal(run.first_state[name], tensor), name
    assert_continues(run, full_run, range(9, 13))


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 3])
def test_a_loop_without_the_line_fails(world: int, whole_loop: Reference, hf_ranks: Pools) -> None:
    """Stock accelerate never trains on fresh weights from our folders."""
    folder, _ = whole_loop(stage=2, schedule="cosine")
    case = LoopCase(load=f"{folder}/step_8", start=8, bound=False)
    assert all(hf_ranks.run(world, partial(stock_failure, case)))


def test_an_accelerator_that_cannot_resume_exactly_is_refused(hf_ranks: Pools) -> None:
    """One without DeepSpeed, and one that would repeat the first epoch's order."""
    without, old = hf_ranks.run(2, refusals)[0]
    assert without.startswith("UnsupportedError: elastic() was given an Accelerator of type")
    assert old.startswith("UnsupportedError: accelerate 1.14.0 repeats")


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"seedable": False}, "use_seedable_sampler=True"),
        ({"samples": 76}, "the last step of an epoch is filled up with other samples"),
        ({"samples": 76, "drop_last": True}, "Leave out 4 samples"),
        ({"sampler": "weighted"}, "WeightedRandomSampler cannot be repeated"),
        ({"dispatch": True}, "accelerate skips too few batches"),
        ({"epoch_data": True}, "accelerate calls EpochTokens.set_epoch in some epochs only"),
    ],
)
def test_an_inexact_resume_causes_a_warning(
    case: dict[str, Any], words: str, whole_loop: Reference, hf_ranks: Pools
) -> None:
    """One warning names the difference."""
    folder, _ = whole_loop(**case)
    run, *_ = hf_ranks.run(3, partial(loop, LoopCase(load=f"{folder}/step_8", start=8, **case)))
    assert [words in warning for warning in run.warnings] == [True]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("world", "drop_last", "words"),
    [
        (3, False, "Set even_batches or drop_last to True, or use a number of data ranks that "),
        (1, False, "the weight of a sample depends on the micro-batch size"),
        pytest.param(3, True, "Leave out 3 samples", marks=pytest.mark.long),
    ],
)
def test_ranks_have_equal_numbers_of_batches(
    world: int, drop_last: bool, words: str, hf_ranks: Pools, tmp_path: Path
) -> None:
    """Without ``even_batches``, ranks would wait for each other at the end of an epoch."""
    case = LoopCase(even=False, samples=75, drop_last=drop_last, steps=3)
    hf_ranks.run(2, partial(loop, replace(case, folder=str(tmp_path), save_at=(2,))))
    resumed = replace(case, load=f"{tmp_path}/step_2", start=2)
    if world == 3 and not drop_last:
        for error in hf_ranks.run(3, partial(stock_failure, resumed)):
            assert error.startswith("UnsupportedError: even_batches=False with 38 batches")
            assert f"{words}divides 38" in error
    else:
        run, *_ = hf_ranks.run(world, partial(loop, resumed))
        assert [words in warning for warning in run.warnings] == [True]


@pytest.mark.long
def test_an_unchanged_count_may_differ_within_an_epoch(
    whole_loop: Reference, hf_ranks: Pools
) -> None:
    """A warning says where stock itself reads other samples."""
    case: dict[str, Any] = {"epoch_data": True, "sampler": "epochs"}
    folder, (full_run, *_) = whole_loop(**case)
    run, *_ = hf_ranks.run(2, partial(loop, LoopCase(load=f"{folder}/step_8", start=8, **case)))
    assert run.samples != {step: full_run.samples[step] for step in range(9, 13)}
    words = "accelerate calls EpochTokens.set_epoch in some epochs only"
    assert [words in warning for warning in run.warnings] == [True]


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "words", "exact"),
    [
        ({"sampler": "seeded"}, "SeededSampler cannot be repeated", {4: True, 6: False, 8: False}),
        ({"seedable": False}, "use_seedable_sampler=True", {6: False, 8: False}),
    ],
)
def test_a_sampler_that_seeds_itself_is_exact_in_the_first_epoch(
    case: dict[str, Any], words: str, exact: dict[int, bool], hf_ranks: Pools, tmp_path: Path
) -> None:
    """A new process draws the same order in its first epoch only."""
    whole = LoopCase(folder=str(tmp_path), save_at=tuple(exact), **case)
    full_run, *_ = hf_ranks.run(2, partial(loop, whole))
    for start, is_exact in exact.items():
        resume = replace(whole, load=f"{tmp_path}/step_{start}", start=start, save_at=())
        run, *_ = hf_ranks.run(2, partial(loop, resume))
        rest = range(start + 1, 7 if start < 6 else 13)
        assert all(run.samples[step] == full_run.samples[step] for step in rest) is is_exact
        assert [words in warning for warning in run.warnings] == ([] if is_exact else [True])


@pytest.mark.parametrize("start", [8, 6])
def test_a_loop_with_another_seed_continues_the_saved_order(
    start: int, hf_ranks: Pools, tmp_path: Path
) -> None:
    """Within and between epochs; a warning names both seeds."""
    case = LoopCase(folder=str(tmp_path), save_at=(start,), data_seed=5)
    full_run, *_ = hf_ranks.run(2, partial(loop, case))
    case = LoopCase(load=f"{tmp_path}/step_{start}", start=start, data_seed=6)
    run, *_ = hf_ranks.run(3, partial(loop, case))
    assert_continues(run, full_run, range(start + 1, 13))
    words = ("This run has the seed 6 for", "was saved with 5", "Set data_seed=5")
    assert [all(word in text for word in words) for text in run.warnings] == [True]


@pytest.mark.long
@pytest.mark.parametrize(("world", "exact"), [(3, True), (1, False)])
def test_a_batch_sampler_may_depend_on_the_number_of_ranks(
    world: int, exact: bool, whole_loop: Reference, hf_ranks: Pools
) -> None:
    """Its ``set_epoch`` is called on one rank only; a warning says so."""
    folder, (full_run, *_) = whole_loop(batches=True)
    case = LoopCase(load=f"{folder}/step_8", start=8, batches=True)
    run, *_ = hf_ranks.run(world, partial(loop, case))
    assert (run.samples == {step: full_run.samples[step] for step in range(9, 13)}) is exact
    words = "accelerate calls EpochBatches.set_epoch on one rank only"
    assert [words in warning for warning in run.warnings] == ([] if exact else [True])


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 3])
def test_a_step_that_was_saved_within_is_repeated(
    world: int, whole_loop: Reference, hf_ranks: Pools
) -> None:
    """Gradients of its first micro-batch are not in the checkpoint; a warning says so."""
    folder, (full_run, *_) = whole_loop(save_within=9)
    run, *_ = hf_ranks.run(world, partial(loop, LoopCase(load=f"{folder}/within_9", start=8)))
    assert_continues(run, full_run, range(9, 13))
    assert ["saved after 1 of 3 micro-batches" in warning for warning in run.warnings] == [True]


@pytest.mark.long
def test_a_rate_that_does_not_count_all_ranks_is_warned_of(
    whole_loop: Reference, hf_ranks: Pools
) -> None:
    """A step is taken for each rank: a fixed number of warm-up steps ends at another step."""
    folder, (full_run, *_) = whole_loop(schedule="warmup")
    case = LoopCase(schedule="warmup", load=f"{folder}/step_8", start=8)
    run, *_ = hf_ranks.run(3, partial(loop, case))
    assert run.rates[9] != full_run.rates[9]
    words = "The learning rate jumps from 0.00566667 to 0.00833333"
    assert [words in warning for warning in run.warnings] == [True]


@pytest.mark.long
@pytest.mark.parametrize(
    ("per_call", "words"),
    [("optimizer step", []), ("micro-batch", ["Call step() once per optimizer step"])],
)
def test_a_scheduler_that_the_loop_steps_is_not_counted_by_ranks(
    per_call: str, words: list[str], whole_loop: Reference, hf_ranks: Pools
) -> None:
    """With ``step_scheduler_with_optimizer=False``, one call is one step."""
    folder, (full_run, *_) = whole_loop(schedule="own", steps_per=per_call)
    case = LoopCase(schedule="own", steps_per=per_call, load=f"{folder}/step_8", start=8)
    run, *_ = hf_ranks.run(3, partial(loop, case))
    assert (run.rates[9] == full_run.rates[9]) is (not words)
    assert [word in warning for word, warning in zip(words, run.warnings, strict=True)] == (
        [True] * len(words)
    )


@pytest.mark.long
@pytest.mark.parametrize("ends", [30, 5, 0])
def test_a_schedule_of_deepspeed_keeps_its_length(
    ends: int, whole_loop: Reference, hf_ranks: Pools
) -> None:
    """Steps of a ``DummyScheduler`` are divided by the number of ranks.

    ``ends``: the fixed number of warm-up steps; 0: numbers that are multiplied by the ranks.
    """
    folder, (full_run, *_) = whole_loop(schedule="dummy", warmup=ends)
    case = LoopCase(schedule="dummy", warmup=ends, load=f"{folder}/step_8", start=8)
    run, *_ = hf_ranks.run(3, partial(loop, case))
    words = "total_num_steps changes from 24 to 16"
    assert [words in warning for warning in run.warnings] == [True] * bool(ends)
    if not ends:
        assert_continues(run, full_run, range(9, 13))


@pytest.mark.long
def test_a_schedule_of_deepspeed_in_a_stock_folder_is_compared_by_its_rate(
    whole_loop: Reference, hf_ranks: Pools
) -> None:
    """The folder does not contain the schedule's settings."""
    folder, _ = whole_loop(schedule="dummy", warmup=5, bound=False)
    case = LoopCase(schedule="dummy", warmup=5, load=f"{folder}/step_8", start=8)
    run, *_ = hf_ranks.run(3, partial(loop, case))
    assert sum("the learning rate jumps from" in warning for warning in run.warnings) == 1


@pytest.mark.cases(2)
@pytest.mark.parametrize("dispatch", [None, False])
@pytest.mark.parametrize("world", [3, 2])
def test_a_stream_is_read_again(
    world: int, dispatch: bool | None, hf_ranks: Pools, tmp_path: Path
) -> None:
    """Its loader has no length; a warning names what its order must not depend on."""
    case = LoopCase(stream=True, dispatch=dispatch, samples=84, steps=4)
    whole = replace(case, folder=str(tmp_path), save_at=(3,))
    full_run, *_ = hf_ranks.run(2, partial(loop, whole))
    resumed = replace(case, load=f"{tmp_path}/step_3", start=3)
    run, *_ = hf_ranks.run(world, partial(loop, resumed))
    assert run.samples[4] == full_run.samples[4]
    words = "an iterable dataset is read again up to the resumed batch"
    assert [words in warning for warning in run.warnings] == [True]
    assert ("ranks, micro-batch size and workers" in run.warnings[0]) is (world != 2)


@pytest.mark.long
@pytest.mark.parametrize("dispatch", [None, False])
def test_batches_of_a_stream_that_are_skipped_cause_a_warning(
    dispatch: bool | None, hf_ranks: Pools, tmp_path: Path
) -> None:
    """Without a length, only the first epoch's number is known."""
    case = LoopCase(stream=True, dispatch=dispatch, steps=4)
    hf_ranks.run(2, partial(loop, replace(case, folder=str(tmp_path), save_at=(3,))))
    resumed = replace(case, load=f"{tmp_path}/step_3", start=3, skipped=9)
    run, *_ = hf_ranks.run(3, partial(loop, resumed))
    assert ["9 batches of the epoch are skipped" in w for w in run.warnings] == [True]
    assert "skip 6: multiply the optimizer steps" in run.warnings[0]


@pytest.mark.long
@pytest.mark.parametrize(("start", "exact"), [(6, False), (8, False), (12, True)])
def test_batches_of_the_old_run_that_are_skipped_cause_a_warning(
    start: int, exact: bool, hf_ranks: Pools, tmp_path: Path
) -> None:
    """The example of accelerate counts micro-batches in the folder's name, and skips so many."""
    case = LoopCase(folder=str(tmp_path), save_at=(start,), steps=start)
    hf_ranks.run(2, partial(loop, case))
    case = LoopCase(
        load=f"{tmp_path}/step_{start}", start=start, steps=start + 1, skipped=start * 3
    )
    run, *_ = hf_ranks.run(3, partial(loop, case))
    words = f"skip {start * 2 % 12}: multiply the optimizer steps"
    assert [words in warning for warning in run.warnings] == [True] * (not exact)
    run, *_ = hf_ranks.run(2, partial(loop, case))
    assert run.warnings == []


def test_an_accelerator_whose_engine_only_is_elastic_is_refused_on_other_counts(
    whole_loop: Reference, hf_ranks: Pools
) -> None:
    """Additional ranks would begin their windows at other batches, and all would wait."""
    folder, (full_run, *_) = whole_loop(stage=2, schedule="cosine")
    case = LoopCase(schedule="cosine", load=f"{folder}/step_8", start=8, bound=False, wrapped=True)
    for failure in hf_ranks.run(3, partial(stock_failure, case)):
        assert failure.startswith("UnsupportedError")
        assert "call elastic(accelerator)" in failure
    run, *_ = hf_ranks.run(2, partial(loop, case))
    assert_continues(run, full_run, range(9, 13))


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("evaluated", "complete", "is_refused"),
    [(2, True, True), (2, False, False), pytest.param(8, True, False, marks=pytest.mark.long)],
)
def test_a_global_batch_that_is_counted_from_another_loader_is_refused(
    evaluated: int, complete: bool, is_refused: bool, hf_ranks: Pools
) -> None:
    """Checkpoints would record it, and a resume on other counts be refused with wrong advice.

    If an evaluation ended early, the loader that was begun last need not be the training loader.
    """
    program = partial(first_step_with_evaluation, 4, evaluated, complete=complete)
    words = "Set train_micro_batch_size_per_gpu=4 in DeepSpeed's configuration"
    for rank, (error, warnings) in enumerate(hf_ranks.run(2, program)):
        assert (words in error) is is_refused, error
        assert bool(error) is is_refused
        is_warned = evaluated < 4 and not complete and rank == 0
        assert [words in warning for warning in warnings] == [True] * is_warned


@pytest.mark.long
def test_a_configured_micro_batch_that_is_not_the_loaders_causes_a_warning(
    hf_ranks: Pools,
) -> None:
    """A resume compares the configured number, which does not change with the loader."""
    program = partial(first_step_with_evaluation, 4, 2, complete=True, configured=2)
    (error, warnings), (other_error, others) = hf_ranks.run(2, program)
    assert error == other_error == ""
    words = "gives a rank 4 samples, but the configuration has 2"
    assert [words in warning for warning in warnings] == [True]
    assert others == []


@pytest.mark.long
@pytest.mark.parametrize("world", [3, 1])
def test_split_batches_go_on(world: int, whole_loop: Reference, hf_ranks: Pools) -> None:
    """Where accelerate divides each batch, it takes one step of a scheduler for all ranks."""
    folder, (full_run, *_) = whole_loop(split=True, schedule="cosine")
    case = LoopCase(split=True, schedule="cosine", load=f"{folder}/step_8", start=8)
    run, *_ = hf_ranks.run(world, partial(loop, case))
    assert_continues(run, full_run, range(9, 13))
    assert run.warnings == []


@pytest.mark.long
@pytest.mark.parametrize("bound", [False, True])
def test_a_deleted_accelerator_is_freed(bound: bool, hf_ranks: Pools) -> None:
    """With its loaders, as with stock: DeepSpeed keeps the engine."""
    assert hf_ranks.run(2, partial(is_freed, bound=bound)) == [True, True]


@pytest.mark.long
def test_folders_that_accelerate_names_go_on(hf_ranks: Pools, tmp_path: Path) -> None:
    """Without the line, numbers begin at 0 after a load, and the lowest are deleted first."""
    for first, second, refusal in hf_ranks.run(2, partial(save_named, str(tmp_path), 3)):
        assert first == ["checkpoint_1", "checkpoint_2"]
        assert second == ["checkpoint_2", "checkpoint_3"]
        assert "checkpoint_2 has pytorch_model, and 0 models are prepared" in refusal


@pytest.mark.parametrize("limit", [2, 1, 3])
def test_a_limit_of_folders_keeps_an_intact_one(
    limit: int, hf_ranks: Pools, tmp_path: Path
) -> None:
    """A save was killed: the loaded folder stays until the next one is complete."""
    found = hf_ranks.run(1, partial(rotate_unfinished, str(tmp_path), limit))[0]
    kept = {1: (["0", "1", "2"], ["2", "3"], ["3", "4"])}
    kept[2] = kept[1]
    kept[3] = (["0", "1", "2"], ["0", "1", "2", "3"], ["2", "3", "4"])
    assert found == kept[limit]


@pytest.mark.parametrize("fallback", [False, True])
def test_a_folder_that_one_rank_does_not_see_is_refused_on_all(
    fallback: bool, hf_ranks: Pools, tmp_path: Path
) -> None:
    """As on a network file system, whose nodes may list different names."""
    errors = hf_ranks.run(2, partial(load_unseen, str(tmp_path), {"fallback": fallback}))
    assert errors[0] == errors[1]
    for error in errors[0]:
        assert "checkpoint_0 does not exist, or is not a folder" in error


@pytest.mark.long
def test_a_sampler_that_seeds_each_epoch_is_exact(whole_loop: Reference, hf_ranks: Pools) -> None:
    """A user's own sampler with ``set_epoch``."""
    folder, (full_run, *_) = whole_loop(sampler="epochs")
    case = LoopCase(load=f"{folder}/step_8", start=8, sampler="epochs")
    run, *_ = hf_ranks.run(3, partial(loop, case))
    assert_continues(run, full_run, range(9, 13))
    assert run.warnings == []


@pytest.mark.parametrize("world", [3, 1, 2])
@pytest.mark.parametrize(
    ("start", "more"),
    [
        (8, {}),
        (4, {}),
        (6, {}),
        (5, {"epoch_steps": 4}),
        (8, {"sampler": "epochs"}),
        (6, {"evaluates": True}),
        (8, {"paired": True}),
    ],
)
def test_a_loop_that_never_sets_epochs_continues(
    start: int, more: dict[str, Any], world: int, hf_ranks: Pools, tmp_path: Path
) -> None:
    """Twice: from the middle and the end of an epoch, also if the loop leaves epochs early."""
    case = LoopCase(folder=str(tmp_path), save_at=(start,), steps=14, sets_epoch=False, **more)
    full_run, *_ = hf_ranks.run(2, partial(loop, case))
    for ranks, begin in ((world, start), (2, start + 1)):
        load = f"{tmp_path}/step_{begin}"
        case = replace(case, load=load, start=begin, save_at=(begin + 1,))
        run, *_ = hf_ranks.run(ranks, partial(loop, case))
        assert_continues(run, full_run, range(begin + 1, 15))
        assert run.warnings == []


@pytest.mark.long
def test_loaders_may_be_prepared_in_another_order(hf_ranks: Pools, tmp_path: Path) -> None:
    """Each gets its own epoch. A warning names loaders whose epoch was not saved."""
    case = LoopCase(folder=str(tmp_path), save_at=(8,), sets_epoch=False)
    full_run, *_ = hf_ranks.run(2, partial(loop, case))
    case = replace(case, load=f"{tmp_path}/step_8", start=8, evaluation_last=True)
    run, *_ = hf_ranks.run(3, partial(loop, case))
    assert_continues(run, full_run, range(9, 13))
    assert run.warnings == []
    run, *_ = hf_ranks.run(2, partial(loop, replace(case, samples=84, steps=8)))
    words = "not contain the epochs of the loaders (SeedableRandomSampler of 84 samples)"
    assert [words in warning for warning in run.warnings] == [True]


@pytest.mark.long
def test_saves_into_one_folder_are_not_mixed(
    whole_loop: Reference, hf_ranks: Pools, tmp_path: Path
) -> None:
    """A kill during the second save leaves one step, or a folder that is refused."""
    _, (full_run, *_) = whole_loop()
    case = LoopCase(
        folder=str(tmp_path), name="last", save_at=(4, 8), options={"async_save": True}, steps=8
    )
    hf_ranks.run(2, partial(loop, case))
    first, second = tmp_path / "killed_at_4", tmp_path / "killed_at_8"
    resume = LoopCase(load=str(second), start=8)
    run, *_ = hf_ranks.run(3, partial(loop, resume))
    for name, tensor in full_run.states[8].items():
        assert torch.equal(run.first_state[name], tensor), name
    assert_continues(run, full_run, range(9, 13))
    shutil.rmtree(first / "pytorch_model", ignore_errors=True)  # incomplete, if it exists
    shutil.copytree(second / "pytorch_model", first / "pytorch_model")
    for failure in hf_ranks.run(3, partial(stock_failure, LoopCase(load=str(first), start=8))):
        assert "CheckpointCorruptedError" in failure
        assert "is of step 8, and accelerate's files" in failure


@pytest.mark.long
def test_saves_into_a_stock_folder_are_not_mixed(
    whole_loop: Reference, hf_ranks: Pools, tmp_path: Path
) -> None:
    """DeepSpeed's checkpoint stays, and accelerate's files next to it are replaced."""
    _, (full_run, *_) = whole_loop()
    case = LoopCase(folder=str(tmp_path), name="last", save_at=(4,), steps=4, bound=False)
    hf_ranks.run(2, partial(loop, case))
    case = replace(case, load=f"{tmp_path}/last", start=4, save_at=(8,), steps=8)
    hf_ranks.run(2, partial(loop, replace(case, bound=True, options={"async_save": True})))
    first, second = tmp_path / "killed_at_4", tmp_path / "killed_at_8"
    run, *_ = hf_ranks.run(3, partial(loop, LoopCase(load=str(second), start=8)))
    for name, tensor in full_run.states[8].items():
        assert torch.equal(run.first_state[name], tensor), name
    assert_continues(run, full_run, range(9, 13))
    shutil.copytree(second / "pytorch_model-elastic", first / "pytorch_model-elastic")
    for options in ({}, {"fallback": True}):
        case = LoopCase(load=str(first), start=8, options=options)
        for failure in hf_ranks.run(3, partial(stock_failure, case)):
            assert "pytorch_model-elastic is of step 8, and accelerate's files" in failure


@pytest.mark.parametrize("step", [None, 4, 8])
def test_a_save_next_to_a_stock_one_has_the_step_of_accelerates_files(
    step: int | None, tmp_path: Path
) -> None:
    """They are recorded under the engine's tag."""
    (tmp_path / "pytorch_model").mkdir()
    fill(tmp_path / "pytorch_model-elastic", "state of step 8")
    (tmp_path / "random_states_0.pkl").touch()
    if step is not None:
        (tmp_path / "lightning_elastic_zero.json").write_text(f'{{"pytorch_model": {step}}}')
    manifest: Any = SimpleNamespace(progress=SimpleNamespace(global_steps=8))
    expected = nullcontext() if step == 8 else pytest.raises(CheckpointCorruptedError)
    with expected:
        check_steps(tmp_path / "pytorch_model", manifest)
    assert step or not _is_finished(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("damage", ["unfinished", "bytes"])
def test_fallback_takes_the_folder_before(
    damage: str, whole_loop: Reference, hf_ranks: Pools, tmp_path: Path
) -> None:
    """A folder that a kill left unfinished, or whose bytes changed, is skipped."""
    folder, _ = whole_loop(stage=2, schedule="cosine")
    newest, other = tmp_path / "step_9", tmp_path / "run_7"
    for copy in (tmp_path / "step_8", newest, other):
        shutil.copytree(folder / "step_8", copy)
    if damage == "unfinished":
        (newest / "lightning_elastic_zero.json").unlink()
    else:
        shard = next(newest.rglob("*optim_states.pt"))
        shard.write_bytes(shard.read_bytes()[:-1])
    case = LoopCase(schedule="cosine", load=str(newest), start=8, steps=8)
    for failure in hf_ranks.run(3, partial(stock_failure, case)):
        assert "CheckpointCorruptedError" in failure
        assert "elastic(..., fallback=True)" in failure
    run, *_ = hf_ranks.run(3, partial(loop, replace(case, options={"fallback": True})))
    assert run.first_state
    assert [f"Resuming from {tmp_path}/step_8, because" in text for text in run.warnings] == [True]
    shutil.rmtree(tmp_path / "step_8")
    case = replace(case, options={"fallback": True})
    for failure in hf_ranks.run(3, partial(stock_failure, case)):
        assert "found no intact checkpoint to resume from" in failure


@pytest.mark.long
def test_fallback_takes_all_engines_of_one_folder(hf_ranks: Pools, tmp_path: Path) -> None:
    """Never another engine of equal shapes, and never engines of two steps."""
    found = hf_ranks.run(2, partial(fall_back_with_two_engines, str(tmp_path)))
    for newest, older, none in found:
        assert (newest, older) == ("[2, 2]", "[1, 1]")
        assert "CheckpointNotFoundError" in none
        assert "checkpoint_1" in none
        assert "checkpoint_0" in none


@pytest.mark.long
@pytest.mark.parametrize(
    ("teacher", "asynchronous"), [(False, False), (False, True), (True, False)]
)
def test_several_engines_of_an_accelerator_continue(
    teacher: bool, asynchronous: bool, hf_ranks: Pools, tmp_path: Path
) -> None:
    """Each is saved and loaded separately, including one without an optimizer."""
    run = partial(two_engines, str(tmp_path), teacher=teacher)
    wanted = hf_ranks.run(2, partial(run, load=False, asynchronous=asynchronous))[0]
    found = hf_ranks.run(3, partial(run, load=True))[0]
    assert len(found) == len(wanted) == (1 if teacher else 2)
    for here, there in zip(found, wanted, strict=True):
        for name, tensor in there.items():
            assert torch.equal(here[name], tensor), name
