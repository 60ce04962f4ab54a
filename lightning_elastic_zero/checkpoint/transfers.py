"""The transfers of a load, what they fill, and each buffer's scalars."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.formats import WEIGHT, CheckpointReader, Targets
from lightning_elastic_zero.layout import Fragment, Layout, TransferPlan
from lightning_elastic_zero.manifest import Group, Manifest
from lightning_elastic_zero.tensor_state import RestoreTargets, Scalar, canonical_repr


def plans(
    source: CheckpointReader, targets: RestoreTargets, with_state: Collection[str]
) -> tuple[TransferPlan, TransferPlan]:
    """Plan the runs to be read: of masters, and of the states beside them; of frozen weights.

    Args:
        source: the checkpoint.
        targets: what is wanted.
        with_state: the parameters whose optimizer states are wanted; others that lie beside them
            have fresh ones already.

    Returns:
        Plans into ``read_targets``.
    """
    alone = len(targets.weights)
    wanted = [
        f if f.name in with_state else replace(f, buffer=alone + f.buffer)
        for f in targets.fragments
    ]
    owned = {p.name for p in source.manifest.optimized}
    masters = [f for f in wanted if f.name in owned]
    frozen = [f for f in wanted if f.name not in owned]
    return (
        TransferPlan(masters, source.layout()),
        TransferPlan(frozen, source.frozen_layout()),
    )


def read_targets(targets: RestoreTargets) -> Targets:
    """Return what is filled: the weights with their states, and then the same weights alone."""
    weights = [{WEIGHT: tensor} for tensor in targets.weights]
    return [{**w, **s} for w, s in zip(weights, targets.states, strict=True)] + weights


def scalars_by_buffer(
    source: CheckpointReader, live: Manifest, groups: Sequence[Group]
) -> tuple[Mapping[str, Scalar], ...]:
    """Return the scalar states of each live flat buffer.

    Parameters that have none yet take those of the others in their parameter group, so that what
    they are does not depend on which of the group share a buffer with them.

    Args:
        source: the checkpoint.
        live: what the engine says of itself.
        groups: what was saved, in the groups that the engine has.
    """
    layout, found = source.layout(), []
    for buffer in live.buffers:
        members = groups[buffer.group].names
        known = set(members)
        shared = [name for name in buffer.names if name in known] or members
        found.append(_scalars_of(source, layout, shared))
    return tuple(found)


def _scalars_of(
    source: CheckpointReader, layout: Layout, names: Iterable[str]
) -> Mapping[str, Scalar]:
    """Return the scalars of a live flat buffer, whose parameters may have lain in several.

    Raises:
        CheckpointMismatchError: those differ, and the live buffer can have one value only.
    """
    held: dict[int, Fragment] = {}
    for name in names:
        at = next(iter(layout.covering(name, 0, 1)))
        held.setdefault(at.buffer, at)
    scalars = [source.scalars(at) for at in held.values()]
    for other in scalars[1:]:
        if canonical_repr(dict(other)) != canonical_repr(dict(scalars[0])):
            msg = (
                f"parameters that share a flat buffer here were saved with the states "
                f"{dict(scalars[0])} and {dict(other)}: resume with the stage and sub_group_size "
                "of the save"
            )
            raise CheckpointMismatchError(msg)
    return scalars[0] if scalars else {}
