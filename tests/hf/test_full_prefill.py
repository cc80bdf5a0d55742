"""`prefill="full"`: softmax attention reads the first call, and the state that it leaves reads what follows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import linearize
from linearize.base import UserError
from linearize.hf.attention import linearized_layers
from linearize.hf.cache import LinearizedCacheLayer, layer_of
from tests.hf import checks
from tests.hf.generation_checks import assert_same_state
from tests.hf.models import CASE, make_student, random_tokens, teacher_of

KINDS = [
    "llama-sliding",
    "llama-mixed",
    "qwen3-sinks",
    "gpt2-heads",
    "llama-heads",
    "llama-cache-linear",
    "llama-cache",
]


def student(name: str):
    model = streaming(name)
    model.config.prefill = "full"
    return model


def streaming(name: str):
    return make_student(CASE[name], teacher_of(CASE[name]))


def after(model, ids, mask=None):
    """The cache behind a prompt, and the logits of its tokens."""
    options = {} if mask is None else {"attention_mask": mask, "position_ids": checks.positions(mask)}
    with torch.no_grad():
        found = model(ids, past_key_values=DynamicCache(config=model.config), use_cache=True, **options)
    return found.past_key_values, found.logits


@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_is_read_as_the_teacher_reads_it(name: str) -> None:
    model, teacher, ids = student(name), teacher_of(CASE[name]), random_tokens(2, 40)
    cache, logits = after(model, ids)
    checks.assert_close(logits, checks.uncached(teacher, ids))
    assert (checks.uncached(model, ids) - logits).abs().max() > 1e-3, "without a cache it streams"
    mask = checks.left_padding([6, 0], 40)
    padded, logits = after(model, ids, mask)
    expected = checks.uncached(teacher, ids, mask)
    checks.assert_close(logits * mask[..., None], expected * mask[..., None])
    # What follows reads the state of the prompt alone: rows without padding have the same one.
    for layer, other in zip(padded.layers, cache.layers, strict=True):
        if isinstance(layer, LinearizedCacheLayer):
            rows = zip(layer.state.tensors(), other.state.tensors(), strict=True)
            for x, y in rows:
                checks.assert_close(x[1].double(), y[1].double())


@pytest.mark.parametrize("name", KINDS)
def test_the_state_is_that_of_the_teachers_keys_and_values(name: str) -> None:
    """The first layer's inputs are the same either way, so its state is, too; those of deeper layers differ."""
    ids, found = random_tokens(2, 40), []
    for model in (student(name), streaming(name)):
        cache, _ = after(model, ids)
        layers = [layer for layer in cache.layers if isinstance(layer, LinearizedCacheLayer)]
        found.append([layers[0].state.named_tensors(), layers[-1].state.named_tensors()])
    for key, x in found[0][0].items():
        checks.assert_close(x.double().nan_to_num(neginf=0), found[1][0][key].double().nan_to_num(neginf=0))
    assert any((x - found[1][1][key]).abs().max() > 1e-6 for key, x in found[0][1].items())


@pytest.mark.parametrize("name", ["llama-sliding", "llama-heads", "llama-cache-linear"])
@pytest.mark.parametrize("length", [20, 530])
def test_tokens_of_a_prompt_can_be_taken_back(name: str, length: int) -> None:
    """Afterwards the state is that of the shorter prompt, read in full; longer prompts are recorded at their end."""
    model, ids = student(name), random_tokens(1, length)
    model.config.max_position_embeddings = 1024
    cache = DynamicCache(config=model.config)
    for module in linearized_layers(model).values():
        layer_of(cache, module).activate_past_recording()
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        layer.crop(-7)
    assert_same_state(cache, after(model, ids[:, :-7])[0])


def test_what_follows_streams_and_generation_goes_on() -> None:
    model, ids = student("llama-sliding"), random_tokens(1, 30)
    cache, logits = after(model, ids)
    with torch.no_grad():
        more = model(random_tokens(1, 5), past_key_values=cache, use_cache=True).logits
    assert more.shape[1] == 5 and cache.get_seq_length() == 35
    generated = model.generate(ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_logits=True)
    checks.assert_close(generated.logits[0], logits[:, -1].float(), 1e-5)


def test_the_choice_is_saved_and_anything_else_refused(tmp_path: Path) -> None:
    model = student("llama-sliding")
    model.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.prefill == "full"
    assert not hasattr(linearize.to_softmax(model).config, "prefill")
    model.config.prefill = "fast"
    with pytest.raises(UserError, match=r"config.prefill: expected streaming or full, found 'fast'"):
        after(model, random_tokens(1, 4))
