"""What the scores at a task say, in sentences. All scores are better where they are higher."""

from __future__ import annotations

from linearize.evaluation.metrics import title
from linearize.report.finding import Finding
from linearize.report.load import RunFiles
from linearize.report.numbers import THIN, count, number, percent, signed, with_interval

_OTHERS = {
    "teacher": "its teacher",
    "teacher_lora": "its teacher finetuned alike",
    "window_lora": "the window-only control",
    "ablated": "itself with the linear part switched off",
}


def what(task: dict[str, object]) -> str:
    """The kind of task, in words."""
    return str(task["type"]).replace("_", " ")


def main_findings(run: RunFiles) -> list[Finding]:
    """By the metric that counts: against the teacher and the control, or the score alone where there is no teacher."""
    if run.task is None:
        return []
    metric = run.task["metrics"][0]
    found = [_difference(run, other, metric) for other in ("window_lora", "teacher")]
    return [finding for finding in found if finding is not None] or _score(run, metric)


def more_findings(run: RunFiles) -> list[Finding]:
    """By the other metrics and against the others, and how often the answer is the teacher's."""
    if run.task is None:
        return []
    first, *others = run.task["metrics"]
    pairs = [(other, first) for other in _OTHERS if other not in ("window_lora", "teacher")]
    pairs += [(other, metric) for metric in others for other in _OTHERS]
    found = [_difference(run, *pair) for pair in pairs]
    alike = percent(agreement) if (agreement := run.agreement("student")) else None
    facts = [Finding("fact", f"The student's answer is the teacher's in {alike} of all cases.")] if alike else []
    return [*(finding for finding in found if finding is not None), *facts]


def _difference(run: RunFiles, other: str, metric: str) -> Finding | None:
    found = run.score_difference(other, metric)
    if found is None or run.task is None:
        return None
    name, whom = title(metric), _OTHERS[other]
    values = f"{with_interval(run.score('student', metric))} against {with_interval(run.score(other, metric))}"
    share = run.recovery(metric) if other == "teacher" else None
    values += f", {percent(share)} of the teacher's score" if share else ""
    if found.low <= 0 <= found.high:
        bounds = f"{signed(found.mean)} [{signed(found.low)}, {signed(found.high)}]"
        examples = f"On these {count(run.task['examples'])} examples the student "
        level = f"cannot be told apart from {whom}"
        return Finding(
            "open", f"{examples}{level} in {name}: {bounds}; {values}.", (examples, level, f" in {name} ({bounds}).")
        )
    better = found.mean > 0
    near, far = (number(bound) for bound in sorted((abs(found.low), abs(found.high))))
    size = f"{number(abs(found.mean))} {'better' if better else 'worse'}"
    words = f"The student is {size} than {whom} in {name}, 95{THIN}% interval {near} to {far}: {values}."
    lead = ("It is ", size, f" than {whom} in {name} [{near}, {far}].")
    return Finding("win" if better else "loss", words, lead)


def _score(run: RunFiles, metric: str) -> list[Finding]:
    score = run.score("student", metric)
    if score is None or run.task is None:
        return []
    after = f" in {title(metric)} on {count(run.task['examples'])} held-out examples; no teacher was measured."
    words = f"The student reaches {with_interval(score)}{after}"
    return [Finding("fact", words, ("It reaches ", with_interval(score), after))]
