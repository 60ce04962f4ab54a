"""PEFT's folder of an adapter: ``adapter_model.safetensors`` and ``adapter_config.json``.

Of the model's weights those are taken that belong to the adapter, under the names that PEFT gives
them in a file: from ``base_model.model.`` on, and without the adapter's name.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.formats.safetensors_file import NamedSource, write_safetensors
from lightning_elastic_zero.storage import write_durably
from lightning_elastic_zero.storage.exports import staged_export
from lightning_elastic_zero.text import format_names
from lightning_elastic_zero.tools.checkpoint_view import OpenCheckpoint
from lightning_elastic_zero.tools.conversion.selection import ConvertOptions, chosen_weights
from lightning_elastic_zero.tools.progress_line import OnBytes

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_BASE = "base_model.model."
_SAVED = "modules_to_save"


def write_adapter_folder(
    checkpoint: OpenCheckpoint, target: Path, options: ConvertOptions, on_bytes: OnBytes
) -> None:
    """Write the folder.

    Raises:
        CheckpointMismatchError: there is no such adapter, or no configuration of it; or something
            was trained that belongs to no adapter.
    """
    config = _config(checkpoint, options)
    weights = list(_weights(checkpoint, options))
    if not weights:
        msg = (
            f"{checkpoint.path} holds no weights of an adapter named {options.adapter_name!r}: "
            f"those of PEFT have {_BASE!r} in their names, and the adapter's name"
        )
        raise CheckpointMismatchError(msg)
    _check_nothing_left_out(checkpoint, options)
    with staged_export(target) as export:
        write_safetensors(export.path, WEIGHTS, weights, {"format": "pt"}, on_bytes)
        write_durably(export.path / CONFIG, config)
        export.drop_sums()
        export.publish()


def _weights(checkpoint: OpenCheckpoint, options: ConvertOptions) -> Iterator[NamedSource]:
    for entry, source in chosen_weights(checkpoint, options):
        if name := adapter_key(entry.name, options.adapter_name):
            yield NamedSource(name, entry.shape, source)


def _check_nothing_left_out(checkpoint: OpenCheckpoint, options: ConvertOptions) -> None:
    """Refuse to leave out what was trained, but for other adapters and what patterns leave out.

    Raises:
        CheckpointMismatchError: something would be.
    """
    trained = [p.name for p in checkpoint.manifest.optimized if options.takes(p.name)]
    adapters = [options.adapter_name, *filter(None, map(_adapter_of, trained))]
    lost = [name for name in trained if not any(adapter_key(name, a) for a in adapters)]
    if lost:
        msg = (
            f"{checkpoint.path}: {format_names(lost, limit=len(lost))} were trained, and the "
            f"folder of the adapter {options.adapter_name!r} would lack them: of an adapter it "
            f"holds what is named lora_* and {_SAVED}. Write all weights (safetensors), or leave "
            "these out by patterns (exclude)"
        )
        raise CheckpointMismatchError(msg)


def _adapter_of(name: str) -> str:
    """Return the name of the adapter that a weight belongs to; empty where it says none."""
    parts = name.partition(_BASE)[2].split(".")
    pairs = itertools.pairwise(parts)
    return next((b for a, b in pairs if a == _SAVED or a.startswith("lora_")), "")


def adapter_key(name: str, adapter: str) -> str:
    """Return the name that PEFT gives a weight in its file; empty for what is not the adapter's."""
    _, found, below = name.partition(_BASE)
    parts = below.split(".")
    if not found or adapter not in parts[1:]:
        return ""
    at = parts.index(adapter, 1)
    if parts[at - 1] == _SAVED:
        kept = [*parts[: at - 1], *parts[at + 1 :]]
    elif parts[at - 1].startswith("lora_"):
        kept = [*parts[:at], *parts[at + 1 :]]
    else:
        return ""
    return _BASE + ".".join(kept)


def _config(checkpoint: OpenCheckpoint, options: ConvertOptions) -> bytes:
    """Return PEFT's configuration, which weights do not tell (``lora_alpha``, for one)."""
    if options.adapter_config is None:
        msg = (
            f"{checkpoint.path} does not hold the adapter's configuration, such as its lora_alpha: "
            f"pass the {CONFIG} that model.peft_config[...].save_pretrained(folder) writes"
        )
        raise CheckpointMismatchError(msg)
    path = Path(options.adapter_config)
    path = path / CONFIG if path.is_dir() else path
    try:
        text = path.read_bytes()
        content = json.loads(text)
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read as an {CONFIG} of PEFT's ({error})"
        raise CheckpointMismatchError(msg) from error
    if not isinstance(content, dict) or "peft_type" not in content:
        msg = f"{path} is no {CONFIG} of PEFT's: it names no peft_type"
        raise CheckpointMismatchError(msg)
    return text
