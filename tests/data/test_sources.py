from __future__ import annotations

import gzip
import io
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from linearize.base import UserError
from linearize.configs.data import DataConfig
from linearize.data.sources import read_rows

ROWS = [{"id": index, "text": f"text number {index}"} for index in range(6)]
TEXTS = [row["text"] for row in ROWS]


def rows_of(dataset: Path | str | None, **fields) -> list[dict]:
    return [row for _, row in read_rows(DataConfig(dataset=None if dataset is None else str(dataset), **fields))]


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows), "utf-8")
    return path


def write_parquet(path: Path, rows: list[dict]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def fails(pattern: str):
    """A UserError of one line."""
    return pytest.raises(UserError, match=rf"\A(?=.*{pattern})[^\n]*\Z")


# --- files ------------------------------------------------------------------------------------------------------------


def test_tables(tmp_path):
    (tmp_path / "list.json").write_text(json.dumps(ROWS), "utf-8-sig")
    (tmp_path / "object.JSON").write_text(json.dumps({"version": 1, "data": ROWS}, indent=1), "utf-8")
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    write_parquet(tmp_path / "rows.parquet", ROWS)
    for name in ("list.json", "object.JSON", "rows.jsonl", "rows.parquet"):
        assert rows_of(tmp_path / name) == ROWS, name


def zstd(data: bytes) -> bytes:
    """In two frames, as parallel compressors write them."""
    half = len(data) // 2
    packed = io.BytesIO()
    for part in (data[:half], data[half:]):
        buffer = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(buffer, "zstd") as stream:
            stream.write(part)
        packed.write(buffer.getvalue())
    return packed.getvalue()


COMPRESSORS = {"gz": gzip.compress, "zst": zstd}
compressed = pytest.mark.parametrize("kind", COMPRESSORS)


@compressed
def test_compressed_lines(tmp_path, kind):
    """Alone, in capitals, and in a folder beside others."""
    many = [{"text": f"{index} é " * 50} for index in range(3000)]
    data = write_jsonl(tmp_path / "b.jsonl", many).read_bytes()
    for name in (f"a.jsonl.{kind}", f"A.JSONL.{kind.upper()}"):
        (tmp_path / name).write_bytes(COMPRESSORS[kind](data))
        assert rows_of(tmp_path / name) == many
    assert rows_of(tmp_path) == many * 3


@compressed
def test_compressed_rows_are_read_before_the_rest_is_unpacked(tmp_path, kind):
    path = tmp_path / f"rows.jsonl.{kind}"
    packed = COMPRESSORS[kind](b"".join(f'{{"text": "{index * 7919}"}}\n'.encode() for index in range(50_000)))
    path.write_bytes(packed[:-3])  # cut off, which only a reader of the whole file notices
    _, first = next(iter(read_rows(DataConfig(dataset=str(path)))))
    assert first == {"text": "0"}


@compressed
def test_damaged_compressed_lines(tmp_path, kind):
    """Cut off, no such file at all, and with other bytes within, which gzip may unpack to what is no JSON."""
    path = tmp_path / f"rows.jsonl.{kind}"
    whole = COMPRESSORS[kind](b"".join(f'{{"text": "{index * 7919}"}}\n'.encode() for index in range(5000)))
    middle = len(whole) // 3
    damaged = r"expected a whole \w+ file, found a damaged one \(.+\); copy it again"
    for data in (whole[:-3], whole[:middle], b"text"):
        path.write_bytes(data)
        with fails(f"{path}: {damaged}"):
            rows_of(path)
    path.write_bytes(whole[:middle] + b"0123456789" * 5 + whole[middle + 50 :])
    with fails(rf"{path}(: {damaged}| line \d+: not valid JSON|: expected UTF-8 text)"):
        rows_of(path)
    path.write_bytes(COMPRESSORS[kind](b'{"text": "a"}\n{"text": \n'))
    with fails(rf"{path} line 2: not valid JSON"):
        rows_of(path)
    path.write_bytes(COMPRESSORS[kind](b"\xff\n"))
    with fails(f"{path}: expected UTF-8 text, found byte 0xff"):
        rows_of(path)


def test_parquet_keeps_conversations(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}]
    assert rows_of(write_parquet(tmp_path / "chats.parquet", rows)) == rows


def test_txt_is_cut_at_separators(tmp_path):
    path = tmp_path / "stories.txt"
    path.write_bytes(b"<|endoftext|>\r\n  one\r\n\r\n1\r\n<|endoftext|>\r\n\r\ntwo<|endoftext|>\r\n \r\n")
    assert rows_of(path, text_column="story") == [{"story": "  one\n\n1"}, {"story": "two"}]


def test_other_text_is_one_document(tmp_path):
    text = "\n  a = 1  # über\n\n"
    for name in ("plain.txt", "notes.md", "code.py"):
        (tmp_path / name).write_text(text, "utf-8")
        assert rows_of(tmp_path / name) == [{"text": text}]
    (tmp_path / "code.py").write_text("end = '<|endoftext|>'\n", "utf-8")
    assert rows_of(tmp_path / "code.py") == [{"text": "end = '<|endoftext|>'\n"}]


def test_folder_of_text_by_path(tmp_path):
    for index, name in enumerate(
        ["b.txt", "a/z.py", "c/d/e.md", "a.md", "a/.hidden.txt", ".git/x.py", "a/picture.png"]
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name} {index}", "utf-8")
    assert [row["text"].split()[0] for row in rows_of(tmp_path)] == ["a.md", "a/z.py", "b.txt", "c/d/e.md"]


def test_folder_of_tables_by_path(tmp_path):
    write_parquet(tmp_path / "shard-1.parquet", ROWS[4:])
    write_jsonl(tmp_path / "shard-0.jsonl", ROWS[:4])
    assert rows_of(tmp_path) == ROWS


def test_a_hidden_parent_folder_hides_nothing(tmp_path):
    folder = tmp_path / ".cache" / "data"
    folder.mkdir(parents=True)
    write_jsonl(folder / "rows.jsonl", ROWS)
    assert rows_of(folder) == ROWS


def test_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    assert rows_of("~/rows.jsonl") == ROWS


@pytest.mark.parametrize(
    "name, content, pattern",
    [
        ("rows.xls", b"a,b", "data.dataset: expected a file that ends in .txt, .*parquet, .*found .*rows.xls"),
        (
            "rows.csv",
            b"a,b\n1\n",
            "rows.csv line 2: expected 2 columns \\(a, b\\), found 1; put quotation marks around",
        ),
        (
            "rows.csv",
            b"text\nx, y, z\n",
            "line 2: expected 1 column \\(text\\), found 3; put quotation marks around a cell",
        ),
        (
            "rows.tsv",
            b"text\nx\ty\n",
            "line 2: expected 1 column \\(text\\), found 2; name the columns of a file without",
        ),
        (
            "rows.csv",
            b"text,n,text\n1,2,3\n",
            "rows.csv line 1: expected columns of different names, found 'text' 2 times",
        ),
        ("rows.csv.gz", b"x", "expected a file that ends in .*found .*rows.csv.gz'; unpack other compressed files"),
        ("rows", b"a,b", "data.dataset: expected a file that ends in"),
        ("bad.json", b'[{"a": 1},\n {"a": }]', "bad.json line 2: not valid JSON: Expecting value"),
        ("lines.json", b'{"a": 1}\n{"a": 2}\n', "lines.json line 2: not valid JSON: Extra data; .*must end in .jsonl"),
        ("word.json", b'"text"', "word.json: expected a list of rows, or an object with exactly one list"),
        (
            "columns.json",
            b'{"a": [1], "b": [2]}',
            "columns.json: expected a list of rows, or an object with exactly one",
        ),
        ("strings.json", b'[{"text": "a"}, "b"]', "strings.json: expected an object .*found 'b' in row 2"),
        ("bad.jsonl", b'{"a": 1}\n\n{"a": 2\n', "bad.jsonl line 3: not valid JSON: Expecting"),
        ("numbers.jsonl", b"1\n", "numbers.jsonl: expected an object .*found 1 in row 1"),
        ("latin.txt", b"caf\xe9", "latin.txt: expected UTF-8 text, found byte 0xe9"),
        ("latin.json", b'["caf\xe9"]', "latin.json: expected UTF-8 text, found byte 0xe9"),
        ("latin.jsonl", b'{"a": 1}\n{"a": "\xe9"}', "latin.jsonl: expected UTF-8 text, found byte 0xe9"),
        (
            "number.jsonl",
            b'{"a": 1}\n{"a": ' + b"9" * 5000 + b"}",
            "number.jsonl line 2: not valid JSON: .*5000 digits",
        ),
        ("number.json", b'[{"a": ' + b"9" * 5000 + b"}]", "number.json: not readable: .*5000 digits"),
        ("bad.parquet", b"not parquet", "bad.parquet: not a readable parquet file: "),
    ],
)
def test_unusable_files(tmp_path, name, content, pattern):
    (tmp_path / name).write_bytes(content)
    with fails(pattern):
        rows_of(tmp_path / name)


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv"])
def test_a_document_in_a_cell(tmp_path, name):
    text = "word " * 40_000
    (tmp_path / name).write_text(f"text\n{text}\n")
    assert rows_of(tmp_path / name) == [{"text": text}]


def test_a_file_that_vanishes(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    rows = read_rows(DataConfig(dataset=str(path)))
    path.unlink()
    with fails("rows.jsonl: cannot be read: No such file"):
        next(rows)


def test_rows_of_a_folder_say_which_file_they_are_of(tmp_path):
    (tmp_path / "more").mkdir()
    for name in ("a.jsonl", "more/b.jsonl"):
        write_jsonl(tmp_path / name, ROWS[:2])
    places = [place for place, _ in read_rows(DataConfig(dataset=str(tmp_path)))]
    assert places == [f"data {name} row {number}" for name in ("a.jsonl", "more/b.jsonl") for number in (1, 2)]


def test_unusable_folders(tmp_path):
    with fails("data.dataset: expected files that end in .txt.*found none in "):
        rows_of(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "README.md").write_text("About the rows.", "utf-8")
    with fails("either text files or tables in .*found both .*README.md and .*rows.jsonl.; name one file"):
        rows_of(tmp_path)


@pytest.mark.parametrize("name", ["train.jsonl", "owner/train.txt", "./missing", "/no/such/folder", "a/b/c", "no such"])
def test_nothing_there(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with fails(f"data.dataset: expected a local file or folder or a hub id, found nothing at {name!r}; check the path"):
        rows_of(name)


@pytest.mark.parametrize("name", [None, ""])
def test_no_dataset(name):
    with fails("data.dataset: .*found none; pass --dataset"):
        rows_of(name)


# --- hub --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """Puts a function in the place of `datasets.load_dataset`."""

    def install(load_dataset) -> None:
        monkeypatch.setattr("datasets.load_dataset", load_dataset)

    return install


@pytest.mark.parametrize("name, subset", [("owner/data-set.v1", None), ("wikitext", "sample-10BT")])
def test_hub_is_streamed(tmp_path, monkeypatch, hub, name, subset):
    monkeypatch.chdir(tmp_path)
    calls = []

    def load_dataset(*arguments, **keywords):
        calls.append((arguments, keywords))
        return iter(ROWS)

    hub(load_dataset)
    assert rows_of(name, split="test", subset=subset, max_tokens=9) == ROWS
    assert calls == [((name, subset), {"split": "test", "streaming": True})]


def test_hub_without_a_limit_is_not_read(hub):
    hub(lambda *_, **__: pytest.fail("asked the hub"))
    with fails(
        "data.max_tokens: expected a limit, because 'owner/data' is no local file or folder .*found none; "
        "set data.max_tokens .or data.max_documents., or check the path"
    ):
        rows_of("owner/data")


@pytest.mark.parametrize("limit", ["max_tokens", "max_documents"])
def test_hub_with_either_limit_is_read(hub, limit):
    hub(lambda *_, **__: iter(ROWS))
    assert rows_of("owner/data", **{limit: 1}) == ROWS  # who counts tokens and documents is another


def test_a_local_folder_comes_before_the_hub(tmp_path, monkeypatch, hub):
    monkeypatch.chdir(tmp_path)
    hub(lambda *_, **__: pytest.fail("asked the hub"))
    (tmp_path / "wikitext").mkdir()
    write_jsonl(tmp_path / "wikitext" / "rows.jsonl", ROWS)
    assert rows_of("wikitext") == ROWS


def test_hub_out_of_reach(hub):
    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach\n the hub")

    hub(load_dataset)
    with fails(
        "no file or folder 'owner/data', and reading it from the hub .data.subset 'xl', data.split 'train'. failed: "
        ".*reach the hub"
    ):
        rows_of("owner/data", subset="xl", max_tokens=1)


def test_hub_lost_on_the_way(hub):
    def stream():
        yield ROWS[0]
        raise TimeoutError("timed out")

    hub(lambda *_, **__: stream())
    rows = read_rows(DataConfig(dataset="owner/data", max_documents=2))
    assert next(rows) == ("data row 1", ROWS[0])
    with fails("from the hub .* failed: TimeoutError: timed out"):
        next(rows)


@pytest.mark.parametrize("text", ['a,b\n1,"open\n2,x\n3,y\n', 'a,b\n1,"open\n2,x\n3,"y"\n', 'a,b\n1,"x" y\n'])
def test_quotation_marks_that_do_not_fit(tmp_path, text):
    """One that is not closed would make one row of all that follow."""
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with fails(rf"{path} line 2: expected quotation marks around whole cells, doubled within them, found others"):
        rows_of(path)


def test_what_a_folder_has_besides_is_named(tmp_path, caplog):
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    for name in ("b.csv.gz", "notes/c.rst", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert rows_of(tmp_path) == ROWS
    assert len(caplog.messages) == 1 and caplog.messages[0].endswith(".tsv: b.csv.gz, notes/c.rst")
    for number in range(9):
        (tmp_path / f"{number}.bin").write_text("x")
    caplog.clear()
    rows_of(tmp_path)
    assert caplog.messages[0].endswith("0.bin, 1.bin, 2.bin, 3.bin, 4.bin and 6 more")


@pytest.mark.parametrize("name, separator", [("rows.csv", ","), ("rows.tsv", "\t")])
def test_columns_of_one_name(tmp_path, name, separator):
    """Of two columns of one name, the first would be lost. Columns without a name are those of an index."""
    (tmp_path / name).write_text(separator.join(["", "", "text"]) + "\n" + separator.join("12x") + "\n")
    assert rows_of(tmp_path / name)[0]["text"] == "x"
    with fails("data.columns: expected columns of different names, found 'a' 3 times; rename all but one"):
        rows_of(tmp_path / name, columns=["a", "a", "a"])


def test_columns_of_one_name_in_parquet(tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array(["x"])] * 2, names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with fails("rows.parquet: expected columns of different names, found 'text' 2 times"):
        rows_of(tmp_path / "rows.parquet")


@pytest.mark.parametrize("lines", [100, 400])
def test_a_cell_of_many_lines_is_named(tmp_path, caplog, lines):
    """Two stray quotation marks, far apart, make one cell of all rows between them."""
    between = "".join(f"{number}\n" for number in range(lines))
    path = tmp_path / "rows.csv"
    path.write_text(f'text\nfirst\n"unclosed\n{between}a pipe of 5"\nlast\n' * 2)
    assert len(rows_of(path)) == 7
    (message,) = caplog.messages
    assert message.startswith(f"{path} line 3: a cell of {lines + 2} lines begins in this row; ")
    path.write_text('text\n"' + "line\n" * 100 + '"\n')
    caplog.clear()
    assert len(rows_of(path)) == 1 and not caplog.messages


def test_links_in_a_folder(tmp_path, caplog):
    """A link to a file is read. A link to a folder could lead back, and is named, as what is no file is."""
    folder, other = tmp_path / "folder", tmp_path / "other"
    for path in (folder, other):
        path.mkdir()
        write_jsonl(path / "a.jsonl", ROWS)
    (folder / "b.jsonl").symlink_to(other / "a.jsonl")
    (folder / "back").symlink_to(folder)
    (folder / "other.jsonl").symlink_to(other)
    (folder / "gone.jsonl").symlink_to(tmp_path / "gone.jsonl")
    os.mkfifo(folder / "pipe.jsonl")
    assert rows_of(folder) == ROWS * 2
    links, broken, special = sorted(caplog.messages, key=lambda message: message.split(": ")[-1])
    assert [message.split(": ")[-1] for message in (links, broken, special)] == [
        "back, other.jsonl",
        "gone.jsonl",
        "pipe.jsonl",
    ]
    assert "links to folders" in links and "links to nothing" in broken and "are no files" in special


def test_a_folder_in_which_nothing_can_be_read(tmp_path):
    for name in ("a.csv.gz", "b.zst"):
        (tmp_path / name).write_text("x")
    with fails("expected files that end in .txt.*found none in .*; unpack or convert a.csv.gz, b.zst"):
        rows_of(tmp_path)
    (tmp_path / "data").symlink_to(tmp_path)
    with fails("unpack or convert a.csv.gz, b.zst; not read, because they are links to folders.*: data"):
        rows_of(tmp_path)
