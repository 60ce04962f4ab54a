"""The result of a call as text that ranks can send: errors, warnings and log messages."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NOTHING = "nothing was raised"


def error_text(work: Callable[[], object]) -> str:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - it is what the test looks at
        return f"{type(error).__name__}: {error}"
    return NOTHING


@contextmanager
def warnings_heard(about: str = "") -> Iterator[list[str]]:
    """Yield a list that has all warnings afterwards, or those that contain a text."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield said
        finally:
            said += [text for each in caught if about in (text := str(each.message))]


@contextmanager
def log_heard(logger: str, level: int = logging.NOTSET) -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    heard = logging.getLogger(logger)
    before = heard.level
    heard.addHandler(handler)
    heard.setLevel(level or before)
    try:
        yield said
    finally:
        heard.removeHandler(handler)
        heard.setLevel(before)
