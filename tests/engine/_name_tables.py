"""The objects of each kind of engine that are checked for DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.version import Version

from tests.support.engines import EngineCase

ENGINE = {"DeepSpeedEngine"}
LINKED = {"a parameter of ZeRO-1/2", "a parameter's link to its master"}
ZERO_1_2 = {
    *ENGINE,
    *LINKED,
    "DeepSpeedZeroOptimizer",
    "the module of DeepSpeedZeroOptimizer",
}
ZERO_3 = {*ENGINE, "a parameter of ZeRO-3", "DeepSpeedZeroOptimizer_Stage3"}
RESIDENT = {*ZERO_3, "an optimizer without offload_param"}
OFFLOADED = {*RESIDENT, "an optimizer with offload_optimizer"}
BF16 = {*ENGINE, *LINKED, "BF16_Optimizer"}
FP16_FUSED = {*ENGINE, "FP16_Optimizer"}
FP16_UNFUSED = {*ENGINE, "FP16_UnfusedOptimizer"}

SWAPPED_HIDDEN = 4000
"""Width of a layer whose sub-group is swapped to files; DeepSpeed swaps nothing below 1 MiB."""

CHECKED: Mapping[EngineCase, set[str]] = {
    EngineCase(1, "0"): ENGINE,
    EngineCase(1, "0", "bf16"): FP16_UNFUSED,
    EngineCase(1, "0", "fp16"): FP16_UNFUSED,
    EngineCase(1, "0", "bf16", optimizer="FusedAdam"): FP16_FUSED,
    EngineCase(1, "1"): ZERO_1_2,
    EngineCase(1, "2", "fp16"): ZERO_1_2,
    EngineCase(1, "1", autocast=True): ZERO_1_2,
    EngineCase(1, "2", offload=True): {*ZERO_1_2, "an optimizer with cpu_offload"},
    EngineCase(1, "B", "bf16"): BF16,
    EngineCase(1, "3"): RESIDENT,
    EngineCase(1, "3", "bf16", offload=True): OFFLOADED,
    EngineCase(1, "3", offload=True, offloaded_weights=True): {
        *ZERO_3,
        "an optimizer with offload_optimizer",
    },
    EngineCase(1, "3", offload=True, ratio=0.5, optimizer="CPUAdam", sub_group=700): {
        *OFFLOADED,
        "an optimizer with partial offload",
    },
    EngineCase(1, "3", "bf16", optimizer="Muon", muon_in_memory=True): {
        *RESIDENT,
        "an optimizer with save_muon_momentum_buffer_in_memory",
    },
    EngineCase(1, "3", nvme="plain", hidden=SWAPPED_HIDDEN): {
        *OFFLOADED,
        "a sub-group in files",
        "a file of a sub-group",
        "the optimizer swapper",
        "an optimizer with swap_optimizer",
    },
}
"""Objects of each kind of engine that are checked at its setup, with the newest release."""

NO_OPTIMIZER_3 = {*ENGINE, "a parameter of ZeRO-3", "DeepSpeedZeRoOffload"}
CHECKED_WITHOUT_OPTIMIZER: Mapping[EngineCase, set[str]] = {
    EngineCase(1, "3", "bf16"): NO_OPTIMIZER_3,
    EngineCase(1, "3", offload=True, offloaded_weights=True): NO_OPTIMIZER_3,
    EngineCase(1, "0", "bf16"): ENGINE,  # It has a BF16_Optimizer without parameters.
    EngineCase(1, "0"): ENGINE,
}
"""The same for engines without an optimizer."""


def checked_in(setup: EngineCase, release: str) -> set[str]:
    """Return the objects of an engine that are checked with an older release."""
    checked, version = CHECKED[setup], Version(release)
    if (setup.zero, setup.precision) == ("0", "bf16") and version < Version("0.18"):
        checked = BF16  # These releases have no other wrapper for bf16.
    if setup.zero == "B" and Version("0.18") < version < Version("0.18.5"):
        checked = FP16_UNFUSED  # These releases use the wrapper of stage 0.
    older = set()
    if "BF16_Optimizer" in checked and version < Version("0.16.9"):
        older = {"BF16_Optimizer without zero_grad"}
    elif checked & {"FP16_Optimizer", "FP16_UnfusedOptimizer"} and version < Version("0.18.9"):
        older = {"an optimizer without loss_scale_config"}
    return checked | older
