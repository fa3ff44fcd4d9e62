"""Counter-based numbers: bits that look random, uniforms that are exact, normals equal to the bit in any slice."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.dist.counter import key_of, normal_from_uniform, random_bits, uniform

N = 1 << 18
KEYS = st.integers(-(1 << 63), (1 << 63) - 1)


def bits(start: int, count: int, key: int, key2: int = 0) -> torch.Tensor:
    return random_bits(torch.arange(start, start + count, dtype=torch.int64), key, key2)


def normals(start: int, count: int, key: int, key2: int = 0) -> torch.Tensor:
    return normal_from_uniform(uniform(bits(start, count, key, key2)))


def as_bits(values: torch.Tensor) -> torch.Tensor:
    """[n, 64] of 0.0 and 1.0."""
    return ((values.unsqueeze(-1) >> torch.arange(64)) & 1).double()


def reference_bits(counter: int, key: int, key2: int) -> int:
    """The mixer in Python's own integers, as unsigned 64 bits."""
    mask, z = (1 << 64) - 1, counter * 0x9E3779B97F4A7C15 + key
    z &= mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z ^= key2 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    z ^= z >> 31
    z = (z ^ z >> 29) * 0xBF58476D1CE4E5B9 & mask
    return z ^ z >> 32


@settings(max_examples=60, deadline=None)
@given(st.integers(0, (1 << 63) - 1), KEYS, KEYS)
def test_bits_are_the_64_bit_mixer(counter: int, key: int, key2: int) -> None:
    """int64 wraps where the definition is modulo 2^64, and shifts are logical."""
    got = int(random_bits(torch.tensor([counter]), key, key2)) % (1 << 64)
    assert got == reference_bits(counter, key, key2)


def test_bits_do_not_change_between_releases() -> None:
    """A change here changes every weight, mask and sample of every run; do it knowingly."""
    assert key_of("weight", 1234, "layers.0.mlp.up.weight") == -5037716763385066682
    assert bits(0, 3, 1, 2).tolist() == [-2513700598174584594, -556523014358765555, 4655631372384052591]
    assert [x.hex() for x in normals(0, 3, 1, 2).tolist()] == [
        "0x1.18e4ccb47c035p+0", "0x1.e0d92085254f1p+0", "-0x1.558293bb6f385p-1",
    ]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 40), st.integers(1, 700), st.data())
def test_any_slice_is_equal_to_the_bit(start: int, count: int, data: st.DataObject) -> None:
    """Vector width, tail handling and neighbours play no part."""
    lo = data.draw(st.integers(0, count - 1))
    hi = data.draw(st.integers(lo + 1, count))
    whole = normals(start, count, 11, 12)
    assert torch.equal(whole[lo:hi], normals(start + lo, hi - lo, 11, 12))
    step = whole.view(-1)[::3]
    again = normal_from_uniform(uniform(random_bits(torch.arange(start, start + count)[::3], 11, 12)))
    assert torch.equal(step, again)


def test_threads_do_not_change_bits() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = normals(5, 1 << 16, 3)
        torch.set_num_threads(2)
        assert torch.equal(one, normals(5, 1 << 16, 3))
    finally:
        torch.set_num_threads(before)


def test_a_key_tensor_broadcasts() -> None:
    keys = torch.tensor([key_of("a"), key_of("b"), -5])
    position = torch.arange(10).view(-1, 1)
    both = random_bits(position, keys.view(1, -1), 9)
    for column, key in enumerate(keys.tolist()):
        assert torch.equal(both[:, column], random_bits(position[:, 0], key, 9))


def test_keys_separate_types_and_boundaries() -> None:
    made = [key_of(*parts) for parts in (("a", "b"), ("ab",), ("a", 1), ("a1",), ("a", "1"), (1, 11), (11, 1), ())]
    assert len(set(made)) == len(made)
    assert all(-(1 << 63) <= key < 1 << 63 for key in made)


def test_uniform_is_exact_and_open() -> None:
    extreme = torch.tensor([0, -1, (1 << 63) - 1, -(1 << 63)])
    got = uniform(extreme).tolist()
    assert got == [2.0**-53, 1 - 2.0**-53, 0.5 - 2.0**-53, 0.5 + 2.0**-53]
    u = uniform(bits(0, N, 77))
    # Standard errors: 1/sqrt(12 n) of the mean, 1/sqrt(180 n) of the variance.
    assert abs(float(u.mean()) - 0.5) < 5 / math.sqrt(12 * N)
    assert abs(float(u.var()) - 1 / 12) < 5 / math.sqrt(180 * N)
    counts = torch.histc(u, bins=256, min=0.0, max=1.0)
    chi2 = float(((counts - N / 256).square() / (N / 256)).sum())
    assert abs(chi2 - 255) < 6 * math.sqrt(2 * 255), chi2


def test_as241_is_the_normal_quantile() -> None:
    """Against torch.special.ndtri (Cephes), over the middle, both tails and the far tails."""
    tail = torch.logspace(-16, math.log10(0.08), 4000, dtype=torch.float64)
    u = torch.cat((torch.linspace(0.05, 0.95, 20001, dtype=torch.float64), tail, 1 - tail[tail > 1e-6]))
    got, want = normal_from_uniform(u), torch.special.ndtri(u)
    error = (got - want).abs() / want.abs().clamp(min=1e-3)
    assert float(error.max()) < 2e-14, float(u[error.argmax()])
    assert float(normal_from_uniform(torch.tensor([0.5], dtype=torch.float64))) == 0.0


def test_as241_is_odd_and_rising() -> None:
    # Multiples of 2^-20: u and 1 - u are exact.
    u = torch.arange(1, 1 << 19, 7, dtype=torch.float64) * 2.0**-20
    z = normal_from_uniform(u)
    assert torch.equal(z, -normal_from_uniform(1 - u))
    assert bool((z.diff() > 0).all())
    # Branches meet: |q| = 0.425 between middle and tail, exp(-25) between the tails.
    for edge in (0.075, 0.925, math.exp(-25)):
        near = torch.tensor([edge * (1 - 1e-12), edge * (1 + 1e-12)], dtype=torch.float64)
        low, high = normal_from_uniform(near).tolist()
        assert 0 < high - low < 1e-9, edge


def test_meta_tensors_pass_through() -> None:
    counter = torch.arange(10, device="meta")
    assert normal_from_uniform(uniform(random_bits(counter, 1))).shape == (10,)


@pytest.mark.parametrize("key", [0, 1, -1, key_of("weight", 1234, "embedding.word.weight")])
def test_normals_have_the_right_moments(key: int) -> None:
    z = normals(0, N, key, key_of("second", key))
    # Standard errors of the first four moments of N(0, 1): sqrt(1, 2, 15, 96) / sqrt(n).
    for power, want, error in ((1, 0.0, 1.0), (2, 1.0, math.sqrt(2)), (3, 0.0, math.sqrt(15)), (4, 3.0, math.sqrt(96))):
        assert abs(float((z**power).mean()) - want) < 5 * error / math.sqrt(N), power
    u = torch.special.ndtr(z.sort().values)
    steps = torch.arange(N + 1, dtype=torch.float64) / N
    kolmogorov = max(float((steps[1:] - u).max()), float((u - steps[:-1]).max())) * math.sqrt(N)
    assert kolmogorov < 2.2, kolmogorov


@pytest.mark.parametrize("lag", [1, 2, 64, 768, 1 << 20])
def test_neighbouring_counters_are_independent(lag: int) -> None:
    """Values, magnitudes and single bits, at distances that rows and columns of a matrix make."""
    key, key2 = key_of("weight", 1), key_of("weight2", 1)
    a, b = normals(0, N, key, key2), normals(lag, N, key, key2)
    limit = 5 / math.sqrt(N)
    assert abs(float((a * b).mean())) < limit
    assert abs(float(((a.square() - 1) * (b.square() - 1)).mean())) < 2 * limit
    same = as_bits(bits(0, 1 << 15, key) ^ bits(lag, 1 << 15, key)).mean(0)
    assert float((same - 0.5).abs().max()) < 5.5 * 0.5 / math.sqrt(1 << 15)


@pytest.mark.parametrize("flip", ["counter", "key", "key2"])
def test_one_input_bit_changes_half_of_the_output(flip: str) -> None:
    """Avalanche: counters, keys and second keys that differ in one bit give unrelated streams."""
    counter = torch.arange(4096)
    base = random_bits(counter, 12345, 678)
    for bit in (0, 1, 7, 31, 40, 62):
        other = {
            "counter": lambda m: random_bits(counter ^ m, 12345, 678),
            "key": lambda m: random_bits(counter, 12345 ^ m, 678),
            "key2": lambda m: random_bits(counter, 12345, 678 ^ m),
        }[flip](1 << bit)
        share = as_bits(base ^ other).mean(0)
        assert float((share - 0.5).abs().max()) < 6 * 0.5 / math.sqrt(4096), bit
