"""Stateless sample order: the k-th training sample is a function of (seed, k).

Each epoch is a permutation of the samples, keyed by (seed, epoch), evaluated at
one point without storing it: a Feistel network over the rectangle a × b with
a = ⌈√n⌉, b = ⌈n/a⌉, whose few surplus points are walked through until one falls
below n (Black & Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The
round function is the finaliser of SplitMix64. Integer arithmetic only, so the order
is the same on every machine; changing it breaks resumption of old runs.
"""

from __future__ import annotations

from math import isqrt

import numpy as np

ROUNDS = 8
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser on uint64, elementwise (Steele, Lea & Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: np.ndarray = x ^ (x >> np.uint64(31))
    return found


def derive(*values: int) -> int:
    """Return a 64-bit key from integers; their order matters."""
    state = 0
    for value in values:
        state = ((state ^ (value & MASK)) + GOLDEN) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state


def _round_trip(x: np.ndarray, a: int, b: int, keys: np.ndarray) -> np.ndarray:
    left: np.ndarray = x // np.uint64(b)
    right: np.ndarray = x % np.uint64(b)
    for i, key in enumerate(keys):
        if i % 2 == 0:
            left = (left + mix(right ^ key) % np.uint64(a)) % np.uint64(a)
        else:
            right = (right + mix(left ^ key) % np.uint64(b)) % np.uint64(b)
    found: np.ndarray = left * np.uint64(b) + right
    return found


def permute(indices: np.ndarray, n: int, key: int) -> np.ndarray:
    """Apply the permutation of [0, n) given by ``key`` to ``indices`` (integers in [0, n)); return int64.

    O(1) memory per index, n up to 2^62.
    """
    x = np.atleast_1d(np.asarray(indices)).astype(np.uint64)
    if n < 1 or (x.size and int(x.max()) >= n):
        raise ValueError(f"indices must lie in [0, {n})")
    root = isqrt(n)
    a = root if root * root == n else root + 1
    b = -(-n // a)
    keys = np.array([derive(key, i) for i in range(ROUNDS)], dtype=np.uint64)
    x = _round_trip(x, a, b, keys)
    outside = np.flatnonzero(x >= n)
    while outside.size:
        x[outside] = _round_trip(x[outside], a, b, keys)
        outside = outside[x[outside] >= n]
    return x.astype(np.int64)


def sample_at(seed: int, global_sample: int, n: int) -> tuple[int, int]:
    """Return (epoch, index in [0, n)) of the ``global_sample``-th sample of a run over n samples."""
    epoch, offset = divmod(global_sample, n)
    return epoch, int(permute(np.array([offset]), n, derive(seed, epoch))[0])
