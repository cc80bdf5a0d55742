"""Make a softmax teacher for the grids here: finetune a pretrained model on a task, or train a new one on it.

    python experiments/hedgehog/train_teacher.py --model M --set data.task.type=text_classification \
        --dataset train.tsv --validation-dataset dev.tsv --classes 2 --output-dir T
    python experiments/hedgehog/train_teacher.py --new experiments/hedgehog/shapes/vit --processor \
        --set data.task.type=image_classification --dataset images --classes 10 --epochs 10 --lr 1e-3 --output-dir T

T/model is an ordinary model folder with its tokenizer or image processor, T/teacher.json its held-out score. All
weights train, with AdamW and a cosine; those of the lowest held-out loss are kept. The same again resumes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from linearize.base import UserError
from linearize.configs.tasks import ImageClassification
from linearize.data.load import load_dataset, load_processor
from linearize.data.packing import Dataset
from linearize.data.rows import PackedRows
from linearize.evaluation.answers import answering
from linearize.evaluation.perplexity import token_losses
from linearize.hf.checkpoint import read_config, save_student
from linearize.recipe import Recipe, parse_overrides
from linearize.run.folder import Run, check_output, claim, versions, write_json
from linearize.training.finetune import finetune

FINETUNE = {"all_weights": True, "lora": None, "schedule": {"type": "cosine"}}


def recipe_of(a: argparse.Namespace) -> Recipe:
    """What the arguments ask for, as a recipe that converts nothing: of it only data, finetune and seed count."""
    source = f"new, of the shape of {a.new}" if a.new else f"{a.model}, finetuned"
    about = {"tokenizer": a.tokenizer, "classes": a.classes, "processor": a.processor}
    given = ", ".join(f"{name} {value}" for name, value in about.items() if value)
    tuned = {"epochs": a.epochs, "lr": a.lr, "batch_size": a.batch_size}
    texts = {"dataset": a.dataset, "validation_dataset": a.validation_dataset, "columns": a.columns}
    overrides = {"finetune": FINETUNE | tuned, "seed": a.seed} | {f"data.{k}": v for k, v in texts.items()}
    overrides |= parse_overrides(a.set)
    if others := [field for field in overrides if field.split(".")[0] not in ("data", "finetune", "seed")]:
        raise UserError(f"--set {others[0]}: expected a field of data or finetune; a teacher has no other")
    recipe = Recipe.parse({"name": "teacher", "description": f"{source}; {given or 'as it is'}", "transfer": None})
    return recipe.override(overrides)


def labels_of(classes: Sequence[str] | None) -> dict[str, Any]:
    """The config's fields for so many classes, or for classes of these names; none where the model keeps its own.

    Raises:
        UserError: fewer than one class.
    """
    if not classes:
        return {}
    if len(classes) == 1:
        if not classes[0].isdecimal() or int(classes[0]) < 1:
            raise UserError(f"--classes: expected how many, or the names of all of them; found {classes[0]!r}")
        classes = [f"LABEL_{number}" for number in range(int(classes[0]))]
    return {"id2label": dict(enumerate(classes)), "label2id": {name: number for number, name in enumerate(classes)}}


def processor_of(a: argparse.Namespace, recipe: Recipe, config: dict[str, Any]) -> Any:
    """The tokenizer or image processor that is saved with the teacher, with a padding token where it is needed."""
    if a.processor:
        if not isinstance(recipe.data.task, ImageClassification) or "image_size" not in config:
            raise UserError("--processor: expected an image task and a config with an image_size; leave it out")
        side = int(config["image_size"])
        return ViTImageProcessorPil(size={"height": side, "width": side}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    processor = load_processor(recipe.data.task, a.tokenizer or a.model or a.new)
    if isinstance(processor, transformers.PreTrainedTokenizerBase):
        if processor.pad_token_id is None and not recipe.data.task.language:
            processor.pad_token = processor.eos_token
        if len(processor) > config.get("vocab_size", len(processor)):
            raise UserError(
                f"--tokenizer: expected at most the config's vocab_size, {config['vocab_size']}, found "
                f"{len(processor)} tokens; use another tokenizer, or set vocab_size in the config"
            )
    return processor


def begin(a: argparse.Namespace, recipe: Recipe, fields: dict[str, Any]) -> PreTrainedModel:
    """The model before training: a function of the arguments alone, a new head and new weights being drawn by seed."""
    auto: Any = getattr(transformers, recipe.data.task.auto_class)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(a.seed)
        if a.new:
            return auto.from_config(AutoConfig.from_pretrained(a.new, **fields), dtype=torch.float32)
        try:
            # The pretrained model may have a head for something else.
            return auto.from_pretrained(a.model, dtype=torch.float32, ignore_mismatched_sizes=True, **fields)
        except (OSError, ValueError) as error:
            raise UserError(f"--model {a.model}: expected readable weights; {str(error).splitlines()[0]}") from None


def score(model: PreTrainedModel, recipe: Recipe, dataset: Dataset, processor: Any) -> dict[str, float]:
    """Held-out scores of the task; of a language model, perplexity too."""
    task, found = recipe.data.task, {}
    if task.language:
        assert isinstance(dataset.test, PackedRows)
        losses = token_losses(model, dataset.test, batch_size=8, title="held out")
        found["perplexity"] = math.exp(losses.loss[losses.mask].mean().item())
    if task.scores:
        found |= answering(task, dataset, processor, None)(model, "held out").scores()
    return found


def train_teacher(a: argparse.Namespace) -> dict[str, Any]:
    """Everything: read the data, train, save, measure; what teacher.json holds.

    Raises:
        UserError: arguments or data that cannot be used, or an output folder of another teacher.
    """
    if bool(a.model) == bool(a.new):
        raise UserError("--model, --new: expected one of the two: finetune a model, or train a new one of a shape")
    recipe, device = recipe_of(a), torch.device(a.device)
    source = str(a.model or a.new)
    config = read_config(source) | labels_of(a.classes)
    processor = processor_of(a, recipe, config)
    dataset = load_dataset(recipe.data, processor, config, seed=recipe.seed)
    run = Run(recipe, source, a.output_dir, torch.float32, device)
    check_output(run)
    claim(run, dataset)
    fields = labels_of(a.classes)
    if isinstance(processor, transformers.PreTrainedTokenizerBase) and processor.pad_token_id is not None:
        fields["pad_token_id"] = processor.pad_token_id
    model = begin(a, recipe, fields).to(device)
    assert recipe.finetune is not None
    rows = dataset.train, dataset.validation
    result = finetune(
        model, *rows, recipe.finetune, output_dir=run.folder / "finetune", seed=recipe.seed, title="softmax teacher"
    )
    found = {
        "scores": score(model.eval(), recipe, dataset, processor),
        "steps": result.steps,
        "loss": result.best_loss["model"],
        "seconds": result.seconds,
        "examples": [len(dataset.train), len(dataset.test)],
        "parameters": sum(p.numel() for p in model.parameters()),
        "versions": versions(),
    }
    card = f"# A softmax teacher\n\n{recipe.description}.\n"
    save_student(model, processor, {"README.md": card}, run.folder / "model")
    write_json(run.folder / "teacher.json", found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a pretrained model, folder or hub id, to finetune")
    parser.add_argument("--new", help="a folder with a config.json: train a new model of this shape")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="any field of data, finetune")
    parser.add_argument("--dataset", help="what to train on; none for tasks that make their own examples")
    parser.add_argument("--validation-dataset", help="what to hold out instead of a share of --dataset")
    parser.add_argument("--columns", nargs="+", help="names of the columns of a table whose first line names none")
    parser.add_argument(
        "--classes", nargs="+", help="how many (1 for a number), or their names; the model's own if none"
    )
    parser.add_argument("--tokenizer", help="folder or hub id of the tokenizer, where the model has none beside it")
    parser.add_argument("--processor", action="store_true", help="make an image processor of the config's image_size")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = parser.parse_args()
    torch.set_flush_denormal(True)  # as the command line does
    try:
        found = train_teacher(a)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    sys.stdout.write(json.dumps(found["scores"]) + "\n")


if __name__ == "__main__":
    main()
