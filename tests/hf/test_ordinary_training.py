"""A student is an ordinary model of transformers: adapters and Trainer take it as it is."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import DataCollatorWithFlattening, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

import linearize
from linearize.hf.attention import linearized_layers
from tests.hf.checks import assert_close, uncached
from tests.hf.models import CASE, Case, make_student, make_teacher, random_tokens, student_of
from tests.hf.test_ordinary_model import EACH, KINDS, loaded, saved

# peft asks transformers under a name that newer releases deprecate.
PEFT = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


# --- adapters ---------------------------------------------------------------------------------------------------------


def adapted_and_trained(student: PreTrainedModel, **options: Any) -> Any:
    """With LoRA, after a step."""
    torch.manual_seed(0)
    model = get_peft_model(student, LoraConfig(r=2, task_type="CAUSAL_LM", **options))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    ids = random_tokens(2, 20)
    for _ in range(2):  # after the first, only half of the adapters' weights are other than 0
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
    return model.eval()


@PEFT
@EACH
def test_adapters_in_files(case: Case, tmp_path: Path) -> None:
    """Saved, loaded onto the saved student, by its own name too, and merged."""
    base, ids = saved(case, tmp_path / "student"), random_tokens(2, 12)
    conv1d = case.architecture == "gpt2"
    targets = ["c_attn"] if conv1d else ["q_proj", "v_proj"]
    model = adapted_and_trained(loaded(base), target_modules=targets, fan_in_fan_out=conv1d)
    expected = uncached(model, ids)
    assert not torch.allclose(expected, uncached(student_of(case), ids))
    model.save_pretrained(tmp_path / "adapter")
    for again in (
        PeftModel.from_pretrained(loaded(base), tmp_path / "adapter"),
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float64),
    ):
        assert linearized_layers(again)
        assert_close(uncached(again.eval(), ids), expected)
    merged = model.merge_and_unload()
    assert type(merged) is type(student_of(case))
    assert_close(uncached(merged, ids), expected)
    merged.save_pretrained(tmp_path / "merged")
    assert_close(uncached(loaded(tmp_path / "merged"), ids), expected)


@PEFT
@pytest.mark.parametrize("case", [*KINDS, CASE["gpt2-sliding"]], ids=lambda case: case.name)
def test_all_linear_leaves_mixers_alone(case: Case) -> None:
    student = copy.deepcopy(student_of(case))
    before = {name: x.clone() for name, x in student.state_dict().items() if ".mixer." in name}
    options = dict(target_modules="all-linear", fan_in_fan_out=case.architecture == "gpt2")
    model = adapted_and_trained(student, **options)
    adapters = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(adapters) >= 2 * 4 * len(linearized_layers(model)) and not any(".mixer." in name for name in adapters)
    after = {name: x for name, x in model.base_model.model.state_dict().items() if ".mixer." in name}
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], x) for name, x in before.items())


@PEFT
def test_an_adapter_does_not_take_the_teacher_for_its_base(tmp_path: Path) -> None:
    """It would load onto a softmax model without a word. A student that was never saved has no name."""
    make_teacher("llama").save_pretrained(tmp_path / "teacher")
    student = linearize.convert(loaded(tmp_path / "teacher"), Case("").recipe())
    model = get_peft_model(student, LoraConfig(r=2, target_modules=["q_proj"]))
    assert not model.peft_config["default"].base_model_name_or_path


# --- Trainer ----------------------------------------------------------------------------------------------------------


def train(student: PreTrainedModel, folder: Path, *, resume: bool = False, **options: Any) -> Trainer:
    rows = [dict(input_ids=ids, labels=ids) for ids in random_tokens(8, 16)]
    settings = dict(max_steps=6, save_steps=3, logging_steps=1, learning_rate=1e-2, lr_scheduler_type="constant")
    settings |= dict(per_device_train_batch_size=8, use_cpu=True, report_to=[], disable_tqdm=True) | options
    trainer = Trainer(student, TrainingArguments(str(folder), **settings), train_dataset=rows)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def untrained(case: Case) -> PreTrainedModel:
    return make_student(case, make_teacher(case.architecture).float()).train()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@EACH
def test_trainer(case: Case, tmp_path: Path) -> None:
    trainer = train(untrained(case), tmp_path / "whole")
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 6 and losses[-1] < 0.9 * losses[0]
    expected = dict(trainer.model.named_parameters())
    again = loaded(tmp_path / "whole" / "checkpoint-6", dtype=torch.float32)
    assert type(again) is type(student_of(case))
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, expected[name])
    # Killed after three steps, and started again.
    shutil.copytree(tmp_path / "whole" / "checkpoint-3", tmp_path / "killed" / "checkpoint-3")
    resumed = train(untrained(case), tmp_path / "killed", resume=True)
    assert resumed.state.global_step == 6
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, expected[name])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@EACH
def test_trainer_with_gradient_checkpointing(case: Case, tmp_path: Path) -> None:
    """The same steps, so the same gradients."""
    plain = train(untrained(case), tmp_path / "plain", max_steps=2)
    student, calls = untrained(case), []
    next(iter(linearized_layers(student).values())).mixer.register_forward_hook(lambda *_: calls.append(1))
    found = train(student, tmp_path / "checkpointed", max_steps=2, gradient_checkpointing=True)
    assert len(calls) == 2 * 2
    expected = dict(plain.model.named_parameters())
    for name, parameter in found.model.named_parameters():
        assert_close(parameter, expected[name], 1e-5)


# --- gradient accumulation --------------------------------------------------------------------------------------------

LENGTHS = (24, 5, 17, 9)  # of rows


def unequal_rows() -> list[dict[str, list[int]]]:
    """Rows of different lengths; the first tokens of one have no loss, as those of a prompt."""
    rows = []
    for index, length in enumerate(LENGTHS):
        ids = random_tokens(1, length, seed=index)[0].tolist()
        prompt = 6 if index == 0 else 0
        rows.append(dict(input_ids=ids, labels=[-100] * prompt + ids[prompt:]))
    return rows


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Rows with padding behind them, as a batch of tensors."""
    longest = max(len(row["input_ids"]) for row in rows)
    fill = dict(input_ids=0, labels=-100, attention_mask=0)
    whole = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in rows]
    return {
        name: torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in whole])
        for name, value in fill.items()
    }


class Gradients(TrainerCallback):
    """Copies of the gradients of the first step, by parameter."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        self.found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def one_step(model: Any, folder: Path, batch_size: int, collator: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss that Trainer logs of a step over all rows, `batch_size` at a time, and the gradients."""
    options: dict[str, Any] = dict(max_steps=1, logging_steps=1, learning_rate=1e-3, max_grad_norm=0.0, use_cpu=True)
    options |= dict(report_to=[], disable_tqdm=True, save_strategy="no", remove_unused_columns=False)
    options |= dict(per_device_train_batch_size=batch_size, gradient_accumulation_steps=len(LENGTHS) // batch_size)
    gradients = Gradients()
    arguments = TrainingArguments(str(folder), **options)
    trainer = Trainer(model, arguments, collator, train_dataset=unequal_rows(), callbacks=[gradients])
    trainer.train()
    return next(row["loss"] for row in trainer.state.log_history if "loss" in row), gradients.found


def in_training(case: Case, adapters: bool) -> Any:
    """A new student in fp64, the same weights every time, or LoRA on it."""
    model = make_student(case, make_teacher(case.architecture)).train()
    if not adapters:
        return model
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


@PEFT
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "name, collator, adapters",
    [
        ("llama-none", padded, False),
        ("llama-mixed", padded, False),
        ("llama-mixed", DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True), False),
        ("llama-sliding", padded, True),
        ("llama-cache", padded, False),
        ("gpt2-sliding", padded, False),
    ],
)
def test_accumulated_gradients(name: str, collator: Any, adapters: bool, tmp_path: Path) -> None:
    """The loss is the mean over the tokens of a whole step, not of the means of its batches."""
    loss, expected = one_step(in_training(CASE[name], adapters), tmp_path, 4, collator)
    found_loss, found = one_step(in_training(CASE[name], adapters), tmp_path, 2, collator)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert found.keys() == expected.keys() and max(float(x.abs().max()) for x in expected.values()) > 1e-3
    for parameter, gradient in expected.items():
        assert_close(found[parameter], gradient, 1e-9)
