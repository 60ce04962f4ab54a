"""A callback that saves and ends the run when a machine is about to be preempted.

Besides signals, it polls a notice in a thread: a function without arguments that returns whether
the machine will be taken away. A source that does not answer counts as no notice, so that it cannot
end a run. After each optimizer step, all ranks exchange whether one of them has received a notice.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http.client import HTTPException
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_elastic_zero.coordination.ranks import any_rank
from lightning_elastic_zero.errors import ElasticZeroError, UnsupportedError
from lightning_elastic_zero.storage.paths import parse_path
from lightning_elastic_zero.trainer.accumulation import pending_micro_batches
from lightning_elastic_zero.trainer.last_checkpoint import is_found_as_last
from lightning_elastic_zero.trainer.lightning import log_train_step
from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy

Notice: TypeAlias = Callable[[], bool]
"""Returns whether the machine will be taken away."""

AWS = "http://169.254.169.254"
"""Instance metadata service, version 2 (Amazon EC2 User Guide, "Spot Instance interruption
notices"): 404 until two minutes before the interruption, then a document."""

GCP = "http://metadata.google.internal"
"""Metadata server (Compute Engine, "Preemptible and Spot VMs"): FALSE until 30 s before."""

INTERVAL_S = 2.0
"""Interval at which the notice is polled."""

_ANSWER_S = 2.0
"""Timeout of a request; metadata servers answer within milliseconds."""

NAME = "last-preempted.ckpt"
"""Name of the checkpoint: ``ckpt_path="last"`` takes the newest name that begins with ``last``."""

EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: a temporary failure; try again."""

log = logging.getLogger(__name__)


def aws_notice(server: str = AWS) -> bool:
    """Return whether AWS will interrupt this spot instance; the request needs a token."""
    token = _answer(
        f"{server}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}, "PUT"
    )
    if token is None:
        return False
    headers = {"X-aws-ec2-metadata-token": token}
    return _answer(f"{server}/latest/meta-data/spot/instance-action", headers) is not None


def gcp_notice(server: str = GCP) -> bool:
    """Return whether Google Cloud will preempt this machine."""
    url = f"{server}/computeMetadata/v1/instance/preempted"
    return url_notice(url, {"Metadata-Flavor": "Google"})


def url_notice(url: str, headers: Mapping[str, str] = MappingProxyType({})) -> bool:
    """Return whether a URL answers with success, and with neither ``FALSE`` nor ``NONE``."""
    answer = _answer(url, headers)
    return answer is not None and answer.strip().upper() not in {"FALSE", "NONE"}


def notice_of(source: str) -> Notice:
    """Return the notice for an option: ``aws``, ``gcp``, a URL, or the path of a file."""
    if source == "aws":
        return aws_notice
    if source == "gcp":
        return gcp_notice
    if source.startswith(("http://", "https://")):
        return partial(url_notice, source)
    return Path(source).exists


def _answer(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    request = urllib.request.Request(url, headers=dict(headers), method=method)  # noqa: S310 - the user's
    # No proxy: a link-local address is this machine's own.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ANSWER_S) as answer:
            return str(answer.read(65536).decode(errors="replace"))
    except (OSError, HTTPException, ValueError):  # also HTTPError, URLError and timeouts
        return None


class PreemptionCheckpoint(Callback):
    """Saves and ends the run when one of its machines is about to be taken away.

    Any rank may get the notice. All ranks stop after the same optimizer step, save to
    ``last-preempted.ckpt`` and exit with a code that requests a restart. The same command, with the
    ``ckpt_path`` that the last message names, continues on any number of devices.

    Args:
        notice: Source of notices besides the signals, polled every two seconds: ``"aws"`` or
            ``"gcp"`` for their spot machines, the URL of a metadata server, the path of a file that
            appears, or a function that returns whether the machine will be taken away.
        signals: Names of the signals that announce it. Lightning's own handlers of these signals
            are replaced during training.
        dirpath: Folder of the checkpoint. By default that of the first ``ModelCheckpoint``, or the
            Trainer's ``default_root_dir``.
        exit_code: Exit code of each rank, 1 to 255. Ranks that Lightning itself started exit with
            0, because Lightning kills the others for any other code. torchrun's agent restarts
            after any code but 0.

    Raises:
        ValueError: A signal does not exist, or the exit code is out of range.
        UnsupportedError: At the start of ``fit``: the strategy is not ``ElasticDeepSpeedStrategy``.
    """

    def __init__(
        self,
        notice: str | Notice | None = None,
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1"),
        dirpath: str | None = None,
        exit_code: int = EXIT_CODE,
    ) -> None:
        unknown = [name for name in signals if name not in signal.Signals.__members__]
        if unknown:
            msg = (
                f"signals={list(signals)!r}: there is no signal {unknown[0]!r} on this system, "
                "expected names such as SIGUSR1"
            )
            raise ValueError(msg)
        if exit_code not in range(1, 256):
            msg = f"exit_code={exit_code!r}: expected 1 to 255, because 0 means a complete run"
            raise ValueError(msg)
        self._notice: Notice | None = notice_of(notice) if isinstance(notice, str) else notice
        self._signals = tuple(signals)
        self._dirpath = dirpath
        self._exit_code = exit_code
        self._heard, self._heard_at = "", 0.0
        self._handlers: dict[int, Any] = {}
        self._closing: threading.Event | None = None
        """Ends the thread that polls; None outside training."""
        self._ending = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_closing": None, "_handlers": {}}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check the Trainer, and move behind the callbacks whose work belongs to a batch."""
        if stage != "fit":
            return
        if not isinstance(trainer.strategy, ElasticDeepSpeedStrategy):
            strategy = type(trainer.strategy).__name__
            msg = f"PreemptionCheckpoint needs ElasticDeepSpeedStrategy; the strategy is {strategy}"
            raise UnsupportedError(msg)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if sum(isinstance(callback, PreemptionCheckpoint) for callback in callbacks) > 1:
            msg = "PreemptionCheckpoint was passed twice. Remove one from the callbacks"
            raise ValueError(msg)
        folders = [c.dirpath for c in callbacks if isinstance(c, ModelCheckpoint)]
        if not folders:
            rank_zero_warn(
                'PreemptionCheckpoint: ckpt_path="last" finds the folder by a ModelCheckpoint. '
                "Without one, resume from the path in the message at the end of the run."
            )
        elif trainer.loggers and not any(folders):
            rank_zero_warn(
                "PreemptionCheckpoint: no ModelCheckpoint has a dirpath. The next start looks for "
                'ckpt_path="last" in the folder of its logger, which most loggers number anew. '
                "Pass ModelCheckpoint(dirpath=...), or fix the logger's version."
            )
        # A new list, because Lightning iterates over the old one now and keeps Checkpoints last.
        others = [callback for callback in callbacks if callback is not self]
        first_last = next(
            (i for i, c in enumerate(others) if isinstance(c, Checkpoint)), len(others)
        )
        others.insert(first_last, self)
        trainer.callbacks = others  # type: ignore[attr-defined]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()
        self._heard, self._ending = "", False
        if threading.current_thread() is not threading.main_thread():
            rank_zero_warn(
                "PreemptionCheckpoint cannot handle signals: fit() does not run in the main thread."
            )
        else:
            for name in self._signals:
                number = signal.Signals[name]
                self._handlers[number] = signal.signal(number, self._on_signal)
        self._closing = threading.Event()
        if self._notice is not None:
            threading.Thread(
                target=self._poll,
                args=(self._notice, self._closing),
                name="elastic-zero preemption notice",
                daemon=True,
            ).start()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if not pending_micro_batches(trainer) and _any_rank(trainer, flag=bool(self._heard)):
            self._save_and_end(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Also give SIGTERM before training the exit code."""
        if isinstance(exception, SIGTERMException) and exception.code is None:
            exception.code = self._code_of(trainer)
        self._close()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()

    def _on_signal(self, number: int, _: object) -> None:
        self._note(signal.Signals(number).name)

    def _poll(self, notice: Notice, closing: threading.Event) -> None:
        level = logging.WARNING
        while not (self._heard or closing.wait(INTERVAL_S)):
            try:
                if notice():
                    self._note("the notice of its machine")
            except Exception as error:  # noqa: BLE001 - of a user's function, a disk or a server
                problem = f"{type(error).__name__}: {error}"
                log.log(
                    level, "could not check whether this machine is being preempted: %s", problem
                )
                level = logging.DEBUG

    def _note(self, what: str) -> None:
        if not self._heard:
            self._heard_at = time.monotonic()
            self._heard = f"{what} on {socket.gethostname()}"
            # Not through logging: a signal may have interrupted a write to the same stream.
            os.write(2, f"{self._heard}: all ranks save and end after this step.\n".encode())

    def _save_and_end(self, trainer: pl.Trainer) -> None:
        """Save; end the run unless this was its last step.

        A run that is started again with all its steps would not validate or save any more.
        """
        is_last = 0 <= trainer.max_steps <= trainer.global_step  # more: several steps per batch
        self._ending = not is_last  # the handlers stay: further signals change nothing
        if self._ending:
            log_train_step(trainer)
        strategy = cast("ElasticDeepSpeedStrategy", trainer.strategy)  # checked in setup()
        path = self._path(trainer)
        heard = strategy._get_ranks().all_gather("end a preempted run", lambda: self._heard)
        reason = "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(heard) if what)
        rank_zero_info(f"This run will be preempted ({reason}): saving to {path}.")
        try:
            strategy.wait_for_save()
        except ElasticZeroError as error:
            rank_zero_warn(f"An earlier save in the background failed: {error}")
        trainer.save_checkpoint(path, weights_only=False)
        strategy.wait_for_save()
        if self._heard:
            seconds = time.monotonic() - self._heard_at
            log.info("rank %d: saved %.1f s after the notice", trainer.global_rank, seconds)
        if is_last:
            rank_zero_info(f"Saved {path} after the last of max_steps: the run ends as usual.")
            return
        if trainer.is_global_zero:
            asked = "last" if is_found_as_last(trainer, path) else path
            rank_zero_info(
                f"Saved {path} at step {trainer.global_step}; ending with exit code "
                f'{self._exit_code}. Start the same command again with ckpt_path="{asked}".'
            )
        raise SIGTERMException(self._code_of(trainer))

    def _code_of(self, trainer: pl.Trainer) -> int:
        """Return this rank's exit code. Lightning kills the others of a node for any code but 0."""
        environment = getattr(trainer.strategy, "cluster_environment", None)
        by_lightning = isinstance(environment, LightningEnvironment)
        return 0 if by_lightning and trainer.local_rank else self._exit_code

    def _path(self, trainer: pl.Trainer) -> str:
        saving = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        folders = [str(c.dirpath) for c in saving if c.dirpath]
        folder = self._dirpath or (folders or [trainer.default_root_dir])[0]
        return str(parse_path(folder) / NAME)

    def _close(self) -> None:
        if self._closing is not None:
            self._closing.set()
        self._closing = None
        if self._ending:
            return  # Lightning's teardown restores the first ones
        handlers, self._handlers = self._handlers, {}
        for number, handler in handlers.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _any_rank(trainer: pl.Trainer, *, flag: bool) -> bool:
    if trainer.world_size == 1:
        return flag
    return any_rank(flag=flag, device=trainer.strategy.root_device)
