"""Steps of generation that are compiled: what is handed to the compiler, and what happens without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor import config
from transformers import StaticCache

import linearize
from linearize.base import UserError
from linearize.recipe import Recipe
from tests import tiny
from tests.fake_compiler import Compiler
from tests.hf.generation_checks import NEW, generate
from tests.hf.models import random_tokens

ROOT = Path(__file__).parents[2]
NO_COMPILER = r"compile: expected a C\+\+ compiler .*, found: .*No working C\+\+ compiler .*no-such-compiler"


def test_generate_compiles_the_step_and_nothing_else(compiler: Compiler) -> None:
    """On a CPU too, of students and of softmax models; the prompt is no step."""
    teacher = tiny.llama()
    student = linearize.convert(teacher, Recipe.load("lolcats", {"mixer.span.window_size": 8}))
    ids = random_tokens(2, 14)
    expected = [generate(model, ids).sequences for model in (teacher, student)]
    assert not compiler.steps
    linearize.compile_steps(teacher, student)
    assert len(compiler.steps) == 1  # to see whether it can
    for model, tokens in zip((teacher, student), expected, strict=True):
        compiler.steps.clear()
        assert torch.equal(generate(model, ids).sequences, tokens)
        assert [step["input_ids"].shape for step in compiler.steps] == [(2, 1)] * (NEW - 1)
        assert {type(step["past_key_values"]) for step in compiler.steps} == {StaticCache}
        # CUDA graphs, where there is CUDA.
        assert compiler.options[-1].items() >= {"backend": "inductor", "mode": "reduce-overhead"}.items()
    assert len(compiler.options) == 3


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own
def test_without_a_compiler_models_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the real inductor, which looks for it."""
    monkeypatch.setattr(config.cpp, "cxx", (None, "no-such-compiler"))
    model = tiny.llama()
    assert model.generation_config is not None
    before = model.generation_config.to_dict()
    with pytest.raises(UserError, match=NO_COMPILER) as caught:
        linearize.compile_steps(model)
    assert "\n" not in str(caught.value)
    assert model.generation_config.to_dict() == before


@pytest.mark.slow
def test_the_bundled_teacher_and_its_student_write_the_same_compiled() -> None:
    """One graph of each for all tokens, and bench decodes by the same."""
    command = [sys.executable, "-m", "tests.hf.compiled_demo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "teacher: 1 graph\nstudent: 1 graph\n"), done.stderr
