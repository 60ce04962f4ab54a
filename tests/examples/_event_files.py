"""What TensorBoard's event files hold of checkpoints."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TEXT = "checkpoint/fingerprint/text_summary"


def checkpoint_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Return what all runs of a folder have logged of checkpoints: values by step, by name."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag.removeprefix("checkpoint/"): {e.step: e.value for e in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
        if tag.startswith("checkpoint/")
    }


def logged_fingerprints(folder: Path) -> dict[int, list[str]]:
    """Return the fingerprints that were logged, by step: of saves, and of loads."""
    events = EventAccumulator(str(folder))
    events.Reload()
    found = defaultdict(list)
    for event in events.Tensors(TEXT):
        found[event.step].append(event.tensor_proto.string_val[0].decode())
    return dict(found)
