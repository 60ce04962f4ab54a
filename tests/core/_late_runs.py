"""A run of one rank whose state lies on devices of the adversarial copy engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.checkpoint.background import Snapshot
from lightning_elastic_zero.checkpoint.save import ShardContents
from lightning_elastic_zero.checkpoint.streams import current_device, use_device
from lightning_elastic_zero.checkpoint.types import EngineHandle
from lightning_elastic_zero.core.layout import Fragment
from lightning_elastic_zero.core.manifest import Group, Manifest, Parameter, StateKey
from lightning_elastic_zero.core.partition import FlatBuffer
from lightning_elastic_zero.core.tensors import FlatState, RankState
from lightning_elastic_zero.formats.torch_write import PiecewiseSource
from tests.core._copy_engine import CopyEngine
from tests.core._late_tensor import large_on_devices, small_on_devices
from tests.support.processes import HANG_TIMEOUT_S

NUMEL = 600
NAMES = ("a", "b", "c")
STATE_BYTES = 2 * len(NAMES) * NUMEL * 4
SMALL_MEMORY = (None, 0, STATE_BYTES // 2)
"""All is copied, nothing, and a part."""

_ADAM = (StateKey("exp_avg", "elementwise", "float32"), StateKey("step", "scalar", "float32"))
STEP_ALONE = _ADAM[1:]
"""Of an optimizer that keeps no moments."""

Values = dict[str, list[float]]


@dataclass
class LateRun:
    """Masters, moments, steps and a buffer of three parameters, each in a group of its own."""

    late: CopyEngine
    first: int = 0
    """Where the first tensor lies; see ``some_place``."""
    in_module: tuple[str, ...] = NAMES[-1:]
    """Whose masters are the module's own weights, which forward changes too."""
    keys: tuple[StateKey, ...] = _ADAM
    masters: dict[str, torch.Tensor] = field(init=False)
    moments: dict[str, torch.Tensor] = field(init=False)
    steps: dict[str, torch.Tensor] = field(init=False)
    average: torch.Tensor = field(init=False)
    hooks: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.masters = {n: torch.arange(float(NUMEL)) + 1000 * i for i, n in enumerate(NAMES)}
        keeps = self.keys is not STEP_ALONE
        self.moments = {name: self.masters[name] * 0.5 for name in NAMES if keeps}
        self.steps = {name: torch.tensor(3.0) for name in NAMES}
        self.average = torch.arange(5.0)

    def values(self) -> Values:
        """Return all that a save has to hold."""
        found = {f"master {n}": t.tolist() for n, t in self.masters.items()}
        found |= {f"exp_avg {n}": t.tolist() for n, t in self.moments.items()}
        found |= {f"step {n}": [t.item()] for n, t in self.steps.items()}
        return found | {"average": self.average.tolist()}

    def describe(self) -> Manifest:
        """Return what an engine says of itself."""
        return Manifest(
            save_id="",
            stage=1,
            world_size=1,
            precision="fp32",
            master_dtype="float32",
            parameters=tuple(Parameter(n, (NUMEL,), "float32", i) for i, n in enumerate(NAMES)),
            groups=tuple(Group((name,), {"lr": 0.1}, self.keys) for name in NAMES),
            buffers=tuple(FlatBuffer(i, (n,), (NUMEL,), (), NUMEL) for i, n in enumerate(NAMES)),
            module_buffers=("average",),
            files=(),
        )

    def rank_state(self, **_: bool) -> RankState:
        """Return what a rank of it holds."""
        state = RankState(
            tuple(
                FlatState(
                    (Fragment(name, 0, NUMEL, 0, i, 0),),
                    self.masters[name],
                    {"exp_avg": self.moments[name]} if self.moments else {},
                    {"step": self.steps[name]},
                    in_module=name in self.in_module,
                )
                for i, name in enumerate(NAMES)
            ),
            {},
            {"average": self.average},
            {},
            {},
        )
        return large_on_devices(state, self.late, self.first)

    def module(self) -> torch.nn.Module:
        """Return a module that keeps nothing else."""
        return torch.nn.Module()

    def contents(self) -> ShardContents:
        """Return what a rank of it writes, with small tensors on devices too."""
        state = small_on_devices(self.rank_state(), self.late, self.first)
        return ShardContents(Path(), self.describe(), state, {})

    def handle(self) -> EngineHandle:
        """Return it as the engine that a save opens."""
        live: Any = self
        return EngineHandle(
            open=lambda: live,
            global_step=lambda: 0,
            add_step_pre_hook=self._add_hook,
            updates_state_before_step=lambda: False,
            recovery_script=lambda: None,
        )

    def _add_hook(self, call: Callable[[], None]) -> Callable[[], None]:
        self.hooks.append(call)
        return lambda: self.hooks.remove(call)

    def step_on(self) -> None:
        """Change everything in place as an optimizer does, once its hooks let it."""
        for tensor in (self.average, *(self.masters[name] for name in self.in_module)):
            tensor.add_(1)  # in forward
        for call in self.hooks:
            self.late.while_waiting(call)()
        for tensor in self._tensors():
            tensor.add_(4096)

    def step_back(self) -> None:
        """Take two steps back."""
        for tensor in self._tensors():
            tensor.sub_(2 * 4096)
        for tensor in (self.average, *(self.masters[name] for name in self.in_module)):
            tensor.sub_(2)

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        states = (self.masters, self.moments, self.steps)
        return *(tensor for of_all in states for tensor in of_all.values()), self.average

    def give_back(self) -> None:
        """Free the memory of masters and moments, as DeepSpeed's ``offload_states`` does."""
        for tensors in (self.masters, self.moments):
            for tensor in tensors.values():
                tensor.data = tensor.data.clone()


@contextmanager
def writing(snapshot: Snapshot, late: CopyEngine) -> Iterator[Values]:
    """Read all of a snapshot in another thread, as the writer does; it has ended after this."""
    found: Values = {}
    failed: list[BaseException] = []

    device = current_device()

    def write() -> None:
        try:
            use_device(device)
            with snapshot.reading():
                found.update(_read(snapshot.contents))
        except BaseException as error:  # noqa: BLE001 (the test fails by it)
            failed.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    yield found
    with late.waiting():
        thread.join(HANG_TIMEOUT_S)
    assert not thread.is_alive()
    assert not failed, failed


def _read(contents: ShardContents) -> Values:
    found: Values = {"average": contents.state.module_buffers["average"].tolist()}
    for name, flat in zip(NAMES, contents.state.flats, strict=True):
        kept = {"master": flat.master, **flat.elementwise}
        for kind, tensor in kept.items():
            source = PiecewiseSource([contents.source_of(tensor)], tensor.dtype)
            found[f"{kind} {name}"] = [x for chunk in source.chunks() for x in chunk.tolist()]
        step = flat.scalars["step"]
        assert isinstance(step, torch.Tensor)
        found[f"step {name}"] = [step.cpu().item()]
    return found
