"""Tiny random teachers and their students: fp64, attention far from uniform, mixers far from their initial values."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

import linearize
from linearize.hf.attention import linearized_layers
from linearize.hf.teacher import TeacherShape
from tests.hf.decoders import DECODERS, EXACT

VOCABULARY = 60
LAYERS = 3
_TOKENS = dict(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, pad_token_id=0)
_ROPE = _TOKENS | dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
_GPT2 = _TOKENS | dict(n_embd=32, n_layer=LAYERS, n_head=4, n_positions=256)
_NO_DROPOUT = dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, summary_first_dropout=0.0)
# Prefix of the class names, and the fields of the config.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _ROPE),
    "mistral": ("Mistral", _ROPE | dict(sliding_window=None)),
    "qwen3": ("Qwen3", _ROPE | dict(head_dim=8)),
    "gpt2": ("GPT2", _GPT2 | _NO_DROPOUT),
}
SPANS: dict[str, dict[str, Any]] = {
    "none": dict(type="none"),
    "sliding": dict(type="sliding", window_size=6),
    "sinks": dict(type="sliding", window_size=5, sinks=2),
    "terraced": dict(type="terraced", window_size=4, blocks=2, sinks=1),
}
_RMS = dict(type="rms_norm")
# Mixers that between them ask for everything that a layer can hand them, with every kind of state and of parameter.
MIXERS: dict[str, dict[str, Any]] = {
    "supra": dict(
        span=SPANS["none"],
        feature_map=dict(type="t2r", rotation="after", per="model", init="linear"),
        decay=dict(type="fixed"),
        scale="head_dim",
        normalizer=dict(type="group_norm"),
        combine=dict(type="add"),
    ),
    "gla": dict(
        span=SPANS["none"],
        feature_map=dict(type="identity", rotation="none"),
        decay=dict(type="feature", rank=3),
        scale="head_dim",
        normalizer=_RMS | dict(output_gate=True),
        combine=dict(type="add"),
    ),
    "regla": dict(
        span=SPANS["none"],
        feature_map=dict(type="regla", feature_dim=12, per="kv_head"),
        decay=dict(type="refined"),
        scale="regla",
        normalizer=_RMS,
        combine=dict(type="add"),
    ),
    "rfa": dict(
        span=SPANS["none"],
        feature_map=dict(type="rfa", rotation="none", feature_dim=12),
        decay=dict(type="scalar"),
        combine=dict(type="add"),
    ),
    "cosformer": dict(span=SPANS["sliding"], feature_map=dict(type="cosformer")),
    "performer": dict(span=SPANS["sinks"], feature_map=dict(type="performer", feature_dim=11, rotation="none")),
    "gated-delta": dict(
        span=SPANS["terraced"],
        feature_map=dict(type="identity", rotation="after"),
        decay=dict(type="scalar", input_scale=False),
        update=dict(type="delta"),
        normalizer=_RMS,
        combine=dict(type="add"),
    ),
    "mix": dict(
        span=SPANS["sliding"],
        feature_map=dict(type="lolcat", rotation="none", per="kv_head"),
        decay=dict(type="scalar"),
        combine=dict(type="mix"),
    ),
    "fast-decay": dict(
        span=SPANS["sinks"],
        feature_map=dict(type="elu1", rotation="after"),
        decay=dict(type="outer"),
        normalizer=dict(type="none"),
        combine=dict(type="mix"),
    ),
}


@dataclass(frozen=True)
class Case:
    """A teacher and how it is converted, to LoLCATs or to a mixer of `MIXERS`; `teacher` are fields of its config."""

    name: str
    architecture: str = "llama"
    span: str = "sliding"
    per: str = "query_head"
    window_only: bool = False
    keep_softmax: tuple[int, ...] = ()
    convert_sliding: bool = False
    teacher: dict[str, Any] = field(default_factory=dict, hash=False)
    overrides: dict[str, Any] = field(default_factory=dict, hash=False)
    mixer: str | None = None

    def recipe(self) -> linearize.Recipe:
        fields = {"layers.keep_softmax": self.keep_softmax, "layers.convert_sliding": self.convert_sliding}
        if self.mixer is None:
            fields |= {"mixer.span": dict(SPANS[self.span]), "mixer.feature_map.per": self.per}
        else:
            fields |= {"mixer": MIXERS[self.mixer]}
        if self.window_only:
            fields |= {"mixer.feature_map": None, "mixer.combine": dict(type="window_only")}
        return linearize.Recipe.load("lolcats", fields | self.overrides)


CASES = [
    Case("llama-none", span="none", per="kv_head"),
    Case("llama-sliding"),
    Case("llama-sinks", span="sinks", per="kv_head"),
    Case("llama-terraced", span="terraced"),
    Case("llama-window-only", span="terraced", window_only=True),
    Case("llama-mixed", keep_softmax=(1,)),
    Case("mistral-terraced", "mistral", span="terraced", per="kv_head"),
    Case("qwen3-sinks", "qwen3", span="sinks"),
    Case("gpt2-sliding", "gpt2"),
    Case("gpt2-mixed", "gpt2", span="none", keep_softmax=(0, -1)),
]
# Every mixer on every architecture, two layers each.
_DEPTH = {name: {"n_layer" if name == "gpt2" else "num_hidden_layers": 2} for name in ARCHITECTURES}
MIXER_CASES = [
    Case(f"{name}-{architecture}", architecture, mixer=name, teacher=_DEPTH[architecture])
    for name in MIXERS
    for architecture in ARCHITECTURES
]
# Softmax layers that slide stay beside linearized ones: by their own choice (Qwen3), or because they are told to.
SLIDING_TEACHERS = [
    Case("qwen3-sliding-kept", "qwen3", teacher=dict(use_sliding_window=True, sliding_window=8, max_window_layers=2)),
    Case("mistral-sliding-kept", "mistral", convert_sliding=True, keep_softmax=(1,), teacher=dict(sliding_window=8)),
]
# KV heads of one layer with mixers of their own: softmax, side by side and not, windows, KV caches with eviction.
_WINDOW_ONLY = dict(feature_map=None, combine=dict(type="window_only"))
_CACHE = _WINDOW_ONLY | dict(span=dict(type="terraced", window_size=4, blocks=2), cache=dict(size=5))
_SHORT = _WINDOW_ONLY | dict(span=dict(type="sliding", window_size=3))
HEADS = [
    dict(kv_heads=["0.1", "1.0"], mixer=None),
    dict(kv_heads=["1.1"], mixer=_SHORT),
    dict(kv_heads=["2.0"], mixer=_CACHE),
]
_REST = dict(feature_map=dict(type="hedgehog", activation="exp"), combine=dict(type="absolute_scale"))
SCATTERED = [dict(kv_heads=["0.0", "0.2", "2.3"], mixer=None), dict(kv_heads=["1.1", "1.3"], mixer=_CACHE)]
HEAD_CASES = [
    Case("llama-heads", overrides={"heads": HEADS}),
    Case("qwen3-heads", "qwen3", span="terraced", overrides={"heads": HEADS}, keep_softmax=()),
    Case("gpt2-heads", "gpt2", span="sinks", overrides={"heads": SCATTERED}),
    Case("llama-cache", overrides={"mixer": _CACHE | dict(span=SPANS["terraced"])}),
    Case("llama-cache-linear", overrides={"mixer": _CACHE | _REST}),
    Case("mistral-cache", "mistral", overrides={"mixer": _CACHE | dict(cache=dict(size=7))}),
]


def headwise(architecture: str) -> Case:
    """In the first layer a head with an eviction cache, and one that keeps all keys where there is another one."""
    last = TeacherShape.from_config(teacher_of(Case("", architecture)).config.to_dict()).num_kv_heads - 1
    kinds = {"0.0": _CACHE} | ({f"0.{last}": None} if last else {})
    heads = [dict(kv_heads=[name], mixer=mixer) for name, mixer in kinds.items()]
    return Case(f"{architecture}-some-heads", architecture, overrides={"heads": heads})


CASE = {case.name: case for case in CASES + MIXER_CASES + SLIDING_TEACHERS + HEAD_CASES}


def make_teacher(architecture: str, head: str = "ForCausalLM", **fields: Any) -> PreTrainedModel:
    """A new fp64 teacher in eval mode, the same weights every time."""
    model_type, defaults = DECODERS.get(architecture) or (architecture, ARCHITECTURES[architecture][1])
    config = CONFIG_MAPPING[model_type](**(defaults | fields))
    model_class = getattr(transformers, "AutoModel" + head.removeprefix("Model"))._model_mapping[type(config)]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config).double().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.4)
                else:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
                if name.endswith(("q_norm.weight", "k_norm.weight", "q_layernorm.weight", "k_layernorm.weight")):
                    parameter.mul_(2)  # normalised queries and keys are short
    if getattr(config, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation(EXACT)
    return model


def make_student(case: Case, teacher: PreTrainedModel) -> PreTrainedModel:
    """A new student in eval mode with random mixers, so that no two maps or heads are alike."""
    student = linearize.convert(teacher, case.recipe()).eval()
    randomize_mixers(student)
    return student


@torch.no_grad()
def randomize_mixers(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for layer in linearized_layers(model).values():
        for parameter in layer.mixer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.7)


_teachers = functools.cache(lambda architecture, fields: make_teacher(architecture, **dict(fields)))


def teacher_of(case: Case) -> PreTrainedModel:
    """The teacher of `case`, made once: not to be changed."""
    return _teachers(case.architecture, tuple(case.teacher.items()))


@functools.cache
def student_of(case: Case) -> PreTrainedModel:
    """The student of `case`, made once: not to be changed."""
    return make_student(case, teacher_of(case))


def random_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Token ids, never the padding token."""
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))
