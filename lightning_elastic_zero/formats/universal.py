"""Reads Universal Checkpoints, as DeepSpeed's ``ds_to_universal`` writes them.

::

    step3_universal/
    ├── zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt [, step.pt]    whole tensors
    ├── zero/optimizer_state.pt                                            hyperparameters, ...
    └── *_model_states.pt                            copied from the checkpoint that was converted

Each state has a separate file, of which each rank reads ranges. Buffers, frozen weights, groups
and counters are in the model files. Conversions of runs with ``round_robin_gradients`` are corrupt,
because ``ds_to_universal`` splits them at wrong offsets. In ZeRO-1/2, their masters do not round to
the weights in the model file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from lightning_elastic_zero.core.layout import Fragment, Layout, Transfer
from lightning_elastic_zero.core.manifest import STAGE_WEIGHTS, Group, Manifest, Plain, StateKey
from lightning_elastic_zero.core.partition import FlatBuffer, PerParameterPartition
from lightning_elastic_zero.core.tensors import Scalar, state_key
from lightning_elastic_zero.errors import CheckpointCorruptedError, CheckpointFormatError
from lightning_elastic_zero.formats.deepspeed_files import (
    MODEL_NAME,
    OPTIMIZER_STATE,
    OURS,
    stub_fields,
)
from lightning_elastic_zero.formats.deepspeed_reader import TagReader
from lightning_elastic_zero.formats.deepspeed_shards import group_of_flats, is_vector, numel_of
from lightning_elastic_zero.formats.reader import WEIGHT, Location, SourceInfo
from lightning_elastic_zero.formats.torch_optimizer import plain_hyperparameters
from lightning_elastic_zero.formats.torch_read import ForeignFiles, StoredRun

MASTER, STEP = "fp32", "step"

ADAM_MOMENTS = {"exp_avg", "exp_avg_sq"}
"""``ds_to_universal`` writes both for a parameter, or neither."""


class UniversalReader(TagReader):
    """A Universal Checkpoint."""

    def __init__(self, files: ForeignFiles) -> None:
        super().__init__(files)
        self._shapes = self._first.shapes
        self._stage = STAGE_WEIGHTS if self._partitioned else 1
        self._stage = int(self._optimizer.get("zero_stage", self._stage))
        self._group_of = group_of_flats(
            self._optimizer["param_groups"], self._stage, len(self._shapes)
        )
        self._flat_of = {name: i for i, shapes in enumerate(self._shapes) for name in shapes}
        buffers = [
            FlatBuffer(self._group_of[i], tuple(shapes), tuple(map(numel_of, shapes.values())))
            for i, shapes in enumerate(self._shapes)
        ]
        self._keys = self._find_keys()
        master = self._tensor(self._first_held(range(len(self._shapes))), WEIGHT)
        groups = self._groups(buffers)
        self.manifest = self._describe(self._stage, master.dtype, buffers, groups)
        lacks = (*self._lacks, "optimizer states that are not Adam's")
        self.info = SourceInfo("Universal Checkpoint (ds_to_universal)", lacks)

    @property
    def _optimizer(self) -> Mapping[str, Any]:
        """Return the content of ``optimizer_state.pt``; files may be closed in between."""
        found: Mapping[str, Any] = self.files.tree(OPTIMIZER_STATE)
        return found

    @property
    def _listed(self) -> Sequence[str]:
        """Return the other files, if this library's ``convert`` listed them."""
        found: Sequence[str] = self._optimizer.get(OURS, {}).get("files", ())
        return found

    # -- what is there ---------------------------------------------------------------------------

    def _check_beginning(self) -> None:
        if not (self.files.folder / OPTIMIZER_STATE).is_file():
            self._refuse_missing([OPTIMIZER_STATE])
        stage = int(self._optimizer.get("zero_stage", STAGE_WEIGHTS))
        if stage != STAGE_WEIGHTS and not self._folder.model:
            self._refuse_missing([MODEL_NAME])

    def _model_names(self) -> list[str]:
        return [name for name in self._listed if "/" not in name] or super()._model_names()

    def _find_keys(self) -> Mapping[str, tuple[str, ...]]:
        """Return the states of each parameter that have a file."""
        root = self.files.folder / "zero"
        found = {}
        for name in self._flat_of:
            found[name] = {path.stem for path in (root / name).glob("*.pt")}
            self.files.progress.check()
        wanted = self._wanted_keys(found)
        missing = [self._file(n, k) for n in found for k in sorted(wanted[n] - found[n])]
        if missing:
            self._refuse_missing(missing)
        return {name: tuple(sorted(keys - {MASTER})) for name, keys in found.items()}

    def _wanted_keys(self, found: Mapping[str, set[str]]) -> Mapping[str, set[str]]:
        """Return the required states of each parameter: those listed, or those of its group.

        Empty parameters may lack steps. Groups with some of Adam's states have all of them.
        """
        if listed := [name.split("/") for name in self._listed if "/" in name]:
            wanted: dict[str, set[str]] = {name: {MASTER} for name in found}
            for _, name, file in listed:
                wanted.setdefault(name, set()).add(file.removesuffix(".pt"))
            return wanted
        of_group: dict[int, set[str]] = {group: {MASTER} for group in self._group_of}
        for name, keys in found.items():
            flat = self._flat_of[name]
            if numel_of(self._shapes[flat][name]):
                of_group[self._group_of[flat]] |= keys
        of_adam = {key for keys in of_group.values() for key in keys & {*ADAM_MOMENTS, STEP}}
        for keys in of_group.values():
            keys.update(of_adam if keys & ADAM_MOMENTS else ())
        return {
            name: of_group[self._group_of[flat]]
            - (set() if numel_of(self._shapes[flat][name]) else {STEP})
            for name, flat in self._flat_of.items()
        }

    def _file(self, name: str, key: str) -> str:
        return f"zero/{name}/{key or MASTER}.pt"

    def names(self) -> Sequence[str]:
        states = [self._file(n, key) for n, keys in self._keys.items() for key in (MASTER, *keys)]
        return [*self._model_names(), OPTIMIZER_STATE, *states]

    def _groups(self, buffers: Sequence[FlatBuffer]) -> tuple[Group, ...]:
        groups = self.files.load(OPTIMIZER_STATE, list(self._optimizer["param_groups"]))
        return tuple(
            Group(
                names=tuple(n for b in buffers if b.group == index for n in b.names),
                hyperparameters=fields,
                state=self._state_of(index),
            )
            for index, fields in enumerate(plain_hyperparameters(groups, ("params",)))
        )

    def _state_of(self, group: int) -> tuple[StateKey, ...]:
        """Return the table of a group's states, from its first parameter with elements."""
        flats = [i for i, g in enumerate(self._group_of) if g == group and self._shapes[i]]
        if not flats:
            return ()
        name = self._first_held(flats)
        flat = self._flat_of[name]
        table = [
            state_key(key, self._tensor(name, key), elementwise=True)
            for key in self._keys[name]
            if key != STEP
        ]
        scalars = self._scalar_values(flat)
        table += [state_key(key, value, elementwise=False) for key, value in scalars.items()]
        return tuple(sorted(table, key=lambda key: key.name))

    def _scalar_values(self, flat: int) -> Mapping[str, Scalar]:
        """Return a flat buffer's scalar states, which have separate files below ZeRO-3."""
        if self._stage == STAGE_WEIGHTS:
            state = self._optimizer["optimizer_state_dict"]["state"].get(flat, {})
            scalars = {k: v for k, v in state.items() if not is_vector(v)}
            return self.files.load(OPTIMIZER_STATE, scalars)  # type: ignore[no-any-return]
        # Many conversions write no step for an empty parameter.
        held = self._first_held([flat]) if self._shapes[flat] else ""
        name = next((n for n in (held, *self._shapes[flat]) if STEP in self._keys.get(n, ())), "")
        return {STEP: self._step(name)} if name else {}

    def _step(self, name: str) -> Scalar:
        file = self._file(name, STEP)
        return self.files.load(file, self.files.tree(file))  # type: ignore[no-any-return]

    def _first_held(self, flats: Iterable[int]) -> str:
        """Return the first parameter of flat buffers, if possible one with elements."""
        shapes = [item for flat in flats for item in self._shapes[flat].items()]
        return next((n for n, shape in shapes if numel_of(shape)), shapes[0][0])

    def _tensor(self, name: str, key: str) -> torch.Tensor:
        """Return a state or master of a parameter, whole and on the meta device."""
        file = self._file(name, key)
        tree = self.files.tree(file)
        tensor = tree["param"] if isinstance(tree, Mapping) else tree
        numel = numel_of(self._shapes[self._flat_of[name]][name])
        if not isinstance(tensor, torch.Tensor) or tensor.numel() != numel:
            found = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor)
            msg = (
                f"{self.files.folder / file} has {found}, but {name} has {numel} elements: it "
                "was converted from a run with tensor parallelism, or is of another run"
            )
            raise CheckpointFormatError(msg)
        return tensor.view(-1)

    # -- CheckpointReader ------------------------------------------------------------------------

    def check_files(self) -> None:
        self._check_model_files()
        for name, keys in self._keys.items():
            for key in (WEIGHT, *(key for key in keys if key != STEP)):
                self._tensor(name, key)
        if self._stage != STAGE_WEIGHTS:
            self._check_steps()

    def _check_steps(self) -> None:
        """Refuse a flat buffer whose parameters have different step counts."""
        for shapes in self._shapes:
            counted: dict[str, str] = {}
            for name, shape in shapes.items():
                if numel_of(shape) and STEP in self._keys[name]:
                    counted.setdefault(repr(float(self._step(name) or 0)), name)
            if len(counted) > 1:
                several = ", and ".join(f"{step} of {name}" for step, name in counted.items())
                msg = (
                    f"{self.files.folder}: the step files of one parameter group have {several}: "
                    "they are of different checkpoints. Convert again, or resume from another "
                    "checkpoint"
                )
                raise CheckpointCorruptedError(msg)

    def layout_of(self, manifest: Manifest) -> Layout:
        """Return the layout: each parameter whole, in a separate file."""
        return PerParameterPartition(manifest.buffers, 1)

    def locate(self, key: str, transfer: Transfer) -> Location:
        if key == WEIGHT and transfer.name in self._first.frozen:
            return self._locate_frozen(transfer)
        tensor = self._tensor(transfer.name, key)
        file = self.files.get(self._file(transfer.name, key))
        return file, StoredRun(tensor, transfer.start, transfer.stop)

    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        return self._scalar_values(at.buffer)

    def _loss_scaler(self) -> Mapping[str, Plain]:
        return stub_fields(self._optimizer.get("loss_scaler"))
