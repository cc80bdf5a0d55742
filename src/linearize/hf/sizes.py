"""How many weights a model has, and where: what a plan counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Numbers of weights besides the matrices of attention.

    Attributes:
        passes: how often the stream goes through each layer; more than once only in ALBERT.
        embeddings: weights that are looked up or added: of tokens, positions, types, special tokens.
        layers: of each layer, but for its attention matrices; their biases count.
        used: those of them that one token meets: not those of experts that it is not sent to.
        head: the matrix that turns the stream into logits, which may be the embeddings' own; 0 without a language head.
        outside: all others.
    """

    passes: tuple[int, ...]
    embeddings: int
    layers: tuple[int, ...]
    used: tuple[int, ...]
    head: int
    outside: int
