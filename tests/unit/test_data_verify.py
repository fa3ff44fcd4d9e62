"""``data verify`` finds every kind of damage and names file, byte, expected and found."""

from __future__ import annotations

import json
import os
import random
import struct

import numpy as np
import pytest

from megatron_port.core.data.indexed import CorpusMeta, bin_path, idx_path, meta_path
from megatron_port.core.errors import DataError
from megatron_port.ext.corpora import checked_tokens as block_hashes
from megatron_port.ext.corpora.checked_tokens import BlockHashes
from megatron_port.ext.corpora.verify import verify
from megatron_port.ext.corpora.writer import IndexedWriter

LENGTHS = [3, 0, 40, 7, 100, 12]
N = len(LENGTHS)
SIZES, OFFSETS, DOCUMENTS = 34, 34 + 4 * N, 34 + 12 * N


@pytest.fixture
def prefix(tmp_path):
    r = random.Random(0)
    with IndexedWriter(tmp_path / "c", vocab_size=300) as writer:
        for n in LENGTHS:
            writer.add_document([r.randrange(300) for _ in range(n)])
        writer.describe(CorpusMeta(tokenizer="byte", vocab_size=300, eod_id=256))
    return tmp_path / "c"


def patch(path, byte, data):
    content = bytearray(path.read_bytes())
    content[byte:byte + len(data)] = data
    path.write_bytes(content)


def test_a_whole_corpus(prefix):
    report = verify(prefix)
    assert not report.faults and len(report.checked) == 5
    report.raise_if_bad()


# (bytes to put, where, what is said: byte, expected, found)
INDEX_DAMAGE = {
    "magic": (b"XX", 0, 0, "MMIDIDX", "XXIDIDX"),
    "version": (struct.pack("<Q", 2), 9, 9, "1", "2"),
    "type code": (b"\x07", 17, 17, "[1, 2, 3, 4, 5, 8]", "7"),
    "sequences": (struct.pack("<Q", 7), 18, -1, f"{34 + 12 * 7 + 8 * 7} bytes", f"{34 + 12 * 6 + 8 * 7}"),
    "boundaries": (struct.pack("<Q", 9), 26, -1, f"{34 + 12 * 6 + 8 * 9} bytes", f"{34 + 12 * 6 + 8 * 7}"),
    "length": (struct.pack("<i", 41), SIZES + 8, SIZES + 8, "40", "41"),
    "first length": (struct.pack("<i", 4), SIZES, SIZES, "3", "4"),
    "negative length": (struct.pack("<i", -5), SIZES + 12, SIZES + 12, "0 or more", "-5"),
    "first offset": (struct.pack("<q", 2), OFFSETS, OFFSETS, "0", "2"),
    "offset": (struct.pack("<q", 90), OFFSETS + 24, OFFSETS + 24, "86", "90"),
    "last offset": (struct.pack("<q", 302), OFFSETS + 40, OFFSETS + 40, "300", "302"),
    "huge offset": (struct.pack("<q", -(2**63)), OFFSETS + 16, OFFSETS + 16, "6", str(-(2**63))),
    "first document": (struct.pack("<q", 1), DOCUMENTS, DOCUMENTS, "0", "1"),
    "document": (struct.pack("<q", 1), DOCUMENTS + 24, DOCUMENTS + 24, "2 or more", "1"),
    "last document": (struct.pack("<q", 9), DOCUMENTS + 48, DOCUMENTS + 48, "6 sequences", "9"),
}


@pytest.mark.parametrize("kind", INDEX_DAMAGE)
@pytest.mark.parametrize("sidecar", [True, False])
def test_the_index(prefix, kind, sidecar):
    data, where, byte, expected, found = INDEX_DAMAGE[kind]
    patch(idx_path(prefix), where, data)
    if not sidecar:
        meta_path(prefix).unlink()
    faults = [f for f in verify(prefix).faults if f.file == idx_path(prefix)]
    named = [(f.byte, f.expected, f.found) for f in faults]
    assert any(b == byte and expected in e and found in f for b, e, f in named), named
    assert len(faults) == 1, [str(f) for f in faults]


def test_a_length_that_moved_is_found_by_the_hash(prefix):
    """Consistent in itself: only the sidecar knows."""
    patch(idx_path(prefix), SIZES + 8, struct.pack("<ii", 41, 6))
    patch(idx_path(prefix), OFFSETS + 24, struct.pack("<q", 88))
    (fault,) = verify(prefix).faults
    assert fault.what == "xxh3-128" and fault.file == idx_path(prefix)


@pytest.mark.parametrize("path, change", [(bin_path, -2), (bin_path, 2), (bin_path, -1), (idx_path, -3), (idx_path, 8)])
def test_sizes(prefix, path, change):
    size = path(prefix).stat().st_size
    with open(path(prefix), "r+b") as stream:
        stream.truncate(size + change)
    text = [str(f) for f in verify(prefix).faults if f.byte == -1 and "size" in f.what]
    assert len(text) == 1 and str(path(prefix)) in text[0]
    assert f"expected {size} bytes, found {size + change}" in text[0]


def test_ids_beyond_the_vocabulary(prefix):
    patch(bin_path(prefix), 20, struct.pack("<H", 300))
    faults = verify(prefix).faults
    assert (faults[0].byte, faults[0].expected, faults[0].found) == (20, "0 to 299", "300")
    assert "position 10: token id 300" in str(faults[0])
    meta_path(prefix).unlink()
    assert not verify(prefix).faults
    assert [f.byte for f in verify(prefix, vocab_size=300).faults] == [20]


def test_all_faults_at_once(prefix):
    patch(bin_path(prefix), 20, struct.pack("<H", 400))
    patch(idx_path(prefix), OFFSETS + 16, struct.pack("<q", 7))
    with pytest.raises(DataError) as caught:
        verify(prefix).raise_if_bad()
    assert "byte 20:" in str(caught.value) and f"byte {OFFSETS + 16}:" in str(caught.value)


def test_missing_files_and_foreign_sidecars(prefix):
    meta = json.loads(meta_path(prefix).read_text())
    meta_path(prefix).write_text(json.dumps({**meta, "tokens": 5, "documents": 7}))
    assert [(f.expected, f.found) for f in verify(prefix).faults] == [("6", "7"), ("162", "5")]
    bin_path(prefix).unlink()
    (fault,) = verify(prefix).faults
    assert str(fault) == f"{bin_path(prefix)}: the file: expected a regular file, found none"


def test_every_flipped_bit_is_found(prefix):
    """Anywhere in the pair."""
    r = random.Random(5)
    whole = {path: path.read_bytes() for path in (bin_path(prefix), idx_path(prefix))}
    for _ in range(200):
        path = r.choice(list(whole))
        bit = r.randrange(8 * len(whole[path]))
        damaged = bytearray(whole[path])
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        faults = verify(prefix).faults
        assert faults and any(f.file == path for f in faults), (path, bit)
        path.write_bytes(whole[path])
    assert not verify(prefix).faults


def test_a_flipped_bit_of_a_large_file_is_narrowed_down(tmp_path, monkeypatch):
    monkeypatch.setattr(block_hashes, "LEAF_BYTES", 64)
    monkeypatch.setattr(block_hashes, "MOST_BLOCKS", 8)
    with IndexedWriter(tmp_path / "c", vocab_size=300) as writer:
        for i in range(50):
            writer.add_document(np.full(37, i))
        writer.describe(CorpusMeta(tokenizer="byte", vocab_size=300, eod_id=256))
    size = os.path.getsize(bin_path(tmp_path / "c"))
    meta = json.loads(meta_path(tmp_path / "c").read_text())
    width = meta["bin_block_bytes"]
    assert len(meta["bin_blocks"]) // 16 <= 8 and width * 8 >= size > width * 3
    for byte in (0, 1000, size - 1):
        patch(bin_path(tmp_path / "c"), byte, bytes([bin_path(tmp_path / "c").read_bytes()[byte] ^ 1]))
        (fault,) = [f for f in verify(tmp_path / "c").faults if "outside" not in f.what]
        assert fault.byte <= byte < fault.byte + width
        patch(bin_path(tmp_path / "c"), byte, bytes([bin_path(tmp_path / "c").read_bytes()[byte] ^ 1]))


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 512, 513, 4000])
def test_block_hashes_do_not_depend_on_how_the_stream_is_cut(monkeypatch, size):
    monkeypatch.setattr(block_hashes, "LEAF_BYTES", 64)
    monkeypatch.setattr(block_hashes, "MOST_BLOCKS", 8)
    data = bytes(i * 7 % 251 for i in range(size))
    made = set()
    for step in (1, 13, 64, 5000):
        hashes = BlockHashes()
        for at in range(0, size, step):
            hashes.update(data[at:at + step])
        made.add((hashes.hexdigest(), hashes.block_bytes, hashes.total.hexdigest()))
    assert len(made) == 1
    text, width, _ = made.pop()
    assert len(text) // 16 == -(-size // width)
