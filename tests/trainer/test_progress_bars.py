"""Progress bars of long saves and loads, which disappear without changing Lightning's bars."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import lightning.pytorch as pl
import pytest
import rich
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from rich.console import Console

from lightning_elastic_zero.trainer.monitor import checkpoint_bar

_STEPS = re.compile(r"\x1b\[\??([\d;]*)([A-Za-z])|\x1b.|[\r\n]|[^\x1b\r\n]+")


class Terminal:
    def __init__(self) -> None:
        self.text = ""

    def screen(self) -> list[str]:
        """Return the final lines, without empty ones at the bottom."""
        lines, row, column = [""], 0, 0
        for step in _STEPS.finditer(self.text):
            text, count, kind = step[0], step[1], step[2]
            if text == "\n":
                row += 1
            elif text == "\r":
                column = 0
            elif kind == "A":
                row = max(0, row - int(count or 1))
            elif kind == "K":
                lines[row] = "" if count == "2" else lines[row][:column]
            elif not text.startswith("\x1b"):
                line = lines[row].ljust(column)
                lines[row] = line[:column] + text + line[column + len(text) :]
                column += len(text)
            lines += [""] * (row + 1 - len(lines))
        kept = [line.rstrip() for line in lines]
        while kept and not kept[-1]:
            kept.pop()
        return kept


@contextmanager
def terminal() -> Iterator[Terminal]:
    """Connect both standard streams to a terminal; yield its contents."""
    shown = Terminal()
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    found: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # The other end is closed.
            while data := os.read(leader, 1 << 16):
                found.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "120")
        with os.fdopen(follower, "w") as stream:
            patch.setattr(sys, "stdout", stream)
            patch.setattr(sys, "stderr", stream)
            yield shown
    reader.join()
    os.close(leader)
    shown.text = b"".join(found).decode().replace("\r\n", "\n\r")


GB = 1_000_000_000
TITLE = "Writing a checkpoint"


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def trainer_with(*callbacks: pl.Callback, bar: bool = True) -> pl.Trainer:
    """Return a trainer with a progress bar, which runs nothing."""
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=bar,
        callbacks=[*callbacks],
    )


def write(trainer: pl.Trainer, seconds: float, steps: int = 10) -> None:
    """Report a write of 4 GB to the bar, which takes a number of seconds."""
    clock = Clock()
    with checkpoint_bar(trainer, clock) as show:
        for _ in range(steps):
            clock.now += seconds / steps
            show("writing", 4 * GB // steps, 4 * GB)


def with_tqdm(work: Callable[[pl.Trainer], None]) -> Terminal:
    """Work during an epoch that `TQDMProgressBar` shows; return the terminal."""
    with terminal() as shown:
        bar = TQDMProgressBar()
        trainer = trainer_with(bar)
        bar.on_train_start(trainer, pl.LightningModule())
        main: Any = bar.train_progress_bar
        main.reset(total=10)
        main.bar_format = "Epoch {n_fmt}/{total_fmt}"
        main.update(4)
        main.refresh()
        work(trainer)
        main.update(1)
        main.refresh()
        main.close()
    return shown


def with_rich(work: Callable[[pl.Trainer], None]) -> Terminal:
    """Work during an epoch that `RichProgressBar` shows, before its validation bar is added."""
    with terminal() as shown, pytest.MonkeyPatch.context() as patch:
        console = Console(file=sys.stdout, force_terminal=True, width=120, color_system=None)
        patch.setattr(rich, "_console", console)
        bar = RichProgressBar(refresh_rate=1, console_kwargs={"width": 120, "color_system": None})
        trainer = trainer_with(bar)
        bar.on_train_start(trainer, pl.LightningModule())
        assert bar.progress is not None
        bar.train_progress_bar_id = bar.progress.add_task("Epoch", total=10)
        bar.progress.update(bar.train_progress_bar_id, completed=4)
        bar.refresh(hard=True)
        work(trainer)
        bar.val_progress_bar_id = bar.progress.add_task("Validation", total=3)
        assert bar.val_progress_bar.description == "Validation"
        bar.progress.update(bar.train_progress_bar_id, completed=5)
        bar.refresh(hard=True)
        bar.progress.stop()
    return shown


KINDS = pytest.mark.parametrize("within", [with_tqdm, with_rich], ids=["tqdm", "rich"])


@KINDS
def test_a_long_save_is_shown_and_leaves_no_trace(within: Callable[..., Terminal]) -> None:
    """The final screen is the same as without the save."""
    shown = within(lambda trainer: write(trainer, seconds=20.0))
    assert TITLE in shown.text
    assert "4.0" in shown.text.split(TITLE)[-1]  # of 4 GB
    assert shown.text.count(TITLE) >= 9
    screen = shown.screen()
    assert not [line for line in screen if TITLE in line]
    undisturbed = within(lambda _: None).screen()
    assert [line[:20] for line in screen] == [line[:20] for line in undisturbed]
    assert screen


@pytest.mark.long
@KINDS
def test_a_save_of_less_than_two_seconds_shows_nothing(within: Callable[..., Terminal]) -> None:
    assert TITLE not in within(lambda trainer: write(trainer, seconds=1.9)).text
    assert TITLE in within(lambda trainer: write(trainer, seconds=2.1)).text


def test_a_load_before_training_has_its_own_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    for bar in (TQDMProgressBar(), RichProgressBar()):
        with terminal() as shown:
            console = Console(file=sys.stdout, force_terminal=True, width=120, color_system=None)
            monkeypatch.setattr(rich, "_console", console)
            clock = Clock()
            with checkpoint_bar(trainer_with(bar), clock) as show:
                for activity in ("verifying", "reading"):
                    clock.now += 5.0
                    show(activity, GB, 0)
        assert "Verifying a checkpoint" in shown.text
        assert "Reading a checkpoint" in shown.text
        assert not [line for line in shown.screen() if "checkpoint" in line]


def test_without_a_terminal_nothing_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        write(trainer_with(TQDMProgressBar()), seconds=60.0)
        assert not (stream and stream.getvalue())
    assert TITLE not in capsys.readouterr().out


def test_a_trainer_without_a_progress_bar_shows_none() -> None:
    with terminal() as shown:
        write(trainer_with(bar=False), seconds=60.0)
        write(trainer_with(TQDMProgressBar(refresh_rate=0)), seconds=60.0)
    assert TITLE not in shown.text
