"""Differences between a Trainer's runs that are found without training."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerControl

from lightning_elastic_zero.integrations.differences import (
    _epoch_differences,
    _generation_differences,
    _ignores_count,
    _sequence_differences,
    _warn_if_counted,
    _watch_evaluation,
    length_of,
)
from tests.integrations._hf_programs import Stream


class Ignores(Trainer):
    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        return super().compute_loss(model, inputs, return_outputs)


class Mean(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return 1.0


class PassesOn(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(model, inputs, *args, **kwargs)


class Divides(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(**inputs).loss / self.args.gradient_accumulation_steps


class Uses(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return model(**inputs, num_items=num_items_in_batch).loss


@pytest.mark.parametrize(
    ("cls", "ignores"),
    [(Trainer, False), (Ignores, True), (PassesOn, False), (Divides, False), (Uses, False)],
)
def test_a_loss_that_ignores_the_number_of_labels_is_found(
    cls: type[Trainer], ignores: bool
) -> None:
    """Unless it is divided by the accumulation, or passes all arguments on."""
    assert _ignores_count(cls.compute_loss) is ignores
    decorated = functools.wraps(cls.compute_loss)(lambda *args, **kwargs: None)
    assert _ignores_count(decorated) is ignores
    assert not _ignores_count(len)


@pytest.mark.parametrize("count", [None, 8])
def test_a_loss_that_the_trainer_divides_causes_no_warning(
    count: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """It divides the loss of batches without labels, such as pairs of sentences."""
    trainer: Any = object.__new__(Mean)
    trainer.is_world_process_zero = lambda: True
    _warn_if_counted(trainer, "gradients change")
    for _ in range(2):
        assert trainer.compute_loss(None, None, num_items_in_batch=count) == 1.0
    assert caplog.messages == ["gradients change"] * (count is not None)


@pytest.mark.parametrize("cls", [Trainer, PassesOn])
def test_a_users_loss_is_not_computed_twice(cls: type[Trainer]) -> None:
    """It may record metrics, as TRL's do."""
    args = SimpleNamespace(metric_for_best_model="eval_loss", average_tokens_across_devices=True)
    trainer: Any = object.__new__(cls)
    trainer.args, trainer.state = args, SimpleNamespace(best_metric=1.0)
    trainer.model_accepts_loss_kwargs, trainer.compute_loss_func = True, None
    loaded: Any = None
    _watch_evaluation(trainer, loaded)
    assert ("compute_loss" in vars(trainer)) is (cls is Trainer)


@pytest.mark.parametrize(
    ("passes", "step", "warns"), [(1, 4, False), (1, 5, True), (2, 6, True), (2, 8, False)]
)
def test_a_save_within_a_generation_of_trl_is_found(passes: int, step: int, warns: bool) -> None:
    """Two steps use one generation, each ``num_iterations`` times."""
    args = SimpleNamespace(
        steps_per_generation=6, num_iterations=passes, gradient_accumulation_steps=3
    )
    found = [*_generation_differences(args, SimpleNamespace(global_step=step))]
    assert [f"Set save_steps to a multiple of {2 * passes}" in text for text in found] == (
        [True] if warns else []
    )


def test_a_reference_model_that_has_moved_is_named() -> None:
    args = SimpleNamespace(sync_ref_model=True, ref_model_sync_steps=8)
    found = [[*_generation_differences(args, SimpleNamespace(global_step=n))] for n in (7, 8)]
    assert not found[0]
    assert "does not save the reference model" in found[1][0]


@pytest.mark.parametrize(
    ("batches", "accumulate", "step", "epoch", "warns"),
    [
        (24, 3, 12, 1.5, False),
        (24, 3, 16, 2.0, False),
        (25, 3, 9, 1.0, False),  # the last step has one batch
        (25, 3, 10, 1 + 3 / 25, False),
        (26, 3, 10, 1 + 2 / 25, False),  # on another number of ranks
        (73, 8, 9, 0.9, False),  # likewise: 10 steps of 289 samples, 9 of them with 32
        (24, 3, 12, 1.625, True),
        (32, 3, 12, 1.5, True),  # the data has grown
    ],
)
def test_an_epoch_with_another_number_of_steps_is_found(
    batches: int, accumulate: int, step: int, epoch: float, warns: bool
) -> None:
    """The Trainer computes its position from the number of steps."""
    args = SimpleNamespace(gradient_accumulation_steps=accumulate)
    state = SimpleNamespace(global_step=step, epoch=epoch, stateful_callbacks={})
    found = [*_epoch_differences(args, state, range(batches))]
    assert ["the Trainer resumes at epoch" in text for text in found] == [True] * warns


def test_a_save_at_the_end_of_a_shortened_epoch_is_found() -> None:
    """The resume continues the epoch that a callback has ended."""
    args = SimpleNamespace(gradient_accumulation_steps=3)
    control = TrainerControl(should_epoch_stop=True)
    for epoch, step in ((0.5, 4), (1.0, 8)):  # at an epoch's end, nothing is left
        state = SimpleNamespace(
            global_step=step, epoch=epoch, stateful_callbacks={"TrainerControl": control.state()}
        )
        found = [*_epoch_differences(args, state, range(24))]
        assert ["(should_epoch_stop): the resume continues it" in t for t in found] == (
            [True] if epoch < 1 else []
        )


def test_a_length_may_be_unknown() -> None:
    """Samplers may be of a class with ``__len__``, which then fails."""
    stream = DataLoader(Stream(8), batch_size=2)
    unsized: Any = BatchSamplerShard(iter([[0, 1]]), 2)
    for value in (None, stream, stream.batch_sampler, unsized, SkipBatchSampler(unsized, 1)):
        assert length_of(value) == 0
    assert length_of(DataLoader(range(8), batch_size=2)) == 4  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stage", "zero", "found"),
    [
        (2, {"reduce_scatter": False}, ["gradients by 1 instead of 4"]),
        (3, {}, []),
        (3, {"reduce_scatter": False, "contiguous_gradients": False}, []),
        (3, {"reduce_scatter": False}, ["up to reduce_bucket_size elements by sp_size"]),
    ],
)
def test_the_factor_of_gradients_depends_on_their_reduction(
    stage: int, zero: dict[str, bool], found: list[str]
) -> None:
    """ZeRO-3 without reduce_scatter has one factor for small and one for large parameters."""
    progress = SimpleNamespace(global_steps=0)
    manifest = SimpleNamespace(stage=stage, progress=progress)
    loaded: Any = SimpleNamespace(
        sequence_ranks=4, accumulate=1, result=SimpleNamespace(manifest=manifest)
    )
    config = {"zero_optimization": {"stage": stage, **zero}}
    accelerator = SimpleNamespace(
        parallelism_config=None,
        num_processes=4,
        deepspeed_plugin=SimpleNamespace(zero_stage=stage, deepspeed_config=config),
    )
    texts = [*_sequence_differences(loaded, accelerator)]
    assert len(texts) == len(found)
    assert all(part in text for part, text in zip(found, texts, strict=True))
