"""Settings of the evaluation at the end of a run."""

from __future__ import annotations

from pydantic import Field, PositiveInt, model_validator

from linearize.base import Config


class EvaluationConfig(Config):
    """Set what `run` measures at the end. The evaluation of a language model takes minutes unless `long` is set."""

    long: bool = Field(
        default=False,
        description="of a language model: train the controls, and measure copying, recall, agreement and heads; if "
        "false: the loss of a continuation, needles, speed and memory, compared with the teacher",
    )
    trained_controls: bool = Field(
        default=True,
        description="fine-tune the controls, teacher and window only, on as many tokens as all the student's stages",
    )
    bootstrap_samples: PositiveInt = 1000
    copy_rows: PositiveInt = Field(default=16, description="random sequences of the copying test, at least 16")
    examine: bool = Field(
        default=True,
        description="also measure agreement, generations, recall and the output errors of heads",
    )
    examined_tokens: PositiveInt = Field(default=32768, description="held-out tokens that `examine` reads")
    fidelity_tokens: PositiveInt = Field(
        default=2048, description="of these, the ones on which the output errors of heads are measured"
    )
    prompts: int = Field(
        default=16, ge=2, description="held-out beginnings that teacher and student continue, at least 16"
    )
    new_tokens: PositiveInt = Field(default=64, description="tokens of each continuation")
    recall_trials: int = Field(
        default=8, ge=2, description="rows per cell of the recall tests; more, where a test would have fewer than 16"
    )
    tasks: tuple[str, ...] = Field(
        default=(), description="public benchmarks: lm-eval's names, its YAML files or .jsonl files of questions"
    )
    shots: int = Field(default=0, ge=0, description="solved examples before each question of a task")
    task_limit: PositiveInt | None = Field(default=None, description="only the first questions of every task")

    @model_validator(mode="after")
    def _examined(self) -> EvaluationConfig:
        if self.tasks and not self.examine:
            raise ValueError("tasks are a part of the examination; set examine=true, or no tasks")
        return self
