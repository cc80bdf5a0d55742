"""What models answer on held-out rows, against one row at a time without padding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from linearize import Recipe, convert
from linearize.configs.data import DataConfig
from linearize.data.examples import Texts
from linearize.data.load import load_dataset, load_processor
from linearize.data.packing import Dataset
from linearize.evaluation import answers
from linearize.evaluation.answers import answering, compared_outputs, embeddings
from linearize.evaluation.metrics import MaskedTokens, Predictions, Similarities
from linearize.hf.checkpoint import load_model, read_config
from tests import tiny

pytestmark = pytest.mark.usefixtures("few")

CPU = torch.device("cpu")
FOLDERS = {
    "text_classification": (tiny.encoder_folder, "ForSequenceClassification", tiny.sentences_file),
    "token_classification": (tiny.encoder_folder, "ForTokenClassification", tiny.words_file),
    "masked_language_modelling": (tiny.encoder_folder, "ForMaskedLM", tiny.sentences_file),
    "text_embedding": (tiny.encoder_folder, "Model", tiny.sentences_file),
}
each_batch_size = pytest.mark.parametrize("batch_size", [1, 5, 64])


def made(task: str) -> tuple[Recipe, PreTrainedModel, PreTrainedModel, Dataset]:
    """A teacher, its student, and the data of a task, rows of many lengths among them."""
    make, head, file = FOLDERS[task]
    loss = {"finetune.loss": {"labels": 0, "output_mse": 1}} if task == "text_embedding" else {}
    data = {"data.task": {"type": task}, "data.text_column": "sentence", "data.sequence_length": 40}
    data |= {"data.dataset": file(), "data.validation_fraction": 0.3}
    recipe, folder = Recipe.load("hedgehog-bert", data | loss), make(head)
    dataset = load_dataset(recipe.data, load_processor(recipe.data.task, folder), read_config(folder), seed=0)
    task_class = recipe.data.task.auto_class
    teacher = load_model(folder, dtype=torch.float32, device=CPU, auto_class=task_class)
    return recipe, teacher, convert(teacher, recipe), dataset


def alone(model: PreTrainedModel, rows: Texts, index: int) -> object:
    """The outputs for one row's own tokens, without padding and without a mask."""
    tokens = rows.input_ids[index, : rows.lengths[index]]
    with torch.no_grad():
        return model(input_ids=tokens[None])


def texts(dataset: Dataset) -> Texts:
    rows = dataset.test
    assert isinstance(rows, Texts)
    assert len(set(rows.lengths.tolist())) > 3, "rows of many lengths"
    return rows


@each_batch_size
def test_embeddings_are_means_over_tokens(monkeypatch: pytest.MonkeyPatch, batch_size: int) -> None:
    monkeypatch.setattr(answers, "BATCH_SIZE", batch_size)
    recipe, teacher, student, dataset = made("text_embedding")
    rows, expected = texts(dataset), {}
    for name, model in (("teacher", teacher), ("student", student)):
        states = [alone(model, rows, index).last_hidden_state[0] for index in range(len(rows))]  # type: ignore[attr-defined]
        means = torch.stack([sum(state) / len(state) for state in states])
        expected[name] = means / means.square().sum(1, keepdim=True).sqrt()
        torch.testing.assert_close(embeddings(model, rows, title=name), expected[name], atol=1e-5, rtol=1e-4)

    answer = answering(recipe.data.task, dataset, None, teacher)
    cosine = (expected["teacher"] * expected["student"]).sum(1)
    assert float(cosine.min()) < 0.999, "the student is another model"
    found = answer(student, "student")
    assert isinstance(found, Similarities)
    assert found.scores()["cosine"] == pytest.approx(float(cosine.mean()), abs=1e-5)
    assert answer(teacher, "teacher").scores()["cosine"] == pytest.approx(1.0, abs=1e-5)


@each_batch_size
def test_predictions_are_in_the_rows_order(monkeypatch: pytest.MonkeyPatch, batch_size: int) -> None:
    monkeypatch.setattr(answers, "BATCH_SIZE", batch_size)
    recipe, teacher, student, dataset = made("text_classification")
    rows = texts(dataset)
    answer = answering(recipe.data.task, dataset, None, None)
    for model in (teacher, student):
        logits = torch.cat([alone(model, rows, index).logits for index in range(len(rows))])  # type: ignore[attr-defined]
        found = answer(model, "a model")
        assert isinstance(found, Predictions)
        torch.testing.assert_close(found.outputs, logits, atol=1e-5, rtol=1e-4)
        assert torch.equal(found.labels, rows.targets()) and found.example.tolist() == list(range(len(rows)))
        right = sum(int(line.argmax() == label) for line, label in zip(logits, rows.targets(), strict=True))
        assert found.scores()["accuracy"] == pytest.approx(right / len(rows))


@each_batch_size
def test_tokens_belong_to_their_rows(monkeypatch: pytest.MonkeyPatch, batch_size: int) -> None:
    monkeypatch.setattr(answers, "BATCH_SIZE", batch_size)
    recipe, _, student, dataset = made("token_classification")
    rows = texts(dataset)
    labels: Tensor = rows.labels  # type: ignore[attr-defined]
    outputs, truth, example = [], [], []
    for index in range(len(rows)):
        logits = alone(student, rows, index).logits[0]  # type: ignore[attr-defined]
        for position in range(int(rows.lengths[index])):
            if labels[index, position] != -100:
                outputs.append(logits[position])
                truth.append(int(labels[index, position]))
                example.append(index)
    found = answering(recipe.data.task, dataset, None, None)(student, "student")
    assert isinstance(found, Predictions)
    torch.testing.assert_close(found.outputs, torch.stack(outputs), atol=1e-5, rtol=1e-4)
    assert (found.labels.tolist(), found.example.tolist()) == (truth, example)
    assert len(set(example)) == len(rows) < len(example)


@each_batch_size
def test_masked_tokens_and_how_likely_they_are(monkeypatch: pytest.MonkeyPatch, batch_size: int) -> None:
    monkeypatch.setattr(answers, "BATCH_SIZE", batch_size)
    recipe, teacher, student, dataset = made("masked_language_modelling")
    rows = texts(dataset)
    labels: Tensor = rows.labels  # type: ignore[attr-defined]
    answer, answered = answering(recipe.data.task, dataset, None, None), {}
    for model in (teacher, student):
        right, logs = [], []
        for index in range(len(rows)):
            logits = alone(model, rows, index).logits[0]  # type: ignore[attr-defined]
            for position in range(int(rows.lengths[index])):
                if (label := int(labels[index, position])) != -100:
                    right.append(int(logits[position].argmax()) == label)
                    logs.append(float(logits[position].log_softmax(-1)[label]))
        answered[model] = found = answer(model, "a model")
        assert isinstance(found, MaskedTokens) and len(found) == len(rows) < len(right)
        scores = found.scores()
        assert scores["accuracy"] == pytest.approx(sum(right) / len(right))
        assert -math.log(scores["likelihood"]) == pytest.approx(-sum(logs) / len(logs), rel=1e-4)
        only = found.scores(torch.tensor([1, 1, 2]))
        assert only != scores
    alike = answered[teacher].agreement(answered[student])
    assert answered[teacher].agreement(answered[teacher]).unique().tolist() == [1] != alike.unique().tolist()


def test_last_tokens_of_a_recall_are_compared() -> None:
    task = {"type": "associative_recall", "vocabulary_size": 8, "length": 10, "labels": "every"}
    config = DataConfig(task=task | {"train_examples": 4, "held_out_examples": 40})  # type: ignore[arg-type]
    recipe = Recipe.load("hedgehog-scratch").model_copy(update={"data": config})
    model = tiny.llama()
    dataset = load_dataset(recipe.data, None, model.config.to_dict(), seed=0)
    outputs = compared_outputs(model, dataset.test, title="recall")
    tokens = next(iter(dataset.test.tensors()))
    with torch.no_grad():
        expected = torch.cat([model(input_ids=row[None]).logits[:, -2] for row in tokens])
    torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=1e-4)
    found = answering(config.task, dataset, None, None)(model, "recall")
    right = (expected.argmax(1) == tokens[:, -1]).double().mean()
    assert found.scores()["accuracy"] == pytest.approx(float(right))
