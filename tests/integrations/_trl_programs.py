"""Programs of ranks that run TRL's SFTTrainer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from lightning_elastic_zero import elastic
from tests.integrations._hf_programs import (
    MICRO,
    Run,
    Stop,
    Tokens,
    TrainerCase,
    Watch,
    ds_config,
    library_warnings,
    train_to_end,
    use_gloo,
)


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "</s>": 1, **{str(number): number for number in range(2, 32)}}
    tokens = Tokenizer(WordLevel(words, unk_token="<pad>"))  # noqa: S106 (no password)
    tokens.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        pad_token="<pad>",  # noqa: S106 (no password)
        eos_token="</s>",  # noqa: S106 (no password)
    )


def _model() -> GPT2LMHeadModel:
    torch.manual_seed(3)
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2, **rates)
    )


def train(case: TrainerCase) -> Run:
    """Fine-tune to the end, or until the run is stopped."""
    run = Run()
    use_gloo()
    micro, accumulate = MICRO[dist.get_world_size()]
    arguments = SFTConfig(
        output_dir=case.output_dir,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulate,
        deepspeed=ds_config(case.stage, {}),
        num_train_epochs=2,
        learning_rate=0.01,
        lr_scheduler_type="linear",
        save_steps=5,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=11,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
    )
    rows = [{"input_ids": row.tolist()} for row in Tokens().tokens]
    adapters = LoraConfig(target_modules=["c_attn"], r=2, lora_dropout=0.0)
    watch = Watch(run, case)
    trainer: Any = SFTTrainer(
        model=_model(),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=_tokenizer(),
        peft_config=adapters if case.lora else None,
        callbacks=[watch, *([Stop(case.stop_at)] if case.stop_at else [])],
    )
    watch.trainer = trainer
    elastic(trainer)
    return train_to_end(trainer, case, run)


def train_online(case: TrainerCase) -> tuple[Run, list[list[str]]]:
    """Train by GRPO, with two steps per generation; return the prompts of each generation too."""
    run, generations = Run(), list[list[str]]()
    use_gloo()
    pretrained = f"{case.output_dir}-pretrained"
    if dist.get_rank() == 0:
        _model().save_pretrained(pretrained)
        _tokenizer().save_pretrained(pretrained)
    dist.barrier()

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, prompts)
        generations.append(sorted(prompt for of_rank in gathered for prompt in of_rank))
        return [float(len(completion)) for completion in completions]

    arguments = GRPOConfig(
        output_dir=case.output_dir,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        steps_per_generation=2,
        num_generations=2,
        max_completion_length=3,
        deepspeed=ds_config(case.stage, {}),
        max_steps=8,
        save_steps=1,
        report_to=[],
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        **case.args,
    )
    rows = [{"prompt": f"{number} {number + 1}"} for number in range(2, 18)]
    trainer: Any = GRPOTrainer(
        model=pretrained,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Stop(case.stop_at)] if case.stop_at else [],
    )
    elastic(trainer)
    with library_warnings() as run.warnings:
        train_to_end(trainer, case, run)
    return run, generations
