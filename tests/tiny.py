"""Tiny random models and all that a run needs beside them: a tokenizer of bytes, text, rows, and a recipe of few steps.

What lies in files is written once per test session, and removed at its end.
"""

from __future__ import annotations

import atexit
import functools
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import PIL.Image
import pytest
import torch
import transformers
from markupsafe import Markup
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from linearize import Recipe, convert
from linearize.data.load import load_dataset
from linearize.data.packing import Dataset
from linearize.data.rows import PackedRows
from linearize.data.selection import reach_by
from linearize.evaluation import measure, scores
from linearize.hf.attention import linearized_layers
from linearize.hf.checkpoint import load_tokenizer, read_config
from linearize.report import figures, heatmaps
from linearize.run.folder import Run
from linearize.run.pipeline import run
from tests.byte_tokenizer import byte_tokenizer

VOCABULARY = 259  # bytes, and three special tokens
_TOKENS = dict(vocab_size=VOCABULARY, bos_token_id=256, eos_token_id=258, pad_token_id=None, initializer_range=0.2)

# A whole run in seconds: 6 steps of attention transfer and 4 of fine-tuning, each with a checkpoint every second one.
RECIPE: dict[str, Any] = {
    "mixer.span.window_size": 8,
    "transfer.batch_size": 4,
    "transfer.max_tokens": 6 * 4 * 64,
    "transfer.eval_every": 2,
    "finetune.batch_size": 4,
    "finetune.micro_batch_size": 2,
    "finetune.max_tokens": 4 * 4 * 64,
    "finetune.lr": 1e-2,
    "finetune.eval_every": 2,
    "data.sequence_length": 64,
    "data.validation_fraction": 0.3,
    "data.validation_rows": 16,
    "evaluation.bootstrap_samples": 40,
    "evaluation.copy_rows": 16,
    "evaluation.long": True,
    "evaluation.examine": False,
}


def llama(*, layers: int = 2, **fields: Any) -> LlamaForCausalLM:
    """A new teacher in eval mode, the same weights every time."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
    config = LlamaConfig(**(_TOKENS | sizes | dict(num_hidden_layers=layers, max_position_embeddings=256) | fields))
    return _seeded(LlamaForCausalLM, config)


def gpt2(**fields: Any) -> GPT2LMHeadModel:
    """The same with learned positions, and with q, k and v in one `Conv1D`."""
    sizes = dict(n_embd=32, n_layer=2, n_head=4, n_positions=256)
    return _seeded(GPT2LMHeadModel, GPT2Config(**(_TOKENS | sizes | fields)))


def _seeded(model_class: Any, config: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model_class(config).eval()


def recipe(**overrides: Any) -> Recipe:
    """The recipe of few steps; two underscores in a name stand for a dot."""
    return Recipe.load("lolcats", RECIPE | {name.replace("__", "."): value for name, value in overrides.items()})


def run_arguments(output_dir: Path, **changes: Any) -> list[str]:
    """A command line of the run of few steps, some fields changed; two underscores in a name stand for a dot."""
    fields = RECIPE | {name.replace("__", "."): value for name, value in changes.items()}
    options = [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]
    return [
        "run",
        "lolcats",
        "--model",
        teacher_folder(),
        "--dataset",
        text_file(),
        "--output-dir",
        str(output_dir),
        *options,
    ]


def moved_student(teacher: PreTrainedModel, **overrides: Any) -> PreTrainedModel:
    """A student whose mixers are far from their initial values, no two maps or heads alike."""
    student = convert(teacher, recipe(**overrides)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in linearized_layers(student).values():
            for parameter in layer.mixer.parameters():
                parameter += 0.5 * torch.randn(parameter.shape, generator=generator)
    return student


def packed(documents: list[list[int]], *, seed: int = 0, vocabulary: int = VOCABULARY) -> PackedRows:
    """One row of random tokens per list of document lengths; no loss on the first token of a document.

    From a small `vocabulary` there is something to learn: that the other tokens do not occur.
    """
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in documents])
    tokens = torch.randint(vocabulary, positions.shape, generator=torch.Generator().manual_seed(seed))
    return PackedRows(tokens, positions, tokens.masked_fill(positions == 0, -100))


def tokens(text: str) -> torch.Tensor:
    """[1, T] token ids, as the tokenizer of `teacher_folder` makes them."""
    return byte_tokenizer()(text, return_tensors="pt")["input_ids"]


def snapshot(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A copy of every parameter and buffer, by name."""
    return {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def write_text(path: Path, *, documents: int = 100, seed: int = 0) -> Path:
    """JSON lines of a few made-up words each, as text."""
    source = random.Random(seed)
    words = ["".join(source.choices("abcdefgh", k=source.randint(2, 6))) for _ in range(30)]
    lines = [json.dumps({"text": " ".join(source.choices(words, k=30))}) for _ in range(documents)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# --- runs -------------------------------------------------------------------------------------------------------------


@contextmanager
def quick_measures(new_tokens: int = 2, drawings: bool = False) -> Iterator[None]:
    """Measure without what takes longest: collecting garbage after every model, generating many tokens, drawings."""
    with pytest.MonkeyPatch.context() as patch:
        if not drawings:
            for module in (figures, heatmaps):
                patch.setattr(module, "draw", lambda *_, **__: Markup("(drawing)"))
        for module in (measure, scores):
            patch.setattr(module, "gc", SimpleNamespace(collect=lambda: None))
        patch.setattr(measure, "NEW_TOKENS", new_tokens)
        yield


def untimed(evaluation: dict[str, Any]) -> dict[str, Any]:
    """An evaluation.json without what differs between two runs of the same, by whatever command."""
    speed = [{k: v for k, v in line.items() if k not in ("prefill", "decode")} for line in evaluation["speed"]]
    provenance = {k: v for k, v in evaluation["provenance"].items() if k not in ("seconds", "command")}
    return evaluation | {"speed": speed, "provenance": provenance, "crossover": None}


def untimed_metrics(stage: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, likewise."""
    lines = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in lines]


def load_data(of: Run, load_teacher: Callable[[], Any] | None = None) -> Dataset:
    """The data of a run."""
    tokenizer, seed = load_tokenizer(of.model), of.recipe.seed
    score = None if load_teacher is None else reach_by(load_teacher)
    return load_dataset(of.recipe.data, tokenizer, read_config(of.model), score, seed=seed)


@functools.cache
def _scratch() -> Path:
    folder = tempfile.mkdtemp(prefix="linearize-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def teacher_folder() -> str:
    """The Llama and its tokenizer as an ordinary model folder."""
    folder = _scratch() / "teacher"
    llama().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@functools.cache
def gpt2_folder() -> str:
    """The GPT-2 with the same tokenizer."""
    folder = _scratch() / "gpt2"
    gpt2().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


# --- models and data of tasks -----------------------------------------------------------------------------------------

PADDING = VOCABULARY  # the id of the padding token


def padding_tokenizer() -> Any:
    """The tokenizer of bytes with a token to pad with; another special one stands for what is hidden."""
    tokenizer: Any = byte_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<|pad|>", "mask_token": "<|im_start|>"})
    return tokenizer


@functools.cache
def encoder_folder(head: str = "ForSequenceClassification", labels: int = 2) -> str:
    """A BERT with a task's head (`Model`: with none) and its tokenizer."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    tokens = dict(vocab_size=VOCABULARY + 1, pad_token_id=PADDING, max_position_embeddings=128)
    quiet = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2)
    config = transformers.BertConfig(**(sizes | tokens | quiet), num_labels=labels)
    return _saved(f"bert-{head}-{labels}", _seeded(getattr(transformers, f"Bert{head}"), config), padding_tokenizer())


@functools.cache
def decoder_classifier_folder(labels: int = 2, padding: int | None = PADDING) -> str:
    """A Llama with a head of classes, which reads the last token that is not padding, as its config has it."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
    tokens = _TOKENS | dict(vocab_size=VOCABULARY + 1, pad_token_id=padding)
    config = LlamaConfig(**(sizes | tokens), num_hidden_layers=2, max_position_embeddings=256, num_labels=labels)
    model = _seeded(transformers.LlamaForSequenceClassification, config)
    return _saved(f"llama-classes-{labels}-{padding}", model, padding_tokenizer())


@functools.cache
def image_classifier_folder(base: str = "ViT", head: str = "ForImageClassification") -> str:
    """A model of two classes of images, and what turns images of any size into its 16 x 16 pixels."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    quiet = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2)
    names = dict(id2label={0: "blue", 1: "red"}, label2id={"blue": 0, "red": 1})
    sizes |= dict(image_size=16, patch_size=4, encoder_stride=4)
    config = getattr(transformers, f"{base}Config")(**(sizes | quiet | names))
    processor = ViTImageProcessorPil(size={"height": 16, "width": 16})
    return _saved(base + head, _seeded(getattr(transformers, base + head), config), processor)


def _saved(name: str, model: PreTrainedModel, processor: Any) -> str:
    folder = _scratch() / name
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def labelled(count: int = 80, seed: int = 0) -> Iterator[tuple[list[str], int]]:
    """Made-up words of one half of some letters, and which half: what a model of any kind learns soon."""
    source = random.Random(seed)
    for index in range(count):
        letters = "abcdefgh"[4 * (index % 2) :][:4]
        yield ["".join(source.choices(letters, k=source.randint(2, 5))) for _ in range(source.randint(3, 6))], index % 2


@functools.cache
def sentences_file() -> str:
    """A table of sentences, with their class (`label`) and how late in the alphabet they are (`score`)."""
    lines = ["sentence\tlabel\tscore"]
    for words, label in labelled():
        text = " ".join(words)
        lines.append(f"{text}\t{label}\t{sum(map(ord, ''.join(words))) / len(''.join(words)) / 100:.4f}")
    path = _scratch() / "sentences.tsv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


@functools.cache
def words_file() -> str:
    """JSON lines of words of both kinds (`tokens`), and which kind each of them is (`tags`)."""
    rows = []
    source = random.Random(1)
    some = list(labelled(160, seed=1))
    for pair in zip(some[::2], some[1::2], strict=True):
        words = [(word, kind) for of_one_kind, kind in pair for word in of_one_kind]
        source.shuffle(words)
        rows.append({"tokens": [word for word, _ in words], "tags": [kind for _, kind in words]})
    return _lines("words.jsonl", rows)


@functools.cache
def dialogues_file() -> str:
    """JSON lines of short dialogues, and of each a summary (SAMSum's columns): its first word."""
    rows = [
        {"dialogue": f"Ann: {words[0]}\nBob: {' '.join(words[1:])}", "summary": f"{words[0]} {words[0]}"}
        for words, _ in labelled(90, seed=2)
    ]
    return _lines("dialogues.jsonl", rows)


def _lines(name: str, rows: list[dict[str, Any]]) -> str:
    path = _scratch() / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@functools.cache
def image_folder() -> str:
    """A folder per class: blue images and red ones, no two alike."""
    folder, source = _scratch() / "images", random.Random(0)
    for name, channel in (("blue", 2), ("red", 0)):
        (folder / name).mkdir(parents=True)
        for index in range(32):
            colour = [source.randrange(100) for _ in range(3)]
            colour[channel] += 150
            PIL.Image.new("RGB", (20, 20), tuple(colour)).save(folder / name / f"{index:02}.png")
    return str(folder)


@functools.cache
def text_file() -> str:
    return str(write_text(_scratch() / "text.jsonl"))


@functools.cache
def finished_run() -> Run:
    """A whole run, with every stage, control and measure: not to be changed."""
    device = torch.device("cpu")
    made = Run(recipe(data__dataset=text_file()), teacher_folder(), _scratch() / "run", torch.float32, device)
    with quick_measures():
        run(made)
    return made
