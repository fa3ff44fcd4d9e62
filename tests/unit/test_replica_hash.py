"""The hash of the replica check: every single bit counts, positions count, memory is bounded."""

from __future__ import annotations

import pytest
import torch

import megatron_port.ext.health.replicas as replicas
from megatron_port.core.dist.row_hashes import odd_ones
from megatron_port.ext.health.replicas import BitsHash

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> BitsHash:
    """Chunks of 8 words, so that small tensors have several and a rest."""
    monkeypatch.setitem(replicas.CHUNK_WORDS, "cpu", 8)
    return BitsHash(torch.device("cpu"))


def flipped(x: torch.Tensor, index: int, bit: int) -> torch.Tensor:
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    out = x.clone()
    words = out.view(-1).view(width)
    value = 1 << bit
    top = 8 * x.element_size()
    words[index] ^= value - (1 << top) if bit == top - 1 else value
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_every_element_changes_it(small: BitsHash, dtype: torch.dtype) -> None:
    x = torch.randn(21, generator=torch.Generator().manual_seed(1)).to(dtype)
    seen = {int(small(x))}
    for index in range(len(x)):
        for bit in range(8 * x.element_size()):
            seen.add(int(small(flipped(x, index, bit))))
    assert len(seen) == 1 + len(x) * 8 * x.element_size()


def test_what_cancels_in_a_plain_sum_or_xor_does_not_here(small: BitsHash) -> None:
    ones = torch.ones(64)
    assert int(small(ones)) != int(small(torch.full((64,), 0.5)))
    signs = ones.clone()
    signs[[3, 5]] = -1.0  # two sign bits
    assert int(small(signs)) != int(small(ones))
    far = ones.clone()
    far[[3, 11]] = -1.0  # at the same place of two chunks
    assert int(small(far)) != int(small(ones)) and int(small(far)) != int(small(signs))
    x = torch.arange(64.0)
    assert int(small(x)) != int(small(x.flip(0)))
    swapped = torch.cat([x[8:16], x[:8], x[16:]])
    assert int(small(swapped)) != int(small(x))


def test_equal_bits_are_equal_whatever_the_view(small: BitsHash) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        base = torch.randn(33, generator=torch.Generator().manual_seed(2)).to(dtype)
        odd = base[1:20]  # begins in the middle of a 32-bit word in half precision
        assert int(small(odd)) == int(small(odd.clone()))
        assert int(small(base.view(3, 11))) == int(small(base))
    assert int(small(torch.tensor([0.0]))) != int(small(torch.tensor([-0.0])))
    assert int(small(torch.empty(0))) == 0


def test_chunks_do_not_change_what_is_seen(small: BitsHash) -> None:
    x = torch.randn(1000)
    whole = BitsHash(torch.device("cpu"))
    assert int(whole(x)) == int(whole(x.clone())) and int(small(x)) == int(small(x.clone()))


def test_odd_ones() -> None:
    assert odd_ones([5, 5, 7, 5]) == [2]
    assert odd_ones([7, 5, 5, 5]) == [0]
    assert odd_ones([7, 5]) == [1]
    assert odd_ones([7, 5, 6]) == [1, 2]
    assert odd_ones([7, 5, 5, 7]) == [1, 2]
    assert odd_ones([5, 5]) == []
