from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from linearize.evaluation import copying, retrieval
from linearize.evaluation.copying import Copying, CopyRows, copy_losses, copy_rows
from linearize.evaluation.perplexity import TokenLosses
from linearize.evaluation.retrieval import (
    TASKS,
    Answers,
    RetrievalTest,
    Setting,
    Trials,
    answer,
    distances,
    retrieval_result,
    retrieval_tests,
)
from tests.byte_tokenizer import byte_tokenizer
from tests.evaluation.fakes import Fake

pytestmark = pytest.mark.usefixtures("few")

WINDOW = 64
NAMES = ["passkey", "needle", "associative_recall"]


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Words with their space in front, one put in front of every text; characters and bytes for all else."""
    words = [f"\u2581{word}" for word in ("The", "pass", "key", "is", "box", "holds", "a", "lamp", "red", "cat", "by")]
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyzRSNT0123456789."]
    pieces = [*((f"<0x{byte:02X}>", -20.0) for byte in range(256)), *((letter, -9.0) for letter in letters)]
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *pieces, *((word, -5.0) for word in words)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


TOKENIZERS = {
    "byte_level": byte_tokenizer(),
    "no_bos": byte_tokenizer(bos=None),
    "sentencepiece": sentencepiece_tokenizer(),
}


@functools.cache
def made(tokenizer: str = "byte_level") -> dict[str, RetrievalTest]:
    tests = retrieval_tests(TOKENIZERS[tokenizer], window_size=WINDOW, max_positions=480, trials=3)
    return {test.task.name: test for test in tests}


class Copier(nn.Module):
    """Looks for the longest context that has occurred before and names what followed it, if that is still in sight.

    With `forgets`, it names something else at every position that this number divides.
    """

    def __init__(self, *, window: int = 10**6, forgets: int = 10**6) -> None:
        super().__init__()
        self.device_of = nn.Parameter(torch.zeros(()))
        self.window, self.forgets = window, forgets

    def next_token(self, seen: Tensor) -> int:
        last = len(seen) - 1
        if last % self.forgets == self.forgets - 1:
            return 0
        found, guess, length = torch.arange(max(0, last - self.window), last), 0, 0  # found + 1 is still in the window
        while len(found := found[found >= length]) and len(found := found[seen[found - length] == seen[last - length]]):
            guess, length = int(seen[found[-1] + 1]), length + 1
        return guess

    def forward(self, input_ids, position_ids, use_cache, logits_to_keep) -> SimpleNamespace:
        assert position_ids.tolist() == [list(range(input_ids.shape[1]))] * len(input_ids)
        assert not torch.is_grad_enabled() and not self.training
        logits = torch.zeros(len(input_ids), logits_to_keep, 600)
        for n, row in enumerate(input_ids):
            for k in range(logits_to_keep):
                logits[n, k, self.next_token(row[: len(row) - logits_to_keep + k + 1])] = 1.0
        return SimpleNamespace(logits=logits)


class Constant(nn.Module):
    """A model that gives one number everywhere."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))

    def forward(self, input_ids, position_ids, use_cache, logits_to_keep) -> SimpleNamespace:
        return SimpleNamespace(logits=self.value.expand(*input_ids.shape, 600))


@functools.cache
def answers(model: Copier, tokenizer: str, name: str) -> Answers:
    return answer(model, made(tokenizer)[name], batch_size=2)


PERFECT, CONFINED = Copier(), Copier(window=WINDOW)


def slow_shares(model: Copier, trials: Trials) -> list[float]:
    """Greedy decoding of every answer, one token at a time, on its own."""
    shares = []
    for row, question in zip(trials.input_ids, trials.question, strict=True):
        right = []
        for number in range(1, int(question.max()) + 1):
            places = (question == number).nonzero().flatten().tolist()
            text = row[: places[0]]
            for _ in places:
                text = torch.cat([text, torch.tensor([model.next_token(text)])])
            right.append(text[places[0] :].equal(row[places]))
        shares.append(sum(right) / len(right))
    return shares


# --- copying ----------------------------------------------------------------------------------------------------------


def repeats(**changes) -> CopyRows:
    """Ten tokens and, 24 after their start, the same again."""
    settings = {"rows": 20, "seed": 0, "window_size": 12, "max_positions": 34}
    found = copy_rows(torch.arange(3, 50), **settings | changes)
    assert found is not None
    return found


def test_copies_repeat_at_the_distance_and_they_alone_have_labels() -> None:
    made = repeats()
    assert (made.length, made.distance, made.input_ids.shape) == (10, 24, (20, 34))
    assert made.input_ids[:, :10].equal(made.input_ids[:, 24:])
    assert not made.input_ids[:, :10].equal(made.input_ids[:, 10:20])
    labelled = [t for t in range(34) if made.labels[0, t] != -100]
    assert labelled == [*range(1, 10), *range(25, 34)]
    assert made.labels[:, labelled].equal(made.input_ids[:, labelled])
    assert made.position_ids[0].tolist() == list(range(34))
    assert made.input_ids.min() >= 3
    assert repeats().input_ids.equal(made.input_ids) and not repeats(seed=1).input_ids.equal(made.input_ids)


def test_copies_are_as_long_as_the_window_where_the_positions_have_room() -> None:
    assert repeats(max_positions=1000).input_ids.shape == (20, 36)
    assert repeats(max_positions=26).length == 2
    assert copy_rows(torch.arange(3, 50), window_size=12, max_positions=25, rows=2, seed=0) is None


def test_copying_model_has_no_loss_on_the_second_copy() -> None:
    copying = Copying.of(copy_losses(Fake(distance=24, scale=30.0), repeats(), batch_size=7))
    assert copying.second.mean < 1e-6
    assert copying.first.mean == pytest.approx(math.log(50), abs=1e-5)  # nothing to copy yet: uniform
    assert copying.gain.mean == pytest.approx(copying.first.mean - copying.second.mean)
    elsewhere = Copying.of(copy_losses(Fake(distance=23, scale=30.0), repeats(), batch_size=7))
    assert elsewhere.gain.mean < 0


def test_every_token_of_a_copy_but_its_first_counts(monkeypatch) -> None:
    """Each token's loss is its own power of two: a token more or less would show."""
    made = repeats()

    def losses(*_, **__) -> TokenLosses:
        return TokenLosses(
            2.0 ** torch.arange(34).expand(20, -1), made.labels != -100, made.position_ids, made.documents
        )

    monkeypatch.setattr(copying, "token_losses", losses)
    first, second = copy_losses(Fake(), made, batch_size=20)
    assert first.sum.tolist() == pytest.approx([sum(2.0**t for t in range(1, 10)) / 9] * 20)
    assert second.sum.tolist() == pytest.approx([sum(2.0**t for t in range(25, 34)) / 9] * 20)


# --- the rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_every_answer_stands_exactly_the_distance_before(tokenizer, name) -> None:
    test = made(tokenizer)[name]
    assert [test.task.name for test in made(tokenizer).values()] == NAMES
    assert test.beyond and len(test.cells) > len(test.beyond)
    for (distance, _), trials in test.cells.items():
        assert trials.input_ids.shape[0] == 3 and trials.input_ids.shape[1] <= 480
        for row, question in zip(trials.input_ids, trials.question, strict=True):
            places = question.nonzero().flatten()
            assert len(places) and row[places].equal(row[places - distance])


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_rows_open_like_a_text_and_hold_no_other_special_token(tokenizer, name) -> None:
    special, bos = TOKENIZERS[tokenizer].all_special_ids, TOKENIZERS[tokenizer].bos_token_id
    for trials in made(tokenizer)[name].cells.values():
        assert bos is None or (trials.input_ids[:, 0] == bos).all()
        assert not torch.isin(trials.input_ids[:, 1:], torch.tensor(special)).any()


@pytest.mark.parametrize("tokenizer", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("name, cue", [("passkey", "The pass key is"), ("needle", "The box holds a")])
def test_hidden_line_reads_well_and_lies_at_its_depth(tokenizer, name, cue) -> None:
    space = " " if tokenizer == "sentencepiece" else ""  # in front of every line
    line = 1 + len(TOKENIZERS[tokenizer](cue, add_special_tokens=False)["input_ids"])
    for (distance, depth), trials in made(tokenizer)[name].cells.items():
        for row, question in zip(trials.input_ids, trials.question, strict=True):
            places = question.nonzero().flatten().tolist()
            text = TOKENIZERS[tokenizer].decode(row[1 : places[-1] + 1])
            _, told, asked = text.split(f"\n{space}{cue} ")
            assert told.startswith(f"{asked}\n")
            assert (asked.isdigit() and len(asked) == 5) if name == "passkey" else len(asked.split()) == 2
            before, after = places[0] - distance - line - 1, distance - len(places) - 1 - line
            assert min(before, after) >= 0 and before == round(depth * (before + after))


def test_answers_of_different_length_are_padded_at_the_end() -> None:
    cells = made("sentencepiece")["needle"].cells.values()
    assert len({int(length) for trials in cells for length in trials.question.sum(dim=1)}) > 1
    for question in (row.tolist() for trials in cells for row in trials.question):
        answered = question.count(1)
        first = question.index(1)
        assert question == [0] * first + [1] * answered + [0] * (len(question) - first - answered)


def test_needle_lies_in_the_text_that_is_given() -> None:
    haystack = torch.cat([torch.arange(200, 230), torch.tensor([256, 258])]).expand(2, -1)  # 256 and 258: special
    tests = retrieval_tests(TOKENIZERS["byte_level"], window_size=64, max_positions=300, haystack=haystack)
    passkey, needle = (test.cells[128, 0.5].input_ids[:, 1:40] for test in tests[:2])
    assert needle.min() >= 200 and needle.max() < 230 and len(needle) == 8
    assert (needle[:, 1:] - needle[:, :-1]).unique().tolist() == [-29, 1]  # in its own order
    assert len(needle[:, 0].unique()) > 1
    assert passkey.max() < 200 or passkey.min() < 200
    only_special = retrieval_tests(
        TOKENIZERS["byte_level"], window_size=64, max_positions=300, haystack=torch.full((1, 9), 256)
    )
    assert only_special[1].cells.keys() == tests[1].cells.keys()


def test_associative_recall_asks_every_second_key_once() -> None:
    for (_, pairs), trials in made()["associative_recall"].cells.items():
        assert trials.question[0].unique().tolist() == list(range(pairs // 2 + 1))
        for row, question in zip(trials.input_ids[:, 1:].tolist(), trials.question[:, 1:].tolist(), strict=True):
            keys, values = row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2]
            assert len({*keys, *values}) == 2 * pairs
            asked = [place for place, number in enumerate(question) if number]
            assert [row[place - 1] for place in asked] == keys[::2] and [row[place] for place in asked] == values[::2]
            assert all(row.count(token) == 2 for token in (*keys[::2], *values[::2]))
            assert all(row.count(token) == 1 for token in (*keys[1::2], *values[1::2]))


def test_rows_depend_on_the_seed_alone() -> None:
    def rows(seed: int) -> list[Tensor]:
        tests = retrieval_tests(byte_tokenizer(), window_size=32, max_positions=200, trials=2, seed=seed)
        return [trials.input_ids for test in tests for trials in test.cells.values()]

    assert all(a.equal(b) for a, b in zip(rows(0), rows(0), strict=True))
    assert not any(a.shape == b.shape and a.equal(b) for a, b in zip(rows(0), rows(1), strict=True))


def test_distances_lie_on_both_sides_of_the_window_and_in_the_positions() -> None:
    assert distances(64, 1024) == (32, 128, 256, 512)
    assert distances(64, 131072) == (32, 128, 256, 512, 1024)
    assert distances(512, 1024) == (256, 768)
    assert distances(1, 100) == (2, 4, 8, 16)


def test_there_are_trials_enough_for_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "ENOUGH", 16)
    for positions, count in ((64, 16), (120, 8), (300, 6)):  # with 1, 2 and 4 distances beyond the window
        for test in retrieval_tests(byte_tokenizer(), window_size=16, max_positions=positions, trials=6):
            assert test.count == count and {len(trials.input_ids) for trials in test.cells.values()} <= {count}
            given = Answers({cell: torch.full((count,), 0.5) for cell in test.cells})
            student = retrieval_result(test, {"student": given}).student_share
            assert (student is None) == (len(test.beyond) * count < 16)


# --- known answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("name", NAMES)
def test_a_perfect_copier_is_always_right_and_keeps_all_of_itself(tokenizer, name) -> None:
    test, perfect = made(tokenizer)[name], answers(PERFECT, tokenizer, name)
    assert {share.unique().item() for share in perfect.values()} == {1.0}
    result = retrieval_result(test, {"teacher": perfect, "student": perfect})
    assert (result.recovery.low, result.recovery.mean, result.recovery.high) == (1.0, 1.0, 1.0)
    assert result.teacher_share == result.student_share and result.teacher_share.low == 1.0


@pytest.mark.parametrize("tokenizer", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("name", NAMES)
def test_a_copier_confined_to_its_window_is_right_within_and_wrong_beyond(tokenizer, name) -> None:
    test, confined = made(tokenizer)[name], answers(CONFINED, tokenizer, name)
    for (distance, _), share in confined.items():
        assert share.unique().tolist() == [float(distance <= WINDOW)]
    given = {"teacher": answers(PERFECT, tokenizer, name), "student": confined, "window": confined}
    result = retrieval_result(test, given)
    assert result.recovery.low == result.recovery.high == result.recovery.mean == 0.0
    assert retrieval_result(test, {"teacher": confined, "student": given["teacher"]}).recovery is None


@pytest.mark.parametrize("task", TASKS, ids=NAMES)
def test_beyond_the_window_begins_right_behind_it(task) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    filler = torch.tensor(tokenizer("Nothing happened. ", add_special_tokens=False)["input_ids"])
    setting = Setting(tokenizer, torch.arange(256), filler, filler, max_positions=300, trials=2, seed=0)
    for distance in (WINDOW, WINDOW + 1):
        trials = task.make(setting, distance, task.column_values[0])
        test = RetrievalTest(task, WINDOW, {(distance, task.column_values[0]): trials}, 2)
        assert bool(test.beyond) == (distance > WINDOW)
        (share,) = answer(CONFINED, test, batch_size=2).values()
        assert share.tolist() == [float(distance <= WINDOW)] * 2


@pytest.mark.parametrize("tokenizer", ["no_bos", "sentencepiece"])
@pytest.mark.parametrize("name", NAMES)
def test_shares_are_those_of_greedy_decoding(tokenizer, name) -> None:
    test, model = made(tokenizer)[name], Copier(window=200, forgets=17)
    given = answer(model, test, batch_size=2)
    assert 0 < torch.cat(list(given.values())).mean() < 1
    for cell, trials in test.cells.items():
        assert given[cell].tolist() == pytest.approx(slow_shares(model, trials))
    table = retrieval_result(test, {"student": given}).models["student"]
    for (row, column), share in given.items():
        at = table[test.row_values.index(row)][test.task.column_values.index(column)]
        assert at == pytest.approx(share.mean().item())


def test_batches_and_training_mode_change_nothing() -> None:
    test, model = made()["needle"], Copier(forgets=17)
    one, all_at_once = answer(model, test, batch_size=1), answer(model.train(), test, batch_size=3)
    assert model.training
    assert all(one[cell].equal(all_at_once[cell]) for cell in test.cells)


def test_a_model_without_memory_measures_nothing(llama) -> None:
    tests = retrieval_tests(byte_tokenizer(), window_size=32, max_positions=200, trials=2)
    embeddings = llama.get_input_embeddings().num_embeddings
    for test in tests:
        cells = {c: Trials(t.input_ids % embeddings, t.question, t.chance) for c, t in test.cells.items()}
        known = RetrievalTest(test.task, 32, cells, 2)
        given = answer(llama, known, batch_size=2)
        result = retrieval_result(known, {"teacher": given, "student": given})
        assert result.recovery is None and result.teacher_share.mean < 0.1


def test_logits_that_are_not_numbers_are_an_error() -> None:
    with pytest.raises(FloatingPointError, match="not numbers"):
        answer(Constant(float("nan")), made()["associative_recall"], batch_size=2)
    answer(Constant(0.0), made()["associative_recall"], batch_size=2)


# --- comparing --------------------------------------------------------------------------------------------------------


def given(test: RetrievalTest, within: float, beyond: float, *, spread: float = 0.0, seed: int = 0) -> Answers:
    generator = torch.Generator().manual_seed(seed)
    return {
        cell: torch.full((len(trials.input_ids),), beyond if cell[0] > test.window_size else within).double()
        + spread * (torch.rand(len(trials.input_ids), generator=generator, dtype=torch.float64) - 0.5)
        for cell, trials in test.cells.items()
    }


def test_recovery_counts_from_what_the_window_alone_gives_and_beyond_the_window_only() -> None:
    test = made()["associative_recall"]
    teacher, student, window = given(test, 1.0, 0.9), given(test, 0.2, 0.5), given(test, 0.0, 0.1)
    result = retrieval_result(test, {"teacher": teacher, "student": student, "window": window})
    assert result.recovery.mean == pytest.approx(0.5) and result.floor == pytest.approx(0.1)
    assert result.teacher_share.mean == pytest.approx(0.9) and result.student_share.mean == pytest.approx(0.5)
    blind = retrieval_result(test, {"teacher": teacher, "student": student})
    chance = 1 / 256
    assert blind.recovery.mean == pytest.approx((0.5 - chance) / (0.9 - chance))
    assert blind.floor == pytest.approx(chance)


@pytest.mark.parametrize("beyond, measurable", [(0.03, False), (0.3, True)])
def test_teacher_must_surely_beat_the_floor_by_more_than_next_to_nothing(beyond, measurable) -> None:
    test = made()["associative_recall"]
    teacher = given(test, 1.0, beyond)
    alone = retrieval_result(test, {"teacher": teacher, "student": teacher})
    assert (alone.recovery is not None) == measurable
    window = given(test, 1.0, beyond)
    assert retrieval_result(test, {"teacher": teacher, "student": teacher, "window": window}).recovery is None
    unsure = given(test, 1.0, 0.2, spread=0.9)  # its mean alone would do
    result = retrieval_result(test, {"teacher": unsure, "student": teacher})
    assert result.recovery is None and result.teacher_share.mean > 0.05


def test_recovery_interval_covers_the_truth() -> None:
    test, covered = made()["associative_recall"], 0
    for seed in range(60):
        models = {
            name: given(test, 1.0, share, spread=0.6, seed=2 * seed + i)
            for i, (name, share) in enumerate({"teacher": 0.6 + 1 / 256, "student": 0.3 + 1 / 256}.items())
        }
        recovery = retrieval_result(test, models, samples=300).recovery
        covered += recovery.low <= 0.5 <= recovery.high
    assert 51 <= covered <= 60


def test_without_a_teacher_there_is_a_table_and_no_recovery() -> None:
    test = made()["associative_recall"]
    result = retrieval_result(test, {"student": given(test, 1.0, 0.5)})
    assert result.recovery is None and result.teacher_share is None and result.student_share.mean == 0.5
    assert result.models["student"][-1] == [0.5, 0.5]


@pytest.mark.parametrize("window, positions", [(64, 8), (64, 65), (64, 80), (512, 512), (2, 3)])
def test_models_too_short_for_any_test_have_no_shares(window, positions) -> None:
    for test in retrieval_tests(byte_tokenizer(), window_size=window, max_positions=positions, trials=2):
        none = answer(PERFECT, test, batch_size=2)
        result = retrieval_result(test, {"teacher": none, "student": none})
        assert result.recovery is None and result.teacher_share is None and result.student_share is None


def test_the_grid_as_it_is_read() -> None:
    test = made()["needle"]
    found = retrieval_result(test, dict.fromkeys(("teacher", "student"), given(test, 1.0, 0.5)))
    assert (found.name, found.rows, found.columns) == ("needle", "distance", "depth")
    assert found.row_values == (32, 128, 256) and found.column_values == (0.0, 0.5) and found.count == 3
    assert found.models["student"] == [[1.0, 1.0], [0.5, 0.5], [0.5, None]]
