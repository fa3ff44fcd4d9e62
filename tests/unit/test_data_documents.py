"""Where documents start in a sample: from the index alone, alike on every stage, whatever the order and the layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.config.checks import problems
from megatron_port.core.config.schema import BatchConfig, DataConfig, ModelConfig, RunConfig, TrainingConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.dataset import BlendedDataset, GPTDataset, Sample, SyntheticDataset, document_starts
from megatron_port.core.data.indexed import CorpusMeta, IndexedDataset
from megatron_port.core.data.loader import build_loaders
from megatron_port.core.dist.positions import SequencePartition
from megatron_port.core.errors import DataError
from megatron_port.ext.context.division import divide
from megatron_port.ext.corpora.document_length import document_length, with_document_length
from megatron_port.ext.corpora.index_cache import IndexCache
from megatron_port.ext.corpora.megatron_order import MegatronGPTDataset
from megatron_port.ext.corpora.plugin_source import CheckedDataset
from megatron_port.ext.corpora.writer import IndexedWriter

LENGTHS = st.lists(st.sampled_from((0, 1, 1, 2, 3, 7, 8, 9, 30)), min_size=1, max_size=25)


def corpus(path: Path, lengths: list[int]) -> IndexedDataset:
    """Token i of the stream is i, so that a sample's tokens say where they come from."""
    position = 0
    with IndexedWriter(path, vocab_size=60000) as writer:
        for length in lengths:
            writer.add_document(np.arange(position, position + length))
            position += length
        writer.describe(CorpusMeta(tokenizer="byte", vocab_size=60000, eod_id=-1))
    return IndexedDataset(path)


def starts_by_tokens(tokens: np.ndarray, lengths: list[int]) -> list[int]:
    """What a reader of the tokens would say: a document starts where the number of the document or the run of token
    numbers breaks off."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    found, start = [], 0
    for i, (token, before) in enumerate(zip(tokens[:-1], [tokens[0] - 1, *tokens[:-2]])):
        if i and (token != before + 1 or owner[token] != owner[before]):
            start = i
        found.append(start)
    return found


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, seq=st.integers(1, 12), seed=st.integers(0, 9))
def test_starts_are_those_of_the_tokens(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq: int,
                                        seed: int) -> None:
    if sum(lengths) <= seq:
        lengths = [*lengths, seq + 1]
    folder = tmp_path_factory.mktemp("c")
    data = corpus(folder / "c", lengths)
    stateless = GPTDataset(data, seq_length=seq, vocab_size=60000, documents=True)
    megatron = MegatronGPTDataset(data, (0, len(lengths)), seq_length=seq, vocab_size=60000, num_samples=20,
                                  seed=seed, cache=IndexCache(folder / "cache"), documents=True)
    for dataset in (stateless, megatron, BlendedDataset([stateless, stateless], [1.0, 2.0])):
        for k in range(min(len(dataset), 20)):
            for made, alone in ((dataset.sample(k), dataset.starts(k)),
                                (dataset.draw(seed, k), dataset.drawn_starts(seed, k))):
                assert made.starts is not None and alone is not None and made.starts.dtype == np.int32
                assert made.starts.tolist() == alone.tolist() == starts_by_tokens(made.tokens, lengths)


def test_a_megatron_order_repeats_a_document_as_another_one(tmp_path: Path) -> None:
    data = corpus(tmp_path / "c", [5])
    dataset = MegatronGPTDataset(data, (0, 1), seq_length=4, vocab_size=60000, num_samples=6, seed=0,
                                 cache=IndexCache(tmp_path / "cache"), documents=True)
    for k in range(6):
        sample = dataset.draw(0, k)
        assert sample.starts is not None
        assert sample.starts.tolist() == starts_by_tokens(sample.tokens, [5])


def test_edges_of_a_sample() -> None:
    for edges, want in (([], [0] * 4), ([0], [0] * 4), ([1], [0, 1, 1, 1]), ([3], [0, 0, 0, 3]), ([4], [0] * 4),
                        ([-2, 9], [0] * 4), ([0, 1, 1, 2, 3, 4], [0, 1, 2, 3])):
        assert document_starts(np.array(edges, dtype=np.int64), 4).tolist() == want


def test_synthetic_documents() -> None:
    dataset = SyntheticDataset(seq_length=64, vocab_size=100, seed=3, documents=True)
    plain = SyntheticDataset(seq_length=64, vocab_size=100, seed=3)
    counts = []
    for k in range(50):
        sample = dataset.sample(k)
        assert np.array_equal(sample.tokens, plain.sample(k).tokens) and plain.sample(k).starts is None
        alone = dataset.drawn_starts(0, k)
        assert sample.starts is not None and alone is not None and np.array_equal(sample.starts, alone)
        counts.append(len(set(sample.starts.tolist())))
    assert 3.5 < np.mean(counts) < 6.5 and min(counts) < max(counts)


def run_config(tmp_path: Path, **data: object) -> RunConfig:
    corpora = [str(tmp_path / name) for name in ("a", "b")]
    for name, lengths in zip(corpora, ([5, 1, 1, 9, 30, 2] * 8, [8, 7, 3, 20] * 6)):
        corpus(Path(name), lengths)
    return RunConfig(
        seed=3, model=ModelConfig(seq_length=8, vocab_size=60000), output_dir=str(tmp_path / "out"),
        batch=BatchConfig(micro_batch_size=2, global_batch_size=8), training=TrainingConfig(steps=5, eval_batches=2),
        data=DataConfig(**{  # type: ignore[arg-type]
            "train": tuple(corpora), "split": (0.8, 0.2, 0.0), "attention_documents": "within", **data,
        }),
    )


def by_sample(steps: list[list[MicroBatch]]) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for step in steps:
        for batch in step:
            assert batch.document_starts is not None and batch.document_starts.dtype == torch.int32
            rows.update(zip(batch.sample_ids, batch.document_starts.tolist(), strict=True))
    return rows


@pytest.mark.parametrize("order", ["stateless", "megatron"])
def test_every_stage_and_replica_is_told_the_same(tmp_path: Path, order: str) -> None:
    run = run_config(tmp_path, order=order)

    def told(dp: int, tokens: bool, labels: bool) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        training, evaluation = {}, {}
        for rank in range(dp):
            made = build_loaders(run, dp_rank=rank, dp_size=dp, need_tokens=tokens, need_labels=labels)
            assert made.valid is not None
            training |= by_sample([made.train.step(8, 24)])
            evaluation |= by_sample(list(made.valid.eval_batches(10**6, 8)))
        return training, evaluation

    first = told(1, True, True)
    assert len({tuple(row) for row in first[0].values()}) > 3
    assert sorted(first[0]) == list(range(8, 32)) and any(max(row) > 0 for row in first[1].values())
    for dp, tokens, labels in ((1, True, False), (1, False, False), (2, False, True), (4, False, False)):
        for ours, theirs in zip(told(dp, tokens, labels), first, strict=True):
            assert {k: ours[k] for k in theirs} == theirs  # beyond: samples that only fill up the last batch
            assert all(set(ours[k]) == {0} for k in ours if k not in theirs)


def test_a_rank_with_two_runs_of_positions_gets_all_starts(tmp_path: Path) -> None:
    """Its queries are of its positions, its keys of others too."""
    run = run_config(tmp_path)
    partition = SequencePartition(divide(2, "zigzag"), 1)
    whole = build_loaders(run, dp_rank=0, dp_size=1, need_tokens=False, need_labels=False)
    part = build_loaders(run, dp_rank=0, dp_size=1, need_tokens=False, need_labels=False, partition=partition)
    for mine, other in zip(part.train.step(0, 8), whole.train.step(0, 8), strict=True):
        assert mine.document_starts is not None and other.document_starts is not None
        assert torch.equal(mine.document_starts, other.document_starts)


def test_across_tells_nothing(tmp_path: Path) -> None:
    run = run_config(tmp_path, attention_documents="across")
    for reads in (True, False):
        made = build_loaders(run, dp_rank=0, dp_size=1, need_tokens=reads, need_labels=reads)
        assert all(b.document_starts is None for b in made.train.step(0, 8))


def test_settings_that_contradict_documents(tmp_path: Path) -> None:
    run = run_config(tmp_path, attention_documents="across", position_reset=True)
    (problem,) = problems(run)
    assert "data.position_reset" in problem and "'within'" in problem
    rope = replace(run, model=replace(run.model, position_embedding="rope"), data=replace(
        run.data, attention_documents="within"))
    problem = problems(rope)[-1]
    assert "'rope'" in problem and "leave it out" in problem


class Source:
    """A plugin's dataset that returns what it was made with."""

    def __init__(self, given: Sample | np.ndarray, masked: bool = False) -> None:
        self.given, self.masked = given, masked

    def __len__(self) -> int:
        return 3

    def sample(self, index: int) -> Sample | np.ndarray:
        return self.given

    def draw(self, seed: int, k: int) -> Sample | np.ndarray:
        return self.given


def test_documents_of_a_plugins_source() -> None:
    tokens, counted = np.arange(5), np.array([True, False, True, True])

    def made(given: Sample | np.ndarray, *, documents: bool = True, masked: bool = False) -> CheckedDataset:
        return CheckedDataset(Source(given, masked), "here", seq_length=4, vocab_size=9, documents=documents)

    starts = np.array([0, 0, 2, 3], dtype=np.int32)
    for dataset in (made(Sample(tokens, starts)), made(Sample(tokens, starts, counted), masked=True)):
        for found in (dataset.starts(1), dataset.drawn_starts(0, 1), dataset.sample(1).starts):
            assert found is not None and np.array_equal(found, starts)
    assert made(Sample(tokens, starts), documents=False).sample(0).starts is None
    whole = made(tokens).starts(0)
    assert whole is not None and whole.dtype == np.int32 and not whole.any()
    for wrong in ([0, 0, 1, 3], [1, 1, 2, 3], [0, 2, 2, 3]):
        with pytest.raises(DataError, match="each position has that of its own document"):
            made(Sample(tokens, np.array(wrong, dtype=np.int32))).sample(0)
    with pytest.raises(DataError, match=r"starts is int64 \(4,\); it must be a numpy array, int32"):
        made(Sample(tokens, starts.astype(np.int64))).sample(0)
    with pytest.raises(DataError, match="must then have masked = True"):
        made(Sample(tokens, starts, counted)).sample(0)


def test_the_length_of_a_tokens_document(tmp_path: Path) -> None:
    """Σ ℓ² ÷ Σ ℓ of the parts within samples, from the index of what the run draws; a given one stands."""
    corpus(tmp_path / "c", [5, 3, 16, 9])
    run = RunConfig(
        model=ModelConfig(seq_length=8, vocab_size=60000), training=TrainingConfig(steps=4),
        batch=BatchConfig(global_batch_size=1),
        data=DataConfig(train=(str(tmp_path / "c"),), split=(1.0, 0.0, 0.0), attention_documents="within"),
    )
    known = with_document_length(run)  # 5 + 3, 8, 8, 8 of 33 tokens
    assert known.data.document_length == (25 + 9 + 3 * 64) / 32
    dataset = build_loaders(run, dp_rank=0, dp_size=1, need_tokens=False, need_labels=False).train.dataset
    assert document_length(run, dataset) == known.data.document_length
    given = replace(run, data=replace(run.data, document_length=3.0))
    assert with_document_length(given) is given and document_length(given, dataset) == 3.0
    across = replace(run, data=replace(run.data, attention_documents="across"))
    assert with_document_length(across) is across and document_length(across, dataset) == 0.0
    away = replace(run, data=replace(run.data, train=(str(tmp_path / "gone"),)))
    assert with_document_length(away) is away
