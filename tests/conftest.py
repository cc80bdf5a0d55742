"""What every test needs."""

from __future__ import annotations

import torch
from hypothesis import settings

# Tiny tensors gain nothing from threads, and the tests run in several processes.
torch.set_num_threads(1)

# As the command line does: on a CPU, numbers that are all but 0 would take most of the time.
torch.set_flush_denormal(True)

# How long one example takes says something about the machine, not about the code.
settings.register_profile("linearize", deadline=None)
settings.load_profile("linearize")
