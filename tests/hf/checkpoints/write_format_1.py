"""Wrote `format_1`, on 2026-11-22: what `linearize` saved when its layer plans had `format_version` 1.

A decoder and an encoder with a mixer of another kind in every layer, and what they gave for `ids` in fp64. They stay as
they are, to be read by every later version; one that writes another format gets a folder and a script of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from linearize.configs.mixer import MixerConfig
from linearize.hf.convert import convert_layers
from tests.hf import encoders
from tests.hf.models import MIXERS, SPANS, Case, randomize_mixers

FOLDER = Path(__file__).parent / "format_1"
LOLCATS = Case("").recipe().mixer
WINDOW_ALONE = dict(span=SPANS["terraced"], feature_map=None, combine=dict(type="window_only"))
KINDS: dict[str, list[Any]] = {
    "decoder": [None, LOLCATS.model_dump(), *MIXERS.values(), WINDOW_ALONE],
    "encoder": [None, *encoders.MIXERS.values()],
}
SIZES = dict(hidden_size=8, intermediate_size=4, vocab_size=12, max_position_embeddings=32)


def write(name: str, teacher: PreTrainedModel) -> None:
    plan = tuple(None if kind is None else MixerConfig.model_validate(kind) for kind in KINDS[name])
    student = convert_layers(teacher.eval(), plan)
    randomize_mixers(student)
    student.save_pretrained(FOLDER / name)
    ids = torch.randint(1, 12, (2, 24))
    with torch.no_grad():
        logits = student.double()(ids).logits
    save_file(dict(ids=ids, logits=logits), FOLDER / name / "expected.safetensors")


if __name__ == "__main__":
    torch.manual_seed(0)
    decoder = LlamaConfig(
        **SIZES, num_hidden_layers=len(KINDS["decoder"]), num_attention_heads=2, num_key_value_heads=1
    )
    write("decoder", LlamaForCausalLM(decoder))
    encoder = BertConfig(**SIZES, num_hidden_layers=len(KINDS["encoder"]), num_attention_heads=2)
    write("encoder", BertForMaskedLM(encoder))
