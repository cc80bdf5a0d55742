from __future__ import annotations

import dataclasses
import json
import random
import re
import string
from collections.abc import Iterator
from itertools import combinations, count
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linearize.base import UserError
from linearize.configs.data import DataConfig
from linearize.data import packing, templates
from linearize.data.packing import Dataset, build_dataset, dataset_from_documents, pack
from linearize.data.rows import PackedRows, Rows
from linearize.data.sources import read_rows
from linearize.data.templates import TokenDocument
from tests.byte_tokenizer import CHATML, byte_tokenizer
from tests.data.test_templates import CHATML_BLOCKS, FORGETFUL

GREETING = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, you."}]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def config(dataset: Path | str | None, **fields) -> DataConfig:
    return DataConfig(dataset=None if dataset is None else str(dataset), **{"sequence_length": 16, **fields})


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def words(count: int) -> list[str]:
    """Distinct texts of various lengths."""
    return [f"<{index}>" + "ab" * (index % 13) for index in range(count)]


def documents_of(rows: PackedRows, tokenizer) -> list[str]:
    """The texts between <s> and <|im_end|> that lie within the rows, in order."""
    text = tokenizer.decode(rows.input_ids.flatten())
    return [piece.split("<|im_end|>")[0] for piece in text.split("<s>")[1:] if "<|im_end|>" in piece]


def held_out(dataset: Dataset, tokenizer) -> list[str]:
    """The documents of both held-out parts."""
    return documents_of(dataset.validation, tokenizer) + documents_of(dataset.test, tokenizer)


def labelled(rows: PackedRows, tokenizer) -> str:
    return tokenizer.decode(rows.labels[rows.labels != -100])


def document(*ids: int, prompt: int = 0) -> TokenDocument:
    input_ids = torch.tensor(ids, dtype=torch.int64)
    return TokenDocument(input_ids, input_ids.masked_fill(torch.arange(len(ids)) < prompt, -100))


def fails(pattern: str):
    """A UserError of one line."""
    return pytest.raises(UserError, match=rf"\A(?=.*{pattern})[^\n]*\Z")


# --- packing ----------------------------------------------------------------------------------------------------------


def test_pack_known_answer():
    rows = pack([document(1, 2, 3), document(4), document(5, 6, 7, 8, 9, 10, prompt=2), document(11, 12)], 4)
    assert rows.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 0], [0, 1, 2, 3], [0, 1, 0, 1]]
    assert rows.labels.tolist() == [[-100, 2, 3, -100], [-100, -100, 7, 8], [-100, 10, -100, 12]]
    assert rows.documents.tolist() == [[0, 0, 0, 1], [2, 2, 2, 2], [2, 2, 3, 3]]
    assert rows.rows([2, 1]).documents.tolist() == [[2, 2, 3, 3], [2, 2, 2, 2]]
    assert len(rows) == 3 and rows.num_tokens == 12
    alone = PackedRows(rows.input_ids, rows.position_ids, rows.labels)
    assert alone.documents.tolist() == [[0, 0, 0, 1], [2, 2, 2, 2], [3, 3, 4, 4]], "a row of a document of its own"


def test_pack_drops_the_tail_and_may_be_empty():
    assert pack([document(1, 2, 3, 4, 5)], 4).input_ids.tolist() == [[1, 2, 3, 4]]
    assert pack([document(1, 2, 3)], 4).input_ids.shape == (0, 4)
    assert pack([], 4).labels.shape == (0, 4)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8),
    sequence_length=st.integers(1, 7),
)
def test_pack_token_by_token(lengths, sequence_length):
    documents, expected = [], []
    for index, (length, prompt) in enumerate(lengths):
        ids = [100 * index + place for place in range(length)]
        documents.append(document(*ids, prompt=min(prompt, length)))
        expected += [(token, place, place >= prompt, index) for place, token in enumerate(ids)]
    rows = pack(documents, sequence_length)
    assert len(rows) == len(expected) // sequence_length
    position, numbers = 0, list(dict.fromkeys(index for *_, index in expected))
    for index in range(rows.num_tokens):
        token, place, has_loss, source = expected[index]
        row, column = divmod(index, sequence_length)
        position = 0 if place == 0 or column == 0 else position + 1
        label = token if has_loss and position > 0 else -100
        assert rows.input_ids[row, column] == token
        assert rows.position_ids[row, column] == position
        assert rows.documents[row, column] == numbers.index(source)
        # Nothing is predicted from another document or row, and nothing that the document does not ask for.
        assert rows.labels[row, column] == label


def test_rows_are_spread_over_documents():
    rows = pack([document(*[n] * length) for n, length in enumerate((4, 4, 12, 40, 8), 1)], 4)
    owners = [rows.spread(count).input_ids[:, 0].tolist() for count in (5, 7, 9, 100)]
    assert owners[0] == [1, 2, 3, 4, 5] and owners[3] == rows.input_ids[:, 0].tolist()
    assert [owners[1].count(n) for n in range(1, 6)].count(2) == 2, "a second one of some that have more"
    assert [owners[2].count(n) for n in range(1, 6)] == [1, 1, 2, 3, 2] or owners[2].count(3) == 3


def test_rows_and_batch():
    rows = pack([document(*range(12))], 3)
    picked = rows.rows([3, 0])
    assert picked.input_ids.tolist() == [[9, 10, 11], [0, 1, 2]]
    assert picked.labels.tolist() == [[-100, 10, 11], [-100, 1, 2]]
    assert rows.rows(torch.tensor([1])).position_ids.tolist() == [[0, 1, 2]]
    assert set(picked.inputs()) == {"input_ids", "position_ids", "use_cache"} and isinstance(picked, Rows)
    assert len(list(picked.tensors())) == 3


# --- plain text -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bos", ["<s>", None])
@pytest.mark.parametrize("eos", ["<|im_end|>", None])
def test_text_gets_the_special_tokens_that_exist(bos, eos):
    tokenizer = byte_tokenizer(bos=bos, eos=eos)
    dataset = dataset_from_documents(["ab"] * 8, words(30), tokenizer, config(None), 0)
    expected = ((bos or "") + "ab" + (eos or "")) * 8
    assert expected.startswith(tokenizer.decode(dataset.train.input_ids.flatten()))


def test_text_file_with_separators(tmp_path, tokenizer):
    path = tmp_path / "stories.txt"
    path.write_text("<|endoftext|>\n".join(f"  {text}\n" for text in words(400)) + "<|endoftext|>\n\n", "utf-8")
    dataset = build_dataset(config(path), tokenizer, seed=0)
    assert dataset.documents == (380, 4, 16)
    found = documents_of(dataset.train, tokenizer) + held_out(dataset, tokenizer)
    assert len(found) >= 390 and set(found) <= {f"  {text}" for text in words(400)}


def test_a_single_document_is_cut(tmp_path, tokenizer):
    path = tmp_path / "book.txt"
    path.write_text("".join(random.Random(0).choices(string.ascii_letters, k=998)), "utf-8")
    dataset = build_dataset(config(path, validation_fraction=0.3, sequence_length=10), tokenizer, seed=0)
    tokens = tokenizer("<s>" + path.read_text() + "<|im_end|>")["input_ids"]
    assert len(tokens) == 1000
    assert dataset.train.input_ids.flatten().tolist() == tokens[:700]
    rows = [*dataset.validation.input_ids.tolist(), *dataset.test.input_ids.tolist()]
    assert sorted(rows) == sorted(tokens[start : start + 10] for start in range(700, 1000, 10))
    assert dataset.documents == (1, 7, 23)
    assert (dataset.test.documents == dataset.test.documents[:, :1]).all(), "each row stands for a document"
    with fails(
        "expected at least 16 held-out rows of the only document to test on, .* found 9; use more data .*, hold"
    ):
        build_dataset(config(path, validation_fraction=0.1, sequence_length=10), tokenizer, seed=0)


def test_a_single_repeated_document_is_cut(tmp_path, tokenizer):
    text = "".join(chr(48 + index) for index in range(70))
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text}] * 3)
    dataset = build_dataset(config(path, validation_fraction=0.5, sequence_length=2), tokenizer, seed=0)
    assert tokenizer.decode(dataset.train.input_ids.flatten()) == ("<s>" + text[:35]) * 3
    found = sorted(tokenizer.decode(ids) for part in (dataset.validation, dataset.test) for ids in part.input_ids)
    assert found == sorted([text[place : place + 2] for place in range(35, 69, 2)] + [text[69] + "<|im_end|>"])


def test_blank_documents_are_left_out(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in ["", " \n", *words(60)]])
    assert sum(build_dataset(config(path, validation_fraction=0.5), tokenizer, seed=0).documents) == 60


def test_max_documents_stops_reading(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in words(60)])
    path.write_text(path.read_text() + "{this line is never read\n")
    dataset = build_dataset(config(path, max_documents=60, validation_fraction=0.5), tokenizer, seed=0)
    assert sum(dataset.documents) == 60


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stream(tmp_path, monkeypatch):
    """A hub of endless datasets of 25-token documents; counts the rows that were asked for."""
    monkeypatch.chdir(tmp_path)
    read: dict[str, int] = {}

    def rows(name: str) -> Iterator[dict]:
        for index in count():
            read[name] = index + 1
            yield {"text": f"{name}{index:0{23 - len(name)}}"}

    monkeypatch.setattr("datasets.load_dataset", lambda name, subset, **_: rows(f"{name}:{subset}"))
    return read


@pytest.mark.parametrize("max_tokens, expected", [(1, 1), (2500, 100), (2501, 101)])
def test_an_endless_stream_ends(stream, tokenizer, max_tokens, expected):
    fields = dict(validation_dataset="held", max_tokens=max_tokens, subset="xl", sequence_length=25)
    dataset = build_dataset(config("hub", **fields, validation_rows=20), tokenizer, seed=0)
    texts = documents_of(dataset.train, tokenizer)
    assert sorted(texts) == [f"hub:xl{index:017}" for index in range(expected)]
    # Of held-out text, what fills the rows of both parts; the subset is of the other dataset.
    assert set(held_out(dataset, tokenizer)) <= {f"held:None{index:014}" for index in range(80)}
    assert dataset.documents == (expected, 20, 60) and len(dataset.test) == 20
    # No more than one batch for the tokenizer is read beyond the end.
    assert expected <= stream["hub:xl"] <= expected + 64 and 80 <= stream["held:None"] <= 128
    # Of documents longer than rows, as many as an interval needs.
    few = build_dataset(config("hub", **fields | {"sequence_length": 5}, validation_rows=16), tokenizer, seed=0)
    assert few.documents[1:] == (4, 28)


def test_an_endless_stream_of_one_side(stream, tokenizer):
    fields = dict(sequence_length=25, validation_fraction=0.5)
    dataset = build_dataset(config("hub", max_tokens=1000, **fields), tokenizer, seed=0)
    assert dataset.documents == (20, 4, 16)
    capped = build_dataset(config("hub", max_documents=50, **fields), tokenizer, seed=0)
    assert sum(capped.documents) == stream["hub:None"] == 50
    with fails("data.max_tokens: expected a limit, because 'hub'"):
        build_dataset(config("hub"), tokenizer, seed=0)


def test_local_held_out_text_is_read_whole(stream, tmp_path, tokenizer):
    path = write_rows(tmp_path / "held.jsonl", [{"text": f"hub:None{index:015}"} for index in range(5, 35)])
    fields = dict(validation_dataset=str(path), max_tokens=700, max_documents=25, sequence_length=25)
    dataset = build_dataset(config("hub", **fields, validation_rows=16), tokenizer, seed=0)
    assert dataset.documents == (5, 7, 23)


def test_max_tokens_of_a_file(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": f"{index:023}"} for index in range(100)])
    dataset = build_dataset(config(path, max_tokens=1000, validation_fraction=0.5), tokenizer, seed=0)
    assert sum(dataset.documents) == 40


def test_short_documents_are_left_out(tmp_path, tokenizer):
    texts = [f"{index:0{length}}" for index, length in enumerate([8, 7] * 40)]
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    fields = dict(sequence_length=10, validation_rows=1000, validation_fraction=0.6)
    dataset = build_dataset(config(path, min_document_tokens=10, **fields), tokenizer, seed=0)
    found = documents_of(dataset.train, tokenizer) + held_out(dataset, tokenizer)
    assert sorted(found) == [text for text in texts if len(text) == 8]
    # What is left out does not count as read.
    limited = build_dataset(config(path, min_document_tokens=10, max_tokens=300, **fields), tokenizer, seed=0)
    assert sum(limited.documents) == 30
    with fails("data.dataset: expected documents of at least 11 tokens .data.min_document_tokens., found none in "):
        build_dataset(config(path, min_document_tokens=11), tokenizer, seed=0)


def test_limits_of_given_documents(tokenizer):
    train, others = [f"{index:023}" for index in range(40)], [f"held {index:018}" for index in range(24)]
    fields = dict(max_tokens=250, min_document_tokens=25)
    dataset = dataset_from_documents(["short", *train], [*others, "short"], tokenizer, config(None, **fields), 0)
    assert dataset.documents == (10, 6, 18)


def chat(*texts: str) -> list[dict]:
    """Questions and replies in turn."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


LONG = "word and " * 400
FORMS = {
    "text": {"text": LONG},
    "alpaca": {"instruction": "Write.", "output": LONG},
    "alpaca, a long input": {"instruction": "Write.", "input": LONG, "output": LONG},
    "samsum": {"dialogue": LONG, "summary": LONG},
    "chat": {"messages": chat("Write.", LONG)},
    "chat, a long question": {"messages": chat(LONG, "Well.")},
    "chat, many replies": {"messages": chat(*["Well."] * 200)},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("template", [CHATML, CHATML_BLOCKS, FORGETFUL])
def test_no_more_is_tokenized_than_max_tokens_need(tmp_path, monkeypatch, form, template):
    """Check one long row and many long rows, in every format."""
    tokenizer = byte_tokenizer(template=template)
    monkeypatch.setattr(templates, "PIECE", 256)
    path = write_rows(tmp_path / "rows.jsonl", [FORMS[form]] * 64)
    whole = next(packing._tokenised(read_rows(config(path)), tokenizer, config(path)))
    tokenized, call = [], type(tokenizer).__call__

    def counted(tokenizer, text, **settings):
        tokenized.extend([text] if isinstance(text, str) else text)
        return call(tokenizer, text, **settings)

    monkeypatch.setattr(type(tokenizer), "__call__", counted)
    limited = config(path, max_tokens=100)
    document, *others = packing._tokenised(read_rows(limited), tokenizer, limited)
    assert sum(map(len, [document, *others])) >= 100 and sum(map(len, tokenized)) < 1100
    # What is read is the begin of the document, and so is what carries the loss.
    assert torch.equal(document.input_ids, whole.input_ids[: len(document)])
    assert torch.equal(document.labels, whole.labels[: len(document)])


@pytest.mark.parametrize("form", FORMS)
def test_max_tokens_leave_ordinary_documents_whole(tmp_path, form):
    tokenizer = byte_tokenizer(template=CHATML)
    path = write_rows(tmp_path / "rows.jsonl", [FORMS[form]] * 64)
    read = [
        next(packing._tokenised(read_rows(limited), tokenizer, limited))
        for limited in (config(path), config(path, max_tokens=100))
    ]
    assert torch.equal(read[0].input_ids, read[1].input_ids) and torch.equal(read[0].labels, read[1].labels)
    assert len(read[0]) > 2000


@pytest.mark.parametrize("template", [CHATML, CHATML_BLOCKS, FORGETFUL])
def test_of_a_very_long_conversation_no_more_is_rendered_than_max_tokens_need(tmp_path, template):
    """To render a conversation for each of its replies takes long."""
    tokenizer = byte_tokenizer(template=template)
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": chat(*["Well."] * 6000)}])
    for most, turns in ((100, 256), (1401, 282)):
        limited = config(path, max_tokens=most)
        documents = list(packing._tokenised(read_rows(limited), tokenizer, limited))
        assert sum(map(len, documents)) >= most
        if template != FORGETFUL:
            assert tokenizer.decode(documents[0].input_ids).count("<|im_start|>") == turns


def test_long_documents_are_not_left_out_as_short_ones(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setattr(templates, "PIECE", 16)
    path = write_rows(tmp_path / "rows.jsonl", [{"text": LONG}] * 3)
    limited = config(path, max_tokens=20, min_document_tokens=200)
    (document,) = packing._tokenised(read_rows(limited), tokenizer, limited)
    assert 200 <= len(document) < 216


# --- the training rows of the highest score ---------------------------------------------------------------------------


def by_number(wanted: list[int], tokenizer):
    """Scores rows of one document, which are numbers: the wanted ones highest, in this order."""

    def score(rows: PackedRows) -> torch.Tensor:
        numbers = numbers_of(rows, tokenizer)
        return torch.tensor([float(100 - wanted.index(number)) if number in wanted else 0.0 for number in numbers])

    return score


def numbers_of(rows: PackedRows, tokenizer) -> list[int]:
    return [int(text) for text in documents_of(rows, tokenizer)]


@pytest.fixture
def numbers(tmp_path: Path) -> DataConfig:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": f"{index:020}"} for index in range(100)])
    return config(path, sequence_length=22, validation_fraction=0.2)


def test_the_highest_scores_are_trained_on(numbers: DataConfig, tokenizer):
    def top(count: int, wanted: list[int]) -> Dataset:
        chosen = numbers.model_copy(update={"select_rows_by_esl": count})
        return build_dataset(chosen, tokenizer, seed=0, score=by_number(wanted, tokenizer))

    everything = build_dataset(numbers, tokenizer, seed=0, score=lambda _: pytest.fail("scored"))
    trained_on = numbers_of(everything.train, tokenizer)
    wanted = [trained_on[index] for index in (30, 2, 17, 5, 11)]
    best = top(5, wanted)
    # In the order in which they were, whatever the scores among them; what is held out is not chosen.
    assert numbers_of(best.train, tokenizer) == [number for number in trained_on if number in wanted]
    for part in ("validation", "test"):
        assert torch.equal(getattr(best, part).input_ids, getattr(everything, part).input_ids)
    assert top(5, wanted[::-1]).fingerprint == best.fingerprint != everything.fingerprint
    assert top(80, wanted).fingerprint == everything.fingerprint
    assert numbers_of(top(40, []).train, tokenizer) == trained_on[:40], "equal scores, in order"


def test_select_rows_by_esl_that_cannot_be(numbers: DataConfig, tokenizer):
    def top(count: int) -> DataConfig:
        return numbers.model_copy(update={"select_rows_by_esl": count})

    with fails(
        "data.select_rows_by_esl: expected at least 81 training rows to choose from, found 80; use more data, or set"
    ):
        build_dataset(top(81), tokenizer, seed=0, score=lambda _: pytest.fail("scored"))
    with fails(
        "data.select_rows_by_esl: expected a teacher to choose 3 rows by, found none; .*data.select_rows_by_esl=null"
    ):
        build_dataset(top(3), tokenizer, seed=0)
    with fails("data.select_rows_by_esl: expected a teacher"):
        dataset_from_documents(words(40), map(str, range(100, 130)), tokenizer, config(None, select_rows_by_esl=3), 0)


def test_repeats_are_for_training_alone(tmp_path: Path, tokenizer):
    texts = ["".join(random.Random(index).choices("abcdefgh ", k=400)) for index in range(80)]
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    plain = config(path, sequence_length=256, validation_fraction=0.4)
    as_it_is, repeated = (
        build_dataset(plain.model_copy(update={"repeated_span_fraction": share}), tokenizer, seed=0)
        for share in (0.0, 0.5)
    )
    changed = (as_it_is.train.input_ids != repeated.train.input_ids).any(1)
    assert int(changed.sum()) == round(0.5 * len(as_it_is.train))
    for part in ("validation", "test"):
        assert torch.equal(getattr(as_it_is, part).input_ids, getattr(repeated, part).input_ids)


# --- split, seed, fingerprint -----------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    repeats=st.lists(st.integers(1, 4), min_size=60, max_size=80),
    fraction=st.sampled_from([0.5, 0.7]),
    seed=st.integers(0, 5),
)
def test_the_parts_never_overlap(tmp_path_factory, repeats, fraction, seed):
    texts = [chr(48 + index) * 20 for index, count in enumerate(repeats) for _ in range(count)]
    path = write_rows(tmp_path_factory.mktemp("split") / "rows.jsonl", [{"text": text} for text in texts])
    fields = dict(validation_fraction=fraction, sequence_length=22, validation_rows=1000)
    tokenizer = byte_tokenizer()
    dataset = build_dataset(config(path, **fields), tokenizer, seed=seed)
    parts = [documents_of(rows, tokenizer) for rows in (dataset.train, dataset.validation, dataset.test)]
    # Rows are exactly one document long, so nothing is lost but copies in the test of what is in the validation.
    assert set().union(*map(set, parts)) == set(texts) and sum(map(len, parts)) <= len(texts)
    assert not any(set(one) & set(other) for one, other in combinations(parts, 2))
    assert dataset.documents == tuple(map(len, parts)) and all(parts)


@pytest.mark.parametrize("fraction, parts", [(0.08, (184, 1, 15)), (0.1, (180, 4, 16)), (0.5, (100, 25, 75))])
def test_the_fraction_is_met_and_a_quarter_of_it_chooses_checkpoints(tmp_path, tokenizer, fraction, parts):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": f"{index:020}"} for index in range(200)])
    if parts[2] < 16:
        with fails("expected at least 16 held-out documents .*to test on, besides those that choose .*, found 15; use"):
            build_dataset(config(path, validation_fraction=fraction), tokenizer, seed=0)
        return
    dataset = build_dataset(config(path, validation_fraction=fraction), tokenizer, seed=0)
    assert dataset.documents == parts
    few = build_dataset(config(path, validation_fraction=fraction, validation_rows=22), tokenizer, seed=0)
    assert few.documents[1] == min(16, parts[1]), "no more than fill 22 rows of 16 tokens by 22 tokens each"


def test_the_seed_decides_in_which_order_and_nothing_else(tmp_path, tokenizer):
    texts = [f"{index:020}" for index in range(100)]
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in texts])

    def parts(dataset: Dataset) -> list[list[str]]:
        return [documents_of(rows, tokenizer) for rows in (dataset.train, dataset.validation, dataset.test)]

    def read(seed: int) -> Dataset:
        return build_dataset(config(path, sequence_length=22, validation_fraction=0.3), tokenizer, seed=seed)

    assert parts(read(1)) == parts(read(1))
    assert read(1).fingerprint == read(1).fingerprint != read(2).fingerprint
    one, two = parts(read(1)), parts(read(2))
    assert one[0] != two[0] and set(one[0]) == set(two[0]), "the order alone"
    assert one[1:] == two[1:], "seeds are compared on the same rows"

    def given_sides(seed: int) -> list[list[str]]:
        made = dataset_from_documents(texts[:60], texts[60:], tokenizer, config(None, sequence_length=22), seed)
        train, *others = parts(made)
        return [train, [text for part in others for text in part]]

    (train, held_out), (other_train, other_held_out) = given_sides(1), given_sides(2)
    assert train != other_train and sorted(train) == sorted(other_train) == texts[:60]
    assert held_out == other_held_out and sorted(held_out) == texts[60:]


def tagged(part: Rows, tokenizer) -> set[str]:
    """The tags that a part's documents have."""
    return set(re.findall(r"<[a-z]+\d+>", tokenizer.decode(part.input_ids.flatten())))


def conversations(count: int) -> list[dict]:
    """Conversations of four replies; ten each begin with the same two, so documents of these are equal."""
    return [
        {
            "messages": [
                *chat(f"<first{index // 10}>", "Yes.", f"<second{index // 10}>", "No."),
                *chat(f"<third{index}>", "So.", f"<fourth{index}>", "Ah."),
            ]
        }
        for index in range(count)
    ]


@pytest.mark.parametrize("sources", [1, 2])
def test_replies_of_one_conversation_stay_together(tmp_path, sources):
    """Check equal conversations and conversations with the same first turns, too."""
    tokenizer = byte_tokenizer(template=FORGETFUL)
    rows = conversations(400)
    rows = [*rows, *rows[:30]]
    fields: dict = dict(validation_fraction=0.6, validation_rows=10_000, sequence_length=32)
    if sources == 2:
        # Of each conversation that begins like others, the two replies that these have in common.
        begun = [{"messages": row["messages"][:4]} for row in rows[: 10 * 24 : 10]]
        fields["validation_dataset"] = str(write_rows(tmp_path / "held.jsonl", begun))
    dataset = build_dataset(config(write_rows(tmp_path / "rows.jsonl", rows), **fields), tokenizer, seed=0)
    parts = [tagged(part, tokenizer) for part in (dataset.train, dataset.validation, dataset.test)]
    assert not any(one & other for one, other in combinations(parts, 2))
    assert all(parts) and dataset.documents == (4 * 160, 2 * 6, 2 * 18) if sources == 2 else all(parts)
    replies = [tokenizer.decode(document.input_ids) for document in dataset.test_documents]
    assert not {tag for reply in replies for tag in re.findall(r"<[a-z]+\d+>", reply)} & (parts[0] | parts[1])


def test_conversations_count_not_their_replies(tmp_path, monkeypatch):
    tokenizer = byte_tokenizer(template=FORGETFUL)
    rows = [{"messages": chat(*(f"<{index}> {turn}" for turn in range(8)))} for index in range(60)]
    path = write_rows(tmp_path / "rows.jsonl", [*rows, *rows[:4]])
    fields = dict(sequence_length=32, validation_rows=1000)
    dataset = build_dataset(config(path, validation_fraction=0.5, **fields), tokenizer, seed=0)
    assert dataset.documents == (4 * 32, 4 * 8, 4 * 24)
    limited = build_dataset(config(path, max_documents=40, validation_fraction=0.5, **fields), tokenizer, seed=0)
    assert sum(limited.documents) == 4 * 40
    with fails(
        "at least 16 held-out conversations to test on, .*, found 14; 60 of 64 in all are different, and copies"
    ):
        build_dataset(config(path, validation_fraction=0.25, **fields), tokenizer, seed=0)
    with fails("at least 16 held-out conversations in 17 rows to test on, .*; set a larger data.validation_rows"):
        build_dataset(config(path, validation_fraction=0.5, sequence_length=32, validation_rows=17), tokenizer, seed=0)
    alone = write_rows(tmp_path / "alone.jsonl", rows[:1] * 3)
    with fails(
        "data: expected several conversations, some of them to hold out, found 12 documents of one, or of several"
    ):
        build_dataset(config(alone, **fields), tokenizer, seed=0)
    # Of a stream, as many conversations are held out as an interval needs.
    endless = ({"messages": chat(*(f"<{index}> {turn}" for turn in range(8)))} for index in count(60))
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: endless)
    dataset = build_dataset(
        config(path, validation_dataset="held", **fields | {"validation_rows": 64}), tokenizer, seed=0
    )
    assert dataset.documents[0] == 4 * 64 and sum(dataset.documents[1:]) == 4 * 31 + 1


def test_the_fingerprint_is_of_all_three_parts(numbers: DataConfig, tokenizer):
    whole = build_dataset(numbers, tokenizer, seed=0)
    for part in ("train", "validation", "test"):
        rows = getattr(whole, part)
        other = dataclasses.replace(rows, input_ids=rows.input_ids.clone())
        other.input_ids[0, 3] += 1
        assert dataclasses.replace(whole, **{part: other}).fingerprint != whole.fingerprint


def test_held_out_rows_are_limited(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in words(200)])
    fields = dict(validation_fraction=0.5)
    everything = build_dataset(config(path, validation_rows=1000, **fields), tokenizer, seed=0)
    limited = build_dataset(config(path, validation_rows=18, **fields), tokenizer, seed=0)
    assert min(len(everything.validation), len(everything.test)) > 18 == len(limited.validation) == len(limited.test)
    assert torch.equal(limited.validation.input_ids, everything.validation.input_ids[:18])
    assert len(limited.test.documents[:, 0].unique()) == 18, "from as many documents as there are rows"
    assert limited.fingerprint != everything.fingerprint
    with fails("expected at least 16 held-out documents in 5 rows to test on, .*; set a larger data.validation_rows"):
        build_dataset(config(path, validation_rows=5, **fields), tokenizer, seed=0)


def test_given_documents_keep_their_sides(tokenizer):
    others = [f"held out, not trained on {index}" for index in range(22)]
    train = [*words(30), others[0]]
    dataset = dataset_from_documents(iter(train), iter(others), tokenizer, config(None, format="chat"), 0)
    assert dataset.documents == (30, 5, 17)
    assert set(documents_of(dataset.train, tokenizer)) <= set(words(30))
    assert "held out" in tokenizer.decode(dataset.validation.input_ids.flatten())
    capped = dataset_from_documents(iter(train), others, tokenizer, config(None, max_documents=7), 0)
    assert capped.documents == (7, 5, 17)


def test_nothing_is_printed(tmp_path, tokenizer, capfd):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in words(100)])
    build_dataset(config(path, validation_fraction=0.3), tokenizer, seed=0)
    assert capfd.readouterr() == ("", "")


def test_long_work_shows_on_stderr(tmp_path, tokenizer, capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("linearize.base.QUIET_SECONDS", -1.0)
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in words(100)])
    build_dataset(config(path, validation_fraction=0.3), tokenizer, seed=0)
    out, err = capfd.readouterr()
    assert out == "" and "100 documents" in err


def test_long_work_says_so_in_a_log(tmp_path, tokenizer, capfd, monkeypatch):
    monkeypatch.setattr("linearize.base.QUIET_SECONDS", -1.0)
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in words(100)])
    build_dataset(config(path, validation_fraction=0.3), tokenizer, seed=0)
    # The first is due after the first batch, the next half a minute later.
    assert capfd.readouterr() == ("", "tokenising: 64 documents\n")


# --- formats ----------------------------------------------------------------------------------------------------------


HALF = {"validation_fraction": 0.5, "validation_rows": 1000}


def test_alpaca_is_recognised_by_its_columns(tmp_path, tokenizer):
    rows = [{"instruction": f"Say {text}", "output": text, "text": "not this"} for text in words(60)]
    dataset = build_dataset(config(write_rows(tmp_path / "rows.jsonl", rows), **HALF), tokenizer, seed=0)
    assert tokenizer.decode(dataset.train.input_ids[0]) == "<s>Below is an ins"
    assert "Below" not in labelled(dataset.train, tokenizer)


def test_samsum_is_recognised_by_its_columns(tmp_path, tokenizer):
    rows = [{"id": text, "dialogue": f"Amy: {text}", "summary": text, "text": f"not {text}"} for text in words(60)]
    dataset = build_dataset(config(write_rows(tmp_path / "rows.jsonl", rows), **HALF), tokenizer, seed=0)
    assert tokenizer.decode(dataset.train.input_ids[0]) == "<s>Summarize this "
    assert "Summarize" not in labelled(dataset.train, tokenizer)
    for missing in ("dialogue", "summary"):
        rest = [{column: value for column, value in row.items() if column != missing} for row in rows]
        dataset = build_dataset(config(write_rows(tmp_path / "rest.jsonl", rest), **HALF), tokenizer, seed=0)
        assert tokenizer.decode(dataset.train.input_ids[0]).startswith("<s>not <")


def test_chat_is_recognised_by_its_column(tmp_path):
    tokenizer = byte_tokenizer(template=CHATML)
    rows = [
        {"messages": [{"role": "user", "content": text}, *GREETING[1:], *GREETING], "text": "not this"}
        for text in words(60)
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    dataset = build_dataset(config(path, sequence_length=64, **HALF), tokenizer, seed=0)
    assert "not this" not in tokenizer.decode(dataset.train.input_ids.flatten())
    assert set(dataset.train.labels.unique().tolist()) > {-100}


# --- what the user can fix --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, fields, pattern",
    [
        ([{"id": 1, "body": "x"}], {}, "data row 1: .*column 'text', found id, body; set data.text_column"),
        ([{"text": "x"}, {"text": 3}], {}, "data row 2: expected text in the column text, found 3"),
        ([{"text": "x"}], {"format": "alpaca"}, "data row 1: .*column 'instruction', found text; data.format alpaca"),
        ([{"instruction": "x", "output": None}], {}, "data row 1: expected text in the column output, found None"),
        ([{"dialogue": "x", "summary": 3}], {}, "data row 1: expected text in the column summary, found 3"),
        ([{"dialogue": "x"}], {"format": "samsum"}, "data row 1: .*column 'summary', found dialogue; data.format sam"),
        ([{"text": "x"}], {"format": "chat"}, "data row 1: .*column 'messages', found text; data.format chat"),
        (
            [{"text": f"{index % 10:08}"} for index in range(400)],
            {},
            "16 held-out documents .*found 0; 10 of 400 in all are different, and copies stay together; use more data",
        ),
        ([], {}, "expected documents, found no text"),
        ([{"text": " "}], {}, "expected documents, found no text"),
        (
            [{"text": f"{index:08}"} for index in range(40)],
            {"sequence_length": 30, "validation_fraction": 0.95},
            "expected at least 30 training tokens .data.sequence_length, one row., found 20 in 2 documents; "
            "set data.sequence_length to 20 or less, or use more data",
        ),
        (
            [{"text": f"{index:08}"} for index in range(40)],
            {"validation_fraction": 0.43},
            "at least 16 held-out tokens .*found 10 in 1 documents; set data.sequence_length to 10 or less, or .*more",
        ),
        (
            [{"instruction": f"{index}", "output": "yes"} for index in range(60)],
            {"sequence_length": 140, "validation_fraction": 0.985},
            "expected training tokens that carry a loss, found none in .*longer data.sequence_length",
        ),
    ],
)
def test_unusable_rows(tmp_path, rows, fields, pattern):
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with fails(pattern):
        build_dataset(config(path, **fields), byte_tokenizer(template=CHATML), seed=0)


def test_a_row_of_a_folder_that_cannot_be_used(tmp_path, tokenizer):
    write_rows(tmp_path / "a.jsonl", [{"text": "x"}] * 3)
    write_rows(tmp_path / "b.jsonl", [{"text": "x"}, {"body": "y"}])
    with fails("data b.jsonl row 2: expected a column 'text', found body"):
        build_dataset(config(tmp_path), tokenizer, seed=0)


def test_given_documents_that_are_too_short(tokenizer):
    with fails("at least 16 training tokens .*found 0 in 0 documents; use more data"):
        dataset_from_documents([words(40)[7]], words(40), tokenizer, config(None), 0)
