"""State that a compatible load does not restore: allowed, and reported by name."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_elastic_zero.compatibility import (
    RestoreScope,
    left_out_but_trained,
    list_names,
    perhaps_renamed,
)
from lightning_elastic_zero.group_matching import (
    OWN_GROUP,
    match_groups,
    shared_step_counters,
)
from lightning_elastic_zero.manifest import Manifest


def describe_unrestored(saved: Manifest, live: Manifest, wanted: RestoreScope) -> Iterator[str]:
    """Yield what a load that fits goes on without, by name: it is told, since it is allowed."""
    have, want = ({p.name: p for p in m.parameters} for m in (saved, live))
    left_out = set(saved.excluded)
    kept = [n for n in want if n not in have]
    trained = [n for n in kept if want[n].group is not None] + left_out_but_trained(saved, live)
    if trained:
        yield f"not in the checkpoint, and trained from what they are here: {list_names(trained)}"
    gone = left_out.union(kept).difference(trained)
    frozen = [n for n in want if n in gone and want[n].group is None]
    if frozen:
        yield f"not in the checkpoint, and left as they are here: {list_names(frozen)}"
    beyond = [n for n in have if n not in want and n not in left_out]
    if beyond:
        yield f"in the checkpoint, and not in the model: {list_names(beyond)}"
    if live.groups:
        shapes = {n: have[n].shape for n in beyond}, {n: want[n].shape for n in kept}
        yield from perhaps_renamed(*shapes, have.keys() & want.keys())
    if live.groups and wanted.optimizer_state and not wanted.strict_optimizer:
        yield from _describe_other_owners(saved, live)
    buffers = set(live.module_buffers) - set(saved.module_buffers)
    if buffers:
        text = "buffers that are not in the checkpoint, left as they are here"
        yield f"{text}: {list_names(buffers)}"


def _describe_other_owners(saved: Manifest, live: Manifest) -> Iterator[str]:
    """Yield whose optimizer state begins anew, whose is left out, and what groups go on with."""
    want = {p.name: p for p in live.parameters}
    held = {p.name for p in saved.frozen}
    if thawed := [p.name for p in live.optimized if p.name in held]:
        text = "frozen when saved, and trained here with fresh optimizer state"
        yield f"{text}: {list_names(thawed)}"
    frozen = [p.name for p in saved.optimized if p.name in want and want[p.name].group is None]
    if frozen:
        text = "trained when saved, and frozen here, without optimizer state"
        yield f"{text}: {list_names(frozen)}"
    for index, effect in shared_step_counters(saved, live):
        yield (
            f"what begins anew in parameter group {index} has the count of steps of what is "
            f"restored there{effect}; {OWN_GROUP} to have it begin at step 0"
        )
    for index, group in enumerate(match_groups(saved, live)):
        if not group.origins:
            yield f"parameter group {index} is new, with the hyperparameters configured here"
        elif group.origins != (index,):
            numbers = ", ".join(map(str, group.origins))
            yield f"parameter group {index} goes on with what group {numbers} was saved with"
