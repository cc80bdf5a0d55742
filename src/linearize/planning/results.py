"""A plan as data, which the report reads from plan.json."""

from __future__ import annotations

from dataclasses import dataclass

from linearize.base import Record

TRAINING_STAGES = ("transfer", "adapt", "finetune")  # in order
LENGTHS = (8192, 32768, 131072)  # lengths in tokens for which bytes are shown


@dataclass(frozen=True)
class StageCost:
    """One training stage.

    Attributes:
        tokens: training tokens over all epochs; None: the size of the data is not known.
        flops: floating-point operations for these tokens, without evaluations.
        memory_bytes: weights in the model's dtype, fp32 copies and AdamW's moments of trained ones, and the peak of one
            step beyond these; None: it was not requested.
    """

    trainable_parameters: int
    tokens: int | None
    flops: int | None
    memory_bytes: int | None

    def __str__(self) -> str:
        work = "unknown amount of data"
        if self.tokens is not None and self.flops is not None:
            work = f"{_count(self.tokens)} tokens, about {self.flops:.2g} FLOPs"
        memory = "" if self.memory_bytes is None else f", about {size(self.memory_bytes)} of memory"
        return f"{_count(self.trainable_parameters)} parameters, {work}{memory}"


class Plan(Record):
    """The plan of a conversion by a recipe; bytes of state and cache are per sequence.

    Attributes:
        bidirectional: an encoder, for which bytes of state and cache are 0 and `break_even_tokens` is None.
        control_flops: of the trained controls, each fine-tuned on as many tokens as all stages together.
        state_bytes: constant bytes of the converted layers.
        student_cache_bytes_per_token: growth of the student's softmax layers; 0: constant memory. Layers whose own
            attention has a sliding window count as no growth, here and for the teacher.
        break_even_tokens: the length from which the student takes less memory than the teacher; None: never.
        disk_bytes: the model in its dtype (new parameters fp32), and 16 bytes per trainable parameter in checkpoints.
        activation_bytes: further bytes on disk until a block-wise transfer is finished; None: the amount of data is not
            known.
    """

    recipe: str
    model_type: str
    bidirectional: bool
    converted_layers: tuple[int, ...]
    kept_layers: tuple[int, ...]
    teacher_parameters: int
    new_parameters: int
    transfer: StageCost | None
    adapt: StageCost | None
    finetune: StageCost | None
    control_flops: int | None
    state_bytes: int
    student_cache_bytes_per_token: int
    teacher_cache_bytes_per_token: int
    break_even_tokens: int | None
    disk_bytes: int
    activation_bytes: int | None

    def rows(self) -> dict[str, str]:
        """Return the rows of the plan in the terminal and in the report: label and text."""
        converted, kept = len(self.converted_layers), len(self.kept_layers)
        rows = {"layers converted": f"{converted} of {converted + kept}"}
        if kept:
            rows["layers that stay softmax"] = ", ".join(map(str, self.kept_layers))
        rows["parameters"] = f"{_count(self.teacher_parameters)}, and {_count(self.new_parameters)} new"
        stages = {"attention transfer": self.transfer, "adapt": self.adapt, "finetune": self.finetune}
        rows |= {label: str(stage) for label, stage in stages.items() if stage is not None}
        if self.control_flops:
            rows["trained controls"] = f"about {self.control_flops:.2g} FLOPs"
        if self.bidirectional:
            others = "; the layers that stay softmax do not change" if kept else ""
            rows["attention"] = f"time and memory linear in length, no cache{others}"
        else:
            rows |= self._memory_rows()
        rows["disk"] = f"about {size(self.disk_bytes)}"
        if self.activation_bytes:
            rows["disk, between blocks"] = f"about {size(self.activation_bytes)}, until transfer is finished"
        return rows

    def _memory_rows(self) -> dict[str, str]:
        """Return the rows about a decoder's memory in generation."""
        growth, start = self.student_cache_bytes_per_token, self.break_even_tokens
        grows = f", and {size(growth)} per token" if growth else " at any length"
        rows = {
            "teacher's cache": f"{size(self.teacher_cache_bytes_per_token)} per token of each sequence",
            "student's state": f"{size(self.state_bytes)} per sequence{grows}",
            "memory is saved": "at no length" if start is None else f"from {start:,} tokens on",
        }
        for length in LENGTHS:
            teacher, student = self.teacher_cache_bytes_per_token * length, self.state_bytes + growth * length
            rows[f"at {length // 1024}k tokens"] = f"teacher {size(teacher)}, student {size(student)} per sequence"
        return rows


def _count(number: int) -> str:
    for power, suffix in ((9, "billion"), (6, "million"), (3, "thousand")):
        if number >= 10**power:
            return f"{_digits(number / 10**power)} {suffix}"
    return str(number)


def _digits(number: float) -> str:
    """Return a number with three significant digits, or all digits before the point if it has more."""
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"


def size(number: int) -> str:
    """Return a number of bytes as text in a suitable unit."""
    for power, suffix in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number >= 2**power:
            return f"{_digits(number / 2**power)} {suffix}"
    return f"{number} B"
