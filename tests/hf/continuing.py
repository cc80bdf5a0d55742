"""A process that goes on with a conversation from files alone; run by `test_conversation`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import linearize

folder = Path(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
state = linearize.load_state(folder / "state.safetensors", model)
given = load_file(folder / "turn.safetensors")
with torch.no_grad():
    logits = model(given["ids"], attention_mask=given["mask"], past_key_values=state).logits
save_file({"logits": logits}, folder / "logits.safetensors")
