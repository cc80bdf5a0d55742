"""A feature map of your own: a config, a module and one call. The rest follows: recipes, chunks, cache, checkpoints.

    python examples/own_feature_map.py --output-dir out

This one squares a ReLU, phi(x) = max(x, 0)^2 (So et al., Primer, arXiv 2109.08668). Nothing is trained here: see
`lolcats.py`. A program that loads the model registers the map before.
"""

import argparse
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM

import linearize
from linearize.configs.feature_maps import FeatureMapConfig
from linearize.mixers.feature_maps.base import Symmetric

BUNDLED = Path(linearize.__file__).parent / "demo" / "teacher"
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=BUNDLED, help="a softmax model: folder or hub id (default: the bundled one)")
parser.add_argument("--output-dir", type=Path, required=True, help="the converted model goes there")
options = parser.parse_args()


class SquaredReluMap(FeatureMapConfig):
    type: Literal["squared_relu"] = "squared_relu"


class SquaredRelu(Symmetric):  # the same for queries and keys; `FeatureMap` has a method for each
    def _map(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return x.relu().square()


linearize.register_feature_map(SquaredReluMap, SquaredRelu)
recipe = linearize.Recipe.load("lolcats", {"mixer.feature_map": {"type": "squared_relu"}})
teacher = AutoModelForCausalLM.from_pretrained(options.model)
linearize.convert(teacher, recipe).save_pretrained(options.output_dir)

student = AutoModelForCausalLM.from_pretrained(options.output_dir, dtype=torch.float32)
tokens = torch.randint(student.config.vocab_size, (1, 200))
whole, one_by_one = student(tokens, use_cache=False).logits[:, -1], student(tokens[:, :-1]).past_key_values
stepped = student(tokens[:, -1:], past_key_values=one_by_one).logits[:, -1]
print(f"by chunks and by a step after them, logits differ by {(whole - stepped).abs().max():.1e}")
