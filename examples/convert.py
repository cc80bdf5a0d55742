"""Convert a model in Python: exchange its attention, train it a little, save it, load it, let it write.

    python examples/convert.py --model src/linearize/demo/teacher --text corpus/train.jsonl --output-dir out

Text: your own, or what `python scripts/write_stdlib_corpus.py corpus` writes. The method is LoLCATs (Zhang et al.,
arXiv 2410.10254): the new attention learns to give what softmax gave, then low-rank adapters learn the next token.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import linearize

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="the softmax model: a folder or a hub id")
parser.add_argument("--text", required=True, help="a file or folder of text, or a hub dataset")
parser.add_argument("--output-dir", type=Path, required=True, help="stages and the model go there")
parser.add_argument("--steps", type=int, default=20, help="of each stage; a real run has hundreds")
parser.add_argument("--prompt", default="def ")
given = parser.parse_args()

torch.set_flush_denormal(True)  # numbers next to 0 are slow on a CPU
batch, length = 4, 128
budget = {"batch_size": batch, "max_tokens": given.steps * batch * length, "eval_every": max(1, given.steps // 2)}
settings = {f"{stage}.{name}": value for stage in ("transfer", "finetune") for name, value in budget.items()}
settings |= {"data.dataset": given.text, "data.sequence_length": length, "mixer.span.window_size": 32}
recipe = linearize.Recipe.load("lolcats", settings)

teacher = AutoModelForCausalLM.from_pretrained(given.model)
tokenizer = AutoTokenizer.from_pretrained(given.model)
student = linearize.convert(teacher, recipe)  # shares the teacher's weights, adds mixers
data = linearize.build_dataset(recipe.data, tokenizer, seed=0)
for stage, config in ((linearize.attention_transfer, recipe.transfer), (linearize.finetune, recipe.finetune)):
    stage(student, data.train, data.validation, config, output_dir=given.output_dir / stage.__name__)
student.save_pretrained(given.output_dir / "model")
tokenizer.save_pretrained(given.output_dir / "model")

student = AutoModelForCausalLM.from_pretrained(
    given.output_dir / "model"
)  # an ordinary model, as linearize is imported
inputs = tokenizer(given.prompt, return_tensors="pt")
print(tokenizer.decode(student.generate(**inputs, max_new_tokens=40, do_sample=False)[0]))
