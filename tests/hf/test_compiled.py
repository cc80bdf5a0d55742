"""Steps of generation that are compiled: what is handed to the compiler, and what happens without one."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from transformers import CompileConfig, DynamicCache, StaticCache

import linearize
from linearize.base import UserError
from linearize.configs.mixer import HeadGroup, HeadwiseConfig, MixerConfig, is_constant
from linearize.hf import compiled
from linearize.recipe import Recipe
from tests import tiny
from tests.fake_compiler import Compiler
from tests.hf.generation_checks import NEW, generate
from tests.hf.models import random_tokens

ROOT = Path(__file__).parents[2]
NOWHERE = None, "no-such-compiler"
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
def test_without_a_compiler_models_stay_as_they_are() -> None:
    """In the real inductor, which looks for it."""
    model = tiny.llama()
    assert model.generation_config is not None
    before = model.generation_config.to_dict()
    with config.patch({"cpp.cxx": NOWHERE}), pytest.raises(UserError, match=NO_COMPILER) as caught:
        linearize.compile_steps(model)
    assert "\n" not in str(caught.value)
    assert model.generation_config.to_dict() == before


@pytest.mark.slow
def test_the_bundled_teacher_and_its_student_write_the_same_compiled() -> None:
    """One graph of each for all tokens, and bench decodes by the same."""
    command = [sys.executable, "-m", "tests.hf.compiled_demo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "teacher: 1 graph\nstudent: 1 graph\n"), done.stderr


# --- by itself --------------------------------------------------------------------------------------------------------


def ready_student(monkeypatch: pytest.MonkeyPatch, pays_after: int = 1, **overrides: object) -> Any:
    """Return a student of its own that is to compile on this machine as it would on a GPU, after so many steps."""
    student: Any = linearize.convert(tiny.llama(), Recipe.load("lolcats", {"mixer.span.window_size": 8} | overrides))
    settings = CompileConfig()
    settings._compile_all_devices = True  # type: ignore[assignment]
    student.generation_config.compile_config = settings
    monkeypatch.setattr(compiled, "STEPS_TO_PAY", pays_after)
    monkeypatch.setattr(compiled, "require_compiler", lambda _: None)
    return student


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was logged here, without what transformers says of a `compile_config` that it does not use."""
    return [record.getMessage() for record in caplog.records if record.name == compiled.__name__]


def tokens_of(student: Any, ids: Tensor, **options: Any) -> Tensor:
    return student.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, **options)


def test_generate_compiles_by_itself_once_it_pays(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the tokens that the model has generated with as many rows and those that it is asked for."""
    student, ids = ready_student(monkeypatch, pays_after=2 * NEW), random_tokens(2, 14)
    first = tokens_of(student, ids)
    assert not compiler.steps
    assert not lines(caplog)
    for _ in range(2):
        assert torch.equal(tokens_of(student, ids), first)
    assert [step["input_ids"].shape for step in compiler.steps] == 2 * [(2, 1)] * (NEW - 1)
    assert {type(step["past_key_values"]) for step in compiler.steps} == {StaticCache}
    (line,) = lines(caplog)
    assert "for a batch of 2: the first one takes a minute or two" in line
    assert "disable_compile = True" in line
    compiler.steps.clear()
    tokens_of(student, ids[:1])  # for another batch size it does not pay yet
    assert not compiler.steps
    assert len(compiler.options) == 1


def test_what_is_compiled_is_used_however_few_tokens_come(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the text that it was compiled for ended early."""
    student, ids = ready_student(monkeypatch, pays_after=100), random_tokens(2, 14)
    mask = torch.ones_like(ids)
    short = student.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
    assert not compiler.steps
    every_token = list(range(student.config.vocab_size))
    student.generate(ids, attention_mask=mask, max_new_tokens=100, eos_token_id=every_token, pad_token_id=0)
    assert torch.equal(student.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False), short)
    assert [step["input_ids"].shape for step in compiler.steps] == [(2, 1)]


def test_nothing_is_compiled_by_default_on_a_cpu(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    student, caches = ready_student(monkeypatch), []
    student.generation_config.compile_config = None
    student.register_forward_pre_hook(lambda *args: caches.append(type(args[2]["past_key_values"])), with_kwargs=True)
    tokens_of(student, random_tokens(2, 14))
    assert set(caches) == {DynamicCache}
    assert not compiler.options


@pytest.mark.parametrize(
    "options",
    [
        dict(disable_compile=True),
        dict(cache_implementation="dynamic"),
        dict(past_key_values=None),
        dict(return_dict_in_generate=True),
        dict(use_cache=False),
        dict(num_beams=2),
        dict(prompt_lookup_num_tokens=3),
        dict(prefill_chunk_size=5),
    ],
    ids=str,
)
def test_what_is_not_compiled(options: dict[str, Any], compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where shapes change, or somebody else chooses or gets the cache."""
    student = ready_student(monkeypatch)
    if "past_key_values" in options:
        options = dict(past_key_values=DynamicCache(config=student.config))
    tokens_of(student, random_tokens(1, 14), **options)
    assert not compiler.steps
    assert not compiled.history(student).compiled


def test_other_threads_do_not_compile(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's, and those of a `TextIteratorStreamer`."""
    student, ids = ready_student(monkeypatch), random_tokens(1, 14)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(tokens_of, student, ids).result()
    assert not compiler.steps
    assert torch.equal(found, tokens_of(student, ids))
    assert compiler.steps


def test_layers_and_heads_that_keep_softmax_are_not_compiled(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = ready_student(monkeypatch, **{"layers.keep_softmax": [0]})
    tokens_of(student, random_tokens(1, 14))
    assert not compiler.steps
    mixer = MixerConfig()
    heads = [HeadGroup(kv_heads=(0,), mixer=mixer), HeadGroup(kv_heads=(1,), mixer=None)]
    assert is_constant((mixer, HeadwiseConfig(groups=(heads[0], HeadGroup(kv_heads=(1,), mixer=mixer)))))
    assert not is_constant((mixer, HeadwiseConfig(groups=tuple(heads))))


def test_models_on_several_devices_or_with_changing_angles_are_not_compiled(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, ids = ready_student(monkeypatch), random_tokens(1, 14)
    student.hf_device_map = {"model": "cuda:0", "lm_head": "cuda:1"}
    tokens_of(student, ids)
    del student.hf_device_map
    with monkeypatch.context() as patched:
        patched.setattr(compiled, "angles_change", lambda _: True)
        tokens_of(student, ids)
    student.generation_config.disable_compile = True
    tokens_of(student, ids)
    assert not compiler.steps
    student.generation_config.disable_compile = None
    tokens_of(student, ids)
    assert compiler.steps


def places(cache: Any) -> list[tuple[int, str]]:
    """Where the tensors of a state lie, and that transformers' compiler settings may count on it."""
    tensors: list[Any] = [x for layer in cache.layers for x in (*layer.kept.tensors(), layer.length)]
    return [(x.data_ptr(), x._dynamo_static_input_type) for x in tensors]


def test_captured_graphs_find_their_tensors_again(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of any length, one after another, are carried by the same tensors; a cache that is held keeps its own."""
    student, seen = ready_student(monkeypatch), []

    def look(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs["past_key_values"]
        if type(cache) is StaticCache and cache.layers[0].kept is not None:
            seen.append(places(cache))

    student.register_forward_pre_hook(look, with_kwargs=True)
    for length in (14, 3, 40):
        ids = random_tokens(2, length)
        assert torch.equal(tokens_of(student, ids), tokens_of(student, ids, disable_compile=True)[:, : length + NEW])
        compiler.steps.clear()  # they hold the cache
    assert len(seen) == 3 * (NEW - 1)
    assert all(x == seen[0] for x in seen)
    assert {kind for _, kind in seen[0]} == {"unguarded"}


def test_a_cache_that_is_held_keeps_its_tensors(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    student = ready_student(monkeypatch)
    tokens_of(student, random_tokens(2, 14))
    held = compiler.steps[-1]["past_key_values"]
    before = [x.clone() for x in held.layers[0].kept.tensors()]
    tokens_of(student, random_tokens(2, 9))
    assert compiler.steps[-1]["past_key_values"] is not held
    assert all(map(torch.equal, held.layers[0].kept.tensors(), before))


def test_a_static_cache_is_used_again_by_another_batch_and_mode() -> None:
    """Tensors that do not fit, or may not be written to, are left."""
    student: Any = linearize.convert(tiny.llama(), Recipe.load("lolcats", {"mixer.span.window_size": 8}))
    cache = StaticCache(config=student.config, max_cache_len=40)
    for rows, mode in ((2, torch.inference_mode), (2, torch.no_grad), (1, torch.no_grad), (1, torch.inference_mode)):
        ids = random_tokens(rows, 14)
        with mode():
            logits = [student(x, past_key_values=cache).logits for x in (ids[:, :10], ids[:, 10:])]
            expected = student(ids, use_cache=False).logits
        torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-4, atol=1e-4)
        cache.reset()


def test_a_copy_does_not_run_what_was_compiled_of_the_original(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, ids = ready_student(monkeypatch), random_tokens(2, 14)
    original = tokens_of(student, ids)
    other = copy.deepcopy(student)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(-1.5)
    expected = tokens_of(other, ids, disable_compile=True)
    assert not torch.equal(expected, original)
    assert torch.equal(tokens_of(other, ids), expected)
    assert torch.equal(tokens_of(student, ids), original)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own
def test_without_a_compiler_generate_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = compiled.require_compiler
    student, ids = ready_student(monkeypatch), random_tokens(2, 14)
    monkeypatch.setattr(compiled, "require_compiler", real)
    with config.patch({"cpp.cxx": NOWHERE}):
        for _ in range(2):
            assert torch.equal(tokens_of(student, ids), tokens_of(student, ids, disable_compile=True))
    (line,) = lines(caplog)
    assert re.match(NO_COMPILER, line)
    assert line.endswith("generating without compilation")


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
def test_machine_code_writes_what_eager_steps_write(device: str) -> None:
    """By inductor, and on a GPU by captured graphs, none of which is left out; one graph for all prompts."""
    command = [sys.executable, "-m", "tests.hf.compiled_by_itself", device]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "equal"), done.stderr
