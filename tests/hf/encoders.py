"""Tiny random encoders and their students: fp64, attention far from uniform, mixers far from their initial values."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import linearize
from tests.hf.models import randomize_mixers

VOCABULARY = 60
PADDING = 1  # RoBERTa counts positions from behind this id
_TOKENS = dict(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, pad_token_id=PADDING)
_NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
_SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
_BERT = _TOKENS | _SIZES | _NO_DROPOUT | dict(max_position_embeddings=64)
_DISTILBERT = dict(dim=32, hidden_dim=48, n_layers=3, n_heads=4, max_position_embeddings=64)
_DISTILBERT |= dict(dropout=0.0, attention_dropout=0.0, qa_dropout=0.0, seq_classif_dropout=0.0)
_VIT = _SIZES | _NO_DROPOUT | dict(image_size=16, patch_size=4, encoder_stride=4, num_labels=3)
# Prefix of the class names, and the fields of the config. ModernBERT's middle layer is local, two tokens to each side.
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", _BERT),
    "roberta": ("Roberta", _BERT),
    "distilbert": ("DistilBert", _TOKENS | _DISTILBERT),
    "albert": ("Albert", _BERT | dict(embedding_size=16, num_hidden_groups=2, classifier_dropout_prob=0.0)),
    "modernbert": (
        "ModernBert",
        _TOKENS
        | _SIZES
        | dict(cls_token_id=None, sep_token_id=None, local_attention=4, max_position_embeddings=64)
        | dict(layer_types=["full_attention", "sliding_attention", "full_attention"]),
    ),
    "vit": ("ViT", _VIT),
    "deit": ("DeiT", _VIT),
    "dinov2": ("Dinov2", {k: v for k, v in _VIT.items() if k not in ("intermediate_size", "encoder_stride")}),
}
TEXT = ("bert", "roberta", "distilbert", "albert", "modernbert")
VISION = ("vit", "deit", "dinov2")
_LINEAR = dict(span=dict(type="none"), combine=dict(type="add"))
# Mixers that between them ask for all that an encoder's layer can hand them.
MIXERS: dict[str, dict[str, Any]] = {
    "hedgehog": _LINEAR | dict(feature_map=dict(type="hedgehog", bias=True)),
    "lolcat": _LINEAR | dict(feature_map=dict(type="lolcat", per="kv_head", activation="exp")),
    "elu": _LINEAR | dict(feature_map=dict(type="elu1")),
    "unrotated": _LINEAR
    | dict(
        feature_map=dict(type="t2r", rotation="after", per="query_head"),
        scale="head_dim",
        normalizer=dict(type="rms_norm", output_gate=True),
    ),
}


@dataclass(frozen=True)
class Case:
    """An encoder and how it is converted: to a mixer of `MIXERS`; `teacher` are fields of its config."""

    architecture: str
    mixer: str = "hedgehog"
    keep_softmax: tuple[int, ...] = ()
    convert_sliding: bool = True
    head: str = "Model"
    teacher: dict[str, Any] = field(default_factory=dict, hash=False)

    def recipe(self) -> linearize.Recipe:
        fields = {"layers.keep_softmax": self.keep_softmax, "layers.convert_sliding": self.convert_sliding}
        return linearize.Recipe.load("hedgehog", fields | {"mixer": MIXERS[self.mixer]})


def make_encoder(architecture: str, head: str = "Model", **fields: Any) -> PreTrainedModel:
    """A new fp64 encoder in eval mode, the same weights every time."""
    prefix, defaults = ENCODERS[architecture]
    config = getattr(transformers, f"{prefix}Config")(**(defaults | fields))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, prefix + head)(config).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.4)
                else:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


_teachers = functools.cache(lambda name, head, fields: make_encoder(name, head, **dict(fields)))


def teacher_of(case: Case) -> PreTrainedModel:
    """The teacher of `case`, made once: not to be changed."""
    return _teachers(case.architecture, case.head, tuple(case.teacher.items()))


def make_student(case: Case) -> PreTrainedModel:
    """A new student in eval mode with random mixers, so that no two maps or heads are alike."""
    student = linearize.convert(teacher_of(case), case.recipe()).eval()
    randomize_mixers(student)
    return student


student_of = functools.cache(make_student)  # made once: not to be changed


def random_ids(*shape: int, seed: int = 0) -> Tensor:
    """Token ids, never the padding token."""
    return torch.randint(2, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def images(count: int, size: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed)).double()


def padded(architecture: str, lengths: list[int], width: int, *, left: bool = False) -> dict[str, Tensor]:
    """Rows of random tokens of these lengths, padded to `width`; the same tokens whatever the padding.

    Positions are given, because learned ones count from the start of the row otherwise.
    """
    mask = torch.stack([torch.arange(width) < length for length in lengths]).long()
    ids = torch.stack([random_ids(width, seed=row) for row in range(len(lengths))])
    if left:
        shifts = [width - length for length in lengths]
        mask, ids = (torch.stack([r.roll(s) for r, s in zip(x, shifts, strict=True)]) for x in (mask, ids))
    ids = ids.where(mask.bool(), PADDING)
    first = PADDING + 1 if architecture == "roberta" else 0
    return dict(input_ids=ids, attention_mask=mask, position_ids=first + (mask.cumsum(1) - 1).clamp_min(0))


def inputs_of(architecture: str) -> dict[str, Tensor]:
    """A small batch, of text with padding."""
    if architecture in VISION:
        return dict(pixel_values=images(3))
    return padded(architecture, [12, 7, 10], 12)


def hidden_states(model: PreTrainedModel, **inputs: Tensor) -> Tensor:
    """Of the base model, [B, T, E]."""
    with torch.no_grad():
        return model.base_model(**inputs).last_hidden_state
