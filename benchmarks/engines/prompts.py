"""Write prompts as token ids, which the other programs of this folder read: one JSON list of lists.

    python benchmarks/engines/prompts.py --model DIR --text text.txt --count 20 --tokens 600 --output prompts.json

The text is divided into as many equal parts, and each prompt is the beginning of one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from transformers import AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="whose tokenizer is used")
    parser.add_argument("--text", type=Path, required=True, help="a text file")
    parser.add_argument("--count", type=int, default=20, help="prompts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=600, help="of each prompt (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")
    tokenizer, part = AutoTokenizer.from_pretrained(arguments.model), len(text) // arguments.count
    prompts = []
    for index in range(arguments.count):
        ids = tokenizer(text[index * part : (index + 1) * part], add_special_tokens=False).input_ids
        if len(ids) < arguments.tokens:
            parser.exit(2, f"error: --text: expected {arguments.tokens} tokens in each part, found {len(ids)}\n")
        prompts.append(ids[: arguments.tokens])
    arguments.output.write_text(json.dumps(prompts), encoding="utf-8")


if __name__ == "__main__":
    main()
