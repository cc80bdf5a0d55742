"""What a saved model gives, said by a process that knows of no model but by its folder; run by the tests.

Folders come in as lines of standard input, and for each a line of JSON goes out.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def outputs(model: PreTrainedModel) -> dict[str, Any]:
    """Logits [T, V] of fixed tokens, and the tokens that greedy generation adds to them."""
    tokens, network = torch.arange(40, 80)[None], model  # more than fit into a test's window
    with torch.no_grad():
        logits = network(input_ids=tokens, use_cache=False).logits[0]
    generated: Any = model.generate(tokens, max_new_tokens=6, do_sample=False)  # type: ignore[operator]
    return {"class": type(model).__name__, "logits": logits.tolist(), "generated": generated[0, 40:].tolist()}


if __name__ == "__main__":
    import linearize  # noqa: F401  # registers the classes

    for line in sys.stdin:
        model = AutoModelForCausalLM.from_pretrained(line.strip())
        sys.stdout.write(json.dumps(outputs(model)) + "\n")
        sys.stdout.flush()
