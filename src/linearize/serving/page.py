"""The page of ``linearize serve --ui``: a student next to its teacher, and the growth of their caches."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from linearize.costs import generation_memory, mixer_costs
from linearize.hf.classes import read_plan
from linearize.hf.meta import MetaModel
from linearize.hf.teacher import TeacherShape


@dataclass(frozen=True)
class Page:
    """The page (`html`, calls only the server's own API), its Content-Security-Policy, and its `contents`."""

    html: str
    policy: str
    contents: dict[str, Any]


def make_page(student: tuple[str, PreTrainedModel], teacher: str | None, *, chats: bool) -> Page:
    """Return the page for a linearized model, with the models in the order of their columns.

    After n tokens a cache has ``constant_bytes + n * bytes_per_token`` bytes, in the model's dtype (`linearize plan`).

    Args:
        student: its name and the model.
        teacher: the teacher's name, if it is served.
        chats: whether they have a chat template; else they continue text.
    """
    html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    inline = {tag: re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL) for tag in ("script", "style")}
    allowed = "; ".join(f"{tag}-src {' '.join(map(_hash, found))}" for tag, found in inline.items())
    policy = f"default-src 'none'; connect-src 'self'; {allowed}; base-uri 'none'; form-action 'none'"
    name, model = student
    config: Any = model.config
    shape = TeacherShape.from_config(config.to_dict())
    mixers = mixer_costs(read_plan(config), shape, model.dtype, MetaModel.of(shape).rotary_dims)
    memory = generation_memory(mixers, shape, model.dtype)
    kept = {"constant_bytes": memory.state_bytes, "bytes_per_token": memory.student_bytes_per_token}
    grows = {"constant_bytes": 0, "bytes_per_token": memory.teacher_bytes_per_token}
    models = [{"name": name, "role": "student"} | kept]
    if teacher is not None:
        models.append({"name": teacher, "role": "teacher"} | grows)
    contents = {
        "models": models,
        "chats": chats,
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads() if model.device.type == "cpu" else None,
        "device": model.device.type,
        "positions": shape.max_positions,
        "break_even_tokens": memory.break_even_tokens,
        "sliding_layers": len(shape.sliding_layers),
    }
    return Page(html, policy, contents)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
