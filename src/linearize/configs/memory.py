"""Config of per-head KV budget allocation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from linearize.base import Config


class MemoryConfig(Config):
    """A KV budget: the bytes of one sequence's state, all layers together, and what they are allocated to.

    Either `bytes`, or the `fraction` of the teacher's cache at `reference_length` tokens. With `per: kv_head`, every KV
    head has sinks, a window and a KV cache with eviction, and the state does not grow. With `per: layer`, some layers
    keep full softmax attention, whose cache grows, and the others have one window; the bytes are those at
    `reference_length` tokens.
    """

    per: Literal["kv_head", "layer"] = Field(default="kv_head", description="what the budget is allocated to")

    bytes: PositiveInt | None = Field(default=None, description="bytes of one sequence's state, all layers together")
    fraction: float | None = Field(
        default=None, gt=0, le=1, description="share of the teacher's cache at `reference_length` tokens"
    )
    reference_length: PositiveInt = Field(default=1024, description="tokens at which `fraction` is counted")
    sinks: int = Field(default=1, ge=0, description="first tokens of a document that every head keeps")
    learned_sink: bool = Field(
        default=False, description="with per `layer`: windows also have a learned sink, which stock engines support"
    )
    recall_fraction: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        description="with per `kv_head`: the largest share of the bytes for pairs kept for recall, in the heads that "
        "recall; the rest is divided equally",
    )

    @model_validator(mode="after")
    def _consistent(self) -> MemoryConfig:
        if self.learned_sink and self.per != "layer":
            raise ValueError("learned_sink needs per `layer`: set memory.per=layer, or memory.learned_sink=false")
        if self.bytes is None and self.fraction is None:
            raise ValueError("expected either `bytes` or `fraction`, found neither; set memory.fraction, e.g. to 0.11")
        if self.bytes is not None and self.fraction is not None:
            raise ValueError(
                f"expected either `bytes` or `fraction`, found both: memory.bytes={self.bytes} and "
                f"memory.fraction={self.fraction:g}; add `--set memory.fraction=null` to keep the bytes, or "
                "`--set memory.bytes=null` to keep the fraction"
            )
        return self
