"""Stage 2: LoRA on the attention projections with the next-token loss, merged at the end (LoLCATs sec. 3.2)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from linearize.config import FinetuneConfig
from linearize.hf.classes import projections
from linearize.training.data import PackedRows
from linearize.training.loop import TrainResult, Unit, load_trained, train


def finetune(
    model: PreTrainedModel,
    train_rows: PackedRows,
    validation_rows: PackedRows,
    config: FinetuneConfig,
    *,
    output_dir: Path,
    seed: int = 0,
    title: str = "fine-tuning",
) -> TrainResult:
    """Train low-rank adapters on `model` (a student, or a plain teacher as a control) and merge them into it.

    Everything else is frozen. Weights that the merge changes are copied first, so a teacher that shares its storage
    with `model` stays as it is.
    """
    adapted = _adapted(model, config, seed)
    objective = NextTokenObjective(adapted, config)
    result = train(objective, train_rows, validation_rows, config, output_dir=output_dir, seed=seed, title=title)
    _merge(adapted, model, config)
    return result


def load_finetuned(model: PreTrainedModel, config: FinetuneConfig, output_dir: Path) -> None:
    """Merge the adapters of a finished stage into `model`, in place."""
    adapted = _adapted(model, config, seed=0)
    load_trained(NextTokenObjective(adapted, config).units, output_dir)
    _merge(adapted, model, config)


def _adapted(model: PreTrainedModel, config: FinetuneConfig, seed: int) -> PeftModel:
    targets = projections(model, config.lora.targets)
    # The adapters' random init must depend on the seed alone, not on what ran before this stage.
    torch.manual_seed(seed)
    lora = LoraConfig(
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,  # type: ignore[arg-type]
        lora_dropout=config.lora.dropout,
        target_modules=list(targets),
        fan_in_fan_out=all(not isinstance(module, nn.Linear) for module in targets.values()),
    )
    with warnings.catch_warnings():
        # PEFT asks transformers by a name that it has since deprecated; the user can do nothing about that.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return get_peft_model(model, lora)  # type: ignore[return-value]


def _merge(adapted: PeftModel, model: PreTrainedModel, config: FinetuneConfig) -> None:
    module: Any
    for module in projections(model, config.lora.targets).values():
        weight = module.base_layer.weight
        module.base_layer.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    adapted.merge_and_unload()


class NextTokenObjective:
    """Next-token cross-entropy, averaged over the labels of all rows of a step, on the trainable parameters."""

    def __init__(self, model: nn.Module, config: FinetuneConfig) -> None:
        self._model, self._config = model, config
        self.units: Sequence[Unit] = [
            Unit("model", {name: p for name, p in model.named_parameters() if p.requires_grad})
        ]

    def backward(self, micro_batches: list[PackedRows]) -> dict[str, float]:
        """Gradients of the mean loss over the rows' labels."""
        self._model.train()
        return {"model": self._loss(micro_batches, learn=True)}

    def evaluate(self, rows: PackedRows) -> dict[str, float]:
        """The held-out loss."""
        self._model.eval()
        size = self._config.micro_batch_size or self._config.batch_size
        return {"model": self._loss([rows.rows(slice(i, i + size)) for i in range(0, len(rows), size)], learn=False)}

    def _loss(self, batches: list[PackedRows], learn: bool) -> float:
        device = next(self._model.parameters()).device
        # At least 1: long prompts can fill all rows of a step, whose loss is then 0.
        labels = max(1, sum(int((batch.labels != -100).sum()) for batch in batches))
        total = 0.0
        for batch in batches:
            inputs = {name: tensor.to(device) for name, tensor in batch.batch().items()}
            with torch.set_grad_enabled(learn):
                loss = self._model(**inputs, use_cache=False, num_items_in_batch=labels).loss
                if learn:
                    loss.backward()
            total += loss.item()
        return total
