"""The stateless permutation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.data.dataset import derive, permute, sample_at

SIZES = [1, 2, 3, 4, 5, 7, 13, 97, 101, 997, 65537] + [2**k + d for k in (3, 6, 9, 12, 16) for d in (-1, 0, 1)]


@pytest.mark.parametrize("n", SIZES)
def test_bijection(n):
    image = permute(np.arange(n), n, derive(1234, 0))
    assert np.array_equal(np.sort(image), np.arange(n))


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_bijection_of_any_size_and_key(n, key):
    assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 2**62), key=st.integers(0, 2**64 - 1), seed=st.integers(0, 2**31))
def test_large_sizes_stay_inside_and_apart(n, key, seed):
    x = np.unique(np.random.default_rng(seed).integers(0, n, 64))
    image = permute(x, n, key)
    assert image.min() >= 0 and image.max() < n and len(np.unique(image)) == len(x)


def test_values_do_not_change():
    # Fixed for ever: a run that resumes must see the order that it began with.
    assert permute(np.arange(16), 16, 5).tolist() == [13, 7, 8, 6, 10, 11, 14, 9, 12, 3, 4, 2, 0, 15, 1, 5]
    assert [sample_at(1234, k, 1000)[1] for k in (0, 1, 999, 1000)] == [91, 449, 863, 437]


def test_depends_on_seed_and_epoch():
    n = 500
    orders = [tuple(sample_at(seed, epoch * n + i, n)[1] for i in range(n)) for seed in (1, 2) for epoch in (0, 1)]
    assert len(set(orders)) == 4
    assert all(sorted(order) == list(range(n)) for order in orders)
    assert sample_at(1, 3 * n + 7, n)[0] == 3


def test_looks_random():
    n = 10007
    image = permute(np.arange(n), n, derive(7, 0))
    assert abs(np.corrcoef(np.arange(n), image)[0, 1]) < 0.05
    assert np.mean(np.abs(np.diff(image))) == pytest.approx(n / 3, rel=0.05)
    assert np.count_nonzero(image == np.arange(n)) < 10


def test_outside_is_refused():
    with pytest.raises(ValueError):
        permute(np.array([5]), 5, 0)
