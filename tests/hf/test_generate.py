"""generate() on a converted model, row by row of docs/generation.md; see `test_generation` for the caches beneath."""

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
from tests.hf import checks
from tests.hf import generation_checks as rows
from tests.hf.decoders import ARCHITECTURES
from tests.hf.models import ARCHITECTURES as FIRST
from tests.hf.models import CASE, Case, make_student, random_tokens, student_of, teacher_of
from tests.hf.test_generation import pairs

PLAIN, MIXED = CASE["llama-sliding"], CASE["llama-mixed"]
# With every kind of state: decays, the delta rule, slots of the window, sinks, running maxima, sums over all keys.
KINDS = ["gla-llama", "regla-gpt2", "performer-qwen3", "gated-delta-llama", "mix-gpt2", "fast-decay-mistral"]
ROOT = Path(__file__).parents[2]

CHOSEN = [rows.greedy_by_hand, rows.sampling_by_hand, rows.greedy_finished_early, rows.beams_finished_early]
CANDIDATES = [rows.assisted, rows.assisted_by_itself, rows.assisting, rows.prompt_lookup]


@pairs([MIXED], CHOSEN)
def test_tokens_chosen(case: Case, check: checks.Check) -> None:
    check(case)


@pytest.mark.slow
@pairs([CASE["qwen3-sinks"], CASE["gpt2-mixed"]], CHOSEN)
def test_tokens_chosen_elsewhere(case: Case, check: checks.Check) -> None:
    check(case)


@pytest.mark.slow
@pairs([MIXED], [rows.returned_sequences])
def test_several_sequences_of_a_prompt(case: Case, check: checks.Check) -> None:
    check(case)


@pairs([MIXED], CANDIDATES)
def test_candidates(case: Case, check: checks.Check) -> None:
    check(case)


@pytest.mark.slow
@pairs([CASE["gated-delta-llama"], CASE["performer-qwen3"]], CANDIDATES)
def test_candidates_of_other_mixers(case: Case, check: checks.Check) -> None:
    check(case)


@pairs([CASE["qwen3-sinks"], CASE["mistral-sliding-kept"]], [rows.prompt_lookup])
def test_candidates_of_the_prompt(case: Case, check: checks.Check) -> None:
    check(case)


@pairs([MIXED, CASE["gated-delta-llama"], CASE["mix-gpt2"]], [rows.taken_back])
def test_taken_back(case: Case, check: checks.Check) -> None:
    check(case)


@pytest.mark.slow
@pairs([CASE["qwen3-sinks"], *(CASE[name] for name in KINDS)], [rows.taken_back])
def test_taken_back_in_every_kind_of_state(case: Case, check: checks.Check) -> None:
    check(case)


@pairs([CASE["qwen3-sinks"]], [rows.taken_back])
def test_taken_back_further(case: Case, check: checks.Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens since the last `crop` are more than are recorded from one state."""
    monkeypatch.setattr(recording, "RECORDED", 9)
    check(case)


EVERYWHERE = [rows.greedy_by_hand, *CANDIDATES, rows.saved, rows.forked, checks.static_cache, checks.beams]


@pytest.mark.slow
@pairs([Case(name, name, keep_softmax=(1,)) for name in (*FIRST, *ARCHITECTURES)], EVERYWHERE)
def test_every_architecture(case: Case, check: checks.Check) -> None:
    """Each with a softmax layer among the others."""
    check(case)


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
    rows.prompt_lookup(MIXED)
    assert min(crops) < 0
    crops.clear()
    rows.assisted_by_itself(MIXED)
    assert 0 in crops


def test_rows_that_are_chosen_forget_their_past() -> None:
    """A recording is of the rows that were fed."""
    model, ids = student_of(PLAIN), random_tokens(2, 8)
    changes = (
        lambda cache: cache.batch_select_indices(torch.tensor([1])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: cache.reset(),
        lambda cache: cache.crop(0),
    )
    for change in changes:
        cache = rows.prefilled(model, ids)
        cache.activate_past_recording()
        checks.cached(model, torch.cat([ids, ids], dim=1), (8, 12), cache=cache)
        change(cache)
        with pytest.raises(RuntimeError, match="recorded 0"):
            cache.layers[0].crop(-1)


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
        made = rows.generate(model, ids, streamer=streamer, **options).sequences
    text = Numbers().decode(made[0, 18:])
    received = list(pieces)
    assert "".join(received) == text
    assert len(received) > 3
    assert capsys.readouterr().out.split() == text.split()


# --- compiled steps ---------------------------------------------------------------------------------------------------


def graphs_of(backend: str, *names: str) -> int:
    """Graphs that generate() compiles beside static caches, for left-padded rows of these cases."""
    command = [sys.executable, "-m", "tests.hf.compiled_steps", backend, *names]
    return int(subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout)


def test_a_static_cache_keeps_its_place() -> None:
    """What a compiled step needs to be one graph for all tokens; the slow tests compile it."""
    # A model of its own, because transformers remembers the greatest length that a static cache of a model has had.
    model = make_student(MIXED, teacher_of(MIXED))
    ids, mask, seen = random_tokens(2, 14), checks.left_padding([5, 0], 14), []

    def spy(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        layer = kwargs["past_key_values"].layers[0]
        places = [] if layer.kept is None else [x.data_ptr() for x in layer.kept.named_tensors().values()]
        seen.append((kwargs["attention_mask"].shape, places, type(layer.length)))

    handle = model.register_forward_pre_hook(spy, with_kwargs=True)
    try:
        rows.generate(model, ids, mask, cache_implementation="static")
    finally:
        handle.remove()
    assert len(seen) == rows.NEW
    assert seen[1] == seen[2] == seen[-1]
    assert seen[1][0] == (2, 14 + rows.NEW - 1)


@pytest.mark.slow
def test_compiled_steps() -> None:
    names = ["llama-mixed", "llama-none", "gpt2-mixed", *KINDS]
    assert graphs_of("eager", *names) == len(names)
    # transformers counts the tokens of a sliding softmax layer by an int.
    assert graphs_of("eager", "qwen3-sliding-kept") == 2


@pytest.mark.slow
def test_a_step_compiled_to_machine_code() -> None:
    assert graphs_of("inductor", MIXED.name) == 1


# --- what does not go -------------------------------------------------------------------------------------------------


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
    cache = rows.prefilled(model, ids, cache=StaticCache(config=model.config, max_cache_len=10))
    cache.activate_past_recording()
    with pytest.raises(RuntimeError, match="tokens back"):
        cache.crop(-1)
