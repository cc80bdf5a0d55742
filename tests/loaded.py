"""What a saved model gives, said by a process that knows of no model but by its folder; run by the tests.

Folders come in as lines of standard input, and for each a line of JSON goes out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel


def outputs(model: PreTrainedModel) -> dict[str, Any]:
    """Logits of fixed inputs, and the tokens that greedy generation adds to them where the model is a language model.

    Of a model without a head, the last hidden states take the place of logits.
    """
    network: Any = model
    config = model.config
    inputs = {"input_ids": torch.arange(40, 80)[None] % int(getattr(config, "vocab_size", None) or 1)}
    if size := getattr(config, "image_size", None):
        pixels = torch.arange(3 * size * size, dtype=torch.float32).view(1, 3, size, size)
        inputs = {"pixel_values": torch.sin(pixels)}
    language = "lm_head" in dict(model.named_children())
    with torch.no_grad():
        found = network(**inputs, **({"use_cache": False} if language else {}))
    values = found.last_hidden_state if found.get("logits") is None else found.logits
    generated = network.generate(**inputs, max_new_tokens=6, do_sample=False)[0, 40:].tolist() if language else []
    return {"class": type(model).__name__, "logits": values[0].tolist(), "generated": generated}


def load(folder: str) -> PreTrainedModel:
    """By the Auto class that the model's config names."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    auto_class = next(name for name in config["auto_map"] if name != "AutoConfig")
    return getattr(transformers, auto_class).from_pretrained(folder)


if __name__ == "__main__":
    import linearize  # noqa: F401  # registers the classes

    for line in sys.stdin:
        sys.stdout.write(json.dumps(outputs(load(line.strip()))) + "\n")
        sys.stdout.flush()
