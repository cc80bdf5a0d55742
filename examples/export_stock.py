"""Convert a model by `local-global`, export it, and run it in a class of transformers, without linearize's code.

    python scripts/write_stdlib_corpus.py corpus    # or text of your own
    python examples/export_stock.py --text corpus/train.jsonl --output-dir out

Nothing is trained here; `linearize run local-global` also trains. vLLM and llama.cpp (github.com/ggml-org/llama.cpp)
run the exported model, too:

    vllm serve out/exported
    linearize export out/model out/gguf --to gguf && llama-cli -m out/gguf/model-bf16.gguf
"""

import argparse
import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import linearize

BUNDLED = Path(linearize.__file__).parent / "demo" / "teacher"
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=BUNDLED, help="a softmax model: folder or hub id (default: the bundled one)")
parser.add_argument("--text", required=True, help="a file or folder of text, or a hub dataset")
parser.add_argument("--output-dir", type=Path, required=True, help="the converted and the exported model go there")
parser.add_argument("--length", type=int, default=1024, help="tokens at which the budget holds (default: %(default)s)")
options = parser.parse_args()

settings = {"data.dataset": options.text, "data.sequence_length": options.length, "data.max_tokens": 1_000_000}
settings |= {"data.validation_fraction": 0.25}
recipe = linearize.Recipe.load("local-global", settings | {"memory.reference_length": options.length})
teacher = AutoModelForCausalLM.from_pretrained(options.model)
tokenizer = AutoTokenizer.from_pretrained(options.model)
converted, exported = options.output_dir / "model", options.output_dir / "exported"
linearize.convert(teacher, recipe, tokenizer).save_pretrained(converted)
tokenizer.save_pretrained(converted)
subprocess.run([sys.executable, "-m", "linearize", "export", converted, exported, "--to", "hf"], check=True)

stock = AutoModelForCausalLM.from_pretrained(exported)
print(type(stock))  # of transformers
inputs = tokenizer("import os\n\n\ndef read_config(path):\n", return_tensors="pt")
print(tokenizer.decode(stock.generate(**inputs, max_new_tokens=40, do_sample=False)[0]))
