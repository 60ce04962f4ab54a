"""What modules keep beside parameters and buffers: ``get_extra_state``, ``set_extra_state``.

torch has it in ``state_dict``: scales of fp8 layers, counters, tables, any object. It is saved with
the trainer's state, whose rules it needs: plain data or objects, alike on all ranks or not.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from lightning_elastic_zero.checkpoint.types import SaveOptions
from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.formats import EXTRA_STATES
from lightning_elastic_zero.key_mapping import unwrapped
from lightning_elastic_zero.manifest import EXTRA_STATE
from lightning_elastic_zero.text import format_names

log = logging.getLogger(__name__)


def with_extra_states(
    client_state: Mapping[str, Any], module: torch.nn.Module, options: SaveOptions
) -> Mapping[str, Any]:
    """Return the trainer's state with those of modules, under the names of ``state_dict``."""
    base = torch.nn.Module.get_extra_state
    keep = {n: m for n, m in _named(module).items() if type(m).get_extra_state is not base}
    states = {n: m.get_extra_state() for n, m in keep.items() if n not in options.left_out}
    return {**client_state, EXTRA_STATES: states} if states else client_state


def restore_extra_states(
    module: torch.nn.Module, saved: Mapping[str, Any], where: str, *, warns: bool
) -> None:
    """Hand modules what was saved of them, on this rank; one of which nothing was keeps its own.

    Args:
        module: whose weights are restored already.
        saved: by the names in the model; what wrappers put into them is not looked at.
        where: the checkpoint.
        warns: whether this rank tells what only one side has.

    Raises:
        CheckpointMismatchError: a module does not take what was saved of it.
    """
    base = torch.nn.Module.set_extra_state
    takes = {n: m for n, m in _named(module).items() if type(m).set_extra_state is not base}
    here = {unwrapped(name): part for name, part in takes.items()}
    found = {unwrapped(name): state for name, state in saved.items()}
    if warns:
        missing = [name for name in takes if unwrapped(name) not in found]
        _warn(where, missing, [name for name in found if name not in here])
    for name in here.keys() & found.keys():
        try:
            here[name].set_extra_state(found[name])
        except Exception as error:
            msg = (
                f"{where}: set_extra_state of {name.rpartition('.')[0] or 'the module'} "
                f"({type(here[name]).__name__}) raised {type(error).__name__}: {error}. Weights "
                "and optimizer state are restored by then: begin again, with a module that takes "
                "what was saved"
            )
            raise CheckpointMismatchError(msg) from error


def _warn(where: str, missing: list[str], surplus: list[str]) -> None:
    """Warn of what only the model has, and only the checkpoint."""
    if missing:
        log.warning(
            "%s holds nothing for set_extra_state of these modules, which stay as they are: %s",
            where,
            format_names(missing),
        )
    if surplus:
        log.warning(
            "%s holds extra states that no module here takes by set_extra_state: %s",
            where,
            format_names(surplus),
        )


def _named(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return every module once, by the name of its extra state."""
    return {f"{n}.{EXTRA_STATE}" if n else EXTRA_STATE: m for n, m in module.named_modules()}
