"""Every kind of input gives the same corpus; hostile ones are refused or repaired, and leave nothing behind."""

from __future__ import annotations

import gzip
import json
import os
import zlib

import pytest

from megatron_port.core.data.indexed import IndexedDataset
from megatron_port.core.errors import DataError
from megatron_port.ext.corpora import sources, unpack
from megatron_port.ext.corpora.prepare import prepare
from megatron_port.ext.corpora.source_files import ReadOptions
from megatron_port.ext.corpora.tokenizer import ByteTokenizer
from megatron_port.ext.corpora.verify import verify

BYTE = ByteTokenizer()
TEXTS = ["one", "zwei é", "日本語\n\n", "x" * 5000, "<|endoftext|> is text", "last 🎭"]


def documents(prefix):
    data = IndexedDataset(prefix)
    verify(data.prefix).raise_if_bad()
    return [BYTE.decode(data.document(i).tolist()) for i in range(data.num_documents)]


def lines(texts=TEXTS, key="text", **more):
    return "".join(json.dumps({key: t, **more}) + "\n" for t in texts).encode()


def write(path, data):
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    if path.suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        half = len(data) // 2  # two frames
        frames = [zstandard.ZstdCompressor(write_checksum=True).compress(p) for p in (data[:half], data[half:])]
        path.write_bytes(b"".join(frames))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json.gz", "a.ndjson"])
@pytest.mark.parametrize("workers", [1, 2])
def test_json_lines_in_every_packing(tmp_path, name, workers, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 100)
    path = write(tmp_path / name, b"\xef\xbb\xbf" + lines() + b"\n \n")
    done = prepare([path], tmp_path / "c", tokenizer=BYTE, workers=workers)
    assert documents(tmp_path / "c") == TEXTS and done.documents == 6
    meta = IndexedDataset(tmp_path / "c").meta
    assert meta is not None and done.source_bytes == path.stat().st_size == meta.source_bytes
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "c.bin", "c.idx", "c.meta.json"])


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".txt.zst", ".md"])
def test_trees_of_plain_text(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 40)
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for i, text in enumerate(TEXTS):
        write((tmp_path / "in" / "deep" if i % 2 else tmp_path / "in") / f"{'bd'[i % 2]}{i}{suffix}", text.encode())
    (tmp_path / "in" / "x.bin").write_bytes(b"\0")
    options = ReadOptions(suffixes=(".txt", ".md"))
    prepare([tmp_path / "in"], tmp_path / "c", tokenizer=BYTE, options=options)
    assert documents(tmp_path / "c") == [*TEXTS[0::2], *TEXTS[1::2]]


def test_workers_give_the_same_bytes(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.jsonl").write_bytes(lines([f"{i} {j} " * (j % 90) for j in range(200)]))
    for workers in (1, 3):
        prepare([tmp_path], tmp_path / f"c{workers}", tokenizer=BYTE, workers=workers)
    for suffix in ("bin", "idx", "meta.json"):
        assert (tmp_path / f"c1.{suffix}").read_bytes() == (tmp_path / f"c3.{suffix}").read_bytes()


def test_parquet_and_arrow(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    monkeypatch.setattr(sources, "BLOCK_BYTES", 100)
    table = pyarrow.table({"text": TEXTS, "n": list(range(6))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    dictionary = table.set_column(0, "text", table["text"].dictionary_encode())
    parquet.write_table(dictionary, tmp_path / "b.parquet")
    for name, make in (("s.arrow", ipc.new_stream), ("f.arrow", ipc.new_file)):
        with make(str(tmp_path / name), table.schema) as out:
            out.write_table(table.slice(1), max_chunksize=2)
    for name, expected in (("a.parquet", TEXTS), ("b.parquet", TEXTS), ("s.arrow", TEXTS[1:]), ("f.arrow", TEXTS[1:])):
        prepare([tmp_path / name], tmp_path / "c", tokenizer=BYTE, workers=2)
        assert documents(tmp_path / "c") == expected, name
    with pytest.raises(DataError, match="no column 'body'; it has text, n"):
        prepare([tmp_path / "a.parquet"], tmp_path / "d", tokenizer=BYTE, options=ReadOptions(key="body"))
    with pytest.raises(DataError, match="column 'n' is of type int64"):
        prepare([tmp_path / "s.arrow"], tmp_path / "d", tokenizer=BYTE, options=ReadOptions(key="n"))
    parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), tmp_path / "null.parquet")
    with pytest.raises(DataError, match=r"null\.parquet, row 1: no text"):
        prepare([tmp_path / "null.parquet"], tmp_path / "d", tokenizer=BYTE)
    done = prepare([tmp_path / "null.parquet"], tmp_path / "d", tokenizer=BYTE, bad_input="skip")
    assert documents(tmp_path / "d") == ["a", "b"] and done.left_out == 1
    for name in ("a.parquet", "s.arrow"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-200])
        with pytest.raises(DataError, match=f"{name}: not a readable"):
            prepare([tmp_path / name], tmp_path / "e", tokenizer=BYTE)
    assert not list(tmp_path.glob("*e.*")) and not list(tmp_path.glob(".*"))


def test_a_folder_of_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"text": TEXTS, "label": [0] * 6})
    whole.select([0, 2, 3]).save_to_disk(str(tmp_path / "d"), num_shards=2)
    datasets.DatasetDict({"train": whole, "test": whole.select([1])}).save_to_disk(str(tmp_path / "dict"))
    prepare([tmp_path / "d"], tmp_path / "c", tokenizer=BYTE)
    assert documents(tmp_path / "c") == [TEXTS[0], TEXTS[2], TEXTS[3]]
    for split, expected in (("train", TEXTS), ("test", TEXTS[1:2])):
        prepare([tmp_path / "dict"], tmp_path / "c", tokenizer=BYTE, options=ReadOptions(split=split))
        assert documents(tmp_path / "c") == expected
    with pytest.raises(DataError, match="no split 'valid'; it has train, test"):
        prepare([tmp_path / "dict"], tmp_path / "c", tokenizer=BYTE, options=ReadOptions(split="valid"))


def test_a_datasets_folder_may_not_point_elsewhere(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "secret.arrow").write_bytes(b"")
    (tmp_path / "d" / "state.json").write_text('{"_data_files": [{"filename": "../secret.arrow"}]}')
    with pytest.raises(DataError, match="not a file in this folder"):
        prepare([tmp_path / "d"], tmp_path / "c", tokenizer=BYTE)
    (tmp_path / "d" / "state.json").write_text('[]')
    with pytest.raises(DataError, match="not a readable `datasets` folder"):
        prepare([tmp_path / "d"], tmp_path / "c", tokenizer=BYTE)


# (content of a .jsonl, message, what skip leaves, what repair leaves)
BAD = {
    "bytes": (b'{"text": "a"}\n{"text": "caf\xe9"}\n', r":2: byte 0xe9 at 13 of the line is not UTF-8", ["a"],
              ["a", "caf\ufffd"]),
    "nul": (b'{"text": "a\\u0000b"}\n{"text": "c"}\n', ":1: a NUL character at 1", ["c"], ["ab", "c"]),
    "surrogate": (b'{"text": "a"}\n{"text": "x\\ud800y"}\n', ":2: half of a surrogate", ["a"], ["a", "x\ufffdy"]),
    "broken": (b'{"text": "a"}\n{"text": \n', ":2: not a JSON object", ["a"], ["a"]),
    "deep": (b'{"text": "a"}\n' + b"[" * 200_000 + b"\n", ":2: not a JSON object", ["a"], ["a"]),
    "key": (b'{"text": "a"}\n{"body": "b"}\n[1]\n{"text": 7}\n', ":2: no text under the key", ["a"], ["a"]),
    "number": (b'{"text": "a"}\n{"text": "b", "n": ' + b"9" * 5000 + b"}\n", ":2: not a JSON object", ["a"], ["a"]),
    "long": (b'{"text": "a"}\n{"text": "' + b"b" * 5000 + b'"}\n{"text": "c"}\n', ":2: a line of", ["a", "c"],
             ["a", "c"]),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("fault", BAD)
def test_damaged_records(tmp_path, fault, workers):
    data, message, skipped, repaired = BAD[fault]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(data)
    options = ReadOptions(largest_record=4000 if fault == "long" else 64 << 20)

    def go(policy):
        return prepare([tmp_path / "in"], tmp_path / "out" / "c", tokenizer=BYTE, options=options, bad_input=policy,
                       workers=workers)

    with pytest.raises(DataError, match=r"a\.jsonl" + message):
        go("stop")
    assert os.listdir(tmp_path / "out") == []
    for policy, expected in (("skip", skipped), ("repair", repaired)):
        done = go(policy)
        assert documents(tmp_path / "out" / "c") == expected
        meta = IndexedDataset(tmp_path / "out" / "c").meta
        assert meta is not None and (meta.left_out, meta.repaired) == (done.left_out, done.repaired)
        assert done.left_out + done.repaired == (3 if fault == "key" else 1) and "a.jsonl" in done.notes[0]
        assert (done.repaired == 1) == (expected is repaired and repaired is not skipped and repaired != skipped)


def test_plain_text_with_nul_and_other_bytes(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"first\n\n\nse\0cond\n\n\nthi\xffrd")
    with pytest.raises(DataError, match=r"a\.txt at byte 8: a NUL character at 2"):
        prepare([tmp_path / "a.txt"], tmp_path / "c", tokenizer=BYTE, options=ReadOptions(blank_lines=2))
    prepare([tmp_path / "a.txt"], tmp_path / "c", tokenizer=BYTE, options=ReadOptions(blank_lines=2), bad_input="skip")
    assert documents(tmp_path / "c") == ["first\n\n\n"]
    prepare([tmp_path / "a.txt"], tmp_path / "c", tokenizer=BYTE, options=ReadOptions(blank_lines=2),
            bad_input="repair")
    assert documents(tmp_path / "c") == ["first\n\n\n", "second\n\n\n", "thi\ufffdrd"]


def bomb(path, size, opening=b'{"text": "'):
    """A gzip file of one line of ``size`` bytes, written without holding them."""
    packer = zlib.compressobj(9, wbits=31)
    with open(path, "wb") as out:
        out.write(packer.compress(opening))
        for _ in range(size >> 20):
            out.write(packer.compress(b"a" * (1 << 20)))
        out.write(packer.flush())


def test_bombs(tmp_path, monkeypatch):
    import tracemalloc

    monkeypatch.setattr(unpack, "EXPANSION_FREE", 1 << 20)
    bomb(tmp_path / "b.jsonl.gz", 200 << 20)
    tracemalloc.start()
    with pytest.raises(DataError, match=r"b\.jsonl\.gz: .* more than 300 times as many"):
        prepare([tmp_path / "b.jsonl.gz"], tmp_path / "c", tokenizer=BYTE)
    # A ratio that passes, and a line that does not end.
    monkeypatch.setattr(unpack, "EXPANSION", 2000)
    with pytest.raises(DataError, match=r"b\.jsonl\.gz:1: a line of more than 1000000 bytes"):
        prepare([tmp_path / "b.jsonl.gz"], tmp_path / "c", tokenizer=BYTE, options=ReadOptions(largest_record=10**6))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20
    assert os.listdir(tmp_path) == ["b.jsonl.gz"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.zst"])
def test_packed_files_that_are_cut_off_or_damaged(tmp_path, name):
    path = write(tmp_path / name, lines([f"{i}" * 50 for i in range(500)]))
    whole = path.read_bytes()
    for size in (len(whole) - 3, len(whole) // 2, 7):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=name):
            prepare([path], tmp_path / "c", tokenizer=BYTE)
    path.write_bytes(whole[:40] + bytes([whole[40] ^ 255]) + whole[41:])
    with pytest.raises(DataError, match=name):
        prepare([path], tmp_path / "c", tokenizer=BYTE)
    assert os.listdir(tmp_path) == [name]


class Lying(ByteTokenizer):
    """Gives an id that it does not have."""

    def encode_array(self, text):
        return ByteTokenizer.encode_array(self, text).astype("u2") + 200


@pytest.mark.parametrize("workers", [1, 2])
def test_an_id_beyond_the_vocabulary(tmp_path, workers):
    (tmp_path / "a.jsonl").write_bytes(lines(["~~"]))
    with pytest.raises(DataError, match=r"a\.jsonl:1: position 0: token id 326 is outside the vocabulary of 257"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "c", tokenizer=Lying(), workers=workers)
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_a_missing_package_says_how_to_get_it(tmp_path, monkeypatch):
    import importlib

    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "a.txt.zst").write_bytes((0xFD2FB528).to_bytes(4, "little"))
    (tmp_path / "a.txt.xz").write_bytes(b"\xfd7zXZ\0")
    with pytest.raises(DataError, match="a.txt.xz: this Python was built without lzma"):
        prepare([tmp_path / "a.txt.xz"], tmp_path / "c", tokenizer=BYTE)
    for name, package in (("a.parquet", "pyarrow"), ("a.txt.zst", "zstandard")):
        with pytest.raises(DataError, match=f"{package} is not installed .* pip install {package}"):
            prepare([tmp_path / name], tmp_path / "c", tokenizer=BYTE)
