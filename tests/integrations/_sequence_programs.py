"""Programs of ranks that share sequences or a model under the Trainer and accelerate."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin, skip_first_batches
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
from torch.distributed.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
)
from transformers.integrations.deepspeed import deepspeed_sp_compute_loss
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightning_elastic_zero import elastic
from lightning_elastic_zero.integrations import tensor_ranks
from tests.integrations._hf_programs import (
    Run,
    Stop,
    Stream,
    Tokens,
    TrainerCase,
    Watch,
    _seen,
    all_seen,
    close,
    ds_config,
    library_warnings,
    seed_everything,
    state_of,
    train_to_end,
    use_gloo,
)
from tests.support.engines import forget_tensor_ranks
from tests.support.outcome import error_text


class Sequences(Tokens):
    """Sequences of random tokens, of which the first is the sample's index."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.tokens[:, 0] = torch.arange(count)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(len(tokens))}

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        """Read several samples, as the datasets of Hugging Face do."""
        return [self[index] for index in indices]


class RecordingForCausalLM(LlamaForCausalLM):
    """A random Llama that records its training samples where their sequences begin.

    transformers chooses the loss by the end of the name.
    """

    def forward(self, input_ids: Any = None, position_ids: Any = None, **inputs: Any) -> Any:
        if self.training and position_ids[0, 0] == 0:
            _seen.extend(input_ids[:, 0].tolist())
        return super().forward(input_ids=input_ids, position_ids=position_ids, **inputs)


EVALUATED = 7
"""Samples of an evaluation, which are not a multiple of its batches."""


def llama() -> RecordingForCausalLM:
    torch.manual_seed(3)
    return RecordingForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            attn_implementation="sdpa",
        )
    )


def shared_by(ranks: int) -> ParallelismConfig | None:
    """Return the configuration of sequence parallelism."""
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    options = {"sp_backend": "deepspeed", "sp_size": ranks, "sp_handler": handler}
    data_ranks = dist.get_world_size() // ranks
    return ParallelismConfig(dp_shard_size=data_ranks, **options) if ranks > 1 else None


def shared_config(case: SharedCase, **more: Any) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a run."""
    config = ds_config(case.stage, {**case.config, **more})
    if case.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": case.tensor}
        if case.stage == 3 and "train_batch_size" not in case.config:
            del config["train_batch_size"]
    return config


@contextmanager
def ulysses() -> Iterator[None]:
    """Let gloo exchange tensors in any group, and undo DeepSpeed's global changes."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    def scatter(out: Any, tensors: Any, source: int, group: Any) -> None:
        # torch passes the rank within the group as the rank of all.
        dist.scatter(out, tensors, group=group, group_src=source)

    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        with patch.object(functional, "dist", _Gloo(scatter)):
            yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
        forget_tensor_ranks()
        parallel_state_sp._SEQUENCE_PARALLEL_GROUP = None
        parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None


class _Gloo:
    """``torch.distributed`` with another ``scatter``."""

    def __init__(self, scatter: Any) -> None:
        self.scatter = scatter

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


@dataclass(frozen=True)
class SharedCase(TrainerCase):
    """A run in which ranks share sequences or a model; ``micro`` is required."""

    sequence: int = 1
    tensor: int = 1
    scale: float = 1.0
    """The factor by which the program multiplies its loss."""
    seq2seq: bool = False
    """Whether the Trainer is transformers' Seq2SeqTrainer, which ignores ``scale``."""


class Draws(TrainerCallback):
    """Draws random numbers in each step: each data rank another count."""

    def __init__(self, tensor_ranks: int) -> None:
        self.count = 1 + dist.get_rank() // tensor_ranks

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        torch.rand(self.count)


class Scaled(Trainer):
    """Multiplies its loss by a factor, in training."""

    scale = 1.0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return self.scale * loss if self.model.training else loss


def shared_trainer(case: SharedCase, run: Run) -> Any:
    """Return a Trainer that records its run."""
    use_gloo()
    micro, accumulate = case.micro or (1, 1)
    arguments = Seq2SeqTrainingArguments(
        output_dir=case.output_dir,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulate,
        deepspeed=shared_config(case),
        parallelism_config=shared_by(case.sequence),
        num_train_epochs=2,
        learning_rate=0.01,
        save_steps=1,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=11,
        dataloader_pin_memory=False,
        include_num_input_tokens_seen=True,
        max_grad_norm=100.0,
        **case.args,
    )
    watch = Watch(run, case)
    callbacks = [watch, Draws(case.tensor)]
    callbacks += [Stop(case.stop_at)] if case.stop_at else []
    make: Any = Seq2SeqTrainer if case.seq2seq else Scaled
    trainer = make(
        llama(),
        arguments,
        train_dataset=Sequences(case.samples),
        eval_dataset=Sequences(EVALUATED),
        callbacks=callbacks,
    )
    watch.trainer, trainer.scale = trainer, case.scale
    return elastic(trainer) if case.bound else trainer


def train_shared(case: SharedCase) -> Run:
    """Run a Trainer to its end, or until it is stopped."""
    run = Run()
    with ulysses(), library_warnings() as run.warnings, redirect_stderr(io.StringIO()) as shown:
        train_to_end(shared_trainer(case, run), case, run)
    run.shown = shown.getvalue()
    return run


class Noisy(Sequences):
    """Samples with a random token, drawn where they are read."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        noise = torch.randint(0, 32, (1,))
        return {**sample, "labels": torch.cat([noise, sample["labels"][1:]])}


def losses_of_noisy(case: SharedCase) -> dict[int, float]:
    """Train on samples that workers change; return the losses."""
    run = Run()
    with ulysses():
        trainer = shared_trainer(case, run)
        trainer.train_dataset = Noisy(case.samples)
        trainer.train()
        close(trainer)
    return run.losses


@dataclass(frozen=True)
class Results:
    """What a Trainer returns and writes after training."""

    run: Run
    weights: dict[str, torch.Tensor]
    """The masters that the model ended with."""
    predicted: list[int]
    """The samples of the predictions."""
    loss: float


def use_shared(case: SharedCase) -> Results:
    """Train, predict and save the model."""
    run = Run()
    with ulysses():
        trainer = shared_trainer(case, run)
        trainer.model.register_buffer("kept", torch.arange(3.0))
        trainer.train()
        predictions = trainer.predict(Sequences(EVALUATED))
        predicted = predictions.label_ids[:, 0].tolist()
        assert len(predictions.predictions) == len(predicted)
        trainer.save_model(f"{case.output_dir}/final")
        weights = {
            name.removesuffix("/master"): value
            for name, value in state_of(trainer.model_wrapped, moments=False).items()
        }
        close(trainer)
    return Results(run, weights, predicted, predictions.metrics["test_loss"])


def predicted_by(case: SharedCase) -> list[int]:
    """Train, and return the samples of predictions."""
    with ulysses():
        trainer = shared_trainer(case, Run())
        trainer.train()
        found: list[int] = trainer.predict(Sequences(EVALUATED)).label_ids[:, 0].tolist()
        close(trainer)
    return found


def loop_shared(case: SharedCase, start: int = 0) -> Run:
    """Train with accelerate's own loop from a step on; save after the steps ``state_at``.

    It never calls ``set_epoch``, and skips batches by accelerate's function.
    """
    use_gloo()
    seed_everything(7)
    run, (micro, accumulate) = Run(), case.micro or (1, 1)
    with ulysses(), library_warnings() as run.warnings:
        config = shared_config(case, train_micro_batch_size_per_gpu=micro)
        accelerator = elastic(
            Accelerator(
                deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
                gradient_accumulation_steps=accumulate,
                parallelism_config=shared_by(case.sequence),
                dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
            ),
        )
        model: Any = llama()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader: Any = DataLoader(Sequences(case.samples), batch_size=micro, shuffle=True)
        times = accelerator.num_processes
        schedule: Any = LambdaLR(optimizer, lambda step: 1.0 / (1 + step // times))
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        if case.resume:
            accelerator.load_state(str(case.resume))
            run.first_state = state_of(model)
        _seen.clear()
        per_epoch, step = len(loader) // accumulate, start
        losses: list[float] = []
        for epoch in range(start // per_epoch, 2):
            model.train()
            skipped = (step - epoch * per_epoch) * accumulate
            for batch in skip_first_batches(loader, skipped) if skipped else loader:
                with accelerator.accumulate(model):
                    loss = _loss(accelerator, model, batch)
                    accelerator.backward(case.scale * loss)
                    losses.append(float(accelerator.reduce(loss.detach(), "mean")))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if not accelerator.sync_gradients:
                    continue
                step += 1
                run.samples[step] = all_seen(case.tensor)
                run.losses[step], losses = sum(losses) / accumulate, []
                run.rates[step] = optimizer.param_groups[0]["lr"]
                if step in case.state_at:
                    run.states[step] = state_of(model)
                    accelerator.save_state(f"{case.output_dir}/step_{step}")
        model.destroy()
        accelerator.free_memory()
        AcceleratorState._reset_state(reset_partial_state=True)
    return run


def _loss(accelerator: Accelerator, model: Any, batch: Any) -> torch.Tensor:
    """Return the mean over all tokens of a micro-batch, as accelerate's guide computes it."""
    plan = accelerator.parallelism_config
    if plan is None:
        loss: torch.Tensor = model(**batch).loss
        return loss
    shared: torch.Tensor = deepspeed_sp_compute_loss(accelerator, model, batch, False, plan)
    return shared


def refused_cuts() -> list[str]:
    """Prepare runs with tensor parallelism that would be wrong; return the errors."""
    found = []
    cut = SharedCase("", stage=1, tensor=2)
    kinds: tuple[tuple[SharedCase, Any, dict[str, Any], Any], ...] = (
        (cut, Stream(4), {}, _prepare),
        (cut, Stream(4), {}, _prepare_first),
        (cut, Stream(4), {}, _prepare_alone),
        (cut, Sequences(4), {"split_batches": True}, _prepare),
        (replace(cut, sequence=2), Sequences(4), {}, _prepare),
        (replace(cut, tensor=3), Sequences(4), {}, _prepare),
        (replace(cut, stage=3, config={"train_batch_size": 4}), Sequences(4), {}, _prepare),
    )
    for case, data, options, prepare in kinds:
        use_gloo()
        with ulysses():
            config = shared_config(case, train_micro_batch_size_per_gpu=2)
            accelerator = Accelerator(
                deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
                parallelism_config=shared_by(case.sequence),
                dataloader_config=DataLoaderConfiguration(**options),
            )
            loader = DataLoader(data, batch_size=2)
            found.append(error_text(partial(prepare, accelerator, loader)))
            accelerator.free_memory()
            AcceleratorState._reset_state(reset_partial_state=True)
    return found


def refused_trainers(case: SharedCase) -> list[str]:
    """Make Trainers elastic that do not count data ranks; return the errors."""
    found = []
    with ulysses():
        trainer = shared_trainer(replace(case, bound=False), Run())
        with patch.object(tensor_ranks, "version_of", lambda _: "5.18.1"):
            found.append(error_text(partial(elastic, trainer)))
        trainer.args.train_sampling_strategy = "batch_rebalance"
        found.append(error_text(partial(elastic, trainer)))
        trainer.args.hf_deepspeed_config = None  # as accelerate launch leaves it
        found.append(error_text(partial(elastic, trainer)))
        close(trainer)
    return found


def _prepare(accelerator: Accelerator, *objects: Any) -> None:
    elastic(accelerator).prepare(*objects)


def _prepare_first(accelerator: Accelerator, *objects: Any) -> None:
    accelerator.prepare(*objects)
    elastic(accelerator)


def _prepare_alone(accelerator: Accelerator, loader: Any) -> None:
    elastic(accelerator).prepare_data_loader(loader)


def refused_loaders() -> list[str]:
    """Prepare loaders whose batches cannot be shared; return the errors."""
    found = []
    kinds: tuple[tuple[Any, dict[str, Any], Any], ...] = (
        (Stream(4), {}, _prepare),
        (Sequences(4), {"split_batches": True}, _prepare),
        (Sequences(4), {"even_batches": False}, _prepare),
        (Sequences(4), {}, _prepare_first),
    )
    for data, options, prepare in kinds:
        use_gloo()
        with ulysses():
            config = ds_config(1, {"train_micro_batch_size_per_gpu": 2})
            accelerator = Accelerator(
                deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
                parallelism_config=shared_by(dist.get_world_size()),
                dataloader_config=DataLoaderConfiguration(**options),
            )
            loader = DataLoader(data, batch_size=2)
            model = llama()
            optimizer = torch.optim.AdamW(model.parameters())
            found.append(error_text(partial(prepare, accelerator, model, optimizer, loader)))
            accelerator.free_memory()
            AcceleratorState._reset_state(reset_partial_state=True)
    return found
