"""Run folders of tasks that are not language modelling, made up for tests. None of these numbers was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.report import sample
from tests.report.sample import interval

SCORES = {"teacher": 0.921, "swapped": 0.504, "transferred": 0.893, "student": 0.905}
METRICS = ("accuracy", "f1")
NO_MEMORY = dict.fromkeys(["state_bytes", "student_cache_bytes_per_token", "teacher_cache_bytes_per_token"], 0) | {
    "bidirectional": True
}


def evaluation(
    metrics: tuple[str, ...] = METRICS, scores: dict[str, float] | None = None, **task: Any
) -> dict[str, Any]:
    """All of the contract, of a text classifier; `task` replaces fields of its section."""
    scores = SCORES if scores is None else scores
    others = ["teacher"] if "teacher" in scores else []
    return {
        "task": {
            "auto_class": "AutoModelForSequenceClassification",
            "pipeline_tag": "text-classification",
            "type": "text_classification",
            "metrics": list(metrics),
            "examples": 872,
            "scored": [_scored(name, score, metrics) for name, score in scores.items()],
            "differences": [
                {"other": other, "metric": metric, "difference": interval(scores["student"] - scores[other], 0.009)}
                for other in others
                for metric in metrics
            ],
            "recovery": {metric: interval(scores["student"] / scores["teacher"], 0.01) for metric in metrics if others},
        }
        | task,
        "fidelity": sample.evaluation()["fidelity"],
        "missing": ["teacher, fine-tuned"],
        "not_measured": {},
        "provenance": sample.evaluation()["provenance"],
    }


def write_run(folder: Path, found: dict[str, Any] | None = None, **plan: Any) -> Path:
    """A run folder; an encoder has no cache."""
    sizes = NO_MEMORY | {"model_type": "bert", "break_even_tokens": None}
    return sample.write_run(folder, evaluation() if found is None else found, **sizes | plan)


def _scored(name: str, score: float, metrics: tuple[str, ...]) -> dict[str, Any]:
    return {
        "name": name,
        "label": name,
        "note": f"made up: {name}",
        "scores": {metric: interval(score, 0.02) for metric in metrics},
        "agreement": None if name == "teacher" else interval(0.961, 0.013),
    }
