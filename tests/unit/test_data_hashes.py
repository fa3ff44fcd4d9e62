"""Local corpora are compared with their hashes as they are read: no sample holds a bit that has changed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_port.core.config.schema import DataConfig, RunConfig
from megatron_port.core.data.dataset import GPTDataset
from megatron_port.core.data.indexed import CorpusMeta, IndexedDataset, open_all
from megatron_port.core.data.loader import open_corpora
from megatron_port.core.errors import DataError
from megatron_port.ext.corpora import checked_tokens
from megatron_port.ext.corpora import checked_tokens as hashes
from megatron_port.ext.corpora.checked_tokens import CheckedTokens, TimeLimit
from megatron_port.ext.corpora.writer import IndexedWriter

TOKENS = 40_000


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """(prefix, tokens); in blocks of 64 bytes."""
    monkeypatch.setattr(hashes, "LEAF_BYTES", 64)
    monkeypatch.setattr(hashes, "MOST_BLOCKS", 1 << 20)
    tokens = np.random.default_rng(0).integers(0, 50_000, TOKENS)
    with IndexedWriter(tmp_path / "c", vocab_size=50_000) as writer:
        writer.describe(CorpusMeta(tokenizer="gpt2", vocab_size=50_000, eod_id=-1))
        for part in np.split(tokens, 100):
            writer.add_document(part)
    return tmp_path / "c", tokens


def flip(path, at):
    with open(path, "r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 4]))


def test_no_sample_holds_a_changed_bit(corpus):
    prefix, tokens = corpus
    r = np.random.default_rng(1)
    for at in r.integers(0, 2 * TOKENS, 150):
        flip(f"{prefix}.bin", int(at))
    data = GPTDataset(IndexedDataset(prefix), seq_length=99, vocab_size=50_000)
    refused = wrong = 0
    stored = np.fromfile(f"{prefix}.bin", "<u2")
    for k in r.permutation(len(data)):
        damaged = not np.array_equal(stored[99 * k:99 * k + 100], tokens[99 * k:99 * k + 100])
        wrong += damaged
        try:
            sample = data.sample(int(k)).tokens
        except DataError as error:
            refused += 1
            assert "c.bin: the bytes" in str(error) and "recorded when it was made" in str(error)
        else:
            assert np.array_equal(sample, tokens[99 * k:99 * k + 100])
    assert len(data) == 404 and wrong > 100 and refused >= wrong


@pytest.mark.parametrize("name", ["bin", "idx"])
def test_a_run_does_not_start(corpus, name):
    """The first and the last block, and the index, are checked before the first step."""
    prefix, _ = corpus
    run = dataclasses.replace(RunConfig(), data=DataConfig(train=(str(prefix),)))
    assert open_corpora(run)[0].num_tokens == TOKENS
    flip(f"{prefix}.{name}", 2 * TOKENS - 1 if name == "bin" else 34 + 12 * 50)
    with pytest.raises(DataError, match=rf"c\.{name}: .*recorded when it was made"):
        open_corpora(run)


def test_checks_take_their_share_of_the_time(corpus, monkeypatch):
    """A hundred blocks of 0.1 s are free of charge for 0.5 s, then cost 1 % of the time, and none is forgotten.

    Of several corpora this is the time of all together.
    """
    prefix, _ = corpus
    now = [0.0]
    stored = np.fromfile(f"{prefix}.bin", "<u2")
    meta, limit = IndexedDataset(prefix).meta, TimeLimit(lambda: now[0])
    data, other = (CheckedTokens(prefix, stored, meta, limit) for _ in range(2))
    plain = hashes.block_hash

    def slow(block):
        now[0] += 0.1
        return plain(block)

    monkeypatch.setattr(checked_tokens, "block_hash", slow)

    def read_all():
        before = now[0]
        for at in range(0, 3200, 32):
            assert np.array_equal(data[at:at + 32], stored[at:at + 32])
        return round((now[0] - before) / 0.1)

    assert read_all() in (5, 6, 7) and read_all() == 0
    other[0:TOKENS]
    assert now[0] < 0.8
    assert len({id(c._tokens._limit) for c in open_all([prefix, prefix]) if isinstance(c._tokens, CheckedTokens)}) == 1
    done = 0
    for _ in range(100):
        now[0] += 100
        done += read_all()
    assert 93 <= done <= 95 and now[0] > 9_000


def test_a_corpus_without_hashes_is_read(corpus):
    """Of another program, or with a sidecar of another file, which `data verify` tells."""
    prefix, tokens = corpus
    flip(f"{prefix}.bin", 7)
    prefix.with_name("c.meta.json").unlink()
    data = IndexedDataset(prefix)
    open_corpora(dataclasses.replace(RunConfig(), data=DataConfig(train=(str(prefix),))))
    assert np.array_equal(data.read(4, 500), tokens[4:504])
