"""Messages of a resumed run about its configuration, printed once by the first rank."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from typing_extensions import override

from lightning_elastic_zero.tools.conversion import convert_checkpoint
from lightning_elastic_zero.tools.selection import ConvertOptions
from lightning_elastic_zero.trainer.checkpoint_io import _format_not_resumed
from tests.support.fits import FitCase, fit, fits
from tests.support.outcome import captured_warnings
from tests.support.ranks import Pools
from tests.trainer._recorded_runs import (
    RecordingNet,
    RunRecord,
    from_step,
    recorded,
    records,
)

pytestmark = pytest.mark.engine

REPLACED = "Continuing with the saved learning rate"


def messages_with(seen: RunRecord, text: str) -> list[str]:
    return [message for message in seen.messages if text in message]


@pytest.mark.long
def test_a_configured_rate_replaced_by_the_saved_one_is_reported(
    worlds: Pools, tmp_path: Path
) -> None:
    """Not a rate that is equal, requested, or set by a scheduler."""
    expected = {
        ("none", 0.01, True): "",
        ("none", 0.03, True): "(group 0: configured 0.03, saved 0.01)",
        ("none", 0.03, False): "",
        ("step", 0.01, True): "",
        ("step", 0.03, True): "and schedule, not with the configured one (group 0: configured 0.03",
        ("step", 0.03, False): "",
        ("warmup", 0.01, True): "",
        ("plateau, stepwise", 0.01, True): "",
    }
    saves, runs = {}, []
    for schedule, rate, loads_rate in expected:
        run = recorded(schedule=schedule, root=str(tmp_path / schedule), validate=True)
        saves[schedule] = replace(run, save=("step 1.3",))
        strategy = {} if loads_rate else {"load_hyperparameters": False}
        runs.append(run.resumed("step 1.3", rate=rate, strategy=strategy))
    worlds.run(1, partial(fits, list(saves.values())))
    first, second = worlds.run(2, partial(fits, runs))
    for (case, text), seen, other in zip(expected.items(), first, second, strict=True):
        messages = messages_with(seen, REPLACED)
        assert len(messages) == bool(text), (case, messages)
        assert all(text in message for message in messages), (case, messages)
        assert not messages_with(other, REPLACED)
    loaded = "(saved on 1 device with ZeRO-2) on 2 devices at step 8, epoch 1: "
    assert all(len(messages_with(seen, loaded)) == 1 for seen in first), first[0].messages
    assert messages_with(first[0], "Global batch of 12: 2 devices x 3 micro-batches of 2 samples")


@pytest.mark.long
def test_a_schedule_that_the_saved_run_did_not_have_causes_a_warning(
    worlds: Pools, tmp_path: Path
) -> None:
    """Cases are the saved schedule, the configured one, and whether the saved one is loaded."""
    starts = "no state of StepLR: the learning-rate schedule starts at its first step"
    other = "(only the saved one has ['step_size'], only the configured one [])"
    expected = {
        ("none", "step", True): starts,
        ("none", "step", False): starts,
        ("step", "none", True): "none: the learning rate stays at its saved value",
        ("step", "none", False): "",
        ("step", "epoch", True): other,
        ("step", "epoch", False): "",
        ("step", "step", True): "",
    }
    runs = []
    for saved, configured, loads in expected:
        run = recorded(schedule=saved, save=("step 0.3",), root=str(tmp_path / saved))
        options = {} if loads else {"load_hyperparameters": False}
        runs += [run, run.resumed("step 0.3", schedule=configured, strategy=options)]
    resumed = records(worlds, 1, runs)[1::2]
    for (case, text), seen in zip(expected.items(), resumed, strict=True):
        warned = messages_with(seen, "learning-rate schedule")
        assert len(warned) == bool(text), (case, warned)
        assert all(text in message for message in warned), (case, warned)


class Overriding(RecordingNet):
    """A module that overrides `load_state_dict`."""

    @override
    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        raise AssertionError


def warnings_of_override(run: FitCase) -> list[str]:
    """Resume and evaluate a module with an override; return the warnings about it."""
    run = replace(run, net=Overriding, validate=True)
    with captured_warnings("load_state_dict") as warned:
        trainer, net, data, _ = run.make()
        trainer.fit(net, **data, ckpt_path=run.ckpt_path)
        trainer, net, data, _ = run.make()
        trainer.validate(net, data["val_dataloaders"], ckpt_path=run.ckpt_path, verbose=False)
    return warned


def test_an_override_of_load_state_dict_that_is_not_called_causes_a_warning(
    worlds: Pools, tmp_path: Path
) -> None:
    run = recorded(root=str(tmp_path), batch_size=12, epochs=1)
    worlds.run(1, partial(fit, replace(run, save=("step 0.2",))))
    (texts,) = worlds.run(1, partial(warnings_of_override, run.resumed("step 0.2")))
    assert len(texts) == 2
    assert all("Overriding.load_state_dict was not called" in text for text in texts)


def test_a_resume_at_an_epochs_end_names_the_next_epoch(worlds: Pools, tmp_path: Path) -> None:
    run = recorded(root=str(tmp_path), batch_size=12)
    (saved,) = worlds.run(1, partial(fit, replace(run, save=("epoch 0",))))
    assert messages_with(saved, "Global batch of 12: 1 device x 1 micro-batch of 12 samples")
    file = tmp_path / "file.ckpt"
    convert_checkpoint(tmp_path / "epoch-0.ckpt", file, "lightning", ConvertOptions(optimizer=True))
    for path in (tmp_path / "epoch-0.ckpt", file):
        (seen,) = worlds.run(1, partial(fit, replace(run, ckpt_path=str(path))))
        assert messages_with(seen, "on 1 device at step 5, epoch 1: "), messages_with(
            seen, "Loaded"
        )
        assert min(seen.steps) == 5


@pytest.mark.long
def test_step_and_epoch_of_a_resume_are_reported_for_every_format(
    worlds: Pools, tmp_path: Path
) -> None:
    run = recorded(root=str(tmp_path))
    worlds.run(1, partial(fit, replace(run, save=("step 1.3",))))
    saved = tmp_path / "step-1.3.ckpt"
    continued = " at step 8, epoch 1: "
    expected = {
        "lightning": continued,
        "universal": continued,
        "dcp": " at step 0: ",
    }
    for kind in expected:
        convert_checkpoint(saved, tmp_path / kind, kind, ConvertOptions(optimizer=True))
    by_hand = torch.load(tmp_path / "lightning", weights_only=True)
    kept = {key: by_hand[key] for key in ("state_dict", "optimizer_states", "global_step")}
    torch.save(kept, tmp_path / "by hand")
    expected |= {saved.name: continued, "by hand": " at step 0 (saved at step 8): "}
    convert_checkpoint(saved, tmp_path / "weights", "lightning")
    paths = {str(tmp_path / kind): text for kind, text in expected.items()}
    runs = [replace(run, ckpt_path=path) for path in paths]
    paths[str(tmp_path / "weights")] = " at step 0 (saved at step 8), with a fresh optimizer: "
    weights_only = {"load_optimizer_state": False}
    runs.append(replace(run, ckpt_path=str(tmp_path / "weights"), strategy=weights_only))
    records = worlds.run(1, partial(fits, runs))[0]
    for (path, text), seen in zip(paths.items(), records, strict=True):
        (line,) = messages_with(seen, f"Loaded {path} (")
        assert text in line, line
        assert int(re.findall(r"at step (\d+)", text)[0]) == min(seen.steps), path


@pytest.mark.long
def test_an_order_that_lightning_replaces_causes_one_warning(worlds: Pools) -> None:
    expected = {
        "own generator": "and the generator of its RandomSampler has no effect",
        "replacement": "and replacement or num_samples of its RandomSampler has no effect",
        "in order": "and the order of its data set has no effect",
        "plain": "",
    }
    runs = [recorded(kind=kind, epochs=1) for kind in expected]
    records = worlds.run(1, partial(fits, runs))[0]
    for (kind, text), seen in zip(expected.items(), records, strict=True):
        messages = messages_with(seen, "The training DataLoader of IndexedSamples")
        assert len(messages) == bool(text), (kind, messages)
        assert all(text in message for message in messages), (kind, messages)
        assert all("sampler=range(len(dataset))" in message for message in messages)
        # As the message says, Lightning uses one order with all samples.
        assert seen.steps == records[-1].steps


def warned_by_default(run: FitCase) -> tuple[RunRecord, list[str]]:
    """Fit with the default warning filters; return the warnings too."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.resetwarnings()
        made = run.make()
        made.trainer.fit(made.net, **made.data, ckpt_path=run.ckpt_path)
    return made.watch.seen(made, []), [str(w.message) for w in warned]


@pytest.mark.long
def test_lightnings_warning_about_unresumable_loaders_is_hidden(
    worlds: Pools, tmp_path: Path
) -> None:
    """Lightning only checks for `state_dict`."""
    run = recorded(
        kind="own batches",
        length=60,
        root=str(tmp_path),
        trainer={"use_distributed_sampler": False},
    )
    reference = worlds.run(1, partial(fit, replace(run, save=("step 0.2",))))[0]
    ((seen, warned),) = worlds.run(1, partial(warned_by_default, run.resumed("step 0.2")))
    assert seen.steps == from_step(reference.steps, 2)
    assert warned
    assert not [text for text in warned if "is not resumable" in text]


class EpochNet(RecordingNet):
    @override
    def on_train_epoch_start(self) -> None:
        self.eval()


def nothing(*_: Any) -> None:
    """Do nothing at the start of an epoch."""


@pytest.mark.long
def test_hooks_at_an_epochs_start_that_are_not_called_cause_a_warning(
    worlds: Pools, tmp_path: Path
) -> None:
    """Only hooks of users, and only if they are not called."""
    run = recorded(save=("step 1.2", "epoch 0"), root=str(tmp_path), net=EpochNet)
    made = (partial(LambdaCallback, on_train_epoch_start=nothing), LearningRateMonitor)
    run = replace(run, callbacks=made, trainer={"logger": CSVLogger(run.root)})
    runs = [run, run.resumed("epoch 0"), run.resumed("step 1.2")]
    warned = [messages_with(seen, "is not called for epoch") for seen in records(worlds, 2, runs)]
    assert warned[:2] == [[], []]
    (warning,) = warned[2]
    assert "of EpochNet, LambdaCallback, EventRecorder is not called for epoch 1" in warning


def test_a_start_at_step_0_next_to_checkpoints_names_them_and_a_remedy(tmp_path: Path) -> None:
    folders = [None, str(tmp_path)]
    assert _format_not_resumed(folders) == (
        "No checkpoint was loaded: training starts from step 0.",
        False,
    )
    (tmp_path / "epoch=0.ckpt").mkdir()
    text, is_warning = _format_not_resumed(folders)
    assert is_warning
    assert text.endswith(
        f"although {tmp_path} contains checkpoints such as epoch=0.ckpt. "
        'To resume, pass the path of a checkpoint as ckpt_path; "last" needs '
        'ModelCheckpoint(save_last="link") in the run that saves.'
    )
    (tmp_path / "last-v1.ckpt").mkdir()
    text, _ = _format_not_resumed(folders)
    assert text.endswith('To resume, pass the path of a checkpoint as ckpt_path, or "last".')
    (tmp_path / "last.ckpt").symlink_to("epoch=1.ckpt")
    text, is_warning = _format_not_resumed(folders)
    assert is_warning
    assert text.endswith(
        f"{tmp_path / 'last.ckpt'} links to a checkpoint that does not exist. "
        "Pass the path of another checkpoint as ckpt_path to resume."
    )
