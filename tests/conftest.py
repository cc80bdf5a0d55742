"""What every test needs."""

from __future__ import annotations

import torch
from hypothesis import settings

# Tiny tensors gain nothing from threads, and the tests run in several processes.
torch.set_num_threads(1)

# How long one example takes says something about the machine, not about the code.
settings.register_profile("linearize", deadline=None)
settings.load_profile("linearize")
