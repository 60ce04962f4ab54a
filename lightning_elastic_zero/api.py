"""Save and resume a plain DeepSpeed engine, without Lightning: the strategy stands on this too."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import Any

from lightning_elastic_zero.checkpoint.load import load_engine
from lightning_elastic_zero.checkpoint.save import save_engine
from lightning_elastic_zero.checkpoint.types import (
    CheckpointStats,
    EngineHandle,
    LoadOptions,
    LoadResult,
    SaveOptions,
)
from lightning_elastic_zero.coordination.liveness import ABSENT_TIMEOUT_S, STALL_TIMEOUT_S, Timeouts
from lightning_elastic_zero.coordination.ranks import Ranks, connect_ranks
from lightning_elastic_zero.core.options import check_client_state, check_flag, check_rename
from lightning_elastic_zero.engine.live import live_engine
from lightning_elastic_zero.engine.step import (
    add_step_pre_hook,
    before_change,
    updates_state_before_step,
)
from lightning_elastic_zero.engine.support import recovery_script

__all__ = [
    "CheckpointStats",
    "LoadResult",
    "engine_handle",
    "load_checkpoint",
    "load_options",
    "save_checkpoint",
]


def save_checkpoint(
    engine: Any,
    path: str | os.PathLike[str],
    client_state: Mapping[str, Any] | None = None,
    *,
    weights_only: bool = False,
    exclude_frozen_parameters: bool = False,
    save_module_weights: bool = False,
    fingerprint: bool = False,
    stall_timeout_s: float = STALL_TIMEOUT_S,
    absent_timeout_s: float = ABSENT_TIMEOUT_S,
) -> CheckpointStats:
    """Save a DeepSpeed engine into a checkpoint that resumes on any number of devices.

    Call it on every rank, between optimizer steps. An existing checkpoint at ``path`` stays until
    the new one is whole. Nothing else is replaced: a directory that holds anything that no save of
    this library wrote, such as DeepSpeed's own tags, is refused before a byte is written.

    Args:
        engine: what ``deepspeed.initialize`` returned, with ZeRO stage 0, 1, 2 or 3.
        path: the checkpoint's directory, the same on all ranks, on a disk that they share: one for
            each checkpoint, such as ``f"{folder}/step-{step}"``.
        client_state: whatever of yours should come back: plain data is best (numbers, strings,
            tensors, lists, dicts). Values may differ between ranks.
        weights_only: leave out the optimizer's state.
        exclude_frozen_parameters: leave out weights that the optimizer does not own.
        save_module_weights: write the low-precision weights too, which the masters hold already.
        fingerprint: record the number of the state, with which a load can compare what it has made
            live. It takes another pass over the state in memory: see docs/saving.md.
        stall_timeout_s: for how many seconds a rank may be at work without progress before the
            save fails on all ranks. Progress is each MiB that comes to the disk: raise it where a
            single call to the file system may take longer.
        absent_timeout_s: for how many seconds ranks that make this call wait for those that do
            not, before it fails; after 30 s a warning names them.

    Returns:
        ``CheckpointStats``: ``path``, ``seconds`` until all ranks were done, ``bytes`` that all
        ranks wrote, and ``waited_s`` of this rank.

    Raises:
        ValueError: a flag is neither True nor False, ``client_state`` no dictionary, or a time no
            positive number.
        UnsupportedError: the engine, or a state of it, cannot be saved by this library.
        SaveError: it could not be written, or would replace what is not this library's; the last
            published checkpoint is intact.
        RanksError: a rank failed, died, or did not call this.
    """
    options = SaveOptions(
        weights_only=check_flag("weights_only", weights_only),
        exclude_frozen=check_flag("exclude_frozen_parameters", exclude_frozen_parameters),
        module_weights=check_flag("save_module_weights", save_module_weights),
        fingerprint=check_flag("fingerprint", fingerprint),
    )
    client = check_client_state(client_state)
    handle, times = engine_handle(engine), Timeouts.of(stall_timeout_s, absent_timeout_s)
    with closing(_ranks_to("save", handle, path, times)) as ranks:
        return save_engine(handle, path, ranks, client, options)


def load_checkpoint(
    engine: Any,
    path: str | os.PathLike[str],
    *,
    load_optimizer_state: bool = True,
    load_hyperparameters: bool = True,
    strict: bool = True,
    strict_optimizer: bool = True,
    rename: Mapping[str, str] | None = None,
    allow_pickle: bool = False,
    fallback: bool = False,
    fingerprint: bool = False,
    stall_timeout_s: float = STALL_TIMEOUT_S,
    absent_timeout_s: float = ABSENT_TIMEOUT_S,
) -> LoadResult:
    """Restore a checkpoint into a DeepSpeed engine, whatever number of devices saved it.

    Call it on every rank. The engine is changed only when everything is checked on all ranks.

    Args:
        engine: what ``deepspeed.initialize`` gave; one without optimizer gets the weights.
        path: the checkpoint's directory.
        load_optimizer_state: False: a fresh optimizer on the saved weights.
        load_hyperparameters: False: learning rate, ... and the engine's scheduler stay as they are.
        strict: False: frozen parameters and buffers may be missing, or too many; with
            ``load_optimizer_state=False`` trained parameters too. They are named in a warning.
        strict_optimizer: False: other parameters may be trained than when saved, in other groups:
            the known are restored, new ones begin as they are; all are named.
        rename: beginnings of names, and what they are here: ``{"encoder": "backbone.encoder"}``.
        allow_pickle: build Python objects of any class from the client state; it can run code.
        fallback: where one of this library is damaged, take the newest sound one before it in its
            folder that has the same parameters, with a warning.
        fingerprint: compare what is live then with the number that its save recorded, if it did.
        stall_timeout_s: how many seconds a rank may be at work without progress.
        absent_timeout_s: how many seconds ranks wait for one; both as in ``save_checkpoint``.

    Returns:
        ``LoadResult``: ``client_state``; ``manifest``, a ``Manifest``; ``stats``, what the load
        cost; ``instead_of``, the damaged one of a ``fallback``; ``fingerprint_result``, in words.

    Raises:
        ValueError: an option has a value that it cannot have.
        CheckpointNotFoundError, CheckpointFormatError: nothing is there, or none that can be read.
        CheckpointMismatchError: it does not fit this model, or lacks what is asked of it.
        CheckpointCorruptedError: it is damaged, or the live state is another one (fingerprint).
        UnsupportedError, RanksError: see ``save_checkpoint``.
    """
    options = load_options(
        load_optimizer_state=load_optimizer_state,
        load_hyperparameters=load_hyperparameters,
        strict=strict,
        strict_optimizer=strict_optimizer,
        rename=rename,
        allow_pickle=allow_pickle,
        fallback=fallback,
        fingerprint=fingerprint,
    )
    handle, times = engine_handle(engine), Timeouts.of(stall_timeout_s, absent_timeout_s)
    with closing(_ranks_to("load", handle, path, times)) as ranks:
        return load_engine(handle, path, ranks, options)


def engine_handle(
    engine: Any,
    *,
    places_checked: bool = False,
) -> EngineHandle:
    """Return what ``checkpoint`` needs of an engine of DeepSpeed's; see ``live_engine``."""
    return EngineHandle(
        open=partial(live_engine, engine, places_checked=places_checked),
        global_step=lambda: getattr(engine, "global_steps", 0),
        add_step_pre_hook=partial(add_step_pre_hook, engine),
        updates_state_before_step=partial(updates_state_before_step, engine),
        recovery_script=recovery_script,
        before_change=partial(before_change, engine),
    )


def _ranks_to(
    verb: str, engine: EngineHandle, path: str | os.PathLike[str], times: Timeouts
) -> Ranks:
    """Return the ranks for one call, which others may never make."""
    call = f"{verb} {os.fspath(path)} {engine.at_step()}"
    return connect_ranks(times, name="elastic-zero api", call=call)


def load_options(
    *,
    load_optimizer_state: bool,
    load_hyperparameters: bool,
    strict: bool = True,
    strict_optimizer: bool = True,
    rename: Mapping[str, str] | None,
    allow_pickle: bool,
    fallback: bool,
    fingerprint: bool,
) -> LoadOptions:
    """Return the options of a load, by the names that users know them by; see ``load_checkpoint``.

    Raises:
        ValueError: one has a value that it cannot have.
    """
    return LoadOptions(
        optimizer_state=check_flag("load_optimizer_state", load_optimizer_state),
        hyperparameters=check_flag("load_hyperparameters", load_hyperparameters),
        strict=check_flag("strict", strict),
        strict_optimizer=check_flag("strict_optimizer", strict_optimizer),
        allow_pickle=check_flag("allow_pickle", allow_pickle),
        fallback=check_flag("fallback", fallback),
        fingerprint=check_flag("fingerprint", fingerprint),
        renamed=check_rename(rename),
    )
