"""A process that compiles forwards; run by `test_ordinary_model`, since the tests' shape checks do not compile."""

from __future__ import annotations

import sys

import torch

from tests.hf.checks import assert_close, left_padding, positions
from tests.hf.models import CASE, make_student, random_tokens, teacher_of

for name in sys.argv[1:]:
    model = make_student(CASE[name], teacher_of(CASE[name]))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    ids, mask = random_tokens(2, 20), left_padding([6, 0], 20)
    for options in (dict(), dict(attention_mask=mask, position_ids=positions(mask))):
        results = []
        for forward in (model, compiled):
            model.zero_grad(set_to_none=False)
            output = forward(ids, labels=ids, use_cache=False, **options)
            output.loss.backward()
            gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            results.append([output.logits.detach(), *gradients])
        assert len(results[0]) > 10
        for found, expected in zip(*results, strict=True):
            assert_close(found, expected)
sys.stdout.write("equal")
