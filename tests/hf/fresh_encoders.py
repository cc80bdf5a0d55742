"""A process that knows of no encoder but by its folder; run by `test_encoder_checkpoints`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

checkpoints, folder = Path(sys.argv[1]), Path(sys.argv[2])
report = {}


def load(path: Path, **options: bool) -> Any:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    auto = next(name for name in config["auto_map"] if name != "AutoConfig")
    return getattr(transformers, auto).from_pretrained(path, dtype=torch.float64, **options)


def write(name: str, model: Any, inputs: Path) -> None:
    report[name] = f"{type(model).__module__}.{type(model).__name__}"
    with torch.no_grad():
        save_file({"first": model(**load_file(inputs))[0]}, folder / f"{name}.safetensors")


assert "linearize" not in sys.modules
remote = checkpoints / "bert"
write("remote", load(remote, trust_remote_code=True), remote / "inputs.safetensors")

import linearize  # noqa: E402, F401

for path in sorted(checkpoints.iterdir()):
    write(path.name, load(path), path / "inputs.safetensors")
sys.stdout.write(json.dumps(report))
