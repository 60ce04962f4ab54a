"""Stand-ins for the few classes of DeepSpeed's that its checkpoints pickle.

With them those files are read as plain data, without importing DeepSpeed and without running code
of anyone's: a stand-in takes the fields that were saved and does nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning_elastic_zero.manifest import Plain


class Fields:
    """An object's fields, and nothing of what it could do."""


class FragmentAddress(Fields):
    """Where a fragment of a parameter lies; wrong on disk with round-robin gradients: not used."""


class LossScaler(Fields):
    """A constant loss scale."""


class DynamicLossScaler(LossScaler):
    """A loss scale that follows overflows."""


class ZeroStage(int):
    """DeepSpeed's enumeration of the ZeRO stages."""


CLASS_STUBS: Mapping[str, type] = {
    "deepspeed.utils.tensor_fragment.fragment_address": FragmentAddress,
    "deepspeed.runtime.zero.config.ZeroStageEnum": ZeroStage,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": LossScaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": DynamicLossScaler,
}
"""What is built in whose place; a file that needs any other class is refused by its name."""


def stub_fields(scaler: object) -> dict[str, Plain]:
    """Return a loss scaler's class and plain fields; nothing where there is none."""
    if not isinstance(scaler, LossScaler):
        return {}
    fields = {k: v for k, v in vars(scaler).items() if isinstance(v, (bool, int, float))}
    return {"class": type(scaler).__name__, **fields}
