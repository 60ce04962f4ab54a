"""Step k of an epoch has the same samples on any number of ranks, also after a resume."""

from __future__ import annotations

import pickle
import random
from collections import UserDict
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_elastic_zero.core.grid import RankGrid
from lightning_elastic_zero.data_progress.batches import BatchPlan, plan_batches
from lightning_elastic_zero.data_progress.sampler import (
    ElasticBatchSampler,
    ElasticSampler,
    derive_seed,
    digest_of,
    epoch_order,
)
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.trainer.batches import BatchSettings
from lightning_elastic_zero.trainer.loaders import elastic_loader


def sampler_of(length: int, plan: BatchPlan, rank: int, **options: Any) -> ElasticSampler:
    return ElasticSampler(range(length), plan, rank, **options)


def steps_of(samplers: list[ElasticSampler], epoch: int, first: int = 0) -> list[list[int]]:
    """Return the samples of each step, of all ranks together, from step ``first`` on."""
    of_ranks = []
    for sampler in samplers:
        sampler.set_epoch(epoch)
        if first:
            sampler.start_at(epoch, first)
        of_ranks.append(list(sampler.micro_batches()))
    per_step = samplers[0].plan.accumulate
    counts = {len(batches) for batches in of_ranks}
    assert len(counts) == 1
    return [
        sorted(i for batches in of_ranks for b in batches[k : k + per_step] for i in b)
        for k in range(0, counts.pop(), per_step)
    ]


@given(
    length=st.integers(1, 150),
    size=st.integers(1, 40),
    worlds=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    most=st.integers(1, 8),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_steps_do_not_depend_on_the_world_size(
    *,
    length: int,
    size: int,
    worlds: tuple[int, int],
    most: int,
    epoch: int,
    shuffle: bool,
    drop_last: bool,
    data: st.DataObject,
) -> None:
    if size < max(worlds) * most or (drop_last and length < size):
        return
    found = []
    for world in worlds:
        try:
            plan = plan_batches(size, most, world, allow_uneven=True)
        except UnsupportedError:
            return
        options = {"shuffle": shuffle, "drop_last": drop_last, "seed": 7}
        samplers = [sampler_of(length, plan, rank, **options) for rank in range(world)]
        assert {s.steps for s in samplers} == {length // size if drop_last else -(-length // size)}
        assert sum(map(len, samplers)) == samplers[0].total_size == samplers[0].steps * size
        found.append((samplers, steps_of(samplers, epoch)))
    (_, first), (samplers, second) = found
    assert first == second
    assert all(len(samples) == size for samples in first)
    begin = data.draw(st.integers(0, len(first)))
    assert steps_of(samplers, epoch, begin) == first[begin:]
    assert steps_of(samplers, epoch) == first  # the start applies to the next iteration only
    if not drop_last:
        assert {i for samples in first for i in samples} == set(range(length))


@given(st.integers(1, 100), st.integers(1, 5), st.integers(1, 4), st.integers(0, 3))
def test_the_order_is_torchs_without_padding(
    length: int, world: int, micro: int, epoch: int
) -> None:
    plan = BatchPlan(world * micro, world, 1)
    for rank in range(world):
        own: DistributedSampler[int] = DistributedSampler(range(length), world, rank, seed=3)  # type: ignore[arg-type]
        ours = sampler_of(length, plan, rank, seed=3)
        own.set_epoch(epoch)
        ours.set_epoch(epoch)
        full = length // world
        assert list(islice(ours, full)) == list(islice(own, full))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_users_sampler_gives_all_ranks_one_order(world: int) -> None:
    weights = torch.arange(1.0, 31.0)
    generator = torch.Generator().manual_seed(11)
    for own in (
        WeightedRandomSampler(weights.tolist(), 24),
        WeightedRandomSampler(weights.tolist(), 24, generator=generator),
        SubsetRandomSampler(range(24)),
    ):
        steps = []
        for ranks in (1, world):
            plan = BatchPlan(12, ranks, 1)
            samplers = [sampler_of(30, plan, r, sampler=own) for r in range(ranks)]
            torch.manual_seed(ranks)
            steps.append([steps_of(samplers, epoch) for epoch in (0, 1)])
        assert steps[0] == steps[1]
        assert steps[0][0] != steps[0][1]


def test_impossible_lengths_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="5 samples do not fill one global batch of 8"):
        sampler_of(5, BatchPlan(8, 1, 1), 0, drop_last=True)

    class Short(SubsetRandomSampler):
        def __len__(self) -> int:
            return 9

    sampler = sampler_of(9, BatchPlan(3, 1, 1), 0, sampler=Short(range(8)))
    with pytest.raises(UnsupportedError, match="Short yielded 8 samples, expected its length, 9"):
        list(sampler)


def test_a_start_applies_to_one_epoch_only(caplog: pytest.LogCaptureFixture) -> None:
    sampler = sampler_of(12, BatchPlan(4, 1, 1), 0, shuffle=False)
    for step in (0, 2):
        sampler.start_at(3, step)
        sampler.set_epoch(4)
        assert list(sampler) == list(range(12))
        assert "starts epoch 4 at its first step, because set_epoch(4)" in caplog.text
        caplog.clear()
    sampler.start_at(3, 2)
    assert len(sampler) == 12
    assert list(sampler) == [8, 9, 10, 11]
    assert not caplog.text
    sampler.start_at(3, 3)
    assert list(sampler) == []


class Draws(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(1).item(), random.random(), float(np.random.rand())


def drawn_from(workers: int, **options: Any) -> list[Any]:
    loader = DataLoader(Draws(), num_workers=workers, collate_fn=_as_given, **options)
    unbatched = options.get("batch_size", 1) is None
    return [sample for given in loader for sample in ([given] if unbatched else given)]


def _as_given(samples: Any) -> Any:
    return samples


@pytest.mark.parametrize("plan", [BatchPlan(6, 1, 2), BatchPlan(5, 1, 2)])
def test_random_draws_of_workers_resume_with_any_number_of_workers(plan: BatchPlan) -> None:
    def drawn(workers: int, first: int) -> list[Any]:
        sampler = ElasticSampler(Draws(), plan, 0, seed_workers=True)
        sampler.start_at(1, first)
        return drawn_from(workers, batch_sampler=ElasticBatchSampler(sampler))

    whole = drawn(1, 0)
    assert drawn(2, 0) == whole
    assert drawn(2, 2) == whole[2 * plan.global_batch_size :]
    assert {type(sample[0]) for sample in whole} == {int}
    assert len({sample[1] for sample in whole}) == len(whole)


class Named(Sampler[Any]):
    def __init__(self, kind: Callable[[int], Any]) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[Any]:
        return map(self.kind, torch.randperm(24).tolist())


def _mixed(index: int) -> Any:
    return index if index % 2 else np.int64(index)


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    "kind", [np.int64, torch.tensor, str, lambda index: (index, "crop"), _mixed, np.atleast_1d]
)
@pytest.mark.parametrize("batch_size", [2, None])
def test_workers_get_each_index_as_the_sampler_gave_it(
    kind: Callable[[int], Any], batch_size: int | None
) -> None:
    plan = BatchPlan(4, 1, 4 // (batch_size or 1))

    def drawn(workers: int, first: int) -> list[Any]:
        options: Any = {"sampler": Named(kind), "seed_workers": True}
        sampler = ElasticSampler(Draws(), plan, 0, **options)
        sampler.start_at(1, first)
        return drawn_from(workers, batch_size=batch_size, sampler=sampler)

    whole = drawn(1, 0)
    assert {type(sample[0]) for sample in whole} == {type(kind(index)) for index in (0, 1)}
    rest = whole[2 * plan.global_batch_size :]
    assert repr(drawn(2, 2)) == repr(rest)
    assert len({sample[1] for sample in whole}) == len(whole)


def test_without_workers_a_batch_is_a_list_of_integers() -> None:
    sampler = sampler_of(8, BatchPlan(4, 1, 2), 0, seed_workers=True, shuffle=False)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    batches = list(BatchSampler(sampler, 2, drop_last=False))
    assert batches == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert torch.equal(torch.get_rng_state(), before)
    first = pickle.loads(pickle.dumps(batches[0]))  # noqa: S301 - made here
    assert [type(i) for i in first] == [int, int]
    assert not torch.equal(torch.get_rng_state(), before)


class Holding(SubsetRandomSampler):
    def __init__(self, entropy: int) -> None:
        super().__init__(range(24))
        self.inner = SubsetRandomSampler(range(24), torch.Generator().manual_seed(entropy))
        self.own: list[Any] = [random.Random(entropy), np.random.default_rng(entropy)]
        self.old = np.random.RandomState(entropy)

    def __iter__(self) -> Any:
        first, second = self.own
        order = list(self.inner)
        first.shuffle(order)
        return iter([order[i] for i in second.permutation(self.old.permutation(24))])


@given(st.integers(0, 5), st.integers(0, 9))
def test_generators_that_a_sampler_holds_are_seeded_by_epoch(epoch: int, asked: int) -> None:
    orders = []
    for entropy, times in ((1, 0), (2, asked)):
        sampler = sampler_of(24, BatchPlan(4, 1, 1), 0, sampler=Holding(entropy))
        for before in range(times):
            sampler.set_epoch(before)
            list(sampler)
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
        assert sampler.latest_order() == (epoch, sampler.order_digest(epoch))
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == list(range(24))


class Nested(Sampler[int]):
    def __init__(self) -> None:
        self.deep = {"pair": [[random.Random(5)], [random.Random(5)]]}
        self.me = self

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[int]:
        return iter(own.randrange(1 << 60) for (own,) in self.deep["pair"])


def test_each_nested_generator_has_its_own_seed() -> None:
    orders = [epoch_order(Nested(), 3, epoch, 2) for epoch in (0, 0, 1)]
    assert orders[0] == orders[1]
    assert len({*orders[0], *orders[2]}) == 4


@given(st.integers(0, 9), st.integers(0, 9))
def test_torchs_samplers_are_seeded_by_seed_and_epoch(seed: int, epoch: int) -> None:
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
    expected = list(SubsetRandomSampler(range(24), generator))
    given_one = SubsetRandomSampler(range(24), torch.Generator())
    assert epoch_order(given_one, seed, epoch, 24) == expected
    torch.default_generator.manual_seed(derive_seed(seed, epoch))
    expected = list(SubsetRandomSampler(range(24)))
    assert epoch_order(SubsetRandomSampler(range(24)), seed, epoch, 24) == expected


def test_set_epoch_is_called() -> None:
    own: DistributedSampler[int] = DistributedSampler(range(9), 1, 0)  # type: ignore[arg-type]
    orders = [epoch_order(own, 3, epoch, 9) for epoch in (0, 1, 0)]
    own.set_epoch(1)
    assert orders[0] == orders[2] != orders[1] == list(own)


def test_digests_of_different_orders_differ() -> None:
    assert digest_of([3, 1, 2]) == digest_of(torch.tensor([3, 1, 2])) != digest_of([1, 2, 3])
    assert digest_of(["a", ("b", 1)]) == digest_of(["a", ("b", 1)]) != digest_of(["a", ("b", 2)])
    assert digest_of([1 << 70]) == digest_of([1 << 70])
    assert digest_of([1.5, 2]) != digest_of([1, 2])
    assert digest_of([1, "a"]) == digest_of([1, "a"]) != ""
    assert digest_of([Path("a")]) == digest_of([Path("a")]) != digest_of([Path("b")])
    assert digest_of([{"a": 1, "b": 2}]) == digest_of([{"b": 2, "a": 1}]) != digest_of([{"a": 1}])
    assert digest_of([object()]) == digest_of([("a", object())]) == digest_of([{0, 8}]) == ""
    endless: list[Any] = []
    endless.append(endless)
    assert digest_of([endless]) == ""


@given(st.lists(st.integers(-(1 << 40), 1 << 40), min_size=1, max_size=20))
def test_a_digest_does_not_depend_on_the_type_of_index(order: list[int]) -> None:
    kinds: list[list[Any]] = [
        [np.int64(index) for index in order],
        [torch.tensor(index) for index in order],
        [np.array(index) for index in order],
        [(int, np.int64, torch.tensor)[place % 3](index) for place, index in enumerate(order)],
    ]
    for kind in kinds:
        assert digest_of(kind) == digest_of(order) != digest_of([*order, 0])
        assert digest_of([tuple(kind)]) == digest_of([tuple(order)]) != digest_of([(*order, 0)])
        assert digest_of([{"at": (kind, "x")}]) == digest_of([{"at": (order, "x")}])
    for whole in (np.array(order), torch.tensor(order), tuple(order)):
        assert digest_of([whole]) == digest_of([order])


class _OfAll(Sampler[int]):
    def __init__(self) -> None:
        self.rng = np.random.mtrand._rand
        self.generator = torch.default_generator

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[int]:
        return iter(int(index) for index in self.rng.permutation(9))


def test_the_generators_of_the_process_are_not_changed() -> None:
    before = np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    of_python = random.getstate()
    orders = [epoch_order(_OfAll(), 3, epoch, 9) for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert np.random.get_state()[1].tolist() == before[0]  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert random.getstate() == of_python


class Lookups(UserDict[int, int]):
    reads = 0

    def __getitem__(self, key: int) -> int:
        self.reads += 1
        return super().__getitem__(key)


def test_a_data_set_in_a_sampler_is_not_read() -> None:
    own = SubsetRandomSampler(range(8))
    data = Lookups({index: index for index in range(8)})
    vars(own)["data"] = data
    list(sampler_of(8, BatchPlan(4, 1, 1), 0, sampler=own))
    assert data.reads == 0


class Asked(SubsetRandomSampler):
    asked = 0

    def __iter__(self) -> Iterator[Any]:
        self.asked += 1
        return map(str, super().__iter__())


def test_a_users_sampler_is_iterated_once_per_epoch() -> None:
    own = Asked(range(8))
    sampler = sampler_of(8, BatchPlan(4, 1, 1), 0, sampler=own)
    sampler.start_at(0, 2)
    assert list(sampler) == []
    assert sampler.latest_order() is None
    assert own.asked == 0
    order = list(sampler)
    assert sampler.order_digest(0) == digest_of(order) == sampler.order_digest(0)
    assert sampler.latest_order() == (0, digest_of(order))
    assert list(sampler) == order
    assert own.asked == 1


def test_a_fingerprint_lists_the_inputs_of_the_order() -> None:
    plan = BatchPlan(4, 1, 1)
    assert sampler_of(8, plan, 0, seed=3).describe() == {
        "order": "torch.randperm",
        "sampler": "",
        "seed": 3,
        "dataset_length": 8,
        "last_batch": "filled up",
    }
    other = sampler_of(9, plan, 0, shuffle=False, drop_last=True, sampler=Asked(range(6)))
    assert other.state_dict() == {
        "order": "sequential",
        "sampler": "Asked",
        "seed": 0,
        "dataset_length": 6,
        "last_batch": "dropped",
    }


def test_samples_that_are_not_indices_are_unchanged() -> None:
    sampler = sampler_of(2, BatchPlan(2, 1, 2), 0, sampler=Asked(range(2)))
    batches = ElasticBatchSampler(sampler)
    assert sorted(map(tuple, batches)) == [("0",), ("1",)]
    assert (batches.sampler, batches.batch_size, batches.drop_last) == (sampler, 1, False)
    assert len(batches) == 2
    single = sampler_of(2, BatchPlan(2, 1, 2), 0, shuffle=False, seed_workers=True)
    assert list(single.micro_batches()) == [[0], [1]]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_users_loader_is_not_changed(*, persistent: bool) -> None:
    shared: DistributedSampler[Any] = DistributedSampler(range(24), 2, 0)  # type: ignore[arg-type]
    loader: DataLoader[Any] = DataLoader(
        range(24),  # type: ignore[arg-type]
        batch_size=6,
        sampler=shared,
        generator=torch.Generator(),
        num_workers=int(persistent),
        persistent_workers=persistent,
        drop_last=True,
    )
    before, of_sampler = dict(vars(loader)), dict(vars(shared))
    made: Any = elastic_loader(
        loader, BatchSettings(6, BatchPlan(12, 2, 2), RankGrid(2), 2), 0, seed=3
    )
    assert isinstance(made.sampler, ElasticSampler)
    assert made.batch_size == 3
    assert vars(loader) == before
    assert vars(shared) == of_sampler
    assert vars(loader.batch_sampler) == {"sampler": shared, "batch_size": 6, "drop_last": True}
