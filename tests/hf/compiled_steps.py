"""A process that generates with a compiled step, run by `test_generation`: the tests' shape checks do not compile.

Prints the number of graphs: one, if all tokens shared it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from transformers import CompileConfig

from tests.hf.checks import assert_close, left_padding
from tests.hf.generation_checks import generate
from tests.hf.models import CASE, random_tokens, student_of

graphs = []


def counted(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A backend. It is a function because generate() copies its settings."""
    graphs.append(graph)
    if sys.argv[1] == "inductor":
        return torch._inductor.compile(graph, inputs)
    return graph.forward


for name in sys.argv[2:]:
    case = CASE[name]
    if case.architecture != "gpt2" and not case.teacher:
        case = replace(case, teacher=dict(num_hidden_layers=2))
    model, ids, mask = student_of(case), random_tokens(2, 14), left_padding([5, 0], 14)
    settings = CompileConfig(fullgraph=True, backend=counted, mode=None)
    settings._compile_all_devices = True
    torch._dynamo.reset()
    found = generate(model, ids, mask, cache_implementation="static", compile_config=settings)
    expected = generate(model, ids, mask, use_cache=False)
    assert torch.equal(found.sequences, expected.sequences)
    # generate() gives logits in fp32, where machine code may round otherwise.
    assert_close(torch.stack(found.logits), torch.stack(expected.logits), 1e-4 if sys.argv[1] == "inductor" else 1e-10)
sys.stdout.write(str(len(graphs)))
