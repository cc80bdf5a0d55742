"""Tests on a real vLLM, of its CPU build where there is no GPU: `make test-vllm`, in an environment of its own."""

from __future__ import annotations

import os
from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

# vLLM reads these when it is imported: one process, so that a test can look into it, and one thread of a core.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
