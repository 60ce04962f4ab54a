"""The manifest, ``manifest.json``: frozen dataclasses, to and from JSON, with checks.

The manifest is written last and commits the checkpoint. It contains names and numbers, and for each
file its size and the digest of its checksums. Files that it does not name are never read.
``docs/format.md`` describes every field; ``storage`` writes and finds the file. Readers refuse a
newer ``format_version`` and ignore unknown fields of the same version. The field ``digest`` is the
digest of all other bytes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import PurePosixPath
from typing import Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from lightning_elastic_zero.core.cuts import Cut
from lightning_elastic_zero.core.grid import RankGrid
from lightning_elastic_zero.core.layout import Layout, Resharding, ShardedLayout, Sharding
from lightning_elastic_zero.core.partition import (
    FlatBuffer,
    frozen_partition,
    zero_layout,
)
from lightning_elastic_zero.errors import CheckpointCorruptedError, CheckpointFormatError

R = TypeVar("R")

DIGEST_FIELD = "digest"

_BLANK = "0" * hashlib.sha256().digest_size * 2
"""Replaces the digest while it is computed."""

FORMAT = "lightning_elastic_zero"

FORMAT_VERSION = 2
"""The newest version; see ``Manifest.format_version``."""

MANIFEST_NAME = "manifest.json"

_DIGEST = re.compile("[0-9a-f]{32}")

STAGES = (0, 1, 2, 3)

STAGE_WEIGHTS = 3
"""The ZeRO stage that partitions the weights too."""

BUFFERS = "buffers"
"""In ``Manifest.rank_state``: shards have module buffers that differ from rank 0's."""

OWN_STATE = "state"
"""In ``Manifest.rank_state``: shards have a rank's own state of the trainer or of modules."""

MODULE_WEIGHTS = "module_weights"
"""In ``Manifest.rank_state``: shards have weights that are not the rounded masters."""

SCALARS = "scalars"
"""In ``Manifest.rank_state``: scalar optimizer states differ between ranks or between flat buffers
(``StateKey.may_differ``)."""

EXTRA_STATE = "_extra_state"
"""Last part of the name of ``get_extra_state``'s value in torch's ``state_dict``."""

Plain: TypeAlias = (
    "bool | int | float | str | list[Plain] | tuple[Plain, ...] | dict[str, Plain] | None"
)
"""Types of hyperparameters: JSON's values and tuples, such as ``betas``."""

_TAGS = ({"tuple"}, {"dict"})


def load_json(text: str | bytes) -> Any:
    """Parse JSON; raise ValueError also if it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        msg = "nested too deeply"
        raise ValueError(msg) from error


def from_json(cls: type[R], row: object, untag: Callable[[Any], Any] = lambda value: value) -> R:
    """Build a dataclass from JSON, with lists as tuples, ignoring unknown fields.

    Its fields have plain types, dataclasses, or tuples of those. ``untag`` is applied to values of
    mappings. Raises TypeError if a field is missing or has another type, ValueError if the
    dataclass refuses a value.
    """
    if not isinstance(row, dict):
        msg = f"{row!r} is not a {cls.__name__}"
        raise TypeError(msg)
    values: dict[str, Any] = {}
    for known, kind in _fields_of(cls):  # type: ignore[arg-type]
        if known.name not in row:
            continue
        value, inner = row[known.name], get_args(kind)
        if is_dataclass(kind):
            values[known.name] = from_json(kind, value, untag)  # type: ignore[arg-type]
        elif inner and is_dataclass(inner[0]):
            row_type: Any = inner[0]
            if not isinstance(value, list):
                msg = f"{value!r} is not a table of {row_type.__name__}"
                raise TypeError(msg)
            values[known.name] = tuple(from_json(row_type, row, untag) for row in value)
        else:
            value = untag(value) if get_origin(kind) is Mapping else value
            value = tuple(value) if isinstance(value, list) else value
            if not _is(kind, value):
                msg = f"{cls.__name__}.{known.name} is {value!r}, not {known.type}"
                raise TypeError(msg)
            values[known.name] = value
    return cls(**values)


@cache
def _fields_of(cls: type[Any]) -> list[tuple[Field[Any], Any]]:
    hints = get_type_hints(cls)
    return [(field, hints[field.name]) for field in fields(cls)]


def _is(kind: Any, value: object) -> bool:
    """Whether a value is of a plain type, one of several, a literal, a tuple, or a mapping."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in inner
    if origin is tuple:
        return type(value) is tuple and all(type(item) is inner[0] for item in value)
    if origin is Mapping:
        return type(value) is dict
    return type(value) in (inner or (kind,))


def dump_with_digest(content: Mapping[str, Any]) -> str:
    """Return the sorted and indented text of a JSON object with its digest."""
    text = json.dumps({**content, DIGEST_FIELD: _BLANK}, indent=1, sort_keys=True) + "\n"
    mark = f'"{DIGEST_FIELD}": "{_BLANK}"'
    return text.replace(mark, mark.replace(_BLANK, _digest(text)), 1)


def has_valid_digest(text: str, content: Mapping[str, Any]) -> bool:
    """Whether the digest in a text is that of the text."""
    named = content.get(DIGEST_FIELD)
    if not isinstance(named, str) or len(named) != len(_BLANK):
        return False
    return _digest(text.replace(named, _BLANK)) == named


def is_damaged(manifest: bytes) -> bool:
    """Whether the text of a ``manifest.json`` of this library was changed, or is not JSON.

    Those of other software, links and deletions have no digest.
    """
    try:
        text = manifest.decode()
        content = load_json(text)
    except ValueError:
        return True
    has_digest = isinstance(content, dict) and (
        content.get("format") == FORMAT or DIGEST_FIELD in content
    )
    return has_digest and not has_valid_digest(text, content)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class Parameter:
    """One row of the parameter table."""

    name: str
    """As in ``named_parameters()``; the first name of a tied weight."""
    shape: tuple[int, ...]
    dtype: str
    """Low-precision (module) dtype, such as ``"bfloat16"``."""
    group: int | None
    """Index of its optimizer parameter group; None if the optimizer does not own it: frozen
    parameters, and those without elements."""
    aliases: tuple[str, ...] = ()
    """The other names of a tied weight."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


StateKind: TypeAlias = Literal["elementwise", "scalar"]


@dataclass(frozen=True, slots=True)
class StateKey:
    """One optimizer state with the optimizer's own name (``exp_avg``, ``step``, ...)."""

    name: str
    kind: StateKind
    """``"elementwise"``: one value per element, partitioned like the parameter. ``"scalar"``: one
    value per flat buffer, a 0-dimensional tensor or a number, equal on all ranks unless it
    ``may_differ``."""
    dtype: str
    """Of the tensor; ``"int"``, ``"float"``, ``"bool"`` or ``"None"`` for a Python value."""

    @property
    def is_elementwise(self) -> bool:
        """Whether it is partitioned; mypy reports a kind for which this is not decided."""
        match self.kind:
            case "elementwise":
                return True
            case "scalar":
                return False

    @property
    def may_differ(self) -> bool:
        """Whether each rank may have another value: it is a measurement, not a count of steps.

        transformers' Adafactor keeps the norm of the elements that it was given (``RMS``).
        """
        is_float = self.dtype.startswith(("float", "bfloat"))
        return not self.is_elementwise and is_float and self.name != "step"


@dataclass(frozen=True, slots=True)
class Group:
    """One optimizer parameter group."""

    names: tuple[str, ...]
    """The parameters in it that the optimizer owns, in the optimizer's order."""
    hyperparameters: Mapping[str, Plain]
    """The group's dict without its parameters: ``lr``, ``betas``, ``initial_lr``, ..."""
    state: tuple[StateKey, ...]
    """Empty before the first step, and in a weights-only checkpoint."""

    @property
    def elementwise(self) -> tuple[StateKey, ...]:
        """Its states with one value per element."""
        return tuple(key for key in self.state if key.is_elementwise)

    @property
    def scalars(self) -> tuple[StateKey, ...]:
        """Its states with one value per flat buffer."""
        return tuple(key for key in self.state if not key.is_elementwise)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of the checkpoint."""

    name: str
    """Path inside the checkpoint's directory, with forward slashes."""
    size_bytes: int
    """Size of the file without its sidecar."""
    sums_digest: str
    """The xxh3_128, in hexadecimal, of the sidecar with the checksums of its chunks."""

    def __post_init__(self) -> None:
        path = PurePosixPath(self.name)
        inside = self.name == str(path) and not path.is_absolute() and ".." not in path.parts
        if not inside or self.name in {"", "."} or "\\" in self.name or "\0" in self.name:
            msg = f"invalid name of a file of a checkpoint: {self.name!r}"
            raise CheckpointFormatError(msg)
        if self.size_bytes < 0 or not _DIGEST.fullmatch(self.sums_digest):
            msg = f"{self.name}: invalid size {self.size_bytes} or digest {self.sums_digest!r}"
            raise CheckpointFormatError(msg)


@dataclass(frozen=True, slots=True)
class Writer:
    """Releases and classes that wrote the checkpoint, for messages and bug reports."""

    library: str = ""
    torch: str = ""
    deepspeed: str = ""
    lightning: str = ""
    engine: str = ""
    """Name of DeepSpeed's optimizer wrapper class."""
    optimizer: str = ""
    """Name of the optimizer's class inside the wrapper."""


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Progress of the run, in units that do not depend on the number of devices."""

    global_steps: int = 0
    """Optimizer steps counted by DeepSpeed."""
    global_samples: int = 0
    """Samples counted by DeepSpeed, at the batch size of each run."""
    skipped_steps: int = 0
    """Steps skipped for overflow (fp16)."""
    micro_steps: int = 0
    """Backward passes counted by DeepSpeed: ``gradient_accumulation_steps`` per step."""
    gradient_accumulation_steps: int = 1
    global_batch_size: int | None = None
    """Samples per optimizer step; None if not configured."""
    sampler: Mapping[str, Plain] = field(default_factory=dict)
    """Position in the training data; see ``data_progress.position.DataPosition``."""


@dataclass(frozen=True, slots=True)
class Shard:
    """What one tensor rank has and another has not."""

    buffers: tuple[FlatBuffer, ...]
    """The flat buffers, with the elements of this tensor rank's shards."""


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Tensor parallelism: each of ``size`` neighbouring ranks has a shard of some parameters."""

    size: int = 1
    """Number of tensor ranks. Each has ``Manifest.world_size`` data ranks."""
    cuts: tuple[Cut, ...] = ()
    """The parameters that are cut. Every tensor rank has all others whole."""
    shards: tuple[Shard, ...] = ()
    """Of the tensor ranks from 1 on."""

    def with_names(self, named: Callable[[str], str]) -> TensorParallel:
        """Return it with other names of the parameters."""
        return replace(
            self,
            cuts=tuple(replace(cut, name=named(cut.name)) for cut in self.cuts),
            shards=tuple(
                Shard(tuple(b.with_names(named) for b in shard.buffers)) for shard in self.shards
            ),
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    """Description of a checkpoint, from which a restore is planned."""

    save_id: str
    """Unique to one save. Every shard contains it, so that saves cannot be mixed."""
    stage: int
    """ZeRO stage of the engine that wrote it, 0 to 3."""
    world_size: int
    """Data-parallel ranks that wrote it, of each tensor rank."""
    precision: str
    """Precision of the module: ``"fp32"``, ``"bf16"``, ``"fp16"``; other software: any dtype."""
    master_dtype: str
    """Dtype of the masters: ``"float32"`` except with DeepSpeed's low-precision options."""
    parameters: tuple[Parameter, ...]
    """All parameters of the module, including frozen ones."""
    groups: tuple[Group, ...]
    """The optimizer's parameter groups, in its order."""
    buffers: tuple[FlatBuffer, ...]
    """The flat buffers in order. With ``stage`` and ``world_size`` they determine the layout. Those
    of tensor rank 0; in a live run, of this rank's tensor rank."""
    module_buffers: tuple[str, ...]
    """Names of the persistent module buffers."""
    files: tuple[FileEntry, ...]
    """The files with the state. Each has a sidecar with its checksums."""
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    """Counters and position in the data."""
    writer: Writer = field(default_factory=Writer)
    """Libraries and releases that wrote it."""
    weights_only: bool = False
    """Whether it has masters, frozen weights and buffers but no optimizer state."""
    excluded: tuple[str, ...] = ()
    """Frozen parameters and buffers excluded by ``exclude_frozen_parameters`` or
    ``on_save_checkpoint``."""
    rank_state: tuple[str, ...] = ()
    """Kinds of state that ranks store besides the rest: ``BUFFERS``, ``OWN_STATE``, ``SCALARS`` and
    ``MODULE_WEIGHTS``."""
    client_objects: tuple[str, ...] = ()
    """Paths in the client state of objects that are not plain data, stored in another file."""
    tensor_parallel: TensorParallel = TensorParallel()
    """Tensor parallelism of the run that wrote it."""

    @property
    def format_version(self) -> int:
        """1 if there is one tensor rank: older releases know no shards."""
        return 2 if self.tensor_parallel.size > 1 else 1

    @property
    def optimized(self) -> tuple[Parameter, ...]:
        """The parameters that the optimizer owns."""
        return tuple(p for p in self.parameters if p.group is not None)

    @property
    def frozen(self) -> tuple[Parameter, ...]:
        """The stored parameters that the optimizer does not own."""
        left_out = set(self.excluded)
        return tuple(p for p in self.parameters if p.group is None and p.name not in left_out)

    def names(self) -> tuple[str, ...]:
        """Return the names of parameters, including aliases of tied ones, and of buffers."""
        aliases = (alias for p in self.parameters for alias in p.aliases)
        return (*(p.name for p in self.parameters), *aliases, *self.module_buffers)

    @property
    def grid(self) -> RankGrid:
        """The ranks that wrote it."""
        return RankGrid(self.world_size, self.tensor_parallel.size)

    def has_same_partition(self, other: Manifest) -> bool:
        """Whether each rank holds the same elements in the same flat buffers."""
        mine, others = ((m.stage, m.buffers, m.tensor_parallel.cuts) for m in (self, other))
        return mine == others and self.grid == other.grid

    def layout(self) -> Layout:
        if self.tensor_parallel.size > 1:
            return ShardedLayout([shard.layout() for shard in self.shards()])
        return zero_layout(self.stage, self.buffers, self.world_size)

    def frozen_layout(self) -> Layout:
        """Return the layout of the frozen parameters in the ranks' files."""
        if self.tensor_parallel.size > 1:
            return ShardedLayout([shard.frozen_layout() for shard in self.shards()])
        ranks = self.world_size if self.stage == STAGE_WEIGHTS else 1
        return frozen_partition(((p.name, p.numel) for p in self.frozen), ranks)

    def shards(self) -> tuple[Manifest, ...]:
        """Return each tensor rank's manifest, in which its shards are the whole parameters."""
        others = tuple(shard.buffers for shard in self.tensor_parallel.shards)
        return tuple(map(self.as_shard, itertools.count(), (self.buffers, *others)))

    def as_shard(self, tensor_rank: int, buffers: tuple[FlatBuffer, ...]) -> Manifest:
        """Return the manifest of a tensor rank with these flat buffers."""
        size = self.tensor_parallel.size
        if size == 1:
            return self
        cuts = self.sharding.cuts
        parameters = tuple(
            replace(p, shape=cuts[p.name].shape_on(tensor_rank, size, p.shape))
            if p.name in cuts
            else p
            for p in self.parameters
        )
        return replace(
            self, parameters=parameters, buffers=buffers, tensor_parallel=TensorParallel()
        )

    @property
    def sharding(self) -> Sharding:
        """The shards of the tensor ranks."""
        of = self.tensor_parallel
        return Sharding(of.size, {cut.name: cut for cut in of.cuts})

    def resharding(self, live: Manifest | None = None, tensor_rank: int = 0) -> Resharding:
        """Return where this checkpoint contains a live tensor rank's shards.

        Without a live run: whole parameters.
        """
        wanted = live.sharding if live else Sharding()
        shapes = {p.name: p.shape for p in self.parameters}
        return Resharding(self.sharding, wanted, tensor_rank, shapes)

    def to_json(self) -> str:
        """Return the text of ``manifest.json``, which is determined by the content."""
        content = {"format": FORMAT, "format_version": self.format_version, **asdict(self)}
        if self.format_version == 1:
            del content["tensor_parallel"]
        for group in content["groups"]:
            group["hyperparameters"] = _tag_tuples(group["hyperparameters"])
        content["progress"]["sampler"] = _tag_tuples(content["progress"]["sampler"])
        return dump_with_digest(content)


def manifest_from_json(text: str, where: str) -> Manifest:
    """Parse the text of ``manifest.json``; ``where`` is its path.

    Raises CheckpointFormatError if it is not valid JSON, of another format, newer than this reader,
    lacks a field, or its tables contradict each other; CheckpointCorruptedError if its digest does
    not match.
    """
    try:
        content = load_json(text)
    except ValueError as error:
        msg = f"{where} is not valid JSON ({error}): it is damaged; resume from another checkpoint"
        raise CheckpointFormatError(msg) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        msg = f"{where} is not a manifest of {FORMAT}"
        raise CheckpointFormatError(msg)
    version = content.get("format_version")
    if type(version) is not int or version < 1:
        msg = f"{where} has the format version {version!r}: the file is damaged"
        raise CheckpointFormatError(msg)
    if version > FORMAT_VERSION:
        msg = (
            f"{where} has format version {version}; this library reads up to {FORMAT_VERSION}: "
            "install a newer lightning_elastic_zero"
        )
        raise CheckpointFormatError(msg)
    if not has_valid_digest(text, content):
        msg = (
            f"{where} does not match its digest: it was damaged or edited; resume from another "
            "checkpoint"
        )
        raise CheckpointCorruptedError(msg)
    try:
        return _checked(content)
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{where}: a field is missing or invalid ({error!r})"
        cause: Exception = error
    except CheckpointFormatError as error:
        problem, cause = f"{where} contradicts itself ({error})", error
    msg = f"{problem}: the file is damaged; resume from another checkpoint"
    raise CheckpointFormatError(msg) from cause


def _checked(content: Mapping[str, Any]) -> Manifest:
    # Defaults are for the code only: on disk, all fields of the manifest are required.
    optional = {"tensor_parallel"} if content["format_version"] == 1 else set()
    if lacking := sorted(Manifest.__dataclass_fields__.keys() - content.keys() - optional):
        raise KeyError(*lacking)
    manifest = from_json(Manifest, content, _untag_tuples)
    if wrong := next(_contradictions(manifest), ""):
        raise CheckpointFormatError(wrong)
    manifest.layout()  # It refuses flat buffers that cannot hold their parameters.
    return manifest


def _contradictions(manifest: Manifest) -> Iterator[str]:
    if manifest.stage not in STAGES or manifest.world_size < 1:
        yield f"ZeRO stage {manifest.stage} on {manifest.world_size} devices"
    if wrong := [p.name for p in manifest.parameters if min(p.shape, default=0) < 0]:
        yield f"the shape of {wrong[0]} has a negative size"
    parallel, shapes = manifest.tensor_parallel, {p.name: p.shape for p in manifest.parameters}
    if len(parallel.shards) + 1 != parallel.size:
        yield f"{len(parallel.shards)} shards besides the first for {parallel.size} tensor ranks"
    elif unknown := [cut.name for cut in parallel.cuts if cut.name not in shapes]:
        yield f"{unknown[0]} is cut, but is not a parameter"
    else:
        for cut in parallel.cuts:
            cut.check(parallel.size, shapes[cut.name])
        for shard in manifest.shards():
            yield from _shard_contradictions(shard)
    for what, names in (
        ("parameters", [p.name for p in manifest.parameters]),
        ("cuts", [cut.name for cut in parallel.cuts]),
        ("files", [entry.name for entry in manifest.files]),
    ):
        if len(set(names)) != len(names):
            yield f"two {what} have the same name"
    held = {*(p.name for p in manifest.optimized), *manifest.module_buffers}
    if stray := set(manifest.excluded) & held:
        yield f"{min(stray)} is excluded, but is trained or a stored buffer"


def _shard_contradictions(manifest: Manifest) -> Iterator[str]:
    """Yield what contradicts itself in the tables of one tensor rank."""
    owned = {p.name: (p.group, p.numel) for p in manifest.optimized}
    placed = {
        name: (buffer.group, numel)
        for buffer in manifest.buffers
        for name, numel in zip(buffer.names, buffer.numels, strict=True)
    }
    if differ := {n for n in owned.keys() | placed if owned.get(n) != placed.get(n)}:
        yield f"the flat buffers and the parameter table differ in {min(differ)}"
    grouped = [(name, index) for index, g in enumerate(manifest.groups) for name in g.names]
    if sorted(grouped) != sorted((name, group) for name, (group, _) in owned.items()):
        yield "the groups and the parameter table differ in the members of groups"


def _tag_tuples(value: Plain) -> Plain:
    """Write tuples as ``{"tuple": [...]}``, and dicts like this tag as ``{"dict": {...}}``."""
    if isinstance(value, tuple):
        return {"tuple": [_tag_tuples(v) for v in value]}
    if isinstance(value, list):
        return [_tag_tuples(v) for v in value]
    if isinstance(value, dict):
        tagged = {k: _tag_tuples(v) for k, v in value.items()}
        return {"dict": tagged} if value.keys() in _TAGS else tagged
    return value


def _untag_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return [_untag_tuples(v) for v in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"tuple"}:
        return tuple(_untag_tuples(v) for v in value["tuple"])
    inside = value["dict"] if value.keys() == {"dict"} else value
    return {k: _untag_tuples(v) for k, v in inside.items()}
