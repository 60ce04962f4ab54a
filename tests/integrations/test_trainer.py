"""The Trainer continues exactly on any number of ranks."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from tests.support.ranks import Pools

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.integrations._hf_programs import (
    Run,
    State,
    TrainerCase,
    engine_states_at_saves,
    failure_of,
    is_freed,
    push,
    save_after_failure,
    save_again,
    saves,
    search,
    train,
    train_after_stops,
    train_by_own_method,
    train_by_two_arguments,
    train_out_of_memory,
    train_twice,
    train_until_killed,
)

STEPS = range(11, 17)
"""Steps after checkpoint-10, to the end of the second epoch."""

Reference = Callable[..., tuple[Path, list[Run]]]

essential = pytest.mark.essential
pytestmark = pytest.mark.engine

since_5 = pytest.mark.skipif(
    version("transformers").startswith("4."), reason="an argument of transformers 5"
)


@pytest.fixture(scope="session")
def reference(hf_ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return a complete run, which saved at steps 5, 10 and 15; made once per session."""
    made: dict[str, tuple[Path, list[Run]]] = {}

    def get(world: int = 2, **case: Any) -> tuple[Path, list[Run]]:
        name = f"{world}-{sorted(case.items())}"
        if name not in made:
            folder = tmp_path_factory.mktemp("trainer")
            run = partial(train, TrainerCase(str(folder), state_at=(10,), **case))
            made[name] = (folder, hf_ranks.run(world, run))
        return made[name]

    return get


@pytest.fixture
def resumed(hf_ranks: Pools, tmp_path: Path) -> Callable[..., list[Run]]:
    """Return a function that resumes a run from a copy of a folder."""

    def resume(folder: Path, world: int, step: int = 10, **case: Any) -> list[Run]:
        copy = tmp_path / f"on-{world}"
        shutil.rmtree(copy, ignore_errors=True)  # of an earlier resume
        shutil.copytree(folder, copy)
        resume_from = str(copy / f"checkpoint-{step}")
        return hf_ranks.run(
            world, partial(train, TrainerCase(str(copy), resume=resume_from, **case))
        )

    return resume


def assert_equal(found: State, wanted: State) -> None:
    """Assert that the same elements have the same bits."""
    assert found.keys() == wanted.keys()
    assert wanted
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def assert_continues(run: Run, wanted: Run, steps: range = STEPS) -> None:
    """Assert that a resumed run has the samples, rates and losses of the whole run."""
    assert {step: run.samples[step] for step in steps} == {s: wanted.samples[s] for s in steps}
    assert {step: run.rates[step] for step in steps} == {s: wanted.rates[s] for s in steps}
    assert sorted(run.samples) == [*steps]
    for step in steps:
        assert abs(run.losses[step] - wanted.losses[step]) < 2e-6, step


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the log of the last trainer_state.json, without times."""
    state = json.loads((folder / "trainer_state.json").read_text())
    assert isinstance(state["log_history"], list)
    return [
        {key: entry[key] for key in ("step", "learning_rate")} for entry in state["log_history"]
    ]


COUNTS = [(stage, world) for stage in (1, 2, 3) for world in (3, 1)]


@pytest.mark.parametrize(("stage", "world"), COUNTS)
def test_a_run_continues_exactly_on_other_counts(
    stage: int,
    world: int,
    reference: Reference,
    resumed: Callable[..., list[Run]],
    tmp_path: Path,
) -> None:
    """State is equal bit for bit; samples, rates, losses and trainer_state.json continue."""
    folder, (full_run, *_) = reference(stage=stage)
    saved = sorted(path.name for path in (folder / "checkpoint-10").iterdir())
    assert "global_step10" in saved
    run, *others = resumed(folder, world, stage=stage, args={"save_total_limit": 2})
    assert_equal(run.first_state, full_run.states[10])
    assert_continues(run, full_run)
    assert run.warnings == []
    devices = f"{world} devices" if world > 1 else "1 device"
    line = f"(saved on 2 devices with ZeRO-{stage}) on {devices} at step 10, 12 samples per step"
    assert run.shown.count(line) == 1
    assert not any(line in other.shown for other in others)
    copy = tmp_path / f"on-{world}"
    kept = sorted(path.name for path in copy.glob("checkpoint-*"))
    assert kept == ["checkpoint-15", "checkpoint-16"]
    assert history(copy / "checkpoint-16") == history(folder / "checkpoint-16")
    masters = {
        n.removesuffix("/master"): t for n, t in full_run.states[10].items() if "/master" in n
    }
    converted = get_fp32_state_dict_from_zero_checkpoint(str(folder / "checkpoint-10"))
    for name, tensor in masters.items():
        assert torch.equal(converted[name], tensor), name


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_is_resized_twice(
    stage: int, reference: Reference, hf_ranks: Pools, tmp_path: Path
) -> None:
    """3 ranks, then 2, then 1: the run equals that of 3 ranks."""
    folder, (full_run, *_) = reference(world=3, stage=stage)
    shutil.copytree(folder / "checkpoint-5", tmp_path / "run" / "checkpoint-5")
    for world, first, last in ((2, 6, 10), (1, 11, 16)):
        case = TrainerCase(
            str(tmp_path / "run"),
            stage=stage,
            resume=True,
            stop_at=last if last < 16 else None,
        )
        run, *_ = hf_ranks.run(world, partial(train, case))
        assert_continues(run, full_run, range(first, last + 1))


def test_another_global_batch_is_refused(
    reference: Reference, hf_ranks: Pools, tmp_path: Path
) -> None:
    """Before the first step, with the settings that keep it. An option allows it."""
    folder, _ = reference(stage=2)
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    case = TrainerCase(str(copy), resume=str(copy / "checkpoint-10"), micro=(2, 3))
    failures = hf_ranks.run(3, partial(failure_of, case))
    for failure in failures:
        assert "CheckpointMismatchError" in failure
        assert "12 samples per optimizer step on 2 ranks; this run has 18" in failure
        assert "per_device_train_batch_size=2, gradient_accumulation_steps=2" in failure


@pytest.mark.long
def test_another_global_batch_is_allowed(
    reference: Reference, resumed: Callable[..., list[Run]]
) -> None:
    """With the option, the run continues from the same state."""
    folder, (full_run, *_) = reference(stage=3)
    options = {"allow_global_batch_change": True}
    run, *_ = resumed(folder, 3, micro=(2, 3), options=options)
    assert_equal(run.first_state, full_run.states[10])
    assert any("changes from 12 to 18 samples" in warning for warning in run.warnings)


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_a_stock_run_is_resumed_past_its_own_folders(
    stage: int, reference: Reference, resumed: Callable[..., list[Run]], tmp_path: Path
) -> None:
    """DeepSpeed's folders are loaded on another count, and kept when the run saves again."""
    folder, (full_run, *_) = reference(stage=stage, bound=False)
    assert list((folder / "checkpoint-15").glob("global_step15/*_states.pt"))
    run, *_ = resumed(folder, 3, stage=stage)
    assert_equal(run.first_state, full_run.states[10])
    assert_continues(run, full_run)
    later = tmp_path / "on-3" / "checkpoint-15"
    stock = [path.name for path in later.glob("global_step15/*.pt")]
    assert sorted(stock) == sorted(p.name for p in folder.glob("checkpoint-15/global_step15/*.pt"))
    assert (later / "latest").read_text() == "global_step15-elastic/checkpoint"
    assert any("is kept" in warning for warning in run.warnings)


@pytest.mark.parametrize(("stage", "world"), [(2, 2), (3, 2), (2, 3), (3, 3), (2, 1)])
def test_a_script_without_the_line_fails(
    stage: int, world: int, reference: Reference, hf_ranks: Pools, tmp_path: Path
) -> None:
    """Stock transformers never trains on fresh weights from our folders."""
    folder, _ = reference(stage=stage)
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    case = TrainerCase(str(copy), stage=stage, resume=str(copy / "checkpoint-10"), bound=False)
    assert all(hf_ranks.run(world, partial(failure_of, case)))


@pytest.mark.long
@pytest.mark.parametrize("draws", [False, True])
def test_additional_ranks_have_random_states(
    draws: bool, reference: Reference, resumed: Callable[..., list[Run]]
) -> None:
    """A rank without a saved state gets that of another, before any callback draws."""
    folder, full_run = reference(stage=3, dropout=0.1)
    runs = resumed(folder, 3, dropout=0.1, draws=draws)
    assert runs[2].draws == runs[0].draws
    assert (
        full_run[0].draws[10] == full_run[1].draws[10]
    )  # since the Trainer seeds all ranks equally


@pytest.mark.long
@pytest.mark.parametrize("damage", ["unfinished", "bytes"])
def test_the_folder_before_is_taken(
    damage: str, reference: Reference, hf_ranks: Pools, tmp_path: Path
) -> None:
    """``True`` skips a folder that a kill left unfinished; ``fallback`` one with changed bytes."""
    folder, (full_run, *_) = reference(stage=3)
    copy = tmp_path / "run"
    for step in (10, 15):
        shutil.copytree(folder / f"checkpoint-{step}", copy / f"checkpoint-{step}")
    newest = copy / "checkpoint-15"
    if damage == "unfinished":
        (newest / "trainer_state.json").unlink()
    else:
        shard = max(newest.rglob("*optim_states.pt"), key=lambda path: path.name)
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
        for failure in hf_ranks.run(3, partial(failure_of, TrainerCase(str(copy), resume=True))):
            assert "CheckpointCorruptedError" in failure
            assert "elastic(..., fallback=True)" in failure
    case = TrainerCase(str(copy), resume=True, options={"fallback": damage == "bytes"})
    run, *_ = hf_ranks.run(3, partial(train, case))
    assert_equal(run.first_state, full_run.states[10])
    assert any("checkpoint-15" in warning for warning in run.warnings)


@pytest.mark.long
def test_a_folder_that_is_not_a_trainers_is_refused(
    reference: Reference, hf_ranks: Pools, tmp_path: Path
) -> None:
    """On all ranks, with the remedy."""
    folder, _ = reference(stage=3)
    for wrong in (folder, folder / "checkpoint-99", folder / "checkpoint-10" / "global_step10"):
        case = TrainerCase(str(tmp_path), resume=str(wrong))
        for error in hf_ranks.run(2, partial(failure_of, case)):
            assert f"{wrong}/trainer_state.json" in error
            assert "checkpoint-<number>" in error
    for error in hf_ranks.run(2, partial(failure_of, TrainerCase(str(tmp_path), resume=True))):
        assert "ValueError: No valid checkpoint found in output directory" in error  # as stock
        assert "no folder checkpoint-<number>" in error
        assert "begin without a checkpoint" in error


@pytest.mark.long
def test_background_saves_are_resumed(
    hf_ranks: Pools, reference: Reference, resumed: Callable[..., list[Run]], tmp_path: Path
) -> None:
    """With async_save, each folder names its checkpoint once that is published."""
    folder, (full_run, *_) = reference(stage=3, options={"async_save": True})
    for step in (5, 10, 15, 16):
        text = (folder / f"checkpoint-{step}" / "latest").read_text()
        assert text == f"global_step{step}/checkpoint"
    run, *_ = resumed(folder, 3, options={"async_save": True})
    assert_equal(run.first_state, full_run.states[10])
    assert_continues(run, full_run)


@pytest.mark.long
def test_the_best_may_be_the_last_background_save(hf_ranks: Pools, tmp_path: Path) -> None:
    """load_best_model_at_end waits for the save in progress."""
    args = {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
    }
    options = {"async_save": True}
    case = TrainerCase(str(tmp_path), evaluate=True, args=args, options=options, state_at=(16,))
    run, *_ = hf_ranks.run(2, partial(train, case))
    assert_equal(run.states[-1], run.states[16])


@pytest.mark.long
@pytest.mark.parametrize("gather", [False, True])
def test_adapters_are_saved_small_and_the_best_is_loaded(
    gather: bool, reference: Reference, resumed: Callable[..., list[Run]], tmp_path: Path
) -> None:
    """LoRA: frozen weights are excluded; rotation and load_best_model_at_end work."""
    args = {
        "eval_strategy": "steps",
        "eval_steps": 5,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "save_total_limit": 3,
    }
    zero = {"stage3_gather_16bit_weights_on_model_save": gather}
    case: dict[str, Any] = {
        "stage": 3,
        "lora": True,
        "evaluate": True,
        "args": args,
        "config": {"zero_optimization": zero},
    }
    folder, (full_run, *_) = reference(**case)
    files = (folder / "checkpoint-10" / "global_step10").rglob("*.pt")
    assert sum(path.stat().st_size for path in files) < 40_000
    run, *_ = resumed(folder, 3, **case)
    assert_equal(run.first_state, full_run.states[10])
    assert_continues(run, full_run)
    assert run.warnings == []  # of the base, which is not in the checkpoint


@pytest.mark.long
def test_a_saved_model_alone_cannot_be_resumed(hf_ranks: Pools, tmp_path: Path) -> None:
    """save_only_model writes no engine state, and a resume from it is refused."""
    zero = {"stage3_gather_16bit_weights_on_model_save": True}
    case = TrainerCase(
        str(tmp_path),
        args={"save_only_model": True, "num_train_epochs": 1},
        config={"zero_optimization": zero},
    )
    hf_ranks.run(2, partial(train, case))
    assert not list(tmp_path.glob("checkpoint-5/global_step*"))
    resume = TrainerCase(str(tmp_path), resume=str(tmp_path / "checkpoint-5"))
    failures = hf_ranks.run(3, partial(failure_of, resume))
    assert all("has the model only" in failure for failure in failures)


@pytest.mark.long
def test_deepspeeds_own_optimizer_and_scheduler_continue(
    reference: Reference, resumed: Callable[..., list[Run]]
) -> None:
    """The engine's scheduler is restored with the engine."""
    parameters = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 4}
    scheduler = {"type": "WarmupDecayLR", "params": {**parameters, "total_num_steps": 16}}
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    config = {"optimizer": optimizer, "scheduler": scheduler}
    case: dict[str, Any] = {"stage": 2, "config": config, "args": {"warmup_steps": 4}}
    folder, (full_run, *_) = reference(**case)
    run, *_ = resumed(folder, 3, **case)
    assert_equal(run.first_state, full_run.states[10])
    assert_continues(run, full_run)


@pytest.mark.long
@pytest.mark.parametrize("optim", ["adafactor", "schedule_free_adamw"])
def test_optimizers_of_transformers_continue(
    optim: str, reference: Reference, resumed: Callable[..., list[Run]]
) -> None:
    """Adafactor measures each rank's part. The Trainer evaluates averaged weights and saves."""
    args = {"optim": optim, "lr_scheduler_type": "constant", "eval_strategy": "steps"}
    case: dict[str, Any] = {"stage": 2, "args": {**args, "eval_steps": 5}, "evaluate": True}
    folder, (full_run, *_) = reference(**case)
    run, *_ = resumed(folder, 2, **case)
    assert run.losses == {step: full_run.losses[step] for step in STEPS}


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"args": {"dataloader_drop_last": True}, "samples": 100}, "Leave out 4 samples"),
        ({"args": {"ignore_data_skip": True}}, "begins again at its first sample"),
        (
            {"args": {"accelerator_config": {"use_seedable_sampler": False}}},
            "set use_seedable_sampler=True",
        ),
        pytest.param(
            {"args": {"train_sampling_strategy": "group_by_length"}},
            "LengthGroupedSampler cannot be repeated",
            marks=since_5,
        ),
        pytest.param(
            {"args": {"train_sampling_strategy": "batch_rebalance"}},
            "batch_rebalance orders samples by the number of ranks",
            marks=since_5,
        ),
        ({"sampler": "weighted"}, "WeightedRandomSampler cannot be repeated"),
        (
            {"args": {"accelerator_config": {"dispatch_batches": True}}},
            "accelerate skips too few batches",
        ),
        ({"epoch_data": True}, "accelerate calls EpochTokens.set_epoch in some epochs only"),
        ({"stream": True, "args": {"max_steps": 16}}, "does not find its position in a later pass"),
        (
            {"unequal": True, "args": {"average_tokens_across_devices": False}},
            "the weight of a token depends on the others of its rank",
        ),
        ({"epoch_ends_at": 4}, "saved at epoch 1.75 and the Trainer resumes at epoch 1.25"),
        ({"epoch_ends_at": 10}, "a callback has ended the saved epoch"),
    ],
)
def test_an_inexact_resume_causes_a_warning(
    case: dict[str, Any],
    words: str,
    reference: Reference,
    resumed: Callable[..., list[Run]],
) -> None:
    """One warning names the difference."""
    folder, _ = reference(stage=2, **case)
    run, *_ = resumed(folder, 1 if "epoch_data" in case else 3, stage=2, **case)
    assert [words in warning for warning in run.warnings] == [True]


@pytest.mark.long
def test_ranks_have_equal_numbers_of_batches(hf_ranks: Pools, tmp_path: Path) -> None:
    """Without ``even_batches``, each would compute its own number of steps."""
    args = {"accelerator_config": {"even_batches": False}}
    case = TrainerCase(str(tmp_path), stage=2, samples=100, args=args, stop_at=5)
    hf_ranks.run(2, partial(train, case))
    case = replace(case, resume=f"{tmp_path}/checkpoint-5", stop_at=6)
    for error in hf_ranks.run(3, partial(failure_of, case)):
        assert error.startswith("UnsupportedError: even_batches=False with 50 batches in an epoch")


@pytest.mark.long
def test_a_loss_that_the_trainer_does_not_divide_causes_a_warning(
    reference: Reference, resumed: Callable[..., list[Run]]
) -> None:
    """If it is a mean, gradients change with the accumulation."""
    folder, (full_run, *_) = reference(stage=2, mean_loss=True)
    run, *_ = resumed(folder, 3, stage=2, mean_loss=True)
    norms = [
        next(entry["grad_norm"] for entry in each.log if entry["step"] == 11)
        for each in (full_run, run)
    ]
    assert norms[1] / norms[0] == pytest.approx(2 / 3, rel=1e-3)
    (warning,) = run.warnings
    assert "MeanLoss.compute_loss does not use num_items_in_batch" in warning
    assert "gradients are 2/3 times those of the old run. Multiply the loss by 3/2" in warning


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "world"),
    [
        # In transformers 4, BERT takes no additional keywords.
        pytest.param({"classifier": True}, 3, marks=[essential, since_5]),
        ({"classifier": True}, 2),
        ({"unequal": True}, 3),
    ],
)
def test_an_evaluation_loss_that_grows_with_the_ranks_causes_a_warning(
    case: dict[str, Any], world: int, hf_ranks: Pools, tmp_path: Path
) -> None:
    """If the run compares it with one of another number of ranks."""
    args = {
        "learning_rate": 1e-9,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "load_best_model_at_end": True,
        "max_steps": 1,
    }
    saving = TrainerCase(str(tmp_path), stage=2, evaluate=True, args=args, **case)
    before, *_ = hf_ranks.run(2, partial(train, saving))
    resuming = replace(saving, resume=True, args={**args, "max_steps": 2})
    after, *others = hf_ranks.run(world, partial(train, resuming))
    losses = [
        next(entry["eval_loss"] for entry in run.log if "eval_loss" in entry)
        for run in (before, after)
    ]
    grows = "classifier" in case and world == 3
    assert losses[1] / losses[0] == pytest.approx(3 / 2 if grows else 1, rel=0.05)
    words = "The evaluation loss of BertForSequenceClassification is multiplied by the number"
    assert [words in warning for warning in after.warnings] == [True] * grows
    assert not any(other.warnings for other in others)


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "case", "words"),
    [
        (1, {"epoch_data": True}, "accelerate calls EpochTokens.set_epoch in some epochs only"),
        (2, {"epoch_data": True}, ""),  # never calls it
        (2, {"epoch_data": True, "sampler": "epochs"}, "accelerate calls EpochTokens.set_epoch"),
        (2, {"sampler": "weighted"}, "WeightedRandomSampler cannot be repeated"),
    ],
)
def test_an_unchanged_count_may_differ_within_an_epoch(
    world: int,
    case: dict[str, Any],
    words: str,
    reference: Reference,
    resumed: Callable[..., list[Run]],
) -> None:
    """A warning says where stock itself reads other samples; from an epoch's start it does not."""
    case = {"stage": 2, "args": {"save_steps": 4}, **case}
    folder, (full_run, *_) = reference(world, **case)
    for step in (8, 12):
        run, *_ = resumed(folder, world, step, **case)
        exact = step == 8 or not words
        later = {s: samples for s, samples in full_run.samples.items() if s > step}
        assert (run.samples == later) is exact
        assert [words in warning for warning in run.warnings] == ([] if exact else [True])


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "words", "exact"),
    [
        ({"sampler": "seeded"}, "SeededSampler cannot be repeated", {4: True, 8: False, 12: False}),
        (
            {"args": {"accelerator_config": {"use_seedable_sampler": False}}},
            "use_seedable_sampler=True",
            {8: False, 12: False},
        ),
    ],
)
def test_a_sampler_that_seeds_itself_is_exact_in_the_first_epoch(
    case: dict[str, Any],
    words: str,
    exact: dict[int, bool],
    reference: Reference,
    resumed: Callable[..., list[Run]],
) -> None:
    """A new process draws the same order in its first epoch only."""
    case = {"stage": 2, **case, "args": {"save_steps": 4, **case.get("args", {})}}
    folder, (full_run, *_) = reference(2, **case)
    for step, is_exact in exact.items():
        run, *_ = resumed(folder, 2, step, **case)
        rest = range(step + 1, 9 if step < 8 else 17)
        assert all(run.samples[s] == full_run.samples[s] for s in rest) is is_exact
        assert [words in warning for warning in run.warnings] == ([] if is_exact else [True])


@pytest.mark.long
def test_only_the_last_step_of_an_epoch_is_filled_up(
    reference: Reference, resumed: Callable[..., list[Run]]
) -> None:
    """If the data is not a multiple of the global batch, all other steps are exact."""
    folder, (full_run, *_) = reference(stage=2, samples=100)
    run, *_ = resumed(folder, 3, stage=2, samples=100)
    words = "the last step of an epoch is filled up with other samples"
    assert [words in warning for warning in run.warnings] == [True]
    differ = [step for step, samples in run.samples.items() if samples != full_run.samples[step]]
    assert max(run.samples) == max(full_run.samples) == 18
    assert differ == [18]
    assert run.rates == {step: full_run.rates[step] for step in range(11, 19)}


@pytest.mark.parametrize(
    "case",
    [
        {"sampler": "sampled batches"},
        pytest.param({"sampler": "epochs"}, marks=pytest.mark.long),
        pytest.param({"sampler": "batches"}, marks=pytest.mark.long),
        pytest.param({"evaluate": True}, marks=pytest.mark.long),
        pytest.param({"sharded": True}, marks=pytest.mark.long),
        pytest.param({"unequal": True}, marks=pytest.mark.long),
    ],
)
def test_an_exact_resume_causes_no_warning(
    case: dict[str, Any], reference: Reference, resumed: Callable[..., list[Run]]
) -> None:
    """A user's sampler or loader that seeds each epoch; evaluation; samples of any length."""
    if "batches" in case.get("sampler", ""):
        case["samples"] = 84  # 42 batches, which is not a multiple of a step's
    if "evaluate" in case:
        case["args"] = {"eval_strategy": "epoch", "per_device_eval_batch_size": 5}
    folder, (full_run, *_) = reference(stage=2, **case)
    run, *_ = resumed(folder, 3, stage=2, **case)
    assert_continues(run, full_run, range(11, 1 + max(full_run.samples)))
    assert run.warnings == []


def test_a_run_with_another_seed_continues_the_saved_order(
    reference: Reference, resumed: Callable[..., list[Run]]
) -> None:
    """Also of the epochs after this one; a warning names both seeds."""
    folder, (full_run, *_) = reference(stage=2)
    run, *_ = resumed(folder, 3, stage=2, args={"data_seed": 12})
    assert_continues(run, full_run)
    words = ("This run has the seed 12 for", "was saved with 11", "Set data_seed=11")
    assert [all(word in text for word in words) for text in run.warnings] == [True]


@pytest.mark.long
def test_a_shorter_last_step_of_each_epoch_is_exact(
    reference: Reference, resumed: Callable[..., list[Run]]
) -> None:
    """Accumulation does not divide an epoch, but both runs divide it into micro-batches."""
    case: dict[str, Any] = {"stage": 2, "args": {"num_train_epochs": 3}}
    folder, (full_run, *_) = reference(micro=(2, 5), **case)
    run, *_ = resumed(folder, 1, step=5, micro=(2, 10), **case)
    assert_continues(run, full_run, range(6, 16))
    assert [len(full_run.samples[step]) for step in (4, 5, 6)] == [20, 16, 20]
    assert run.warnings == []


@pytest.mark.long
def test_a_rank_whose_random_state_is_lost_draws_like_the_others(
    reference: Reference, hf_ranks: Pools, tmp_path: Path
) -> None:
    """The Trainer deletes older folders while other ranks may still write theirs."""
    folder, _ = reference(stage=2, dropout=0.1)
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    (copy / "checkpoint-10" / "rng_state_1.pth").unlink()
    case = TrainerCase(str(copy), stage=2, resume=str(copy / "checkpoint-10"), dropout=0.1)
    first, second = hf_ranks.run(2, partial(train, case))
    assert first.draws == second.draws


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
def test_random_states_of_former_ranks_are_not_used(
    world: int, reference: Reference, hf_ranks: Pools, tmp_path: Path
) -> None:
    """A folder that fewer ranks save again keeps the files of the others."""
    folder, _ = reference(world=3, stage=2, dropout=0.1)
    copy, clean = tmp_path / "run", tmp_path / "clean"
    shutil.copytree(folder, copy)
    case = TrainerCase(str(copy), stage=2, resume=str(copy / "checkpoint-5"), dropout=0.1)
    hf_ranks.run(world, partial(train, case))
    shutil.copytree(copy / "checkpoint-10", clean / "checkpoint-10")
    written = {1: ["rng_state.pth"], 2: ["rng_state_0.pth", "rng_state_1.pth"]}[world]
    for file in (clean / "checkpoint-10").glob("rng_state*"):
        if file.name not in written:
            file.unlink()
    found = []
    for path in (copy, clean):
        case = replace(case, output_dir=str(path), resume=str(path / "checkpoint-10"))
        found.append([run.draws for run in hf_ranks.run(3, partial(train, case))])
    assert found[0] == found[1]
    assert sorted(found[0][0]) == [*STEPS]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("case", "words"),
    [
        # DeepSpeed would count the samples of a step twice.
        ({"args": {"accelerator_config": {"split_batches": True}}}, "split_batches=True"),
        # Otherwise it is refused at the first save only.
        ({"output_dir": "node:///run"}, "output_dir is node:///run"),
        (
            {"args": {"save_total_limit": 1}, "options": {"async_save": True}},
            "save_total_limit=1: the Trainer would delete the newest complete checkpoint",
        ),
        # The best is kept, so that only one is left for the newest.
        pytest.param(
            {
                "args": {"save_total_limit": 2, "metric_for_best_model": "loss"},
                "options": {"async_save": True},
            },
            "save_total_limit=2 and metric_for_best_model",
            marks=essential,
        ),
    ],
)
def test_arguments_that_lose_state_are_refused(
    case: dict[str, Any], words: str, hf_ranks: Pools, tmp_path: Path
) -> None:
    failures = hf_ranks.run(
        2, partial(failure_of, TrainerCase(**{"output_dir": str(tmp_path), **case}))
    )
    assert all("UnsupportedError" in text and words in text for text in failures)


@pytest.mark.long
@pytest.mark.parametrize(("source", "world"), [("pretrained", 3), ("config", 1)])
def test_models_partitioned_from_the_start_continue(
    source: str, world: int, reference: Reference, resumed: Callable[..., list[Run]]
) -> None:
    """If ZeRO-3 is configured, transformers makes partitioned parameters (zero3_init)."""
    folder, (full_run, *_) = reference(stage=3, zero3_init=source)
    run, *_ = resumed(folder, world, stage=3, zero3_init=source)
    assert_equal(run.first_state, full_run.states[10])
    assert_continues(run, full_run)


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_a_trainer_trains_twice(
    stage: int, reference: Reference, hf_ranks: Pools, tmp_path: Path
) -> None:
    """A second ``train()`` of one Trainer resumes like the first, with its background saves."""
    folder, (full_run, *_) = reference(stage=stage, model_init=True)
    resume = tmp_path / "run" / "checkpoint-10"
    shutil.copytree(folder / "checkpoint-10", resume)
    case = TrainerCase(
        str(tmp_path / "run"),
        stage=stage,
        resume=str(resume),
        model_init=True,
        options={"async_save": True},
    )
    for run in hf_ranks.run(3, partial(train_twice, case))[0]:
        assert_equal(run.first_state, full_run.states[10])
        assert_continues(run, full_run)


@pytest.mark.long
def test_a_fresh_run_after_a_failed_resume_is_fresh(hf_ranks: Pools, tmp_path: Path) -> None:
    args = {"save_steps": 2, "max_steps": 4, "ignore_data_skip": True}
    case = TrainerCase(str(tmp_path), stage=2, stop_at=3, model_init=True, args=args)
    resumed, fresh = hf_ranks.run(2, partial(train_after_stops, case))[0]
    assert "ignore_data_skip" in " ".join(resumed)
    assert not fresh


@pytest.mark.long
@pytest.mark.parametrize("bound", [False, True])
def test_a_trainer_trains_twice_only_with_model_init(
    bound: bool, hf_ranks: Pools, tmp_path: Path
) -> None:
    """Otherwise transformers itself uses an engine that it has freed."""
    case = TrainerCase(str(tmp_path), stage=2, bound=bound, args={"max_steps": 1})
    with pytest.raises(AssertionError, match="'NoneType' object has no attribute 'backward'"):
        hf_ranks.run(2, partial(train_twice, case))


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_the_trials_of_a_sweep_are_elastic(
    stage: int, reference: Reference, hf_ranks: Pools, tmp_path: Path
) -> None:
    """Each trial has its own Accelerator and engine, and its folder resumes on 3 ranks."""
    pytest.importorskip("optuna")
    _, (full_run, *_) = reference(stage=stage, model_init=True)
    case = TrainerCase(str(tmp_path), stage=stage, model_init=True, evaluate=True, state_at=(10,))
    second, *_ = hf_ranks.run(2, partial(search, case))
    assert_equal(second.states[10], full_run.states[10])
    for number in (0, 1):
        trial = tmp_path / f"run-{number}"
        resume = str(trial / "checkpoint-10")
        case = TrainerCase(str(trial), stage=stage, resume=resume, model_init=True)
        run, *_ = hf_ranks.run(3, partial(train, case))
        assert_equal(run.first_state, full_run.states[10])
        assert_continues(run, full_run)


@pytest.mark.long
def test_a_run_with_a_found_batch_size_continues(hf_ranks: Pools, tmp_path: Path) -> None:
    """``auto_find_batch_size`` makes an engine per size; the checkpoint has the final one."""
    args = {"auto_find_batch_size": True}
    case = TrainerCase(str(tmp_path), micro=(4, 3), stage=2, args=args, state_at=(10,))
    full_run, *_ = hf_ranks.run(2, partial(train_out_of_memory, case, 2))
    assert full_run.log[-1] == {"engine": 12}
    resume = str(tmp_path / "checkpoint-10")
    for args in ({}, {"auto_find_batch_size": True}):
        case = TrainerCase(str(tmp_path / "again"), stage=2, resume=resume, args=args)
        run, *_ = hf_ranks.run(3, partial(train, case))
        assert_equal(run.first_state, full_run.states[10])
        assert_continues(run, full_run)


@pytest.mark.long
@pytest.mark.parametrize("gather", [False, True])
def test_a_model_is_saved_once_and_exists(gather: bool, hf_ranks: Pools, tmp_path: Path) -> None:
    """Including ``save_model()`` after ``train()``, for which nothing would wait."""
    zero = {"stage3_gather_16bit_weights_on_model_save": gather}
    case = TrainerCase(
        str(tmp_path),
        args={"max_steps": 5},
        config={"zero_optimization": zero},
        options={"async_save": True},
    )
    saved_in, final = hf_ranks.run(2, partial(saves, case))[0]
    assert saved_in == (["checkpoint-5"] if gather else ["checkpoint-5", "final"])
    assert ("model.safetensors" in final) == gather
    assert ("latest" in final) != gather


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_model_is_saved_again_at_the_same_step(
    asynchronous: bool, hf_ranks: Pools, tmp_path: Path
) -> None:
    """Into the same folder, after its deletion, and with weights that the user has changed."""
    options = {"async_save": asynchronous}
    case = TrainerCase(str(tmp_path), args={"max_steps": 1}, options=options)
    (first, *later), weights = hf_ranks.run(2, partial(save_again, case))[0]
    assert "global_step1" in first
    assert later == [first, first]
    assert torch.equal(weights["saved"], 2 * weights["before"])


@pytest.mark.long
def test_an_upload_waits_for_the_save(hf_ranks: Pools, tmp_path: Path) -> None:
    """With ``push_to_hub``, the Trainer uploads a folder at once."""
    args = {"push_to_hub": True, "hub_strategy": "checkpoint"}
    case = TrainerCase(str(tmp_path), args=args, options={"async_save": True})
    assert hf_ranks.run(2, partial(push, case))[0] == [True] * 4


@pytest.mark.long
def test_a_model_exists_after_a_failure(hf_ranks: Pools, tmp_path: Path) -> None:
    """``save_model()`` after ``train()`` has raised returns when the files exist."""
    case = TrainerCase(str(tmp_path), stop_at=2, options={"async_save": True})
    for final in hf_ranks.run(2, partial(save_after_failure, case)):
        assert "latest" in final


@pytest.mark.long
def test_a_trainer_without_arguments_continues(
    reference: Reference, hf_ranks: Pools, tmp_path: Path
) -> None:
    """A subclass may choose the folder; ``fallback`` then has no folder to replace."""
    folder, (full_run, *_) = reference(stage=2)
    resume = str(folder / "checkpoint-10")
    case = TrainerCase(str(tmp_path), stage=2, resume=resume)
    run, *_ = hf_ranks.run(3, partial(train_by_own_method, case))
    assert_continues(run, full_run)
    case = TrainerCase(str(tmp_path), stage=2, options={"fallback": True})
    with pytest.raises(AssertionError, match=r"NoArguments.train has no resume_from_checkpoint"):
        hf_ranks.run(3, partial(train_by_own_method, case))


@pytest.mark.long
def test_the_folder_may_be_another_argument(reference: Reference, hf_ranks: Pools) -> None:
    folder, (full_run, *_) = reference(stage=2)
    case = TrainerCase(str(folder), stage=2, resume=str(folder / "checkpoint-10"))
    run, *_ = hf_ranks.run(3, partial(train_by_two_arguments, case))
    assert_continues(run, full_run)


@pytest.mark.long
@pytest.mark.parametrize(
    ("event", "path", "removals", "last"),
    [
        ("os.mkdir", "checkpoint-10/.zero-staging", 0, 5),
        ("open", "checkpoint-10/trainer_state.json", 0, 5),
        ("shutil.rmtree", "checkpoint-5", 0, 10),
        ("shutil.rmtree", "checkpoint-5", 1, 10),
        ("shutil.rmtree", "checkpoint-5", 6, 10),
    ],
)
def test_a_kill_leaves_a_complete_folder_of_one(
    event: str,
    path: str,
    removals: int,
    last: int,
    reference: Reference,
    hf_ranks: Pools,
    tmp_path: Path,
) -> None:
    """With ``save_total_limit=1``: in the second save, and before and during the first deletion."""
    _, (full_run, *_) = reference(stage=2)
    args = {"save_total_limit": 1}
    case = TrainerCase(str(tmp_path), stage=2, args=args)
    with pytest.raises(AssertionError, match="died"):
        hf_ranks.run(2, partial(train_until_killed, case, event, path, removals))
    names = sorted(folder.name for folder in tmp_path.glob("checkpoint-*"))
    assert names == ["checkpoint-10", "checkpoint-5"]
    case = TrainerCase(str(tmp_path), stage=2, args=args, resume=True)
    run, *_ = hf_ranks.run(3, partial(train, case))
    assert_continues(run, full_run, range(last + 1, 17))
    assert run.kept[-1] == {"checkpoint-16"}


@pytest.mark.long
def test_a_folder_that_is_saved_again_is_not_mixed(hf_ranks: Pools, tmp_path: Path) -> None:
    """The Trainer has replaced its own files: a kill would leave them with older weights."""
    args = {"save_steps": 2, "max_steps": 4}
    case = TrainerCase(str(tmp_path), stage=2, args=args, options={"async_save": True})
    hf_ranks.run(2, partial(train, case))
    case = replace(case, resume=str(tmp_path / "checkpoint-2"))
    for at_save, in_the_end in hf_ranks.run(2, partial(engine_states_at_saves, case)):
        assert at_save[4] == in_the_end[4]


@pytest.mark.long
def test_a_broken_folder_does_not_replace_a_complete_one(
    reference: Reference, hf_ranks: Pools, tmp_path: Path
) -> None:
    """A kill during a deletion leaves a newer time; ``save_total_limit`` counts such folders."""
    folder, _ = reference(stage=2)
    copy = tmp_path / "run"
    for step in (5, 10):
        shutil.copytree(folder / f"checkpoint-{step}", copy / f"checkpoint-{step}")
    (copy / "checkpoint-5" / "trainer_state.json").unlink()
    now = time.time()
    os.utime(copy / "checkpoint-10", (now - 100, now - 100))
    case = TrainerCase(
        str(copy),
        stage=2,
        resume=True,
        args={"save_total_limit": 2},
        options={"async_save": True},
    )
    run, *_ = hf_ranks.run(3, partial(train, case))
    assert run.kept == [{"checkpoint-10", "checkpoint-15"}, {"checkpoint-15", "checkpoint-16"}]


def test_a_load_leaves_the_order_of_another_runs_folders(
    reference: Reference, hf_ranks: Pools, tmp_path: Path
) -> None:
    """``save_total_limit`` of that run deletes the oldest by time."""
    folder, _ = reference(stage=2)
    times = {path: path.stat().st_mtime_ns for path in folder.glob("checkpoint-*")}
    resume = str(folder / "checkpoint-10")
    case = TrainerCase(str(tmp_path), stage=2, resume=resume, args={"max_steps": 11})
    hf_ranks.run(2, partial(train, case))
    assert {path: path.stat().st_mtime_ns for path in folder.glob("checkpoint-*")} == times


@since_5
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_within_a_step_waits_for_its_end(
    asynchronous: bool, hf_ranks: Pools, tmp_path: Path
) -> None:
    """``enable_jit_checkpoint`` saves after the engine's step and before the Trainer's."""
    args = {"enable_jit_checkpoint": True}
    options = {"async_save": asynchronous}
    case = TrainerCase(str(tmp_path), stage=2, args=args, options=options, preempted_at=3)
    run, *_ = hf_ranks.run(2, partial(train, case))
    assert sorted(run.samples) == [1, 2, 3]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    assert (tmp_path / "checkpoint-3" / "latest").read_text() == "global_step3/checkpoint"
    assert torch.load(tmp_path / "checkpoint-3" / "scheduler.pt")["last_epoch"] == 3


@pytest.mark.long
def test_files_of_different_steps_cause_a_warning(
    reference: Reference, hf_ranks: Pools, tmp_path: Path
) -> None:
    folder, _ = reference(stage=2)
    resume = tmp_path / "checkpoint-10"
    shutil.copytree(folder / "checkpoint-10", resume)
    file = resume / "trainer_state.json"
    state = json.loads(file.read_text())
    file.write_text(json.dumps({**state, "global_step": 9, "epoch": 9 / 8}))
    args = {"max_steps": 10}
    case = TrainerCase(str(tmp_path), stage=2, resume=str(resume), args=args)
    (warning,) = hf_ranks.run(2, partial(train, case))[0].warnings
    assert "has the engine's state of step 10, and the Trainer's of step 9" in warning


@pytest.mark.long
@pytest.mark.parametrize("bound", [False, True])
def test_a_deleted_trainer_is_freed(bound: bool, hf_ranks: Pools, tmp_path: Path) -> None:
    """Its memory does not wait for the garbage collector, like stock."""
    case = TrainerCase(str(tmp_path), stage=2, bound=bound, args={"max_steps": 1})
    assert hf_ranks.run(2, partial(is_freed, case)) == [True, True]
