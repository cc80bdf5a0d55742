"""The scripts of experiments/hedgehog/, on tiny models."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import PIL.Image
import pytest
import torch
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
)

from linearize.recipe import Recipe
from linearize.run.folder import Run
from linearize.run.pipeline import run
from linearize.training import loop
from tests import tiny
from tests.byte_tokenizer import byte_tokenizer

HEDGEHOG = Path(__file__).parents[2] / "experiments" / "hedgehog"
CPU = ["--device", "cpu"]


def load(script: str) -> ModuleType:
    """A script of experiments/hedgehog/, which is no package."""
    name = f"hedgehog_{script}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, HEDGEHOG / f"{script}.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


train_teacher = load("train_teacher")


def call(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, arguments)])
    script.main()


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT without a head, whose tokenizer has no padding token."""
    folder = tmp_path_factory.mktemp("encoder")
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = BertConfig(vocab_size=tiny.VOCABULARY, max_position_embeddings=64, initializer_range=0.2, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table without a first line of names: the class is whether there is an x."""
    draw, lines = random.Random(0), []
    for number in range(160):
        letters = [*draw.choices("abcdefgh", k=10), *("x" * (number % 2) * 3)]
        draw.shuffle(letters)
        lines.append(f"source\t{number % 2}\t\t{''.join(letters)}")
    path = tmp_path_factory.mktemp("sentences") / "train.tsv"
    path.write_text("\n".join(lines) + "\n")
    return path


SENTENCES = [
    *("--set", "data.task.type=text_classification", "--set", "data.sequence_length=32"),
    *("--set", "data.validation_fraction=0.25", "--columns", "source", "label", "mark", "sentence"),
]


def test_a_finetuned_teacher(
    encoder: Path, sentences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    updates, update = [], loop.StageRun.update
    monkeypatch.setattr(loop.StageRun, "update", lambda self: updates.append(1) or update(self))
    arguments = ["--model", encoder, "--dataset", sentences, *SENTENCES, "--classes", "absent", "present"]
    arguments += ["--epochs", 6, "--lr", 3e-3, "--batch-size", 8, *CPU, "--output-dir", tmp_path / "t"]
    call(train_teacher, monkeypatch, *arguments)
    printed, found = json.loads(capsys.readouterr().out), json.loads((tmp_path / "t" / "teacher.json").read_text())
    assert printed == found["scores"] and found["scores"]["accuracy"] > 0.8, "the task is easy"
    assert found["examples"] == [120, 30] and len(updates) == found["steps"] == 6 * 15

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "t" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "t" / "model")
    assert model.config.id2label == {0: "absent", 1: "present"}
    assert model.config.pad_token_id == tokenizer.pad_token_id == 258
    texts = ["abcdefgh", "abcxxdexfgh"]
    with torch.no_grad():
        outputs = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    assert outputs.argmax(-1).tolist() == [0, 1], "what is saved is what was trained"

    updates.clear()
    call(train_teacher, monkeypatch, *arguments)
    assert not updates and json.loads(capsys.readouterr().out) == printed, "the same again trains nothing"
    with pytest.raises(SystemExit):
        call(train_teacher, monkeypatch, *arguments, "--lr", 1e-3)
    assert "expected a run of this recipe, found one of another" in capsys.readouterr().err


def test_a_teacher_of_numbers(encoder: Path, sentences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--model", encoder, "--dataset", sentences, *SENTENCES, "--classes", 1, "--epochs", 1, *CPU]
    call(train_teacher, monkeypatch, *arguments, "--set", "data.task.metrics=[spearman]", "--output-dir", tmp_path)
    assert json.loads((tmp_path / "teacher.json").read_text())["scores"].keys() == {"spearman"}
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert model.config.num_labels == 1


def test_a_new_vision_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, colour in {"blue": (0, 0, 255), "red": (255, 0, 0)}.items():
        (tmp_path / "images" / name).mkdir(parents=True)
        for shade in range(40):
            image = PIL.Image.new("RGB", (10, 10), colour)
            image.putpixel((0, 0), (shade, shade, shade))
            image.save(tmp_path / "images" / name / f"{shade:02}.png")
    shape = json.loads((HEDGEHOG / "shapes" / "vit" / "config.json").read_text())
    (tmp_path / "shape").mkdir()
    small = {"image_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    (tmp_path / "shape" / "config.json").write_text(json.dumps(shape | small))
    arguments = ["--new", tmp_path / "shape", "--processor", "--set", "data.task.type=image_classification"]
    arguments += ["--set", "data.validation_fraction=0.25", "--classes", 2, "--dataset", tmp_path / "images"]
    arguments += ["--epochs", 4, "--lr", 3e-3, "--batch-size", 4, *CPU, "--output-dir", tmp_path / "t"]
    call(train_teacher, monkeypatch, *arguments)
    assert json.loads((tmp_path / "t" / "teacher.json").read_text())["scores"]["accuracy"] == 1.0
    processor = json.loads((tmp_path / "t" / "model" / "preprocessor_config.json").read_text())
    assert processor["size"] == {"height": 8, "width": 8} and processor["image_mean"] == [0.5] * 3
    assert AutoModelForImageClassification.from_pretrained(tmp_path / "t" / "model").config.num_labels == 2


def test_a_new_language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--new", HEDGEHOG / "shapes" / "gpt2", "--tokenizer", tiny.teacher_folder(), *CPU]
    arguments += ["--dataset", tiny.text_file(), "--set", "data.sequence_length=64", "--set", "finetune.max_tokens=640"]
    arguments += ["--set", "data.validation_fraction=0.3"]
    call(train_teacher, monkeypatch, *arguments, "--batch-size", 2, "--lr", 1e-2, "--output-dir", tmp_path)
    found = json.loads((tmp_path / "teacher.json").read_text())
    assert 2 < found["scores"]["perplexity"] < 259 and found["steps"] == 5
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == 259


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model, --new: expected one of the two"),
        (["--new", HEDGEHOG / "shapes" / "vit", "--set", "mixer.span.type=none"], "--set mixer.span.type: expected"),
        (["--new", HEDGEHOG / "shapes" / "vit", "--processor"], "--processor: expected an image task"),
        (["--new", HEDGEHOG / "shapes" / "listops", "--classes", "0"], "--classes: expected how many"),
    ],
)
def test_refused(
    arguments: list[Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as exit_:
        call(train_teacher, monkeypatch, *arguments, *CPU, "--output-dir", tmp_path / "t")
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and message in error and error.count("\n") == 1
    assert not (tmp_path / "t").exists()


# --- a sentence encoder -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedder(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The encoder, with a padding token."""
    folder = tmp_path_factory.mktemp("embedder")
    BertModel.from_pretrained(encoder).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_minilm(embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minilm, draw = load("minilm"), random.Random(0)
    words = ["".join(draw.choices("abcdef", k=draw.randint(2, 20))) for _ in range(80)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": word}) + "\n" for word in words))
    pairs = [(first, second, number) for number, (first, second) in enumerate(itertools.pairwise(words))]
    lines = [f"{second}\t{number}\t{first}" for first, second, number in pairs]
    (tmp_path / "pairs.tsv").write_text("\n".join(["b\tscore\ta", *lines]) + "\n")
    arguments = ["--model", embedder, "--dataset", tmp_path / "texts.jsonl", "--pairs", tmp_path / "pairs.tsv"]
    arguments += ["--columns", "a", "b", "score", "--max-pairs", 30, "--output-dir", tmp_path / "run", *CPU]
    for field in ("data.sequence_length=32", "data.validation_fraction=0.25", "transfer.epochs=3", "finetune.epochs=6",
                  "finetune.lr=1e-3", "evaluation.bootstrap_samples=40", "evaluation.examine=false"):  # fmt: skip
        arguments += ["--set", field]
    monkeypatch.setattr(minilm, "SAMPLES", 40)
    call(minilm, monkeypatch, *arguments, "--json", tmp_path / "found.json")
    found, text = json.loads((tmp_path / "found.json").read_text()), (tmp_path / "found.md").read_text()
    cosine = {name: interval["mean"] for name, interval in found["cosine"].items()}
    assert cosine["swapped"] < cosine["student"] < cosine["teacher"] and cosine["teacher"] == pytest.approx(1)
    assert found["texts"] == 16 and found["pairs"] == 30 and f"| student | {cosine['student']:.4f} [" in text

    # The same by hand, text by text.
    tokenizer = AutoTokenizer.from_pretrained(embedder)
    model = BertModel.from_pretrained(embedder, add_pooling_layer=False).eval()

    def embedding(word: str) -> torch.Tensor:
        with torch.no_grad():
            hidden = model(**tokenizer(word, return_tensors="pt")).last_hidden_state[0].mean(0)
        return hidden / hidden.norm()

    cosines = torch.tensor([float(embedding(first) @ embedding(second)) for first, second, _ in pairs[:30]])
    ranks = torch.stack([cosines.argsort().argsort(), torch.arange(30)]).double()
    expected = 100 * torch.corrcoef(ranks)[0, 1].item()
    spearman = {name: interval["mean"] for name, interval in found["spearman"].items()}
    assert spearman["teacher"] == pytest.approx(expected, abs=1e-6)
    assert spearman["difference"] == pytest.approx(spearman["student"] - spearman["teacher"]) != 0


# --- generalisation ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def distilled(encoder: Path, sentences: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of two maps on one teacher, and one on another teacher of the same shape; distilled, not finetuned."""
    folder, runs = tmp_path_factory.mktemp("distilled"), {}
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    tokenizer.pad_token = tokenizer.eos_token
    config = BertConfig.from_pretrained(encoder, pad_token_id=tokenizer.pad_token_id)
    fields = {"data.dataset": str(sentences), "data.columns": ["source", "label", "mark", "sentence"]}
    fields |= {"data.sequence_length": 32, "data.validation_fraction": 0.25, "transfer.epochs": 4}
    fields |= {"finetune.epochs": 3, "finetune.lr": 3e-3, "finetune.max_tokens": 4000}
    for name, seed, feature_map in (
        ("hedgehog", 0, {"type": "hedgehog", "expansion": 2, "bias": True}),
        ("t2r", 0, {"type": "t2r"}),
        ("other", 1, {"type": "hedgehog", "expansion": 2, "bias": True}),
    ):
        if not (model := folder / f"model-{seed}").exists():
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                BertForSequenceClassification(config).save_pretrained(model)
            tokenizer.save_pretrained(model)
        recipe = Recipe.load("hedgehog-bert", fields | {"mixer.feature_map": feature_map})
        runs[name] = folder / name
        run(Run(recipe, str(model), runs[name], torch.float32, torch.device("cpu")), until="transfer")
    return runs


@pytest.mark.slow
def test_generalisation(
    distilled: dict[str, Path], sentences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"{{name: letters, dataset: {sentences}, columns: [a, b, c, d], text_column: d, max_documents: 40}}"
    arguments = ["--run", f"HH={distilled['hedgehog']}", "--run", f"T2R-HH={distilled['t2r']}", "--data", text]
    arguments += ["--onto", f"other={distilled['other']}", "--finetune", tmp_path, "--lengths", 8, 16, 128]
    generalisation = load("generalisation")
    monkeypatch.setattr(generalisation, "FIXED", {"1 + ELU": {"type": "elu1"}})
    arguments += ["--tokens", 120, "--finding", "So it is.", "--json", tmp_path / "found.json"]
    call(generalisation, monkeypatch, *arguments, *CPU)
    found, page = json.loads((tmp_path / "found.json").read_text()), (tmp_path / "found.md").read_text()
    kl = {label: row["letters"] for label, row in found["data"].items()}
    assert list(kl) == ["HH", "T2R-HH", "hedgehog, untrained", "t2r, untrained", *generalisation.FIXED]
    assert 0 < kl["HH"] < kl["hedgehog, untrained"] and kl["T2R-HH"] < kl["t2r, untrained"], "they were distilled"
    assert {tuple(row) for row in found["lengths"].values()} == {("8", "16")}, "the model has 64 positions"
    assert f"| HH | {kl['HH']:.3f} |" in page and "**Finding.** So it is.\n" in page

    other = found["moved"]["other"]
    assert other["metric"] == "accuracy" and "kl" not in other["maps"]["softmax"]
    moved = {label: row["kl"] for label, row in other["maps"].items() if label != "softmax"}
    assert moved["of its own"] < moved["HH"] < moved["1 + ELU"], "learned for other weights, but learned"
    assert all({"kl", "score", "finetuned"} == row.keys() for label, row in other["maps"].items() if label != "softmax")
    assert max(row["finetuned"] for row in list(other["maps"].values())[1:]) > 0.6


@pytest.mark.parametrize("script", ["generalisation", "minilm"])
def test_committed_pages_are_those_of_their_numbers(script: str) -> None:
    found = json.loads((HEDGEHOG / f"{script}.json").read_text())
    assert (HEDGEHOG / f"{script}.md").read_text() == load(script).markdown(found)


def test_joined_rows() -> None:
    generalisation, tokenizer = load("generalisation"), byte_tokenizer(bos=None)
    rows = generalisation.joined(["abcd", "efg", "hi"], tokenizer, 4)
    assert rows.inputs()["input_ids"].tolist() == tiny.tokens("abcdefgh").view(2, 4).tolist()
    tokenizer.cls_token = tokenizer.sep_token = "<s>"
    rows = generalisation.joined(["abcd", "efg", "hi"], tokenizer, 4)
    assert rows.inputs()["input_ids"][:, 1:3].tolist() == tiny.tokens("abcdefgh").view(4, 2).tolist()
    assert (rows.inputs()["input_ids"][:, [0, 3]] == 256).all()
    assert generalisation.joined(["ab"], tokenizer, 8) is None
    rows = generalisation.joined(["abcd", "efg", "hi"], byte_tokenizer(), 4)  # as decoders begin
    assert rows.inputs()["input_ids"][:, 1:].tolist() == tiny.tokens("abcdefghi").view(3, 3).tolist()
    assert (rows.inputs()["input_ids"][:, 0] == 256).all()


# --- Fig. 6 -----------------------------------------------------------------------------------------------------------


def test_a_figure_of_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    figure = load("figure_6")

    def result(recipe: str, length: int, seconds: float) -> dict[str, Any]:
        spread = {"median": seconds, "low": seconds, "high": seconds}
        times = {"ours": spread, "softmax": {**spread, "median": length / 1000}}
        return {"recipe": recipe, "feature_dim": 8, "length": length, "backward": False, "peak_bytes": 2**21,
                "softmax_peak_bytes": 2**20, **times}  # fmt: skip

    results = [result(name, length, 0.25) for name in ("hedgehog", "taylor") for length in (1024, 2048)]
    record = {"threads": 2, "heads": 4, "head_dim": 16, "repeats": 3, "results": results}
    source, page = tmp_path / "times.json", tmp_path / "figure.md"
    source.write_text(json.dumps(record))
    call(figure, monkeypatch, source, "--output", page)
    assert "| 2,048 | 2,048.0 | 250.0 | 250.0 | 1.0 | 2.0 | 2.0 |" in page.read_text()
    assert "at 2,048 tokens: 8.2 (Hedgehog) and 8.2 (Taylor)" in page.read_text()
    assert ">Hedgehog</text>" in page.with_suffix(".svg").read_text()

    source.write_text(json.dumps(record | {"results": results[:-1]}))
    with pytest.raises(SystemExit, match="2"):
        call(figure, monkeypatch, source, "--output", tmp_path / "other.md")
    assert "missing [('taylor', 2048)]" in capsys.readouterr().err
    assert not list(tmp_path.glob("other*"))


def test_the_committed_figure_is_that_of_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HEDGEHOG.parents[1])
    call(load("figure_6"), monkeypatch, "benchmarks/results/wide.json", "--output", tmp_path / "figure_6.md")
    for name in ("figure_6.md", "figure_6.svg"):
        assert (tmp_path / name).read_text() == (HEDGEHOG / name).read_text(), "python experiments/hedgehog/figure_6.py"
