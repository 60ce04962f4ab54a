"""Programs of ranks that run TRL's SFTTrainer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from lightning_elastic_zero import elastic
from tests.integrations._hf_programs import (
    MICRO,
    Run,
    Stop,
    Tokens,
    TrainerCase,
    Watch,
    ds_config,
    train_to_end,
    use_gloo,
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
    words = {"<pad>": 0, "</s>": 1, **{str(number): number for number in range(2, 32)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")),  # noqa: S106 (no password)
        pad_token="<pad>",  # noqa: S106 (no password)
        eos_token="</s>",  # noqa: S106 (no password)
    )
    torch.manual_seed(3)
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2, **rates)
    )
    adapters = LoraConfig(target_modules=["c_attn"], r=2, lora_dropout=0.0)
    watch = Watch(run, case)
    trainer: Any = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=adapters if case.lora else None,
        callbacks=[watch, *([Stop(case.stop_at)] if case.stop_at else [])],
    )
    watch.trainer = trainer
    elastic(trainer)
    return train_to_end(trainer, case, run)
