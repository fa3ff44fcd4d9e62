"""The .bin/.idx format: own round trip, damage, constant memory."""

from __future__ import annotations

import os
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.data.indexed import CorpusMeta, IndexedDataset, bin_path, idx_path, meta_path
from megatron_port.core.errors import DataError
from megatron_port.ext.corpora.corpus_facts import unigram_entropy
from megatron_port.ext.corpora.verify import verify
from megatron_port.ext.corpora.writer import IndexedWriter

META = CorpusMeta(tokenizer="byte", vocab_size=257, eod_id=256)


def make(prefix, documents, vocab=257, meta=META):
    with IndexedWriter(prefix, vocab_size=vocab) as writer:
        for document in documents:
            writer.add_document(document)
        if meta:
            writer.describe(meta)
    return prefix


DOCUMENTS = [[1, 2, 3], [4], [], [5, 6, 256], list(range(100))]


def test_bytes_of_both_files(tmp_path):
    prefix = make(tmp_path / "c", [[1, 2, 3], [9]])
    assert bin_path(prefix).read_bytes() == struct.pack("<4H", 1, 2, 3, 9)
    assert idx_path(prefix).read_bytes() == (
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3) + struct.pack("<2i", 3, 1)
        + struct.pack("<2q", 0, 6) + struct.pack("<3q", 0, 1, 2))


@settings(max_examples=25, deadline=None)
@given(documents=st.lists(st.lists(st.integers(0, 70000), max_size=20), max_size=12), wide=st.booleans())
def test_round_trip(tmp_path_factory, documents, wide):
    if not wide:
        documents = [[t % 300 for t in d] for d in documents]
    vocab = 70001 if wide else 300
    prefix = make(tmp_path_factory.mktemp("c") / "c", documents, vocab, None)
    data = IndexedDataset(prefix)
    flat = [t for d in documents for t in d]
    assert data.dtype == (np.int32 if wide else np.uint16)
    assert (data.num_documents, data.num_tokens) == (len(documents), len(flat))
    assert [data.document(i).tolist() for i in range(len(documents))] == documents
    assert data.read(len(flat) // 3, len(flat) // 2).tolist() == flat[len(flat) // 3:len(flat) // 3 + len(flat) // 2]
    assert data.read(0, 0).dtype == np.int64
    verify(data.prefix).raise_if_bad()


def test_sidecar_counts_and_verify(tmp_path):
    data = IndexedDataset(make(tmp_path / "c", DOCUMENTS))
    assert data.meta is not None
    assert (data.meta.documents, data.meta.tokens, data.meta.tokenizer) == (5, 107, "byte")
    assert len(verify(data.prefix).checked) == 5


@pytest.mark.parametrize("cut", [-1, 1, -20])
@pytest.mark.parametrize("which", [bin_path, idx_path])
def test_wrong_size_names_file_and_numbers(tmp_path, which, cut):
    path = which(make(tmp_path / "c", DOCUMENTS))
    size = path.stat().st_size
    with open(path, "r+b") as stream:
        stream.truncate(size + cut)
    with pytest.raises(DataError) as caught:
        IndexedDataset(tmp_path / "c")
    assert str(path) in str(caught.value) and f"expected {size}" in str(caught.value)
    assert f"found {size + cut}" in str(caught.value)


@pytest.mark.parametrize("offset, value", [(0, b"X"), (9, b"\x02"), (17, b"\x07"), (18, b"\xff"), (34, b"\x7f"),
                                           (34 + 12 * 5, b"\x01")])
def test_damaged_index_is_refused(tmp_path, offset, value):
    path = idx_path(make(tmp_path / "c", DOCUMENTS))
    with open(path, "r+b") as stream:
        stream.seek(offset)
        stream.write(value)
    with pytest.raises(DataError):
        IndexedDataset(tmp_path / "c")


@pytest.mark.parametrize("where", ["bin", "pointer"])
def test_a_flipped_bit_is_found_by_verify(tmp_path, where):
    prefix = make(tmp_path / "c", DOCUMENTS)
    path, offset = (bin_path(prefix), 4) if where == "bin" else (idx_path(prefix), 34 + 4 * 5 + 8)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError):
        verify(prefix).raise_if_bad()


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        IndexedDataset(tmp_path / "absent")
    (tmp_path / "x.idx").write_bytes(b"MM")
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(DataError, match="header"):
        IndexedDataset(tmp_path / "x")
    make(tmp_path / "c", DOCUMENTS)
    meta_path(tmp_path / "c").write_text("[]")
    with pytest.raises(DataError, match="sidecar"):
        IndexedDataset(tmp_path / "c")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"tokenizer": 3, "vocab_size": 257, "eod_id": 256}', "x" * 70_000,
                                  '{"tokenizer": "byte", "vocab_size": 1e9, "eod_id": 256}',
                                  '{"tokenizer": "byte", "vocab_size": -2, "eod_id": 256}'])
def test_hostile_sidecars(tmp_path, text):
    make(tmp_path / "c", DOCUMENTS)
    meta_path(tmp_path / "c").write_text(text)
    with pytest.raises(DataError, match="sidecar"):
        IndexedDataset(tmp_path / "c")


@pytest.mark.parametrize("pointer", [-2, 2**62, 2**63 - 1, 40])
def test_a_document_whose_offset_is_wrong_inside_the_file(tmp_path, pointer):
    """Opening checks the ends only; asking for the document is where it shows."""
    prefix = make(tmp_path / "c", DOCUMENTS)
    content = bytearray(idx_path(prefix).read_bytes())
    struct.pack_into("<q", content, 34 + 4 * 5 + 8 * 1, pointer)
    idx_path(prefix).write_bytes(content)
    data = IndexedDataset(prefix)
    with pytest.raises(DataError, match="data verify"):
        [data.document(i) for i in range(data.num_documents)]
    with pytest.raises(DataError, match="sequence 1 has a wrong byte offset"):
        verify(data.prefix).raise_if_bad()


@pytest.mark.parametrize("entry", [-1, -(2**63), 2**63 - 1, 4])
def test_a_document_boundary_that_is_wrong_inside_the_file(tmp_path, entry):
    prefix = make(tmp_path / "c", DOCUMENTS)
    content = bytearray(idx_path(prefix).read_bytes())
    struct.pack_into("<q", content, 34 + 12 * 5 + 8 * 1, entry)
    idx_path(prefix).write_bytes(content)
    data = IndexedDataset(prefix)
    with pytest.raises(DataError, match="data verify"):
        [data.document(i) for i in range(data.num_documents)]
    with pytest.raises(DataError, match="backwards"):
        verify(data.prefix).raise_if_bad()


def test_writer_refuses_ids_and_leaves_nothing(tmp_path):
    for bad in (257, -1):
        with pytest.raises(DataError, match=f"document 1, position 1: token id {bad}"):
            make(tmp_path / "c", [[1], [0, bad]])
    assert os.listdir(tmp_path) == []


def test_failed_rewrite_keeps_the_old_corpus(tmp_path):
    prefix = make(tmp_path / "c", DOCUMENTS)
    with pytest.raises(RuntimeError), IndexedWriter(prefix, vocab_size=257) as writer:
        writer.add_document([7])
        raise RuntimeError
    assert IndexedDataset(prefix).num_tokens == 107
    assert sorted(os.listdir(tmp_path)) == ["c.bin", "c.idx", "c.meta.json"]


def test_reading_takes_constant_memory(tmp_path):
    block = np.arange(1 << 18, dtype=np.int64) % 251
    with IndexedWriter(tmp_path / "c", vocab_size=257) as writer:
        for _ in range(32):
            writer.add_document(block)
    tracemalloc.start()
    data = IndexedDataset(tmp_path / "c")
    for position in range(0, data.num_tokens - 1025, 1 << 20):
        data.read(position, 1025)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert data.num_tokens * 2 > 100 * 131072 and peak < 131072


def test_a_read_outlives_its_dataset(tmp_path):
    data = IndexedDataset(make(tmp_path / "c", DOCUMENTS))
    first = data.read(0, 3)
    del data
    assert first.tolist() == [1, 2, 3]


def test_unigram_entropy(tmp_path):
    assert unigram_entropy(make(tmp_path / "c", [[0, 1], [2, 3]])) == pytest.approx(np.log(4))
    assert unigram_entropy(make(tmp_path / "d", [[5, 5], [5]])) == 0.0


def test_nearest_document(tmp_path):
    data = IndexedDataset(make(tmp_path / "c", DOCUMENTS))
    for position in range(108):
        starts = [0, 3, 4, 7, 107]
        assert abs(data.nearest_document(position) - position) == min(abs(s - position) for s in starts)
