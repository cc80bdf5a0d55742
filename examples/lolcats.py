"""LoLCATs in Python: attention transfer, then LoRA, then an ordinary model (Zhang et al., arXiv 2410.10254).

Run it on text of your own, or on the sources of Python's standard library:

    python scripts/write_stdlib_corpus.py corpus
    python examples/lolcats.py --text corpus/train.jsonl --output-dir out
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import linearize

BUNDLED = Path(linearize.__file__).parent / "demo" / "teacher"
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=BUNDLED, help="a softmax model: folder or hub id (default: the bundled one)")
parser.add_argument("--text", required=True, help="a file or folder of text, or a hub dataset")
parser.add_argument("--output-dir", type=Path, required=True, help="stages and the model go there")
parser.add_argument("--steps", type=int, default=20, help="of each stage; a real run has hundreds")
options = parser.parse_args()

torch.set_flush_denormal(True)  # denormal numbers are slow on a CPU
budget = {"batch_size": 4, "max_tokens": options.steps * 4 * 128, "eval_every": max(1, options.steps // 2)}
settings = {f"{stage}.{name}": value for stage in ("transfer", "finetune") for name, value in budget.items()}
settings |= {"data.dataset": options.text, "data.sequence_length": 128, "mixer.span.window_size": 32}
recipe = linearize.Recipe.load("lolcats", settings)

teacher = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(options.model)
student = linearize.convert(teacher, recipe)  # shares the teacher's weights, adds mixers
data = linearize.build_dataset(recipe.data, tokenizer, seed=0)
for stage, config in ((linearize.attention_transfer, recipe.transfer), (linearize.finetune, recipe.finetune)):
    stage(student, data.train, data.validation, config, output_dir=options.output_dir / stage.__name__)
student.save_pretrained(options.output_dir / "model")
tokenizer.save_pretrained(options.output_dir / "model")

student = AutoModelForCausalLM.from_pretrained(options.output_dir / "model")
inputs = tokenizer("def ", return_tensors="pt")
print(tokenizer.decode(student.generate(**inputs, max_new_tokens=40, do_sample=False)[0]))
