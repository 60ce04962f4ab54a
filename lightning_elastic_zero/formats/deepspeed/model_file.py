"""Inside a model file of stock DeepSpeed: shapes, buffers, frozen weights, counters, user state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_elastic_zero.errors import CheckpointFormatError, UnsupportedError
from lightning_elastic_zero.formats.deepspeed.constants import OURS
from lightning_elastic_zero.formats.open_files import ForeignFiles
from lightning_elastic_zero.formats.reader import SharedState, is_extra_state
from lightning_elastic_zero.formats.shared_tensors import duplicate_names
from lightning_elastic_zero.manifest import Plain, Progress

ENGINE_KEYS = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "num_experts",
        "ds_config",
        "ds_version",
        "ds_autoep_layers",
        "checkpoint_parallel_dimensions",
        "universal_checkpoint_info",
    }
)
"""What DeepSpeed itself writes; all else is the user's, merged on top."""


class ModelFile:
    """One rank's ``*_model_states.pt``."""

    def __init__(self, files: ForeignFiles, name: str) -> None:
        """Parse a file, without reading its tensors.

        Raises:
            CheckpointCorruptedError: it is missing, or cut short.
            CheckpointFormatError: it is no model file of a ZeRO run.
            UnsupportedError: it was written with tensor parallelism.
        """
        self.name = name
        self._files = files
        tree = files.tree(name)
        where = files.folder / name
        if isinstance(tree, Mapping) and OURS in tree:
            msg = (
                f"{where} was written by this library, but its manifest.json is missing: the "
                "checkpoint was never finished, or copied without it. Resume from another one, or "
                "copy the whole directory again"
            )
            raise CheckpointFormatError(msg)
        if not isinstance(tree, Mapping) or not tree.get("param_shapes"):
            msg = (
                f"{where} names no parameters of a ZeRO optimizer (`param_shapes`): it was saved "
                "without ZeRO, or without an optimizer, and cannot be resumed as a training run"
            )
            raise CheckpointFormatError(msg)
        if int(tree.get("mp_world_size") or 1) != 1:
            msg = f"{where} was written with tensor parallelism: only ZeRO runs are resumed"
            raise UnsupportedError(msg)
        module = _weights_and_buffers(tree)
        self.world_size = int(tree["dp_world_size"])
        self.shapes: Sequence[Mapping[str, Sequence[int]]] = tree["param_shapes"]
        self.buffers: tuple[str, ...] = tuple(n for n in tree["buffer_names"] if n in module)
        self.deepspeed = str(tree.get("ds_version") or "")
        self.lightning = str(tree.get("pytorch-lightning_version") or "")
        self.progress = _progress(tree)
        pieces: Mapping[str, Any] = tree.get("frozen_param_fragments") or {}
        # What is read of a frozen weight, ahead of what stands for it in the module.
        weights = {**module, **pieces}
        self._dtypes = {n: t.dtype for n, t in weights.items() if isinstance(t, torch.Tensor)}
        self._shared = {**duplicate_names(module), **(tree.get("shared_params") or {})}
        self.frozen = self._frozen_shapes(tree, module)

    def _frozen_shapes(
        self, tree: Mapping[str, Any], module: Mapping[str, Any]
    ) -> dict[str, tuple[int, ...]]:
        """Return the weights that no optimizer owns, with their shapes.

        ZeRO-1 does not list them; but in ZeRO-1/2 the module holds every weight whole.
        """
        owned = {name for shapes in self.shapes for name in shapes}
        if listed := tree.get("frozen_param_shapes"):
            # What was frozen after the optimizer was made is listed too, and is the optimizer's.
            return {n: tuple(map(int, shape)) for n, shape in listed.items() if n not in owned}
        known = owned | set(self.buffers)
        if self._is_placeholders(module):
            return {}
        return {
            name: tuple(tensor.shape)
            for name, tensor in module.items()
            if isinstance(tensor, torch.Tensor)
            and name not in known
            # DeepSpeed takes parameters without elements for tied: they share no memory at all.
            and (name not in self._shared or not tensor.numel())
        }

    def _is_placeholders(self, module: Mapping[str, Any]) -> bool:
        """Whether the module's weights are cut away, as in ZeRO-3."""
        return any(
            isinstance(module.get(name), torch.Tensor)
            and not module[name].numel()
            and 0 not in tuple(shape)
            for shapes in self.shapes
            for name, shape in shapes.items()
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of the trained weights."""
        return self.dtype_of(next(name for shapes in self.shapes for name in shapes))

    def dtype_of(self, name: str) -> torch.dtype:
        """Return a weight's low-precision dtype: ZeRO-3 keeps a placeholder of that dtype."""
        return self._dtypes[name]

    def aliases(self, name: str) -> tuple[str, ...]:
        """Return the other names of a tied weight."""
        return tuple(alias for alias, first in self._shared.items() if first == name)

    def frozen_tensor(self, tree: Mapping[str, Any], name: str) -> torch.Tensor:
        """Return a frozen weight in a model file's tree: whole, or in ZeRO-3 the rank's piece."""
        pieces = tree.get("frozen_param_fragments") or {}
        found: torch.Tensor = pieces[name] if name in pieces else tree["module"][name]
        return found

    def check_same(self, other: ModelFile) -> None:
        """Compare with another rank's file.

        Raises:
            CheckpointFormatError: it is of another run, or of another step.
        """
        for what, mine, theirs in (
            ("number of ranks", self.world_size, other.world_size),
            ("step counters", self.progress, other.progress),
            ("DeepSpeed version", self.deepspeed, other.deepspeed),
            ("parameters", _table(self.shapes), _table(other.shapes)),
        ):
            if mine != theirs:
                shown = "" if what == "parameters" else f" ({mine} and {theirs})"
                msg = (
                    f"{self._files.folder}: {self.name} and {other.name} differ in their "
                    f"{what}{shown}: they are not of one save. Resume from another checkpoint, "
                    "or put the files of one save back, those of all ranks"
                )
                raise CheckpointFormatError(msg)

    def load_shared(self, loss_scaler: Mapping[str, Plain]) -> SharedState:
        """Return buffers, and what the user, or Lightning, had saved with it."""
        tree = self._files.tree(self.name)
        held = {
            "buffers": {name: tree["module"][name] for name in self.buffers},
            "client_state": {k: value for k, value in tree.items() if k not in ENGINE_KEYS},
            # Of the scheduler that the engine itself stepped.
            "lr_scheduler": tree.get("lr_scheduler") or None,
            "extra_states": {n: s for n, s in _module_of(tree).items() if is_extra_state(n)},
        }
        return SharedState(loss_scaler=loss_scaler, **self._files.load(self.name, held))


def _module_of(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a module's state dict, which some writers leave out."""
    module: Mapping[str, Any] = tree.get("module") or {}
    return module


def _weights_and_buffers(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's state dict without its extra states, some of which are tensors too."""
    return {n: value for n, value in _module_of(tree).items() if not is_extra_state(n)}


def _table(
    shapes: Sequence[Mapping[str, Sequence[int]]],
) -> list[list[tuple[str, tuple[int, ...]]]]:
    return [[(n, tuple(int(s) for s in shape)) for n, shape in g.items()] for g in shapes]


def _progress(tree: Mapping[str, Any]) -> Progress:
    """Return the counters; DeepSpeed does not save how many backward passes there were."""
    config: Mapping[str, Any] = tree.get("ds_config") or {}
    accumulation = config.get("gradient_accumulation_steps")
    accumulation = accumulation if type(accumulation) is int else 1
    batch = config.get("train_batch_size")
    steps = int(tree.get("global_steps") or 0)
    return Progress(
        global_steps=steps,
        global_samples=int(tree.get("global_samples") or 0),
        skipped_steps=int(tree.get("skipped_steps") or 0),
        micro_steps=steps * accumulation,
        gradient_accumulation_steps=accumulation,
        global_batch_size=batch if type(batch) is int else None,
    )
