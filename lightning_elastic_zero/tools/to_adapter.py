"""Target ``adapter`` of ``convert``: PEFT's folder of an adapter."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.storage.file_write import write_durably
from lightning_elastic_zero.storage.paths import read_file
from lightning_elastic_zero.tools.selection import ConvertOptions, file_next_to, selected_weights
from lightning_elastic_zero.tools.to_safetensors import NamedSource, write_safetensors
from lightning_elastic_zero.tools.view import OpenCheckpoint

_ADAPTER_CONFIG = "adapter_config.json"
_BASE = "base_model.model."
_SAVED = "modules_to_save"
_PARTS = (
    "lora_",
    "ia3_",
    "hada_",
    "lokr_",
    "oft_",
    "boft_",
    "ln_tuning_",
    "trainable_tokens_delta",
)
"""Beginnings of the names that PEFT gives to an adapter's weights, before the adapter's name."""

_MAGNITUDE = "lora_magnitude_vector"


def write_adapter_folder(
    checkpoint: OpenCheckpoint, folder: Path, options: ConvertOptions, progress: Progress
) -> None:
    """Write PEFT's ``adapter_model.safetensors`` and ``adapter_config.json``.

    The weights are those that ``save_pretrained`` selects. PEFT's own function needs the model,
    which no checkpoint contains, so they are recognised by name.

    Raises CheckpointMismatchError if the configuration, the adapter or some of its weights are
    missing, or if weights were trained that belong to no adapter.
    """
    config = _adapter_config(checkpoint, options)
    fields = json.loads(config)
    weights, left = [], []
    for weight in selected_weights(checkpoint, options):
        name, entry = weight.names[0], weight.entry
        adapter, key = adapter_key(name)
        if not adapter and entry.role == "trained":
            adapter, key = _other_key(name, fields, options.adapter_name)
            left += [] if adapter else [name]
        if adapter == options.adapter_name:
            weights.append(NamedSource(key, entry.shape, weight.source))
    ways = (
        "To write the adapter with PEFT, convert to fp32, load that file into the model and call "
        "its save_pretrained"
    )
    if not weights:
        msg = (
            f"{checkpoint.path} has no weights of an adapter named {options.adapter_name!r} that "
            f"are recognised ({fields['peft_type']}); PEFT's names contain {_BASE!r} and the "
            f"adapter's name. {ways}"
        )
        raise CheckpointMismatchError(msg)
    excluded = filter(options.selects, checkpoint.manifest.excluded)
    if absent := [name for name in excluded if adapter_key(name)[0] == options.adapter_name]:
        # PEFT initializes missing weights anew, without an error.
        msg = (
            f"{checkpoint.path}: the save left out {format_names(absent)} of the adapter "
            f"{options.adapter_name!r}. Convert a checkpoint that was saved without "
            "exclude_frozen_parameters, or load this one into a model with the same values of "
            "them and call its save_pretrained"
        )
        raise CheckpointMismatchError(msg)
    if left:
        msg = (
            f"{checkpoint.path}: {format_names(left, limit=len(left))} were trained, but are not "
            f"recognised as weights of the adapter {options.adapter_name!r} "
            f"({fields['peft_type']}). {ways}. To leave them out, exclude them"
        )
        raise CheckpointMismatchError(msg)
    write_safetensors(folder, "adapter_model.safetensors", weights, progress)
    write_durably(folder / _ADAPTER_CONFIG, config)


def adapter_key(name: str) -> tuple[str, str]:
    """Return the adapter that a weight belongs to and the weight's name in PEFT's file.

    Both are empty if its name is not that of an adapter's weight.
    """
    parts = name.partition(_BASE)[2].split(".")
    for at, (part, adapter) in enumerate(itertools.pairwise(parts)):
        if part == _SAVED or part.startswith(_PARTS):
            kept = [*parts[: at + (part != _SAVED)], *parts[at + 2 :]]
            key = _BASE + ".".join(kept)
            # DoRA's magnitude is a module in the model, and a tensor in the file.
            return adapter, key.removesuffix(".weight") if part == _MAGNITUDE else key
    return "", ""


def _other_key(name: str, config: Mapping[str, Any], adapter: str) -> tuple[str, str]:
    """Return the same for trained weights that only the configuration assigns to the adapter."""
    bias = name.endswith(".bias") and config.get("bias", "none") != "none"
    if bias and _BASE in name:
        return adapter, _BASE + name.partition(_BASE)[2]
    prompt = f"prompt_encoder.{adapter}.embedding.weight"
    if config["peft_type"] == "PROMPT_TUNING" and f".{name}".endswith(f".{prompt}"):
        return adapter, "prompt_embeddings"
    return "", ""


def _adapter_config(checkpoint: OpenCheckpoint, options: ConvertOptions) -> bytes:
    is_default = options.adapter_name == "default"
    # PEFT saves other adapters than the default one in folders of their names.
    name = _ADAPTER_CONFIG if is_default else f"{options.adapter_name}/{_ADAPTER_CONFIG}"
    path = options.adapter_config or file_next_to(checkpoint, name)
    if path is None:
        msg = (
            f"{checkpoint.path} does not contain the adapter's configuration (lora_alpha, ...): "
            f"pass the {_ADAPTER_CONFIG} that model.peft_config[...].save_pretrained(folder) writes"
        )
        raise CheckpointMismatchError(msg)
    path = Path(path)
    path = path / _ADAPTER_CONFIG if path.is_dir() else path
    try:
        text = read_file(path)
        content = json.loads(text)
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read as PEFT's {_ADAPTER_CONFIG} ({error})"
        raise CheckpointMismatchError(msg) from error
    if not isinstance(content, dict) or "peft_type" not in content:
        msg = f"{path} is not PEFT's {_ADAPTER_CONFIG}: it has no peft_type"
        raise CheckpointMismatchError(msg)
    return text
