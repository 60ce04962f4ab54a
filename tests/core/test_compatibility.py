from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_elastic_zero.core.compatibility import (
    LISTED,
    BufferPair,
    RestoreScope,
    check_compatible,
    describe,
    describe_unrestored,
    rounded_buffers,
)
from lightning_elastic_zero.core.manifest import Group, Manifest, Parameter, Plain, StateKey, Writer
from lightning_elastic_zero.core.partition import FlatBuffer
from lightning_elastic_zero.core.tensors import dtype_name, is_lossy_cast, is_writable, overflows
from lightning_elastic_zero.errors import CheckpointMismatchError
from tests.support.strategies import manifests

EVERYTHING = RestoreScope(optimizer_state=True)
NO_STATE = (
    "it has no optimizer state that can be resumed (saved with save_weights_only=True, a file of "
    "weights, or a checkpoint of DeepSpeed without ZeRO): test or predict with it, or pass "
    "load_optimizer_state=False to start a new run on its weights"
)
WEIGHTS = RestoreScope(optimizer_state=False, hyperparameters=False)


def model(*groups: list[str], frozen: tuple[str, ...] = (), **fields: Any) -> Manifest:
    owners = [(name, index) for index, names in enumerate(groups) for name in names]
    parameters = [Parameter(name, (4,), "float32", index) for name, index in owners]
    parameters += [Parameter(name, (4,), "float32", None) for name in frozen]
    numels = [FlatBuffer(i, tuple(names), (4,) * len(names)) for i, names in enumerate(groups)]
    owned = tuple(Group(tuple(names), {"lr": 0.1}, ()) for names in groups)
    tables = (tuple(parameters), owned, tuple(numels), ("bn.mean",), ())
    described = Manifest("", 3, 2, "fp32", "float32", *tables, writer=Writer(optimizer="AdamW"))
    return replace(described, **fields)


def differences(saved: Manifest, live: Manifest, wanted: RestoreScope = EVERYTHING) -> list[str]:
    try:
        check_compatible(saved, live, wanted, "a.ckpt")
    except CheckpointMismatchError as error:
        listed = [line for line in str(error).splitlines() if line.startswith("  - ")]
        assert listed
        return [line.removeprefix("  - ") for line in listed]
    return []


def reshaped(manifest: Manifest, *names: str) -> Manifest:
    changed = (replace(p, shape=(2, 2)) if p.name in names else p for p in manifest.parameters)
    return replace(manifest, parameters=tuple(changed))


OWNERS = (
    "; set requires_grad as in the saved run before the optimizer is created; or pass "
    "strict_optimizer=False to start these with fresh optimizer state or without one; or "
    "load_optimizer_state=False to start a fresh optimizer on the saved weights"
)
GROUPS = (
    "; configure the saved groups; or pass strict_optimizer=False to restore each parameter with "
    "its saved state; or load_optimizer_state=False and load_hyperparameters=False to start a "
    "fresh optimizer with the configured groups"
)
LENIENT = "strict_optimizer=False"
STRICT = "strict=False (strict_loading = False in a LightningModule)"
KEPT = f"; pass {STRICT} to leave them at their current values"
BEYOND = f"; pass {STRICT} to ignore them"
BEYOND_BUFFERS = (
    "; register those that training creates in a hook of the module "
    f"(register_load_state_dict_pre_hook), or pass {STRICT} to ignore them"
)
UNUSED = f"; pass {LENIENT} to ignore them"


def resized(layer: str) -> str:
    return (
        "; configure the saved model. To start resized layers from their current values, rename "
        f"the saved ones, as in {renamed_away(layer)}, with {LENIENT}; if they are frozen or "
        f"for an evaluation, with {STRICT}"
    )


def renamed_away(layer: str) -> str:
    return f"rename={ ({layer: f'saved.{layer}'})!r}"


NEW = f"; pass {LENIENT} to train them from their current values"
LEFT_OUT = (
    "excluded from the save (exclude_frozen_parameters), but trained here: b; freeze them, load a "
    f"checkpoint that contains them, or pass {LENIENT} to train them from their current values"
)


def possible_renaming(renamed: dict[str, str]) -> str:
    return f"possibly renamed since the save; if so, load with rename={renamed!r}"


class TestAccepted:
    @given(manifests())
    def test_a_checkpoint_fits_the_model_that_saved_it(self, manifest: Manifest) -> None:
        saved = replace(manifest, weights_only=False)
        assert differences(saved, saved) == []

    def test_stage_devices_precision_and_order_may_differ(self) -> None:
        saved = model(["a", "b"], ["c"])
        live = model(["b", "a"], ["c"], stage=2, world_size=7, precision="bf16", excluded=())
        live = replace(live, groups=tuple(replace(g, hyperparameters={}) for g in live.groups))
        live = replace(live, parameters=tuple(reversed(live.parameters)))
        assert differences(saved, live) == []

    def test_without_an_optimizer_groups_are_not_compared(self) -> None:
        live = model(frozen=("a", "b"), stage=0, world_size=1)
        assert differences(model(["a"], frozen=("b",)), live, WEIGHTS) == []

    def test_weights_only_loads_do_not_compare_groups(self) -> None:
        saved = model(["a", "b"], ["c"])
        assert differences(saved, model(["a"], frozen=("b", "c")), WEIGHTS) == []

    def test_hyperparameters_need_the_same_groups_of_trained_parameters(self) -> None:
        wanted = RestoreScope(optimizer_state=False)
        saved = model(["a", "b"], ["c"], frozen=("d",))
        assert differences(saved, model(["a", "d"], ["c"], frozen=("b",)), wanted) == []
        assert differences(saved, model(["a"], ["c", "b"], frozen=("d",)), wanted) == [
            "in parameter group 1 here, in 0 when saved: b" + GROUPS
        ]

    def test_excluded_frozen_weights_may_be_missing(self) -> None:
        saved = model(["a"], frozen=("f",), excluded=("f",))
        assert differences(saved, model(["a"], frozen=("f",))) == []


SHAPES = "saved (4,), here (2, 2)"
ONE, TWO = model(["a"]), model(["a", "b"])
FROZEN_B, FROZEN_F = (model(["a"], frozen=(name,)) for name in "bf")
DIFFERENCES = {
    "missing": (ONE, TWO, ["missing from the checkpoint: b" + NEW]),
    "missing frozen": (ONE, FROZEN_F, ["missing from the checkpoint: f" + KEPT]),
    "unexpected": (TWO, ONE, ["in the checkpoint, but not in the model: b" + UNUSED]),
    "unexpected frozen": (FROZEN_F, ONE, ["in the checkpoint, but not in the model: f" + BEYOND]),
    "shapes": (
        TWO,
        reshaped(model(["b", "a"]), "a", "b"),
        [f"different shapes: b ({SHAPES}), a ({SHAPES})" + resized("b")],
    ),
    "frozen here": (TWO, FROZEN_B, ["trained when saved, frozen here: b" + OWNERS]),
    "trained here": (FROZEN_B, TWO, ["frozen when saved, trained here: b" + OWNERS]),
    "left out": (
        replace(FROZEN_B, excluded=("b",)),
        TWO,
        ["frozen when saved, trained here: b" + OWNERS, LEFT_OUT],
    ),
    "number of groups": (
        TWO,
        model(["a"], ["b"]),
        ["saved with 1 parameter groups, here are 2" + GROUPS],
    ),
    "moved": (
        model(["a", "b"], ["c"], ["d"]),
        model(["a", "c"], ["b", "d"], []),
        [
            "in parameter group 0 here, in 1 when saved: c" + GROUPS,
            "in parameter group 1 here, in 0, 2 when saved: b, d" + GROUPS,
        ],
    ),
    "buffers": (
        replace(ONE, module_buffers=("mean", "old")),
        replace(ONE, module_buffers=("var", "mean")),
        [
            "buffers missing from the checkpoint: var" + KEPT,
            "buffers in the checkpoint, but not in the model: old" + BEYOND_BUFFERS,
        ],
    ),
    "weights only": (replace(ONE, weights_only=True), ONE, [NO_STATE]),
}


class TestDifferences:
    @pytest.mark.parametrize(
        ("saved", "live", "expected"), DIFFERENCES.values(), ids=[*DIFFERENCES]
    )
    def test_each_difference_has_its_line(
        self, saved: Manifest, live: Manifest, expected: list[str]
    ) -> None:
        assert differences(saved, live) == expected

    def test_excluded_weights_cannot_be_trained(self) -> None:
        saved = model(["a"], frozen=("b",), excluded=("b",))
        assert differences(saved, model(["a", "b"]), WEIGHTS) == [LEFT_OUT]
        lenient = replace(WEIGHTS, strict=False)
        live = model(["a", "b"])
        assert differences(saved, live, lenient) == []
        assert [*describe_unrestored(saved, live, lenient)] == [
            "not in the checkpoint, trained from the current values: b"
        ]

    @pytest.mark.parametrize(("saved", "here"), [("int8", "bfloat16"), ("float32", "uint8")])
    def test_quantized_weights_are_refused_by_name(self, saved: str, here: str) -> None:
        def typed(dtype: str) -> Manifest:
            base = model(["a"], frozen=("b",))
            changed = tuple(replace(p, dtype=dtype) for p in base.parameters if p.name == "b")
            return replace(base, parameters=(base.parameters[0], *changed))

        (found,) = differences(typed(saved), typed(here))
        assert found == (
            f"different types, and integers are not cast: b (saved {saved}, here {here}); "
            "quantized weights need their scales: save them dequantized"
        )
        assert not differences(typed("float16"), typed("float64"))
        assert not differences(typed("int8"), typed("int8"))

    def test_all_differences_are_in_one_message(self) -> None:
        groups = ["a", "gone", "shape"], ["moved", "then frozen"]
        saved = model(*groups, frozen=("unfrozen",), module_buffers=("old",))
        live = reshaped(
            model(
                ["a", "moved", "new", "shape"],
                ["unfrozen"],
                frozen=("then frozen",),
                module_buffers=("young",),
                stage=2,
                world_size=1,
                precision="bf16",
                writer=Writer(optimizer="SGD"),
            ),
            "shape",
        )
        with pytest.raises(CheckpointMismatchError) as caught:
            check_compatible(saved, live, EVERYTHING, "runs/last.ckpt")
        assert str(caught.value) == (
            "runs/last.ckpt does not match this model.\n"
            "Saved: ZeRO-3 on 2 devices, fp32, 6 parameters with 24 elements, 2 parameter groups, "
            "AdamW\n"
            "Here: ZeRO-2 on 1 device, bf16, 6 parameters with 24 elements, 2 parameter groups, "
            "SGD\n"
            f"  - missing from the checkpoint: new{NEW}\n"
            f"  - in the checkpoint, but not in the model: gone{UNUSED}\n"
            f"  - different shapes: shape (saved (4,), here (2, 2)){resized('shape')}\n"
            f"  - trained when saved, frozen here: then frozen{OWNERS}\n"
            f"  - frozen when saved, trained here: unfrozen{OWNERS}\n"
            f"  - buffers missing from the checkpoint: young{KEPT}\n"
            f"  - buffers in the checkpoint, but not in the model: old{BEYOND_BUFFERS}\n"
            f"  - in parameter group 0 here, in 1 when saved: moved{GROUPS}"
        )

    @pytest.mark.parametrize("kind", ["missing", "unexpected", "shapes", "frozen", "moved"])
    def test_long_lists_show_twenty_names(self, kind: str) -> None:
        names = [f"w{i}" for i in range(1000)]
        saved, live = {
            "missing": (model(["a"]), model(["a", *names])),
            "unexpected": (model(["a", *names]), model(["a"])),
            "shapes": (model(names), reshaped(model(names), *names)),
            "frozen": (model(["a", *names]), model(["a"], frozen=tuple(names))),
            "moved": (model(["a", *names], ["b"]), model(["a"], ["b", *names])),
        }[kind]
        (line,) = differences(saved, live)
        assert "w19" in line
        assert "w20" not in line
        assert f" and {1000 - LISTED} more" in line


class TestNotStrict:
    """``strict=False`` is Lightning's ``strict_loading``: it concerns untrained weights."""

    lenient = replace(EVERYTHING, strict=False)

    def test_frozen_weights_and_buffers_may_be_missing_or_unexpected(self) -> None:
        saved = model(["a"], frozen=("old",), module_buffers=("old.mean",))
        live = model(["a"], frozen=("new",), module_buffers=("new.mean",))
        assert differences(saved, live, self.lenient) == []
        assert len(differences(saved, live)) == 5  # one of them suggests a renaming

    def test_trained_weights_may_not_differ(self) -> None:
        saved = model(["a", "old"], frozen=("f",))
        live = reshaped(model(["a", "new"], frozen=("f",)), "f")
        assert differences(saved, live, self.lenient) == [
            "missing from the checkpoint: new" + NEW,
            "in the checkpoint, but not in the model: old" + UNUSED,
            "different shapes: f (saved (4,), here (2, 2))" + resized("f"),
        ]

    def test_with_a_fresh_optimizer_trained_weights_may_differ(self) -> None:
        saved = model(["a", "old"], frozen=("f",), module_buffers=("bn.mean", "aged"))
        live = model(["a", "new"], frozen=("g",), module_buffers=("bn.mean", "young"))
        wanted = RestoreScope(optimizer_state=False, strict=False)
        assert differences(saved, live, wanted) == []
        assert [*describe_unrestored(saved, live, wanted)] == [
            "not in the checkpoint, trained from the current values: new",
            "not in the checkpoint, left at the current values: g",
            "in the checkpoint, but not in the model: old, f",
            "buffers not in the checkpoint, left at the current values: young",
            "buffers in the checkpoint, but not in the model: aged",
        ]
        assert [*describe_unrestored(saved, saved, EVERYTHING)] == []

    def test_weights_that_were_excluded_on_purpose_are_not_listed(self) -> None:
        """The base of adapters would hide the weight that matters."""
        saved = model(["adapter"], frozen=("base.1", "base.2"), excluded=("base.1", "base.2"))
        live = model(["adapter"], frozen=("base.1", "base.2", "head"))
        assert [*describe_unrestored(saved, live, self.lenient)] == [
            "not in the checkpoint, left at the current values: head"
        ]

    def test_a_likely_renaming_is_suggested(self) -> None:
        saved = model(["model.enc.weight", "model.enc.bias"], module_buffers=("model.bn.mean",))
        live = model(["enc.weight", "enc.bias"], module_buffers=("bn.mean",))
        assert differences(saved, live) == [
            "missing from the checkpoint: enc.weight, enc.bias" + NEW,
            "in the checkpoint, but not in the model: model.enc.weight, model.enc.bias" + UNUSED,
            possible_renaming({"model": ""}),
            "buffers missing from the checkpoint: bn.mean" + KEPT,
            "buffers in the checkpoint, but not in the model: model.bn.mean" + BEYOND_BUFFERS,
            possible_renaming({"model": ""}),
        ]


SHARED_STEPS = (
    "new members of parameter group 0 share the restored step count, so Adam applies no bias "
    "correction to them: their first updates are up to 6.6 times those of a new run; put new "
    "parameters into a parameter group of their own to start them at step 0"
)


class TestOtherParameters:
    """``strict_optimizer=False``: another set of parameters is trained."""

    lenient = replace(EVERYTHING, strict_optimizer=False)

    def test_other_parameters_may_be_trained(self) -> None:
        saved = with_state(model(["a", "gone"], ["b"], frozen=("thawed",)))
        live = model(["a", "thawed", "new"], frozen=("b",))
        assert differences(saved, live, self.lenient) == []
        assert [*describe_unrestored(saved, live, self.lenient)] == [
            "not in the checkpoint, trained from the current values: new",
            "in the checkpoint, but not in the model: gone",
            "frozen in the checkpoint, trained here with fresh optimizer state: thawed",
            "trained in the checkpoint, frozen here: optimizer state not restored: b",
            SHARED_STEPS,
        ]
        assert [*describe_unrestored(saved, saved, self.lenient)] == []

    def test_frozen_weights_and_buffers_may_not_differ(self) -> None:
        saved = model(["a"], frozen=("old",), module_buffers=("mean",))
        live = model(["a"], frozen=("new",), module_buffers=("var",))
        assert differences(saved, live, self.lenient) == differences(saved, live)

    def test_groups_may_differ_if_each_has_one_origin(self) -> None:
        saved = model(["a", "b"], ["c"])
        live = model(["c"], ["new"], ["a"], ["b"])
        assert differences(saved, live, self.lenient) == []
        assert [*describe_unrestored(saved, live, self.lenient)][1:] == [
            "parameter group 0 continues with the state of saved group 1",
            "parameter group 1 is new, with the hyperparameters configured here",
            "parameter group 2 continues with the state of saved group 0",
            "parameter group 3 continues with the state of saved group 0",
        ]

    def test_groups_with_different_values_cannot_be_merged(self) -> None:
        saved = with_state(model(["a"], ["b"], ["c"]))
        others = replace(saved.groups[1], hyperparameters={"lr": 0.2, "betas": (0.9, 0.999)})
        stateless = replace(saved.groups[2], state=())
        saved = replace(saved, groups=(saved.groups[0], others, stateless))
        live = model(["a", "b"])
        (line,) = (n for n in differences(saved, live, self.lenient) if "differ" in n)
        assert line == (
            "parameter group 0 here has members of saved groups 0, 1, whose hyperparameters "
            "differ (lr: 0.1, 0.2): use separate groups, or pass load_hyperparameters=False to use "
            "the configured ones"
        )
        configured = replace(self.lenient, hyperparameters=False)
        assert differences(saved, live, configured) == []
        found = differences(saved, model(["a", "c"]), configured)
        (line,) = (n for n in found if "groups 0, 2, which have the states" in n)
        assert "['exp_avg', 'step']" in line

    @pytest.mark.parametrize("hyperparameters", [True, False])
    def test_groups_with_different_counters_cannot_be_merged(self, hyperparameters: bool) -> None:
        """Counters are state, so only a fresh optimizer may start without them."""
        saved, live = model(["a"], ["b"]), model(["a", "b"])
        values = ({"lr": 0.1, "k": 50}, {"lr": 0.1, "k": 40})
        groups = zip(saved.groups, values, strict=True)
        saved = replace(saved, groups=tuple(replace(g, hyperparameters=v) for g, v in groups))
        wanted = replace(
            self.lenient, hyperparameters=hyperparameters, counter_keys=frozenset({"k"})
        )
        (line,) = differences(saved, live, wanted)
        assert line == (
            "parameter group 0 here has members of saved groups 0, 1, whose counters differ (k: "
            "50, 40): use separate groups, or pass load_optimizer_state=False to start a fresh "
            "optimizer"
        )
        assert differences(saved, live, replace(wanted, optimizer_state=False)) == []

    def test_an_evaluation_needs_strict_for_missing_weights(self) -> None:
        saved, live = model(["a", "b"]), model(frozen=("a", "c"), stage=0, world_size=1)
        found = differences(saved, live, WEIGHTS)
        assert "missing from the checkpoint: c" + KEPT in found
        assert "in the checkpoint, but not in the model: b" + BEYOND in found


def with_state(manifest: Manifest) -> Manifest:
    state = (StateKey("exp_avg", "elementwise", "float32"), StateKey("step", "scalar", "float32"))
    fields: dict[str, Plain] = {"lr": 0.1, "betas": (0.9, 0.999)}
    return replace(
        manifest,
        groups=tuple(replace(g, hyperparameters=fields, state=state) for g in manifest.groups),
    )


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [
        (
            model(["a"], precision="bf16", groups=(), weights_only=True),
            "ZeRO-3 on 2 devices, bf16, 1 parameters with 4 elements, AdamW, weights only",
        ),
        (
            model(frozen=("a",), stage=0, world_size=1, writer=Writer()),
            "no ZeRO, fp32, 1 parameters with 4 elements",
        ),
    ],
)
def test_a_summary_is_one_line(manifest: Manifest, expected: str) -> None:
    assert describe(manifest) == expected


def pair(name: str, saved: torch.Tensor, here: torch.Tensor) -> BufferPair:
    return BufferPair(
        name,
        saved_shape=tuple(saved.shape),
        shape=tuple(here.shape),
        saved_dtype=dtype_name(saved.dtype),
        dtype=dtype_name(here.dtype),
        loses=is_lossy_cast(saved, here.dtype),
        overflows=overflows(saved, here.dtype),
        writable=is_writable(here),
    )


def test_buffers_that_do_not_fit_are_listed() -> None:
    live = model(["a"])
    saved = replace(live, parameters=(Parameter("a", (5,), "float32", 0),))
    buffers = [
        pair("wide", torch.zeros(1), torch.zeros(4)),
        pair("square", torch.tensor(0), torch.zeros(2, 2, dtype=torch.int64)),
        pair("half", torch.full((2,), 0.1), torch.zeros(2, dtype=torch.float16)),
        pair("count", torch.tensor(300), torch.tensor(0, dtype=torch.uint8)),
        pair("view", torch.zeros(3), torch.zeros(1).expand(3)),
        pair("fits", torch.tensor(200), torch.tensor(0, dtype=torch.uint8)),
        pair("widens", torch.full((2,), 0.5).bfloat16(), torch.zeros(2)),
    ]
    with pytest.raises(CheckpointMismatchError) as refused:
        check_compatible(saved, live, EVERYTHING, "a.ckpt", buffers)
    assert str(refused.value).partition("  - ")[2] == (
        f"different shapes: a (saved (5,), here (4,)){resized('a')}\n"
        "  - buffers of different shapes: wide (saved (1,), here (4,)), square (saved (), here "
        "(2, 2)); register them with the saved shapes, or assign tensors of the saved shapes in a "
        "hook of the module (register_load_state_dict_pre_hook), which gets the saved buffers; or "
        "rename the saved ones, as in "
        f"{renamed_away('wide')}, with {STRICT}\n"
        "  - buffers of types that cannot represent the saved values: half (saved float32, "
        "here float16), count (saved int64, here uint8)\n"
        "  - buffers that cannot be written (expanded views, sparse, or on the meta device): "
        "view; register a .clone() of expanded ones"
    )


@pytest.mark.parametrize(("precision", "evaluates"), [("fp16", False), ("fp32", True)])
def test_a_run_in_low_precision_may_round_buffers(precision: str, evaluates: bool) -> None:
    live = replace(model(["a"]), precision=precision)
    live, wanted = (replace(live, groups=()), WEIGHTS) if evaluates else (live, EVERYTHING)
    half = [pair("half", torch.full((2,), 0.1), torch.zeros(2, dtype=torch.float16))]
    check_compatible(model(["a"]), live, wanted, "a.ckpt", half)
    assert rounded_buffers(half, live) == ["half"]
    lowest = torch.tensor([torch.finfo(torch.float32).min, -torch.inf])
    mask = pair("mask", lowest, lowest.half())
    line = "mask (values too large for float16 become infinite)"
    assert rounded_buffers([*half, mask], live) == ["half", line]
    assert not pair("mask", lowest[1:], lowest[1:].half()).overflows
    integer = [pair("integer", torch.full((2,), 0.1), torch.zeros(2, dtype=torch.int64))]
    with pytest.raises(CheckpointMismatchError, match="integer"):
        check_compatible(model(["a"]), live, wanted, "a.ckpt", integer)


@pytest.mark.parametrize(
    ("saved", "here", "precision", "fits"),
    [
        ("float32", "bfloat16", "bf16", True),
        ("bfloat16", "float32", "fp32", True),
        ("float32", "bfloat16", "fp32", False),
        ("float16", "bfloat16", "fp32", False),
        ("uint8", "float32", "fp32", False),
        ("uint8", "uint8", "bf16", True),
    ],
)
def test_frozen_weights_may_be_rounded_but_not_overflow(
    saved: str, here: str, precision: str, fits: bool
) -> None:
    base = model(["a"])
    frozen = [(*base.parameters, Parameter("f", (4,), dtype, None)) for dtype in (saved, here)]
    live = replace(base, parameters=frozen[1], precision=precision)
    held = replace(base, parameters=frozen[0])
    if fits:
        check_compatible(held, live, EVERYTHING, "a.ckpt")
        return
    with pytest.raises(CheckpointMismatchError, match=rf"f \(saved {saved}, here {here}\)"):
        check_compatible(held, live, EVERYTHING, "a.ckpt")


@given(st.integers(-(2**40), 2**40), st.floats(width=32))
def test_lossy_casts_are_those_that_numpy_cannot_reverse(integer: int, number: float) -> None:
    with np.errstate(over="ignore"):
        back = float(np.float16(number))
    fits = back == number or math.isnan(number)
    assert is_lossy_cast(torch.tensor(number), torch.float16) == (not fits)
    assert is_lossy_cast(torch.tensor([integer]), torch.int16) == (not -(2**15) <= integer < 2**15)
    assert is_lossy_cast(torch.tensor(integer), torch.float32) == (
        int(np.float32(integer)) != integer
    )
    assert not is_lossy_cast(torch.tensor([number]), torch.float64)
