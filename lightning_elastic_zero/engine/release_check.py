"""Whether the installed release of DeepSpeed has what ``releases`` lists: asked at setup."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_elastic_zero.engine.deepspeed_internals import link_to_master, module_of
from lightning_elastic_zero.engine.releases import (
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
    Purposes,
)
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.requirements import DEEPSPEED, missing_names

ZERO_3 = "DeepSpeedZeroOptimizer_Stage3"


def check_names(engine: Any, wrapper: str, found: str) -> Iterator[str]:  # noqa: ANN401
    """Yield what the installed release of DeepSpeed lacks of what is relied upon.

    Args:
        engine: a live engine.
        wrapper: class name of its optimizer wrapper; empty without one.
        found: the installed release.
    """
    for owner, live, names in asked_names(engine, wrapper, found):
        if sentence := _missing(owner, live, names, found):
            yield sentence


def check_ops(ops: object, accelerator: object, found: str) -> None:
    """Refuse a release whose operators that do not compile cannot be left out.

    Args:
        ops: ``deepspeed.ops``.
        accelerator: DeepSpeed's.
        found: the installed release.

    Raises:
        UnsupportedError: one of them lacks a name that ``releases`` lists.
    """
    _refuse("deepspeed.ops", ops, OPS_NAMES, found)
    _refuse(type(accelerator).__name__, accelerator, ACCELERATOR_NAMES, found)


def check_builder(builder: object, found: str) -> None:
    """Refuse a release whose operator cannot be told apart, or built, as it is here.

    Args:
        builder: what builds it.
        found: the installed release.

    Raises:
        UnsupportedError: it lacks a name of ``BUILDER_NAMES``.
    """
    _refuse(type(builder).__name__, builder, BUILDER_NAMES, found)


def asked_names(
    engine: Any,  # noqa: ANN401 (untyped library)
    wrapper: str,
    found: str,
) -> Iterator[tuple[str, Any, Purposes]]:
    """Yield what is looked at: how it is called, the live object, and the names it is to have.

    Args:
        engine: a live engine.
        wrapper: class name of its optimizer wrapper; empty without one.
        found: the installed release.
    """
    optimizer = getattr(engine, "optimizer", None)
    yield type(engine).__name__, engine, ENGINE_NAMES
    yield from _later(engine, "DeepSpeedEngine", found)
    yield from _of_optimizer(engine, wrapper, found)
    swapper = getattr(optimizer, "optimizer_swapper", None)
    if swapper is not None:
        yield from _of_swapper(swapper)
    module = getattr(engine, "module", None)
    parameters = module.parameters() if module is not None else ()
    cut = next((p for p in parameters if hasattr(p, "ds_id")), None)
    if cut is not None:
        yield "a partitioned parameter", cut, PARAMETER_NAMES


def _of_optimizer(
    engine: Any,  # noqa: ANN401 (untyped library)
    wrapper: str,
    found: str,
) -> Iterator[tuple[str, Any, Purposes]]:
    """Yield the optimizer wrapper, or what stands in its place, with the names it is to have."""
    optimizer = getattr(engine, "optimizer", None)
    kind = wrapper or type(optimizer).__name__
    if kind not in OPTIMIZER_NAMES or not (wrapper or kind == "DeepSpeedZeRoOffload"):
        return
    yield kind, optimizer, OPTIMIZER_NAMES[kind]
    yield from _later(optimizer, kind, found)
    later, older = OLDER_NAMES.get(kind, ("", {}))
    if older and not hasattr(optimizer, later):
        yield kind, optimizer, older
    options = [OPTION_NAMES, *_since(found, LATER_OPTION_NAMES)]
    for option, names in ((o, names) for table in options for o, names in table.items()):
        if getattr(optimizer, option, None):
            yield kind, optimizer, names
    if kind == ZERO_3:
        yield from _of_zero_3(engine)
    if kind == "DeepSpeedZeroOptimizer":
        yield f"the module of {kind}", module_of(optimizer), MODULE_NAMES
    yield from _of_links(optimizer, kind)


def _of_zero_3(engine: Any) -> Iterator[tuple[str, Any, Purposes]]:  # noqa: ANN401
    """Yield ZeRO-3's wrapper with the names that it has in some configurations."""
    optimizer = engine.optimizer
    if not getattr(optimizer, "offload_param", False):
        yield ZERO_3, optimizer, RESIDENT_NAMES
    in_memory = getattr(optimizer, "save_muon_momentum_buffer_in_memory", False)
    if in_memory and getattr(optimizer, "use_muon", False):
        yield ZERO_3, optimizer, MUON_MEMORY_NAMES
    partial_offload = getattr(engine, "zero_partial_offload", lambda: 1.0)()
    if (partial_offload or 1.0) < 1.0:
        yield ZERO_3, optimizer, PARTIAL_OFFLOAD_NAMES


def _of_links(optimizer: Any, kind: str) -> Iterator[tuple[str, Any, Purposes]]:  # noqa: ANN401
    """Yield a parameter that ZeRO-1/2 or BF16_Optimizer trains, and a link to its master."""
    lists = {"DeepSpeedZeroOptimizer": "bit16_groups", "BF16_Optimizer": "bf16_groups"}
    groups = getattr(optimizer, lists.get(kind, ""), ())
    parameters = [parameter for group in groups for parameter in group]
    linked, link_names = LINK_NAMES.items()
    if parameters:
        yield linked[0], parameters[0], linked[1]
    links = (link_to_master(parameter) for parameter in parameters)
    link = next((link for link in links if link is not None), None)
    if link is not None:
        yield link_names[0], link, link_names[1]


def _of_swapper(swapper: Any) -> Iterator[tuple[str, Any, Purposes]]:  # noqa: ANN401
    """Yield the swapper of an optimizer in files, and what it knows of the first ones."""
    yield type(swapper).__name__, swapper, SWAPPER_NAMES
    in_files, of_file = FILE_NAMES.items()
    for swapped in [*getattr(swapper, "swap_params_info", {}).values()][:1]:
        yield in_files[0], swapped, in_files[1]
        for file in getattr(swapped, "tensors", [])[:1]:
            yield of_file[0], file, of_file[1]


def _later(live: Any, owner: str, found: str) -> Iterator[tuple[str, Any, Purposes]]:  # noqa: ANN401
    """Yield an object with the names that it has since a release, the installed one or before."""
    for table in _since(found, LATER_NAMES):
        if owner in table:
            yield owner, live, table[owner]


def _since(
    found: str, tables: dict[str, dict[str, dict[str, str]]]
) -> Iterator[dict[str, dict[str, str]]]:
    """Yield the tables of the installed release and of those before it."""
    for release, table in tables.items():
        if DEEPSPEED.is_at_least(found, release):
            yield table


def _missing(owner: str, live: object, names: Purposes, found: str) -> str | None:
    """Return the sentence that names what an object lacks; None where it lacks nothing."""
    lost = [f"{name} (to {names[name]})" for name in missing_names(live, names)]
    return DEEPSPEED.missing_names_message(found, owner, lost)


def _refuse(owner: str, live: object, names: Purposes, found: str) -> None:
    """Raise the sentence that names what an object lacks."""
    if sentence := _missing(owner, live, names, found):
        raise UnsupportedError(sentence)
