"""Write an unconverted Llama, Mistral or Qwen2 to a GGUF file by linearize's exporter, as the baseline for llama.cpp.

    python benchmarks/engines/unconverted_gguf.py --model M --type f32 --output teacher.gguf

The file has the architecture of exported models, which must have a window in some layer. The last layer's window is as
long as the model has positions, so that all layers have full attention.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from linearize.export.gguf import TYPES, write_gguf
from linearize.export.stock import stock_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder or a hub id")
    parser.add_argument("--type", choices=TYPES, default="bf16", help="of the weights")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    stock = stock_model(model, "granite_swa")
    stock.config.layer_types[-1] = "sliding_attention"
    write_gguf(stock, tokenizer, arguments.output, kind=arguments.type, name="unconverted")


if __name__ == "__main__":
    main()
