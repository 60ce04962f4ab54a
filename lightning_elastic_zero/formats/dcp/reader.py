"""The reader of a directory of ``torch.distributed.checkpoint``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_elastic_zero.errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.dcp.chunks import Chunks
from lightning_elastic_zero.formats.dcp.detection import METADATA_NAME
from lightning_elastic_zero.formats.dcp.metadata import read_metadata
from lightning_elastic_zero.formats.dcp.optimizer_state_dict import members_alone, state_dict_of
from lightning_elastic_zero.formats.dcp.tree import (
    Leaf,
    choose_model,
    knows_order,
    largest_model,
    leaves_of,
    sort_leaves,
)
from lightning_elastic_zero.formats.full_state.binding import AVERAGING, FullState
from lightning_elastic_zero.formats.full_state.reader import FullStateReader
from lightning_elastic_zero.formats.full_state.self_description import Members, describe_alone
from lightning_elastic_zero.formats.open_files import ForeignFiles
from lightning_elastic_zero.formats.reader import FRESH_OPTIMIZER_HINT, file_list_digest
from lightning_elastic_zero.formats.safe_pickle.policy import PicklePolicy
from lightning_elastic_zero.formats.tree_path import TreePath, format_tree_path
from lightning_elastic_zero.manifest import Manifest

TRAINER_STATE = "meta.pt"
"""Where Lightning's FSDP and ModelParallel strategies keep all that is no tensor."""

_LIGHTNINGS_OPTIMIZER = ("optimizer_0",)
"""Where those put the state of a run's optimizer; plain torch's code calls it ``optimizer``."""


class DcpReader(FullStateReader):
    """A directory of chunks, with the trainer's state beside them where Lightning wrote it."""

    def __init__(self, files: ForeignFiles, policy: PicklePolicy) -> None:
        """Parse the metadata of a directory.

        Args:
            files: the directory's.
            policy: what the objects beside the tensors may be.

        Raises:
            CheckpointCorruptedError: that is damaged, or files are missing.
            CheckpointFormatError: it is not of ``torch.distributed.checkpoint``.
            UnsupportedError: it needs a class that is not allowed.
        """
        path = files.folder
        metadata = read_metadata(path)
        self._chunks = Chunks(path, metadata, policy, files.on_progress)
        self._chunks.check_files()
        super().__init__(path, files, self._chunks)
        self._tree = sort_leaves(leaves_of(metadata, self._chunks.tensors))
        trainer = self._trainer_state()
        self._names = [METADATA_NAME, *self._chunks.names, *([TRAINER_STATE] if trainer else [])]
        self._full_state = FullState(
            weights={},
            optimizers=(),
            save_id=file_list_digest(path, self._names, files.on_progress),
            trainer=trainer,
            ordered=knows_order(metadata),
            kind="directory of torch.distributed.checkpoint",
            incomplete="" if trainer else self._without_trainer_state(),
        )
        self._models: list[Mapping[str, Any]] = []
        self._choose(largest_model(self._tree))
        self._take(self._full_state)

    def _trainer_state(self) -> Mapping[str, Any]:
        """Return the tree of the trainer's state; its tensors have no values yet."""
        if not (self._path / TRAINER_STATE).is_file():
            return {}
        tree = self.files.tree(TRAINER_STATE)
        if not isinstance(tree, Mapping):
            msg = f"{self._path / TRAINER_STATE} holds a {type(tree).__name__}, not a dict"
            raise CheckpointFormatError(msg)
        return tree

    def _without_trainer_state(self) -> str:
        """Describe the lack of a file that Lightning writes last; nothing of others' directories.

        One of weights alone is as plain torch's code may write it.
        """
        if _LIGHTNINGS_OPTIMIZER not in self._tree.optimizers:
            return ""
        return (
            f"{self._path} is incomplete: {TRAINER_STATE} is missing, which Lightning writes last, "
            f"and it has {_LIGHTNINGS_OPTIMIZER[0]}, as Lightning's checkpoints have: counters, "
            "loops, schedulers and callbacks would begin anew. Resume from another checkpoint, or "
            "copy that file too"
        )

    def _choose(self, model: TreePath) -> None:
        """Take the tensors of a subtree for the model's."""
        self._model = model
        left = [format_tree_path(path) for path in self._tree.models if path != model]
        left = [f"the tensors of {', '.join(left)}"] if left else []
        if self._full_state.incomplete:
            left.append(f"the trainer's state (Lightning's {TRAINER_STATE})")
        self._full_state = replace(
            self._full_state,
            weights=self._tree.models.get(model, {}),
            lacks=tuple(left),
        )
        self._models.append(self._full_state.weights)

    def bind(self, live: Manifest) -> None:
        """Find the model and the optimizer, and whose each state is.

        Raises:
            CheckpointMismatchError: several subtrees may be the model; or a weight that is tied
                here has two values.
            UnsupportedError: a hyperparameter is no plain data.
        """
        self._bind_to(choose_model(self._tree, live, self._path), live)

    def bind_alone(self) -> None:
        """Match the directory with its own weights: of several models, those of the largest."""
        members, why = self._members_alone()
        self._bind_to(self._model, describe_alone(self._full_state.weights, members))
        if why:
            self.info = replace(self.info, unmatched=why)

    def _members_alone(self) -> tuple[Members, str]:
        """Return the members of the optimizer's groups: by names, by shapes, or by rates."""
        found, weights = list(self._tree.optimizers.values()), self._full_state.weights
        if len(found) != 1:
            return (), f"it holds the states of {len(found)} optimizers" if found else ""
        try:
            return members_alone(found[0], self._chunks, weights), ""
        except CheckpointMismatchError as error:
            return (), str(error)

    def names(self) -> Sequence[str]:
        """Return the files."""
        return self._names

    def trainer_entry(self, name: str) -> object:
        """Return an entry at the top of what Lightning keeps beside the tensors."""
        return self._full_state.trainer.get(name)

    def _bind_to(self, model: TreePath, live: Manifest) -> None:
        """Take a subtree for the model, and the optimizer's state as a live model has it."""
        self._choose(model)
        optimizers, why = self._optimizers(live)
        self._full_state = replace(self._full_state, optimizers=optimizers, unmatched=why)
        self._take(self._full_state, live)

    def _optimizers(self, live: Manifest) -> tuple[list[dict[str, Any]], str]:
        """Return the optimizer's state dict, or why there is none that can be told apart."""
        found = self._tree.optimizers
        if AVERAGING in self._full_state.trainer and found:
            why = (
                "its model is the average that WeightAveraging kept, and its optimizer's state "
                f"belongs to the weights that were trained, which are not in it; "
                f"{FRESH_OPTIMIZER_HINT}"
            )
            return [{}], why
        if len(found) > 1:
            listed = ", ".join(map(format_tree_path, found))
            why = f"it holds the states of {len(found)} optimizers ({listed})"
            return [{}], f"{why}; {FRESH_OPTIMIZER_HINT}"
        if not found or not live.groups:
            return [{} for _ in found], ""
        leaves = next(iter(found.values()))
        try:
            return [state_dict_of(leaves, self._chunks, live, self._full_state.weights)], ""
        except CheckpointMismatchError as error:
            return [{}], str(error)

    def verify(self, rank: int, world_size: int, on_bytes: Callable[[int], None]) -> None:
        """Compare the CRC-32 that this rank's share of entries was written with."""
        self._chunks.verify(rank, world_size, on_bytes)
        if rank == 0 and self._full_state.trainer:
            self.files.get(TRAINER_STATE).verify(on_bytes)

    def _is_weight(self, leaf: Leaf) -> bool:
        """Whether it is a tensor of what was taken for the model, at first or in the end."""
        name = str(leaf.path[-1])
        return any(weights.get(name) is leaf.tensor for weights in self._models)

    def load_client_state(self) -> dict[str, Any]:
        """Return the trainer's state, and what is beside model and optimizer and small.

        Raises:
            UnsupportedError: the model itself has entries that are no tensors.
        """
        rest = [
            leaf
            for leaf in self._tree.rest
            if leaf.tensor is None or (not leaf.tensor.ndim and not self._is_weight(leaf))
        ]
        inside = [leaf for leaf in rest if self._model and leaf.path[:-1] == self._model]
        if strange := [leaf.key for leaf in inside if leaf.tensor is None]:
            msg = (
                f"{self._path}: {strange[0]!r} of the model is no tensor, and no engine takes it: "
                "save the model again without it"
            )
            raise UnsupportedError(msg)
        values = self._chunks.values_of(rest)
        found: dict[str, Any] = {}
        for leaf in rest:
            node = found
            for part in leaf.path[:-1]:
                node = node.setdefault(str(part), {})
            node[str(leaf.path[-1])] = values[leaf.key]
        trainer = self._full_state.trainer
        return {**found, **(self.files.load(TRAINER_STATE, dict(trainer)) if trainer else {})}
