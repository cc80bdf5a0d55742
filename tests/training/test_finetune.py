"""Fine-tuning: which weights train, on which loss, and that merging them changes nothing but their form."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

import linearize
from linearize.base import UserError
from linearize.configs.training import FinetuneConfig, LossConfig
from linearize.data.rows import PackedRows
from linearize.evaluation.speed import peak_bytes
from linearize.training.finetune import OutputObjective, finetune, load_finetuned, prepared
from linearize.training.loop import TrainResult
from tests import tiny

TOLERANCE = 1e-10
ROUNDING = 2e-6  # transformers computes the loss in fp32 whatever the model's dtype
TRAIN = tiny.packed([[64], [20, 44]] * 8, seed=1, vocabulary=4)
VALIDATION = tiny.packed([[64], [1, 30, 33]], seed=2, vocabulary=4)
CONFIG = tiny.recipe(finetune__lora__rank=3, finetune__lora__alpha=12.0).finetune
ALL = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}


def students() -> list[Any]:
    """How to make a teacher, and how to make of it what is trained."""

    def as_it_is(teacher: PreTrainedModel) -> PreTrainedModel:
        return teacher

    def converted(teacher: PreTrainedModel) -> PreTrainedModel:
        return linearize.convert(teacher, tiny.recipe())

    makers = (tiny.llama, as_it_is), (tiny.llama, converted), (tiny.gpt2, converted)
    return [pytest.param(*made, id=name) for name, made in zip(("teacher", "llama", "gpt2"), makers, strict=True)]


each_model = pytest.mark.parametrize("make, prepare", students())
Make, Prepare = Callable[[], PreTrainedModel], Callable[[PreTrainedModel], PreTrainedModel]


def config(**changes: Any) -> FinetuneConfig:
    assert CONFIG is not None
    return CONFIG.model_copy(update=changes)


def tune(model: PreTrainedModel, folder: Path, chosen: FinetuneConfig | None = None) -> TrainResult:
    return finetune(model, TRAIN, VALIDATION, chosen or config(), output_dir=folder)


def next_token_loss(model: PreTrainedModel, rows: PackedRows) -> Tensor:
    """Mean over all labels of -log p(label | tokens before it), one row at a time."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for index in range(len(rows)):
        row = rows.rows([index])
        logits = model(input_ids=row.input_ids, position_ids=row.position_ids, use_cache=False).logits
        for slot in range(1, row.labels.shape[1]):
            label = int(row.labels[0, slot])
            if label != -100:
                total = total - logits[0, slot - 1].log_softmax(-1)[label]
                count += 1
    return total / count


def changed(model: PreTrainedModel, before: dict[str, Tensor]) -> set[str]:
    after = tiny.snapshot(model)
    assert after.keys() == before.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


# --- what is trained --------------------------------------------------------------------------------------------------


@each_model
def test_the_merged_model_is_the_adapted_one(tmp_path: Path, make: Make, prepare: Prepare) -> None:
    model = prepare(make().double())
    before = tiny.snapshot(model)
    result = tune(model, tmp_path)
    assert result.best_loss["model"] < result.initial_loss["model"] - 0.1
    # The loss with adapters, as the training saw it, is that of the model without them.
    with torch.no_grad():
        assert abs(next_token_loss(model, VALIDATION).item() - result.best_loss["model"]) < ROUNDING

    adapters, seen = load_file(tmp_path / "trained.safetensors"), 0
    for name, weight in tiny.snapshot(model).items():
        path = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{path}.lora_A.default.weight" in adapters:
            A, B = (adapters[f"{path}.lora_{letter}.default.weight"].double() for letter in "AB")
            assert A.shape[0] == B.shape[1] == 3
            delta = 12 / 3 * B @ A  # [out, in]; a Conv1D keeps its weight as [in, out]
            expected = before[name] + (delta.T if model.config.model_type == "linearized_gpt2" else delta)
            torch.testing.assert_close(weight, expected, rtol=0, atol=TOLERANCE)
            seen += 1
        else:
            assert torch.equal(weight, before[name])
    assert len(adapters) == 2 * seen > 0


@pytest.mark.parametrize(
    "make, targets, expected",
    [
        (tiny.llama, "qkvo", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (tiny.llama, "vq", {"q_proj", "v_proj"}),
        (tiny.gpt2, "qkvo", {"attn.c_attn", "attn.c_proj"}),
        (tiny.gpt2, "k", {"attn.c_attn"}),
        (tiny.gpt2, "o", {"attn.c_proj"}),  # the other c_proj, the MLP's, stays as it is
    ],
)
def test_only_the_targets_change(tmp_path: Path, make: Make, targets: str, expected: set[str]) -> None:
    teacher = make()
    given, shared = tiny.snapshot(teacher), {p.data_ptr() for p in teacher.parameters()}
    student = linearize.convert(teacher, tiny.recipe())
    before = tiny.snapshot(student)
    lora = config().lora.model_copy(update={"targets": tuple(targets)})
    tune(student, tmp_path, config(lora=lora))

    found = changed(student, before)
    assert len(found) == 2 * len(expected)
    assert {name for name in found if name.endswith(tuple(f"{module}.weight" for module in expected))} == found
    # The teacher's own weights are as they were, and what did not change is still one storage with them.
    assert not changed(teacher, given)
    own = {name for name, p in student.named_parameters() if p.data_ptr() not in shared}
    assert own == found | {name for name in before if ".mixer." in name}


def test_only_adapters_have_gradients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    student = linearize.convert(tiny.llama(), tiny.recipe())
    with_gradient = set()
    original = OutputObjective.backward

    def backward(self: OutputObjective, micro_batches: list[PackedRows]) -> dict[str, float]:
        losses = original(self, micro_batches)
        with_gradient.update(name for name, p in student.named_parameters() if p.grad is not None)
        return losses

    monkeypatch.setattr(OutputObjective, "backward", backward)
    tune(student, tmp_path)
    assert len(with_gradient) == 2 * 4 * 2  # layers, projections, A and B
    assert all(".lora_" in name for name in with_gradient)
    assert not any(p.requires_grad for p in student.parameters())


def test_new_weights_alone_and_with_adapters(tmp_path: Path) -> None:
    for lora in (None, config().lora):
        teacher = tiny.llama()
        given = tiny.snapshot(teacher)
        student = linearize.convert(teacher, tiny.recipe())
        before = tiny.snapshot(student)
        result = tune(student, tmp_path / str(lora is None), config(lora=lora, mixers=True, lr=1e-2))
        assert result.best_loss["model"] < result.initial_loss["model"]
        found = changed(student, before)
        mixers = {name for name in before if ".mixer." in name}
        assert mixers <= found
        assert (found == mixers) == (lora is None)
        assert not changed(teacher, given)


@pytest.mark.parametrize("adapters", [False, True], ids=["alone", "and adapters"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_weights(tmp_path: Path, dtype: torch.dtype, adapters: bool) -> None:
    """In half precision too: updates far below its spacing add up in the fp32 weights that train."""
    teacher = tiny.llama(tie_word_embeddings=True).to(dtype)
    given = tiny.snapshot(teacher)
    student = linearize.convert(teacher, tiny.recipe())
    before = tiny.snapshot(student)
    chosen = config(lora=config().lora if adapters else None, all_weights=True, lr=1e-3)
    result = tune(student, tmp_path, chosen)
    assert result.best_loss["model"] < result.initial_loss["model"] - 0.1
    assert changed(student, before) == {name for name in before if "inv_freq" not in name}
    assert not changed(teacher, given)
    assert all(x.dtype == before[name].dtype for name, x in student.named_parameters())
    assert student.lm_head.weight is student.model.embed_tokens.weight  # still tied
    saved = load_file(tmp_path / "trained.safetensors")
    assert all(x.dtype == torch.float32 for x in saved.values())
    loaded = linearize.convert(teacher, tiny.recipe())
    load_finetuned(loaded, chosen, tmp_path)
    assert not changed(loaded, tiny.snapshot(student))


IN_FP32 = [{}, {"mixers": True}, {"lora": None, "mixers": True}, {"lora": None, "all_weights": True}]
in_fp32 = pytest.mark.parametrize("fields", IN_FP32, ids=["adapters", "adapters and mixers", "mixers", "all weights"])


@pytest.mark.parametrize("fields", [{}, {"lora": None, "all_weights": True}], ids=["adapters", "all weights"])
@pytest.mark.parametrize("lr, lost", [(1e-7, True), (1e-2, False)])
def test_what_rounding_undoes_is_said(
    tmp_path: Path, caplog: Any, fields: dict[str, Any], lr: float, lost: bool
) -> None:
    """In half precision alone: a small learning rate moves few weights by as much as their spacing."""
    for dtype in (torch.bfloat16, torch.float32):
        caplog.clear()
        student = linearize.convert(tiny.llama().to(dtype), tiny.recipe())
        result = tune(student, tmp_path / str(dtype), config(lr=lr, **fields))
        assert result.best_loss["model"] < result.initial_loss["model"]
        assert bool(caplog.messages) == (lost and dtype == torch.bfloat16)
        for said in caplog.messages:
            words = r"rounding the weights to bfloat16 leaves (\d+) % of the gain: .* ([\d.]+) rounded\. Raise"
            found = re.search(words, said)
            assert found is not None and int(found[1]) < 50
            rounded = next_token_loss(copy.deepcopy(student).float(), VALIDATION).item()
            assert float(found[2]) == pytest.approx(rounded, abs=1e-4)


@in_fp32
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_start_that_stays_best_is_said(
    tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], dtype: torch.dtype
) -> None:
    """Rounding is not the cause: every step has raised the loss."""
    backward = OutputObjective.backward

    def uphill(self: OutputObjective, micro_batches: list[PackedRows]) -> dict[str, float]:
        losses = backward(self, micro_batches)
        for parameter in self.units[0].parameters.values():
            assert parameter.grad is not None
            parameter.grad.neg_()
        return losses

    monkeypatch.setattr(OutputObjective, "backward", uphill)
    student = linearize.convert(tiny.llama().to(dtype), tiny.recipe())
    before = tiny.snapshot(student)
    tune(student, tmp_path, config(lr=1e-4, **fields))
    (said,) = caplog.messages
    assert "no held-out loss was below the first" in said and "rounding" not in said
    assert not changed(student, before)
    caplog.clear()
    tune(student, tmp_path, config(lr=1e-4, **fields))
    assert not caplog.messages, "a finished stage has said it"


@in_fp32
def test_held_out_losses_are_computed_in_fp32(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Hold the held-out losses of a bf16 model to those of the same weights in fp32."""
    student = linearize.convert(tiny.llama().bfloat16(), tiny.recipe())
    exact = next_token_loss(copy.deepcopy(student).float(), VALIDATION)
    rounded = next_token_loss(student, VALIDATION)
    result = tune(student, tmp_path, config(lr=6e-7, **fields))
    found = result.initial_loss["model"]
    assert found == pytest.approx(exact.item(), abs=1e-5) and (rounded - exact).abs().item() > 1e-3
    assert 0 < found - result.best_loss["model"] < 1e-3, "a gain that half precision hides"


def test_a_teacher_in_half_precision_has_nothing_to_learn_of_itself(tmp_path: Path) -> None:
    """What is compared is computed alike, so that the loss is 0 from the start."""
    loss = LossConfig(labels=0, kl=1)
    for fields in IN_FP32[0], IN_FP32[-1]:
        teacher = tiny.llama().bfloat16()
        chosen = config(loss=loss, **fields)
        folder = tmp_path / str(len(fields))
        result = finetune(copy.deepcopy(teacher), TRAIN, VALIDATION, chosen, output_dir=folder, teacher=teacher)
        assert result.initial_loss["model"] == 0 and result.steps == 0


@pytest.mark.parametrize(
    "fields",
    [{}, {"mixers": True}, {"lora": None, "all_weights": True}],
    ids=["adapters", "adapters and mixers", "all weights"],
)
@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError])
def test_what_raises_leaves_the_model_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], stop: type[BaseException]
) -> None:
    student = linearize.convert(tiny.llama(), tiny.recipe()).eval()
    before, shared = tiny.snapshot(student), {name: p.data_ptr() for name, p in student.named_parameters()}
    backward, steps = OutputObjective.backward, []

    def stopped(self: OutputObjective, micro_batches: list[PackedRows]) -> dict[str, float]:
        if len(steps) == 2:
            raise stop("in the middle")
        steps.append(len(steps))
        return backward(self, micro_batches)

    monkeypatch.setattr(OutputObjective, "backward", stopped)
    with pytest.raises(stop):
        tune(student, tmp_path / "stage", config(**fields))
    assert not changed(student, before) and shared == {name: p.data_ptr() for name, p in student.named_parameters()}
    assert not student.training and not any(p.requires_grad for p in student.parameters())
    student.save_pretrained(tmp_path / "saved")
    assert not [name for name in load_file(tmp_path / "saved" / "model.safetensors") if "lora" in name]
    with pytest.raises(UserError, match=r"expected a finished stage, found no trained\.safetensors"):
        load_finetuned(student, config(**fields), tmp_path / "stage")
    assert not changed(student, before)


@pytest.mark.parametrize(
    "fields",
    [{}, {"mixers": True}, {"lora": None, "all_weights": True}, {"all_weights": True}],
    ids=["adapters", "adapters and mixers", "all weights", "all weights and adapters"],
)
@pytest.mark.parametrize("make", [tiny.llama, tiny.gpt2])
def test_weights_end_on_the_line_from_where_they_began(tmp_path: Path, make: Make, fields: dict[str, Any]) -> None:
    """WiSE-FT (arXiv 2109.01903), eq. 1, of what a stage has trained; held-out losses are of weights on that line."""
    teacher, chosen = make().double(), config(**fields, wise_ft_alpha=0.25)
    student = linearize.convert(teacher, tiny.recipe())
    before = tiny.snapshot(student)
    result = finetune(student, TRAIN, TRAIN, chosen, output_dir=tmp_path)  # of which training is sure to learn
    trained = linearize.convert(teacher, tiny.recipe())
    load_finetuned(trained, config(**fields), tmp_path)
    assert changed(student, before) == changed(trained, before) != set()
    found, trained = tiny.snapshot(student), tiny.snapshot(trained)
    for name, weight in found.items():
        expected = 0.75 * before[name] + 0.25 * trained[name]
        torch.testing.assert_close(weight, expected, rtol=0, atol=TOLERANCE)
    loaded = linearize.convert(teacher, tiny.recipe())
    load_finetuned(loaded, chosen, tmp_path)
    assert not changed(loaded, found)
    with torch.no_grad():
        loss = next_token_loss(student, TRAIN).item()
    assert result.best_loss["model"] == pytest.approx(loss, abs=ROUNDING)


def test_nothing_to_train_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"finetune: expected weights to train.*finetune\.lora"):
        tune(tiny.llama(), tmp_path, config(lora=None, mixers=True))


# --- the loss ---------------------------------------------------------------------------------------------------------


def uneven() -> PackedRows:
    """Rows of 47, 45 and 5 labels."""
    rows = tiny.packed([[48], [20, 1, 27], [48]], seed=3)
    rows.labels[2, 6:] = -100
    return rows


def gradients(micro_batches: list[PackedRows]) -> tuple[float, list[Tensor]]:
    model = linearize.convert(tiny.llama().double(), tiny.recipe())
    objective = OutputObjective(model, config())
    loss = objective.backward(micro_batches)["model"]
    return loss, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("splits", [[3], [2, 1], [1, 1, 1]], ids=str)
def test_every_label_of_a_step_counts_the_same(splits: list[int]) -> None:
    rows, model = uneven(), linearize.convert(tiny.llama().double(), tiny.recipe())
    expected = next_token_loss(model, rows)
    starts = [sum(splits[:index]) for index in range(len(splits))]
    loss, found = gradients([rows.rows(slice(a, a + n)) for a, n in zip(starts, splits, strict=True)])
    assert abs(loss - expected.item()) < ROUNDING
    torch.testing.assert_close(
        found, list(torch.autograd.grad(expected, list(model.parameters()))), rtol=ROUNDING, atol=ROUNDING
    )


def test_rows_without_labels_teach_nothing() -> None:
    """A chat's prompts can fill all rows of a step: no loss, no gradient, and not a division by zero."""
    rows = uneven()
    rows.labels[:] = -100
    loss, found = gradients([rows])
    assert loss == 0
    assert found
    assert not any(gradient.any() for gradient in found)


def test_held_out_losses_are_without_dropout() -> None:
    model = linearize.convert(tiny.gpt2(resid_pdrop=0.5), tiny.recipe()).double()
    with torch.no_grad():
        expected = next_token_loss(model.eval(), VALIDATION).item()
    objective = OutputObjective(model, config(micro_batch_size=1))
    assert abs(objective.backward([VALIDATION])["model"] - expected) > 1e-3  # training is with it
    assert abs(objective.evaluate(VALIDATION)["model"] - expected) < ROUNDING


def test_the_teachers_outputs_are_learned(tmp_path: Path) -> None:
    teacher = tiny.llama()
    student = linearize.convert(teacher, tiny.recipe())
    loss = LossConfig(labels=0, kl=1)
    chosen = config(lora=None, all_weights=True, lr=1e-3, loss=loss)
    result = finetune(student, TRAIN, VALIDATION, chosen, output_dir=tmp_path, teacher=teacher)
    assert 0 < result.best_loss["model"] < 0.8 * result.initial_loss["model"]
    with pytest.raises(ValueError, match="teacher: expected the model"):
        finetune(student, TRAIN, VALIDATION, chosen, output_dir=tmp_path / "none")


# --- the files --------------------------------------------------------------------------------------------------------


@each_model
def test_a_finished_stage_is_loaded(tmp_path: Path, make: Make, prepare: Prepare) -> None:
    trained = prepare(make())
    result = tune(trained, tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}

    loaded = prepare(make())
    load_finetuned(loaded, config(), tmp_path)
    assert not changed(loaded, tiny.snapshot(trained))

    again = prepare(make())
    assert tune(again, tmp_path) == result
    assert not changed(again, tiny.snapshot(trained))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_nothing_that_ran_before_matters(tmp_path: Path) -> None:
    models = [linearize.convert(tiny.llama(), tiny.recipe()) for _ in range(2)]
    for index, model in enumerate(models):
        torch.manual_seed(index + 17)
        tune(model, tmp_path / str(index))
    assert not changed(models[0], tiny.snapshot(models[1]))


# --- activation checkpointing -----------------------------------------------------------------------------------------


def step_gradients(make: Make, prepare: Prepare, chosen: FinetuneConfig) -> dict[str, Tensor]:
    """Of one step, in two micro batches."""
    teacher = make().double()
    model = prepare(teacher)
    with prepared(model, chosen, seed=0) as (module, *_):
        objective = OutputObjective(module, chosen, teacher)
        objective.backward([TRAIN.rows(slice(0, 2)), TRAIN.rows(slice(2, 4))])
        return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("trained", ["lora", "all weights"])
@each_model
def test_layers_that_are_computed_again_have_the_same_gradients(make: Make, prepare: Prepare, trained: str) -> None:
    """Dropout of adapters included, which must not be drawn again."""
    assert CONFIG is not None and CONFIG.lora is not None
    lora = CONFIG.lora.model_copy(update={"dropout": 0.5})
    parts = {"lora": {"lora": lora}, "all weights": {"lora": None, "all_weights": True}}[trained]
    chosen = config(**parts, loss=LossConfig(kl=1.0))
    torch.manual_seed(3)
    kept = step_gradients(make, prepare, chosen)
    torch.manual_seed(3)
    again = step_gradients(make, prepare, chosen.model_copy(update={"activation_checkpointing": True}))
    assert again.keys() == kept.keys() and any(gradient.any() for gradient in kept.values())
    for name, gradient in kept.items():
        torch.testing.assert_close(again[name], gradient, rtol=0, atol=TOLERANCE)


def test_layers_that_are_computed_again_take_less_memory() -> None:
    """Of 8 layers, what one has inside, and what enters the others."""
    peaks = {}
    for checkpointing in (False, True):
        chosen = config(activation_checkpointing=checkpointing)
        model = linearize.convert(tiny.llama(layers=8, hidden_size=64, intermediate_size=256), tiny.recipe())
        with prepared(model, chosen, seed=0) as (module, *_):
            objective = OutputObjective(module, chosen)
            peaks[checkpointing] = peak_bytes(lambda it=objective: it.backward([TRAIN]), torch.device("cpu"))
    assert peaks[True] < 0.5 * peaks[False]
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
