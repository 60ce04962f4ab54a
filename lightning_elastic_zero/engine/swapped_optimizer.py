"""ZeRO-3's sub-groups whose masters and optimizer states lie in files (offload to NVMe).

Between steps DeepSpeed's tensors of such a sub-group are empty, and each has a file. What is saved
is read from these files, mapped into memory: like a live tensor, such a mapping changes with the
optimizer's step, and with nothing else. What is loaded is received in files without a name beside
them, and goes through DeepSpeed's swapper one sub-group at a time. So a save or a load needs no
memory for the state: pages of files are the kernel's to give back.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import posix_fallocate
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.engine.deepspeed_internals import (
    is_swapped,
    swap_in,
    swap_out,
    write_weights,
)
from lightning_elastic_zero.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class SwappedSubGroup:
    """A sub-group that is in files, and where its tensors are."""

    optimizer: Any
    """ZeRO-3's wrapper."""
    index: int
    """Which sub-group."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of all that is in files."""
        dtype: torch.dtype = self.optimizer.optimizer_swapper.dtype
        return dtype

    @property
    def numel(self) -> int:
        """How many elements each file holds, without the padding behind them."""
        return int(self.optimizer.fp16_partitioned_groups_flat_numel[self.index])

    def masters(self) -> torch.Tensor:
        """Return the master weights, mapped from their file, to be read only."""
        return self._mapped(self._files()[0])

    def states(self, held: Mapping[str, Any]) -> dict[str, Any]:
        """Return the optimizer's states, those in files mapped, to be read only.

        Args:
            held: what the wrapped optimizer has, which is an empty tensor for each in a file.
        """
        files = {id(file.compute_tensor): file for file in self._files()}
        return {
            key: self._mapped(files[id(value)]) if id(value) in files else value
            for key, value in held.items()
        }

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros in a file without a name, beside the others, that ends with the tensor.

        Raises:
            OSError: there is no room for it: found out now, and not when it is filled.
        """
        size_bytes = self.numel * dtype.itemsize
        with tempfile.TemporaryFile(dir=self.optimizer.optimizer_swapper.swap_folder) as file:
            posix_fallocate(file.fileno(), 0, size_bytes)
            memory = mmap.mmap(file.fileno(), size_bytes)
        return torch.frombuffer(memory, dtype=dtype)

    def _files(self) -> list[Any]:
        """Return what DeepSpeed knows of the files: the masters', then the states'."""
        flat = self.optimizer.fp32_partitioned_groups_flat[self.index]
        tensors: list[Any] = self.optimizer.optimizer_swapper.swap_params_info[flat.ds_id].tensors
        return tensors

    def _mapped(self, file: Any) -> torch.Tensor:  # noqa: ANN401 (untyped library)
        """Map what DeepSpeed has written into a file.

        Raises:
            UnsupportedError: the file is gone, or shorter than what was written.
        """
        path = Path(file.swap_path)
        found = path.stat().st_size if path.exists() else 0
        if found < (wanted := self.numel * self.dtype.itemsize):
            msg = (
                f"{path} holds {found} of the {wanted} bytes that DeepSpeed has swapped out to it: "
                "it was removed or cut while this run was using it. Give each run a folder of its "
                "own as offload_optimizer.nvme_path, and load the last checkpoint"
            )
            raise UnsupportedError(msg)
        return torch.from_file(str(path), shared=False, size=self.numel, dtype=self.dtype)


def swapped_sub_group(optimizer: Any, index: int) -> SwappedSubGroup | None:  # noqa: ANN401
    """Return a sub-group that is in files; None for one in memory, as small ones always are."""
    if not getattr(optimizer, "swap_optimizer", False):
        return None
    return SwappedSubGroup(optimizer, index) if is_swapped(optimizer, index) else None


def forget_swapped_states(optimizer: Any) -> None:  # noqa: ANN401 (untyped library)
    """Discard the states in files, and gradients on their way there, before others are written."""
    if not getattr(optimizer, "swap_optimizer", False):
        return
    swapper = optimizer.optimizer_swapper
    swapper.purge_state()
    for info in swapper.swap_params_info.values():
        info.swapped_gradients = {}
    for index, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        if swapped_sub_group(optimizer, index):
            optimizer.optimizer.state.pop(flat, None)


@contextmanager
def swapped_in(sub_group: SwappedSubGroup | None) -> Iterator[None]:
    """Read a sub-group into memory, and write it back, low-precision weights too; None: do nothing.

    The states that it has then must be new to the swapper (``forget_swapped_states``).
    """
    if sub_group is None:
        yield
        return
    optimizer, index = sub_group.optimizer, sub_group.index
    swap_in(optimizer, index)
    yield
    write_weights(optimizer, index)
    swap_out(optimizer, index)
