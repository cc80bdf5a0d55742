"""ReGLA's figures that need no training: Fig. 2 (Theorem 3.1 by simulation), Fig. 3 (gradients), Fig. 5 (generation).

    python experiments/regla/figures.py [--longest 8192] [--json experiments/regla/figures.json]

Writes the JSON, and the same as tables beside it (.md). About five minutes on 2 cores, nearly all of it Fig. 5.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from linearize import Recipe, convert
from linearize.configs.feature_maps import ReglaMap
from linearize.configs.mixer import MixerConfig
from linearize.configs.shape import LayerShape
from linearize.evaluation.speed import generation_speed
from linearize.mixers.gates import refined_log_decay

FEATURES = (16, 32, 64, 128, 256)
GATES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
REFINEMENTS = (0.0, 0.25, 0.5, 0.75, 1.0)


def theorem(samples: int = 200_000) -> list[dict[str, float]]:
    """Standard deviation of phi_q.phi_k for normal q and k: identity and exponential map, and with the factor."""
    generator, rows = torch.Generator().manual_seed(0), []
    for features in FEATURES:
        q, k = (torch.randn(samples, features, generator=generator) for _ in range(2))
        exponential = (q.exp() * k.exp()).sum(1)
        config = MixerConfig.model_validate(
            {
                "span": {"type": "none"},
                "feature_map": {"type": "regla", "feature_dim": features},
                "scale": "regla",
                "normalizer": {"type": "rms_norm"},
                "combine": {"type": "add"},
            }
        )
        shape = LayerShape(num_heads=1, num_kv_heads=1, head_dim=features, hidden_size=features, max_positions=1)
        assert isinstance(config.feature_map, ReglaMap)
        found = {"features": features, "identity": (q * k).sum(1).std(), "exponential": exponential.std()}
        found["theorem"] = math.e * math.sqrt(features * (math.e**2 - 1))
        found["scaled"] = config.scale_factor(shape) * exponential.std()
        rows.append({name: float(value) for name, value in found.items()})
    return rows


def gradients() -> list[dict[str, float]]:
    """d f / d (what is inside g's sigmoid), of the refined gate at several r, and of a plain sigmoid."""
    rows = []
    for gate in GATES:
        row = {"g": gate, "sigmoid": gate * (1 - gate)}
        for r in REFINEMENTS:
            inside = torch.tensor(gate, dtype=torch.float64).logit().requires_grad_()
            refined_log_decay(
                inside, torch.tensor(r, dtype=torch.float64).clamp(1e-9, 1 - 1e-9).logit()
            ).exp().backward()
            assert inside.grad is not None
            row[f"r = {r:g}"] = float(inside.grad)
        rows.append(row)
    return rows


def generation(longest: int) -> list[dict[str, Any]]:
    """Six layers, a prompt of 5 tokens: seconds and bytes of cache against the tokens generated."""
    config = LlamaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=longest + 8,
    )  # fmt: skip
    torch.manual_seed(0)
    teacher = LlamaForCausalLM(config).eval()
    models: dict[str, Any] = {"softmax": teacher}
    for name in ("fast-decay", "regla"):
        models[name] = convert(teacher, Recipe.load(name)).eval()
    rows = []
    tokens = 64
    while tokens <= longest:
        for speed in generation_speed(models, [5], new_tokens=tokens, repeats=1):
            rows.append(
                {
                    "model": speed.model,
                    "tokens": tokens,
                    "seconds": speed.prefill.median + tokens * speed.decode.median,
                    "cache_bytes": speed.cache_bytes,
                }
            )
        tokens *= 2
    return rows


def markdown(found: dict[str, Any]) -> str:
    lines = ["# ReGLA, Figs. 2, 3 and 5", "", "## Fig. 2: Theorem 3.1 by simulation", ""]
    lines += _table(
        ["features", "std, identity map", "std, exponential map", "e sqrt(F (e^2 - 1))", "std with the factor"],
        [[f"{x:.4g}" for x in row.values()] for row in found["theorem"]],
    )
    lines += ["", "## Fig. 3: gradient of the forget gate", "", "By its gate g; at 0 and 1 a sigmoid has none.", ""]
    lines += _table(list(found["gradients"][0]), [[f"{x:.3g}" for x in row.values()] for row in found["gradients"]])
    lines += ["", "## Fig. 5: generation behind a prompt of 5 tokens, 6 layers", ""]
    lengths = sorted({row["tokens"] for row in found["generation"]})
    by = {(row["model"], row["tokens"]): row for row in found["generation"]}
    models = list(dict.fromkeys(row["model"] for row in found["generation"]))
    lines += _table(
        ["tokens", *(f"{model}: s" for model in models), *(f"{model}: MiB" for model in models)],
        [
            [str(length), *(f"{by[model, length]['seconds']:.2f}" for model in models)]
            + [f"{by[model, length]['cache_bytes'] / 2**20:.2f}" for model in models]
            for length in lengths
        ],
    )
    return "\n".join(lines) + "\n"


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, default=8192, help="tokens generated at most, in Fig. 5")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_suffix(".json"))
    a = parser.parse_args()
    found = {"theorem": theorem(), "gradients": gradients(), "generation": generation(a.longest)}
    a.json.write_text(json.dumps(found | {"torch": torch.__version__}, indent=1) + "\n", encoding="utf-8")
    a.json.with_suffix(".md").write_text(markdown(found), encoding="utf-8")


if __name__ == "__main__":
    main()
