"""Programs of ranks that run Hugging Face's Trainer and accelerate, and record their state.

DeepSpeed's own functions read the state; they share no code with this library.
"""

from __future__ import annotations

import functools
import gc
import io
import json
import logging
import os
import random
import shutil
import signal
import sys
import weakref
from collections.abc import Iterator
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations.deepspeed import deepspeed_config

from lightning_elastic_zero import elastic
from tests.support.outcome import captured_log, error_text

State = dict[str, torch.Tensor]

GLOBAL_BATCH = 12
MICRO = {1: (2, 6), 2: (2, 3), 3: (2, 2)}
"""Micro-batch and accumulation that keep the global batch, by number of ranks."""

_seen: list[int] = []


library_warnings = functools.partial(captured_log, "lightning_elastic_zero", logging.WARNING)


class StoppedError(Exception):
    """A run was stopped on purpose, on all ranks."""


def use_gloo() -> None:
    """Make accelerate run DeepSpeed on CPU ranks, for which it has no backend."""
    if get_accelerator().device_name() == "cpu":
        PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"


def seed_everything(seed: int) -> None:
    """Seed all ranks equally, like transformers."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens, each with its index."""

    def __init__(self, count: int = 96, length: int = 8) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, 32, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": tokens, "index": torch.tensor(index)}


class EpochTokens(Tokens):
    """Samples that depend on the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return super().__getitem__((index + self.epoch) % len(self))


class UnequalTokens(Tokens):
    """Samples with different numbers of labels."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[index].clone()
        labels[: index % 7] = -100
        return {**super().__getitem__(index), "labels": labels}


def loss_of_tokens(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return this micro-batch's part of the mean over all tokens of a step."""
    logits = outputs.logits[:, :-1].transpose(1, 2)
    total = torch.nn.functional.cross_entropy(logits, labels[:, 1:], reduction="sum")
    return total / num_items_in_batch


class Labelled(Dataset[dict[str, torch.Tensor]]):
    """Sequences with one label each."""

    def __init__(self, count: int) -> None:
        self.tokens = Tokens(count).tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": torch.tensor(index % 2)}


class MeanLoss(Trainer):
    """Returns a mean that is not divided by the number of micro-batches."""

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Samples whose number is not known."""

    def __init__(self, count: int) -> None:
        self.data = Tokens(count)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self.data[index] for index in range(len(self.data)))


class TinyModel(GPT2LMHeadModel):
    """A random GPT-2 that records its training samples."""

    def forward(self, input_ids: Any = None, labels: Any = None, index: Any = None) -> Any:
        if self.training:
            _seen.extend(index.tolist())
        return super().forward(input_ids=input_ids, labels=labels)


def tiny_model(dropout: float = 0.0) -> TinyModel:
    torch.manual_seed(3)
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": 0.0}
    return TinyModel(
        GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2, **rates)
    )


def classifier() -> BertForSequenceClassification:
    """Return a random BERT; its ``forward`` takes any keywords."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(
        BertConfig(vocab_size=32, intermediate_size=16, max_position_embeddings=8, **sizes, **rates)
    )


def partitioned_model(folder: str, source: str) -> TinyModel:
    """Return a model as transformers makes it if ZeRO-3 is configured."""
    make = TinyModel.from_pretrained if source == "pretrained" else TinyModel._from_config
    model: TinyModel = make(
        folder if source == "pretrained" else GPT2Config.from_pretrained(folder)
    )
    assert all(hasattr(parameter, "ds_id") for parameter in model.parameters())
    return model


_CUTS = {"LinearLayer": 0, "LinearAllreduce": 1, "VocabParallelLinear": 0}
"""The dimension along which DeepSpeed cuts the weight of a layer for tensor ranks."""


def state_of(engine: Any, *, moments: bool = True) -> State:
    """Return all full masters, and Adam's moments, on rank 0. Collective."""
    found: State = {}
    states = engine.optimizer.optimizer.state.values() if moments else ()
    kept = {key for state in states for key in state}
    for name, parameter in engine.module.named_parameters():
        layer = engine.module.get_submodule(name.rpartition(".")[0])
        if parameter.requires_grad:
            values = {"master": safe_get_full_fp32_param(parameter)}
            for key in sorted({"exp_avg", "exp_avg_sq"} & kept):
                values[key] = _moment(engine, parameter, key)
            found |= {
                f"{name}/{key}": _joined(engine, layer, value.detach().cpu().clone())
                for key, value in values.items()
            }
    return found if dist.get_rank() == 0 else {}


def _joined(engine: Any, layer: Any, shard: torch.Tensor) -> torch.Tensor:
    """Return the shards of tensor ranks as one tensor; copies must be equal."""
    if engine.mp_world_size == 1:
        return shard
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, shard)
    first, cut = held[: engine.mp_world_size], _CUTS.get(type(layer).__name__)
    if cut is not None:
        return torch.cat(first, cut)
    assert all(torch.equal(each, shard) for each in held)
    return shard


def full_weight(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a full master; the weight itself if DeepSpeed does not wrap the optimizer."""
    is_wrapped = hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")
    full = safe_get_full_fp32_param(parameter) if is_wrapped else parameter
    return full.detach().cpu().clone()


def _moment(engine: Any, parameter: Any, key: str) -> torch.Tensor:
    """Return a full moment; DeepSpeed's function for ZeRO-1/2 supports one group only."""
    optimizer = engine.optimizer
    if hasattr(parameter, "ds_id"):
        moment: torch.Tensor = safe_get_full_optimizer_state(parameter, key)
        return moment
    full = torch.zeros(parameter.numel(), device=parameter.device)
    mapping = parameter._hp_mapping
    if mapping is not None:
        flat = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        held, place = mapping.hp_fragment_address, mapping.lp_fragment_address
        part = optimizer.optimizer.state[flat][key].narrow(0, held.start, held.numel)
        full.narrow(0, place.start, place.numel).copy_(part)
    dist.all_reduce(full, group=engine.seq_data_parallel_group)
    return full.view(parameter.shape)


def all_seen(tensor_ranks: int = 1) -> list[int]:
    """Return the sorted training samples of all data ranks since the last call. Collective.

    ``tensor_ranks`` share each of them.
    """
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, list(_seen))
    _seen.clear()
    samples = sorted(index for of_rank in gathered for index in of_rank)
    assert samples[::tensor_ranks] == samples[tensor_ranks - 1 :: tensor_ranks]
    return samples[::tensor_ranks]


class EpochSampler(Sampler[int]):
    """A user's sampler that seeds each epoch."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(self.count, generator=generator).tolist()


class EpochBatches(EpochSampler):
    """A user's batch sampler that seeds each epoch."""

    def __init__(self, count: int, batch_size: int) -> None:
        super().__init__(count)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return self.count // self.batch_size

    def __iter__(self) -> Iterator[Any]:
        order = [*super().__iter__()]
        for start in range(0, len(order), self.batch_size):
            yield order[start : start + self.batch_size]


class SampledBatches(EpochBatches):
    """Has a sampler without epochs, too, as subclasses of torch's ``BatchSampler``."""

    def __init__(self, count: int, batch_size: int) -> None:
        super().__init__(count, batch_size)
        self.sampler = SequentialSampler(range(count))


class SeededSampler(Sampler[int]):
    """A sampler that seeds itself once, as TRL's ``RepeatSampler``."""

    def __init__(self, count: int) -> None:
        self.count, self.generator = count, torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.count, generator=self.generator).tolist()


def sampler_of(kind: str, count: int) -> Any:
    """Return a user's sampler."""
    if kind == "seeded":
        return SeededSampler(count)
    if kind == "weighted":
        return WeightedRandomSampler([1.0 + index for index in range(count)], count)
    return EpochSampler(count)


@dataclass
class Run:
    """Observations of one rank during a run."""

    first_state: State = field(default_factory=dict)
    """State when training began: after the load, before the first step."""
    states: dict[int, State] = field(default_factory=dict)
    """States after the requested steps."""
    samples: dict[int, list[int]] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    draws: dict[int, float] = field(default_factory=dict)
    """The first random number after each step, read without advancing the generator."""
    log: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    shown: str = ""
    """Text on stderr that comes neither from a logger nor from a warning."""
    kept: list[set[str]] = field(default_factory=list)
    """The Trainer's folders after each save."""


@dataclass(frozen=True)
class TrainerCase:
    """A run of the Trainer."""

    output_dir: str
    stage: int = 3
    resume: str | bool | None = None
    stop_at: int | None = None
    state_at: tuple[int, ...] = ()
    bound: bool = True
    """Whether ``elastic`` is called."""
    samples: int = 96
    micro: tuple[int, int] | None = None
    args: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    dropout: float = 0.0
    draws: bool = False
    """Whether a callback draws a random number at the start of each step."""
    lora: bool = False
    evaluate: bool = False
    model_init: bool = False
    """Whether the Trainer makes the model, as sweeps require."""
    sampler: str = ""
    """A user's sampler: ``weighted``; ``epochs`` and both kinds of ``batches`` seed each epoch."""
    epoch_data: bool = False
    """Whether the data set has ``set_epoch``."""
    stream: bool = False
    """Whether the data set is iterable."""
    unequal: bool = False
    """Whether samples differ in length, and the loss is a mean over the tokens of a step."""
    sharded: bool = False
    """Whether ``get_train_dataloader`` returns a user's loader, not prepared by accelerate.

    Its ``DistributedSampler`` never gets an epoch.
    """
    classifier: bool = False
    """Whether the model is BERT, whose loss ignores the labels of the other ranks."""
    mean_loss: bool = False
    """Whether ``compute_loss`` returns the mean of a micro-batch, and no more."""
    epoch_ends_at: int = 0
    """Step at which a callback ends the epoch."""
    preempted_at: int = 0
    """Step in which ``enable_jit_checkpoint`` saves."""
    zero3_init: str = ""
    """The source of the model, partitioned from the start: ``pretrained`` or ``config``."""


def ds_config(stage: int, more: dict[str, Any]) -> dict[str, Any]:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # DeepSpeed allocates a whole bucket, and the ranks fill uninitialised memory with NaN.
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000},
    }
    zero = {**config["zero_optimization"], **more.get("zero_optimization", {})}  # type: ignore[dict-item]
    return {**config, **more, "zero_optimization": zero}


class Watch(TrainerCallback):
    """Records a Trainer's run."""

    def __init__(self, run: Run, case: TrainerCase) -> None:
        self.run, self.case = run, case
        self.trainer: Any = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        _seen.clear()
        if self.case.resume:
            self.run.first_state = state_of(self.trainer.model_wrapped)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self.case.draws:
            torch.rand(())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = state.global_step
        self.run.samples[step] = all_seen(self.trainer.model_wrapped.mp_world_size)
        self.run.rates[step] = self.trainer.optimizer.param_groups[0]["lr"]
        kept = torch.get_rng_state()
        self.run.draws[step] = float(torch.rand(()))
        torch.set_rng_state(kept)
        if step in self.case.state_at:
            self.run.states[step] = state_of(self.trainer.model_wrapped)

    def on_save(self, *_: Any, **__: Any) -> None:
        names = {path.name for path in Path(self.case.output_dir).glob("checkpoint-*")}
        self.run.kept.append(names)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in (logs or {}):
            self.run.losses[state.global_step] = logs["loss"]
        self.run.log.append({"step": state.global_step, **(logs or {})})


class EndEpoch(TrainerCallback):
    """Ends an epoch at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = state.global_step == self.step


class Preempt(TrainerCallback):
    """Has ``enable_jit_checkpoint`` save within a step, as SIGTERM does."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.trainer: Any = None

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 == self.step:
            for callback in self.trainer.callback_handler.callbacks:
                if type(callback).__name__ == "JITCheckpointCallback":
                    callback.jit_manager.is_checkpoint_requested = True


class Stop(TrainerCallback):
    """Ends a run like a kill, after a step and its save."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise StoppedError


def make_trainer(case: TrainerCase, run: Run, cls: type[Trainer] = Trainer) -> Any:
    """Return a Trainer for a case; on every rank."""
    use_gloo()
    micro, accumulate = case.micro or MICRO[dist.get_world_size()]
    args = {
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "lr_scheduler_type": "linear",
        "save_strategy": "steps",
        "save_steps": 5,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "seed": 11,
        "optim": "adamw_torch",
        "dataloader_pin_memory": False,
        "weight_decay": 0.01,
        **case.args,
    }
    pretrained = f"{case.output_dir}-pretrained"
    if case.zero3_init:  # before the arguments, which configure ZeRO-3
        tiny_model().save_pretrained(pretrained, is_main_process=dist.get_rank() == 0)
        dist.barrier()
    arguments = TrainingArguments(
        output_dir=case.output_dir,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulate,
        deepspeed=ds_config(case.stage, case.config),
        **args,
    )
    model: Any = (
        partitioned_model(pretrained, case.zero3_init)
        if case.zero3_init
        else tiny_model(case.dropout)
    )
    if case.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(4)
        model = get_peft_model(model, LoraConfig(target_modules=["c_attn"], r=2, lora_dropout=0.0))
    data: Any = EpochTokens(case.samples) if case.epoch_data else Tokens(case.samples)
    if case.stream or case.unequal:
        data = Stream(case.samples) if case.stream else UnequalTokens(case.samples)
    if case.classifier:
        model, data = classifier(), Labelled(case.samples)
    if case.mean_loss:
        model.accepts_loss_kwargs, cls = True, MeanLoss
    watch = Watch(run, case)
    preempts = [Preempt(case.preempted_at)] if case.preempted_at else []
    callbacks = [watch, *preempts, *([Stop(case.stop_at)] if case.stop_at else [])]
    trainer = cls(
        model=None if case.model_init else model,
        model_init=(lambda: tiny_model(case.dropout)) if case.model_init else None,
        args=arguments,
        train_dataset=data,
        compute_loss_func=loss_of_tokens if case.unequal else None,
        eval_dataset=type(data)(12) if case.evaluate else None,
        callbacks=[*callbacks, EndEpoch(case.epoch_ends_at)],
    )
    watch.trainer = trainer
    for preempt in preempts:
        preempt.trainer = trainer
    if case.sampler in {"batches", "sampled batches"}:
        kind = EpochBatches if case.sampler == "batches" else SampledBatches
        batches: Any = kind(case.samples, micro)
        trainer.get_train_dataloader = lambda: trainer.accelerator.prepare(
            DataLoader(data, batch_sampler=batches)
        )
    elif case.sampler:
        trainer._get_train_sampler = lambda *_: sampler_of(case.sampler, case.samples)
    if case.sharded:
        sampler: Any = DistributedSampler(data, dist.get_world_size(), dist.get_rank(), seed=5)
        trainer.get_train_dataloader = lambda: DataLoader(data, batch_size=micro, sampler=sampler)
    if case.bound:
        assert elastic(trainer, **case.options) is trainer
    return trainer


def train(case: TrainerCase) -> Run:
    """Run a Trainer to its end, or until it is stopped."""
    run = Run()
    with library_warnings() as run.warnings, redirect_stderr(io.StringIO()) as shown:
        train_to_end(make_trainer(case, run), case, run)
    run.shown = shown.getvalue()
    return run


def train_to_end(trainer: Any, case: TrainerCase, run: Run) -> Run:
    """Train, unless it is stopped before, and give the trainer up."""
    try:
        trainer.train(resume_from_checkpoint=case.resume)
        run.states[-1] = state_of(trainer.model_wrapped)
    except StoppedError:
        pass
    finally:
        if hasattr(trainer, "wait_for_save"):
            trainer.wait_for_save()
        close(trainer)
    return run


def train_twice(case: TrainerCase) -> tuple[Run, Run]:
    """Call ``train()`` twice on one Trainer; return the record of each call."""
    first, second = Run(), Run()
    trainer = make_trainer(case, first)
    trainer.train(resume_from_checkpoint=case.resume)
    watch_of(trainer).run = second
    trainer.train(resume_from_checkpoint=case.resume)
    close(trainer)
    return first, second


def train_after_stops(case: TrainerCase) -> tuple[list[str], list[str]]:
    """Stop, resume and stop, then begin again; return the warnings of the last two calls."""
    run = Run()
    trainer = make_trainer(case, run)
    with suppress(StoppedError):
        trainer.train()
    with library_warnings() as resumed, suppress(StoppedError):
        trainer.train(resume_from_checkpoint=True)
    trainer.remove_callback(Stop)
    with library_warnings() as fresh:
        trainer.train()
    close(trainer)
    return resumed, fresh


def search(case: TrainerCase) -> Run:
    """Run a sweep of two equal trials with Optuna; return the record of the second one."""
    run = Run()
    trainer = make_trainer(case, run)
    trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_categorical("rate", [0.01])},
        backend="optuna",
        n_trials=2,
        direction="minimize",
    )
    close(trainer)
    return run


def train_out_of_memory(case: TrainerCase, limit: int) -> Run:
    """Train a model for which larger micro-batches than a limit run out of memory."""
    run = Run()
    trainer = make_trainer(case, run)
    forward = trainer.model.forward

    def limited(input_ids: Any = None, labels: Any = None, index: Any = None) -> Any:
        if len(input_ids) > limit:
            _seen.clear()
            msg = "CUDA out of memory."
            raise RuntimeError(msg)
        return forward(input_ids=input_ids, labels=labels, index=index)

    trainer.model.forward = limited
    trainer.train(resume_from_checkpoint=case.resume)
    run.log.append({"engine": trainer.deepspeed.train_batch_size()})
    close(trainer)
    return run


def save_again(case: TrainerCase) -> tuple[list[list[str]], dict[str, torch.Tensor]]:
    """Save the model, again after deleting its folder, and again after doubling a weight.

    Returns:
        The names after each save, and the weight before the last two and in the last one.
    """
    trainer = make_trainer(case, Run())
    trainer.train()
    folder, found, weights = Path(case.output_dir, "final"), [], {}
    (name, weight), *_ = trainer.deepspeed.module.named_parameters()
    for change in ("delete", "double", ""):
        trainer.save_model(str(folder))
        found.append(sorted(path.name for path in folder.glob("*")))
        dist.barrier()
        if change == "delete" and dist.get_rank() == 0:
            shutil.rmtree(folder / "global_step1")
        if change == "double":
            weights["before"] = safe_get_full_fp32_param(weight).clone()
            safe_set_full_fp32_param(weight, 2 * weights["before"])
        dist.barrier()
    weights["saved"] = get_fp32_state_dict_from_zero_checkpoint(str(folder))[name]
    close(trainer)
    return found, weights


class Pushing(Trainer):
    """Uploads nothing, and notes the checkpoints that an upload would have found complete."""

    def init_hf_repo(self, token: str | None = None) -> None:
        self.pushed: list[bool] = []

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self.pushed.append(Path(checkpoint_folder, "latest").is_file())


def push(case: TrainerCase) -> list[bool]:
    """Train with uploads; return whether each folder was complete."""
    trainer = make_trainer(case, Run(), Pushing)
    trainer.train()
    trainer.wait_for_save()
    close(trainer)
    return list(trainer.pushed)


def save_after_failure(case: TrainerCase) -> list[str]:
    """Save the model after ``train()`` has raised; return the names that exist at once."""
    trainer = make_trainer(case, Run())
    with suppress(StoppedError):
        trainer.train()
    trainer.save_model(f"{case.output_dir}/final")
    found = [path.name for path in Path(case.output_dir, "final").glob("*")]
    close(trainer)
    return found


def train_by_own_method(case: TrainerCase) -> Run:
    """Train a subclass whose ``train()`` takes no arguments."""
    run = Run()
    trainer = make_trainer(case, run, NoArguments)
    trainer.resume = case.resume
    trainer.train()
    close(trainer)
    return run


def train_by_two_arguments(case: TrainerCase) -> Run:
    """Train a subclass whose ``train()`` takes the folder second."""
    run = Run()
    trainer = make_trainer(case, run, StepsFirst)
    trainer.train(100, case.resume)
    close(trainer)
    return run


class StepsFirst(Trainer):
    """A user's Trainer with an argument of its own."""

    def train(self, steps: int, resume_from_checkpoint: Any = None) -> Any:
        return super().train(resume_from_checkpoint=resume_from_checkpoint)


class NoArguments(Trainer):
    """A user's Trainer that chooses itself where to resume."""

    resume: Any = None

    def train(self) -> Any:
        return super().train(resume_from_checkpoint=self.resume)


def train_until_killed(case: TrainerCase, event: str, path: str, removals: int) -> None:
    """Train; rank 0 kills all ranks at an audit event of a path, and this many removals later."""
    trainer = make_trainer(case, Run())
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    begun: list[bool] = []
    removed: list[object] = []

    def watch(name: str, args: tuple[Any, ...]) -> None:
        if name == event and str(args[0]).startswith(f"{case.output_dir}/{path}"):
            begun.append(True)
        elif begun and name == "os.remove":
            removed.append(args[0])
        if begun and len(removed) == removals:
            for pid in reversed(pids):  # itself last
                os.kill(pid, signal.SIGKILL)

    if dist.get_rank() == 0:
        sys.addaudithook(watch)
    trainer.train(resume_from_checkpoint=case.resume)


class NoteManifests(TrainerCallback):
    """Notes the save of the engine's state in each folder, when the Trainer has saved it."""

    def __init__(self) -> None:
        self.found: dict[int, str] = {}

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = state.global_step
        for path in Path(args.output_dir, f"checkpoint-{step}").rglob("manifest.json"):
            self.found[step] = json.loads(path.read_text())["save_id"]


def engine_states_at_saves(case: TrainerCase) -> tuple[dict[int, str], dict[int, str]]:
    """Train; return the engine's state in each folder at its save, and in the end."""
    trainer, notes, later = make_trainer(case, Run()), NoteManifests(), NoteManifests()
    trainer.add_callback(notes)
    trainer.train(resume_from_checkpoint=case.resume)
    for step in notes.found:
        later.on_save(trainer.args, SimpleNamespace(global_step=step), None)
    close(trainer)
    return notes.found, later.found


_saved_in: list[str] = []


def saves(case: TrainerCase) -> tuple[list[str], list[str]]:
    """Train and save the model; return the folder of each save, and the files of the last one."""
    _watch_saves()
    _saved_in.clear()
    trainer = make_trainer(case, Run())
    trainer.train()
    trainer.save_model(f"{case.output_dir}/final")
    found = [path.name for path in Path(case.output_dir, "final").glob("*")]
    close(trainer)
    return _saved_in, found


@functools.cache
def _watch_saves() -> None:
    sys.addaudithook(_note_save)  # for as long as the process lives


def _note_save(event: str, args: tuple[Any, ...]) -> None:
    if event == "os.mkdir" and Path(args[0]).name.startswith(".zero-staging"):
        _saved_in.append(Path(args[0]).parent.name)


def is_freed(case: TrainerCase) -> bool:
    """Return whether a deleted Trainer is freed at once, without the garbage collector.

    Models that are created afterwards are then independent of its configuration of DeepSpeed.
    """
    run = Run()
    trainer = make_trainer(case, run)
    trainer.train()
    watch_of(trainer).trainer = None
    close(trainer)
    reference = weakref.ref(trainer)
    gc.disable()
    try:
        del trainer
        return reference() is None and deepspeed_config() is None
    finally:
        gc.enable()


def watch_of(trainer: Any) -> Watch:
    return next(c for c in trainer.callback_handler.callbacks if isinstance(c, Watch))


def failure_of(case: TrainerCase) -> str:
    """Run a Trainer that must fail; return its error on this rank."""
    return error_text(lambda: train(case))


def close(trainer: Any) -> None:
    """Destroy an engine, and reset accelerate's state."""
    engine = getattr(trainer, "deepspeed", None)
    if engine is not None:
        engine.destroy()
    trainer.accelerator.free_memory()
    trainer.model_wrapped = trainer.deepspeed = None
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    gc.collect()
