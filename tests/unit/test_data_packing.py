"""Packing: no token lost, no document cut that fits, padding that nobody sees, the order exact, the index on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_data_documents import corpus

from megatron_port.core.config.checks import problems
from megatron_port.core.config.schema import BatchConfig, DataConfig, ModelConfig, RunConfig, TrainingConfig
from megatron_port.core.data.indexed import CorpusMeta, IndexedDataset
from megatron_port.core.data.loader import build_loaders
from megatron_port.core.errors import DataError
from megatron_port.ext.corpora.index_cache import IndexCache
from megatron_port.ext.corpora.megatron_order import build_sample_index
from megatron_port.ext.corpora.packing import PADDING, PackedDataset, build_indices, cut, document_splits, first_fit
from megatron_port.ext.corpora.writer import IndexedWriter

LENGTHS = st.lists(st.sampled_from((0, 1, 1, 2, 3, 5, 8, 9, 10, 23, 40)), min_size=1, max_size=40)


def first_fit_one_by_one(lengths: list[int], size: int) -> list[int]:
    """The rule, without anything clever."""
    room: list[int] = []
    found = [0] * len(lengths)
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((b for b, left in enumerate(room) if left >= lengths[item]), len(room))
        if place == len(room):
            room.append(size)
        room[place] -= lengths[item]
        found[item] = place
    return found


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 20).flatmap(lambda size: st.tuples(
    st.lists(st.integers(1, size), min_size=1, max_size=40), st.just(size))))
def test_each_document_goes_into_the_first_sample_with_room(case: tuple[list[int], int]) -> None:
    lengths, size = case
    assert first_fit(np.array(lengths), size).tolist() == first_fit_one_by_one(lengths, size)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, seq=st.integers(1, 12))
@example(lengths=[9, 9, 1], seq=8)  # as long as a sample: its last token is a label only
@example(lengths=[17, 18, 1], seq=8)  # two samples' labels to the token; one more
def test_every_token_and_every_label_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq: int
) -> None:
    if not sum(lengths):
        lengths = [*lengths, 1]
    folder = tmp_path_factory.mktemp("c")
    data = corpus(folder / "c", lengths)
    dataset = PackedDataset(data, first=0, end=len(lengths), seq_length=seq, vocab_size=60000,
                            cache=IndexCache(folder / "cache"))
    owner = np.repeat(np.arange(len(lengths)), lengths)
    tokens: list[int] = []
    labels: list[int] = []
    pieces: dict[int, int] = {}
    for k in range(len(dataset)):
        sample, pieces_here = dataset.sample(k), list(dataset._pieces(k))
        assert sample.starts is not None and sample.counted is not None and sample.tokens.shape == (seq + 1,)
        filled = sum(n for _, n in pieces_here)
        assert (sample.tokens[filled:] == PADDING).all() and not sample.counted[max(filled - 1, 0):].any()
        starts = [*sample.starts.tolist(), None]
        for i in range(min(filled, seq)):
            start = starts[i]
            assert start is not None and owner[sample.tokens[start]] == owner[sample.tokens[i]]
            assert sample.tokens[i] - sample.tokens[start] == i - start, "a document's tokens follow one another"
            last = i + 1 == seq and i + 1 < filled and owner[sample.tokens[i + 1]] == owner[sample.tokens[i]]
            within = starts[i + 1] == start or last
            assert bool(sample.counted[i]) == within, "a label counts where it is of the same document"
        assert set(sample.starts[filled:].tolist()) <= {filled}, "padding is a document of its own"
        tokens += sample.tokens[:filled].tolist()
        labels += sample.tokens[1:][sample.counted].tolist()
        for position, _ in pieces_here:
            pieces[int(owner[position])] = pieces.get(int(owner[position]), 0) + 1
    assert set(tokens) == set(range(sum(lengths)))
    edges = np.cumsum([0, *lengths])
    assert sorted(labels) == sorted(set(range(sum(lengths))) - set(edges.tolist()))
    for i, n in enumerate(lengths):
        assert pieces.get(i, 0) == (0 if n == 0 else max(-(-(n - 1) // seq), 1))


def test_a_long_document_is_cut_with_one_token_in_common() -> None:
    positions, lengths = cut(np.array([0, 9, 9, 26, 44, 45]), 9)
    assert list(zip(positions.tolist(), lengths.tolist())) == [
        (0, 9), (9, 9), (17, 9), (26, 9), (34, 9), (42, 2), (44, 1)]


def test_packing_is_close_to_the_best(tmp_path: Path) -> None:
    """Johnson's bound: 11/9 of the samples that the tokens need at least, and one."""
    random = np.random.default_rng(0)
    lengths = np.minimum(random.geometric(1 / 300, 5000), 2049)
    made = build_indices(np.cumsum([0, *lengths]), 2048)
    fill = lengths.sum() / ((len(made.first) - 1) * 2049)
    assert fill > 0.99


def run_config(tmp_path: Path, **data: object) -> RunConfig:
    names = [str(tmp_path / name) for name in ("a", "b")]
    for name, lengths in zip(names, ([5, 1, 1, 9, 30, 2] * 8, [8, 8, 3, 40] * 6)):
        corpus(Path(name), lengths)
    return RunConfig(
        seed=3, model=ModelConfig(seq_length=8, vocab_size=60000), output_dir=str(tmp_path / "out"),
        batch=BatchConfig(micro_batch_size=2, global_batch_size=8), training=TrainingConfig(steps=9, eval_batches=2),
        data=DataConfig(**{  # type: ignore[arg-type]
            "train": tuple(names), "split": (0.8, 0.2, 0.0), "attention_documents": "within", "packing": "first_fit",
            **data,
        }),
    )


def test_loaders_give_the_same_samples_whatever_the_layout_and_after_a_resume(tmp_path: Path) -> None:
    run = run_config(tmp_path)

    def rows(first: int, dp: int, reads: bool = True) -> dict[int, tuple[list[int], ...]]:
        out = {}
        for rank in range(dp):
            made = build_loaders(run, dp_rank=rank, dp_size=dp, need_tokens=reads, need_labels=reads)
            for batch in made.train.step(first, 8):
                assert batch.labels_masked and batch.document_starts is not None
                read = [] if batch.tokens is None or batch.labels is None or batch.loss_mask is None else [
                    batch.tokens, batch.labels, batch.loss_mask]
                for i, k in enumerate(batch.sample_ids):
                    out[k] = tuple(t[i].tolist() for t in (batch.document_starts, *read))
        return out

    reference = rows(16, 1)
    assert rows(16, 4) == rows(16, 2) == reference == rows(16, 1)
    assert {k: row[:1] for k, row in reference.items()} == rows(16, 2, reads=False)
    assert len(list((tmp_path / "out" / "data_cache").glob("*.npy"))) == 6  # three arrays of two corpora


def test_evaluation_counts_each_sample_once(tmp_path: Path) -> None:
    run = run_config(tmp_path)
    made = build_loaders(run, dp_rank=0, dp_size=1, need_tokens=True, need_labels=True).valid
    assert made is not None
    stored = [made.dataset.sample(k) for k in range(len(made.dataset))]
    want = sorted(label for s in stored if s.counted is not None for label in s.tokens[1:][s.counted].tolist())
    for whole in (4, 6, 40):
        found: list[int] = []
        for step in made.eval_batches(10**6, whole):
            for batch in step:
                assert batch.loss_mask is not None and batch.labels is not None
                found += batch.labels[batch.loss_mask.bool()].tolist()
        assert sorted(found) == want


def test_the_corpus_own_mask_goes_with_the_documents(tmp_path: Path) -> None:
    lengths, random = [4, 6, 3, 20, 1, 5], np.random.default_rng(3)
    mask = random.integers(0, 2, sum(lengths)).astype(np.uint8)
    with IndexedWriter(tmp_path / "c", vocab_size=60000, masked=True) as writer:
        tokens = np.arange(len(mask), dtype=np.uint16)
        writer.add_block(np.array(lengths, dtype=np.int32), tokens.tobytes(), mask.tobytes())
        writer.describe(CorpusMeta(tokenizer="byte", vocab_size=60000, eod_id=-1))
    dataset = PackedDataset(IndexedDataset(tmp_path / "c"), first=0, end=6, seq_length=8, vocab_size=60000,
                            cache=IndexCache(tmp_path / "cache"))
    found = []
    for k in range(len(dataset)):
        sample = dataset.sample(k)
        found += sample.tokens[1:][sample.counted].tolist()
    firsts = {0, *np.cumsum(lengths).tolist()}
    assert sorted(found) == [i for i in np.flatnonzero(mask) if i not in firsts]


def test_splits_are_of_whole_documents(tmp_path: Path) -> None:
    data = corpus(tmp_path / "c", [10, 0, 5, 5, 70, 10])
    assert document_splits(data, (0.2, 0.7, 0.1)) == [(0, 4), (4, 5), (5, 6)]
    assert document_splits(data, (0.9, 0.0, 0.1)) == [(0, 5), (5, 5), (5, 6)]
    with pytest.raises(DataError, match="no documents in this split"):
        PackedDataset(data, first=5, end=5, seq_length=8, vocab_size=9, cache=IndexCache(tmp_path))


def test_the_index_ahead_of_time_and_damaged(tmp_path: Path) -> None:
    run = run_config(tmp_path)
    lines = build_sample_index(run)
    assert len(lines) == 4 and f"train {run.data.train[0]}: " in lines[0] and "% filled" in lines[0]
    path = next((tmp_path / "out" / "data_cache").glob("*-position.npy"))
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    build_sample_index(run)
    assert path.read_bytes() == content


def test_settings_that_contradict_packing(tmp_path: Path) -> None:
    run = run_config(tmp_path)
    assert problems(run) == []
    for change, says in (({"attention_documents": "across"}, "attention_documents = 'within'"),
                         ({"order": "megatron"}, "order 'megatron'"),
                         ({"synthetic": True, "train": ()}, "data.synthetic")):
        (problem,) = problems(replace(run, data=replace(run.data, **change)))
        assert "data.packing" in problem and says in problem


def test_an_id_outside_the_model(tmp_path: Path) -> None:
    corpus(tmp_path / "c", [20])
    dataset = PackedDataset(IndexedDataset(tmp_path / "c"), first=0, end=1, seq_length=8, vocab_size=12,
                            cache=IndexCache(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"position 12: token id 12 is outside"):
        for k in range(len(dataset)):
            dataset.sample(k)
