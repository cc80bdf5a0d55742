"""Handle models that accelerate keeps partly in CPU memory or on disk, because the devices are too small."""

from __future__ import annotations

from typing import Any

from torch import nn

from linearize.base import UserError


def keep_in_memory(mixer: nn.Module) -> None:
    """Load the weights of a mixer that accelerate has offloaded, for good: they are small.

    accelerate loads a module's weights only when its `forward` is called, but parts of a mixer have other methods.
    """
    for module in mixer.modules():
        hook: Any = vars(module).get("_hf_hook")
        if getattr(hook, "offload", False):
            _load(module, hook)


def refuse_offloaded(model: nn.Module) -> None:
    """Raise UserError if accelerate offloads weights of a model: a student could not share them.

    A model on several devices passes, and so does one on torch's meta device without accelerate.
    """
    if not any("_hf_hook" in vars(module) for module in model.modules()):
        return
    if (name := next((name for name, x in model.named_parameters() if x.is_meta), None)) is not None:
        raise UserError(
            f"model: expected all weights in memory, found {name} offloaded by accelerate (device_map, cpu_offload, "
            "disk_offload); load the model without that, convert it and save it: the converted folder can be loaded "
            "with a device_map that offloads"
        )


def _load(module: nn.Module, hook: Any) -> None:
    from accelerate.hooks import remove_hook_from_module  # slow to import; installed if there is a hook
    from accelerate.utils import set_module_tensor_to_device

    remove_hook_from_module(module)
    for tensors in (module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
        for name, tensor in list(tensors):
            value = hook.weights_map[name] if tensor.is_meta else None
            set_module_tensor_to_device(module, name, hook.execution_device, value=value)
