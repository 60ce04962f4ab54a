"""Scripts by which shells complete the command line, made from its parser by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

SHELLS = ("bash", "zsh", "tcsh")

PATHS = ("path", "paths", "first", "second", "source", "target", "newest_sound", "adapter_config")
"""The arguments that are completed by the names of files and folders."""

FOLDER = "dir"
"""The argument that is completed by the names of folders."""


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return what a shell sources to complete a command line.

    Args:
        parser: the command's.
        shell: one of ``SHELLS``.

    Raises:
        ModuleNotFoundError: shtab is not installed.
    """
    # Imported here: no other command line needs it.
    import shtab  # noqa: PLC0415

    for action in _actions(parser):
        if action.dest == FOLDER:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.dest in PATHS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its verbs."""
    for action in parser._actions:  # noqa: SLF001 (argparse lists them nowhere else)
        yield action
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for inner in action.choices.values():
                yield from _actions(inner)
