"""Saving: every rank writes its shards into a hidden directory, and rank 0 publishes it.

Before, the ranks compare their tables, which grow with the number of parameters, and all ranks
share one store. So rank 0 sends a digest of each table and writes the tables into the new
directory; a rank reads a table only if its own digest differs. Hyperparameters may differ between
ranks: a scheduler that steps on a metric of one rank lowers the learning rate of that rank only. A
checkpoint for any number of ranks cannot keep that. The run continues: rank 0's values are saved,
and a warning names the difference.

Before publication, the save checks that ``torch.load(weights_only=True)`` can read the values.
Results of ``get_extra_state`` (scales of fp8 layers, counters) are saved with the trainer's state.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import logging
import os
import pickle
import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

import torch
import xxhash

from lightning_elastic_zero.checkpoint.fingerprint import live_fingerprint
from lightning_elastic_zero.checkpoint.types import (
    CheckpointStats,
    SaveOptions,
    io_progress,
    manifest_to_save,
    state_to_save,
    warn_of_objects,
)
from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.manifest import EXTRA_STATE, FileEntry, Group, Manifest
from lightning_elastic_zero.core.names import unwrapped
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.core.tensors import RankState, canonical_repr
from lightning_elastic_zero.core.text import TreePath, format_names, format_ranks, format_tree_path
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.engine.support import recovery_script
from lightning_elastic_zero.errors import CheckpointMismatchError, SaveError, UnsupportedError
from lightning_elastic_zero.formats.client_state import (
    ClientPart,
    Objects,
    fingerprints,
    is_plain,
    pickled,
    rank_differences,
    split_objects,
)
from lightning_elastic_zero.formats.elastic import (
    RankWriter,
    SourceOf,
    as_it_is,
    writes_weights,
)
from lightning_elastic_zero.formats.reader import EXTRA_STATES, OPTIMIZER_STATE
from lightning_elastic_zero.formats.torch_read import PLAIN_DATA, unpickle
from lightning_elastic_zero.storage.checkpoints import (
    Staged,
    await_shared,
    check_shareable,
    leave_shared,
    prepare_target,
    remove_shared,
    request_count,
    stage,
    staged_folder,
)
from lightning_elastic_zero.storage.checksums import as_save_error, write_durably
from lightning_elastic_zero.storage.ownership import (
    LATEST,
    RECOVERY_SCRIPT,
    TABLE_PREFIX,
    TAG,
    TOKEN_PREFIX,
)
from lightning_elastic_zero.storage.paths import parse_path
from lightning_elastic_zero.storage.stores import AnyPath

_PROTOCOL = 2
"""Pickle protocol of ``torch.save``."""

log = logging.getLogger(__name__)


def check_loads_weights_only(parts: Mapping[str, Any]) -> None:
    """Refuse values that ``torch.load(weights_only=True)`` cannot read.

    ``parts`` are values by their title in messages. Raises SaveError with the innermost such value.
    """
    for path, value in _not_plain(dict(parts), ()):
        if not (reason := _unreadable_reason(value)):
            continue  # for example of a class given to torch.serialization.add_safe_globals
        msg = (
            f"{format_tree_path(path)} is a {type(value).__name__}, but saved state has to be "
            f"plain data that torch.load(weights_only=True) can read ({reason}). Return numbers, "
            "strings, dense tensors, and lists and dicts of them from state_dict()."
        )
        raise SaveError(msg)


def _not_plain(value: Any, path: TreePath) -> Iterator[tuple[TreePath, Any]]:
    # torch reads a Counter too, which MultiStepLR has. Attributes are saved with an OrderedDict.
    is_tree = type(value) in (dict, OrderedDict, Counter) and not getattr(value, "__dict__", None)
    if is_tree and all(map(is_plain, value)):
        for key, inner in value.items():
            yield from _not_plain(inner, (*path, str(key)))
    elif type(value) in (list, tuple):
        for index, inner in enumerate(value):
            yield from _not_plain(inner, (*path, index))
    elif not is_plain(value):
        yield path, value


def _unreadable_reason(value: object) -> str:
    """Return why torch cannot read a value; empty if it can."""
    stream = io.BytesIO()
    try:
        _WithoutTensors(stream, _PROTOCOL).dump(value)
        unpickle(stream.getvalue(), lambda _: None, PLAIN_DATA)
    except Exception as error:  # noqa: BLE001 (whatever a pickle can raise)
        text = str(error).partition(" Please use")[0].partition("\n")[0]
        return text.rstrip(".") or repr(error)
    return ""


class _WithoutTensors(pickle.Pickler):
    """Pickles a value without the contents of its tensors."""

    def persistent_id(self, obj: Any) -> tuple[str] | None:
        """Return a placeholder for a tensor; raise ValueError if it is not a plain one."""
        if not isinstance(obj, torch.Tensor):
            return None
        if not is_plain(obj):
            msg = f"a {type(obj).__name__} with layout {obj.layout} is not a plain tensor"
            raise ValueError(msg)
        return ("storage",)


def with_extra_states(
    client_state: Mapping[str, Any], module: torch.nn.Module, options: SaveOptions
) -> Mapping[str, Any]:
    """Return the trainer's state with extra states of modules, by name as in ``state_dict``."""
    base = torch.nn.Module.get_extra_state
    keep = {n: m for n, m in _named(module).items() if type(m).get_extra_state is not base}
    states = {n: m.get_extra_state() for n, m in keep.items() if n not in options.left_out}
    return {**client_state, EXTRA_STATES: states} if states else client_state


def warn_of_unsaved(module: torch.nn.Module, examined: set[tuple[str, type]]) -> None:
    """Warn once of entries that classes add to ``state_dict``, such as scales of quantized layers.

    DeepSpeed's own save contains them. Here they have no place: no rule says how ranks share them.
    """
    base, found = torch.nn.Module._save_to_state_dict, list[str]()  # noqa: SLF001 (torch's)
    for name, part in module.named_modules():
        place = name, type(part)
        if type(part)._save_to_state_dict is not base and place not in examined:  # noqa: SLF001 (torch's)
            examined.add(place)
            entries = dict[str, Any]()
            part._save_to_state_dict(entries, "", keep_vars=True)  # noqa: SLF001 (torch's)
            known = {n for n, _ in part.named_parameters(recurse=False, remove_duplicate=False)}
            known.update(n for n, _ in part.named_buffers(recurse=False, remove_duplicate=False))
            found += [f"{name}.{key}" for key in entries if key not in {*known, EXTRA_STATE}]
    if found:
        log.warning(
            "not saved: %s; these entries of state_dict are neither parameters nor buffers. Make "
            "them buffers, return them from get_extra_state, or create them as in this run before "
            "a load",
            format_names(found),
        )


def restore_extra_states(
    module: torch.nn.Module, saved: Mapping[str, Any], where: str, *, warns: bool
) -> None:
    """Restore the extra states of modules on this rank; modules without one keep theirs.

    Args:
        module: the module; its weights are restored already.
        saved: states by name; prefixes of wrappers are ignored.
        where: the checkpoint.
        warns: whether this rank warns of states that only one side has.

    Raises:
        CheckpointMismatchError: a module does not accept its state.
    """
    base = torch.nn.Module.set_extra_state
    takes = {n: m for n, m in _named(module).items() if type(m).set_extra_state is not base}
    here = {unwrapped(name): part for name, part in takes.items()}
    found = {unwrapped(name): state for name, state in saved.items()}
    missing = [name for name in takes if unwrapped(name) not in found]
    if warns and missing:
        log.warning(
            "%s has no extra state for these modules, which keep their current one: %s",
            where,
            format_names(missing),
        )
    surplus = [name for name in found if name not in here]
    if warns and surplus:
        log.warning(
            "%s has extra state that no module accepts through set_extra_state: %s",
            where,
            format_names(surplus),
        )
    for name in here.keys() & found.keys():
        try:
            here[name].set_extra_state(found[name])
        except Exception as error:
            msg = (
                f"{where}: set_extra_state of {name.rpartition('.')[0] or 'the module'} "
                f"({type(here[name]).__name__}) raised {type(error).__name__}: {error}. Weights "
                "and optimizer state are already restored: restart with a module that accepts the "
                "saved state."
            )
            raise CheckpointMismatchError(msg) from error


def _named(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return each module by the name of its extra state."""
    return {f"{n}.{EXTRA_STATE}" if n else EXTRA_STATE: m for n, m in module.named_modules()}


SCHEDULERS = "lr_schedulers"
"""The client state's entry for schedulers' states, which belong to the rates: Lightning's name."""

DIGESTS = "digests"

Tables = Mapping[str, Any]
"""JSON data that ranks compare, by name."""

_Drift = tuple[int, str]
"""Index of a parameter group, and a hyperparameter of it."""

_MOST_SENT = 16
_MOST_SHOWN = 400
_MOST_TOLD = 4


def comparison_tables(manifest: Manifest, state: RankState) -> Tables:
    """Return the tables that must be equal on all ranks, and the hyperparameters' digests."""
    return {
        "tables": _tables(manifest),
        "scalars": [
            {key: canonical_repr(value, f"the state {key!r}") for key, value in f.scalars.items()}
            for f in state.flats
        ],
        "hyperparameters": [
            xxhash.xxh3_64_hexdigest(text.encode(errors="surrogatepass"))
            for text in (canonical_repr(dict(g.hyperparameters)) for g in manifest.groups)
        ],
        "replicas": list(state.replica_sums),
    }


def table_digests(tables: Tables) -> dict[str, str]:
    """Return a digest of each table."""
    return {name: xxhash.xxh3_128_hexdigest(_table_text(table)) for name, table in tables.items()}


def write_tables(directory: AnyPath, tables: Tables) -> None:
    """Write rank 0's tables into a directory, until ``remove_shared``."""
    for name, table in tables.items():
        leave_shared(directory, f"{TABLE_PREFIX}{name}", _table_text(table))


class RankZeroTables:
    """Rank 0's tables. A table is read only if this rank's own differs.

    ``sent`` are rank 0's digests, ``directory`` contains its tables.
    """

    def __init__(self, sent: Mapping[str, str], own: Tables, directory: AnyPath) -> None:
        self._sent, self.own, self._directory = sent, own, directory
        self._digests = table_digests(own)
        self._read: dict[str, Any] = {}

    def is_same(self, name: str) -> bool:
        """Whether this rank's table equals rank 0's."""
        return self._sent[name] == self._digests[name]

    def __getitem__(self, name: str) -> Any:
        """Return rank 0's table; raise SaveError if it cannot be read."""
        if self.is_same(name):
            return self.own[name]
        if name not in self._read:
            data = await_shared(
                self._directory,
                f"{TABLE_PREFIX}{name}",
                lambda data: xxhash.xxh3_128_hexdigest(data) == self._sent[name],
            )
            self._read[name] = json.loads(data)
        return self._read[name]


def check_consistent(first: RankZeroTables) -> None:
    """Refuse a rank that does not hold the run that rank 0 holds.

    Raises:
        UnsupportedError: it does not; the tables, or the states with both values, are named.
    """
    tables = first.own["tables"]
    if differ := [name for name, table in first["tables"].items() if tables[name] != table]:
        here, there = _first_difference(tables[differ[0]], first["tables"][differ[0]])
        msg = (
            f"the ranks differ in their {', '.join(differ)}: first {here} on this rank, {there} on "
            "rank 0. Build the same model and optimizer, and take the same steps, on all ranks"
        )
        raise UnsupportedError(msg)
    for index, (mine, theirs) in enumerate(
        zip(first.own["scalars"], first["scalars"], strict=True)
    ):
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                msg = (
                    f"the optimizer state {key!r} of flat buffer {index} is "
                    f"{mine.get(key, 'missing')} on this rank and {theirs.get(key, 'missing')} on "
                    "rank 0, expected one value on all ranks. With torch_autocast in float16, "
                    "DeepSpeed 0.18.9 lets each rank skip other steps: train in bfloat16 there"
                )
                raise UnsupportedError(msg)


def drifted_hyperparameters(first: RankZeroTables, manifest: Manifest) -> list[list[Any]]:
    """Return ``[group, {key: text}]`` for the first groups that differ from rank 0's."""
    pairs = zip(first.own["hyperparameters"], first["hyperparameters"], strict=True)
    drifted = [index for index, (mine, theirs) in enumerate(pairs) if mine != theirs]
    return [[index, _texts(manifest.groups[index])] for index in drifted[:_MOST_SENT]]


def drifted_replicas(first: RankZeroTables) -> list[int]:
    """Stage 0: return the flat buffers whose masters differ from rank 0's."""
    pairs = zip(first.own["replicas"], first["replicas"], strict=True)
    return [index for index, (mine, theirs) in enumerate(pairs) if mine != theirs][:_MOST_SENT]


def warn_of_replicas(manifest: Manifest, of_ranks: Sequence[Sequence[int]]) -> None:
    """Rank 0: warn of ranks whose weights differ, from the ``drifted_replicas`` of each rank."""
    ranks = [rank for rank, drifted in enumerate(of_ranks) if drifted]
    if not ranks:
        return
    names = [n for i in sorted(set().union(*of_ranks)) for n in manifest.buffers[i].names]
    log.warning(
        "In stage 0 every rank trains all weights, but those of %s differ from rank 0's (%s). Each "
        "rank writes a part of them, and a resume gives the same weights to all ranks. Use the "
        "same hyperparameters on all ranks, and make the same changes to weights.",
        format_ranks(ranks),
        format_names(names, _MOST_TOLD),
    )


def warn_of_drift(manifest: Manifest, of_ranks: Sequence[list[list[Any]]]) -> None:
    """Rank 0: warn of differing hyperparameters, from the ``drifted_hyperparameters`` of ranks."""
    own = list(map(_texts, manifest.groups))
    values: dict[_Drift, dict[int, str]] = {}
    for rank, groups in enumerate(of_ranks):
        for group, theirs in groups:
            for key, value in theirs.items():
                if value != own[group][key]:
                    values.setdefault((group, key), {})[rank] = value
    if not values:
        return
    sentences = [
        _sentence(drift, values[drift], own, len(of_ranks)) for drift in sorted(values)[:_MOST_TOLD]
    ]
    if len(values) > _MOST_TOLD:
        sentences.append(f"{len(values) - _MOST_TOLD} more")
    log.warning(
        "The ranks train with different hyperparameters: %s. Each rank updates its part of the "
        "weights with its own values. The checkpoint contains rank 0's values and schedulers, and "
        "a resume uses them on every rank. A scheduler that steps on a metric needs the same value "
        "on all ranks: self.log(..., sync_dist=True).",
        "; ".join(sentences),
    )


def _sentence(
    drift: _Drift, of_rank: Mapping[int, str], own: Sequence[Mapping[str, str]], world_size: int
) -> str:
    group, key = drift
    first = own[group][key]
    ranks: dict[str, list[int]] = {first: []}
    for rank in range(world_size):
        ranks.setdefault(of_rank.get(rank, first), []).append(rank)
    values = ", ".join(f"{value} on {format_ranks(which)}" for value, which in ranks.items())
    return f"{key} of parameter group {group} is {values}"


def _first_difference(mine: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    """Return the first rows that differ; long ones are cut around the difference."""
    rows = itertools.zip_longest(mine, theirs, fillvalue="nothing")
    one, other = next((one, other) for one, other in rows if one != other)
    if len(one) <= _MOST_SHOWN and len(other) <= _MOST_SHOWN:
        return one, other
    same = zip(one, other, strict=False)
    at = next((i for i, (a, b) in enumerate(same) if a != b), min(len(one), len(other)))
    shown = slice(max(0, at - _MOST_SHOWN // 2), at + _MOST_SHOWN // 2)
    return f"... {one[shown]} ...", f"... {other[shown]} ..."


def _tables(manifest: Manifest) -> dict[str, list[str]]:
    """Return the rows that must be equal on all ranks, by their title in messages."""
    groups = [(g.names, sorted(g.hyperparameters), g.state) for g in manifest.groups]
    return {
        "parameters": list(map(repr, manifest.parameters)),
        "parameter groups": list(map(repr, groups)),
        "flat buffers": list(map(repr, manifest.buffers)),
        "progress": [repr(manifest.progress)],
        "module buffers": list(map(repr, manifest.module_buffers)),
        "ZeRO stage": [repr(manifest.stage)],
        "weights that are left out": sorted(manifest.excluded),
    }


def _texts(group: Group) -> dict[str, str]:
    """Return a group's hyperparameters as text."""
    return {key: canonical_repr(value) for key, value in group.hyperparameters.items()}


def _table_text(table: object) -> bytes:
    return json.dumps(table).encode()


class Cancellation:
    """Decides once whether a save is cancelled or published. Used by two threads."""

    def __init__(self) -> None:
        self._deciding = threading.Lock()
        self._cancelled = False
        self.committed = False
        self.published = False
        """Whether the checkpoint is in its place, even if not all ranks have agreed on it."""

    def cancel(self) -> bool:
        """Cancel the save; return False if it is already being published."""
        with self._deciding:
            self._cancelled = not self.committed
        return self._cancelled

    def check(self) -> None:
        """Raise SaveError if the save was cancelled."""
        if self._cancelled:
            msg = "the save was cancelled before it was written, because the run has ended"
            raise SaveError(msg)

    def commit(self) -> None:
        """Decide that the save is published, unless it was cancelled; see ``check``."""
        with self._deciding:
            self.check()
            self.committed = True


def save_engine(
    engine: LiveEngine,
    path: str | os.PathLike[str],
    ranks: Ranks,
    client_state: Mapping[str, Any],
    options: SaveOptions,
) -> CheckpointStats:
    """Save an engine while training waits; collective. See ``lightning_elastic_zero.api``.

    A checkpoint at the same path stays until the new one is published.

    Args:
        engine: the engine.
        path: the checkpoint directory.
        ranks: the ranks of the training threads.
        client_state: the trainer's state.
        options: the options.

    Raises:
        SaveError: the checkpoint could not be written; the last published one is intact.
        UnsupportedError: part of the state cannot be saved.
        RanksError: a rank failed, died, or did not call this function.
    """
    began = time.monotonic()
    contents = ranks.run_all(
        f"save: look at the engine {engine.at_step()}",
        lambda: collect(engine, path, ranks.rank, client_state, options),
    )
    stats = write_shards(contents, ranks)
    seconds = time.monotonic() - began
    return replace(stats, seconds=seconds, waited_s=seconds)


@dataclass(frozen=True, slots=True)
class ShardContents:
    """The state that one rank writes, and the target."""

    target: AnyPath
    """The checkpoint's directory."""
    manifest: Manifest
    state: RankState
    client: dict[str, Any]
    objects: Objects = ()
    options: SaveOptions = field(default_factory=SaveOptions)
    source_of: SourceOf = as_it_is
    """Returns the source to write a piece of a tensor from."""

    def tables(self) -> Tables:
        """Return the tables that ranks compare."""
        return {
            **comparison_tables(self.manifest, self.state),
            "buffers": fingerprints(dict(self.state.module_buffers)),
            "client": fingerprints(self.client),
            "objects": {
                format_tree_path(path): hashlib.sha256(pickled(value, path)).hexdigest()
                for path, value in self.objects
            },
        }


def collect(
    engine: LiveEngine,
    path: str | os.PathLike[str],
    rank: int,
    client_state: Mapping[str, Any],
    options: SaveOptions,
) -> ShardContents:
    """Return the state of the engine and trainer that this rank writes, by reference.

    Rank 0 also restores or refuses the target of an interrupted save.

    Raises:
        SaveError: on rank 0, the path must not be replaced.
        UnsupportedError: part of the state cannot be saved.
    """
    target = parse_path(path)
    engine.check()
    manifest = manifest_to_save(engine.describe(), options)
    state = engine.rank_state(
        exclude_frozen=options.exclude_frozen, keep_module_weights=options.module_weights
    )
    state = state_to_save(state, manifest, options)
    check_loads_weights_only(
        {
            "the scheduler's state": state.lr_scheduler,
            "the loss scaler's state": dict(state.loss_scaler),
            "the optimizer's state": [dict(flat.scalars) for flat in state.flats],
            "the optimizer's state of no parameter": dict(state.optimizer_state),
            "the module's buffers": dict(state.module_buffers),
        }
    )
    client = dict(with_extra_states(client_state, engine.module(), options))
    if state.optimizer_state and not manifest.weights_only:
        client[OPTIMIZER_STATE] = dict(state.optimizer_state)
    split = split_objects(client)
    if rank == 0:
        warn_of_unsaved(engine.module(), options.examined_modules)
        prepare_target(target, f"step-{manifest.progress.global_steps}")
    # These tensors are in the state now: a background save keeps no copies on the device.
    options = replace(options, at_step={})
    return ShardContents(target, manifest, state, split.plain, split.objects, options)


def write_shards(
    contents: ShardContents,
    ranks: Ranks,
    cancellation: Cancellation | None = None,
) -> CheckpointStats:
    """Write the collected state and publish the checkpoint; see ``save_engine``. Collective.

    Args:
        contents: the state that this rank writes.
        ranks: the ranks of the calling thread.
        cancellation: lets another thread cancel the save.
    """
    began, cancellation = time.monotonic(), cancellation or Cancellation()
    requests = request_count(contents.target)
    staged: list[Staged] = []  # on rank 0: removed if the save fails
    tables, progress = cache(contents.tables), _progress(contents, ranks, cancellation)

    def write_files() -> dict[str, Any]:
        staging = _await_staging(first, contents.target)
        theirs = RankZeroTables(first[DIGESTS], tables(), staging)
        manifest = replace(contents.manifest, save_id=first["save_id"])
        writer = RankWriter(staging, manifest, ranks.rank, progress, number, contents.source_of)
        found = _write_files(contents, theirs, writer)
        return {**found, "requests": request_count(contents.target) - requests}

    def publish() -> dict[str, Any]:
        write_s = time.monotonic() - began
        warn_of_drift(contents.manifest, [of_rank["drifted"] for of_rank in written or []])
        warn_of_replicas(contents.manifest, [of_rank["replicas"] for of_rank in written or []])
        files = _complete(staged[0], contents, first, written or [])
        staged[0].sync(ranks.progress)
        cancellation.commit()
        staged[0].put_in_place()
        cancellation.published = True
        staged[0].clean(ranks.progress)
        seconds = time.monotonic() - began
        others = sum(of_rank["requests"] for of_rank in (written or [])[1:])
        return {
            "seconds": seconds,
            "waited_s": seconds,
            "write_s": write_s,
            "publish_s": seconds - write_s,
            "bytes": sum(entry.size_bytes for entry in files),
            "requests": others + request_count(contents.target) - requests,
        }

    try:
        first = ranks.broadcast(
            "save: make a directory", lambda: _stage(contents, tables(), ranks, staged)
        )
        target, number = first["path"], ""
        with staged[0].touch_regularly() if staged else nullcontext():
            if contents.options.fingerprint:
                step = f"save {target}: fingerprint"
                state = contents.manifest, contents.state
                number = str(live_fingerprint(*state, ranks, step, progress))
            written = ranks.gather(f"save {target}: write", write_files)
            published = ranks.broadcast(f"save {target}: publish", publish)
    except BaseException:
        for directory in staged:
            directory.abandon()
        raise
    steps = contents.options.step
    steps = contents.manifest.progress.global_steps if steps is None else steps
    return CheckpointStats(target, step=steps, fingerprint=number, **published)


def _stage(
    contents: ShardContents, tables: Tables, ranks: Ranks, staged: list[Staged]
) -> dict[str, Any]:
    """Rank 0: make the folder in which all ranks write; return its description."""
    target, save_id = contents.target, uuid.uuid4().hex
    check_shareable(target, ranks.world_size)
    warn_of_objects(target, contents.objects, contents.options.warned_objects)
    with as_save_error(target):
        staged.append(stage(target, save_id, ranks.progress))
        write_tables(staged[0].path, tables)
        leave_shared(staged[0].path, f"{TOKEN_PREFIX}{save_id}")
    return {"path": str(target), "save_id": save_id, DIGESTS: table_digests(tables)}


def _progress(contents: ShardContents, ranks: Ranks, cancellation: Cancellation) -> Progress:
    """Return the progress of writing; a cancelled save fails at its next check."""
    flats = contents.state.flats
    tensors = [tensor for flat in flats for tensor in (flat.master, *flat.elementwise.values())]
    if writes_weights(contents.manifest, ranks.rank):
        tensors += [*contents.state.frozen.values(), *contents.state.module_weights.values()]
    size_bytes = sum(tensor.nbytes for tensor in tensors)
    return io_progress("writing", ranks, contents.options.show, size_bytes, cancellation.check)


def _await_staging(first: Mapping[str, Any], target: AnyPath) -> AnyPath:
    """Wait until this rank sees rank 0's files, and return the folder for this save.

    Raises SaveError if this rank has another path or does not see the files.
    """
    if str(target) != first["path"]:
        msg = (
            f"this rank saves to {target}, rank 0 to {first['path']}. Pass the same path on all "
            "ranks, in a directory that they share (ModelCheckpoint does; with Ray Train, a folder "
            "below RunConfig(storage_path=...) instead of a temporary one)."
        )
        raise SaveError(msg)
    staging = staged_folder(target, first["save_id"])
    await_shared(staging, f"{TOKEN_PREFIX}{first['save_id']}")
    return staging


def _write_files(
    contents: ShardContents, first: RankZeroTables, writer: RankWriter
) -> dict[str, Any]:
    """Write this rank's files; return their description for rank 0."""
    check_consistent(first)
    drifted = drifted_hyperparameters(first, contents.manifest)
    state, client = _own_part(contents, first, writer.rank, drifted=bool(drifted))
    files = writer.write(state, client)
    kept = {
        "buffers": bool(writer.rank and state.module_buffers),
        "client_state": bool(client.own or client.own_objects),
    }
    return {
        "files": [asdict(entry) for entry in files],
        "kept": [name for name, is_kept in kept.items() if is_kept],
        "drifted": drifted,
        "replicas": drifted_replicas(first),
    }


def _own_part(
    contents: ShardContents, first: RankZeroTables, rank: int, *, drifted: bool
) -> tuple[RankState, ClientPart]:
    """Return the state that this rank writes: rank 0 all of it, others what differs.

    ``drifted``: this rank's hyperparameters differ, so its schedulers are left out.
    """
    if not rank:
        return contents.state, ClientPart(contents.client, contents.objects)
    mine, theirs = first.own["buffers"], first["buffers"]
    buffers = {n: t for n, t in contents.state.module_buffers.items() if mine[n] != theirs[n]}
    own = () if first.is_same("client") else rank_differences(contents.client, first["client"])
    objects = () if first.is_same("objects") else contents.objects
    if kept := next((item[0] for item in own if item[0][0] == OPTIMIZER_STATE), None):
        key = kept[1] if len(kept) > 1 else "(any)"
        msg = (
            f"{contents.manifest.writer.optimizer} keeps state under the key {key!r}, which "
            "differs from rank 0's: optimizer state without a parameter must be equal on all ranks"
        )
        raise UnsupportedError(msg)
    if drifted:
        own = tuple(item for item in own if item[0][0] != SCHEDULERS)
        objects = tuple(item for item in objects if item[0][0] != SCHEDULERS)
    state = replace(contents.state, module_buffers=buffers)
    if not state.module_weights:
        return state, ClientPart({}, own=own, own_objects=objects)
    # DeepSpeed's loader for ZeRO-3 reads nothing but the rank's own model file.
    module = {**state.module_weights, **contents.state.module_buffers}
    return replace(state, module_weights=module), ClientPart(contents.client, (), own, objects)


def _complete(
    staged: Staged, contents: ShardContents, first: Mapping[str, Any], written: list[dict[str, Any]]
) -> tuple[FileEntry, ...]:
    """Rank 0: write the files for DeepSpeed's tools, and the manifest last; return its files."""
    folder = staged.path
    write_durably(folder / LATEST, TAG.encode())
    if (source := recovery_script()) is not None:
        with as_save_error(contents.target):
            script = source.read_bytes()
        write_durably(folder / RECOVERY_SCRIPT, script)
    manifest = replace(
        contents.manifest,
        save_id=first["save_id"],
        files=tuple(
            FileEntry(**{**entry, "name": f"{staged.prefix}{entry['name']}"})
            for of_rank in written
            for entry in of_rank["files"]
        ),
        rank_state=tuple(sorted({kept for of_rank in written for kept in of_rank["kept"]})),
        client_objects=tuple(format_tree_path(path) for path, _ in contents.objects),
    )
    tables = (f"{TABLE_PREFIX}{name}" for name in first[DIGESTS])
    remove_shared(folder, *tables, f"{TOKEN_PREFIX}{first['save_id']}")
    staged.seal(manifest.to_json().encode())
    return manifest.files
