"""Reads directories of ``torch.distributed.checkpoint`` (FSDP, ModelParallel, plain torch).

``.metadata`` is a pickle, which torch's own reader would let run any code. Here only the fields of
its objects are read. Model and optimizer are recognised by content: a subtree with ``param_groups``
is an optimizer, one with tensors directly below it may be the model, and the live model decides
between several.

A chunk is a box of a tensor: rows under FSDP, also columns with tensor parallelism. Each chunk and
each object is a file of ``torch.save`` within a ``.distcp`` file. Its CRC-32, which torch does not
verify, is compared before the load.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import torch

from lightning_elastic_zero.core.manifest import Manifest
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.tensors import canonical_repr, tensors_of, with_copies
from lightning_elastic_zero.core.text import TreePath, format_names, format_tree_path
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    CheckpointMismatchError,
    ElasticZeroError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.full_state import (
    AVERAGING,
    FullState,
    FullStateReader,
    Table,
    members_of,
    refuse_several,
)
from lightning_elastic_zero.formats.reader import (
    FRESH_OPTIMIZER_HINT,
    MEMBERS,
    SharedState,
    SourceInfo,
    file_list_digest,
)
from lightning_elastic_zero.formats.torch_read import (
    ForeignFiles,
    StoredRun,
    TorchFile,
    as_stream,
    foreign_policy,
    raise_disk_error,
)
from lightning_elastic_zero.storage.file_read import RangeFile
from lightning_elastic_zero.storage.paths import read_file

METADATA_NAME = ".metadata"

_VERIFIED_BYTES = 1 << 20
"""Bytes that are read at a time to compare a CRC-32."""

_CLOCKS_S = 10.0
"""Largest difference between the clocks of the nodes that write one save."""

_MODULES = {
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.serialization",
    "pathlib",
    "pathlib._local",
}
"""Modules whose classes and functions are replaced by ``_Fields``."""

GROUPS, STATE = "param_groups", "state"

Models: TypeAlias = "Mapping[TreePath, Mapping[str, torch.Tensor]]"
"""Subtrees with tensors directly below them, by name."""

StateDict = dict[str, Any]

TRAINER_STATE = "meta.pt"
"""The file of Lightning's FSDP and ModelParallel strategies for the trainer's state."""

_LIGHTNINGS_VERSION = "pytorch-lightning_version"
"""An entry of that file if Lightning's Trainer wrote it; Fabric writes the user's state."""

_LIGHTNINGS_OPTIMIZER = ("optimizer_0",)
"""Their path of the optimizer state; plain torch code usually calls it ``optimizer``."""


def is_dcp(path: Path) -> bool:
    """Whether a directory has the metadata of ``torch.distributed.checkpoint``."""
    if (path / METADATA_NAME).is_file():
        return True
    if chunks := sorted(path.glob("*.distcp")):
        msg = (
            f"{path} has {len(chunks)} files of torch.distributed.checkpoint ({chunks[0].name}, "
            f"...) and no {METADATA_NAME}: the save did not finish, or the copy is incomplete. "
            "Resume from another checkpoint"
        )
        raise CheckpointCorruptedError(msg)
    return False


# -- metadata ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, or an object, and its place in the directory."""

    offsets: tuple[int, ...]
    """The first element of the box, in each dimension; empty for an object."""
    sizes: tuple[int, ...]
    file: str
    """The file's name, relative to the directory."""
    start: int
    """The first byte in the file."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Leaf:
    """One entry of a directory."""

    key: str
    """Its name in the metadata."""
    path: TreePath
    """Its path in the saved tree."""
    tensor: torch.Tensor | None
    """Shape and type, on the meta device; None for an object. Names that share their bytes, as
    those of a tied weight do in directories that ``convert`` wrote, share a tensor."""
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Metadata:
    """The content of ``.metadata``."""

    leaves: tuple[Leaf, ...]
    """In the order of the saved tree if ``ordered``, otherwise in the order of writing, which ranks
    share by load."""
    ordered: bool
    flattened: bool
    """Whether the planner stored the path of each entry in the saved tree."""


class _Fields:
    """An object of a pickle: its fields, without its class."""

    state: Any = None

    def __init__(self, *args: object) -> None:
        """Ignore the arguments, which are of enumerations and paths."""

    def __setstate__(self, state: object) -> None:
        self.state = state


class _MetadataUnpickler(pickle.Unpickler):
    """Builds plain data, dtypes and fields; imports nothing and calls nothing else."""

    def __init__(self, data: bytes, where: Path) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where

    def find_class(self, module: str, name: str, /) -> Any:
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module in _MODULES:
            # A new class each time: a pickle can set attributes of the classes that it gets.
            return type(name, (_Fields,), {})
        msg = (
            f"{self._where} contains a Python object of {module}.{name}, expected only metadata "
            "of torch's FileSystemWriter: another storage or planner wrote it, or it is malicious"
        )
        raise UnsupportedError(msg)


def read_metadata(folder: Path) -> Metadata:
    """Read the metadata of a directory."""
    path = folder / METADATA_NAME
    try:
        return _parsed(_MetadataUnpickler(read_file(path), path).load().state, path)
    except ElasticZeroError:
        raise
    except Exception as error:
        msg = (
            f"{path} is damaged, or not of torch's FileSystemWriter ({error!r}): resume from "
            "another checkpoint"
        )
        raise CheckpointCorruptedError(msg) from error


def _parsed(metadata: Mapping[str, Any], path: Path) -> Metadata:
    places = {
        (index.state["fqn"], tuple(index.state.get("offset") or ())): _place(info.state, path)
        for index, info in metadata["storage_data"].items()
    }
    entries: Mapping[str, _Fields] = metadata["state_dict_metadata"]
    paths: Mapping[str, TreePath] = metadata.get("planner_data") or {}
    ordered = [key for key in paths if key in entries]
    known: dict[object, torch.Tensor] = {}
    leaves = []
    for key in (*ordered, *(key for key in entries if key not in paths)):
        tree_path = tuple(paths.get(key, (key,)))
        entry = entries[key].state or {}
        if "chunks" not in entry:
            leaves.append(Leaf(key, tree_path, None, (Chunk((), (), *places[key, ()]),)))
            continue
        boxes = [(tuple(c.state["offsets"]), tuple(c.state["sizes"])) for c in entry["chunks"]]
        chunks = tuple(
            Chunk(offsets, sizes, *places[key, offsets])
            for offsets, sizes in boxes
            if math.prod(sizes)
        )
        shape, dtype = tuple(entry["size"]), entry["properties"].state[0]
        if not _is_tiled(shape, chunks):
            msg = (
                f"{path}: the chunks of {key} do not contain each of its elements once: the "
                "checkpoint is damaged, or ranks overlap. Resume from another checkpoint"
            )
            raise CheckpointCorruptedError(msg)
        empty = torch.empty(shape, dtype=dtype, device="meta")
        tensor = known.setdefault((shape, dtype, chunks) if chunks else key, empty)
        leaves.append(Leaf(key, tree_path, tensor, chunks))
    return Metadata(tuple(leaves), len(ordered) == len(entries), bool(paths))


def _place(info: Mapping[str, Any], path: Path) -> tuple[str, int, int]:
    name = PurePosixPath(info["relative_path"])
    if name.is_absolute() or ".." in name.parts or info["offset"] < 0 or info["length"] < 0:
        msg = f"{path} refers to {str(name)!r}, which is outside its directory"
        raise CheckpointFormatError(msg)
    if info.get("transform_descriptors"):
        msg = f"{path}: {name} is compressed. Save the checkpoint again without extensions"
        raise UnsupportedError(msg)
    return str(name), info["offset"], info["length"]


def _is_tiled(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> bool:
    """Whether chunks contain each element once: none overlap, and their sizes add up."""
    boxes = [
        tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        for chunk in chunks
    ]
    if any(stop > size for box in boxes for (_, stop), size in zip(box, shape, strict=True)):
        return False
    if sum(math.prod(stop - start for start, stop in box) for box in boxes) != math.prod(shape):
        return False
    reached: list[tuple[tuple[int, int], ...]] = []
    for box in sorted(boxes):
        # Only those that reach into its rows can overlap it: of chunks of rows, none.
        reached = [other for other in reached if not box or other[0][1] > box[0][0]]
        for other in reached:
            if all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)):
                return False
        reached.append(box)
    return True


# -- the tree ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OptimizerLeaves:
    """An optimizer's leaves, by their paths below ``state`` and ``param_groups``."""

    state: list[tuple[TreePath, Leaf]] = field(default_factory=list)
    groups: list[tuple[TreePath, Leaf]] = field(default_factory=list)
    flattened: bool = False
    """Paths are strings with dots, and hyperparameters are stored per parameter
    (``flatten_optimizer_state_dict``)."""

    def add(self, leaf: Leaf, prefix: TreePath) -> bool:
        below = leaf.path[len(prefix) :]
        if not below or leaf.path[: len(prefix)] != prefix:
            return False
        if self.flattened:
            below = str(below[0]).partition(".")[::2]
        if below[0] in (STATE, GROUPS):
            (self.state if below[0] == STATE else self.groups).append((below[1:], leaf))
            return True
        return False


def sort_leaves(
    leaves: Sequence[Leaf],
) -> tuple[Models, Mapping[TreePath, OptimizerLeaves], list[Leaf]]:
    """Return subtrees that may be models, optimizers, and all leaves outside optimizers."""
    optimizers: dict[TreePath, OptimizerLeaves] = {}
    for path in (leaf.path for leaf in leaves):
        index = next((i for i, part in enumerate(path[:-1]) if part == GROUPS), None)
        if index is not None and isinstance(path[index + 1], int):
            optimizers.setdefault(path[:index], OptimizerLeaves())
        elif str(path[-1]).startswith(f"{GROUPS}."):
            optimizers.setdefault(path[:-1], OptimizerLeaves(flattened=True))
    models: dict[TreePath, dict[str, torch.Tensor]] = {}
    rest = []
    for leaf in leaves:
        if not any(optimizer.add(leaf, prefix) for prefix, optimizer in optimizers.items()):
            rest.append(leaf)
            if leaf.tensor is not None and isinstance(leaf.path[-1], str):
                models.setdefault(leaf.path[:-1], {})[leaf.path[-1]] = leaf.tensor
    return models, optimizers, rest


def largest_models(models: Models) -> list[TreePath]:
    """Return the subtrees with the most tensors; the counter of an average has no dimensions."""
    counts = {
        path: sum(tensor.ndim > 0 for tensor in leaves.values()) for path, leaves in models.items()
    }
    return [path for path, count in counts.items() if count == max(counts.values())]


def _describe_models(paths: Sequence[TreePath], where: Path) -> str:
    """Describe several subtrees that may be the model; else empty."""
    if not paths[1:]:
        return ""
    keys = "".join(f"[{part!r}]" for part in paths[-1])
    return (
        f"{where} contains several models ({', '.join(map(format_tree_path, paths))}) with the "
        "same number of tensors, expected one. To select one, run "
        f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {where} all.pt, then "
        f"torch.save(torch.load('all.pt'){keys}, 'weights.pt') in Python"
    )


def choose_model(models: Models, live: Manifest, where: Path) -> TreePath:
    """Return the subtree with the live model's parameters."""
    if not models:
        msg = f"{where} contains no tensors, so it is not a checkpoint of a model"
        raise CheckpointFormatError(msg)
    wanted = [{p.name, *p.aliases} for p in live.parameters]
    counts = {
        path: sum(not names.isdisjoint(leaves) for names in wanted)
        for path, leaves in models.items()
    }
    fitting = [path for path, count in counts.items() if count == len(wanted)]
    if len(fitting) == 1:
        return fitting[0]
    if len(counts) == 1:
        return next(iter(counts))
    listed = ", ".join(
        f"{format_tree_path(path)} ({count} of {len(wanted)})" for path, count in counts.items()
    )
    what = "several of them contain" if fitting else "none of them contains"
    msg = (
        f"{where} has tensors in {listed}, and {what} all parameters of this model: resume from a "
        "checkpoint of one model"
    )
    raise CheckpointMismatchError(msg)


# -- data ----------------------------------------------------------------------------------------


def overlaps(
    run: StoredRun, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield the elements that a run and a box of a tensor of ``shape`` have in common.

    Each item is the offset in the flat box, and the elements ``[start, stop)`` of the flat tensor.
    """
    cut = len(shape)
    while cut and sizes[cut - 1] == shape[cut - 1]:
        cut -= 1
    # From dimension `cut` on, the box is as wide as the tensor: its elements are consecutive.
    outer = max(cut - 1, 0)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    length = math.prod(sizes[outer:])
    base = sum(o * s for o, s in zip(offsets, strides, strict=True))
    places = itertools.product(*(range(n) for n in sizes[:outer]))
    for number, place in enumerate(places):
        start = base + sum(p * s for p, s in zip(place, strides[:outer], strict=True))
        low, high = max(start, run.start), min(start + length, run.stop)
        if low < high:
            yield number * length + low - start, low, high


def _sorted(chunks: Iterable[Chunk]) -> list[Chunk]:
    return sorted(chunks, key=lambda chunk: (chunk.file, chunk.start))


# -- optimizers ----------------------------------------------------------------------------------


def state_dict_of(leaves: OptimizerLeaves, values: Mapping[str, Any]) -> StateDict:
    """Return the saved state dict of an optimizer, from the values of its leaves by key."""
    state: dict[Any, StateDict] = {}
    for path, leaf in leaves.state:
        if len(path) > 1:
            state.setdefault(path[0], {})[".".join(map(str, path[1:]))] = values[leaf.key]
    numbered: dict[Any, StateDict] = {}
    for path, leaf in leaves.groups:
        numbered.setdefault(path[0], {})[".".join(map(str, path[1:]))] = values[leaf.key]
    groups = [{"params": [], **numbered[index]} for index in sorted(numbered)]
    # torch writes each key of a dict as text: positions become numbers again.
    numbers = {str(key): key for g in groups for key in g["params"] if isinstance(key, int)}
    state = {numbers.get(key, key): value for key, value in state.items()}
    return {"state": state, "param_groups": groups}


def flattened_state_dict_of(
    leaves: OptimizerLeaves, values: Mapping[str, Any], live: Manifest, names: Iterable[str]
) -> StateDict:
    """Return such a state dict in the live groups, if it has hyperparameters per parameter.

    ``names`` are the names in the saved model.
    """
    named = _by_name(leaves.state, values, names)
    groups = _groups_by_name(_by_name(leaves.groups, values, names), named, live)
    return {"state": named, "param_groups": groups}


def _by_name(
    leaves: list[tuple[TreePath, Leaf]], values: Mapping[str, Any], names: Iterable[str]
) -> dict[str, StateDict]:
    """Split ``<parameter>.<key>``: no name of a parameter, with a dot, is a prefix of another."""
    known = set(names)
    states: dict[str, StateDict] = {}
    for path, leaf in leaves:
        parts = str(path[0]).split(".")
        for length in range(1, len(parts)):
            name, key = ".".join(parts[:length]), ".".join(parts[length:])
            if name in known:
                break
        else:
            name, _, key = str(path[0]).rpartition(".")
        states.setdefault(name, {})[key] = values[leaf.key]
    return states


def _hyperparameters(fields: StateDict) -> StateDict:
    return {key: value for key, value in fields.items() if key not in MEMBERS}


def _groups_by_name(
    saved_fields: Mapping[str, StateDict], state: Mapping[str, StateDict], live: Manifest
) -> list[StateDict]:
    """Return the live groups with the saved hyperparameters of their members."""
    canonical = {n: p.name for p in live.parameters for n in (p.name, *p.aliases)}
    index_of = {name: index for index, g in enumerate(live.groups) for name in g.names}
    groups: list[StateDict] = [{"params": []} for _ in live.groups]
    for name, its_fields in saved_fields.items():
        index = index_of.get(canonical.get(name, name))
        if index is None:
            if name in state:  # It was trained when saved, so it must be reported.
                groups[0]["params"].append(name)
            continue
        fields = _hyperparameters(its_fields)
        group = groups[index]
        have = {key: value for key, value in group.items() if key != "params"}
        if group["params"] and canonical_repr(have, name) != canonical_repr(fields, name):
            msg = (
                f"{name} and {group['params'][0]} are in one parameter group here, and were saved "
                f"with the hyperparameters {fields} and {have}: configure the groups of the run "
                f"that was saved, or {FRESH_OPTIMIZER_HINT}"
            )
            raise CheckpointMismatchError(msg)
        group.update(fields)
        group["params"].append(name)
    return groups


class DcpReader(FullStateReader):
    """A directory of chunks, and of Lightning's file with the trainer's state if there is one."""

    def __init__(self, files: ForeignFiles, *, allow_pickle: bool) -> None:
        metadata = read_metadata(files.folder)
        super().__init__(files.folder, files, self)
        self._policy = foreign_policy(allow_pickle=allow_pickle)
        self._chunks = {leaf.tensor: leaf.chunks for leaf in metadata.leaves}
        self._in_order = _sorted({chunk for leaf in metadata.leaves for chunk in leaf.chunks})
        self._check_sizes()
        self._check_encoding(metadata)
        self._models, self._saved_optimizers, self._rest = sort_leaves(metadata.leaves)
        models = largest_models(self._models)
        trainer = self._trainer_state()
        names = [METADATA_NAME, *dict.fromkeys(chunk.file for chunk in self._in_order)]
        self._names = [*names, *([TRAINER_STATE] if trainer else [])]
        self._full_state = FullState(
            weights={},
            optimizers=(),
            save_id=file_list_digest(self.path, self._names, files.progress),
            trainer=trainer,
            ordered=metadata.ordered,
            info=SourceInfo(
                "directory of torch.distributed.checkpoint",
                ambiguous=_describe_models(models, self.path),
                incomplete="" if trainer else self._without_trainer_state(),
                **self._mixture(trainer),
            ),
        )
        self._chosen: list[Mapping[str, torch.Tensor]] = []
        self._choose(models[0] if models else ())
        self._set_content(self._full_state)

    def _check_sizes(self) -> None:
        wrong = []
        for name, chunks in itertools.groupby(self._in_order, key=lambda chunk: chunk.file):
            end = max(chunk.start + chunk.size_bytes for chunk in chunks)
            path = self.path / name
            size = path.stat().st_size if path.is_file() else None
            self.files.progress.check()
            if size is None or size < end:
                wrong.append(f"{name} ({'missing' if size is None else f'{size} of {end} bytes'})")
        if wrong:
            msg = (
                f"{self.path} is incomplete: {', '.join(wrong)}. Copy all files of this "
                "checkpoint again, or resume from another one"
            )
            raise CheckpointCorruptedError(msg)

    def _check_encoding(self, metadata: Metadata) -> None:
        """Refuse files and trees of options of torch that this reader does not support, by name."""
        tensors = [
            leaf.chunks[0] for leaf in metadata.leaves if leaf.tensor is not None and leaf.chunks
        ]
        if tensors and self._is_safetensors(tensors[0]):
            msg = (
                f"{self.path} was written with SerializationFormat.SAFETENSORS: .metadata has no "
                "offsets of its tensors, so torch's FileSystemReader cannot read it either. Save "
                "it with SerializationFormat.TORCH_SAVE, the default, or resume from another "
                "checkpoint"
            )
            raise UnsupportedError(msg)
        if metadata.flattened:
            return
        objects = {leaf.chunks[0]: leaf.key for leaf in metadata.leaves if leaf.tensor is None}
        nested = [
            objects[chunk]
            for chunk, section in self._sections(objects)
            if next(tensors_of(TorchFile(section, self._policy).tree), None) is not None
        ]
        if nested:
            msg = (
                f"{self.path} was written with flatten_state_dict=False, so {format_names(nested)} "
                "are pickled objects with tensors inside, each whole. Save it with the default "
                "DefaultSavePlanner, or load it with torch and write it with torch.save"
            )
            raise UnsupportedError(msg)

    def _is_safetensors(self, chunk: Chunk) -> bool:
        """Whether a chunk begins with a header of safetensors: its length, and JSON."""
        with RangeFile(self.path / chunk.file, self.files.progress) as file:
            return file.read(chunk.start, min(chunk.start + 10, file.size_bytes))[8:] == b'{"'

    def _sections(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, RangeFile]]:
        """Yield chunks in the order of the files, each selected in its open file."""
        for name, of_file in itertools.groupby(_sorted(chunks), key=lambda chunk: chunk.file):
            with RangeFile(self.path / name, self.files.progress) as file:
                for chunk in of_file:
                    file.select(chunk.start, chunk.size_bytes)
                    yield chunk, file

    def read_into(
        self, wanted: Iterable[tuple[torch.Tensor, StoredRun]], progress: Progress = NO_PROGRESS
    ) -> int:
        parts: dict[Chunk, list[tuple[torch.Tensor, int, torch.Tensor]]] = {}
        for target, run in wanted:
            run.check_fills(target, self.path)
            for chunk in self._chunks[run.tensor]:
                shape = tuple(run.tensor.shape)
                for at, start, stop in overlaps(run, shape, chunk.offsets, chunk.sizes):
                    part = target.detach()[start - run.start : stop - run.start]
                    parts.setdefault(chunk, []).append((part, at, run.tensor))
        bytes_read = 0
        for chunk, section in self._sections(parts):
            file = TorchFile(section, self._policy)
            stored = file.tree
            kind = (tuple(stored.shape), stored.dtype)
            if kind != (chunk.sizes, parts[chunk][0][2].dtype):
                msg = (
                    f"{section.path} has a tensor of {kind} at byte {chunk.start}, expected "
                    f"{chunk.sizes}: the files are of different checkpoints. Resume from another"
                )
                raise CheckpointCorruptedError(msg)
            runs = [(part, StoredRun(stored, at, at + len(part))) for part, at, _ in parts[chunk]]
            file.read_into(runs, progress)
            bytes_read += section.bytes_read
        return bytes_read

    def load_tree(self, subtree: Any) -> Any:
        tensors = [tensor for tensor in tensors_of(subtree) if tensor in self._chunks]
        copies = {tensor: torch.empty_like(tensor, device="cpu") for tensor in tensors}
        self.read_into(
            (copy.view(-1), StoredRun(tensor, 0, tensor.numel()))
            for tensor, copy in copies.items()
            if tensor.numel()
        )
        return with_copies(subtree, copies)

    def _values_of(self, leaves: Sequence[Leaf]) -> dict[str, Any]:
        """Return the values of leaves by their keys."""
        tensors: dict[str, Any] = {leaf.key: leaf.tensor for leaf in leaves}
        objects = {leaf.chunks[0]: leaf.key for leaf in leaves if leaf.tensor is None}
        values: dict[str, Any] = self.load_tree(tensors)
        for chunk, section in self._sections(objects):
            file = TorchFile(section, self._policy)
            values[objects[chunk]] = file.load_tree(file.tree)
        return values

    def _values_of_optimizer(self, leaves: OptimizerLeaves) -> dict[str, Any]:
        """Return an optimizer's leaves by key, with values except of its states' tensors."""
        states = [leaf for _, leaf in leaves.state]
        loaded = [leaf for leaf in states if leaf.tensor is None]
        loaded += [leaf for _, leaf in leaves.groups]
        return {**{leaf.key: leaf.tensor for leaf in states}, **self._values_of(loaded)}

    # -- files of several saves ------------------------------------------------------------------

    def _mixture(self, trainer: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of ``SourceInfo`` that describe files of several saves.

        A save overwrites the files of a directory in place, then ``.metadata``, then Lightning's
        file. Different steps are no proof, since a parameter without a gradient takes none, and
        times are none, since a copy may lose them.
        """
        metadata = self.path / METADATA_NAME
        files = {chunk.file for chunk in self._in_order}
        last_s = metadata.stat().st_mtime + _CLOCKS_S
        late = sorted(name for name in files if (self.path / name).stat().st_mtime > last_s)
        is_lightnings = _LIGHTNINGS_VERSION in trainer
        if not (late or is_lightnings):
            return {}
        steps = self._steps(every=bool(late))
        killed = "a save was killed while it overwrote the files. Resume from another checkpoint"
        most, counted = max(steps.values(), default=0), trainer.get("global_step")
        # It stays 0 if a module steps optimizers without Lightning's wrapper.
        if is_lightnings and type(counted) is int and 0 < counted < most:
            why = f"Adam has taken {most} steps, but {TRAINER_STATE} is of step {counted}"
            if len({*self._steps(every=True).values()}) > 1:
                differing = f"{why}, and files have different steps: {killed}"
                return {"mixed": differing, "is_torn": True}
            if (self.path / TRAINER_STATE).stat().st_mtime < metadata.stat().st_mtime:
                return {"mixed": f"{why}, and older than {METADATA_NAME}: {killed}"}
            # The module may step its optimizer several times per step of Lightning.
            return {"doubt": f"{why}: maybe {killed}"}
        if not late or (steps.keys() == files and len({*steps.values()}) == 1):
            return {}
        order = f"{format_names(late)}: written after {METADATA_NAME}, which a save writes last"
        copied = f"If the directory is a copy that lost the times of its files, touch {metadata}"
        here = max((steps[name] for name in steps if name in late), default=0)
        there = max((steps[name] for name in steps if name not in late), default=0)
        if here and there and here != there:
            why = f"Adam has taken {here} steps there, {there} in other files"
            return {"mixed": f"{order}. {why}: {killed}. {copied}", "is_torn": True}
        return {"doubt": f"{order}: maybe {killed}. {copied}"}

    def _steps(self, *, every: bool) -> dict[str, int]:
        """Return the most steps that Adam has taken for a parameter, by the counters' files.

        Reading a counter takes a millisecond. If not ``every``, one of each file is read.
        """
        leaves: list[Leaf] = []
        for optimizer in self._saved_optimizers.values():
            of_key = {format_tree_path(path): leaf for path, leaf in optimizer.state}
            parameters = (key[: -len(".exp_avg")] for key in of_key if key.endswith(".exp_avg"))
            leaves += [of_key[key] for name in parameters if (key := f"{name}.step") in of_key]
        leaves = [leaf for leaf in leaves if leaf.tensor is None or leaf.tensor.numel() == 1]
        if not every:
            leaves = list({leaf.chunks[0].file: leaf for leaf in leaves}.values())
        values, steps = self._values_of(leaves), dict[str, int]()
        for leaf in leaves:
            value, file = values[leaf.key], leaf.chunks[0].file
            step = value.item() if isinstance(value, torch.Tensor) else value
            if isinstance(step, int) or (isinstance(step, float) and step.is_integer()):
                steps[file] = max(int(step), steps.get(file, 0))
        return steps

    # -- model, optimizer and trainer ------------------------------------------------------------

    def _trainer_state(self) -> Mapping[str, Any]:
        if not (self.path / TRAINER_STATE).is_file():
            return {}
        tree = self.files.tree(TRAINER_STATE)
        if not isinstance(tree, Mapping):
            msg = f"{self.path / TRAINER_STATE} contains a {type(tree).__name__}, expected a dict"
            raise CheckpointFormatError(msg)
        return tree

    def _without_trainer_state(self) -> str:
        """Describe that Lightning's file is missing; empty if plain torch may have saved this."""
        if _LIGHTNINGS_OPTIMIZER not in self._saved_optimizers:
            return ""
        return (
            f"{self.path} is incomplete: it has {_LIGHTNINGS_OPTIMIZER[0]}, as Lightning's "
            f"checkpoints do, but {TRAINER_STATE}, which Lightning writes last, is missing. "
            "Counters, loops, schedulers and callbacks would start from the beginning. Resume from "
            "another checkpoint, or copy that file too"
        )

    def _choose(self, model: TreePath) -> None:
        self._model = model
        left = [format_tree_path(path) for path in self._models if path != model]
        left = [f"the tensors of {', '.join(left)}"] if left else []
        if self._full_state.info.incomplete:
            left.append(f"the trainer's state (Lightning's {TRAINER_STATE})")
        self._chosen.append(self._models.get(model, {}))
        info = replace(self._full_state.info, lacks=tuple(left))
        self._full_state = replace(self._full_state, weights=self._chosen[-1], info=info)

    def bind(self, live: Manifest) -> None:
        if live is not self._own:
            self._choose(choose_model(self._models, live, self.path))
        optimizers, why = self._optimizers(live)
        info = replace(self._full_state.info, unmatched=why)
        self._set_content(replace(self._full_state, optimizers=optimizers, info=info), live)

    def _members_without_model(self) -> Table:
        optimizers, weights = list(self._saved_optimizers.values()), self._full_state.weights
        refuse_several(len(optimizers))
        if not optimizers:
            return ()
        values = self._values_of_optimizer(optimizers[0])
        if not optimizers[0].flattened:
            return members_of(state_dict_of(optimizers[0], values), weights)
        # Parameters with equal hyperparameters form a group.
        alike: dict[str, list[str]] = {}
        for name, fields in _by_name(optimizers[0].groups, values, weights).items():
            alike.setdefault(canonical_repr(_hyperparameters(fields), name), []).append(name)
        return tuple(map(tuple, alike.values()))

    def names(self) -> Sequence[str]:
        return self._names

    def _optimizers(self, live: Manifest) -> tuple[list[dict[str, Any]], str]:
        """Return the optimizer's state dict, and the reason if it cannot be used."""
        saved = self._saved_optimizers
        if AVERAGING in self._full_state.trainer and saved:
            why = (
                "its model is the average of WeightAveraging, but its optimizer state belongs to "
                f"the trained weights, which it does not contain; {FRESH_OPTIMIZER_HINT}"
            )
            return [{}], why
        if len(saved) > 1:
            listed = ", ".join(map(format_tree_path, saved))
            why = f"it contains the states of {len(saved)} optimizers ({listed})"
            return [{}], f"{why}; {FRESH_OPTIMIZER_HINT}"
        if not saved or not live.groups:
            return [{} for _ in saved], ""
        leaves = next(iter(saved.values()))
        try:
            values = self._values_of_optimizer(leaves)
            if not leaves.flattened:
                return [state_dict_of(leaves, values)], ""
            names = self._full_state.weights
            return [flattened_state_dict_of(leaves, values, live, names)], ""
        except CheckpointMismatchError as error:
            return [{}], str(error)

    def verify(self, rank: int, world_size: int, progress: Progress) -> list[str]:
        handled = sys.exc_info()[1]
        without: dict[str, None] = {}
        for chunk, section in self._sections(self._in_order[rank::world_size]):
            try:
                with zipfile.ZipFile(as_stream(section)) as archive:
                    records = archive.infolist()
                    if not any(info.CRC for info in records):  # They were switched off.
                        without[chunk.file] = None
                        continue
                    for info in records:
                        with archive.open(info) as record:
                            while data := record.read(_VERIFIED_BYTES):
                                progress.advance(len(data))
            except (zipfile.BadZipFile, OSError, ValueError, EOFError) as error:
                raise_disk_error(error, handled)
                msg = (
                    f"{section.path} is damaged at bytes {chunk.start} to "
                    f"{chunk.start + chunk.size_bytes} ({error}): resume from another checkpoint, "
                    "or copy this file again from an intact copy"
                )
                raise CheckpointCorruptedError(msg) from error
        checks_trainer = rank == 0 and bool(self._full_state.trainer)
        if checks_trainer and not self.files.get(TRAINER_STATE).verify(progress):
            without[TRAINER_STATE] = None
        return list(without)

    def _is_weight(self, leaf: Leaf) -> bool:
        """Whether a leaf was used as a weight, at first or after ``bind``."""
        name = str(leaf.path[-1])
        return any(weights.get(name) is leaf.tensor for weights in self._chosen)

    def engine_state(self) -> SharedState:
        state, depth = super().engine_state(), len(self._model)
        objects = [leaf for leaf in self._not_weights() if leaf.tensor is None]
        inside = [leaf for leaf in objects if depth and leaf.path[:depth] == self._model]
        outside = [leaf for leaf in self._not_weights() if leaf not in inside]
        return replace(
            state,
            client_state={
                **dict.fromkeys(str(leaf.path[0]) for leaf in outside),
                **state.client_state,
            },
            extra_states={str(leaf.path[depth]): None for leaf in inside},
        )

    def _not_weights(self) -> list[Leaf]:
        """Return objects and scalars outside optimizers, except scalar weights."""
        return [
            leaf
            for leaf in self._rest
            if leaf.tensor is None or (not leaf.tensor.ndim and not self._is_weight(leaf))
        ]

    def load_client_state(self) -> dict[str, Any]:
        """Return the trainer's state, with objects and scalars outside model and optimizer."""
        rest = self._not_weights()
        inside = [leaf for leaf in rest if self._model and leaf.path[:-1] == self._model]
        if strange := [leaf.key for leaf in inside if leaf.tensor is None]:
            msg = (
                f"{self.path}: {strange[0]!r} of the model is not a tensor, so no engine can load "
                "it: save the model again without it"
            )
            raise UnsupportedError(msg)
        values = self._values_of(rest)
        tree: dict[str, Any] = {}
        for leaf in rest:
            node = tree
            for part in leaf.path[:-1]:
                node = node.setdefault(str(part), {})
            node[str(leaf.path[-1])] = values[leaf.key]
        trainer = self._full_state.trainer
        return {**tree, **(self.files.load(TRAINER_STATE, dict(trainer)) if trainer else {})}
