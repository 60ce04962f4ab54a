"""State of modules that is neither a parameter nor a buffer: results of ``get_extra_state``.

Scales of fp8 layers and counters are examples. They are saved with the trainer's state.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from lightning_elastic_zero.checkpoint.types import SaveOptions
from lightning_elastic_zero.core.manifest import EXTRA_STATE
from lightning_elastic_zero.core.names import unwrapped
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.formats.reader import EXTRA_STATES

log = logging.getLogger(__name__)


def with_extra_states(
    client_state: Mapping[str, Any], module: torch.nn.Module, options: SaveOptions
) -> Mapping[str, Any]:
    """Return the trainer's state with extra states of modules, by name as in ``state_dict``."""
    base = torch.nn.Module.get_extra_state
    keep = {n: m for n, m in _named(module).items() if type(m).get_extra_state is not base}
    states = {n: m.get_extra_state() for n, m in keep.items() if n not in options.left_out}
    return {**client_state, EXTRA_STATES: states} if states else client_state


def warn_of_unsaved(module: torch.nn.Module, examined: set[tuple[str, type]]) -> None:
    """Warn once of entries that classes add to ``state_dict``, such as scales of quantized layers.

    DeepSpeed's own save contains them. Here they have no place: no rule says how ranks share them.
    """
    base, unsaved = torch.nn.Module._save_to_state_dict, list[str]()  # noqa: SLF001 (torch's)
    for name, part in module.named_modules():
        place = name, type(part)
        if type(part)._save_to_state_dict is not base and place not in examined:  # noqa: SLF001 (torch's)
            examined.add(place)
            entries = dict[str, Any]()
            part._save_to_state_dict(entries, "", keep_vars=True)  # noqa: SLF001 (torch's)
            known = {n for n, _ in part.named_parameters(recurse=False, remove_duplicate=False)}
            known.update(n for n, _ in part.named_buffers(recurse=False, remove_duplicate=False))
            unsaved += [f"{name}.{key}" for key in entries if key not in {*known, EXTRA_STATE}]
    if unsaved:
        log.warning(
            "not saved: %s; these entries of state_dict are neither parameters nor buffers. Make "
            "them buffers, return them from get_extra_state, or create them as in this run before "
            "a load",
            format_names(unsaved),
        )


def restore_extra_states(
    module: torch.nn.Module, saved: Mapping[str, Any], where: str, *, warns: bool
) -> None:
    """Restore the extra states of modules on this rank; modules without one keep theirs.

    Args:
        module: the module; its weights are restored already.
        saved: states by name; prefixes of wrappers are ignored.
        where: the checkpoint.
        warns: whether this rank warns of states that only one side has.

    Raises:
        CheckpointMismatchError: a module does not accept its state.
    """
    base = torch.nn.Module.set_extra_state
    takes = {n: m for n, m in _named(module).items() if type(m).set_extra_state is not base}
    accepting = {unwrapped(name): part for name, part in takes.items()}
    saved_states = {unwrapped(name): state for name, state in saved.items()}
    missing = [name for name in takes if unwrapped(name) not in saved_states]
    if warns and missing:
        log.warning(
            "%s has no extra state for these modules, which keep their current one: %s",
            where,
            format_names(missing),
        )
    surplus = [name for name in saved_states if name not in accepting]
    if warns and surplus:
        log.warning(
            "%s has extra state that no module accepts through set_extra_state: %s",
            where,
            format_names(surplus),
        )
    for name in accepting.keys() & saved_states.keys():
        try:
            accepting[name].set_extra_state(saved_states[name])
        except Exception as error:
            msg = (
                f"{where}: set_extra_state of {name.rpartition('.')[0] or 'the module'} "
                f"({type(accepting[name]).__name__}) raised {type(error).__name__}: {error}. "
                "Weights and optimizer state are already restored: restart with a module that "
                "accepts the saved state."
            )
            raise CheckpointMismatchError(msg) from error


def _named(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return each module by the name of its extra state."""
    return {f"{n}.{EXTRA_STATE}" if n else EXTRA_STATE: m for n, m in module.named_modules()}
