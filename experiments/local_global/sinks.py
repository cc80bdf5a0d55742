"""Measure what windows lose by the kind of sink beside them, without training.

    python experiments/local_global/sinks.py --model HuggingFaceTB/SmolLM2-135M-Instruct --text text.txt \
        --full 7 8 17 18 20 23 --json sinks.json

KL from the teacher in nats per token, behind the first window: over texts of at most 640 tokens, and over their
repetition, for which the teacher is asked.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from linearize.base import progress
from linearize.data.rows import PackedRows
from linearize.hf.convert import convert_layers
from linearize.training.eviction_scores import LONGEST, REQUEST, contexts
from linearize.training.learned_sinks import SINK_CONTEXTS, LearnedSinks, measure_first_tokens
from linearize.training.memory import layer_mixer


def students(teacher: PreTrainedModel, full: list[int], window: int, texts: list[list[int]]) -> dict[str, Any]:
    """Return the students by the name of their sinks."""
    layers = teacher.config.num_hidden_layers

    def student(sinks: int, learned: bool) -> PreTrainedModel:
        mixer = layer_mixer(window, sinks, learned_sink=learned)
        return convert_layers(teacher, tuple(None if i in full else mixer for i in range(layers))).eval()

    measured = measure_first_tokens(student(0, learned=True), texts, window)
    zeros = {layer: [[0.0] * len(head) for head in heads] for layer, heads in measured.values.items()}
    found = {"none": student(0, learned=False), "the first token, kept exactly": student(1, learned=False)}
    for name, of_sinks in (("learned logit, no value", zeros), ("learned logit and value", measured.values)):
        found[name] = student(0, learned=True)
        LearnedSinks(logits=measured.logits, values=of_sinks).apply(found[name])
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="hub id or folder")
    parser.add_argument("--text", type=Path, required=True, help="a text file")
    parser.add_argument("--full", type=int, nargs="+", required=True, help="layers with full attention")
    parser.add_argument("--window", type=int, default=64, help="tokens of the other layers (default: %(default)s)")
    parser.add_argument("--texts", type=int, default=2, help="that are compared (default: %(default)s)")
    parser.add_argument("--json", type=Path, required=True, help="where results are written")
    arguments = parser.parse_args()
    teacher = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(arguments.model)
    ids = torch.tensor([tokenizer(arguments.text.read_text(encoding="utf-8")[:500_000]).input_ids])
    rows = PackedRows(ids, torch.arange(ids.shape[1])[None], ids)
    request = tokenizer(REQUEST, add_special_tokens=False).input_ids
    texts = list(contexts(rows, tokenizer, longest=LONGEST, seed=0, count=SINK_CONTEXTS))
    models = students(teacher, arguments.full, arguments.window, texts)
    totals = {name: [0.0, 0.0] for name in models}
    for text in progress(texts[: arguments.texts], "texts"):
        both = torch.tensor([text + request + text])
        expected = teacher(input_ids=both, use_cache=False).logits[0].log_softmax(-1)
        for name, model in models.items():
            found = model(input_ids=both, use_cache=False).logits[0].log_softmax(-1)
            kl = (expected.exp() * (expected - found)).sum(-1)
            totals[name][0] += float(kl[arguments.window : len(text)].mean()) / arguments.texts
            totals[name][1] += float(kl[-len(text) :].mean()) / arguments.texts
    about = {
        "model": arguments.model,
        "full": arguments.full,
        "window": arguments.window,
        "texts": arguments.texts,
        "kl": {name: {"text": round(a, 4), "repetition": round(b, 4)} for name, (a, b) in totals.items()},
    }
    arguments.json.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    print("| sink | text | repetition |\n| --- | --- | --- |")  # noqa: T201
    for name, (a, b) in totals.items():
        print(f"| {name} | {a:.3f} | {b:.3f} |")  # noqa: T201


if __name__ == "__main__":
    main()
