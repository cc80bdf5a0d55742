from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linearize.base import UserError
from linearize.data.config import DataConfig
from linearize.data.packing import Dataset, PackedRows, build_dataset, dataset_from_documents, pack
from linearize.data.rows import Rows
from linearize.data.templates import TokenDocument
from tests.byte_tokenizer import CHATML, byte_tokenizer

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
    assert len(rows) == 3 and rows.num_tokens == 12


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
        expected += [(token, place, place >= prompt) for place, token in enumerate(ids)]
    rows = pack(documents, sequence_length)
    assert len(rows) == len(expected) // sequence_length
    position = 0
    for index in range(rows.num_tokens):
        token, place, has_loss = expected[index]
        row, column = divmod(index, sequence_length)
        position = 0 if place == 0 or column == 0 else position + 1
        label = token if has_loss and position > 0 else -100
        assert rows.input_ids[row, column] == token
        assert rows.position_ids[row, column] == position
        # Nothing is predicted from another document or row, and nothing that the document does not ask for.
        assert rows.labels[row, column] == label


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
    dataset = dataset_from_documents(["ab"] * 8, ["cd"] * 8, tokenizer, config(None), 0)
    expected = ((bos or "") + "ab" + (eos or "")) * 8
    assert expected.startswith(tokenizer.decode(dataset.train.input_ids.flatten()))


def test_text_file_with_separators(tmp_path, tokenizer):
    path = tmp_path / "stories.txt"
    path.write_text("<|endoftext|>\n".join(f"  {text}\n" for text in words(40)) + "<|endoftext|>\n\n", "utf-8")
    dataset = build_dataset(config(path), tokenizer, seed=0)
    assert dataset.documents == (38, 2)
    found = documents_of(dataset.train, tokenizer) + documents_of(dataset.validation, tokenizer)
    assert len(found) >= 36 and set(found) <= {f"  {text}" for text in words(40)}


def test_a_single_document_is_cut(tmp_path, tokenizer):
    path = tmp_path / "book.txt"
    path.write_text("".join(chr(97 + index % 26) for index in range(998)), "utf-8")
    dataset = build_dataset(config(path, validation_fraction=0.1, sequence_length=10), tokenizer, seed=0)
    tokens = tokenizer("<s>" + path.read_text() + "<|im_end|>")["input_ids"]
    assert len(tokens) == 1000
    assert dataset.train.input_ids.flatten().tolist() == tokens[:900]
    assert dataset.validation.input_ids.flatten().tolist() == tokens[900:]
    assert dataset.documents == (1, 1)


def test_a_single_repeated_document_is_cut(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "0123456789abcdefghijklmnopqrstuv"}] * 3)
    dataset = build_dataset(config(path, validation_fraction=0.5, sequence_length=17), tokenizer, seed=0)
    assert tokenizer.decode(dataset.train.input_ids.flatten()) == "<s>0123456789abcdef" * 3
    assert tokenizer.decode(dataset.validation.input_ids.flatten()) == "ghijklmnopqrstuv<|im_end|>" * 3


def test_blank_documents_are_left_out(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in ["", " \n", *words(30)]])
    assert sum(build_dataset(config(path), tokenizer, seed=0).documents) == 30


def test_max_documents_stops_reading(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in words(30)])
    path.write_text(path.read_text() + "{this line is never read\n")
    dataset = build_dataset(config(path, max_documents=30), tokenizer, seed=0)
    assert sum(dataset.documents) == 30


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
    dataset = build_dataset(config("hub", **fields, validation_rows=3), tokenizer, seed=0)
    texts = documents_of(dataset.train, tokenizer)
    assert sorted(texts) == [f"hub:xl{index:017}" for index in range(expected)]
    # Of held-out text, just what fills the rows; the subset is of the other dataset.
    assert sorted(documents_of(dataset.validation, tokenizer)) == [f"held:None{index:014}" for index in range(3)]
    assert dataset.documents == (expected, 3)
    # No more than one batch for the tokenizer is read beyond the end.
    assert expected <= stream["hub:xl"] <= expected + 64 and 3 <= stream["held:None"] <= 64


def test_an_endless_stream_of_one_side(stream, tokenizer):
    dataset = build_dataset(config("hub", max_tokens=1000, sequence_length=25), tokenizer, seed=0)
    assert dataset.documents == (38, 2)
    capped = build_dataset(config("hub", max_documents=30, sequence_length=25), tokenizer, seed=0)
    assert sum(capped.documents) == stream["hub:None"] == 30
    with fails("data.max_tokens: expected how much to read of 'hub'"):
        build_dataset(config("hub"), tokenizer, seed=0)


def test_local_held_out_text_is_read_whole(stream, tmp_path, tokenizer):
    path = write_rows(tmp_path / "held.jsonl", [{"text": f"hub:None{index:015}"} for index in range(5, 35)])
    fields = dict(validation_dataset=str(path), max_tokens=700, max_documents=25, sequence_length=25)
    dataset = build_dataset(config("hub", **fields, validation_rows=1), tokenizer, seed=0)
    assert dataset.documents == (5, 30)


def test_max_tokens_of_a_file(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": f"{index:023}"} for index in range(100)])
    dataset = build_dataset(config(path, max_tokens=500), tokenizer, seed=0)
    assert sum(dataset.documents) == 20


def test_short_documents_are_left_out(tmp_path, tokenizer):
    texts = [f"{index:0{length}}" for index, length in enumerate([8, 7] * 40)]
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    fields = dict(sequence_length=10, validation_rows=1000)
    dataset = build_dataset(config(path, min_document_tokens=10, **fields), tokenizer, seed=0)
    found = documents_of(dataset.train, tokenizer) + documents_of(dataset.validation, tokenizer)
    assert sorted(found) == [text for text in texts if len(text) == 8]
    # What is left out does not count as read.
    limited = build_dataset(config(path, min_document_tokens=10, max_tokens=300, **fields), tokenizer, seed=0)
    assert sum(limited.documents) == 30
    with fails("data.dataset: expected documents of at least 11 tokens .data.min_document_tokens., found none in "):
        build_dataset(config(path, min_document_tokens=11), tokenizer, seed=0)


def test_limits_of_given_documents(tokenizer):
    train, held_out = [f"{index:023}" for index in range(40)], [f"held {index:018}" for index in range(12)]
    fields = dict(max_tokens=250, min_document_tokens=25)
    dataset = dataset_from_documents(["short", *train], [*held_out, "short"], tokenizer, config(None, **fields), 0)
    assert dataset.documents == (10, 12)


# --- the training documents of the highest score ----------------------------------------------------------------------


def by_number(wanted: list[int], tokenizer):
    """Scores documents, which are numbers: the wanted ones highest, in this order."""

    def score(documents: list[TokenDocument]) -> torch.Tensor:
        numbers = [int(tokenizer.decode(document.input_ids, skip_special_tokens=True)) for document in documents]
        return torch.tensor([float(100 - wanted.index(number)) if number in wanted else 0.0 for number in numbers])

    return score


def numbers_of(rows: PackedRows, tokenizer) -> list[int]:
    return [int(text) for text in documents_of(rows, tokenizer)]


def test_the_highest_scores_are_trained_on(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": f"{index:020}"} for index in range(40)])
    fields = dict(sequence_length=22, validation_fraction=0.2)
    everything = build_dataset(config(path, **fields), tokenizer, seed=0)
    held_out = numbers_of(everything.validation, tokenizer)
    trained_on = sorted(numbers_of(everything.train, tokenizer))
    wanted = [trained_on[index] for index in (30, 2, 17, 5, 11)]
    score = by_number([*held_out, *wanted], tokenizer)  # that held-out documents score higher does not count
    best = build_dataset(config(path, top_esl=5, **fields), tokenizer, seed=0, score=score)
    assert set(numbers_of(best.train, tokenizer)) == set(wanted) and best.documents == (5, 8)
    for name in ("input_ids", "position_ids", "labels"):
        assert torch.equal(getattr(best.validation, name), getattr(everything.validation, name))
    assert best.fingerprint != everything.fingerprint
    # The order is that of a source which holds nothing else, whatever the scores among them.
    again = build_dataset(
        config(path, top_esl=5, **fields), tokenizer, seed=0, score=by_number(wanted[::-1], tokenizer)
    )
    assert again.fingerprint == best.fingerprint
    all_of_them = build_dataset(config(path, top_esl=32, **fields), tokenizer, seed=0, score=score)
    assert all_of_them.fingerprint == everything.fingerprint


def test_equal_scores_are_taken_in_order(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": f"{index:020}"} for index in range(100)])
    fields = dict(sequence_length=22, validation_fraction=0.01)
    dataset = build_dataset(
        config(path, top_esl=40, **fields), tokenizer, seed=0, score=lambda documents: torch.zeros(len(documents))
    )
    held_out = numbers_of(dataset.validation, tokenizer)
    first = [number for number in range(100) if number not in held_out][:40]
    assert sorted(numbers_of(dataset.train, tokenizer)) == first


def test_without_top_esl_nothing_is_scored(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in words(40)])
    build_dataset(config(path), tokenizer, seed=0, score=lambda _: pytest.fail("scored"))


def test_top_esl_that_cannot_be(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in words(40)])
    with fails("data.top_esl: expected at least 39 training documents to choose from, found 38; use more data, or set"):
        build_dataset(config(path, top_esl=39), tokenizer, seed=0, score=lambda _: pytest.fail("scored"))
    with fails("data.top_esl: expected a teacher to choose 3 documents by, found none; .*data.top_esl=null"):
        build_dataset(config(path, top_esl=3), tokenizer, seed=0)
    with fails("data.top_esl: expected a teacher"):
        dataset_from_documents(words(40), ["held out and long enough"], tokenizer, config(None, top_esl=3), 0)


# --- split, seed, fingerprint -----------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    repeats=st.lists(st.integers(1, 6), min_size=2, max_size=12),
    fraction=st.sampled_from([0.01, 0.2, 0.5, 0.9]),
    seed=st.integers(0, 5),
)
def test_the_split_never_overlaps(tmp_path_factory, repeats, fraction, seed):
    texts = [chr(65 + index) * 20 for index, count in enumerate(repeats) for _ in range(count)]
    path = write_rows(tmp_path_factory.mktemp("split") / "rows.jsonl", [{"text": text} for text in texts])
    fields = dict(validation_fraction=fraction, sequence_length=22, validation_rows=1000)
    tokenizer = byte_tokenizer()
    dataset = build_dataset(config(path, **fields), tokenizer, seed=seed)
    train, validation = (documents_of(rows, tokenizer) for rows in (dataset.train, dataset.validation))
    assert sorted(train + validation) == sorted(texts)  # rows are exactly one document long: nothing is lost
    assert not set(train) & set(validation)
    assert dataset.documents == (len(train), len(validation)) and train and validation


@pytest.mark.parametrize("fraction, held_out", [(0.001, 1), (0.1, 20), (0.25, 50), (0.999, 199)])
def test_the_fraction_is_met(tmp_path, tokenizer, fraction, held_out):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": f"{index:020}"} for index in range(200)])
    dataset = build_dataset(config(path, validation_fraction=fraction), tokenizer, seed=0)
    assert dataset.documents == (200 - held_out, held_out)


def test_the_seed_decides(tmp_path, tokenizer):
    texts = [f"{index:020}" for index in range(100)]
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in texts])

    def sides(dataset: Dataset) -> list[list[str]]:
        return [documents_of(rows, tokenizer) for rows in (dataset.train, dataset.validation)]

    def read(seed: int) -> Dataset:
        return build_dataset(config(path, sequence_length=22), tokenizer, seed=seed)

    assert sides(read(1)) == sides(read(1))
    assert read(1).fingerprint == read(1).fingerprint != read(2).fingerprint
    assert set(sides(read(1))[1]) != set(sides(read(2))[1])

    def given_sides(seed: int) -> Dataset:
        return dataset_from_documents(texts[:60], texts[60:], tokenizer, config(None, sequence_length=22), seed)

    for one, two, side in zip(sides(given_sides(1)), sides(given_sides(2)), (texts[:60], texts[60:]), strict=True):
        assert one != two and sorted(one) == sorted(two) == side


@pytest.mark.parametrize("side", [0, 1])
def test_the_fingerprint_is_of_the_tokens(tokenizer, side):
    sides = [["first text of one side"], ["other text of one side"]]
    changed = [list(texts) for texts in sides]
    changed[side] = [changed[side][0].replace("text", "test")]
    one, two = (dataset_from_documents(*given, tokenizer, config(None), 0) for given in (sides, changed))
    assert one.train.input_ids.shape == two.train.input_ids.shape and one.fingerprint != two.fingerprint


def test_validation_rows_are_limited(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in words(100)])
    fields = dict(validation_fraction=0.5)
    everything = build_dataset(config(path, validation_rows=1000, **fields), tokenizer, seed=0)
    limited = build_dataset(config(path, validation_rows=3, **fields), tokenizer, seed=0)
    assert len(everything.validation) > 3 == len(limited.validation)
    assert torch.equal(limited.validation.input_ids, everything.validation.input_ids[:3])
    assert limited.fingerprint != everything.fingerprint


def test_given_documents_keep_their_sides(tokenizer):
    held_out = ["held out, not trained on", "another text of this side"]
    train = [*words(30), held_out[0]]
    dataset = dataset_from_documents(iter(train), iter(held_out), tokenizer, config(None, format="chat"), 0)
    assert dataset.documents == (30, 2)
    assert set(documents_of(dataset.train, tokenizer)) <= set(words(30))
    assert "held out" in tokenizer.decode(dataset.validation.input_ids.flatten())
    capped = dataset_from_documents(iter(train), held_out, tokenizer, config(None, max_documents=7), 0)
    assert capped.documents == (7, 2)


def test_nothing_is_printed(tmp_path, tokenizer, capfd):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in words(100)])
    build_dataset(config(path), tokenizer, seed=0)
    assert capfd.readouterr() == ("", "")


def test_long_work_shows_on_stderr(tmp_path, tokenizer, capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("linearize.data.packing._QUIET_SECONDS", -1.0)
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in words(100)])
    build_dataset(config(path), tokenizer, seed=0)
    out, err = capfd.readouterr()
    assert out == "" and "100 documents" in err


# --- formats ----------------------------------------------------------------------------------------------------------


def test_alpaca_is_recognised_by_its_columns(tmp_path, tokenizer):
    rows = [{"instruction": f"Say {text}", "output": text, "text": "not this"} for text in words(40)]
    dataset = build_dataset(config(write_rows(tmp_path / "rows.jsonl", rows)), tokenizer, seed=0)
    assert tokenizer.decode(dataset.train.input_ids[0]) == "<s>Below is an ins"
    assert "Below" not in labelled(dataset.train, tokenizer)


def test_samsum_is_recognised_by_its_columns(tmp_path, tokenizer):
    rows = [{"id": text, "dialogue": f"Amy: {text}", "summary": text, "text": f"not {text}"} for text in words(40)]
    dataset = build_dataset(config(write_rows(tmp_path / "rows.jsonl", rows)), tokenizer, seed=0)
    assert tokenizer.decode(dataset.train.input_ids[0]) == "<s>Summarize this "
    assert "Summarize" not in labelled(dataset.train, tokenizer)
    for missing in ("dialogue", "summary"):
        rest = [{column: value for column, value in row.items() if column != missing} for row in rows]
        dataset = build_dataset(config(write_rows(tmp_path / "rest.jsonl", rest)), tokenizer, seed=0)
        assert tokenizer.decode(dataset.train.input_ids[0]).startswith("<s>not <")


def test_chat_is_recognised_by_its_column(tmp_path):
    tokenizer = byte_tokenizer(template=CHATML)
    rows = [
        {"messages": [*GREETING, {"role": "user", "content": "Bye"}], "text": "not this"},
        {"messages": GREETING},
    ] * 2
    dataset = build_dataset(config(write_rows(tmp_path / "rows.jsonl", rows), sequence_length=64), tokenizer, seed=0)
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
        ([], {}, "expected documents, found no text"),
        ([{"text": " "}], {}, "expected documents, found no text"),
        (
            [{"text": "x" * 8}] * 2 + [{"text": "y" * 18}],
            {"sequence_length": 30, "validation_fraction": 0.4},
            "expected at least 30 training tokens .data.sequence_length, one row., found 20 in 2 documents; "
            "set data.sequence_length to 20 or less, or use more data",
        ),
        (
            [{"text": f"{index:08}"} for index in range(20)],
            {},
            "at least 16 held-out tokens .*found 10 in 1 documents; set data.sequence_length to 10 or less, or .*more",
        ),
        (
            [{"instruction": "x", "output": "yes"}, {"instruction": "y", "output": "no"}],
            {"sequence_length": 140},
            "expected training tokens that carry a loss, found none in .*longer data.sequence_length",
        ),
    ],
)
def test_unusable_rows(tmp_path, rows, fields, pattern):
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with fails(pattern):
        build_dataset(config(path, **fields), byte_tokenizer(template=CHATML), seed=0)


def test_given_documents_that_are_too_short(tokenizer):
    with fails("at least 16 training tokens .*found 0 in 0 documents; use more data"):
        dataset_from_documents(["the same"], ["the same"], tokenizer, config(None), 0)
