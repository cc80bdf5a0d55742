"""Convert a model without training, save it, load it, and let it continue a text.

    python scripts/write_stdlib_corpus.py corpus    # or text of your own
    python examples/convert_without_training.py --text corpus/train.jsonl --output-dir out

The recipe `recommended` divides a budget of bytes over the KV heads by what it measures of each on the text. The scores
by which heads evict pairs are fitted after KVzap (arXiv 2601.07891). docs/memory.md explains both.
"""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import linearize

BUNDLED = Path(linearize.__file__).parent / "demo" / "teacher"
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=BUNDLED, help="a softmax model: folder or hub id (default: the bundled one)")
parser.add_argument("--text", required=True, help="a file or folder of text, or a hub dataset")
parser.add_argument("--output-dir", type=Path, required=True, help="the converted model goes there")
parser.add_argument("--fraction", type=float, default=0.2, help="of the teacher's cache (default: %(default)s)")
parser.add_argument("--length", type=int, default=1024, help="tokens of that cache (default: %(default)s)")
options = parser.parse_args()

settings = {"data.dataset": options.text, "data.sequence_length": options.length, "data.max_tokens": 1_000_000}
settings |= {"data.validation_fraction": 0.25}
budget = {"memory.fraction": options.fraction, "memory.reference_length": options.length}
recipe = linearize.Recipe.load("recommended", settings | budget)
teacher = AutoModelForCausalLM.from_pretrained(options.model)
tokenizer = AutoTokenizer.from_pretrained(options.model)
student = linearize.convert(teacher, recipe, tokenizer)
student.save_pretrained(options.output_dir)
tokenizer.save_pretrained(options.output_dir)

student = AutoModelForCausalLM.from_pretrained(options.output_dir)  # an ordinary model, as linearize is imported
inputs = tokenizer("import os\n\n\ndef read_config(path):\n", return_tensors="pt")
print(tokenizer.decode(student.generate(**inputs, max_new_tokens=40, do_sample=False)[0]))
