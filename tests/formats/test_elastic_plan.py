"""The plan of a save, without ranks and tensors: every element once, where a load looks for it."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import TypeAlias

from hypothesis import given
from hypothesis import strategies as st

from lightning_elastic_zero.core.layout import Fragment, TensorKey, TransferPlan
from lightning_elastic_zero.core.manifest import Manifest
from lightning_elastic_zero.core.partition import zero_layout
from lightning_elastic_zero.formats.elastic_plan import Item, plan_files
from tests.support.plain_checkpoints import STATES, make_state, manifest_of

Element: TypeAlias = "tuple[str, int] | None"
"""An element of a parameter, or padding."""


def elements(manifest: Manifest, rank: int, item: Item) -> list[Element]:
    """Return what an item contains, by the places of the rank's fragments."""
    at: dict[TensorKey, dict[int, Element]] = {}

    def note(key: TensorKey, offset: int, f: Fragment) -> None:
        places = at.setdefault(key, {})
        places.update((offset + i, (f.name, f.start + i)) for i in range(f.stop - f.start))

    for f in manifest.layout().on_rank(rank):
        note(TensorKey("master", f.buffer), f.offset, f)
        note(TensorKey("module", f.name), 0, f)
        for key in STATES:
            note(TensorKey("state", f.buffer, key), f.offset, f)
    for f in manifest.frozen_layout().on_rank(rank):
        note(TensorKey("frozen", f.name), 0, f)
    found: list[Element] = []
    for run in item.runs:
        places = range(run.start, run.stop)
        found += [at[run.source][i] if run.source else None for i in places]
    return found


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    sizes = draw(st.lists(st.integers(1, 40), min_size=2, max_size=6))
    state = make_state({f"p{i}": (size,) for i, size in enumerate(sizes)})
    stage, world_size = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    return manifest_of(state, stage, world_size, weights_only=draw(st.booleans()))


def stored(
    manifest: Manifest, changed: tuple[int, ...] = ()
) -> list[dict[tuple[object, ...], Item]]:
    """Return the items of each rank by their entries."""
    plans = [plan_files(manifest, rank, changed) for rank in range(manifest.world_size)]
    return [{item.entry: item for item in plan} for plan in plans]


@given(manifests())
def test_every_element_is_written_once(manifest: Manifest) -> None:
    """Of masters, each state, the module's weights and frozen weights."""
    counts: dict[tuple[str, str], Counter[Element]] = defaultdict(Counter)
    for rank, items in enumerate(stored(manifest, tuple(range(len(manifest.buffers))))):
        for item in items.values():
            for kind in {(run.source.kind, run.source.state) for run in item.runs if run.source}:
                counts[kind].update(filter(None, elements(manifest, rank, item)))
    trained = Counter((p.name, i) for p in manifest.optimized for i in range(p.numel))
    frozen = Counter((p.name, i) for p in manifest.frozen for i in range(p.numel))
    states = () if manifest.weights_only else STATES
    assert counts == {
        ("master", ""): trained,
        ("module", ""): trained,
        ("frozen", ""): frozen,
        **{("state", key): trained for key in states},
    }


@given(manifests(), st.integers(1, 3), st.integers(1, 6))
def test_a_load_on_any_ranks_finds_every_element(
    manifest: Manifest, stage: int, world_size: int
) -> None:
    """At the place in a master or state that the reader computes from the layouts."""
    held, other = manifest.layout(), replace(manifest, stage=stage, world_size=world_size)
    part = {b: -(-sum(b.numels) // world_size) for b in manifest.buffers}
    buffers = [replace(b, partition_numel=0 if stage == 3 else part[b]) for b in other.buffers]
    wanted_layout = zero_layout(stage, buffers, world_size)
    items = stored(manifest)
    zero_3 = manifest.stage == 3
    masters = "fp32_flat_groups" if zero_3 else "single_partition_of_fp32_groups"
    for rank in range(world_size):
        wanted = wanted_layout.on_rank(rank)
        for source, transfers in TransferPlan(wanted, held).by_rank():
            starts = {f.name: f.start for f in held.on_rank(source)}
            for t in transfers:
                expected = [(t.name, i) for i in range(t.start, t.stop)]
                item = items[source]["optimizer_state_dict", masters, t.source_buffer]
                found = elements(manifest, source, item)
                assert found[t.source_offset :][: t.stop - t.start] == expected
                if zero_3 and not manifest.weights_only:
                    state = "base_optimizer_state"
                    item = items[source]["optimizer_state_dict", state, t.source_buffer, STATES[0]]
                    names = manifest.buffers[t.source_buffer].names
                    assert item.cuts is not None
                    before = sum(item.cuts[: names.index(t.name)])
                    first = before + t.start - starts[t.name]
                    found = elements(manifest, source, item)
                    assert found[first : first + t.stop - t.start] == expected


@given(manifests())
def test_other_elements_are_padding(manifest: Manifest) -> None:
    """A part of ZeRO-3 has the same size on each rank; ZeRO-1/2 ends with the last parameter."""
    ranks = stored(manifest)
    for index, buffer in enumerate(manifest.buffers):
        sizes = [
            sum(run.stop - run.start for run in item.runs)
            for items in ranks
            for entry, item in items.items()
            if "fp32" in str(entry[1]) and entry[2] == index
        ]
        if manifest.stage == 3:
            assert sizes == [sum(-(-n // manifest.world_size) for n in buffer.numels)] * len(ranks)
        else:
            assert sum(sizes) == sum(buffer.numels)
