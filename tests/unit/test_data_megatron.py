"""Byte equality with megatron-core, which nobody here wrote."""

from __future__ import annotations

import filecmp
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_port.core.data.indexed import IndexedDataset
from megatron_port.ext.corpora import megatron_order as mo
from megatron_port.ext.corpora.index_cache import IndexCache
from megatron_port.ext.corpora.megatron_order import MegatronGPTDataset
from megatron_port.ext.corpora.verify import verify
from megatron_port.ext.corpora.writer import IndexedWriter


@pytest.fixture(scope="module")
def oracle():
    reason = "megatron-core is not installed (pip install --no-deps megatron-core==0.16.1 einops)"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("megatron.core.datasets.indexed_dataset", reason=reason, exc_type=ImportError)
        from megatron.core.datasets import blended_dataset, gpt_dataset, indexed_dataset
        from megatron.core.datasets.utils import Split
    pytest.importorskip("megatron.core.datasets.helpers_cpp", exc_type=ImportError,
                        reason="this megatron-core has no compiled helpers for this Python")

    return SimpleNamespace(blended=blended_dataset, gpt=gpt_dataset, indexed=indexed_dataset, split=Split)


class FakeTokenizer:
    """What the oracle's configuration asks of a tokenizer."""

    eod = 0
    pad = -1
    vocab_size = 300
    unique_identifiers = {"class": "fake"}  # noqa: RUF012


def corpus(path, lengths, seed=0, vocab=300):
    random = np.random.default_rng(seed)
    with IndexedWriter(path, vocab_size=vocab) as writer:
        for length in lengths:
            writer.add_document(random.integers(0, vocab, length))
    return path


@pytest.mark.parametrize("vocab, dtype", [(300, np.uint16), (65499, np.uint16), (65500, np.int32), (90000, np.int32)])
def test_writer_and_reader_agree(oracle, tmp_path, vocab, dtype):
    random = np.random.default_rng(vocab)
    documents = [random.integers(0, vocab, n) for n in (5, 1, 200, 0, 33)]
    assert oracle.indexed.DType.optimal_dtype(vocab) is dtype
    builder = oracle.indexed.IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=dtype)
    with IndexedWriter(tmp_path / "b", vocab_size=vocab) as writer:
        for document in documents:
            builder.add_document(torch.from_numpy(document), [len(document)])
            writer.add_document(document)
    builder.finalize(str(tmp_path / "a.idx"))
    for suffix in ("bin", "idx"):
        assert filecmp.cmp(tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix}", shallow=False)
    theirs, ours = oracle.indexed.IndexedDataset(str(tmp_path / "b")), IndexedDataset(tmp_path / "a")
    for i, document in enumerate(documents):
        assert np.array_equal(theirs[i], document) and np.array_equal(ours.document(i), document)


def test_reads_documents_of_several_sequences(oracle, tmp_path):
    builder = oracle.indexed.IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.uint16)
    builder.add_document(torch.arange(10), [4, 6])
    builder.add_document(torch.arange(20, 25), [5])
    builder.finalize(str(tmp_path / "a.idx"))
    data = IndexedDataset(tmp_path / "a")
    verify(data.prefix).raise_if_bad()
    assert (data.num_sequences, data.num_documents) == (3, 2)
    assert data.document(0).tolist() == list(range(10)) and data.document(1).tolist() == list(range(20, 25))


def reference(oracle, prefix, first, end, seq_length, num_samples, seed, cache, reset=False):
    config = oracle.gpt.GPTDatasetConfig(
        random_seed=seed, sequence_length=seq_length, split="1,0,0", path_to_cache=str(cache),
        tokenizer=FakeTokenizer(), reset_position_ids=reset, reset_attention_mask=reset, eod_mask_loss=False)
    low = oracle.indexed.IndexedDataset(str(prefix))
    return oracle.gpt.GPTDataset(low, str(prefix), np.arange(first, end, dtype=np.int32), num_samples,
                                 oracle.split.train, config)


# (documents, longest, seq, samples): below one epoch, several, last epoch used to 10 % (kept apart) and to 95 %
CASES = [(40, 50, 16, None), (40, 50, 16, 20), (40, 50, 16, 700), (7, 30, 32, 11), (300, 9, 64, 25), (3, 500, 8, 1000),
         (60, 80, 10, 0.1), (60, 80, 10, 0.95), (60, 80, 10, 0.8), (1, 33, 32, 5)]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_indices_and_samples(oracle, tmp_path, case):
    count, longest, seq, wanted = CASES[case]
    lengths = np.random.default_rng(case).integers(longest if count == 1 else 0, longest + 1, count)
    prefix = corpus(tmp_path / "c", lengths, case)
    first, end = (0, count) if case % 2 == 0 or count == 1 else (1, count - 1)
    tokens = int(lengths[first:end].sum())
    if isinstance(wanted, float):
        wanted = (2 * tokens - 1) // seq + int(wanted * ((tokens - 1) // seq))
    theirs = reference(oracle, prefix, first, end, seq, wanted, 99 + case, tmp_path / "theirs")
    data = IndexedDataset(prefix)
    ours = MegatronGPTDataset(data, (first, end), seq_length=seq, vocab_size=300, num_samples=wanted,
                              seed=99 + case, cache=IndexCache(tmp_path / "ours"))
    made = mo.build_indices(data.lengths, first, end, seq_length=seq, num_samples=wanted, seed=99 + case)
    for name in ("document", "sample", "shuffle"):
        wanted_array, got = getattr(theirs, f"{name}_index"), getattr(made, name)
        assert got.dtype == wanted_array.dtype and got.shape == wanted_array.shape
        assert got.tobytes() == np.ascontiguousarray(wanted_array).tobytes(), name
        assert np.array_equal(getattr(ours.indices, name), got)
    assert len(ours) == len(theirs)
    for k in {0, 1, len(ours) // 2, len(ours) - 1}:
        sample = ours.draw(0, k).tokens
        item = theirs[k]
        assert np.array_equal(sample[:-1], item["tokens"]) and np.array_equal(sample[1:], item["labels"])


def test_documents_start_where_megatron_resets(oracle, tmp_path):
    """It looks for end-of-document tokens, we look into the index."""
    random, seq = np.random.default_rng(2), 12
    lengths = [1, 1, 2, 30, 12, 13, 5, 1, 8, 12]
    with IndexedWriter(tmp_path / "c", vocab_size=300) as writer:
        for length in lengths:
            writer.add_document([*random.integers(1, 300, length - 1), FakeTokenizer.eod])
    theirs = reference(oracle, tmp_path / "c", 0, len(lengths), seq, 40, 7, tmp_path / "theirs", reset=True)
    ours = MegatronGPTDataset(IndexedDataset(tmp_path / "c"), (0, len(lengths)), seq_length=seq, vocab_size=300,
                              num_samples=40, seed=7, cache=IndexCache(tmp_path / "ours"), documents=True)
    row = np.arange(seq)
    for k in range(40):
        starts, item = ours.starts(k), theirs[k]
        assert starts is not None
        assert np.array_equal(row - starts, item["position_ids"])
        seen = (row[None] >= starts[:, None]) & (row[None] <= row[:, None])
        assert np.array_equal(~seen, item["attention_mask"][0])


@pytest.mark.parametrize("weights, size", [([0.3, 0.7], 1000), ([1, 1, 1], 100), ([5.0, 0.01, 2.2, 0.4], 3000),
                                           ([1.0], 10)])
def test_blend_indices(oracle, weights, size):
    from megatron.core.datasets import helpers

    corpus_index, sample_index = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(corpus_index, sample_index, mo.normalized(weights), len(weights), size, False)
    got = mo.build_blend(weights, size)
    assert got[0].tobytes() == corpus_index.tobytes() and got[1].tobytes() == sample_index.tobytes()


@pytest.mark.parametrize("split, count", [("98,1,1", 1216), ("969, 30, 1", 77), ("1,1,1", 10), ("0.7,0.2,0.1", 35)])
def test_split_ranges(oracle, split, count):
    from megatron.core.datasets import blended_megatron_dataset_config as config

    matrix = config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(split))
    theirs = [(int(round(lo * float(count))), int(round(hi * float(count)))) for lo, hi in matrix]
    assert mo.split_ranges([float(x) for x in split.split(",")], count) == theirs


def test_sizes_in_a_blend(oracle):
    from megatron.core.datasets.blended_megatron_dataset_builder import _get_size_per_split_per_dataset as sizes

    for weights, size in (([0.3, 0.7], 1001), ([3.0, 1.0, 0.1], 77777)):
        theirs = [row[0] for row in sizes(mo.normalized(weights), [size], surplus=mo.SURPLUS)]
        assert mo.blend_sizes(weights, size) == theirs


def test_cache_is_used_and_damage_is_mended(tmp_path):
    data = IndexedDataset(corpus(tmp_path / "c", [30, 40, 50]))

    def sample():
        return MegatronGPTDataset(data, (0, 3), seq_length=8, vocab_size=300, num_samples=40, seed=1,
                                  cache=IndexCache(tmp_path / "cache")).draw(0, 11).tokens.tolist()

    first = sample()
    files = sorted((tmp_path / "cache").glob("*.npy"))
    assert len(files) == 3
    stamps = [f.stat().st_mtime_ns for f in files]
    assert sample() == first and [f.stat().st_mtime_ns for f in files] == stamps
    files[0].write_bytes(files[0].read_bytes()[:-3])
    assert sample() == first
    other = MegatronGPTDataset(data, (0, 3), seq_length=8, vocab_size=300, num_samples=40, seed=2,
                               cache=IndexCache(tmp_path / "cache"))
    assert other.indices.shuffle.tolist() != np.load(next(f for f in files if "shuffle" in f.name)).tolist()
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 6


def test_a_whole_blend_through_megatrons_own_builder(oracle, tmp_path):
    """Two corpora, three splits, several epochs: every index array and every sample, byte for byte."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    from megatron_port.core.config.loader import load
    from megatron_port.core.data.loader import build_loaders

    random = np.random.default_rng(3)
    prefixes = [str(corpus(tmp_path / name, random.integers(1, 90, count), seed))
                for name, count, seed in (("a", 60, 1), ("b", 140, 2), ("c", 25, 3))]
    weights, seq, samples = [0.2, 0.5, 0.3], 16, 900
    config = oracle.gpt.GPTDatasetConfig(
        random_seed=1234, sequence_length=seq, split="90,10,0", blend=(prefixes, weights),
        path_to_cache=str(tmp_path / "theirs"), tokenizer=FakeTokenizer(), reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        theirs = BlendedMegatronDatasetBuilder(
            oracle.gpt.GPTDataset, [samples, 20, 0], lambda: True, config).build()[0]
    finally:
        torch.distributed.destroy_process_group()
    run = load(None, [
        f"output_dir={tmp_path}/runs", f"data.train={prefixes}".replace("'", '"'), f"data.weights={weights}",
        "data.split=[0.9, 0.1, 0.0]", "data.order=megatron", f"model.seq_length={seq}", "model.vocab_size=300",
        "seed=1234"]).config
    ours = build_loaders(run, dp_rank=0, dp_size=1, need_tokens=True, need_labels=True, train_samples=samples)
    blend: Any = ours.train.dataset
    corpus_index, sample_index = blend.given
    assert corpus_index.tobytes() == theirs.dataset_index.tobytes()
    assert sample_index.tobytes() == theirs.dataset_sample_index.tobytes()
    for mine, other in zip(blend.datasets, theirs.datasets):
        for name in ("document", "sample", "shuffle"):
            wanted = np.ascontiguousarray(getattr(other, f"{name}_index"))
            assert getattr(mine.indices, name).tobytes() == wanted.tobytes(), name
    for k in (*range(40), 500, samples - 1):
        assert np.array_equal(blend.draw(0, k).tokens[:-1], theirs[k]["tokens"])


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_indices_do_not_depend_on_how_they_are_cut(tmp_path, monkeypatch, chunk):
    lengths = np.random.default_rng(7).integers(0, 40, 60).astype(np.int32)
    case = {"seq_length": 16, "num_samples": 300, "seed": 5}
    whole = mo.build_indices(lengths, 2, 58, **case)  # type: ignore[arg-type]  # numbers by name
    monkeypatch.setattr(mo, "CHUNK", chunk)
    cut = mo.build_indices(lengths, 2, 58, **case)  # type: ignore[arg-type]
    assert all(np.array_equal(getattr(whole, n), getattr(cut, n)) for n in ("document", "sample", "shuffle"))


def test_datatroves_output_is_read(tmp_path):
    pytest.importorskip("datatrove", reason="datatrove is not installed", exc_type=ImportError)
    from datatrove.pipeline.tokens.megatron_tokenizer import MegatronTokenizedFile

    for size, vocab in ((2, 300), (4, 90000)):
        file = MegatronTokenizedFile(str(tmp_path), f"d{size}", token_size=size)
        documents = [np.random.default_rng(n).integers(0, vocab, n).tolist() for n in (5, 1, 70)]
        for document in documents:
            file.write(document)
        file.close()
        data = IndexedDataset(tmp_path / f"d{size}")
        assert [data.document(i).tolist() for i in range(data.num_documents)] == documents
        assert len(verify(data.prefix).checked) == 3
