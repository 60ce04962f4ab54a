"""Every table of DeepSpeed's names, and the engines that are asked for each."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.version import Version

from lightning_elastic_zero.engine.deepspeed import (
    ACCELERATOR_NAMES,
    BUILDER_NAMES,
    ENGINE_NAMES,
    FILE_NAMES,
    LATER_NAMES,
    LATER_OPTION_NAMES,
    LINK_NAMES,
    MODULE_NAMES,
    MUON_MEMORY_NAMES,
    OLDER_NAMES,
    OPS_NAMES,
    OPTIMIZER_NAMES,
    OPTION_NAMES,
    PARAMETER_NAMES,
    PARTIAL_OFFLOAD_NAMES,
    RESIDENT_NAMES,
    SWAPPER_NAMES,
)
from tests.support.engines import Setup

TABLES: dict[str, dict[str, str]] = {
    "the engine": ENGINE_NAMES,
    "a parameter": PARAMETER_NAMES,
    "the swapper": SWAPPER_NAMES,
    "the module": MODULE_NAMES,
    "partial offload": PARTIAL_OFFLOAD_NAMES,
    "without offload_param": RESIDENT_NAMES,
    "momentum in memory": MUON_MEMORY_NAMES,
    "deepspeed.ops": OPS_NAMES,
    "the accelerator": ACCELERATOR_NAMES,
    "the builder of an operator": BUILDER_NAMES,
    **FILE_NAMES,
    **LINK_NAMES,
    **OPTIMIZER_NAMES,
    **{f"with {option}": names for option, names in OPTION_NAMES.items()},
    **{f"before {later} of {owner}": names for owner, (later, names) in OLDER_NAMES.items()},
    **{
        f"{owner} since {release}": names
        for release, owners in LATER_NAMES.items()
        for owner, names in owners.items()
    },
    **{
        f"with {option} since {release}": names
        for release, options in LATER_OPTION_NAMES.items()
        for option, names in options.items()
    },
}
"""By a title each."""

ENGINE = {
    "the engine",
    *(f"DeepSpeedEngine since {release}" for release in ("0.17.5", "0.18.4", "0.19.8")),
}
LINKED = {*LINK_NAMES}
ZERO_1_2 = {
    *ENGINE,
    *LINKED,
    "the module",
    "DeepSpeedZeroOptimizer",
    *(f"DeepSpeedZeroOptimizer since {release}" for release in ("0.18.4", "0.19.8")),
}
ZERO_3 = {
    *ENGINE,
    "a parameter",
    "DeepSpeedZeroOptimizer_Stage3",
    *(f"DeepSpeedZeroOptimizer_Stage3 since {r}" for r in ("0.18.4", "0.18.9", "0.19.8")),
}
RESIDENT = {*ZERO_3, "without offload_param"}
OFFLOADED = {*RESIDENT, "with offload_optimizer"}
BF16 = {
    *ENGINE,
    *LINKED,
    "BF16_Optimizer",
    *(f"BF16_Optimizer since {release}" for release in ("0.16.9", "0.18.9")),
}
FP16_FUSED = {*ENGINE, "FP16_Optimizer", "FP16_Optimizer since 0.18.9"}
FP16_UNFUSED = {*ENGINE, "FP16_UnfusedOptimizer", "FP16_UnfusedOptimizer since 0.18.9"}

SWAPPED_HIDDEN = 4000
"""So wide a layer that its sub-group goes to files: DeepSpeed swaps nothing below 1 MiB."""

ASKED_OF: Mapping[Setup, set[str]] = {
    Setup(1, "0"): ENGINE,
    Setup(1, "0", "bf16"): FP16_UNFUSED,
    Setup(1, "0", "fp16"): FP16_UNFUSED,
    Setup(1, "0", "bf16", optimizer="FusedAdam"): FP16_FUSED,
    Setup(1, "1"): ZERO_1_2,
    Setup(1, "2", "fp16"): ZERO_1_2,
    Setup(1, "1", autocast=True): ZERO_1_2,
    Setup(1, "2", offload=True): {*ZERO_1_2, "with cpu_offload", "with cpu_offload since 0.19.8"},
    Setup(1, "B", "bf16"): BF16,
    Setup(1, "3"): RESIDENT,
    Setup(1, "3", "bf16", offload=True): OFFLOADED,
    Setup(1, "3", offload=True, offloaded_weights=True): {*ZERO_3, "with offload_optimizer"},
    Setup(1, "3", offload=True, ratio=0.5, optimizer="CPUAdam", sub_group=700): {
        *OFFLOADED,
        "partial offload",
        "with backup_optimizer",
    },
    Setup(1, "3", "bf16", optimizer="Muon", muon_in_memory=True): {*RESIDENT, "momentum in memory"},
    Setup(1, "3", nvme="plain", hidden=SWAPPED_HIDDEN): {
        *OFFLOADED,
        *FILE_NAMES,
        "the swapper",
        "with swap_optimizer",
    },
}
"""What each kind of engine is asked for when it has been made, under the newest release."""

IN_OPTIMIZERS_PLACE = "DeepSpeedZeRoOffload"
ASKED_WITHOUT_OPTIMIZER: Mapping[Setup, set[str]] = {
    Setup(1, "3", "bf16"): {*ENGINE, "a parameter", IN_OPTIMIZERS_PLACE},
    Setup(1, "3", offload=True, offloaded_weights=True): {
        *ENGINE,
        "a parameter",
        IN_OPTIMIZERS_PLACE,
    },
    Setup(1, "0", "bf16"): ENGINE,  # A BF16_Optimizer around nothing stands there.
    Setup(1, "0"): ENGINE,
}
"""What engines that evaluate are asked for."""


def asked_of(setup: Setup, release: str) -> set[str]:
    """Return the titles of the tables of which an engine of a release is asked."""
    wanted = ASKED_OF[setup]
    if (setup.zero, setup.precision) == ("0", "bf16") and Version(release) < Version("0.18"):
        wanted = BF16  # It has no other wrapper for bf16.
    if setup.zero == "B" and Version("0.18") < Version(release) < Version("0.18.5"):
        wanted = FP16_UNFUSED  # It takes stage 0's for it.
    asked = {title for title in wanted if not _is_later(title, release)}
    lacked = {
        (later, owner)
        for since, owners in LATER_NAMES.items()
        for owner, names in owners.items()
        for later in names
        if Version(release) < Version(since)
    }
    before = {
        f"before {later} of {owner}"
        for owner, (later, _) in OLDER_NAMES.items()
        if owner in asked and (later, owner) in lacked
    }
    return asked | before


def _is_later(title: str, release: str) -> bool:
    """Return whether a table is asked for since a later release only."""
    _, _, since = title.partition(" since ")
    return bool(since) and Version(release) < Version(since)
