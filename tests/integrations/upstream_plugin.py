"""A pytest plugin under which tests of transformers and accelerate run with DeepSpeed on CPU ranks.

``test_upstream.py`` starts it. With ``UPSTREAM_ELASTIC=1`` it applies ``elastic`` to every Trainer
and Accelerator with DeepSpeed. It passes decorators that skip tests without an accelerator, and
gives names of the hub to random models of the same architecture. It changes no assertion.
"""

from __future__ import annotations

import functools
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODELS = "UPSTREAM_MODELS"
"""Environment variable: folder of the random models."""

ELASTIC = "UPSTREAM_ELASTIC"
"""Environment variable: whether ``elastic`` is applied."""

RANKS = 2
"""Ranks of tests that query the number of devices."""

WORDS = [f"{chr(97 + i % 26)}{i}" for i in range(64)]
CHARACTERS = [chr(code) for code in range(32, 127)]


def pytest_configure() -> None:
    """Prepare this process, and those that tests start."""
    folder = Path(tempfile.mkdtemp(prefix="upstream-"))
    os.environ[MODELS] = str(folder / "models")
    make_models(folder / "models")
    (folder / "sitecustomize.py").write_text(
        'import os\nif "LOCAL_RANK" in os.environ:\n    __import__("upstream_plugin").apply()\n'
    )
    paths = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    apply()
    pass_decorators()


def apply() -> None:
    """Let accelerate run DeepSpeed on CPU ranks, and apply ``elastic`` if asked to."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    original = PartialState._prepare_backend

    def prepare_backend(self: object, *args: Any, **kwargs: Any) -> Any:
        if "LOCAL_RANK" in os.environ:
            return "gloo", DistributedType.MULTI_CPU
        return original(self, *args, **kwargs)

    PartialState._prepare_backend = prepare_backend
    mend_deepspeed()
    use_local_models(Path(os.environ[MODELS]))
    if os.environ.get(ELASTIC) == "1":
        apply_elastic()


def mend_deepspeed() -> None:
    """Make DeepSpeed accept scalar parameters and a warmup of 0 steps, as it did before."""
    import torch
    import transformers
    from deepspeed.runtime.lr_schedules import WarmupLR

    view, warmup = torch.Tensor.view, WarmupLR.__init__

    def view_scalar(tensor: Any, *shape: Any, **kwargs: Any) -> Any:
        scalar_as_bytes = shape == (torch.uint8,) and not tensor.dim()  # refused by torch
        return view(view(tensor, 1) if scalar_as_bytes else tensor, *shape, **kwargs)

    def init_warmup(schedule: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("warmup_num_steps") == 0:
            kwargs["warmup_num_steps"] = 2  # as DeepSpeed did
        warmup(schedule, *args, **kwargs)

    torch.Tensor.view = view_scalar  # type: ignore[assignment]  # of the overloads, one
    WarmupLR.__init__ = functools.wraps(warmup)(init_warmup)
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True


def apply_elastic() -> None:
    """Wrap the constructors of Trainer and Accelerator."""
    import transformers
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    from lightning_elastic_zero import elastic

    making_trainer: list[object] = []

    def of_trainer(trainer: Any) -> None:
        if trainer.is_deepspeed_enabled:
            elastic(trainer)

    def of_accelerator(accelerator: Any) -> None:
        if accelerator.distributed_type == DistributedType.DEEPSPEED and not making_trainer:
            elastic(accelerator)

    def wrap(cls: Any, name: str, then: Callable[[Any], None], *, of: bool = False) -> None:
        original = getattr(cls, name)

        @functools.wraps(original)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
            if of:
                making_trainer.append(self)
            try:
                original(self, *args, **kwargs)
            finally:
                if of:
                    making_trainer.pop()
            then(self)

        setattr(cls, name, wrapped)

    wrap(Accelerator, "__init__", of_accelerator)
    wrap(transformers.Trainer, "__init__", of_trainer, of=True)
    wrap(transformers.Trainer, "create_accelerator_and_postprocess", lambda _: None, of=True)


def pass_decorators() -> None:
    """Run tests that require one or several accelerators."""
    import accelerate.test_utils.testing as of_accelerate
    import transformers.testing_utils as of_transformers

    def same(test: Any) -> Any:
        return test

    for name in ("require_torch_accelerator", "require_torch_multi_accelerator"):
        setattr(of_transformers, name, same)
    of_transformers.BACKEND_DEVICE_COUNT["cpu"] = lambda: RANKS
    for name in ("require_non_cpu", "require_multi_device"):
        setattr(of_accelerate, name, same)


# -- models ----------------------------------------------------------------------------------------


def make_models(folder: Path) -> None:
    """Save random models and tokenizers under the names of the hub that tests use."""
    import torch
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "</s>", "<|endoftext|>"]

    def tokenizer(path: Path) -> int:
        words = {word: place for place, word in enumerate([*special, *WORDS, *CHARACTERS])}
        inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))  # noqa: S106
        inner.pre_tokenizer = pre_tokenizers.Whitespace()
        hf.PreTrainedTokenizerFast(
            tokenizer_object=inner,
            pad_token="[PAD]",  # noqa: S106
            unk_token="[UNK]",  # noqa: S106
            eos_token="</s>",  # noqa: S106
            model_max_length=64,
        ).save_pretrained(path)
        return len(words)

    def save(name: str, make: Callable[[int], Any]) -> None:
        path = folder / name.replace("/", "--")
        path.mkdir(parents=True)
        torch.manual_seed(0)
        make(tokenizer(path)).save_pretrained(path)

    def gpt2(_: int) -> Any:
        return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=32))

    for name in ("sshleifer/tiny-gpt2", "hf-internal-testing/tiny-random-gpt2", "gpt2"):
        save(name, gpt2)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    for name in ("bert-base-cased", "distilbert-base-uncased"):
        save(
            name,
            lambda size: hf.BertForSequenceClassification(
                hf.BertConfig(vocab_size=size, num_attention_heads=2, **small)
            ),
        )
    save(
        "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5",
        lambda size: hf.Qwen2ForCausalLM(hf.Qwen2Config(vocab_size=size, **small, **heads)),
    )
    experts = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    save(
        "peft-internal-testing/tiny-random-qwen-1.5-MoE",
        lambda size: hf.Qwen2MoeForCausalLM(
            hf.Qwen2MoeConfig(
                vocab_size=size,
                num_experts=4,
                num_experts_per_tok=2,
                decoder_sparse_step=1,
                **experts,
                **small,
                **heads,
            )
        ),
    )
    save("apple/mobilevit-xx-small", lambda _: hf.MobileViTConfig())
    t5 = "patrickvonplaten/t5-tiny-random"
    save(
        t5,
        lambda _: hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=200,
                d_model=8,
                d_kv=4,
                d_ff=8,
                num_layers=1,
                num_heads=2,
                decoder_start_token_id=0,
            )
        ),
    )
    if int(hf.__version__.partition(".")[0]) >= 5:
        pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
        pieces += [(character, -3.0) for character in CHARACTERS[1:]]
        hf.T5Tokenizer(vocab=pieces, extra_ids=0).save_pretrained(folder / t5.replace("/", "--"))


def use_local_models(folder: Path) -> None:
    """Let ``from_pretrained`` find the random models by the hub's names."""
    import transformers as hf
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    def wrap(cls: Any) -> None:
        original = vars(cls)["from_pretrained"].__func__

        @functools.wraps(original)
        def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
            local = folder / str(name).replace("/", "--")
            return original(cls, str(local) if local.is_dir() else name, *args, **kwargs)

        cls.from_pretrained = classmethod(from_pretrained)

    config = getattr(hf, "PreTrainedConfig", None) or hf.PretrainedConfig
    for cls in (
        _BaseAutoModelClass,
        hf.AutoConfig,
        hf.PreTrainedModel,
        config,
        hf.PreTrainedTokenizerBase,
    ):
        wrap(cls)
    tokenizer = hf.AutoTokenizer.from_pretrained

    def of_tokenizer(name: Any, *args: Any, **kwargs: Any) -> Any:
        local = folder / str(name).replace("/", "--")
        return tokenizer(str(local) if local.is_dir() else name, *args, **kwargs)

    hf.AutoTokenizer.from_pretrained = of_tokenizer
    use_local_data()


def use_local_data() -> None:
    """Give pairs of random words for GLUE's MRPC, and its accuracy without a download."""
    try:
        import datasets
        import evaluate
    except ImportError:
        return

    def pairs(count: int, seed: int) -> Any:
        draw = random.Random(seed)
        rows = []
        for index in range(count):
            label = draw.randrange(2)
            words = WORDS[:32] if label else WORDS[32:]
            rows.append(
                {
                    "sentence1": " ".join(draw.choices(words, k=8)),
                    "sentence2": " ".join(draw.choices(words, k=8)),
                    "label": label,
                    "idx": index,
                }
            )
        return datasets.Dataset.from_list(rows)

    load = datasets.load_dataset

    def load_dataset(name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in ("glue", "nyu-mll/glue"):
            return load(name, *args, **kwargs)
        return datasets.DatasetDict({"train": pairs(256, 1), "validation": pairs(64, 2)})

    class Accuracy:
        def __init__(self) -> None:
            self.hits: list[bool] = []

        def add_batch(self, predictions: Any, references: Any) -> None:
            self.hits += (predictions == references).tolist()

        def compute(self) -> dict[str, float]:
            hits, self.hits = self.hits, []
            return {"accuracy": sum(hits) / len(hits)}

    datasets.load_dataset = load_dataset
    evaluate.load = lambda *_, **__: Accuracy()
