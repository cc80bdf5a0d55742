"""Configs of the training stages: trained weights, loss, duration and learning rate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from linearize.base import Config

LARGEST = 1e6  # of rates: beyond lie numbers that the optimizer cannot compute with
Beta = Annotated[float, Field(ge=0, lt=1)]


class Plateau(Config):
    """Multiply the learning rate by `factor` after `patience` evaluations without improvement."""

    type: Literal["plateau"] = "plateau"
    factor: float = Field(default=0.1, gt=0, lt=1)
    patience: PositiveInt = 10
    min_lr: float = Field(default=1e-5, ge=0, le=LARGEST)


class Cosine(Config):
    """Linear warm-up, then a cosine from the learning rate down to `min_lr` over the stage."""

    type: Literal["cosine"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    min_lr: float = Field(default=0.0, ge=0, le=LARGEST)


class Constant(Config):
    """Linear warm-up, then the learning rate as it is."""

    type: Literal["constant"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)


Schedule = Annotated[Plateau | Cosine | Constant, Field(discriminator="type")]


class TrainConfig(Config):
    """Set what every training stage has in common; the loop reads nothing else."""

    lr: float = Field(gt=0, le=LARGEST)
    weight_decay: float = Field(default=0.0, ge=0, le=LARGEST)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    epochs: PositiveInt = 2
    max_tokens: PositiveInt | None = Field(default=None, description="stop after this many training tokens, if sooner")
    batch_size: PositiveInt = Field(default=8, description="sequences per optimizer step")
    micro_batch_size: PositiveInt | None = Field(
        default=None, description="sequences per forward pass; batch_size if null"
    )
    clip_norm: float | None = Field(default=1.0, gt=0, description="gradient norm clip; null for none")
    schedule: Schedule = Plateau()
    eval_every: PositiveInt = Field(default=100, description="optimizer steps between evaluations (and checkpoints)")
    early_stopping: PositiveInt | None = Field(
        default=None, description="stop after this many evaluations without improvement; null to never stop early"
    )
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = Field(
        default="adamw",
        description="8bit: moments in 8 bits, by bitsandbytes, in a quarter of the memory; results differ slightly; "
        "paged: they may leave a GPU that is full",
    )

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if self.micro_batch_size is not None and self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size ({self.batch_size}) must be a multiple of micro_batch_size ({self.micro_batch_size})"
            )
        return self

    def identity(self) -> dict[str, object]:
        """Return the fields that must be equal for a stage to resume; newer fields only if they are not the default."""
        fields = self.model_dump(mode="json")
        later: dict[str, object] = {"optimizer": "adamw", "activation_checkpointing": False, "wise_ft_alpha": 1.0}
        return {name: value for name, value in fields.items() if name not in later or value != later[name]}


class TransferConfig(TrainConfig):
    """Stage 1, attention transfer: train mixers to match softmax attention (LoLCATs eq. 6, App. A.1; Hedgehog eq. 4).

    Layers are trained independently, so training block by block (`layers_per_block`) has the same result with only the
    weights of one block in memory, and the residual stream between blocks on disk (LoLCATs sec. 3.3).
    """

    lr: float = Field(default=1e-2, gt=0, le=LARGEST)
    output_mse: float = Field(
        default=1000.0, ge=0, description="weight of the mean squared error of outputs before the output projection"
    )
    weight_cross_entropy: float = Field(
        default=0.0, ge=0, description="weight of the cross-entropy of attention weights, a mean over queries"
    )
    calibration_tokens: PositiveInt | None = Field(
        default=None, description="fit combine `absolute_scale` to this much text before training; null: do not"
    )
    layers_per_block: PositiveInt | None = Field(default=None, description="block by block; null: all layers at once")

    @model_validator(mode="after")
    def _something(self) -> TransferConfig:
        if not self.output_mse + self.weight_cross_entropy:
            raise ValueError("every weight is 0; set output_mse or weight_cross_entropy")
        return self


class LoRAConfig(Config):
    """Low-rank adapters on the attention projections; `targets` are roles, found by name in each architecture."""

    rank: PositiveInt = 8
    alpha: float = Field(default=16.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: tuple[Literal["q", "k", "v", "o"], ...] = Field(default=("q", "k", "v", "o"), min_length=1)


class LossConfig(Config):
    """Set the loss of fine-tuning: a weighted sum of terms, each a mean over the labels."""

    labels: float = Field(
        default=1.0,
        ge=0,
        description="the task's own loss: cross-entropy of the next token or the class; squared error of a number",
    )
    kl: float = Field(default=0.0, ge=0, description="KL(teacher || student) of the distributions of tokens or classes")
    output_mse: float = Field(
        default=0.0,
        ge=0,
        description="mean squared error against the teacher's outputs: logits, or hidden states where there is no head",
    )
    top_k: PositiveInt | None = Field(
        default=None, description="compare the teacher's k likeliest tokens, and all others as one; null: all tokens"
    )

    @model_validator(mode="after")
    def _something(self) -> LossConfig:
        if not self.labels + self.kl + self.output_mse:
            raise ValueError("every weight is 0; set one of labels, kl, output_mse")
        if self.top_k is not None and not self.kl:
            raise ValueError("top_k applies to kl, whose weight is 0")
        return self

    @property
    def needs_teacher(self) -> bool:
        return self.kl + self.output_mse > 0


class FinetuneConfig(TrainConfig):
    """A stage on the whole model's outputs: which weights train, on which loss.

    `lora` trains adapters on the attention projections, as LoLCATs' second stage. `mixers` trains the weights of
    attention transfer, together with LoRA or alone. `all_weights` is for uptraining.
    """

    lr: float = Field(default=1e-4, gt=0, le=LARGEST)
    lora: LoRAConfig | None = LoRAConfig()
    mixers: bool = Field(default=False, description="feature maps, gates and mix train too")
    all_weights: bool = Field(default=False, description="every weight of the model trains, mixers included")
    loss: LossConfig = LossConfig()
    wise_ft_alpha: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share of its trained change that each weight keeps (alpha of WiSE-FT, arXiv 2109.01903); below 1 "
        "the student fits the new text less and retains more of the teacher",
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="store only the inputs of each layer, and recompute the rest in the backward pass: same gradients",
    )

    @model_validator(mode="after")
    def _trains_something(self) -> FinetuneConfig:
        if self.all_weights and (self.lora is not None or self.mixers):
            raise ValueError("all_weights trains everything; set lora=null and mixers=false")
        if not (self.all_weights or self.mixers or self.lora is not None):
            raise ValueError("no weights train; set lora, mixers or all_weights")
        return self


class DistributedConfig(Config):
    """Set how several processes share a model. Results are the same, so a run may resume with another choice."""

    shard: Literal["auto", "none", "full"] = Field(
        default="auto",
        description="divide weights among processes (FSDP2); auto: where a GPU is too small for the whole model",
    )
