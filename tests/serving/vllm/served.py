"""Tiny students in folders, what transformers generates with them, and what vLLM does."""

from __future__ import annotations

import atexit
import functools
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from linearize import Recipe
from linearize.configs.mixer import HeadwiseConfig, LayerPlan, MixerConfig
from linearize.configs.mixer_parts import EvictionCache, WindowOnly
from linearize.configs.spans import SlidingSpan, TerracedSpan
from linearize.hf.attention import linearized_layers
from linearize.hf.convert import convert_layers
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from tests.byte_tokenizer import CHATML, byte_tokenizer
from tests.tiny import VOCABULARY, llama

SIZES = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
NEW_TOKENS = 12
LAYERS = 3
LENGTHS = (1, 2, 5, 8, 9, 17, 31, 64, 100)


class Generated(NamedTuple):
    """New tokens, and the logarithm of each one's probability."""

    tokens: list[int]
    logprobs: list[float]


def window(size: int) -> MixerConfig:
    """A window alone."""
    return MixerConfig(span=SlidingSpan(window_size=size), feature_map=None, combine=WindowOnly())


def cached(size: int) -> MixerConfig:
    """A KV cache with eviction beside a window."""
    span = TerracedSpan(window_size=4)
    return MixerConfig(span=span, feature_map=None, combine=WindowOnly(), cache=EvictionCache(size=size))


def of_recipe(name: str, **overrides: Any) -> LayerPlan:
    """What a recipe makes of each layer of the teacher."""
    fields = {key.replace("__", "."): value for key, value in overrides.items()}
    return resolve(Recipe.load(name, fields), TeacherShape.from_config(teacher().config.to_dict()))


def of_needs() -> LayerPlan:
    """As `recommended` divides memory: every KV head has a window or a KV cache with eviction of its own size."""
    heads = [
        (window(6), cached(5)),
        (cached(9), cached(9)),
        (window(3),) * 2,
    ]
    return tuple(HeadwiseConfig.of(mixers) for mixers in heads)


def some_kept() -> LayerPlan:
    """One layer that stays softmax between two that do not."""
    plan = of_recipe("lolcats", mixer__span__window_size=8)
    return plan[0], None, plan[2]


def some_heads_kept() -> LayerPlan:
    """One KV head that stays softmax beside one that does not, on either side, and a layer of softmax heads alone."""
    mixer = of_recipe("lolcats", mixer__span__window_size=8)[0]
    assert isinstance(mixer, MixerConfig)
    gated = of_recipe("gla")[0]
    assert isinstance(gated, MixerConfig)
    return HeadwiseConfig.of((mixer, None)), HeadwiseConfig.of((None, gated)), None


@functools.cache
def plans() -> dict[str, LayerPlan]:
    """Of every kind of state that there is, by a name."""
    return {
        "lolcats": of_recipe("lolcats", mixer__span__window_size=8),
        "lolcats-terraced": of_recipe("lolcats-terraced", mixer__span__window_size=8),
        "recommended": of_needs(),
        "regla": of_recipe("regla", mixer__feature_map__feature_dim=32),
        "gla": of_recipe("gla"),
        "gated-deltanet": of_recipe("gated-deltanet"),
        "supra": of_recipe("supra"),
        "kept-layers": some_kept(),
        "kept-heads": some_heads_kept(),
    }


@functools.cache
def teacher() -> PreTrainedModel:
    return llama(layers=LAYERS, **SIZES)


def student(plan: LayerPlan, of: PreTrainedModel | None = None, moved: float = 0.3) -> PreTrainedModel:
    """A student whose mixers are not as they were initialised, no two maps or heads alike."""
    made = convert_layers(of or teacher(), plan).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in linearized_layers(made).values():
            for parameter in layer.mixer.parameters():
                parameter += moved * torch.randn(parameter.shape, generator=generator)
    return made


@functools.cache
def scratch() -> Path:
    folder = tempfile.mkdtemp(prefix="linearize-serving-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def saved(model: PreTrainedModel, name: str) -> str:
    """The model in a folder, with a tokenizer of bytes."""
    folder = scratch() / name
    if not folder.exists():
        model.save_pretrained(folder)
        byte_tokenizer(template=CHATML).save_pretrained(folder)
    return str(folder)


def prompts(count: int = 64, seed: int = 0, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Random tokens; few lengths, so that transformers can take those of one length together."""
    source = random.Random(seed)
    return [[source.randrange(VOCABULARY - 3) for _ in range(source.choice(lengths))] for _ in range(count)]


def by_transformers(
    model: PreTrainedModel, texts: Sequence[list[int]], new_tokens: int = NEW_TOKENS
) -> list[Generated]:
    """Greedy, with prompts of one length as one batch: nothing is padded."""
    found: dict[int, Generated] = {}
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for _, alike in groupby(order, key=lambda i: len(texts[i])):
        rows = list(alike)
        inputs = torch.tensor([texts[i] for i in rows])
        options = dict(max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        made: Any = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
        new = made.sequences[:, inputs.shape[1] :]
        logprobs = torch.stack(made.logits, dim=1).float().log_softmax(-1).gather(2, new[..., None])[..., 0]
        for row, tokens, its in zip(rows, new.tolist(), logprobs.tolist(), strict=True):
            found[row] = Generated(tokens, its)
    return [found[i] for i in range(len(texts))]


@contextmanager
def engine(folder: str, **options: Any) -> Iterator[LLM]:
    """vLLM in this process."""
    defaults: dict[str, Any] = dict(dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=64, seed=0)
    defaults |= dict(enable_prefix_caching=False, max_num_batched_tokens=4096, disable_log_stats=False)
    defaults |= dict(distributed_executor_backend="uni")
    try:
        llm = LLM(model=folder, **(defaults | options))
        yield llm
        llm.llm_engine.engine_core.shutdown()
    finally:
        cleanup_dist_env_and_memory()


def by_vllm(llm: LLM, texts: Sequence[list[int]], **options: Any) -> list[Generated]:
    """What the engine generates, greedy unless asked otherwise, all prompts handed over at once."""
    return [choices[0] for choices in choices_by_vllm(llm, texts, **options)]


def choices_by_vllm(llm: LLM, texts: Sequence[list[int]], **options: Any) -> list[list[Generated]]:
    """Likewise, with all of the n continuations of each prompt."""
    defaults = dict(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
    made = llm.generate(
        [{"prompt_token_ids": text} for text in texts], SamplingParams(**(defaults | options)), use_tqdm=False
    )
    return [[_generated(choice) for choice in its.outputs] for its in made]


def _generated(choice: Any) -> Generated:
    tokens = list(choice.token_ids)
    return Generated(tokens, [at[token].logprob for at, token in zip(choice.logprobs, tokens, strict=True)])


def differences(found: Sequence[Generated], expected: Sequence[Generated]) -> tuple[int, float]:
    """How many texts have other tokens, and how far a logarithm of a probability is off in the others."""
    wrong = [f.tokens != e.tokens for f, e in zip(found, expected, strict=True)]
    pairs = [pair for pair, bad in zip(zip(found, expected, strict=True), wrong, strict=True) if not bad]
    far = max((abs(a - b) for f, e in pairs for a, b in zip(f.logprobs, e.logprobs, strict=True)), default=0.0)
    return sum(wrong), far


def count(llm: LLM, name: str) -> int:
    """One of vLLM's own counters."""
    return int(sum(getattr(metric, "value", 0) for metric in llm.get_metrics() if metric.name == f"vllm:{name}"))
