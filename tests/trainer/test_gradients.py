"""The gradient of a step is the mean over its global batch, for any split of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed import zero
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from typing_extensions import override

from tests.support.fits import elastic, quiet_trainer
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine

WIDTH, RATE = 4, 0.1


def data(length: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(length, WIDTH, generator=generator))


class LinearNet(pl.LightningModule):
    """A linear model, whose weights after SGD steps reveal the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, 1, bias=False)
        nn.init.ones_(self.line.weight)
        self.counted: list[tuple[int, int]] = []

    @override
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.as_tensor(self.line(batch[0]).square().mean())

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE)

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        engine = self.trainer.strategy.deepspeed_engine  # type: ignore[attr-defined]
        self.counted.append((self.trainer.global_step, engine.global_steps))


def expected(length: int, size: int) -> list[float]:
    """Compute the same steps directly, in the order of torch's `DistributedSampler` with seed 0."""
    order = torch.randperm(length, generator=torch.Generator().manual_seed(0))
    samples = data(length).tensors[0][order]
    weight = torch.ones(WIDTH)
    for step in range(-(-length // size)):
        indices = torch.arange(step * size, (step + 1) * size) % length
        x = samples[indices]
        weight = weight - RATE * (2 * (x @ weight)[:, None] * x).mean(0)
    return weight.tolist()


class Stream(IterableDataset[Any]):
    """The same samples without a length; each rank has all of them."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        samples = data(self.length)
        yield from (samples[index] for index in range(self.length))


def trained(
    stage: int,
    length: int,
    batch_size: int,
    options: dict[str, Any],
    *,
    is_stream: bool = False,
    **trainer: Any,
) -> tuple[list[float], list[tuple[int, int]]]:
    """Fit one epoch; return the weights, and Lightning's and DeepSpeed's counts of steps."""
    fitter = quiet_trainer(elastic(stage=stage, **options), **{"max_epochs": 1, **trainer})
    module = LinearNet()
    pl.seed_everything(0, verbose=False)
    loader: DataLoader[Any] = DataLoader(data(length), batch_size=batch_size, shuffle=True)
    if is_stream:
        loader = DataLoader(Stream(length), batch_size=batch_size)
    fitter.fit(module, loader)
    with zero.GatheredParameters(list(module.parameters())):
        weight = module.line.weight.detach().flatten().tolist()
    return weight, module.counted


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("size", "micro"), [(12, 12), (12, 2), (12, 1), (11, 2), (9, 3)])
def test_sgd_takes_the_step_of_the_global_batch(
    world: int, stage: int, size: int, micro: int, worlds: Pools
) -> None:
    """For micro-batches of equal or different sizes, and any accumulation."""
    options = {"global_batch_size": size, "allow_uneven_batches": True}
    for weight, _ in worlds.run(world, partial(trained, stage, 24, micro, options)):
        assert weight == pytest.approx(expected(24, size), abs=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_accumulation_does_not_scale_gradients(accumulate: int, worlds: Pools) -> None:
    """Also without a global batch; Lightning's strategy scales by 1/2 and 1/4 for 2 and 4."""
    fit = partial(trained, 2, 24, 4 // accumulate, {}, accumulate_grad_batches=accumulate)
    for weight, _ in worlds.run(2, fit):
        assert weight == pytest.approx(expected(24, 8), abs=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("length", [9, 15])
def test_lightning_and_deepspeed_count_the_same_steps(
    stage: int, length: int, worlds: Pools
) -> None:
    """Also over epochs whose number of batches is not a multiple of the accumulation."""
    fit = partial(trained, stage, length, 1, {}, accumulate_grad_batches=4, max_epochs=3)
    for _, counted in worlds.run(2, fit):
        assert counted
        assert all(lightning == deepspeed for lightning, deepspeed in counted)
        steps = -(-length // 8)
        assert counted[-1] == (3 * steps, 3 * steps)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_users_loader_ends_its_epochs_with_a_step(stage: int, worlds: Pools) -> None:
    """Seven batches in windows of two; the last step has one batch."""
    fit = partial(
        trained,
        stage,
        7,
        1,
        {},
        accumulate_grad_batches=2,
        max_epochs=3,
        use_distributed_sampler=False,
    )
    for _, counted in worlds.run(2, fit):
        assert counted[-1] == (12, 12)
        assert all(lightning == deepspeed for lightning, deepspeed in counted)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_epoch_without_a_length_ends_with_a_step(stage: int, worlds: Pools) -> None:
    """Seven batches in windows of two: the fourth step has one batch, and no gradient remains.

    This batch has weight 1/2, as in Lightning with other strategies.
    """
    options = {"accumulate_grad_batches": 2, "max_epochs": 1}
    fit = partial(trained, stage, 7, 1, {}, is_stream=True, **options)
    (weight, counted), _ = worlds.run(2, fit)
    assert counted[-1] == (4, 4)
    expected = torch.ones(WIDTH)
    for samples in torch.split(data(7).tensors[0], 2):
        gradient = (2 * (samples @ expected)[:, None] * samples).sum(0) / 2
        expected = expected - RATE * gradient
    assert weight == pytest.approx(expected.tolist(), abs=1e-5)
    _, counted = worlds.run(2, partial(fit, max_epochs=3))[0]
    assert all(lightning == deepspeed for lightning, deepspeed in counted)
    assert counted[-1] == (12, 12)
