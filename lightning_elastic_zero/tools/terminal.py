"""Output lines: coloured on terminals, plain elsewhere."""

from __future__ import annotations

import os
from typing import TextIO

STYLES = {
    "DAMAGED": "bold red",
    "NOT verified": "yellow",
    ": intact:": "green",
}
"""Styles of the words that carry the verdict."""

ERROR = "bold red"


def show(line: str, stream: TextIO, *, error: str = "") -> None:
    """Print a line; on a terminal, words that carry the verdict are coloured.

    Args:
        line: without its end.
        stream: standard output or standard error.
        error: prefix of the line to show as an error.
    """
    if not _wants_colours(stream):
        print(line, file=stream)
        return
    # Imported here: it takes as long as the rest of the command line, for terminals only.
    from rich.console import Console  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    text = Text(line)
    for words, style in STYLES.items():
        text.highlight_words([words], style)
    text.stylize(ERROR, 0, len(error))
    # Soft: a path that is longer than a line stays one word to copy.
    Console(file=stream, highlight=False, soft_wrap=True).print(text)


def _wants_colours(stream: TextIO) -> bool:
    """Whether the stream is a terminal that permits colours (https://no-color.org)."""
    refused = os.environ.get("NO_COLOR") or os.environ.get("TERM") in {None, "", "dumb"}
    return stream.isatty() and not refused
