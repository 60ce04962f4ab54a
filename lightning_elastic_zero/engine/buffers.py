"""The flat buffers of each of DeepSpeed's optimizer wrappers.

In stage 0 there are none, or they are not partitioned; views of the weights take their place.

DeepSpeed's mapping from parameters to fragments is not used: it is wrong with
``round_robin_gradients`` and empty in several states. ``addresses`` computes the offsets.

Offload to NVMe: between steps, the tensors of a swapped sub-group are empty, and each has a file. A
save maps these files, which change only in the optimizer's step, like live tensors. A load receives
values in unnamed files in the same folder and passes them through DeepSpeed's swapper, one
sub-group at a time. Neither needs memory for the state: the kernel can reclaim pages of files.

``engine.offload_states()``: masters and optimizer states keep their tensors, on the host. DeepSpeed
drops its views of the low-precision weights until ``reload_states()``; meanwhile its buffers are
read.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import posix_fallocate
from pathlib import Path
from typing import Any

import torch
from torch.distributed import get_global_rank, get_rank

from lightning_elastic_zero.core.layout import spans
from lightning_elastic_zero.engine.deepspeed import (
    OFFLOADED_COPY_SUFFIX,
    PLAIN,
    ZERO_3,
    is_swapped,
    parameter_paddings,
    relink_states,
    relink_weights,
    write_weights,
)
from lightning_elastic_zero.errors import UnsupportedError

REPLICATED = (PLAIN, "FP16_Optimizer", "FP16_UnfusedOptimizer")
"""Stage 0: every rank has all masters and states."""

GATHER_ELEMENTS = 1 << 21
"""Elements gathered at once from all ranks together: bounds the memory of a refresh."""

_CONTIGUOUS = {
    "DeepSpeedZeroOptimizer": (
        "round_robin_bit16_groups",
        "single_partition_of_fp32_groups",
        "parallel_partitioned_bit16_groups",
    ),
    "BF16_Optimizer": ("bf16_groups", "fp32_groups_flat_partition", "bf16_partitioned_groups"),
}
"""Attributes of ZeRO-1/2: each group's parameters, masters, and all ranks' weight partitions."""


@dataclass(frozen=True, slots=True)
class SwappedSubGroup:
    """A sub-group in files."""

    optimizer: Any
    """ZeRO-3's wrapper."""
    index: int

    @property
    def dtype(self) -> torch.dtype:
        """The type of all tensors in files."""
        dtype: torch.dtype = self.optimizer.optimizer_swapper.dtype
        return dtype

    @property
    def numel(self) -> int:
        """Elements of each file, without the padding after them."""
        return int(self.optimizer.fp16_partitioned_groups_flat_numel[self.index])

    def masters(self) -> torch.Tensor:
        return self._mapped(self._files()[0])

    def states(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the wrapped optimizer's states with a read-only mapping for each empty tensor."""
        files = {id(file.compute_tensor): file for file in self._files()}
        return {
            key: self._mapped(files[id(value)]) if id(value) in files else value
            for key, value in state.items()
        }

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros in an unnamed file in the same folder; the tensor owns the file.

        Raises OSError if the disk is full: space is reserved here, not when the file is filled.
        """
        size_bytes = self.numel * dtype.itemsize
        with tempfile.TemporaryFile(dir=self.optimizer.optimizer_swapper.swap_folder) as file:
            posix_fallocate(file.fileno(), 0, size_bytes)
            memory = mmap.mmap(file.fileno(), size_bytes)
        return torch.frombuffer(memory, dtype=dtype)

    def _files(self) -> list[Any]:
        """Return DeepSpeed's records of the files, the masters' first."""
        flat = self.optimizer.fp32_partitioned_groups_flat[self.index]
        tensors: list[Any] = self.optimizer.optimizer_swapper.swap_params_info[flat.ds_id].tensors
        return tensors

    def _mapped(self, file: Any) -> torch.Tensor:
        path = Path(file.swap_path)
        size_bytes = path.stat().st_size if path.exists() else 0
        if size_bytes < (wanted := self.numel * self.dtype.itemsize):
            msg = (
                f"{path}: {size_bytes} bytes, expected {wanted}. The file was removed or truncated "
                "while this run was using it. Give each run its own folder as "
                "offload_optimizer.nvme_path, and load the last checkpoint"
            )
            raise UnsupportedError(msg)
        return torch.from_file(str(path), shared=False, size=self.numel, dtype=self.dtype)


def swapped_sub_group(optimizer: Any, index: int) -> SwappedSubGroup | None:
    """Return a sub-group in files, or None if it is in memory."""
    if not getattr(optimizer, "swap_optimizer", False):
        return None
    return SwappedSubGroup(optimizer, index) if is_swapped(optimizer, index) else None


def forget_swapped_states(optimizer: Any) -> None:
    """Discard the states in files, and gradients being written there, before a restore."""
    if not getattr(optimizer, "swap_optimizer", False):
        return
    swapper = optimizer.optimizer_swapper
    swapper.purge_state()
    for info in swapper.swap_params_info.values():
        info.swapped_gradients = {}
    for index, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        if swapped_sub_group(optimizer, index):
            optimizer.optimizer.state.pop(flat, None)


def refuse_offloaded(optimizer: Any) -> None:
    """Raise UnsupportedError for a load while states are offloaded."""
    if offloaded := getattr(optimizer, "offloaded_states", None):
        names = ", ".join(sorted(state.value for state in offloaded))
        msg = (
            f"engine.offload_states() has moved {names} to the host: call engine.reload_states() "
            "before a load. A save does not need it"
        )
        raise UnsupportedError(msg)


def weights_are_offloaded(optimizer: Any) -> bool:
    """Whether the low-precision weights are offloaded, so not views of a buffer."""
    offloaded = getattr(optimizer, "offloaded_states", None) or ()
    return any(state.value == "lp_params" for state in offloaded)


def without_copies(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an optimizer's states without the host copies of them."""
    suffix = OFFLOADED_COPY_SUFFIX
    copies = {key for key in state if key.endswith(suffix) and key.removesuffix(suffix) in state}
    return {key: value for key, value in state.items() if key not in copies}


@dataclass(frozen=True, slots=True)
class LiveFlatBuffer:
    """One flat buffer of a live engine on this rank.

    =========================  =====================  ===================  ========================
    wrapper                    ``master``             ``stepped``          ``low``
    =========================  =====================  ===================  ========================
    ZeRO-1, 2 and 3            this rank's partition  None                 its rounded weights
    ZeRO-3, in files           empty                  None                 its rounded weights
    stage 0, fp32              view of the weight     the weight           ``master``
    ``FP16_UnfusedOptimizer``  view of a master       the master, shaped   view of the weight
    ``FP16_Optimizer``         all masters            None                 all weights
    =========================  =====================  ===================  ========================
    """

    group: int
    """Index of the optimizer's parameter group."""
    parameters: tuple[torch.nn.Parameter, ...]
    """In the order of the flat buffer."""
    paddings: tuple[int, ...]
    """Elements of padding after each parameter (``parameter_alignment``); empty if none."""
    master: torch.Tensor
    """This rank's master weights, 1-D. Empty if swapped."""
    low: torch.Tensor
    """This rank's low-precision weights, of the same shape."""
    partitions: tuple[torch.Tensor, ...] = ()
    """ZeRO-1/2: the low-precision weights of all ranks."""
    stepped: torch.Tensor | None = None
    """Stage 0: the tensor that the optimizer steps, in its shape; None if it is ``master``."""
    sub_group: int | None = None
    """ZeRO-3: index of the sub-group."""
    swapped: SwappedSubGroup | None = None
    """ZeRO-3: masters and states in files."""

    @property
    def has_masters(self) -> bool:
        """Whether masters and weights are separate, unlike in stage 0 in fp32."""
        return bool(self.swapped) or self.low.data_ptr() != self.master.data_ptr()

    @property
    def state_key(self) -> torch.Tensor:
        """The tensor that the optimizer steps, and the key of its state."""
        return self.master if self.stepped is None else self.stepped

    @property
    def values(self) -> torch.Tensor:
        """The master weights; those in files are read-only."""
        return self.swapped.masters() if self.swapped else self.master.data

    def write_back(self) -> None:
        """Copy the masters back if ``master`` is not a view of the stepped tensor."""
        if self.stepped is not None and self.stepped.data_ptr() != self.master.data_ptr():
            self.stepped.data.copy_(self.master.view(self.stepped.shape))


def live_flat_buffers(optimizer: Any, wrapper: str) -> list[LiveFlatBuffer]:
    """Return the flat buffers of a wrapper of that class name.

    ZeRO-1/2 has one per parameter group in equal partitions, ZeRO-3 one per sub-group with each
    parameter partitioned separately. Stage 0 has one per parameter, except in ``FP16_Optimizer``.
    """
    if wrapper in REPLICATED:
        return _replicated_buffers(optimizer, wrapper)
    # DeepSpeed then has no views of the weights, only the buffers below.
    offloaded = weights_are_offloaded(optimizer)
    if wrapper == ZERO_3:
        lows = optimizer.fp16_partitioned_groups_flat
        if offloaded:
            sizes = [sum(p.partition_numel() for p in members) for members in optimizer.fp16_groups]
            lows = optimizer.lp_param_buffer.split(sizes)
        return [
            LiveFlatBuffer(
                group=optimizer.sub_group_to_group_id[sub_group],
                parameters=tuple(parameters),
                paddings=(),
                master=optimizer.fp32_partitioned_groups_flat[sub_group],
                low=lows[sub_group],
                sub_group=sub_group,
                swapped=swapped_sub_group(optimizer, sub_group),
            )
            for sub_group, parameters in enumerate(optimizer.fp16_groups)
        ]
    groups, masters, live = (getattr(optimizer, name) for name in _CONTIGUOUS[wrapper])
    if offloaded:
        flats = zip(optimizer.bit16_groups_flat, optimizer.partition_size, strict=True)
        live = [values.split(int(size)) for values, size in flats]
    return [
        LiveFlatBuffer(
            group=group,
            parameters=tuple(parameters),
            paddings=parameter_paddings(optimizer, group),
            master=masters[group],
            low=live[group][get_rank(group=optimizer.real_dp_process_group[group])],
            partitions=tuple(live[group]),
        )
        for group, parameters in enumerate(groups)
    ]


def _replicated_buffers(optimizer: Any, wrapper: str) -> list[LiveFlatBuffer]:
    if wrapper == "FP16_Optimizer":
        flats = zip(optimizer.fp32_groups_flat, optimizer.fp16_groups_flat, strict=True)
        return [
            LiveFlatBuffer(group, tuple(optimizer.fp16_groups[group]), (), master, low)
            for group, (master, low) in enumerate(flats)
        ]
    if wrapper == "FP16_UnfusedOptimizer":
        pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        return [
            LiveFlatBuffer(group, (weight,), (), flat(master), flat(weight), stepped=master)
            for group, (weights, masters) in enumerate(pairs)
            for weight, master in zip(weights, masters, strict=True)
        ]
    return [
        LiveFlatBuffer(group, (weight,), (), view := flat(weight), view, stepped=weight)
        for group, members in enumerate(optimizer.param_groups)
        for weight in members["params"]
        if weight.numel() and (weight.requires_grad or _was_trained(optimizer, weight))
    ]


def _was_trained(optimizer: Any, weight: torch.nn.Parameter) -> bool:
    """Whether a frozen weight was trained before: it has state then."""
    state = optimizer.state.get(weight)
    if state and type(optimizer).__name__ == "Adagrad":  # Its constructor creates all states.
        return bool(state["step"])
    return bool(state)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in order, 1-D: a view, or a copy if they are not contiguous."""
    return tensor.detach().reshape(-1)


def optimizer_wrapper(engine: Any) -> str:
    """Return the wrapper's class name, PLAIN for an unwrapped optimizer, "" without optimizer."""
    if isinstance(engine.optimizer, torch.optim.Optimizer):
        return PLAIN
    name = type(engine.optimizer).__name__
    if name == "BF16_Optimizer" and not getattr(engine.optimizer, "using_real_optimizer", True):
        return ""
    return "" if name in ("NoneType", "DeepSpeedZeRoOffload", "DummyOptim") else name


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside DeepSpeed's wrapper; stage 0 may have no wrapper."""
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer


def group_parameters(optimizer: Any, wrapper: str) -> list[list[torch.nn.Parameter]]:
    """Return each group's trained parameters in the order given to the optimizer.

    ``round_robin_gradients`` (ZeRO-1/2) changes only the order in the flat buffers.
    """
    if wrapper == "DeepSpeedZeroOptimizer":
        return [list(parameters) for parameters in optimizer.bit16_groups]
    groups: list[list[torch.nn.Parameter]] = [[] for _ in inner_optimizer(optimizer).param_groups]
    for buffer in live_flat_buffers(optimizer, wrapper):
        groups[buffer.group] += buffer.parameters
    return groups


def refresh_low_precision(
    optimizer: Any, wrapper: str, weights: Sequence[torch.Tensor] = (), *, has_state: bool
) -> None:
    """Write the masters into the low-precision weights of all ranks. Collective except in stage 0.

    ZeRO-3's parameters must be partitioned (``checkpoint_event_prologue``) and gathered again
    afterwards. ``weights`` are written instead of the masters, if given for each flat buffer;
    ``has_state``: whether every group has optimizer state.
    """
    buffers = live_flat_buffers(optimizer, wrapper)
    if wrapper == ZERO_3:
        for sub_group in range(len(optimizer.fp16_groups)):
            if not swapped_sub_group(optimizer, sub_group):  # ``swapped_in`` has written them.
                write_weights(optimizer, sub_group)
        for buffer, values in zip(buffers, weights, strict=False):
            if buffer.has_masters:
                buffer.low.data.copy_(values)
        return
    sources = weights or [buffer.master.data for buffer in buffers]
    if wrapper in REPLICATED:
        for buffer, source in zip(buffers, sources, strict=True):
            if buffer.has_masters:
                sizes = [parameter.numel() for parameter in buffer.parameters]
                pieces: Any = torch.split(source[: sum(sizes)], sizes)
                for parameter, values in zip(buffer.parameters, pieces, strict=True):
                    parameter.data.copy_(values.view(parameter.shape))
        return
    for buffer, source in zip(buffers, sources, strict=True):
        if buffer.has_masters:
            buffer.low.data.copy_(source)
        if len(buffer.partitions) > 1 and buffer.low.numel():
            _gather_partitions(buffer, optimizer.real_dp_process_group[buffer.group])
    relink_weights(optimizer)
    # The states' tensors may be new.
    parameters = (parameter for buffer in buffers for parameter in buffer.parameters)
    relink_states(optimizer, parameters, has_state=has_state)


def _gather_partitions(buffer: LiveFlatBuffer, process_group: Any) -> None:
    """Gather all partitions of a flat buffer on every rank. Collective.

    On a device, in bounded parts to limit memory; DeepSpeed's ``update_lp_params`` gathers the
    whole buffer at once. On the host, by broadcasts into place: Gloo's all_gather would hold and
    copy a second copy of the buffer.
    """
    from deepspeed import comm

    if buffer.low.device.type != "cpu":
        size = max(GATHER_ELEMENTS // len(buffer.partitions), 1)
        for start, stop in spans(0, buffer.low.numel(), size):
            parts = [partition.data[start:stop] for partition in buffer.partitions]
            comm.all_gather(parts, buffer.low.data[start:stop], group=process_group)
        return
    sent = [
        # As bytes, which all CPU backends support.
        comm.broadcast(
            partition.data.view(torch.int8),
            get_global_rank(process_group, rank),
            group=process_group,
            async_op=True,
        )
        for rank, partition in enumerate(buffer.partitions)
    ]
    for work in sent:
        work.wait()
