"""Splits, samples, blends and synthetic tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.data.dataset import (
    PERIOD,
    BlendedDataset,
    GPTDataset,
    SyntheticDataset,
    checked,
    quantised,
    split_positions,
)
from megatron_port.core.data.indexed import IndexedDataset
from megatron_port.core.errors import DataError
from megatron_port.ext.corpora.writer import IndexedWriter


def corpus(path, lengths, vocab=60000):
    position = 0
    with IndexedWriter(path, vocab_size=vocab) as writer:
        for length in lengths:
            writer.add_document(np.arange(position, position + length) % vocab)
            position += length
    return IndexedDataset(path)


def test_samples_tile_the_stream(tmp_path):
    data = corpus(tmp_path / "c", [50, 30, 21])
    dataset = GPTDataset(data, seq_length=10, vocab_size=60000)
    assert len(dataset) == 10
    assert [dataset.sample(i).tokens.tolist() for i in (0, 9)] == [list(range(11)), list(range(90, 101))]
    drawn = sorted(int(dataset.draw(3, 10 + k).tokens[0]) for k in range(10))
    assert drawn == list(range(0, 100, 10))


def test_an_id_outside_the_model_names_file_and_position(tmp_path):
    dataset = GPTDataset(corpus(tmp_path / "c", [50]), seq_length=10, vocab_size=25)
    dataset.sample(1)
    with pytest.raises(DataError, match=r"c\.bin: position 25: token id 25 .* 25"):
        dataset.sample(2)
    tokens = np.array([0, 24, -1])
    assert checked(tokens[:2], 25, dataset.data, 7) is not None
    with pytest.raises(DataError, match=r"c\.bin: position 9: token id -1 .* 25"):
        checked(tokens, 25, dataset.data, 7)


def test_too_small(tmp_path):
    with pytest.raises(DataError, match=r"10 tokens .* = 11"):
        GPTDataset(corpus(tmp_path / "c", [10]), seq_length=10, vocab_size=100)
    assert len(GPTDataset(corpus(tmp_path / "d", [11]), seq_length=10, vocab_size=100)) == 1


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=20),
       shares=st.tuples(st.floats(0.1, 1), st.floats(0, 1), st.floats(0, 1)), seq=st.integers(1, 40))
def test_splits_are_disjoint_and_cover(tmp_path_factory, lengths, shares, seq):
    data = corpus(tmp_path_factory.mktemp("c") / "c", lengths)
    ranges = split_positions(data, shares, seq)
    pieces = [r for r in ranges if r[1] > r[0]]
    assert all(a[1] <= b[0] for a, b in zip(pieces, pieces[1:]))
    assert sum(hi - lo for lo, hi in ranges) == data.num_tokens or 0 in shares
    for (lo, hi), share in zip(ranges, shares):
        if share * data.num_tokens / sum(shares) >= seq + 3:
            assert hi - lo > seq


def test_split_prefers_document_boundaries(tmp_path):
    many = corpus(tmp_path / "c", [10] * 100)
    assert split_positions(many, (0.984, 0.008, 0.008), 5) == [(0, 980), (980, 990), (990, 1000)]
    one = corpus(tmp_path / "d", [1000])
    assert split_positions(one, (0.9, 0.05, 0.05), 5) == [(0, 900), (900, 950), (950, 1000)]
    assert split_positions(one, (1, 0, 0), 5) == [(0, 1000), (1000, 1000), (1000, 1000)]


@pytest.mark.parametrize("weights", [[1, 1], [0.3, 0.7], [5, 0.01, 2.2, 0.4], [1e-9, 1], [1 / 3, 1 / 3, 1 / 3]])
def test_blend_keeps_its_proportions_at_every_point(weights):
    parts = [SyntheticDataset(seq_length=1, vocab_size=10, seed=i) for i in range(len(weights))]
    blend = BlendedDataset(parts, weights)
    assert blend.period <= PERIOD
    seen = np.zeros(len(weights), int)
    share = np.array(blend.counts) / blend.period
    assert np.abs(share - np.array(weights) / sum(weights)).max() <= len(weights) / PERIOD
    for k in range(3 * min(blend.period, 2000) + 5):
        owner, local = blend.locate(k)
        assert local == seen[owner]
        seen[owner] += 1
        assert np.abs(seen - share * (k + 1)).max() <= len(weights)
    far = blend.period * 10**12 + 17
    assert blend.locate(far)[0] == blend.locate(17)[0]
    assert blend.locate(far)[1] == blend.locate(17)[1] + 10**12 * blend.counts[blend.locate(17)[0]]


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30))
@settings(max_examples=40, deadline=None)
def test_quantised_weights(weights):
    counts = quantised(weights)
    assert min(counts) >= 1 and PERIOD % sum(counts) == 0


def test_blend_faults(tmp_path):
    part = SyntheticDataset(seq_length=1, vocab_size=10, seed=0)
    with pytest.raises(DataError, match="1 weights for 2"):
        BlendedDataset([part, part], [1.0])
    with pytest.raises(DataError, match="above 0"):
        BlendedDataset([part, part], [1.0, 0.0])


def test_blend_epochs_are_permutations(tmp_path):
    parts = [GPTDataset(corpus(tmp_path / name, [length]), seq_length=10, vocab_size=60000)
             for name, length in (("a", 101), ("b", 301))]
    blend = BlendedDataset(parts, [1, 3])
    assert len(blend) == 40
    firsts = [(blend.locate(k)[0], int(blend.draw(5, k).tokens[0])) for k in range(40)]
    assert sorted(firsts) == sorted([(0, 10 * i) for i in range(10)] + [(1, 10 * i) for i in range(30)])


@pytest.mark.parametrize(("sizes", "weights"), [
    ((10, 30), (1, 3)), ((10, 30), (1, 1)), ((7, 12, 31), (7, 12, 31)), ((1, 50), (0.99, 0.01)),
    ((97, 3, 5), (5, 3, 9)),
])
def test_a_blend_holds_each_stored_sample_once(sizes, weights):
    """In the proportions asked for until the first corpus has been used; the rest of the others afterwards."""
    parts = [SyntheticDataset(seq_length=9, vocab_size=60000, seed=i, samples=n) for i, n in enumerate(sizes)]
    blend = BlendedDataset(parts, weights)
    wanted = sorted(part.sample(i).tokens.tolist() for part in parts for i in range(len(part)))
    assert len(blend) == sum(sizes) and sorted(blend.sample(k).tokens.tolist() for k in range(len(blend))) == wanted
    mixed = min(int(n * sum(weights) / w) for n, w in zip(sizes, weights))
    stored = [[part.sample(j).tokens.tolist() for j in range(len(part))] for part in parts]
    first = [next(i for i, rows in enumerate(stored) if blend.sample(k).tokens.tolist() in rows) for k in range(mixed)]
    for i, w in enumerate(weights):
        assert abs(first.count(i) - mixed * w / sum(weights)) <= 1.5
    with pytest.raises(IndexError):
        blend.sample(len(blend))


def test_synthetic_is_reproducible_and_learnable():
    dataset = SyntheticDataset(seq_length=255, vocab_size=1000, seed=3)
    sample = dataset.sample(12345678901).tokens
    same, other = (SyntheticDataset(seq_length=255, vocab_size=1000, seed=seed) for seed in (3, 4))
    assert np.array_equal(sample, same.sample(12345678901).tokens)
    assert not np.array_equal(sample, other.sample(12345678901).tokens)
    assert sample.shape == (256,) and sample.min() >= 0 and sample.max() < 1000
    many = np.stack([dataset.sample(i).tokens for i in range(200)])
    assert 0.85 < np.mean((many[:, 1:] - many[:, :-1]) % 1000 == 1) < 0.9
    starts = many[:, ::8]
    assert np.mean(starts < 250) == pytest.approx(0.5, abs=0.03)
    assert SyntheticDataset(seq_length=2, vocab_size=2, seed=0).sample(0).tokens.max() < 2
