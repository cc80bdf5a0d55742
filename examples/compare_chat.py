"""Let a converted chat model and its teacher answer the same questions, side by side; `make demo-real` runs this.

    linearize convert --model HuggingFaceTB/SmolLM2-135M-Instruct --dataset text.txt --output-dir out
    python examples/compare_chat.py out

The second question is about a sentence within 700 tokens of held-out text. Answers are greedy. The student reads a
prompt in both ways (docs/memory.md). SmolLM2: arXiv 2502.02737; any model with a chat template works.
"""

import argparse
import json
from pathlib import Path

import rich
import torch
from rich.table import Table
from rich.text import Text
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from linearize.base import progress
from linearize.evaluation.speed import cache_bytes
from linearize.planning.results import size

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("run", type=Path, help="the folder that `linearize convert` wrote, of a model with a chat template")
parser.add_argument("--question", default="What is photosynthesis? Explain it in three sentences.")
given = parser.parse_args()
folder = given.run / "model"
if not folder.is_dir() or (tokenizer := AutoTokenizer.from_pretrained(folder)).chat_template is None:
    parser.error(
        f"run: expected a run folder with a chat model, found none at {given.run}; `linearize convert` makes it"
    )

words = tokenizer.decode(load_file(given.run / "rows.safetensors")["test/input_ids"][0, :700], skip_special_tokens=True)
half, last = len(words) // 2, "What is the secret number for copper?"
long = f"{words[:half]}\nThe secret number for copper is 48213.\n{words[half:]}\n\n{last}"
teacher = json.loads((given.run / "run.json").read_text(encoding="utf-8"))["model"]
table, columns = Table("question", show_lines=True), []
for prefill in progress([None, "streaming", "full"], "answers"):
    model = AutoModelForCausalLM.from_pretrained(teacher if prefill is None else folder, dtype=torch.float32)
    model.config.prefill = prefill
    table.add_column("teacher" if prefill is None else f"student, {prefill}")
    columns.append([])
    for question in (given.question, long):
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**ids, max_new_tokens=100, do_sample=False, return_dict_in_generate=True)
        answer = tokenizer.decode(out.sequences[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        columns[-1].append(Text(f"{answer}\n({size(cache_bytes(out.past_key_values))} of memory)"))
for question, *answers in zip([given.question, f"(700 tokens of text) {last}"], *columns, strict=True):
    table.add_row(Text(question), *answers)
rich.print(table)
