"""Runs with tensor parallelism continue exactly, on any number of tensor and data ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.ranks import Pools

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from lightning_elastic_zero.integrations.accelerators import take_device_state
from tests.integrations._hf_programs import Run
from tests.integrations._sequence_programs import (
    EVALUATED,
    Results,
    SharedCase,
    loop_shared,
    losses_of_noisy,
    predicted_by,
    refused_cuts,
    refused_trainers,
    train_shared,
    use_shared,
)

pytestmark = pytest.mark.engine

Layout = tuple[int, int, tuple[int, int]]
"""Tensor ranks, data ranks, (micro-batch, accumulation). A step has 12 samples, an epoch two."""

ALONE: Layout = (1, 1, (2, 6))
UNCUT: Layout = (1, 2, (2, 3))
THREE: Layout = (1, 3, (2, 2))
CUT: Layout = (2, 1, (3, 4))
CUT_IN_FOUR: Layout = (4, 1, (2, 6))
TWO_BY_TWO: Layout = (2, 2, (2, 3))


def case_of(layout: Layout, folder: Path, **case: Any) -> SharedCase:
    described = {"samples": 24, "stage": 2, "tensor": layout[0], "micro": layout[2], **case}
    return SharedCase(str(folder), **described)


def fit(hf_ranks: Pools, layout: Layout, folder: Path, **case: Any) -> list[Run]:
    """Return what each rank has observed in a run of the Trainer."""
    program = partial(train_shared, case_of(layout, folder, **case))
    runs: list[Run] = hf_ranks.run(layout[0] * layout[1], program)
    return runs


def assert_continues(run: Run, wanted: Run, last: int) -> None:
    """Assert that a run went on after a step with the whole run's state, samples and rates."""
    assert run.first_state.keys() == wanted.states[last].keys()
    for name, tensor in wanted.states[last].items():
        assert torch.equal(run.first_state[name], tensor), name
    steps = range(last + 1, 5)
    assert run.samples == {step: wanted.samples[step] for step in steps}
    assert run.rates == {step: wanted.rates[step] for step in steps}
    for step, loss in run.losses.items():
        assert loss == pytest.approx(wanted.losses[step], rel=1e-4), step
    assert run.warnings == []


def check_trainer(
    source: Layout, target: Layout, last: int, hf_ranks: Pools, folder: Path, stage: int
) -> None:
    saved = fit(hf_ranks, source, folder, state_at=(last,))
    resume = str(folder / f"checkpoint-{last}")
    runs = fit(hf_ranks, target, folder, resume=resume, stage=stage)
    assert_continues(runs[0], saved[0], last)
    seen = [each.log[-2]["num_input_tokens_seen"] for each in (runs[0], saved[0])]
    assert seen[0] == seen[1] == 48 * 8
    assert f"on {target[0] * target[1]} device" in runs[0].shown
    assert "12 samples per step" in runs[0].shown
    for rank, run in enumerate(runs):  # The data ranks of a run draw different counts.
        data_rank = rank // target[0]
        assert run.draws == runs[data_rank * target[0]].draws
        if data_rank < source[1]:
            drawn = saved[data_rank * source[0]].draws
            assert run.draws == {step: drawn[step] for step in range(last + 1, 5)}


def test_the_trainer_continues_on_tensor_ranks(hf_ranks: Pools, tmp_path: Path) -> None:
    check_trainer(UNCUT, CUT, 3, hf_ranks, tmp_path, 1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "target", "last", "stage"),
    [
        (CUT, UNCUT, 1, 2),
        (TWO_BY_TWO, UNCUT, 3, 2),
        (UNCUT, TWO_BY_TWO, 2, 1),
        (TWO_BY_TWO, CUT_IN_FOUR, 1, 2),
        (CUT_IN_FOUR, THREE, 3, 3),
        (THREE, TWO_BY_TWO, 3, 3),
        (TWO_BY_TWO, TWO_BY_TWO, 3, 2),
        (CUT, ALONE, 2, 1),
    ],
)
def test_the_trainer_continues_on_another_grid(
    source: Layout, target: Layout, last: int, stage: int, hf_ranks: Pools, tmp_path: Path
) -> None:
    check_trainer(source, target, last, hf_ranks, tmp_path, stage)


@pytest.mark.long
def test_a_run_without_this_library_continues(hf_ranks: Pools, tmp_path: Path) -> None:
    saved = fit(hf_ranks, CUT, tmp_path / "stock", bound=False, state_at=(3,))
    resume = str(tmp_path / "stock" / "checkpoint-3")
    runs = fit(hf_ranks, UNCUT, tmp_path / "elastic", resume=resume)
    assert_continues(runs[0], saved[0], 3)


def check_accelerate(
    source: Layout, target: Layout, last: int, hf_ranks: Pools, folder: Path
) -> None:
    saves = case_of(source, folder, state_at=(last,))
    loads = case_of(target, folder, resume=f"{folder}/step_{last}")
    wanted = hf_ranks.run(source[0] * source[1], partial(loop_shared, saves))[0]
    run = hf_ranks.run(target[0] * target[1], partial(loop_shared, loads, last))[0]
    assert_continues(run, wanted, last)


def test_accelerate_continues_on_data_ranks(hf_ranks: Pools, tmp_path: Path) -> None:
    check_accelerate(CUT, UNCUT, 3, hf_ranks, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "target", "last"),
    [(UNCUT, CUT, 1), (TWO_BY_TWO, ALONE, 3), (CUT, TWO_BY_TWO, 2), (TWO_BY_TWO, THREE, 1)],
)
def test_accelerate_continues_on_another_grid(
    source: Layout, target: Layout, last: int, hf_ranks: Pools, tmp_path: Path
) -> None:
    check_accelerate(source, target, last, hf_ranks, tmp_path)


GATHERS = {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}}
"""Whether ``save_model`` writes whole weights, in each stage with tensor parallelism."""


def results_of(hf_ranks: Pools, layout: Layout, folder: Path, **case: Any) -> Results:
    """Return the results of a run of two steps, of which the first has the best evaluation."""
    args = {
        "max_steps": 2,
        "per_device_eval_batch_size": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "greater_is_better": True,
        "label_names": ["labels"],
    }
    described = case_of(layout, folder, state_at=(1,), args=args, config=GATHERS, **case)
    results: Results = hf_ranks.run(layout[0] * layout[1], partial(use_shared, described))[0]
    return results


@pytest.mark.parametrize("layout", [CUT, pytest.param(TWO_BY_TWO, marks=pytest.mark.long)])
@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.long)])
def test_results_are_those_of_data_ranks(
    layout: Layout, stage: int, hf_ranks: Pools, tmp_path: Path
) -> None:
    """Each sample is predicted once, the best model is loaded, and saved whole."""
    found = results_of(hf_ranks, layout, tmp_path, stage=stage)
    assert found.predicted == list(range(EVALUATED))
    best = {n: v for n, v in found.run.states[1].items() if n.endswith("/master")}
    assert {f"{name}/master" for name in found.weights} == best.keys()
    written = load_file(tmp_path / "final" / "model.safetensors")
    for name, weight in found.weights.items():
        assert torch.equal(weight, best[f"{name}/master"]), name
        assert torch.equal(written[name], weight), name
    assert torch.equal(written.pop("kept"), torch.arange(3.0))
    assert written.keys() == found.weights.keys()


@pytest.mark.long
def test_steps_reach_weights_that_were_gathered(hf_ranks: Pools, tmp_path: Path) -> None:
    """BF16_Optimizer never makes weights views of its flat buffers again."""
    args = {"max_steps": 2, "bf16": True, "use_cpu": True, "label_names": ["labels"]}
    config = {**GATHERS, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    case = case_of(CUT, tmp_path, stage=1, args=args, config=config)
    found = hf_ranks.run(2, partial(use_shared, case))[0]
    written = load_file(tmp_path / "final" / "model.safetensors")
    for name, master in found.weights.items():
        assert torch.equal(written[name], master.bfloat16()), name


@pytest.mark.long
def test_a_seq2seq_trainer_predicts_each_sample_once(hf_ranks: Pools, tmp_path: Path) -> None:
    args = {"max_steps": 1, "save_strategy": "no", "per_device_eval_batch_size": 2}
    case = case_of(TWO_BY_TWO, tmp_path, args={**args, "label_names": ["labels"]}, seq2seq=True)
    fills_the_last_batch = 0
    wanted = [*range(EVALUATED), fills_the_last_batch]
    assert hf_ranks.run(4, partial(predicted_by, case)) == [wanted] * 4


@pytest.mark.long
def test_an_evaluation_loss_does_not_depend_on_tensor_ranks(
    hf_ranks: Pools, tmp_path: Path
) -> None:
    losses = [results_of(hf_ranks, layout, tmp_path / str(layout)).loss for layout in (ALONE, CUT)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_rank_takes_the_random_state_of_the_device_that_the_saved_rank_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, taken = tmp_path / "states", dict[torch.device, int]()
    torch.save({"cuda": [torch.tensor(device) for device in range(4)]}, file)
    stub = SimpleNamespace(set_rng_state=lambda state, device: taken.update({device: int(state)}))
    monkeypatch.setattr(torch, "get_device_module", lambda _: stub)
    one = torch.device("cuda", 1)
    for rank, devices, is_own, wanted in (
        (6, 4, False, {one: 2}),
        (6, 4, True, {}),  # transformers and accelerate have restored that of cuda:1
        (6, 8, True, {one: 2}),
    ):
        stub.device_count = lambda devices=devices: devices
        take_device_state(file, "cuda", rank, one, is_own=is_own)
        take_device_state(file, "cuda", 0, torch.device("cpu"), is_own=is_own)
        take_device_state(file, "xpu", 0, torch.device("xpu", 0), is_own=is_own)
        assert taken == wanted
        taken.clear()


def test_runs_whose_samples_would_be_wrong_are_refused(hf_ranks: Pools) -> None:
    reasons = (
        *["with a DataLoader whose batches rank 0 reads for all"] * 3,
        "with split_batches=True",
        "together with sequence parallelism (sp_size=2)",
        "does not divide the number of ranks, 2",
        "in ZeRO-3 with train_batch_size = 4",
    )
    for errors in hf_ranks.run(2, refused_cuts):
        for error, reason in zip(errors, reasons, strict=True):
            assert error.startswith("UnsupportedError: tensor_parallel.autotp_size = ")
            assert reason in error


@pytest.mark.long
def test_trainers_that_count_all_ranks_are_refused(hf_ranks: Pools, tmp_path: Path) -> None:
    reasons = (
        "transformers 5.18.1, whose Trainer",
        "'batch_rebalance', which gives each tensor rank",
        "the number of tensor ranks for 1: pass",
    )
    for errors in hf_ranks.run(2, partial(refused_trainers, case_of(CUT, tmp_path))):
        for error, reason in zip(errors, reasons, strict=True):
            assert reason in error


@pytest.mark.long
def test_workers_change_the_samples_of_tensor_ranks_equally(
    hf_ranks: Pools, tmp_path: Path
) -> None:
    """DeepSpeed compares the first batch, and fails otherwise."""
    args = {"max_steps": 1, "dataloader_num_workers": 1, "save_strategy": "no"}
    losses = hf_ranks.run(4, partial(losses_of_noisy, case_of(TWO_BY_TWO, tmp_path, args=args)))
    assert list(losses[0]) == [1]
