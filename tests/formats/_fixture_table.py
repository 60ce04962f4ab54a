"""The table of checkpoints by other software, and how each was made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tests.support.engines import EngineCase

NEWEST = "0.19"
RELEASES = ("0.16", "0.17", "0.18", NEWEST)
PR_8031 = "0.19.2+pr8031"
"""The code of DeepSpeed pull request 8031, which was closed and is in no release."""


@dataclass(frozen=True)
class FixtureRow:
    name: str
    setup: EngineCase
    shows: str
    """The property that a reader must handle."""
    release: str = NEWEST
    """The first two numbers of DeepSpeed's version, or ``PR_8031``."""
    kind: str = "stock"
    """The software that wrote it, and how it did; see ``make_fixtures``."""
    steps: int = 3
    """Steps trained before the save."""

    @property
    def path(self) -> str:
        """The path to resume from."""
        inside = {
            "lightning": f"/step{self.steps}.ckpt",
            "transformers": f"/checkpoint-{self.steps}",
        }
        return f"checkpoint{inside.get(self.kind, '')}"


def small(
    world: int,
    zero: str,
    precision: str = "bf16",
    grouping: str = "one",
    **options: Any,
) -> EngineCase:
    """Return a setup with small checkpoints, and the same loss in every world."""
    base = EngineCase(world, zero, precision, grouping=grouping, hidden=5, steady=True)
    return replace(base, **options)


def _each_release() -> list[FixtureRow]:
    rows = []
    for release in RELEASES:
        kinds = {
            "zero1": (small(2, "1", "fp32"), "ZeRO-1, fp32, one parameter group"),
            "zero2": (small(3, "2", grouping="two"), "ZeRO-2, bf16, two parameter groups"),
            "zero3": (
                small(2, "3", grouping="two", sub_group=15),
                "ZeRO-3, bf16, two parameter groups, each in several sub-groups",
            ),
            "bf16": (small(2, "B"), "BF16_Optimizer: its files do not record a ZeRO stage"),
        }
        if (
            release == "0.17"
        ):  # It makes FP16_UnfusedOptimizer here, since two of its constants are equal.
            del kinds["bf16"]
        rows += [FixtureRow(f"{name}-ds{release}", *kind, release) for name, kind in kinds.items()]
    return rows


def _options() -> list[FixtureRow]:
    return [
        FixtureRow(
            "round-robin",
            small(2, "2", grouping="two", round_robin=True),
            "round_robin_gradients: parameters are in another order than the module's",
        ),
        FixtureRow(
            "alignment",
            small(3, "1", grouping="two", alignment=True),
            "parameter_alignment: padding between parameters",
        ),
        FixtureRow(
            "zero3x4", small(4, "3", "fp32", "two"), "ZeRO-3, fp32: ranks that hold only padding"
        ),
        FixtureRow(
            "empty", small(4, "2", grouping="two", empty=True), "a parameter without elements"
        ),
        FixtureRow("offload2", small(2, "2", offload=True), "ZeRO-2 with its optimizer on the CPU"),
        FixtureRow("offload3", small(2, "3", offload=True), "ZeRO-3 with its optimizer on the CPU"),
        FixtureRow("unstepped", small(2, "2"), "saved before the first step", steps=0),
        FixtureRow(
            "momentum", small(2, "3", optimizer="Momentum"), "SGD with momentum instead of Adam"
        ),
        FixtureRow(
            "two-tags", small(2, "2"), "the file latest names the older of two", kind="two tags"
        ),
        FixtureRow(
            "stale2", small(2, "2"), "a rank's file of a larger world, ZeRO-2", kind="stale"
        ),
        FixtureRow("stale3", small(2, "3"), "ranks' files of a larger world, ZeRO-3", kind="stale"),
    ]


def _elastic() -> list[FixtureRow]:
    shows = "elastic_checkpoint, "
    two = small(3, "2", grouping="two", elastic=True)
    cpu: dict[str, Any] = {
        "elastic": True,
        "optimizer": "CPUAdam",
    }  # 0.16 cannot save torch's AdamW elastically.
    return [
        FixtureRow("elastic1-ds0.19", small(2, "1", elastic=True), shows + "ZeRO-1"),
        FixtureRow("elastic2-ds0.19", two, shows + "ZeRO-2, two groups"),
        FixtureRow("elastic-cpu-adam-ds0.19", small(2, "2", **cpu), shows + "DeepSpeedCPUAdam"),
        FixtureRow(
            "elastic1-ds0.16", small(2, "1", **cpu), shows + "DeepSpeedCPUAdam, ZeRO-1", "0.16"
        ),
        FixtureRow(
            "elastic2-ds0.16",
            small(3, "2", grouping="two", **cpu),
            shows + "DeepSpeedCPUAdam, ZeRO-2, two groups",
            "0.16",
        ),
    ]


def _elastic_3() -> list[FixtureRow]:
    """Return checkpoints of elastic ZeRO-3, which cannot save the tensor steps of torch's AdamW."""
    setups = {
        "elastic3": (
            small(2, "3", grouping="two", sub_group=15, elastic=True, optimizer="CPUAdam"),
            "ZeRO-3, bf16, two groups, each in several sub-groups",
        ),
        "elastic3x4": (
            small(4, "3", "fp32", "two", elastic=True, optimizer="CPUAdam"),
            "ZeRO-3, fp32: ranks that hold only padding, some of which was saved",
        ),
        "elastic3-momentum": (
            small(3, "3", elastic=True, optimizer="Momentum"),
            "ZeRO-3, SGD with momentum, which does not count steps",
        ),
        "elastic3-offload": (
            small(2, "3", elastic=True, optimizer="CPUAdam", offload=True),
            "ZeRO-3 with its optimizer on the CPU",
        ),
    }
    return [
        FixtureRow(f"{name}-pr8031", setup, f"elastic_checkpoint, {what}", PR_8031)
        for name, (setup, what) in setups.items()
    ]


def _universal() -> list[FixtureRow]:
    setups = {
        "universal1": (small(2, "1"), "ZeRO-1"),
        "universal2": (small(3, "2", grouping="two"), "ZeRO-2, two parameter groups"),
        "universal3": (small(2, "3"), "ZeRO-3"),
        "universal3-two": (small(2, "3", grouping="two"), "ZeRO-3, two parameter groups"),
        "universal-bf16": (small(2, "B"), "BF16_Optimizer"),
    }
    newest = [
        FixtureRow(name, setup, f"ds_to_universal of {what}", kind="universal")
        for name, (setup, what) in setups.items()
    ]
    older = [
        FixtureRow(
            f"{name}-ds0.16", small(2, zero), f"ds_to_universal of ZeRO-{zero}", "0.16", "universal"
        )
        for name, zero in (("universal2", "2"), ("universal3", "3"))
    ]
    both = FixtureRow(
        "universal-beside",
        small(2, "2"),
        "a universal checkpoint and its source in one folder",
        kind="universal beside",
    )
    corrupt = FixtureRow(
        "universal-corrupt",
        small(2, "2", grouping="two", round_robin=True),
        "ds_to_universal cuts round-robin gradients in the wrong places: to be refused",
        kind="universal",
    )
    return [*newest, *older, both, corrupt]


def _dumps() -> list[FixtureRow]:
    setups = {
        "dumps1": small(2, "1"),
        "dumps2": small(2, "2"),
        "dumps2-two": small(3, "2", grouping="two"),
        "dumps3": small(2, "3"),
        "dumps-bf16": small(2, "B"),
    }
    shows = "each rank's optimizer.state_dict() saved by hand, next to the model's weights"
    return [FixtureRow(name, setup, shows, kind="dumps") for name, setup in setups.items()]


def _trainers() -> list[FixtureRow]:
    two = small(2, "2", grouping="two")
    three = small(2, "3", grouping="two")
    lit = "Lightning's DeepSpeedStrategy and ModelCheckpoint, "
    return [
        FixtureRow("lightning2", two, lit + "ZeRO-2", kind="lightning"),
        FixtureRow("lightning3", three, lit + "ZeRO-3", kind="lightning"),
        FixtureRow(
            "lightning1-fp32", small(2, "1", "fp32"), lit + "ZeRO-1, fp32", kind="lightning"
        ),
        FixtureRow("lightning2-ds0.16", two, lit + "ZeRO-2", "0.16", "lightning"),
        FixtureRow(
            "transformers2",
            small(2, "2", "fp32", "biases"),
            "Transformers' Trainer, ZeRO-2, fp32",
            kind="transformers",
        ),
        FixtureRow("accelerate2", two, "Accelerator.save_state, ZeRO-2", kind="accelerate"),
    ]


ROWS: tuple[FixtureRow, ...] = (
    *_each_release(),
    *_options(),
    *_elastic(),
    *_elastic_3(),
    *_universal(),
    *_dumps(),
    *_trainers(),
)
