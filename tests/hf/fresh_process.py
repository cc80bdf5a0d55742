"""A process that knows of no checkpoint but by its folder; run by `test_checkpoint`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file


class NotInstalled:
    """Makes Python look as if linearize were not installed, while it is in `sys.meta_path`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: object = None) -> None:
        if name.partition(".")[0] == "linearize":
            raise ModuleNotFoundError(f"No module named {name!r}")


checkpoints, folder = Path(sys.argv[1]), Path(sys.argv[2])
report = {}


def load(path: Path, **options: Any) -> Any:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    auto = next(name for name in config["auto_map"] if name != "AutoConfig")
    if "num_experts_per_tok" in config:
        options["experts_implementation"] = "eager"
    return getattr(transformers, auto).from_pretrained(path, dtype=torch.float64, **options)


def write(name: str, model: Any, inputs: Path) -> None:
    report[name] = f"{type(model).__module__}.{type(model).__name__}"
    with torch.no_grad():
        save_file({"first": model(**load_file(inputs))[0]}, folder / f"{name}.safetensors")


assert "linearize" not in sys.modules
sys.meta_path.insert(0, NotInstalled)
try:
    load(checkpoints / "llama", trust_remote_code=True)
except ImportError as error:
    report["without the package"] = str(error)
sys.meta_path.remove(NotInstalled)

for name in ("llama", "bert"):
    remote = load(checkpoints / name, trust_remote_code=True)
    write(f"remote {name}", remote, checkpoints / name / "inputs.safetensors")
    remote.save_pretrained(folder / "again" / name)
report["again"] = dict(remote.config.auto_map)
report["again's files"] = sorted(path.name for path in (folder / "again").rglob("*.py"))

import linearize  # noqa: E402, F401

for path in sorted(checkpoints.iterdir()):
    write(path.name, load(path), path / "inputs.safetensors")

sys.stdout.write(json.dumps(report))
