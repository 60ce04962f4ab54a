"""The result of a call as text that ranks can send: errors, warnings and log messages."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NOTHING = ""
"""Returned if nothing was raised."""


def error_text(work: Callable[[], object]) -> str:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the test checks it
        return f"{type(error).__name__}: {error}"
    return NOTHING


@contextmanager
def captured_warnings(about: str = "") -> Iterator[list[str]]:
    """Yield a list to which the warnings that contain a text are added at the end."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield messages
        finally:
            messages += [text for each in caught if about in (text := str(each.message))]


@contextmanager
def captured_log(logger: str, level: int = logging.NOTSET) -> Iterator[list[str]]:
    messages: list[str] = []
    handler = logging.Handler(level)

    def emit(record: logging.LogRecord) -> None:
        messages.append(record.getMessage())

    handler.emit = emit  # type: ignore[method-assign]
    recorded = logging.getLogger(logger)
    before = recorded.level
    recorded.addHandler(handler)
    recorded.setLevel(level or before)
    try:
        yield messages
    finally:
        recorded.removeHandler(handler)
        recorded.setLevel(before)
