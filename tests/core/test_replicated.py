"""Stage 0: what every rank has is written in slices, and put back whole, whatever its shape."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_elastic_zero.checkpoint.background import CopyPlan
from lightning_elastic_zero.checkpoint.save import ShardContents
from lightning_elastic_zero.core.manifest import Group, Manifest
from lightning_elastic_zero.core.tensors import FlatState, RankState, bit_sums, state_key
from lightning_elastic_zero.engine.addresses import flat_buffer_row, own_slices, rank_fragments
from lightning_elastic_zero.engine.buffers import PLAIN, live_flat_buffers
from lightning_elastic_zero.engine.optimizer import split_state
from lightning_elastic_zero.engine.restore import (
    allocate_states,
    commit_masters,
    commit_state,
    flat_target,
)
from lightning_elastic_zero.errors import UnsupportedError


class Odd(nn.Module):
    """Weights that lie in another order than that of their elements, and one without dimensions."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.scale = nn.Parameter(torch.randn(()))
        self.unused = nn.Parameter(torch.empty(0))

    def step(self, optimizer: torch.optim.Optimizer, count: int) -> None:
        """Train."""
        for index in range(count):
            torch.manual_seed(index)
            loss = self.conv(torch.randn(2, 3, 4, 4)).mul(self.scale).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def held_by(
    module: Odd, optimizer: torch.optim.Optimizer, world_size: int
) -> tuple[Manifest, list[tuple[FlatState, ...]]]:
    """Return what ranks write of it, as many as are asked for, and a table of its states."""
    buffers = live_flat_buffers(optimizer, PLAIN)
    names = {p: name for name, p in module.named_parameters()}
    rows = [flat_buffer_row(b, names, 0, world_size) for b in buffers]
    states = [split_state(optimizer, b.key, optimizer.state.get(b.key, {})) for b in buffers]
    wholes = rank_fragments(0, rows, world_size, 0)
    flats = [
        FlatState(fragments, buffer.master, *held, in_module=True)
        for buffer, fragments, held in zip(buffers, wholes, states, strict=True)
    ]
    keys = tuple(state_key(k, v, elementwise=True) for k, v in states[0][0].items())
    manifest = Manifest(
        "", 0, world_size, "fp32", "float32", (), (Group((), {}, keys),), tuple(rows), (), ()
    )
    return manifest, [own_slices(flats, rows, world_size, r) for r in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 7, 64])
def test_slices_make_the_whole_again(world_size: int) -> None:
    """Each element is in one slice; put back into another run, it goes on as this one does."""
    module, other = Odd(0), Odd(1)
    optimizer, fresh = (torch.optim.NAdam(m.parameters(), lr=0.1) for m in (module, other))
    module.step(optimizer, 3)
    manifest, slices = held_by(module, optimizer, world_size)
    buffers = live_flat_buffers(fresh, PLAIN)
    rows = manifest.buffers
    for index, buffer in enumerate(buffers):
        whole = rank_fragments(0, rows, world_size, 0)[index]
        targets = allocate_states(fresh, buffer, whole, manifest)
        target = flat_target(buffer, whole, targets, whole=True)
        assert not target.in_place  # Nothing could rebuild them.
        filled = 0
        for of_rank in slices:
            for fragment in of_rank[index].fragments:
                part = slice(fragment.offset, fragment.offset + fragment.stop - fragment.start)
                target.master[fragment.start : fragment.stop] = of_rank[index].master[part]
                for key, values in of_rank[index].elementwise.items():
                    targets[key][fragment.start : fragment.stop] = values[part]
                filled += fragment.stop - fragment.start
        assert filled == buffer.master.numel()
        commit_masters(target, keep_fp32=True)
        commit_state(fresh, target, slices[0][index].scalars)
    assert {len(state) for state in fresh.state.values()} == {4}
    for m, o in ((module, optimizer), (other, fresh)):
        m.step(o, 2)
    for name, weight in module.named_parameters():
        assert torch.equal(other.get_parameter(name), weight), name
    assert other.conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_state_of_a_weight_without_dimensions_alone_is_not_guessed() -> None:
    """Whether one value is of the weight or of all, other weights tell; without them, nothing."""
    scale = nn.Parameter(torch.randn(()))
    optimizer = torch.optim.AdamW([scale])
    scale.grad = torch.ones(())
    optimizer.step()
    with pytest.raises(UnsupportedError, match="0-dimensional"):
        split_state(optimizer, scale, optimizer.state[scale])


def test_weights_of_the_module_are_copied_at_once() -> None:
    """What is swapped in for a validation, behind a save, must not get into its copy."""
    module = Odd(0)
    optimizer = torch.optim.AdamW(module.parameters())
    module.step(optimizer, 1)
    manifest, (flats,) = held_by(module, optimizer, 1)
    state = RankState(flats, {}, {}, {}, {})
    plan = CopyPlan.of(ShardContents(None, manifest, state, {}), 0, 1 << 30)  # type: ignore[arg-type]
    masters = [flat.master for flat in flats]
    assert all(any(t is m for t in plan.at_once) for m in masters)
    assert not any(t is m for t in plan.behind for m in masters)
    assert plan.behind


def test_sums_of_bits_tell_tensors_apart() -> None:
    """In every type; a bit is enough."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        one = torch.randn(100).to(dtype)
        other = one.clone()
        assert bit_sums([one, one[:0]]) == bit_sums([other, one[:0]])
        other[7] = torch.nextafter(other[7], torch.tensor(9, dtype=dtype))
        assert bit_sums([one]) != bit_sums([other])
