"""Convert a model without training, then fine-tune it with LoRA in TRL's SFTTrainer (`pip install trl`).

    python examples/finetune_trl.py --model HuggingFaceTB/SmolLM2-135M-Instruct --data chats.jsonl --output-dir out

Data: `messages` for a model with a chat template, or `text`. `--packing` puts several documents into a row, and each
attends to itself alone. TRL: github.com/huggingface/trl; LoRA: Hu et al., arXiv 2106.09685.
"""

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import linearize

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="the softmax model: a folder or a hub id")
parser.add_argument("--data", required=True, help="a .jsonl file of some 340 lines or more")
parser.add_argument("--output-dir", type=Path, required=True, help="the fine-tuned model goes there")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--length", type=int, default=256, help="tokens of a row at most")
parser.add_argument("--packing", action="store_true")
given = parser.parse_args()

torch.set_flush_denormal(True)  # denormal numbers are slow on a CPU
teacher = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(given.model)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
settings = {"data.dataset": given.data, "data.sequence_length": given.length, "data.validation_fraction": 0.25}
memory = {"memory.fraction": 0.5, "memory.reference_length": given.length}
recipe = linearize.Recipe.load("recommended", settings | memory)
student = linearize.convert(teacher, recipe, tokenizer)  # the data is what attention is measured on

config = SFTConfig(
    str(given.output_dir / "trainer"),
    max_steps=given.steps,
    max_length=given.length,
    packing=given.packing,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    bf16=torch.cuda.is_available(),
    save_strategy="no",
    report_to=[],
)
adapters = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
rows = load_dataset("json", data_files=given.data, split="train")
trainer = SFTTrainer(student, config, train_dataset=rows, processing_class=tokenizer, peft_config=adapters)
trainer.train()
trainer.model.merge_and_unload().save_pretrained(given.output_dir / "model")
tokenizer.save_pretrained(given.output_dir / "model")
