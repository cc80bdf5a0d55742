"""Let PyPI's torchvision, which is built for CUDA, be imported beside torch's CPU build.

Python imports this module by itself if its folder is in PYTHONPATH. vLLM imports code for images before it loads a
Qwen model of text alone, and this code imports torchvision. Its compiled operators cannot be loaded there, so the two
that it names when it is imported are declared without an implementation. They are never called.
"""

import torch

for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
