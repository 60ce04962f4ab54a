"""A Trainer's folders on the nodes' own disks (``save_on_each_node=True``).

::

    output_dir/checkpoint-10/             the Trainer's files, which each node writes for itself
    output_dir/checkpoint-10/global_step  a link to the engine's checkpoint
    output_dir/_nodes/checkpoint-10/      the engine's checkpoint on ``node://``

The engine saves when the Trainer has written its files, and takes those that a resume needs into
its checkpoint: a published one has all of them, verified and with copies. A resume writes them to
each node again, which may be new, or have other ranks now. The Trainer deletes its own folders on
each node, and rank 0 the engine's checkpoints on all nodes.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from lightning_elastic_zero.checkpoint.file_queue import FileQueue
from lightning_elastic_zero.checkpoint.nodes import check_room_to_train, join_folder
from lightning_elastic_zero.coordination.ranks import connect_ranks
from lightning_elastic_zero.core.grid import RankGrid
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.errors import CheckpointFormatError
from lightning_elastic_zero.formats.newest import check_complete
from lightning_elastic_zero.formats.open import open_checkpoint
from lightning_elastic_zero.integrations.engines import LoopOptions, OnNodes
from lightning_elastic_zero.integrations.series import folders_of, resume_folder
from lightning_elastic_zero.storage.file_write import replace_durably
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.paths import (
    NODES,
    AnyPath,
    StorePath,
    check_local_path,
    parse_path,
    read_file,
)

log = logging.getLogger(__name__)

_NODES = "_nodes"
"""The folder of the engine's checkpoints. Uploads of ``output_dir`` leave out such names."""

_FILES = "trainer_files"
"""Entry of a rank's own state in a checkpoint: files by name."""

_MARK = "global_step"
"""transformers resumes from no folder without an entry whose name begins so."""


def is_folder_of_nodes(folder: Path, args: Any) -> bool:
    """Whether a folder is one of those that a Trainer numbers on nodes."""
    below = check_local_path(folder).is_relative_to(check_local_path(args.output_dir))
    return bool(args.save_on_each_node and below and _is_numbered(folder.name))


# -- resuming ------------------------------------------------------------------------------------


def join_nodes(asked: Any, args: Any, options: LoopOptions) -> Any:
    """Let the nodes agree on their checkpoints; return what to resume from. Collective.

    A script may look for the last folder by itself, and a new node does not have it: where the
    ranks ask for different ones, the newest is taken. If none asks for one, a rank of a new node
    may have looked for all.
    """
    own = os.fspath(asked) if isinstance(asked, os.PathLike) else asked or None
    call = f"train(resume_from_checkpoint={own!r})"
    series = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-")

    def look() -> tuple[Any, str]:
        names = [path.name for path in folders_of(_on_nodes(series))[:1]]
        return own, next((name for name in names if not series.with_name(name).is_dir()), "")

    with closing(connect_ranks(options.timeouts(), "elastic-zero engine", call)) as ranks:
        join_folder(_on_nodes(series).parent, ranks, options.node_copies)
        of_ranks, lacking = zip(*ranks.all_gather("look for folders", look), strict=True)
        if all(each == of_ranks[0] for each in of_ranks):
            if own is None and ranks.rank == 0 and (newest := max(lacking)):
                log.warning(
                    "Training starts at step 0, although other nodes have %s: to resume, pass "
                    "resume_from_checkpoint=True",
                    series.with_name(newest),
                )
            return asked
        if ranks.rank == 0:
            found = ", ".join(sorted({str(each) for each in of_ranks}))
            log.warning("resume_from_checkpoint differs between ranks (%s): True is used", found)
    return True


def folder_on_nodes(
    asked: Path | None, args: Any, grid: RankGrid, options: LoopOptions
) -> str | None:
    """Return the folder to resume from, with the Trainer's files on each node; collective.

    ``asked`` is that of the user; None: the newest. Returns None if there is none.
    """

    def checkpoints_of(path: StorePath) -> list[StorePath]:
        if args.process_index == 0:  # It asks all nodes.
            check_complete(path)
        return [path]

    newest = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-")
    series = _on_nodes(newest)
    found = resume_folder(_on_nodes(asked) if asked else None, series, checkpoints_of, options)
    if found is None:
        return None
    folder = (asked or newest).with_name(parse_path(found).name)
    with closing(connect_ranks(options.timeouts(), "elastic-zero engine", found)) as ranks:
        step = f"write the Trainer's files of {found}"
        ranks.run_all(step, partial(_restore_files, check_local_path(folder), args, grid))
    return str(folder)


def _restore_files(folder: Path, args: Any, grid: RankGrid) -> None:
    """Write the Trainer's files to this node as they were saved.

    Raises:
        CheckpointFormatError: a Trainer did not save the checkpoint.
    """
    path, is_first = _on_nodes(folder), args.local_process_index == 0
    with closing(open_checkpoint(path)) as source:
        was = source.manifest.grid
        # An additional rank takes the random state of another one.
        for rank in {was.counterpart(args.process_index, grid), *([0] if is_first else [])}:
            files = source.module_state(rank, was.ranks).rank_state.get(_FILES, {})
            if not rank and TRAINER_STATE_NAME not in files:
                msg = (
                    f"{path} has no {TRAINER_STATE_NAME}: a Trainer did not save it. Resume from "
                    "another folder"
                )
                raise CheckpointFormatError(msg)
            folder.mkdir(parents=True, exist_ok=True)
            for name in files.keys() & {*_names_of(rank, was.ranks)}:
                replace_durably(folder / name, files[name])
    for saved in folder_at(path.parent).entries() if is_first else ():
        if _is_numbered(saved.path.name) and saved.exists():  # One of them may be the best.
            _mark(folder.with_name(saved.path.name))


# -- saving --------------------------------------------------------------------------------------


@contextmanager
def saving_last(engine: Any) -> Iterator[None]:
    """Save the engine at the end of the context, when the Trainer has written its files."""
    save, calls = engine.save_checkpoint, list[Callable[[], object]]()

    @functools.wraps(save)  # transformers inspects the signature.
    def save_later(*args: Any, **kwargs: Any) -> bool:
        calls.append(partial(save, *args, **kwargs))
        return True

    engine.save_checkpoint = save_later
    try:
        yield
    finally:
        engine.save_checkpoint = save
    for call in calls[-1:]:  # Without gathered weights, the Trainer saves twice.
        call()


def prepare_saves(
    engine: Any, resumed: Path | None, args: Any, state: Any, options: LoopOptions
) -> None:
    """Refuse to train if the nodes have no room for a save. Collective.

    ``resumed`` is the folder that this run continues. If it is the newest, a killed run may have
    left one that it was about to delete, whose room the first save needs.
    """
    if args.save_strategy == "no" or args.save_only_model:
        return  # Nothing is saved on nodes.
    series = _on_nodes(Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-"))
    call = f"train in {args.output_dir}"

    def delete_leftovers() -> None:
        for newest in folders_of(series)[:1]:
            if resumed is not None and _on_nodes(resumed) == newest:
                for old in _replaced_by(newest, args, state):
                    FileQueue().delete(str(old))

    with closing(connect_ranks(options.timeouts(), "elastic-zero engine", call)) as ranks:
        ranks.broadcast(f"{call}: delete leftovers", delete_leftovers)
        check_room_to_train(series.parent, LiveEngine(engine), ranks)


def checkpoint_on_nodes(folder: Path, args: Any, state: Any) -> OnNodes:
    """Return the engine's checkpoint of a folder, given the Trainer's arguments and state."""
    folder = check_local_path(folder)
    path = _on_nodes(folder)

    def rank_state() -> dict[str, Any]:
        if args.local_process_index == 0:
            _mark(folder)
        files = (folder / name for name in _names_of(args.process_index, args.world_size))
        return {_FILES: {file.name: read_file(file) for file in files if file.is_file()}}

    return OnNodes(
        path=path, rank_state=rank_state, replaced=lambda: _replaced_by(path, args, state)
    )


def _replaced_by(new: StorePath, args: Any, state: Any) -> list[AnyPath]:
    """Return the checkpoints that ``save_total_limit`` does not keep, as the Trainer would.

    Numbers above the new one are of a run that went back, and go first.
    """
    limit = args.save_total_limit or 0
    entries = folder_at(new.parent).entries() if limit > 0 else ()
    others = {each.path for each in entries if _is_numbered(each.path.name) and each.exists()}
    # The best step may not be saved. A resume forgets the best folder if output_dir has moved.
    best_name = state.best_model_checkpoint or f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
    best = new.with_name(Path(best_name).name)
    kept = {new, best} if best in others else {new}

    def age(path: AnyPath) -> tuple[bool, int]:
        return _number(path) > _number(new), -_number(path)

    return sorted(others - kept, key=age)[max(limit - len(kept), 0) :]


# -- names ---------------------------------------------------------------------------------------


def _on_nodes(folder: Path) -> StorePath:
    """Return where the engine's checkpoint of a folder of the Trainer is."""
    folder = check_local_path(folder)
    return StorePath(NODES, folder.parent.as_posix()[1:]) / _NODES / folder.name


def _is_numbered(name: str) -> bool:
    return bool(re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", name))


def _number(path: AnyPath) -> int:
    return int(path.name.rpartition("-")[2])


def _mark(folder: Path) -> None:
    """Make a folder of the Trainer on this node one that transformers resumes from."""
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        (folder / _MARK).symlink_to(Path("..", _NODES, folder.name))


def _names_of(rank: int, world_size: int) -> list[str]:
    """Return the Trainer's files that a resume needs of a rank."""
    own = f"rng_state_{rank}.pth" if world_size > 1 else "rng_state.pth"
    return [own] if rank else [own, TRAINER_STATE_NAME, SCHEDULER_NAME]
