"""Train on the model's outputs: LoRA, merged at the end (LoLCATs sec. 3.2), mixers alone, or every weight."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from linearize.base import UserError
from linearize.configs.training import FinetuneConfig, LoRAConfig
from linearize.data.rows import Rows, on_device
from linearize.distributed import all_reduce_losses, is_sharded, shard_batches
from linearize.hf.attention import linearized_layers
from linearize.hf.classes import projections
from linearize.hf.layouts import documents_apart
from linearize.hf.sharding import (
    adopt,
    divided_weights,
    local,
    own_rows,
    replace_weights,
    reshard,
    round_weights,
    see_what_trains,
)
from linearize.training.full_precision import HALF, computed_in_fp32
from linearize.training.loop import TrainResult, Unit, load_trained, train
from linearize.training.losses import output_losses
from linearize.training.resumption import RESULT

logger = logging.getLogger(__name__)
LITTLE = 0.5  # share of the gain of training: a warning says if rounding leaves less

AtEnd = Callable[[], AbstractContextManager[None]]


def finetune(
    model: PreTrainedModel,
    train_rows: Rows,
    validation_rows: Rows,
    config: FinetuneConfig,
    *,
    output_dir: Path | str,
    teacher: PreTrainedModel | None = None,
    seed: int = 0,
    title: str = "fine-tuning",
) -> TrainResult:
    """Train `model` (a student, or a plain teacher as a control) in place, as `config` says; adapters are merged.

    All other weights are frozen. Weights that change are copied first, so a teacher that shares storage with `model` is
    unchanged. A model in half precision computes in it, but trained weights or adapters, updates and held-out losses
    are fp32; weights are rounded at the end. A warning says if rounding loses most of the gain, or if no held-out loss
    was below the first. After an exception the model is as before, without adapters.

    Args:
        train_rows, validation_rows: of `build_dataset`, token ids of shape (rows, `sequence_length`).
        output_dir: its files, errors and resumption are those of `training.loop.train`.
        teacher: the model whose outputs `config.loss` compares with; None: the loss needs none.
    """
    output_dir = Path(output_dir)
    finished = (output_dir / RESULT).is_file()
    with prepared(model, config, seed) as (module, autocast, at_end):
        objective = OutputObjective(module, config, teacher, autocast, at_end)
        result = train(
            objective, train_rows, validation_rows, config, output_dir=output_dir, seed=seed, title=title, model=model
        )
    if not finished:  # else the warning was logged before
        _warn(model, validation_rows, config, teacher, result, title)
    return result


def check_trains(config: FinetuneConfig, mixers: Sequence[nn.Module], stage: str = "finetune") -> None:
    """Check that a stage has weights to train.

    Args:
        mixers: of all converted layers; they may be on the meta device.

    Raises:
        UserError: the stage trains mixers alone, and these have no parameters.
    """
    if not config.all_weights and config.lora is None and not any(True for m in mixers for _ in m.parameters()):
        raise UserError(
            f"{stage}: expected weights to train, found mixers without parameters; set {stage}.lora, or "
            f"{stage}.all_weights=true and {stage}.mixers=false"
        )


def refuse_quantized(model: PreTrainedModel, config: FinetuneConfig, stage: str = "finetune") -> None:
    """Raise UserError if a stage is to train all weights, and these are quantized."""
    if config.all_weights and getattr(model, "is_quantized", False):
        raise UserError(
            f"{stage}.all_weights: expected a model that is not quantized, found quantized weights, which cannot be "
            f"trained; set {stage}.all_weights=false and {stage}.lora, or load it unquantized"
        )


def load_finetuned(model: PreTrainedModel, config: FinetuneConfig, output_dir: Path) -> None:
    """Load the trained parameters of a finished stage into `model`, in place."""
    with prepared(model, config, seed=0) as (module, *_):
        load_trained([_unit(module)], output_dir)


@contextmanager
def prepared(
    model: PreTrainedModel, config: FinetuneConfig, seed: int
) -> Iterator[tuple[nn.Module, torch.dtype | None, AtEnd]]:
    """Make the weights that the config names trainable in the `with` block, as copies, and add adapters.

    Yields the model to train, with adapters if there are any; the dtype of the forward pass if it is not that of the
    weights, else None; and a context manager within which weights are interpolated as at the end of the stage
    (`wise_ft_alpha`). At the end, weights are interpolated, adapters merged and dtypes restored. After an exception,
    everything is restored.
    """
    refuse_quantized(model, config)
    mixers = [layer.mixer for layer in linearized_layers(model).values()]
    check_trains(config, mixers)
    chosen: list[nn.Module] = [model] if config.all_weights else mixers if config.mixers else []
    model.requires_grad_(False)
    changed = list(dict.fromkeys(p for module in chosen for p in module.parameters()))
    before = {p: p.data for p in changed if not isinstance(p, DTensor)}
    divided, was_training = divided_weights(model), model.training
    half = model.dtype if config.all_weights and model.dtype in HALF else None
    adapted: Any = None
    line = _Line(model, before, divided if config.all_weights else {}, config)
    try:
        for parameter, data in before.items():
            dtype = torch.promote_types(data.dtype, torch.float32) if config.all_weights else data.dtype
            parameter.data = data.to(dtype, copy=True)
        if config.all_weights:
            replace_weights(model, lambda _, weight: weight.detach().clone())
        if config.lora is not None:
            adapted = _adapted(model, config.lora, seed)
        for module in chosen:
            module.requires_grad_(True)
        see_what_trains(model)
        if config.activation_checkpointing:
            _checkpointing(model, "enable", {"use_reentrant": False})
        yield model if adapted is None else adapted, half, line.at_end
    except BaseException:
        if adapted is not None:
            adapted.unload()
        for parameter, data in before.items():
            parameter.data = data
        replace_weights(model, lambda name, _: divided[name])
        model.train(was_training)
        raise
    else:
        line.end()
        if adapted is not None:
            assert config.lora is not None
            _merge(adapted, model, config.lora)
        for parameter, data in before.items():
            parameter.data = parameter.data.to(data.dtype)
        round_weights(model)
    finally:
        if config.activation_checkpointing:
            _checkpointing(model, "disable")
        model.requires_grad_(False)


def _warn(
    model: PreTrainedModel,
    validation_rows: Rows,
    config: FinetuneConfig,
    teacher: PreTrainedModel | None,
    result: TrainResult,
    title: str,
) -> None:
    """Warn if a stage has gained little: no held-out loss was below the first, or rounding lost most of the gain."""
    first, best = (sum(losses.values()) for losses in (result.initial_loss, result.best_loss))
    if best >= first:
        if result.steps:  # a control that is the teacher itself takes no step: its loss is 0
            logger.warning(
                "%s: no held-out loss was below the first, %.6g: the weights stay as they were. Lower finetune.lr, or "
                "evaluate more often (finetune.eval_every)",
                title,
                first,
            )
        return
    half = any(parameter.dtype in HALF for parameter in model.parameters())
    if not (half or is_sharded(model) or getattr(model, "is_quantized", False)):
        return
    rounded = OutputObjective(model, config, teacher).evaluate(validation_rows)["model"]
    left = max(0.0, (first - rounded) / (first - best))
    if left < LITTLE:
        logger.warning(
            "%s: rounding the weights to %s leaves %.0f %% of the gain: held-out loss %.6g before, %.6g trained, %.6g "
            "rounded. Raise finetune.lr, or load the model in float32 (--dtype float32)",
            title,
            str(model.config.dtype if is_sharded(model) else model.dtype).removeprefix("torch."),
            100 * left,
            first,
            best,
            rounded,
        )


@dataclass(frozen=True)
class _Line:
    """Interpolation between initial and trained weights of a stage (WiSE-FT, arXiv 2109.01903, eq. 1).

    Attributes:
        before: parameters, and their initial values.
        divided: initial values of divided parameters, by name.
        config: has the interpolation factor `wise_ft_alpha`, and the modules with adapters.
    """

    model: PreTrainedModel
    before: dict[nn.Parameter, Tensor]
    divided: dict[str, Tensor]
    config: FinetuneConfig

    def end(self) -> None:
        """Interpolate weights and adapters, in place."""
        share = self.config.wise_ft_alpha
        for parameter, began in self.before.items():
            parameter.data = began.to(parameter.dtype).lerp(parameter.data, share)
        for name, rows in self._rows().items():
            rows.copy_(local(self.divided[name]).lerp(rows, share))
        for adapters in self._adapters():
            adapters.scale_layer(share)

    @contextmanager
    def at_end(self) -> Iterator[None]:
        """Interpolate weights and adapters in the `with` block only."""
        if self.config.wise_ft_alpha == 1:
            yield
            return
        reshard(self.model)
        weights = {parameter: parameter.data for parameter in self.before}
        rows = {name: rows.clone() for name, rows in self._rows().items()}
        scaling = [dict(adapters.scaling) for adapters in self._adapters()]
        self.end()
        try:
            yield
        finally:
            reshard(self.model)
            for parameter, data in weights.items():
                parameter.data = data
            for name, its in self._rows().items():
                its.copy_(rows[name])
            for adapters, scales in zip(self._adapters(), scaling, strict=True):
                adapters.scaling.update(scales)

    def _rows(self) -> dict[str, Tensor]:
        """Return this process's rows of the divided weights that train."""
        now = divided_weights(self.model) if self.divided else {}
        return {name: local(weight) for name, weight in now.items()}

    def _adapters(self) -> list[Any]:
        """Return the modules that have adapters."""
        lora = self.config.lora
        return [] if lora is None else [*projections(self.model, lora.targets).values()]


def _checkpointing(model: PreTrainedModel, what: str, *options: Any) -> None:
    """Call transformers' method to enable or disable checkpointing, whose name depends on its version."""
    name = f"activation_checkpointing_{what}"
    getattr(model, name if hasattr(model, name) else f"gradient_checkpointing_{what}")(*options)


def _adapted(model: PreTrainedModel, config: LoRAConfig, seed: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model  # imported here to save time at the start

    targets = projections(model, config.targets)
    # The adapters' random init must depend on the seed alone, not on what ran before this stage.
    torch.manual_seed(seed)
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=list(targets),
        fan_in_fan_out=all(not isinstance(module, nn.Linear) for module in targets.values()),
    )
    with warnings.catch_warnings():
        # PEFT uses a deprecated name of transformers, which users cannot change.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return get_peft_model(model, lora)  # type: ignore[return-value]


def _merge(adapted: Any, model: PreTrainedModel, config: LoRAConfig) -> None:
    """Merge the adapters into copies of the weights, or into the weights themselves if these are trained copies."""
    module: Any
    for module in projections(model, config.targets).values():
        weight = module.base_layer.weight
        if isinstance(weight, DTensor):  # PEFT cannot merge into it
            (adapter,) = module.active_adapters
            sum_ = weight.detach() + own_rows(module.get_delta_weight(adapter).detach(), weight)
            module.base_layer.weight = nn.Parameter(sum_.to(weight.dtype), requires_grad=False)
        elif type(weight) is nn.Parameter and not weight.requires_grad:
            # PEFT merges in place, except into quantized weights. Weights that train are copies already.
            module.base_layer.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    if is_sharded(model):
        adapted.unload()
        adopt(model)
    else:
        adapted.merge_and_unload()


def _unit(model: nn.Module) -> Unit:
    return Unit("model", {name: p for name, p in model.named_parameters() if p.requires_grad})


class OutputObjective:
    """The weighted losses of `config.loss`, each averaged over the labels of all rows of a step.

    Args:
        model: its trainable parameters are trained.
        teacher: the model that the loss compares with; None: the loss needs none.
        autocast: dtype of the forward pass in training; None: that of the weights.
        at_end: context manager within which held-out losses are computed (`prepared`).
    """

    def __init__(
        self,
        model: nn.Module,
        config: FinetuneConfig,
        teacher: PreTrainedModel | None = None,
        autocast: torch.dtype | None = None,
        at_end: AtEnd = nullcontext,
    ) -> None:
        if config.loss.needs_teacher and teacher is None:
            raise ValueError("teacher: expected the model whose outputs the loss compares with, found None")
        self._model, self._config, self._teacher, self._autocast = model, config, teacher, autocast
        self._at_end = at_end
        self.units: Sequence[Unit] = [_unit(model)]

    def backward(self, micro_batches: list[Rows]) -> dict[str, float]:
        """Add gradients of the mean loss over the rows' labels; return the loss."""
        self._model.train()
        return all_reduce_losses({"model": self._loss(micro_batches, gradients=True)})

    def evaluate(self, rows: Rows) -> dict[str, float]:
        """Return the held-out loss in fp32, of the weights as they would be at the end, before rounding."""
        self._model.eval()
        size = self._config.micro_batch_size or self._config.batch_size
        batches = [rows.rows(slice(i, i + size)) for i in range(0, len(rows), size)]
        with self._at_end(), ExitStack() as stack:
            for model in (self._model, *([] if self._teacher is None else [self._teacher])):
                stack.enter_context(computed_in_fp32(model))
            return all_reduce_losses({"model": self._loss(batches, gradients=False)})

    def _loss(self, batches: list[Rows], *, gradients: bool) -> float:
        """Return the loss; with `gradients`, also add its gradients."""
        device = next(self._model.parameters()).device
        # At least 1: long prompts can fill all rows of a step. Its loss is then 0.
        labels = max(1, sum(int(batch.target_counts().sum()) for batch in batches))
        total = 0.0
        for index, counts in shard_batches(batches):
            batch = batches[index]
            inputs, targets = on_device(batch.inputs(), device), batch.targets()
            expected = None
            if self._config.loss.needs_teacher:
                assert self._teacher is not None
                with torch.no_grad(), documents_apart(self._teacher):
                    expected = batch.compared(self._teacher(**inputs))
            half = gradients and self._autocast is not None
            cast = torch.autocast(device.type, self._autocast) if half else nullcontext()
            with torch.set_grad_enabled(gradients):
                with cast:
                    outputs = batch.compared(self._model(**inputs))
                targets = None if targets is None else targets.to(device)
                loss = output_losses(outputs, expected, targets, self._config.loss) * (counts / labels)
                if gradients:
                    loss.backward()
            total += loss.item()
        return total
