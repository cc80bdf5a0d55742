"""The caches of converted models and generate() on them, row by row of docs/generation.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.generation.streamers import TextIteratorStreamer, TextStreamer

from linearize.base import UserError
from linearize.hf.cache import LinearizedCacheLayer
from linearize.mixers import recording
from tests.byte_tokenizer import byte_tokenizer
from tests.hf import checks
from tests.hf import generation_checks as generation
from tests.hf.checks import alternating, pairs
from tests.hf.decoders import ARCHITECTURES
from tests.hf.models import ARCHITECTURES as FIRST
from tests.hf.models import (
    CASE,
    CASES,
    SLIDING_TEACHERS,
    Case,
    headwise,
    make_student,
    make_teacher,
    random_tokens,
    student_of,
    teacher_of,
)

HEADS = [CASE[name] for name in ("llama-heads", "gpt2-heads", "llama-cache-linear")]
ALIKE = [CASE[name] for name in ("llama-cache", "qwen3-heads", "mistral-cache")]
PLAIN, MIXED = CASE["llama-sliding"], CASE["llama-mixed"]
# With every kind of state: decays, the delta rule, slots of the window, sinks, running maxima, sums over all keys.
KINDS = ["gla-llama", "regla-gpt2", "performer-qwen3", "gated-delta-llama", "mix-gpt2", "fast-decay-mistral"]
ROOT = Path(__file__).parents[2]

BY_HAND = [generation.in_chunks, generation.token_by_token, generation.left_padded, generation.two_turns]
OF_CACHES = [generation.copied, generation.rows_selected, generation.rows_repeated, generation.packed]
CHOSEN = [generation.greedy_by_hand, generation.sampling_by_hand]
EARLY = [generation.greedy_finished_early, generation.beams_finished_early]
CANDIDATES = [generation.assisted, generation.assisted_by_itself, generation.assisting, generation.prompt_lookup]
# Every span, every architecture, and softmax layers of both kinds.
SOME = [CASE[name] for name in ("llama-none", "llama-terraced", "llama-mixed", "qwen3-sinks", "gpt2-mixed")]


@pytest.mark.parametrize(
    "case, check",
    [
        *alternating(CASES + SLIDING_TEACHERS + HEADS, BY_HAND + OF_CACHES),
        *pairs(HEADS, [generation.greedy_by_hand, generation.interior_padding, generation.emptied]),
        *pairs([*HEADS, *SOME], [generation.padded_without_positions]),
        *alternating(
            CASES + SLIDING_TEACHERS + HEADS, [generation.padding_told_otherwise, generation.masks_of_new_tokens]
        ),
        *pairs(HEADS, [generation.chunked_prefill, generation.next_turn, generation.static_cache]),
        # The other ways of assisting compare states, slots of terraces that no later query reads included.
        *pairs(HEADS[:1], [generation.beams, generation.saved, generation.forked, *CANDIDATES[2:]]),
        *pairs(HEADS[1:], [generation.taken_back, generation.saved]),
        # Softmax layers that slide count padding as distance, and not all caches of softmax layers can be emptied.
        *alternating(CASES, [generation.greedy_by_hand, generation.interior_padding]),
        *pairs([case for case in CASES if not case.keep_softmax], [generation.emptied]),
        *pairs(SOME + SLIDING_TEACHERS, [generation.beams, generation.chunked_prefill, generation.next_turn]),
        *pairs([PLAIN, MIXED, *SLIDING_TEACHERS], [generation.static_cache]),
        *pairs([MIXED], [generation.sampling_by_hand, *EARLY, *CANDIDATES]),
        *pairs([CASE["qwen3-sinks"], CASE["mistral-sliding-kept"]], [generation.prompt_lookup]),
        *pairs([MIXED, CASE["gated-delta-llama"], CASE["mix-gpt2"]], [generation.taken_back]),
    ],
)
def test_generation(case: Case, check: checks.Check) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, check",
    [
        *pairs([CASE["qwen3-sinks"], CASE["gpt2-mixed"]], [generation.sampling_by_hand, *EARLY]),
        *pairs([MIXED], [generation.returned_sequences]),
        *pairs(ALIKE, BY_HAND + OF_CACHES + [generation.static_cache, generation.saved, generation.taken_back]),
        *pairs([CASE["gated-delta-llama"], CASE["performer-qwen3"]], CANDIDATES),
        *pairs([CASE["qwen3-sinks"], *(CASE[name] for name in KINDS)], [generation.taken_back]),
    ],
)
def test_generation_elsewhere(case: Case, check: checks.Check) -> None:
    check(case)


STATES = [generation.saved, generation.forked, generation.static_cache, generation.beams]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, check",
    pairs(
        [Case(name, name, keep_softmax=(1,)) for name in (*FIRST, *ARCHITECTURES)],
        [generation.greedy_by_hand, *CANDIDATES, *STATES],
    ),
)
def test_every_architecture(case: Case, check: checks.Check) -> None:
    """Each with a softmax layer among the others."""
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("check", [generation.greedy_by_hand, generation.taken_back, *STATES])
@pytest.mark.parametrize("name", [*FIRST, *ARCHITECTURES])
def test_every_architecture_with_heads_of_several_kinds(name: str, check: checks.Check) -> None:
    check(headwise(name))


def test_taken_back_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens since the last `crop` are more than are recorded from one state."""
    monkeypatch.setattr(recording, "RECORDED", 9)
    generation.taken_back(CASE["qwen3-sinks"])


def test_a_cache_without_a_config_will_do() -> None:
    for case in (PLAIN, MIXED):
        model, ids = student_of(case), random_tokens(2, 20)
        found = checks.cached(model, ids, (0, 14, 15, 20), cache=DynamicCache())
        checks.assert_close(found, checks.uncached(model, ids))


def test_memory_of_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the end of a long prompt and no more than two earlier states, and a copy holds none."""
    monkeypatch.setattr(recording, "RECORDED", 6)
    model, ids = student_of(PLAIN), random_tokens(1, 60)
    cache = DynamicCache(config=model.config)
    cache.layers[0] = layer = LinearizedCacheLayer()
    layer.activate_past_recording()
    found, lengths = [], []
    for start, stop in ((0, 30), (30, 33), *((i, i + 1) for i in range(33, 60))):
        found.append(checks.cached(model, ids, (start, stop), cache=cache))
        lengths.append(layer.recording.length)
        fed = [call.inputs.q for replay in layer.recording.replays for call in replay.calls]
        assert sum(x.untyped_storage().nbytes() for x in fed) <= 12 * fed[0][:, :, :1].nbytes
    assert lengths[:2] == [6, 9]
    assert min(lengths) >= 6
    assert max(lengths) <= 12
    checks.assert_close(torch.cat(found, dim=1), checks.uncached(model, ids))
    with pytest.raises(RuntimeError, match=r"cannot take 13 tokens back .* recorded \d+"):
        layer.crop(-13)


def test_candidates_are_taken_back_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows above would prove little if all candidates were wrong, or all were right."""
    crops: list[int] = []
    crop = LinearizedCacheLayer.crop
    monkeypatch.setattr(LinearizedCacheLayer, "crop", lambda layer, n: (crops.append(int(n)), crop(layer, n))[1])
    generation.prompt_lookup(MIXED)
    assert min(crops) < 0
    crops.clear()
    generation.assisted_by_itself(MIXED)
    assert 0 in crops


def test_rows_that_are_chosen_forget_their_past() -> None:
    """A recording is of the rows that were fed."""
    model, ids = student_of(PLAIN), random_tokens(2, 8)
    changes = (
        lambda cache: cache.batch_select_indices(torch.tensor([1])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: cache.crop(0),
    )
    for change in changes:
        cache = generation.prefilled(model, ids)
        cache.activate_past_recording()
        checks.cached(model, torch.cat([ids, ids], dim=1), (8, 12), cache=cache)
        change(cache)
        with pytest.raises(RuntimeError, match="recorded 0"):
            cache.layers[0].crop(-1)
    checks.cached(model, torch.cat([ids, ids], dim=1), (8, 12), cache=cache)
    assert cache.layers[0].recording.length == 4
    cache.reset()
    cache.crop(-1)  # of nothing
    assert cache.get_seq_length() == 0
    checks.assert_close(checks.cached(model, ids, (0, 7, 8), cache=cache), checks.uncached(model, ids))
    with pytest.raises(RuntimeError, match="cannot take 9 tokens back"):  # of what was there before it was reset
        cache.layers[0].crop(-9)


# --- streams ----------------------------------------------------------------------------------------------------------


class Numbers:
    """A tokenizer for those who only decode: a token is its number and a space."""

    def decode(self, ids: torch.Tensor, **options: Any) -> str:
        return "".join(f"{int(token)} " for token in ids)


@pytest.mark.parametrize("options", [{}, dict(do_sample=True), dict(prompt_lookup_num_tokens=3)], ids=str)
@pytest.mark.parametrize("case", [PLAIN, MIXED], ids=lambda case: case.name)
def test_streams(case: Case, options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    model, ids = student_of(case), random_tokens(1, 9).repeat(1, 2)
    pieces, printed = TextIteratorStreamer(Numbers(), skip_prompt=True), TextStreamer(Numbers(), skip_prompt=True)
    for streamer in (pieces, printed):
        torch.manual_seed(0)
        made = generation.generate(model, ids, streamer=streamer, **options).sequences
    text = Numbers().decode(made[0, 18:])
    received = list(pieces)
    assert "".join(received) == text
    assert len(received) > 3
    assert capsys.readouterr().out.split() == text.split()


@pytest.mark.parametrize("case", [PLAIN, MIXED], ids=lambda case: case.name)
@pytest.mark.parametrize("options", [{}, dict(prompt_lookup_num_tokens=3)], ids=str)
def test_a_tokenizer_for_strings_to_stop_at(case: Case, options: dict[str, Any]) -> None:
    """generate() hands the tokenizer on to every forward; `transformers serve` always gives one, and a streamer."""
    tokenizer: Any = byte_tokenizer()
    model = make_student(case, make_teacher("llama", vocab_size=len(tokenizer)))
    prompt = tokenizer("Once upon a time", return_tensors="pt")
    given = prompt | options | dict(do_sample=False, max_new_tokens=16, tokenizer=tokenizer)
    plain = model.generate(**given, streamer=TextIteratorStreamer(tokenizer))[0]
    start = prompt.input_ids.shape[1]
    texts = [tokenizer.decode(token) for token in plain]
    # Some bytes are no text by themselves.
    stop = next(i for i in range(start, start + 15) if texts[i].isascii() and texts[i] not in texts[start:i])
    stopped = model.generate(**given, streamer=TextIteratorStreamer(tokenizer), stop_strings=[texts[stop]])[0]
    assert torch.equal(stopped, plain[: stop + 1])


# --- compiled steps ---------------------------------------------------------------------------------------------------


def graphs_of(backend: str, *names: str) -> int:
    """Graphs that generate() compiles beside static caches, for left-padded rows of these cases."""
    command = [sys.executable, "-m", "tests.hf.compiled_steps", backend, *names]
    return int(subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout)


def test_a_static_cache_keeps_its_place() -> None:
    """What a compiled step needs to be one graph for all tokens."""
    # A model of its own, because transformers remembers the greatest length that a static cache of a model has had.
    model = make_student(MIXED, teacher_of(MIXED))
    ids, mask, seen = random_tokens(2, 14), checks.left_padding([5, 0], 14), []

    def spy(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        layer = kwargs["past_key_values"].layers[0]
        places = [] if layer.kept is None else [x.data_ptr() for x in layer.kept.named_tensors().values()]
        seen.append((kwargs["attention_mask"].shape, places, type(layer.length)))

    handle = model.register_forward_pre_hook(spy, with_kwargs=True)
    try:
        generation.generate(model, ids, mask, cache_implementation="static")
    finally:
        handle.remove()
    assert len(seen) == generation.NEW
    assert seen[1] == seen[2] == seen[-1]
    assert seen[1][0] == (2, 14 + generation.NEW - 1)


def test_a_compiled_step_is_one_graph() -> None:
    assert graphs_of("eager", MIXED.name, "llama-cache-linear") == 2


@pytest.mark.slow
def test_all_kinds_of_compiled_steps() -> None:
    names = ["llama-mixed", "llama-none", "gpt2-mixed", "llama-cache-linear", *KINDS]
    assert graphs_of("eager", *names) == len(names)
    # transformers counts the tokens of a sliding softmax layer by an int.
    assert graphs_of("eager", "qwen3-sliding-kept") == 2


@pytest.mark.slow
def test_a_step_compiled_to_machine_code() -> None:
    assert graphs_of("inductor", MIXED.name) == 1


# --- what does not go -------------------------------------------------------------------------------------------------


def test_a_softmax_model_s_cache() -> None:
    student, teacher, ids = student_of(PLAIN), teacher_of(PLAIN), random_tokens(1, 6)
    cache = DynamicCache(config=teacher.config)
    checks.cached(teacher, ids, (0, 5), cache=cache)
    with pytest.raises(ValueError, match=r"found DynamicLayer with 5 tokens.*cannot be continued"):
        checks.cached(student, ids, (5, 6), cache=cache)
    with pytest.raises(ValueError, match="cannot be continued"):
        student.generate(ids, past_key_values=cache, max_new_tokens=2)


def test_a_linearized_cache_in_a_softmax_model() -> None:
    student, teacher, ids = student_of(PLAIN), teacher_of(PLAIN), random_tokens(1, 6)
    cache = DynamicCache(config=student.config)
    checks.cached(student, ids, (0, 5), cache=cache)
    with pytest.raises(RuntimeError, match="keeps a state, not keys and values"):
        checks.cached(teacher, ids, (5, 6), cache=cache)


@pytest.mark.parametrize("case", [PLAIN, MIXED], ids=lambda case: case.name)
def test_arguments_it_cannot_honour(case: Case) -> None:
    model, ids = student_of(case), random_tokens(1, 6)
    with pytest.raises(ValueError, match=r"expected a 2D mask .*found 4D"):
        model(ids, attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match="found dict"):
        model(ids, attention_mask={"full_attention": None})
    with pytest.raises(ValueError, match="without is_causal=False"):
        model(ids, is_causal=False)
    with pytest.raises(ValueError, match="without s_aux"):
        model(ids, s_aux=torch.zeros(4))


def test_taking_tokens_back() -> None:
    """Out of a cache that was not told to record them."""
    model, ids = student_of(PLAIN), random_tokens(1, 6)
    cache = DynamicCache(config=model.config)
    checks.cached(model, ids, (0, 6), cache=cache)
    assert not cache.is_croppable
    cache.crop(0)
    with pytest.raises(RuntimeError, match=r"cannot take 2 tokens back.*fork_state"):
        cache.crop(-2)
    assert cache.get_seq_length() == 6


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails whatever reads weights or computes a layer."""

    def work(*args: object, **kwargs: object) -> None:
        raise AssertionError("work was done before the refusal")

    monkeypatch.setattr(torch.nn.Linear, "forward", work)
    monkeypatch.setattr("transformers.modeling_utils.PreTrainedModel.from_pretrained", work)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("case", [PLAIN, MIXED], ids=lambda case: case.name)
def test_continuous_batching(case: Case) -> None:
    model, ids = student_of(case), random_tokens(1, 6)
    for call in (
        lambda: model.generate_batch([[1, 2, 3]], max_new_tokens=2),
        lambda: model.init_continuous_batching(),
        lambda: model.generate(ids, cache_implementation="paged"),
    ):
        with pytest.raises(UserError, match=r"expected generate\(\) with a padded batch, found continuous batching"):
            call()


def test_a_paged_cache_in_a_layer() -> None:
    """However it comes there."""
    with pytest.raises(UserError, match=r"cache=object: .* found continuous batching"):
        student_of(PLAIN)(random_tokens(1, 6), cache=object())


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    "options", [dict(tp_plan="auto"), dict(tp_size=2), dict(distributed_config=dict(tp_size=2, tp_plan=None))], ids=str
)
def test_tensor_parallelism(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"tensor parallelism: expected none.*device_map"):
        type(student_of(PLAIN)).from_pretrained("nowhere", **options)


def test_tensor_parallelism_by_an_auto_class(tmp_path: Any) -> None:
    student_of(PLAIN).config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="tensor parallelism"):
        AutoModelForCausalLM.from_pretrained(tmp_path, tp_plan="auto")


@pytest.mark.usefixtures("no_work")
def test_context_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known by torch's exchange of softmax attention; `test_transformers_surface` shows that this is what it does."""

    def exchanged(*args: object, **kwargs: object) -> None: ...

    exchanged.__module__ = "torch.distributed.tensor.experimental._attention"
    monkeypatch.setattr(functional, "scaled_dot_product_attention", exchanged)
    for case in (PLAIN, MIXED):
        assert not student_of(case).supports_context_parallel
        with pytest.raises(UserError, match=r"context parallelism: expected whole sequences.*prefill_chunk_size"):
            student_of(case)(random_tokens(1, 6))


def test_candidates_beside_a_static_cache() -> None:
    model, ids = student_of(PLAIN), random_tokens(1, 6)
    with pytest.raises(ValueError, match="not supported with Static cache"):
        model.generate(ids, max_new_tokens=4, cache_implementation="static", prompt_lookup_num_tokens=3)
    cache = generation.prefilled(model, ids, cache=StaticCache(config=model.config, max_cache_len=10))
    cache.activate_past_recording()
    with pytest.raises(RuntimeError, match="tokens back"):
        cache.crop(-1)
