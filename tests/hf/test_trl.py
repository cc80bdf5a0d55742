"""A student in TRL's SFTTrainer: rows padded, without padding, packed, and in accumulated batches train alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed; `make test-trl` installs it and runs this")
from trl import SFTConfig, SFTTrainer

from tests.byte_tokenizer import byte_tokenizer
from tests.hf.checks import assert_close
from tests.hf.models import CASE
from tests.hf.test_ordinary_training import LENGTHS, PEFT, Gradients, in_training, unequal_rows

WAYS: dict[str, dict[str, Any]] = {
    "accumulated": dict(per_device_train_batch_size=2),
    "without padding": dict(padding_free=True, max_length=None),
    "packed": dict(packing=True, max_length=sum(LENGTHS)),
    "checkpointed": dict(gradient_checkpointing=True),
}


def one_step(model: Any, folder: Path, **changes: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss that SFTTrainer logs of a step over all rows, and the gradients."""
    options: dict[str, Any] = dict(max_steps=1, logging_steps=1, max_grad_norm=0.0, use_cpu=True, bf16=False)
    options |= dict(gradient_checkpointing=False, report_to=[], disable_tqdm=True, save_strategy="no")
    options |= dict(per_device_train_batch_size=len(LENGTHS)) | changes
    options["gradient_accumulation_steps"] = len(LENGTHS) // options["per_device_train_batch_size"]
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    gradients, rows = Gradients(), datasets.Dataset.from_list(unequal_rows())
    config = SFTConfig(str(folder), **options)
    trainer = SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer, callbacks=[gradients])
    trainer.train()
    return next(row["loss"] for row in trainer.state.log_history if "loss" in row), gradients.found


@PEFT
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name, adapters", [("llama-mixed", False), ("llama-sliding", True), ("llama-cache", False)])
def test_sft(name: str, adapters: bool, way: str, tmp_path: Path) -> None:
    """TRL computes the loss in fp32, hence the tolerance."""
    loss, expected = one_step(in_training(CASE[name], adapters), tmp_path)
    found_loss, found = one_step(in_training(CASE[name], adapters), tmp_path, **WAYS[way])
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert found.keys() == expected.keys() and max(float(x.abs().max()) for x in expected.values()) > 1e-3
    for parameter, gradient in expected.items():
        assert_close(found[parameter], gradient, 1e-6)
