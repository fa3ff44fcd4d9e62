"""Compressed inputs: all of their streams are read, or the file is refused; nothing of it is lost without a word."""

from __future__ import annotations

import bz2
import gzip
import importlib.util
import lzma
import random
from collections.abc import Callable

import pytest

from megatron_port.core.errors import DataError
from megatron_port.ext.corpora import unpack
from megatron_port.ext.corpora.source_files import ReadOptions, Source
from megatron_port.ext.corpora.sources import Reader

TEXTS = [b'{"text": "one"}\n' * 40, b'{"text": "two"}\n' * 700, b'{"text": "three"}\n']


def zstd(data):
    import zstandard
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


KINDS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress,
         "lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE), "zstd": zstd}


def read(path, packing):
    source = Source(path, "jsonl", "xz" if packing == "lzma" else packing)
    return b"".join(block.payload for block in Reader([source], ReadOptions()).blocks())


@pytest.mark.parametrize("packing", KINDS)
def test_streams_one_after_another(tmp_path, monkeypatch, packing):
    """A changed byte, a cut or more bytes anywhere: an error, or all of the text. Streams may be padded with zeros."""
    if packing == "zstd" and importlib.util.find_spec("zstandard") is None:
        pytest.skip("zstandard is not installed")
    r, path, whole = random.Random(7), tmp_path / "a", b"".join(TEXTS)
    streams = [KINDS[packing](text) for text in TEXTS]
    good = b"".join(streams)
    path.write_bytes(good)
    for size in (1 << 17, 5):
        monkeypatch.setattr(unpack, "READ", size)
        assert read(path, packing) == whole
    if packing != "zstd":
        path.write_bytes(streams[0] + bytes(4) + streams[1] + bytes(8) + streams[2] + bytes(512))
        assert read(path, packing) == whole
    bad = [good + b"not a stream", good + streams[0][:10], good[:-3], good[:len(streams[0]) + 5]]
    for _ in range(60):
        at = r.randrange(len(good)) if r.random() < 0.5 else len(streams[0]) + r.randrange(12)
        bad.append(good[:at] + bytes([good[at] ^ (1 << r.randrange(8))]) + good[at + 1:])
    refused = seen = 0
    for data in bad:
        path.write_bytes(data)
        try:
            # .lzma has no checksum: the text may be another, but not a shorter one that ends with a stream.
            found = read(path, packing)
            assert found == whole or (packing == "lzma" and len(found) >= len(whole))
        except DataError as error:
            refused += 1
            assert str(path) in str(error)
            seen += "what follows the end of a compressed stream" in str(error)
    assert seen >= 1 or packing in ("gzip", "zstd")
    assert refused >= (4 if packing == "lzma" else 40)
