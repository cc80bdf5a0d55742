"""A process that generates with a compiled step, run by `test_generation`: the tests' shape checks do not compile.

Where all of a case's state is constant, it also generates by compiled steps that the model takes by itself. Prints the
number of graphs: one, if all tokens shared it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from transformers import CompileConfig

from linearize.configs.mixer import is_constant
from linearize.hf import compiled
from linearize.hf.classes import read_plan
from tests.hf.checks import assert_close, left_padding
from tests.hf.generation_checks import generate
from tests.hf.models import CASE, random_tokens, student_of

NEW = 20  # more than any window or cache of a case has room for
graphs = []


def counted(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A backend. It is a function because generate() copies its settings."""
    graphs.append(graph)
    if sys.argv[1] == "inductor":
        return torch._inductor.compile(graph, inputs)
    return graph.forward


def assert_by_itself(model: Any, settings: CompileConfig) -> None:
    """Prompts of several lengths, padded and not, by the graph that is there; the tokens are those of eager steps."""
    for length, padding in ((14, [5, 0]), (3, [0, 0]), (30, [0, 0]), (9, [0, 4])):
        ids, mask = random_tokens(2, length), left_padding(padding, length)
        options = dict(attention_mask=mask, max_new_tokens=NEW, do_sample=False, compile_config=settings)
        expected = model.generate(ids, **options, disable_compile=True)
        assert torch.equal(model.generate(ids, **options), expected)
    assert compiled.history(model).compiled == {2}


compiled.STEPS_TO_PAY = NEW
compiled.require_compiler = lambda _: None  # it would compile another graph
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
    if is_constant(read_plan(model.config)):
        before = len(graphs)
        assert_by_itself(model, settings)
        assert len(graphs) == before, name
assert not torch._dynamo.utils.counters["graph_break"]
sys.stdout.write(str(len(graphs)))
