"""Convert a model without training, then fine-tune it with LoRA by PEFT in transformers' own Trainer.

    python examples/finetune_trainer.py --model HuggingFaceTB/SmolLM2-135M --text text.jsonl --output-dir out

A converted model is an ordinary one, so nothing after the call of `convert` is special. Two batches of two rows make a
step: the loss is the mean over the step's tokens. LoRA: Hu et al., arXiv 2106.09685.
"""

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers import DataCollatorForLanguageModeling as Collator

import linearize

BUNDLED = Path(linearize.__file__).parent / "demo" / "teacher"
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=BUNDLED, help="a softmax model: folder or hub id (default: the bundled one)")
parser.add_argument("--text", required=True, help="a .jsonl file with a `text` on each line, some 340 or more")
parser.add_argument("--output-dir", type=Path, required=True, help="the fine-tuned model goes there")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--length", type=int, default=256, help="tokens of a row at most")
options = parser.parse_args()

torch.set_flush_denormal(True)  # denormal numbers are slow on a CPU
teacher = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(options.model)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
settings = {"data.dataset": options.text, "data.sequence_length": options.length, "data.validation_fraction": 0.25}
memory = {"memory.fraction": 0.5, "memory.reference_length": options.length}
recipe = linearize.Recipe.load("recommended", settings | memory)
student = linearize.convert(teacher, recipe, tokenizer)  # the text is what attention is measured on

rows = load_dataset("json", data_files=options.text, split="train").select_columns("text")
rows = rows.map(lambda row: tokenizer(row["text"], truncation=True, max_length=options.length), remove_columns="text")
model = get_peft_model(student, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": options.steps}
arguments = TrainingArguments(str(options.output_dir / "trainer"), save_strategy="no", report_to=[], **batches)
Trainer(model, arguments, Collator(tokenizer, mlm=False), train_dataset=rows).train()
model.merge_and_unload().save_pretrained(options.output_dir / "model")
tokenizer.save_pretrained(options.output_dir / "model")
