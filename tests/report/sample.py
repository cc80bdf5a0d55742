"""Run folders made up for tests, with every section of evaluation.json. None of these numbers was measured."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from linearize.recipe import Recipe

LAYERS, HEADS, WINDOW = 6, 8, 64
LOSSES = {
    "teacher": 2.367,
    "teacher_finetuned": 2.363,
    "swapped": 6.311,
    "transferred": 2.538,
    "student": 2.531,
    "ablated": 2.545,
    "window": 2.548,
    "window_sinks": 2.544,
    "window_finetuned": 2.537,
}
EDGES = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
LINES = ("def mean ( values ) : \n", "total = sum ( values ) \n", "return total / len ( values ) \n\n", "class Ring :")
CODE = [token for line in LINES for token in line.split(" ")]
ATTENTION = {
    "entropy": 2.587,
    "first_token": 0.313,
    "sink_heads": 75,
    "heads": 270,
    "beyond_near": 0.294,
    "queries": 704,
}
PARAMETERS, TEACHER = 5475584, "made-up-teacher"


def interval(mean: float, half: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - half, "high": mean + half}


def spread(median: float) -> dict[str, float]:
    return {"median": median, "low": 0.96 * median, "high": 1.05 * median}


def evaluation(seed: int = 0, shift: float = 0.0) -> dict[str, Any]:
    """All of the contract; `shift` makes the student's losses that much worse."""
    draw = random.Random(seed)
    losses = LOSSES | {name: LOSSES[name] + shift for name in ("student", "ablated", "transferred")}
    return {
        "window_size": WINDOW,
        "measured": [_measured(name, loss) for name, loss in losses.items()],
        "comparisons": [
            _comparison("teacher", interval(losses["student"] - losses["teacher"], 0.03)),
            _comparison("window_finetuned", interval(losses["student"] - losses["window_finetuned"], 0.005)),
            _comparison("ablated", interval(losses["student"] - losses["ablated"], 0.006)),
        ],
        "far_context": _verdict(0.209, 0.0183, interval(0.09, 0.034))
        | {"against": ["window_finetuned", "teacher_finetuned"]},
        "copying": _verdict(5.69, 0.163, interval(0.029, 0.015)),
        "speed": [
            _speed(name, length, batch)
            for batch in (1, 4)
            for length in (256, 512, 1008)
            for name in ("teacher", "student")
        ],
        "crossover": {"prefill": None, "decode": 4096},
        "missing": [],
        "agreement": {
            "top1": interval(0.807, 0.011),
            "kl": interval(0.171, 0.014),
            "reverse_kl": interval(0.204, 0.018),
            "top1_beyond": interval(0.792, 0.013),
            "kl_beyond": interval(0.189, 0.017),
            "tokens": 49048,
            "documents": 40,
        },
        "positions": {
            "edges": EDGES,
            "documents": [40] * (len(EDGES) - 1),
            "losses": {name: _by_position(name) for name in losses if name != "swapped"},
        },
        "generations": {
            "agreement": interval(0.41, 0.06),
            "common_prefix": interval(13.2, 3.1),
            "new_tokens": 48,
            "documents": 40,
            "samples": _samples(),
        },
        "teacher_attention": ATTENTION,
        "fidelity": _fidelity(draw),
        "retrieval": [_retrieval("passkey", draw), _retrieval("associative_recall", draw)],
        "tasks": {
            "shots": {"arc_easy": 0, "piqa": 0, "hellaswag": 0},
            "results": [
                {"task": task, "metric": metric, "candidate": name, "value": value, "stderr": 0.011, "samples": 1838}
                for task, metric, teacher in (
                    ("piqa", "acc", 0.612),
                    ("arc_easy", "acc", 0.433),
                    ("hellaswag", "acc_norm", 0.302),
                )
                for name, value in (
                    ("teacher", teacher),
                    ("student", teacher - 0.05),
                    ("window_finetuned", teacher - 0.045),
                )
            ],
            "versions": {"piqa": "1", "arc_easy": "1", "hellaswag": "1"},
        },
        "provenance": {
            "command": "linearize run lolcats --model made-up-teacher --dataset corpus/train.jsonl --output-dir run",
            "versions": {"torch": "2.13.0", "transformers": "5.23.0", "linearize": "0.1.0"},
            "seed": 0,
            "data": "f88b3b513cf3b9984840f13b596a70fe93cf5aa8381e456a9252a9b2a43f87fa",
            "tokens": 49048,
            "seconds": 812.5,
            "device": "cpu",
        },
    }


def write_run(folder: Path, found: dict[str, Any] | None = None, **plan: Any) -> Path:
    """A run folder as `linearize run` leaves it, with metrics."""
    folder.mkdir(parents=True)
    recipe = Recipe.load("lolcats", {"data.dataset": "corpus/train.jsonl", "data.sequence_length": 512})
    write_json(folder / "evaluation.json", evaluation() if found is None else found)
    write_json(folder / "plan.json", _plan() | plan)
    write_json(folder / "run.json", run_record())
    (folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    names = [f"model.layers.{i}.self_attn" for i in range(LAYERS)]
    _stage(folder / "transfer", 2400, {name: 9000.0 * (i + 1) for i, name in enumerate(names)}, 0.02)
    _stage(folder / "finetune", 96, {"model": 2.538}, 0.997)
    _stage(folder / "controls" / "window_finetuned", 96, {"model": 2.548}, 0.996)
    _stage(folder / "controls" / "teacher_finetuned", 96, {"model": 2.367}, 0.998)
    return folder


def run_record(model: str = TEACHER, **fields: str) -> dict[str, Any]:
    return {
        "model": model,
        "dtype": "float32",
        "device": "cpu",
        "data": "f88b",
        "versions": {"torch": "2.13.0"},
    } | fields


def write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data), encoding="utf-8")


def _measured(name: str, loss: float) -> dict[str, Any]:
    gain = {"teacher": 5.69, "teacher_finetuned": 5.69, "swapped": 1.13}.get(name, 0.16)
    return {
        "name": name,
        "label": name,
        "note": f"made up: {name}",
        "training_tokens": None,
        "quality": {
            "loss": interval(loss, 0.2),
            "beyond": interval(loss - 0.04, 0.2),
            "tokens": 49048,
            "tokens_beyond": 42478,
            "documents": 40,
            "documents_beyond": 40,
            "beyond_missing": None,
        },
        "copying": {
            "first": interval(11.46, 0.13),
            "second": interval(11.46 - gain, 0.2),
            "gain": interval(gain, 0.08),
        },
    }


def _comparison(other: str, overall: dict[str, float]) -> dict[str, Any]:
    beyond = {key: value * 1.2 for key, value in overall.items()}
    return {"other": other, "overall": overall, "beyond": beyond}


def _verdict(teacher: float, student: float, share: dict[str, float]) -> dict[str, Any]:
    gains = {"teacher_gain": interval(teacher, 0.1 * teacher), "student_gain": interval(student, 0.4 * student)}
    return {**gains, "share": share}


def _speed(model: str, length: int, batch: int) -> dict[str, Any]:
    slow = model == "student"
    return {
        "model": model,
        "prompt_length": length,
        "batch_size": batch,
        "new_tokens": 16,
        "prefill": spread((6e-5 if not slow else 8e-5) * length * batch**0.7),
        "decode": spread(4.6e-3 if slow else 2.3e-3 + 8e-7 * length),
        "cache_bytes": batch * (798768 if slow else 6144 * (length + 16)),
        "prefill_bytes": batch * 25000 * length,
    }


def _by_position(name: str) -> list[dict[str, float] | None]:
    floor = LOSSES[name] - 0.1 + 0.3 * (LOSSES[name] - 2.5)
    confined = not name.startswith("teacher")
    places = [min(edge, WINDOW) if confined else edge for edge in EDGES[:-1]]
    return [None] + [interval(floor + 3.2 / (1 + place) ** 0.62, 0.12) for place in places[1:]]


def _samples() -> list[dict[str, str]]:
    teacher = "\n    total = 0\n    for value in values:\n        total += value\n    return total / len(values)\n"
    student = (
        "\n    total = 0\n    for value in values:\n        if value is None:\n            continue\n    return total\n"
    )
    hostile = "<script>alert('prompt')</script><img src=x onerror=alert(1)> & \"quoted\" \x07"
    return [
        {
            "prompt": "def mean(values):",
            "reference": "\n    return sum(values) / len(values)\n",
            "teacher": teacher,
            "student": student,
        },
        {"prompt": hostile, "reference": "</pre><b>bold</b>", "teacher": "<i>same</i>", "student": "<i>same</i>"},
    ]


def _plan() -> dict[str, Any]:
    stage = {"trainable_parameters": 98328, "tokens": 2400000, "flops": 37135910400000, "memory_bytes": 180106720}
    return {
        "recipe": "lolcats",
        "model_type": "llama",
        "bidirectional": False,
        "converted_layers": list(range(LAYERS)),
        "kept_layers": [],
        "teacher_parameters": PARAMETERS,
        "new_parameters": 98328,
        "transfer": stage,
        "adapt": None,
        "finetune": stage | {"tokens": 400000},
        "control_flops": 20294156800000,
        "state_bytes": 792576,
        "student_cache_bytes_per_token": 0,
        "teacher_cache_bytes_per_token": 6144,
        "break_even_tokens": 130,
        "disk_bytes": 25245152,
        "activation_bytes": 0,
    }


def _stage(folder: Path, num_steps: int, initial: dict[str, float], ratio: float) -> None:
    folder.mkdir(parents=True)
    best = {name: loss * ratio for name, loss in initial.items()}

    def mean(step: int) -> float:
        left = math.exp(-6 * step / num_steps)
        return sum(best[n] + (initial[n] - best[n]) * left for n in initial) / len(initial)

    lines = []
    for step in range(num_steps + 1):
        at = {"step": step, "tokens": 4096 * step, "seconds": 0.5 * step, "loss": mean(step), "units": {}}
        if step:
            lines.append({"event": "step", **at, "loss": mean(step) * (1 + 0.05 * math.sin(step))})
        if step % (num_steps // 8) == 0:
            lines.append({"event": "evaluation", **at})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    result = {"steps": num_steps, "tokens": 4096 * num_steps, "seconds": 0.5 * num_steps, "stopped_early": False}
    losses = {"best_loss": best, "initial_loss": initial}
    write_json(folder / "result.json", result | losses | {"identity": {"lr": 0.01, "seed": 0}})


def _fidelity(draw: random.Random) -> dict[str, Any]:
    layers = [
        {"layer": layer, "output_relative": [0.02 * 5 ** draw.random() for _ in range(HEADS)]}
        for layer in range(LAYERS)
    ]
    layers[5]["output_relative"][1] = 1.123
    return {"tokens": 4096, "layers": layers}


def _retrieval(name: str, draw: random.Random) -> dict[str, Any]:
    distances, depths = [64, 128, 256, 512, 960], [0.0, 0.25, 0.5, 0.75, 1.0]
    teacher = [[min(1.0, 0.8 + 0.2 * draw.random()) for _ in depths] for _ in distances]
    student = [[draw.random() * min(1.0, 60 / distance) for _ in depths] for distance in distances]
    return {
        "name": name,
        "words": "A five-digit number hidden in filler text, asked for at the end (made up).",
        "rows": "distance",
        "columns": "depth",
        "row_values": distances,
        "column_values": depths,
        "count": 32,
        "models": {"student": student, "teacher": teacher, "window_finetuned": [[0.0] * 5] * 5},
        "teacher_share": interval(0.91, 0.02),
        "student_share": interval(0.17, 0.03),
        "floor": 0.01,
        "recovery": interval(0.18, 0.035),
    }
