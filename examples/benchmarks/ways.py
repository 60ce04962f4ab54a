"""The measured methods of saving and loading, each on all ranks of one world, in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from probe import Cost, cost_of, temporary_disk  # type: ignore[import-not-found] # scripts in this folder
from raw import RawRead, RawWrite  # type: ignore[import-not-found]
from subject import (  # type: ignore[import-not-found]
    NO_ROOM,
    make_engine,
    make_fsdp,
    rank_tensors,
    sync_tree,
    train_step,
    width_of,
)
from torch import distributed
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

TAG, UNIVERSAL = "checkpoint", "universal"
"""The tags of stock DeepSpeed's checkpoints, and of the converted ones."""

RAW_READS = {"raw read into existing memory": False, "raw read into new memory": True}
"""Whether the memory is new."""

Costs = dict[str, list[Cost]]
"""The costs of each method, by round."""


@dataclass(frozen=True)
class Case:
    """A kind of engine."""

    stage: int
    precision: str

    @property
    def like_fsdp(self) -> bool:
        """Whether to compare with FSDP2, which partitions like ZeRO-3, here in fp32."""
        return self.stage == 3 and self.precision == "fp32"

    @property
    def name(self) -> str:
        """Name in the report."""
        return f"ZeRO-{self.stage} {self.precision}"

    def file(self, folder: Path, what: str, ranks: int) -> Path:
        """Return the path of what this many ranks have saved."""
        return folder / f"{what}-z{self.stage}-{self.precision}-{ranks}"


@dataclass(frozen=True)
class Setting:
    """Settings shared by all worlds of a run."""

    folder: Path
    parameters: float
    rounds: int
    device: str
    cases: tuple[Case, ...]


def in_turn(
    ways: Mapping[str, Callable[[], object]],
    rounds: int,
    before: Callable[[], object] = lambda: None,
) -> Costs:
    """Run every method once in each round; the first round warms up and is not returned.

    Args:
        ways: the methods, by name.
        rounds: number of returned rounds.
        before: called before each method; not measured.
    """
    costs: Costs = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, work in ways.items():
            before()
            cost = cost_of(work)
            if number:
                costs[name].append(cost)
    return costs


def add_temporary_disk(
    costs: Costs, ways: Mapping[str, Callable[[], object]], folder: Path
) -> None:
    """Run every method once more, over its last save, and add the disk space that it needs.

    A call and the wait after it are one method, with one figure. Rank 0 watches the files, which
    would slow down timed calls.
    """
    together: dict[str, list[str]] = {}
    for name in ways:
        together.setdefault(name.split(": the ")[0], []).append(name)
    for names in together.values():
        with temporary_disk(folder) if distributed.get_rank() == 0 else nullcontext([]) as found:
            for name in names:
                cost_of(ways[name])
        for cost in (cost for name in names for cost in costs[name]):
            cost["temporary_disk"] = sum(found)


class _Fsdp:
    """The same model under FSDP2, saved and loaded by ``torch.distributed.checkpoint``."""

    def __init__(self, setting: Setting, source: int, *, trained: bool) -> None:
        width = width_of(setting.parameters)
        self._parts = make_fsdp(width, setting.device, trained=trained)
        self._path = setting.folder / f"dcp-{source}"
        # A separate group: the collectives of a thread have no fixed order relative to others.
        self._behind = distributed.new_group(backend="gloo")
        self._pending: Any = None
        # Kept, so that its memory is reused; in shared memory, from which another process can
        # write.
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=setting.device == "cuda",
                use_shared_memory=True,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def _state(self) -> dict[str, Any]:
        weights, state = get_state_dict(*self._parts)
        return {"model": weights, "optimizer": state}

    def save(self) -> None:
        """Save, synced."""
        save_dcp(self._state(), checkpoint_id=self._path)
        sync_tree(self._path)

    def ways_to_save(self) -> dict[str, Callable[[], object]]:
        """Return blocking saves, and background saves in a thread and in a process."""
        name, background = "torch.distributed.checkpoint", "background"
        ways: dict[str, Callable[[], object]] = {name: self.save}
        for how, kind in {
            background: AsyncCheckpointerType.THREAD,
            f"{background} process": AsyncCheckpointerType.PROCESS,
        }.items():
            ways[f"{name}, {how}: the call"] = partial(self.call, kind)
            ways[f"{name}, {how}: the wait after it"] = self.wait
        return ways

    def call(self, kind: AsyncCheckpointerType) -> None:
        """Begin to save in a thread, or in a process; both sync the files."""
        path = self._path.with_name(f"{self._path.name}-{kind.value}")
        self._pending = async_save(
            self._state(),
            checkpoint_id=path,
            process_group=self._behind,
            async_checkpointer_type=kind,
            async_stager=self._stager,
        )

    def wait(self) -> None:
        """Wait until the save is on the disk."""
        self._pending.result()

    def load(self) -> None:
        """Load."""
        weights, state = get_state_dict(*self._parts)
        load_dcp({"model": weights, "optimizer": state}, checkpoint_id=self._path)
        set_state_dict(*self._parts, model_state_dict=weights, optim_state_dict=state)


# -- saving ---------------------------------------------------------------------------------


class _Background:
    """Saves in the background of training, with the library's manager."""

    def __init__(self, engine: Any, path: Path) -> None:
        from lightning_elastic_zero.checkpoint.manager import CheckpointManager
        from lightning_elastic_zero.checkpoint.types import SaveRequest
        from lightning_elastic_zero.coordination.liveness import Timeouts
        from lightning_elastic_zero.coordination.ranks import connect_ranks
        from lightning_elastic_zero.engine.live import LiveEngine

        self._ranks = connect_ranks()
        handle = LiveEngine(engine)
        self._manager = CheckpointManager(Timeouts(), background=True)
        self._manager.start(handle, distributed.get_rank())
        self._request = SaveRequest(handle, path)

    def call(self) -> None:
        """Begin to save."""
        if not self._manager.save_async(self._request, self._ranks):
            raise RuntimeError(NO_ROOM)

    def wait(self) -> None:
        """Wait until the save is published."""
        self._manager.wait_until_finished(self._ranks)

    def close(self) -> None:
        """End the manager's threads."""
        self._manager.stop(interrupted=False)
        self._ranks.close()


def measure_saves(setting: Setting, ranks: int) -> dict[str, Costs]:
    """Measure all methods of saving in this world, for each case; the last saves are kept."""
    width = width_of(setting.parameters)
    return {f"{c.name}, {ranks} ranks": _saves_of(setting, c, width) for c in setting.cases}


def _saves_of(setting: Setting, case: Case, width: int) -> Costs:
    from lightning_elastic_zero.api import save_checkpoint

    engine = make_engine(case.stage, width, case.precision)
    train_step(engine, width)
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    ours, stock = (case.file(setting.folder, what, ranks) for what in ("ours", "stock"))
    tensors = rank_tensors(engine)
    pinned = setting.device == "cuda"  # other memory would be slower than the copy engine
    spare = [torch.zeros_like(t, device="cpu", pin_memory=pinned) for t in tensors]
    raw = RawWrite(case.file(setting.folder, "raw", ranks).with_suffix(f".{rank}"), spare)
    background = _Background(engine, case.file(setting.folder, "background", ranks))

    def copy() -> None:
        for to, source in zip(spare, tensors, strict=True):
            to.copy_(source)

    def save_stock() -> None:
        engine.save_checkpoint(str(stock), tag=TAG)
        sync_tree(stock)

    ways: dict[str, Callable[[], object]] = {
        "copy in memory": copy,
        "raw write and sync": raw.write,
        "this library": lambda: save_checkpoint(engine, ours),
        "stock DeepSpeed": save_stock,
        "this library, background: the call": background.call,
        "this library, background: the wait after it": background.wait,
    }
    if case.like_fsdp:
        ways |= _Fsdp(setting, ranks, trained=True).ways_to_save()
    costs = in_turn(ways, setting.rounds)
    add_temporary_disk(costs, ways, setting.folder)
    background.close()
    raw.path.unlink()
    return costs


# -- loading --------------------------------------------------------------------------------


def ways_to_load(setting: Setting, case: Case, source: int, ranks: int) -> list[str]:
    """Return the methods that can load a checkpoint of ``source`` ranks; raw reads are first."""
    ways = [*RAW_READS, "this library"]
    if source == ranks:
        ways.append("stock DeepSpeed")
    if case.like_fsdp:
        ways.append("torch.distributed.checkpoint")
    if (case.file(setting.folder, "stock", source) / UNIVERSAL).is_dir():
        ways.append("Universal Checkpoint")
    return ways


def load_once(setting: Setting, case: Case, source: int, way: str) -> Cost:
    """Load like a resume: in new processes, whose optimizer has no state yet."""
    from lightning_elastic_zero.api import load_checkpoint

    ours, stock = (case.file(setting.folder, what, source) for what in ("ours", "stock"))
    if way in RAW_READS:
        return cost_of(RawRead(ours, new_memory=RAW_READS[way]).read)
    if way == "torch.distributed.checkpoint":
        return cost_of(_Fsdp(setting, source, trained=False).load)
    universal = way == "Universal Checkpoint"
    width = width_of(setting.parameters)
    engine = make_engine(case.stage, width, case.precision, universal=universal)
    if way == "this library":
        return cost_of(lambda: load_checkpoint(engine, ours))
    tag = UNIVERSAL if universal else TAG
    return cost_of(lambda: engine.load_checkpoint(str(stock), tag=tag))
