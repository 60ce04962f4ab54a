"""The reader of a directory of ``torch.distributed.checkpoint`` (``CheckpointReader``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.dcp.chunks import Chunks
from lightning_elastic_zero.formats.dcp.metadata import read_metadata
from lightning_elastic_zero.formats.dcp.optimizer_state_dict import state_dict_of
from lightning_elastic_zero.formats.dcp.tree import (
    Leaf,
    Tree,
    choose_model,
    format_tree_path,
    knows_order,
    largest_model,
    leaves_of,
    sort_leaves,
)
from lightning_elastic_zero.formats.dcp_detection import METADATA_NAME
from lightning_elastic_zero.formats.full_state.binding import (
    AVERAGING,
    NO_STATE,
    BoundState,
    FullState,
    bind,
    progress_of,
    refuse_untied,
    same_bits,
    unbound,
    writer_of,
)
from lightning_elastic_zero.formats.full_state.torch_optimizer import FRESH_OPTIMIZER_HINT
from lightning_elastic_zero.formats.open_files import foreign_files
from lightning_elastic_zero.formats.reader import WEIGHT, ReadRequest, SharedState, SourceInfo
from lightning_elastic_zero.formats.safe_pickle.policy import FOREIGN_TREE
from lightning_elastic_zero.formats.source import (
    COMPARED_ELEMENTS,
    file_list_digest,
)
from lightning_elastic_zero.formats.torch_file import StoredRun
from lightning_elastic_zero.layout import Fragment, Layout, Transfer, spans
from lightning_elastic_zero.manifest import Manifest
from lightning_elastic_zero.partition import frozen_partition
from lightning_elastic_zero.storage import ignore_progress
from lightning_elastic_zero.tensor_state import Scalar

TRAINER_STATE = "meta.pt"
"""Where Lightning's FSDP and ModelParallel strategies keep all that is no tensor."""


class DcpReader:
    """A directory of chunks, with the trainer's state beside them where Lightning wrote it."""

    def __init__(
        self,
        path: Path,
        *,
        allow_pickle: bool = False,
        on_progress: Callable[[], None] = ignore_progress,
    ) -> None:
        """Understand a directory from what it says of itself.

        Raises:
            CheckpointCorruptedError: that is damaged, or files are missing.
            CheckpointFormatError: it is not of ``torch.distributed.checkpoint``.
            UnsupportedError: it needs a class that is not allowed.
        """
        self._path = path
        metadata = read_metadata(path)
        self._files = foreign_files(path, allow_pickle=allow_pickle, on_progress=on_progress)
        policy = FOREIGN_TREE.with_any_class(allow_pickle)
        self._chunks = Chunks(path, metadata, policy, on_progress)
        self._chunks.check_files()
        self._tree: Tree = sort_leaves(leaves_of(metadata, self._chunks.tensors))
        self._trainer = self._trainer_state()
        names = [METADATA_NAME, *self._chunks.names, *([TRAINER_STATE] if self._trainer else [])]
        self._full_state = FullState(
            weights={},
            optimizers=(),
            save_id=file_list_digest(path, names, on_progress),
            progress=progress_of(self._trainer),
            writer=writer_of(self._trainer),
            ordered=knows_order(metadata),
        )
        self._scalars: dict[str, dict[str, Scalar]] | None = None
        self._known: set[str] = set()
        self._model = largest_model(self._tree)
        self._full_state = replace(self._full_state, weights=self._weights())
        self._take(unbound(self._full_state))

    def _trainer_state(self) -> Mapping[str, Any]:
        """Return the tree of the trainer's state; its tensors have no values yet."""
        if not (self._path / TRAINER_STATE).is_file():
            return {}
        tree = self._files.tree(TRAINER_STATE)
        if not isinstance(tree, Mapping):
            msg = f"{self._path / TRAINER_STATE} holds a {type(tree).__name__}, not a dict"
            raise CheckpointFormatError(msg)
        return tree

    def _weights(self) -> dict[str, torch.Tensor]:
        """Return the model's tensors, without values.

        Raises:
            UnsupportedError: the model has entries that are no tensors.
        """
        leaves = self._tree.models.get(self._model, {})
        self._known.update(_tensors(leaves.values()))
        return {name: leaf.tensor for name, leaf in leaves.items() if leaf.tensor is not None}

    def _take(self, bound: BoundState) -> None:
        self._bound = bound
        lacks = ["RNG states", *([NO_STATE] if bound.manifest.weights_only else [])]
        if left := [format_tree_path(path) for path in self._tree.models if path != self._model]:
            lacks.append(f"the tensors of {', '.join(left)}")
        self._found = SourceInfo(
            kind="directory of torch.distributed.checkpoint",
            lacks=tuple(lacks),
            hyperparameters=any(g.hyperparameters for g in bound.manifest.groups),
            progress="global_step" in self._trainer,
            unmatched=bound.unmatched,
        )
        self._frozen = frozen_partition(((p.name, p.numel) for p in bound.manifest.frozen), 1)

    @property
    def found(self) -> SourceInfo:
        """What kind of checkpoint it is, and what it does not hold."""
        return self._found

    @property
    def manifest(self) -> Manifest:
        """What could be found out, in the words of a manifest."""
        return self._bound.manifest

    def layout(self) -> Layout:
        """Which parameters are in it whole: where a run's chunks are is found when it is read."""
        return self.manifest.layout()

    def frozen_layout(self) -> Layout:
        """Which weights that no optimizer owns are in it whole."""
        return self._frozen

    def check_all(self) -> None:
        """Do nothing more: that every file is there was seen when it was opened."""

    def bind(self, live: Manifest) -> None:
        """Find the model and the optimizer, and whose each state is.

        Raises:
            CheckpointMismatchError: several subtrees may be the model; or a weight that is tied
                here has two values.
            UnsupportedError: a hyperparameter is no plain data.
        """
        self._model = choose_model(self._tree, live, self._path)
        weights = self._weights()
        optimizers, why = self._optimizers(live, weights)
        bound = bind(replace(self._full_state, weights=weights, optimizers=optimizers), live)
        for first, other in bound.ties:
            self._check_tie(weights, first, other)
        self._take(replace(bound, unmatched=why or bound.unmatched))

    def _optimizers(
        self, live: Manifest, weights: Mapping[str, torch.Tensor]
    ) -> tuple[list[dict[str, Any]], str]:
        """Return the optimizer's state dict, or why there is none that can be told apart."""
        found = self._tree.optimizers
        if AVERAGING in self._trainer and found:
            why = (
                "its model is the average that WeightAveraging kept, and its optimizer's state "
                f"belongs to the weights that were trained, which are not in it; "
                f"{FRESH_OPTIMIZER_HINT}"
            )
            return [{}], why
        if len(found) > 1:
            listed = ", ".join(map(format_tree_path, found))
            return [
                {}
            ], f"it holds the states of {len(found)} optimizers ({listed}); {FRESH_OPTIMIZER_HINT}"
        if not found or not live.groups:
            return [{} for _ in found], ""
        leaves = next(iter(found.values()))
        try:
            return [state_dict_of(leaves, self._chunks, live, weights)], ""
        except CheckpointMismatchError as error:
            return [{}], str(error)

    def _check_tie(self, weights: Mapping[str, torch.Tensor], first: str, other: str) -> None:
        """Compare two names of a tied weight, a bounded part at a time.

        Raises:
            CheckpointMismatchError: they have different values.
        """
        one, two = weights[first], weights[other]
        if one.shape != two.shape or one.dtype != two.dtype:
            refuse_untied(self._path, first, other)
        for start, stop in spans(0, one.numel(), COMPARED_ELEMENTS):
            parts = [torch.empty(stop - start, dtype=one.dtype) for _ in range(2)]
            runs = [StoredRun(tensor, start, stop) for tensor in (one, two)]
            self._chunks.read_into(zip(parts, runs, strict=True))
            if not same_bits(*parts):
                refuse_untied(self._path, first, other)

    def verify(self, rank: int, world_size: int, on_bytes: Callable[[int], None]) -> None:
        """Compare the CRC-32 that this rank's share of entries was written with."""
        self._chunks.verify(rank, world_size, on_bytes)
        if rank == 0 and self._trainer:
            self._files.get(TRAINER_STATE).verify(on_bytes)

    def check(self, masters: Sequence[int], frozen: Sequence[int]) -> None:
        """Do nothing more: that every file is there was seen when it was opened."""

    def read(self, requests: Sequence[ReadRequest], on_bytes: Callable[[int], None]) -> int:
        """Fill all targets; return the bytes of the chunks that were read."""
        wanted = ((r.slot, self._locate(r.key, r.transfer)) for r in requests)
        return self._chunks.read_into(wanted, on_bytes)

    def _locate(self, key: str, transfer: Transfer) -> StoredRun:
        if key == WEIGHT:
            tensor = self._whole_weight(transfer.name)
        else:
            tensor = self._bound.states[transfer.name][key]
        return StoredRun(tensor, transfer.start, transfer.stop)

    def _whole_weight(self, name: str) -> torch.Tensor:
        leaf = self._tree.models[self._model][self._bound.weight_of[name]]
        assert leaf.tensor is not None  # noqa: S101 (for the type checker)
        return leaf.tensor

    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        """Return the scalar optimizer states of a parameter."""
        if self._scalars is None:
            self._scalars = self._load_scalars()
        return self._scalars.get(at.name, {})

    def _load_scalars(self) -> dict[str, dict[str, Scalar]]:
        kinds = {key.name: key.kind for g in self.manifest.groups for key in g.state}
        held = {
            name: {k: v for k, v in state.items() if kinds.get(k) == "scalar"}
            for name, state in self._bound.states.items()
        }
        keys = {self._chunks.key_of(value) for state in held.values() for value in state.values()}
        values = self._chunks.load(keys - {""})
        return {
            name: {k: values.get(self._chunks.key_of(v), v) for k, v in state.items()}
            for name, state in held.items()
        }

    def module_state(self, rank: int, world_size: int) -> SharedState:
        """Return buffers, the trainer's state, and what else was saved that is small."""
        del rank, world_size
        leaves = self._tree.models[self._model]
        held = {n: leaves[n] for n in self.manifest.module_buffers}
        values = self._chunks.load(_tensors(held.values()))
        return SharedState(
            buffers={name: values[leaf.key] for name, leaf in held.items()},
            client_state={**self._rest(), **self._files.load(TRAINER_STATE, dict(self._trainer))}
            if self._trainer
            else self._rest(),
            loss_scaler={},
            lr_scheduler=None,
        )

    def _rest(self) -> dict[str, Any]:
        """Return the objects and single numbers that are beside model and optimizer.

        Raises:
            UnsupportedError: the model itself has entries that are no tensors.
        """
        rest = [leaf for leaf in self._tree.rest if leaf.tensor is None or not leaf.tensor.ndim]
        inside = [leaf for leaf in rest if self._model and leaf.path[:-1] == self._model]
        if strange := [leaf.key for leaf in inside if leaf.tensor is None]:
            msg = (
                f"{self._path}: {strange[0]!r} of the model is no tensor, and no engine takes it: "
                "save the model again without it"
            )
            raise UnsupportedError(msg)
        mine = [leaf for leaf in rest if leaf.key not in self._known]
        values = self._chunks.objects([leaf.key for leaf in mine if leaf.tensor is None])
        values.update(self._chunks.load(_tensors(mine)))
        found: dict[str, Any] = {}
        for leaf in mine:
            node = found
            for part in leaf.path[:-1]:
                node = node.setdefault(str(part), {})
            node[str(leaf.path[-1])] = values[leaf.key]
        return found

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def _tensors(leaves: Iterable[Leaf]) -> list[str]:
    return [leaf.key for leaf in leaves if leaf.tensor is not None]
