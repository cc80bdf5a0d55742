"""A plan as data, which the report reads from plan.json."""

from __future__ import annotations

from dataclasses import dataclass

from linearize.base import Record

TRAINING_STAGES = ("transfer", "adapt", "finetune")  # in their order


@dataclass(frozen=True)
class StageCost:
    """One training stage.

    `tokens`: trained on, over all epochs; None where the size of the data is not known. `flops`: floating-point
    operations for these tokens, evaluations apart. `memory_bytes`: weights in the model's dtype, fp32 copies and
    AdamW's moments of what trains, and the most that one step takes besides; None where that is not asked for.
    """

    trainable_parameters: int
    tokens: int | None
    flops: int | None
    memory_bytes: int | None


class Plan(Record):
    """The plan of a conversion by a recipe; bytes of state and cache are per sequence.

    `control_flops`: the evaluation's trained controls, each finetuned on as many tokens as all stages together have.
    `state_bytes`: constant, over the converted layers. `student_cache_bytes_per_token`: what the student still grows
    by, in its kept layers; 0 is constant memory. A layer whose teacher attention slides is bounded already and counts
    as no growth, here and in `teacher_cache_bytes_per_token`. `break_even_tokens`: the length from which the state is
    smaller than the teacher's cache of the same layers; None where that cache does not grow. `bidirectional`: an
    encoder, for which all of these are 0 or None. `disk_bytes`: the model in
    its dtype (new parameters fp32), and 16 bytes per trainable parameter in the stages' checkpoints.
    `activation_bytes`: on disk besides, until a transfer block by block is finished; None where the amount of data is
    not known.
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
