"""Agreement of models whose logits are known by construction, and of real ones with slow loops."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import decoders
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaForCausalLM

import linearize
from linearize.base import UserError
from linearize.data.rows import PackedRows
from linearize.evaluation import agreement
from linearize.evaluation.agreement import (
    Agreement,
    Generations,
    generation_agreement,
    logit_agreement,
    loss_by_position,
)
from linearize.evaluation.intervals import Interval
from linearize.evaluation.perplexity import TokenLosses, bootstrap, token_losses
from linearize.evaluation.speed import peak_bytes
from tests import tiny
from tests.byte_tokenizer import byte_tokenizer
from tests.evaluation.fakes import Fake, packed
from tests.fake_compiler import Compiler

pytestmark = pytest.mark.usefixtures("few")


class Table(nn.Module):
    """log p of the next token by the current one: `log_p[current, next]`."""

    def __init__(self, p: list[list[float]]) -> None:
        super().__init__()
        self.log_p = nn.Parameter(torch.tensor(p).log())

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.log_p[input_ids] + 7.0)  # logits are log p up to a constant


def measured(teacher: nn.Module, student: nn.Module, rows: Any, **options: Any) -> Agreement:
    return logit_agreement(teacher, student, rows, **(dict(batch_size=2, window_size=8, samples=50) | options))


def exactly(value: float) -> Interval:
    return Interval(*[float(value)] * 3)


def pair_in(dtype: torch.dtype) -> dict[str, LlamaForCausalLM]:
    teacher = tiny.llama().to(dtype)
    torch.manual_seed(0)
    return dict(teacher=teacher, student=linearize.convert(teacher, tiny.recipe()))


@pytest.fixture(scope="module")
def pair() -> dict[str, LlamaForCausalLM]:
    return pair_in(torch.float32)


# --- token by token ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_agrees_with_itself(dtype) -> None:
    model, rows = tiny.llama().to(dtype), tiny.packed([[24], [10, 14], [24]])
    found = measured(model, model, rows)
    assert found.tokens == 23 + 22 + 23
    assert found.top1 == found.top1_beyond == exactly(1.0)
    assert found.kl == found.reverse_kl == found.kl_beyond == exactly(0.0)


def test_divergences_of_two_tokens_by_hand() -> None:
    teacher, student = Table([[0.75, 0.25]] * 2), Table([[0.4, 0.6]] * 2)
    found = measured(teacher, student, packed([[20], [20]], vocab_size=2))
    assert found.kl.mean == pytest.approx(0.75 * math.log(0.75 / 0.4) + 0.25 * math.log(0.25 / 0.6), abs=1e-6)
    assert found.reverse_kl.mean == pytest.approx(0.4 * math.log(0.4 / 0.75) + 0.6 * math.log(0.6 / 0.25), abs=1e-6)
    assert found.top1 == exactly(0.0) and found.kl_beyond.mean == pytest.approx(found.kl.mean, abs=1e-6)
    assert (found.kl.mean, found.reverse_kl.mean) == pytest.approx((0.2525893, 0.2738378), abs=1e-6)


def test_a_student_that_differs_at_known_tokens() -> None:
    """After token 2 it says something else: so it does at every token that comes after a 2."""
    rows = packed([[40], [25, 15], [13, 13, 14], [40]], vocab_size=3)
    same = [[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]]
    teacher, student = Table([*same, [0.6, 0.3, 0.1]]), Table([*same, [0.2, 0.3, 0.5]])
    kl, reverse_kl = 0.6 * math.log(3) + 0.1 * math.log(0.2), 0.2 * math.log(1 / 3) + 0.5 * math.log(5)
    differ: list[bool] = []
    differ_far: list[bool] = []
    for ids, positions in zip(rows.input_ids.tolist(), rows.position_ids.tolist(), strict=True):
        for t in range(1, 40):
            differ += [ids[t - 1] == 2] * (positions[t] > 0)
            differ_far += [ids[t - 1] == 2] * (positions[t] > 8)
    found = measured(teacher, student, rows)
    share, far = sum(differ) / len(differ), sum(differ_far) / len(differ_far)
    assert found.tokens == len(differ) == 39 + 38 + 37 + 39 and 0.2 < share != far < 0.5
    assert (found.top1.mean, found.top1_beyond.mean) == pytest.approx((1 - share, 1 - far), abs=1e-9)
    assert (found.kl.mean, found.kl_beyond.mean) == pytest.approx((share * kl, far * kl), abs=1e-6)
    assert found.reverse_kl.mean == pytest.approx(share * reverse_kl, abs=1e-6)
    for interval in (found.top1, found.kl, found.reverse_kl, found.top1_beyond, found.kl_beyond):
        assert interval.low < interval.mean < interval.high


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_models_against_a_loop(dtype) -> None:
    """Numbers of bf16 models are as exact as their logits."""
    pair, rows = pair_in(dtype), tiny.packed([[20], [9, 11]])
    rows.labels[0, 3:6] = -100
    sums, tokens = torch.zeros(3, dtype=torch.float64), 0
    with torch.no_grad():
        inputs = dict(input_ids=rows.input_ids, position_ids=rows.position_ids, use_cache=False)
        p, q = (model(**inputs).logits.double().log_softmax(-1) for model in pair.values())
    for row, t in product(range(2), range(1, 20)):
        if rows.labels[row, t] != -100:
            a, b = p[row, t - 1], q[row, t - 1]
            sums += torch.stack([a.argmax() == b.argmax(), (a.exp() * (a - b)).sum(), (b.exp() * (b - a)).sum()])
            tokens += 1
    found = measured(**pair, rows=rows)
    assert found.tokens == tokens == token_losses(pair["student"], rows, batch_size=2).mask.sum()
    expected = (sums / tokens).tolist()
    assert [found.top1.mean, found.kl.mean, found.reverse_kl.mean] == pytest.approx(expected, rel=1e-5)
    assert 0 < expected[0] < 1 and min(expected[1:]) > 0.01


def test_rounding_makes_no_divergence_negative() -> None:
    """Logits that differ by a constant stand for the same probabilities, but not to the last bit."""
    p = torch.rand(500, 500, generator=torch.Generator().manual_seed(0))
    teacher, student = Table(p.tolist()), Table((p * 1.3).tolist())
    found = measured(teacher, student, packed([[16], [16]], vocab_size=500))
    assert found.top1 == exactly(1.0)
    assert 0 <= found.kl.low < 1e-6 and 0 <= found.reverse_kl.low < 1e-6


def test_batch_size_and_chunking_do_not_matter(pair, monkeypatch) -> None:
    rows = tiny.packed([[20], [9, 11], [20], [1, 19], [20]])
    whole = asdict(measured(**pair, rows=rows, batch_size=5))
    monkeypatch.setattr(agreement, "_CHUNK_ELEMENTS", 4 * tiny.VOCABULARY * 7)
    for batch_size in (1, 2, 5):
        found = asdict(measured(**pair, rows=rows, batch_size=batch_size))
        for name in ("top1", "kl", "reverse_kl", "top1_beyond", "kl_beyond"):
            assert found[name] == pytest.approx(whole[name], rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_bounded_beside_the_logits(dtype, monkeypatch) -> None:
    vocabulary, elements = 1000, 4 * 1000 * 8

    class Constant(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.logits = nn.Parameter(torch.randn(vocabulary, dtype=dtype))

        def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> SimpleNamespace:
            return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))  # takes no memory

    rows = packed([[64]] * 4, vocab_size=vocabulary)
    monkeypatch.setattr(agreement, "_CHUNK_ELEMENTS", elements)
    small = 128 * 4 * 64  # bytes for each token of a batch: its place, its results
    peak = peak_bytes(lambda: measured(Constant(0), Constant(1), rows, batch_size=4, samples=1))
    assert peak < 4 * elements + small < 0.2 * 4 * 64 * vocabulary * 4


@pytest.mark.parametrize(("documents", "tokens"), [([[8, 8], [8, 8]], 28), ([[16], [8, 8]], 29)])
def test_nothing_beyond_the_window(documents, tokens) -> None:
    found = measured(Fake(), Fake(scale=1.0), packed(documents))
    assert found.tokens == tokens and found.top1_beyond is None and found.kl_beyond is None


def test_dropout_is_off_and_the_training_flags_are_put_back() -> None:
    for flag in (True, False):
        teacher, student = Fake(scale=3.0).train(flag), Fake(scale=3.0).train(not flag)
        assert measured(teacher, student, packed([[16], [16]])).kl == exactly(0.0)
        assert (teacher.training, student.training) == (flag, not flag)


def test_what_cannot_be_compared() -> None:
    rows = packed([[16], [16]])
    with pytest.raises(UserError, match="student: expected logits for the teacher's 50 tokens, found 64; compare it"):
        measured(Fake(), Fake(vocab_size=64), rows)
    with pytest.raises(FloatingPointError, match="30 of 30 tokens is not finite"):
        measured(Fake(), Fake(scale=float("nan")), rows)
    with pytest.raises(UserError, match="at least 2 documents"):
        measured(Fake(), Fake(), packed([[16]]))
    # Nor can the first token of a row, whatever its label.
    assert measured(Fake(), Fake(), replace(rows, labels=rows.input_ids)).tokens == 2 * 15


# --- by position ------------------------------------------------------------------------------------------------------


def random_losses(rows: PackedRows, seed: int) -> TokenLosses:
    loss = torch.rand(rows.labels.shape, generator=torch.Generator().manual_seed(seed))
    return TokenLosses(loss, rows.labels != -100, rows.position_ids, rows.documents)


def test_bins_of_positions_against_a_loop() -> None:
    rows = packed([[12], [5, 7], [3, 9], [12]])
    rows.labels[3, 4:8] = -100
    losses = {"teacher": random_losses(rows, 1), "student": random_losses(rows, 2)}
    found = loss_by_position(losses, samples=30, seed=3)
    assert found.edges == [0, 1, 2, 4, 8, 12]
    assert list(found.losses) == ["teacher", "student"]
    for name, measure in losses.items():
        values: list[list[float]] = [[], [], [], [], []]
        for row, t in product(range(4), range(12)):
            if measure.mask[row, t]:
                values[1 + int(math.log2(measure.position[row, t]))].append(float(measure.loss[row, t]))
        assert list(map(len, values)) == [0, 6, 11, 12, 9] and found.documents == [0, 6, 6, 4, 3]
        assert found.losses[name][0] is None  # nothing predicts a document's first token
        for i in range(1, 5):
            assert found.losses[name][i].mean == pytest.approx(sum(values[i]) / len(values[i]), abs=1e-6)
            in_bin = measure.mask & (measure.position >= found.edges[i]) & (measure.position < found.edges[i + 1])
            assert found.losses[name][i] == bootstrap(replace(measure, mask=in_bin), samples=30, seed=3)


@pytest.mark.parametrize(
    ("longest", "edges"),
    [(1, [0, 1]), (2, [0, 1, 2]), (3, [0, 1, 2, 3]), (8, [0, 1, 2, 4, 8]), (9, [0, 1, 2, 4, 8, 9])],
)
def test_edges_end_behind_the_longest_position(longest, edges) -> None:
    found = loss_by_position({"student": random_losses(packed([[longest], [longest]]), 0)}, samples=2)
    assert found.edges == edges
    assert [value is None for value in found.losses["student"]] == [True] + [False] * (len(edges) - 2)


def test_bins_that_fewer_than_two_rows_reach_are_empty() -> None:
    losses = random_losses(packed([[16], [6, 5, 5], [6, 5, 5]]), 0)
    found = loss_by_position({"student": losses}, samples=2).losses["student"]
    assert [value is None for value in found] == [True, False, False, False, True]
    nothing = replace(losses, mask=torch.zeros_like(losses.mask))
    assert loss_by_position({"student": nothing}, samples=2).losses["student"] == [None] * 5


def test_candidates_must_have_read_the_same_tokens() -> None:
    with pytest.raises(ValueError, match="same rows"):
        loss_by_position({"a": random_losses(packed([[16]] * 2), 0), "b": random_losses(packed([[8, 8]] * 2), 0)})


# --- greedy generations -----------------------------------------------------------------------------------------------


def chain(following: dict[int, int], end: int | list[int] | None = None) -> LlamaForCausalLM:
    """After token i comes i + 1, but where `following` says something else: a Llama whose layers add nothing."""
    size = tiny.VOCABULARY
    sizes = dict(hidden_size=size, intermediate_size=4, num_attention_heads=1, num_key_value_heads=1, head_dim=8)
    model = tiny.llama(layers=1, tie_word_embeddings=False, **sizes)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for token in range(size):
            model.lm_head.weight[following.get(token, (token + 1) % size), token] = 1.0
    model.generation_config = GenerationConfig(eos_token_id=end)
    return model


def counting(starts: list[list[int]], length: int) -> PackedRows:
    """Documents of `length` tokens that count up from their starts; labels everywhere but on their first tokens."""
    ids = torch.stack([torch.cat([torch.arange(start, start + length) for start in row]) for row in starts])
    positions = torch.arange(length).repeat(len(starts[0])).expand(len(starts), -1)
    return PackedRows(ids, positions, ids.masked_fill(positions == 0, -100))


def generated(teacher: Any, student: Any, rows: Any, **options: Any) -> Generations:
    chosen = dict(prompts=8, prompt_length=4, new_tokens=6, shown=8, seed=0) | options
    return generation_agreement(teacher, student, byte_tokenizer(), rows, **chosen)


def written(*ids: int) -> str:
    return byte_tokenizer().decode(list(ids), clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("end", [None, 258, [33, 258]])
def test_a_model_goes_on_like_itself(dtype, end) -> None:
    model = tiny.llama().to(dtype)
    model.generation_config.eos_token_id = end
    found = generated(model, model, tiny.packed([[30]] * 9), prompt_length=10, new_tokens=20, prompts=9)
    assert found.agreement == exactly(1.0) and found.common_prefix == exactly(20) and found.new_tokens == 20
    assert all(sample.teacher == sample.student for sample in found.samples)


def test_known_texts() -> None:
    """The prompts are 10-13 and 40-43; the student says 99 after 16."""
    found = generated(chain({}), chain({16: 99}), counting([[10], [40]], 12))
    assert found.agreement.mean == (3 + 6) / 12 and (found.agreement.low, found.agreement.high) == (0.5, 1.0)
    assert found.common_prefix.mean == (3 + 6) / 2 and (found.common_prefix.low, found.common_prefix.high) == (3, 6)
    first, second = found.samples
    assert first.prompt == written(10, 11, 12, 13)
    assert first.teacher == first.reference == written(*range(14, 20))
    assert first.student == written(14, 15, 16, 99, 100, 101)
    assert second.student == second.teacher == written(*range(44, 50))


def test_agreement_can_come_back_and_the_common_prefix_cannot() -> None:
    found = generated(chain({}), chain({15: 99, 99: 17}), counting([[10], [10]], 12))
    assert found.agreement == exactly(5 / 6) and found.common_prefix == exactly(2)


@pytest.mark.parametrize(
    ("teacher", "student", "share", "prefix"),
    [
        ({}, {}, 3 / 3, 6),  # 14 15 E by both: all that there is, and no difference
        ({}, {14: 60}, 1 / 6, 1),  # 14 15 E; 14 60 61 62 63 64
        ({14: 60}, {}, 1 / 6, 1),
        ({}, {14: 16}, 1 / 3, 1),  # 14 15 E; 14 E
        ({13: 15}, {14: 16}, 1 / 2, 0),  # 15 E; 14 E: the ends are equal, and silence after them is no agreement
        ({13: 16}, {13: 200}, 0, 0),  # E; another E
    ],
)
def test_texts_that_end(teacher, student, share, prefix) -> None:
    """The teacher's ends are the student's too, which knows of none."""
    found = generated(chain(teacher, end=[16, 200]), chain(student), counting([[10]] * 3, 12))
    assert found.agreement.mean == pytest.approx(share) and found.common_prefix == exactly(prefix)


def test_a_text_that_ends_beside_a_longer_one() -> None:
    """Some texts of a batch are padded, which is no text."""
    found = generated(chain({}, end=16), chain({}), counting([[10], [40]], 12))
    assert found.agreement == exactly(1.0) and found.common_prefix == exactly(6.0)
    assert [sample.teacher for sample in found.samples] == [written(14, 15, 16), written(*range(44, 50))]


def test_the_models_own_settings_do_not_apply_and_stay() -> None:
    teacher, student = chain({19: 10}), chain({19: 10})
    teacher.generation_config = own = GenerationConfig(do_sample=True, no_repeat_ngram_size=1, max_length=5)
    found = generated(teacher.train(), student, counting([[10], [40]], 32), new_tokens=26)
    assert found.agreement == exactly(1.0)
    assert found.samples[0].teacher == written(*range(14, 20), *range(10, 20), *range(10, 20))
    assert teacher.generation_config is own and own.no_repeat_ngram_size == 1 and teacher.training


def test_compiled_steps_stay_compiled(compiler: Compiler) -> None:
    rows, asked = tiny.packed([[30]] * 9), {"prompts": 9, "prompt_length": 20, "new_tokens": 8}
    pair = pair_in(torch.float64)
    eager = generated(**pair, rows=rows, **asked)
    linearize.compile_steps(*pair.values())
    compiler.steps.clear()
    assert generated(**pair, rows=rows, **asked) == eager
    assert [len(step["input_ids"]) for step in compiler.steps] == [8] * 7 + [1] * 7 + [8] * 7 + [1] * 7


def test_real_models_against_a_loop_without_a_cache(pair) -> None:
    rows = tiny.packed([[30]] * 9)
    found = generated(**pair, rows=rows, prompts=9, prompt_length=20, new_tokens=8, shown=9)
    texts = {}
    for name, model in pair.items():
        text = rows.input_ids[:, :20]
        for _ in range(8):
            with torch.no_grad():
                text = torch.cat([text, model(text, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        texts[name] = text[:, 20:].tolist()
    equal = [[a == b for a, b in zip(*both, strict=True)] for both in zip(*texts.values(), strict=True)]
    assert found.agreement.mean == pytest.approx(sum(map(sum, equal)) / 72) and 0 < found.agreement.mean < 1
    assert found.common_prefix.mean == pytest.approx(sum([*e, False].index(False) for e in equal) / 9)
    for sample, prompt, student in zip(found.samples, rows.input_ids[:, :20].tolist(), texts["student"], strict=True):
        assert sample.prompt + sample.student in (written(*prompt, *student), written(*prompt) + written(*student))


def test_prompts_lie_within_one_document_at_its_start() -> None:
    # Long enough are 10-21 in the first row and 100-109 in the second; what follows 40 is another document.
    ids = torch.tensor([[*range(40, 45), *range(10, 22)], [*range(60, 67), *range(100, 110)]])
    positions = torch.tensor([[*range(5), *range(12)], [*range(7), *range(10)]])
    rows = PackedRows(ids, positions, ids.masked_fill(positions == 0, -100))
    found = generated(chain({}), chain({}), rows)
    assert [sample.prompt for sample in found.samples] == [written(*range(10, 14)), written(*range(100, 104))]
    assert [sample.reference for sample in found.samples] == [written(*range(14, 20)), written(*range(104, 110))]
    with pytest.raises(UserError, match=r"2 held-out documents of 11 tokens .* found 1, the longest .* has 12; use"):
        generated(chain({}), chain({}), rows, new_tokens=7)
    # Positions that go on in the next row: nothing starts there, and the document before ends with its row.
    rows = replace(rows, position_ids=torch.tensor([[*range(5), *range(12)], [*range(12, 19), *range(10)]]))
    assert generated(chain({}), chain({}), rows) == found
    with pytest.raises(UserError, match="found 1, the longest document has 12"):
        generated(chain({}), chain({}), rows, new_tokens=7)


def test_which_prompts_depends_on_the_seed_alone() -> None:
    rows = counting([[start, start + 16] for start in range(0, 200, 5)], 12)
    model = chain({})
    first, again, other = (generated(model, model, rows, prompts=5, shown=3, seed=seed) for seed in (0, 0, 1))
    assert first == again and len(first.samples) == 3
    assert [sample.prompt for sample in first.samples] != [sample.prompt for sample in other.samples]
    assert len(generated(model, model, rows, prompts=5, shown=9).samples) == 5
    assert generated(model, model, rows, prompts=5, shown=0).samples == []
    assert len(generated(model, model, rows, prompts=1).samples) == 2, "as many as an interval needs"


def test_prompts_are_of_different_documents_as_far_as_there_are_so_many() -> None:
    """Those of one document count as one: a row's rest, or a row of its own."""
    rows = replace(counting([[10, 30], [50, 70], [90, 110]], 12), first_document=torch.tensor([0, 2, 3]))
    assert rows.documents.unique().tolist() == [0, 1, 2, 3, 4]
    model = chain({})
    found = generated(model, model, rows, prompts=5)
    prompts = {sample.prompt for sample in found.samples}
    assert len(prompts) == found.documents == 5 and not {written(*range(n, n + 4)) for n in (70, 90)} <= prompts
    every = generated(model, model, rows, prompts=6)
    assert (len(every.samples), every.documents) == (6, 5)


def test_the_space_before_a_word_is_kept() -> None:
    """As in Llama's tokenizer, decoding drops the space that a text begins with."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    ids = torch.cat([tiny.tokens("so it goes on"), tiny.tokens("so we go on..")])
    rows = PackedRows(ids, torch.arange(13).expand(2, -1), ids)
    found = generation_agreement(
        chain({}), chain({}), tokenizer, rows, prompts=2, prompt_length=5, new_tokens=5, shown=2, seed=0
    )
    assert [(sample.prompt, sample.reference) for sample in found.samples] == [("so it", " goes"), ("so we", " go o")]
