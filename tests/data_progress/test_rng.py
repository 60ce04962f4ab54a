"""Random number streams continue at their saved positions, or start from seeds of their own."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_elastic_zero.data_progress.sampler import (
    collect_rng_states,
    derive_seed,
    isolate_rng,
    seed_host_rng,
    seed_rng_streams,
    set_rng_states,
)

SEEDS = st.integers(0, 2**63 - 1)


def drawn() -> list[float]:
    """Draw from each generator of the process; normal numbers are generated in pairs."""
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.standard_normal(),
        torch.rand(1).item(),
    ]


@given(SEEDS, st.integers(0, 3), st.sampled_from([None, torch.device("cpu")]))
def test_streams_continue_where_they_were(
    seed: int, before: int, device: torch.device | None
) -> None:
    seed_host_rng(seed)
    for _ in range(before):
        drawn()
    state = collect_rng_states(device)
    assert state.keys() == {"python", "numpy", "torch"}
    expected = [drawn() for _ in range(3)]
    set_rng_states(state, device)
    assert [drawn() for _ in range(3)] == expected


@given(SEEDS, st.sets(st.sampled_from(["python", "numpy", "torch"])))
def test_a_stream_that_was_not_kept_is_unchanged(seed: int, kept: set[str]) -> None:
    seed_host_rng(seed)
    state = collect_rng_states()
    first, second = drawn(), drawn()
    seed_host_rng(seed)
    drawn()
    set_rng_states({name: state[name] for name in kept})
    places = {"python": (0, 1), "numpy": (2, 3), "torch": (4,)}
    found = drawn()
    for name, indices in places.items():
        expected = first if name in kept else second
        assert [found[i] for i in indices] == [expected[i] for i in indices]


def test_isolated_draws_do_not_change_the_streams() -> None:
    state = collect_rng_states()
    expected = drawn()
    set_rng_states(state)
    with pytest.raises(ValueError, match="not in list"), isolate_rng():
        drawn().index(-99.0)
    assert drawn() == expected


@given(SEEDS, st.integers(0, 10**6), st.integers(0, 10**4))
def test_a_new_rank_draws_the_same_in_each_resume(seed: int, step: int, rank: int) -> None:
    found = []
    for numbers in ((seed, step, rank), (seed + 1, step, rank), (seed, step + 1, rank)):
        seed_rng_streams(*numbers)
        found.append(drawn())
    seed_rng_streams(seed, step, rank + 1)
    found.append(drawn())
    seed_rng_streams(seed, step, rank)
    assert drawn() == found[0]
    for streams in zip(*found, strict=True):
        assert len(set(streams)) == len(streams)


def test_similar_numbers_give_different_seeds() -> None:
    seeds = [derive_seed(*numbers) for n in (1, 2, 3) for numbers in product(range(12), repeat=n)]
    assert len(set(seeds)) == len(seeds)
    counts = [sum(seed >> bit & 1 for seed in seeds) for bit in range(64)]
    assert counts.pop() == 0
    assert all(0.4 < count / len(seeds) < 0.6 for count in counts)


@given(SEEDS)
def test_each_library_seeds_its_own_generator(seed: int) -> None:
    seed_host_rng(seed)
    assert random.random() == random.Random(seed).random()
    assert np.random.rand() == np.random.RandomState(seed % 2**32).rand()
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.gpu
def test_a_devices_stream_is_kept_and_seeded() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    seed_rng_streams(1, 2, 3)
    state = collect_rng_states(device)
    assert state.keys() == {"python", "numpy", "torch", "cuda"}
    first, second = (torch.rand(4, device=device).tolist() for _ in range(2))
    assert first != second
    set_rng_states(state, device)
    assert torch.rand(4, device=device).tolist() == first
    del state["cuda"]
    set_rng_states(state, device)
    assert torch.rand(4, device=device).tolist() == second
    seed_rng_streams(1, 2, 3)
    assert torch.rand(4, device=device).tolist() == first
