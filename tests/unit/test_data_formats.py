"""Names against contents: what is read whatever its name, what is refused, and what a user may insist on."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import tarfile

import pytest

from megatron_port.core.data.indexed import IndexedDataset
from megatron_port.core.errors import DataError
from megatron_port.ext.corpora import columns as json_values
from megatron_port.ext.corpora import sources
from megatron_port.ext.corpora.chat_tokens import chat_recipe
from megatron_port.ext.corpora.conversations import ChatFields
from megatron_port.ext.corpora.prepare import prepare
from megatron_port.ext.corpora.source_files import ReadOptions
from megatron_port.ext.corpora.tokenizer import ByteTokenizer

BYTE = ByteTokenizer()


def documents(path, folder, **options):
    prepare([path], folder / "c", tokenizer=BYTE, options=ReadOptions(**options))
    data = IndexedDataset(folder / "c")
    return [BYTE.decode(data.document(i).tolist()) for i in range(data.num_documents)]


ONE = b'{"text": "one"}\n'
TAR = tarfile.TarInfo("a.txt").tobuf() + bytes(1024)
READ = [
    ("part-00000", ONE + b'{"text": "two"}\n', ["one", "two"]),
    ("a.json", b'[{"text": "one"},\n {"text": "two"}]\n', ["one", "two"]),
    ("a.json", b'{\n "text": "one"\n}\n{\n "text": "two"\n}', ["one", "two"]),
    ("a.jsonl", b'["x",\n {"text": "one"}]', "value 1: no text under the key"),
    ("a.jsonl", b'{"body": "one"}\n', "its first record has no text under the key 'text'; it has body: --json-key"),
    ("dataset_infos.json", b'{\n "default": {\n  "splits": 1\n }\n}', "its first record .* key 'text'; it has default"),
    ("a.json", b'[ {"body": "one"}]', "its first record has no text under the key 'text'; it has body: --json-key"),
    ("a.json", b'[{"text": "one"}, {"text": "two"}', "the array does not end"),
    ("a.json", b'[{"text": "one"}] {"text": "two"}', "more text after the end of the array"),
    ("a.json", b'[\n{"text": "one"},\n{"text": two}]', "a.json:3: not JSON"),
    ("a.csv", b'\xef\xbb\xbfid,text\r\n1,"one\r\ntwo, ""three"""\r\n2,four\n', ['one\r\ntwo, "three"', "four"]),
    ("a.csv", b"id;text\n1;one, two\n", ["one, two"]),
    ("a.CSV", b"text\none\ntwo\n", ["one", "two"]),
    ("a.tsv", b"id\ttext\n1\tone, \"two\"\n", ['one, "two"']),
    ("a.csv", b"id,body\n1,one\n", "no column 'text'; it has id, body: --json-key"),
    ("a.csv", b"text,text\n1,one\n", "2 columns are called 'text'"),
    ("a.csv", b"id,text\n1,one,two\n", "row 1: 3 cells, and the header has 2"),
    ("a.csv", b'id,text\n1,"one\n2,two\n', "not readable as CSV"),
    ("a.csv", b"id,text\n1,caf\xe9\n", "row 1: byte 0xe9"),
    ("a.csv", ONE, "JSON lines, and its name says CSV"),
    ("README", b"plain words, of several lines\nand more\n", ["plain words, of several lines\nand more\n"]),
    ("a.txt", b"Hello, world\nGood, night\n", ["Hello, world\nGood, night\n"]),
    ("a.txt", b"[1] Smith, 2001\n{sic}\n", ["[1] Smith, 2001\n{sic}\n"]),
    ("a.txt", b"ORCs and GIF89 and RIFF\n", ["ORCs and GIF89 and RIFF\n"]),
    ("a.txt", ONE, "a.txt: looks like JSON lines, and its name says plain text.*--format jsonl.*--format text"),
    ("a.jsonl.txt", b'{"text": "one"\n' + ONE, "looks like JSON lines"),
    ("a.txt", b'[{"text": "one"}]', "looks like a JSON array"),
    ("a.txt", b"id,text\n1,one\n2,two\n", "looks like columns separated by commas"),
    ("a", b"id\ttext\n1\tone\n", "looks like columns separated by tabs.*--format csv"),
    ("a", bytes(range(256)), "binary; it is no text, or insist with --format"),
    ("a.txt", bytes(range(256)), "binary; it is no text"),
    ("a.parquet", ONE, "not a readable parquet file"),
    ("a.txt", b"", "no text in .*a.txt; all is skipped"),
    ("a.jsonl", gzip.compress(ONE), ["one"]),
    ("a.txt", gzip.compress(gzip.compress(ONE)), "compressed twice"),
    ("a.tgz", gzip.compress(TAR), "a tar archive"),
    ("a.txt", b"%PDF-1.7\nwords", "a PDF document"),
    ("a.txt", "Grüße".encode("utf-16"), "UTF-16; convert it: iconv"),
    ("a.txt.gz", b"plain words\n", ["plain words\n"]),
    ("a.txt", b"caf\xe9", "a.txt at byte 0: byte 0xe9 at 3 of the text is not UTF-8"),
]


@pytest.mark.parametrize("name, data, expected", READ, ids=range(len(READ)))
def test_names_against_contents(tmp_path, name, data, expected):
    (tmp_path / name).write_bytes(data)
    if isinstance(expected, list):
        assert documents(tmp_path / name, tmp_path) == expected
        return
    with pytest.raises(DataError, match=expected):
        documents(tmp_path / name, tmp_path)
    assert os.listdir(tmp_path) == [name]


def test_a_format_is_insisted_on(tmp_path):
    for name, data, format_, expected in (
        ("a.txt", ONE, "jsonl", ["one"]), ("a.txt", ONE, "text", [ONE.decode()]),
        ("a.jsonl", b"id,text\n1,one\n", "csv", ["one"]), ("b", b"text\none\n", "tsv", ["one"]),
    ):
        (tmp_path / name).write_bytes(data)
        assert documents(tmp_path / name, tmp_path, format=format_) == expected
    with pytest.raises(DataError, match="format is 'xml'; choose one of auto, jsonl"):
        documents(tmp_path / "a.txt", tmp_path, format="xml")


def test_values_over_several_lines_against_the_library(tmp_path, monkeypatch):
    """In windows of a few bytes: strings with brackets, quotes, escapes and letters of four bytes are cut anywhere."""
    monkeypatch.setattr(json_values, "READ", 7)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 100)
    r = random.Random(3)
    pieces = ["]", "[", "{", "}", '"', "\\", ",", "🎭", "é", "\n", "12", ": "]
    rows = [{"text": "".join(r.choices(pieces, k=r.randrange(1, 40))), "n": [r.random(), {"a": None}], "e": "\\u00"}
            for _ in range(60)]
    texts = [text for text in (str(row["text"]) for row in rows) if not text.isspace()]
    for indent in (None, 2):
        for ascii_ in (True, False):
            text = json.dumps(rows, indent=indent, ensure_ascii=ascii_)
            (tmp_path / "a.json").write_text(text)
            assert documents(tmp_path / "a.json", tmp_path) == texts
    found = list(json_values.json_values(io.BytesIO(b"\xef\xbb\xbf[1, -2.5e3, [3]]"), "x", 99))
    assert [json.loads(value) for value in found] == [1, -2500.0, [3]]
    with pytest.raises(DataError, match="x:1: a value of more than 99 bytes"):
        list(json_values.json_values(io.BytesIO(b'["' + b"a" * 200), "x", 99))


def test_folders_of_special_files(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    for name in ("pipe.txt", "corpus.json"):  # the latter may be a record of `data fetch`, and is looked into
        os.mkfifo(folder / name)
    (folder / "gone.txt").symlink_to("nowhere")
    with pytest.raises(DataError, match="gone.txt: a link that leads nowhere .*--skip gone.txt"):
        documents(folder, tmp_path)
    prepare([folder / "a.txt"], folder / "made", tokenizer=BYTE)
    said = []
    done = prepare([folder, folder / "a.txt"], tmp_path / "c", tokenizer=BYTE, log=said.append,
                   options=ReadOptions(skip=("gone.*",)))
    reasons = {entry.path.name: entry.reason for entry in done.inputs.skipped}
    assert done.documents == 1 and reasons == {
        "a.txt": "the same file again", "gone.txt": "asked for (--skip)", "pipe.txt": reasons["pipe.txt"],
        "corpus.json": reasons["pipe.txt"],
        "made.bin": "a tokenized corpus", "made.idx": "a tokenized corpus", "made.meta.json": "a tokenized corpus"}
    assert "no regular file" in reasons["pipe.txt"]
    assert said[0].splitlines()[1].split() == ["read", "plain", "text", "1", "3"]
    assert "skipped  a tokenized corpus" in said[0] and "made.bin" in said[0]


def test_a_saved_data_set_of_two_splits(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    for split, text in (("train", "one"), ("test", "two")):
        folder = tmp_path / "in" / "saved" / split
        folder.mkdir(parents=True)
        rows = pyarrow.table({"text": [text]})
        for name in ("data-0.arrow", "cache-1.arrow"):
            with pyarrow.ipc.new_stream(str(folder / name), rows.schema) as out:
                out.write_table(rows)
        (folder / "state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')
        (folder / "dataset_info.json").write_text("{}")
    (tmp_path / "in" / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for path in (tmp_path / "in", tmp_path / "in" / "saved"):  # also below another folder
        assert documents(path, tmp_path) == ["one"]
        assert documents(path, tmp_path, split="test") == ["two"]


def test_white_space_is_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": " \\n"}\n{"text": ""}\n')
    done = prepare([tmp_path / "a.jsonl"], tmp_path / "c", tokenizer=BYTE)
    meta = IndexedDataset(tmp_path / "c").meta
    assert (done.documents, done.blank) == (1, 2) and meta is not None and meta.blank == 2


def test_conversations_in_columns(tmp_path):
    """Binary cells are texts, as in a table of strings; bytes of another encoding are a damaged record."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    chat = chat_recipe(BYTE, "plain", ChatFields())
    rows = {"prompt": ["Wer? é", "two"], "completion": ["Ada 🎭", "zwei"]}

    def made(path, **more):
        done = prepare([path], tmp_path / "c", tokenizer=BYTE, chat=chat, **more)
        return (tmp_path / "c.bin").read_bytes(), (tmp_path / "c.mask").read_bytes(), done.left_out

    parquet.write_table(pyarrow.table(rows), tmp_path / "text.parquet")
    (tmp_path / "a.csv").write_text("prompt,completion\nWer? é,Ada 🎭\ntwo,zwei\n")
    binary = {key: [text.encode() for text in texts] for key, texts in rows.items()}
    parquet.write_table(pyarrow.table(binary), tmp_path / "binary.parquet")
    messages = [[{"role": "user", "content": p}, {"role": "assistant", "content": c}] for p, c in zip(*binary.values())]
    parquet.write_table(pyarrow.table({"messages": messages}), tmp_path / "nested.parquet")
    expected = made(tmp_path / "text.parquet")
    for name in ("a.csv", "binary.parquet", "nested.parquet"):
        assert made(tmp_path / name) == expected, name
    binary["prompt"].append(b"caf\xe9")
    binary["completion"].append(b"x")
    parquet.write_table(pyarrow.table(binary), tmp_path / "latin.parquet")
    with pytest.raises(DataError, match=r"latin\.parquet, row 2: byte 0xe9 at \d+ of the line is not UTF-8"):
        made(tmp_path / "latin.parquet")
    assert made(tmp_path / "latin.parquet", bad_input="skip") == (*expected[:2], 1)


def test_columns_that_are_no_texts(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    lists = pyarrow.table({"text": [["a", "b"]]})
    parts = pyarrow.table({"text": [{"string": "a"}]})
    for rows, message in ((twice, "2 columns are called 'text'"), (lists, "column 'text' is of type list"),
                          (parts, "column 'text' is of type struct")):
        parquet.write_table(rows, tmp_path / "a.parquet")
        with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), rows.schema) as out:
            out.write_table(rows)
        for name in ("a.parquet", "a.arrow"):
            with pytest.raises(DataError, match=f"{name}: {message}"):
                documents(tmp_path / name, tmp_path)
    plain = pyarrow.table({"text": pyarrow.array([b"a", b"b"]).dictionary_encode()})
    parquet.write_table(plain, tmp_path / "a.parquet")
    assert documents(tmp_path / "a.parquet", tmp_path) == ["a", "b"]
