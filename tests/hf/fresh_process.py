"""A process that knows of no checkpoint but by its folder; run by `test_checkpoint`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel


class NotInstalled:
    """Makes Python look as if linearize were not installed, while it is in `sys.meta_path`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: object = None) -> None:
        if name.partition(".")[0] == "linearize":
            raise ModuleNotFoundError(f"No module named {name!r}")


checkpoints, folder = Path(sys.argv[1]), Path(sys.argv[2])
report = {}


def load(architecture: str, **options: Any) -> PreTrainedModel:
    options |= dict(dtype=torch.float64, experts_implementation="eager")
    return AutoModelForCausalLM.from_pretrained(checkpoints / architecture, **options)


def write(name: str, model: PreTrainedModel) -> None:
    with torch.no_grad():
        logits = model(torch.arange(1, 31)[None], use_cache=False).logits
    save_file({"logits": logits}, folder / f"{name}.safetensors")


assert "linearize" not in sys.modules
sys.meta_path.insert(0, NotInstalled)
try:
    load("llama", trust_remote_code=True)
except ImportError as error:
    report["without the package"] = str(error)
sys.meta_path.remove(NotInstalled)

remote = load("llama", trust_remote_code=True)
report["remote"] = f"{type(remote).__module__}.{type(remote).__name__}"
write("remote", remote)
remote.save_pretrained(folder / "again")
report["again"] = dict(remote.config.auto_map)
report["again's files"] = sorted(path.name for path in (folder / "again").glob("*.py"))

import linearize  # noqa: E402, F401

for path in sorted(checkpoints.iterdir()):
    model = load(path.name)
    report[path.name] = type(model).__name__
    write(path.name, model)

sys.stdout.write(json.dumps(report))
