"""Links to checkpoints, such as ``last.ckpt``, each changed in one step.

A link is made under a hidden name beside its own, which it then takes by one rename, so that a kill
at any instant leaves the old link or the new one. What a process that was killed in between has
left under such a name is removed when that link is made again.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.storage.atomic import put_in_place, rename_if_free
from lightning_elastic_zero.storage.copying import copy_checkpoint
from lightning_elastic_zero.storage.deleting import ignore_progress, remove_hidden
from lightning_elastic_zero.storage.existing_target import inspect_target
from lightning_elastic_zero.storage.leftovers import LINK_PREFIX
from lightning_elastic_zero.storage.paths import sync_directory

_NO_LINKS = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM}
"""What a filesystem says that has no links. Any other error would fail a copy too, or worse."""


def make_link(target: Path, link: Path, on_progress: Callable[[], None] = ignore_progress) -> None:
    """Make a link to a checkpoint, in one step, in the place of a link or a checkpoint.

    What this library did not write is left as it is.

    Args:
        target: the checkpoint, which is there.
        link: beside it or elsewhere; the link's text is relative.
        on_progress: called while a directory is deleted, or copied, where there are no links.

    Raises:
        SaveError: it could not be made, and is what it was.
    """
    if target == link:
        return
    new, old = (link.parent / f"{LINK_PREFIX}{link.name}.{end}" for end in ("new", "old"))
    try:
        if refusal_reason := inspect_target(link).refusal_reason:
            msg = f"Could not link {link} to {target}, which is published: {link} {refusal_reason}."
            raise SaveError(msg)
        for hidden in (new, old):
            remove_hidden(hidden, link, on_progress)
        _make(new, target, on_progress)
        put_in_place(new, link, old)
        sync_directory(link.parent)
    except OSError as error:
        msg = f"Could not link {link} to {target}, which is published: {error.strerror or error}."
        raise SaveError(msg) from error
    finally:
        with suppress(OSError):
            rename_if_free(old, link)  # where even putting it back was interrupted
        # The link is changed, or is not: a failure here is a matter of disk space.
        for hidden in (new, old):
            with suppress(OSError):
                remove_hidden(hidden, link, on_progress)


def _make(new: Path, target: Path, on_progress: Callable[[], None]) -> None:
    try:
        new.symlink_to(os.path.relpath(target, new.parent))
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # What Lightning does there too, but for files only.
        copy_checkpoint(target, new, on_progress)
