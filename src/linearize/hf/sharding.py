"""Divide the weights of models among processes by torch's FSDP2, with each decoder layer as a unit.

Mixers are small, and every process has them whole: attention transfer computes their gradients inside the forward of a
unit, where FSDP2 could not reduce them. A divided weight is a DTensor with the whole weight's shape; each process holds
some of its rows.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from linearize.base import UserError
from linearize.distributed import device_mesh, is_sharded, world
from linearize.hf.architectures import architecture_of
from linearize.hf.attention import linearized_layers
from linearize.hf.layouts import keep_documents_apart


def shard(model: PreTrainedModel, device: torch.device) -> None:
    """Divide the weights of a decoder among all processes, in place; those on the meta device stay there.

    Gradients are summed over the processes, not averaged, as in `distributed.sum_gradients` for undivided weights.
    Weights may have another dtype than `config.dtype`, for training: layers compute in `config.dtype`, and gradients
    are reduced in the dtype of the weights.

    Raises:
        UserError: an encoder.
    """
    architecture = architecture_of(model)
    if architecture is None or architecture.parts is None:
        raise UserError(
            f"distributed.shard: expected a decoder, found {model.config.model_type!r}; set distributed.shard=none"
        )
    mixers = {p for layer in linearized_layers(model).values() for p in layer.mixer.parameters()}
    stored = model.dtype
    computed: Any = model.config.dtype  # trained weights of half-precision models have another
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if stored != computed:
        policy = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=stored, cast_forward_inputs=False)
    mesh = device_mesh(device)
    # The last unit has all weights outside layers, tied embeddings once. It too is resharded after its forward:
    # gathered weights would be stale after their rows are set.
    unit: Any
    for unit in (*model.base_model.get_submodule(architecture.parts.layers).children(), model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=mixers)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo supports no other


def skeleton(model: PreTrainedModel) -> Any:
    """Return `model` as it was before it was divided, with its dtypes, but without weights (on the meta device)."""
    cls: Any = type(model).__bases__[1] if is_sharded(model) else type(model)
    config: Any = copy.deepcopy(model.config)
    chosen = {"dtype": config.dtype, "attn_implementation": config._attn_implementation}
    with torch.device("meta"), no_init_weights():
        bare = cls._from_config(config, **chosen)
    bare.tie_weights()  # `no_init_weights` skips this too
    keep_documents_apart(bare)
    return bare.eval().to(model.dtype)


def shard_alike(model: PreTrainedModel, divided: PreTrainedModel) -> None:
    """Divide a model without weights like `divided`, and give it the same weights, with shared storage.

    If rows cannot be divided evenly, FSDP2 pads copies instead.
    """
    weights: dict[str, Any] = dict(divided.named_parameters())
    device = next(iter(weights.values())).device
    shard(model, device)
    replace_weights(model, lambda name, _: weights[name].detach())
    buffers = dict(divided.named_buffers())
    for name, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, key, buffers[f"{name}.{key}".lstrip(".")])


Make = Callable[[str, Any], Tensor]  # (a weight's name, the previous weight) -> the new weight


@torch.no_grad()
def replace_weights(model: nn.Module, make: Make) -> None:
    """Replace every divided weight by `make(name, weight)`; tied weights stay tied."""
    made: dict[int, nn.Parameter] = {}
    reshard(model)
    for name, module in list(model.named_modules()):
        for key, weight in list(module.named_parameters(recurse=False)):
            if isinstance(weight, DTensor):
                if id(weight) not in made:
                    made[id(weight)] = nn.Parameter(make(f"{name}.{key}".lstrip("."), weight), weight.requires_grad)
                setattr(module, key, made[id(weight)])
    adopt(model)


def reshard(model: nn.Module) -> None:
    """Free gathered weights, so that the next forward reads changes of their rows."""
    for unit in units(model):
        unit.reshard()


def adopt(model: nn.Module) -> None:
    """Make FSDP2 use parameters that were set in place of others."""
    for unit in units(model):
        unit._apply(lambda tensor: tensor, recurse=False)


def units(model: nn.Module) -> list[Any]:
    """Return the modules whose weights FSDP2 gathers together: the layers, and the model for all other weights."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def see_what_trains(model: nn.Module) -> None:
    """Make FSDP2 read, before a stage, which weights train: that decides the dtype of their gradients."""
    for unit in units(model):
        unit.unshard()
        unit.reshard()


def divided_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the divided weights by name; empty if the model is not divided."""
    return {name: weight.detach() for name, weight in model.named_parameters() if isinstance(weight, DTensor)}


@torch.no_grad()
def round_weights(model: Any) -> None:
    """Round divided weights to the dtype in which layers compute, as is done at a stage's end without sharding."""
    for weight in divided_weights(model).values():
        weight.copy_(weight.to(model.config.dtype))


def local(tensor: Tensor) -> Tensor:
    """Return the rows of a tensor that this process has, all if it is not divided."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(tensor: Tensor) -> int:
    """Return the index of the first row that this process has."""
    if not isinstance(tensor, DTensor):
        return 0
    return min(world().rank * -(-len(tensor) // world().size), len(tensor))


def own_rows(tensor: Tensor, like: Any) -> Tensor:
    """Return a tensor that every process has as a DTensor divided like `like`, without communication."""
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def run_layers(model: PreTrainedModel, inputs: dict[str, Any]) -> None:
    """Run the layers, without an output: by the base model, without a head.

    A divided model must be called itself; it computes the logits of one token of each row.
    """
    if not is_sharded(model):
        model.base_model(**inputs)
        return
    few = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    model(**inputs, **few)


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered if it is divided; all processes must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
