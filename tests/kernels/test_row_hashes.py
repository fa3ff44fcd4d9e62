"""Hashes of memory by rows, against Python's integers, numpy's and torch's ops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_port.core.config.schema import BackendConfig
from megatron_port.core.dist.row_hashes import ROW, RowHashes
from megatron_port.ext.health.state_check import hashes_of
from megatron_port.ext.kernels.ops.hashes import OwnRowHashes

WORDS = (torch.int32, torch.int16, torch.int8)
SIZES = (1, 3, 15, 16, 17, ROW - 1, ROW, ROW + 5, 9 * ROW + 4095, 200 * ROW + 33)
"""Less than a piece, whole pieces and some words behind them, whole rows, more rows than the emulated GPU has warps."""


def _words(count: int, dtype: torch.dtype) -> torch.Tensor:
    g = torch.Generator().manual_seed(count)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, (count,), dtype=dtype, generator=g)


@pytest.mark.parametrize("dtype", WORDS)
def test_the_bits_are_those_of_numpys_integers_and_of_torchs_ops(device: torch.device, dtype: torch.dtype) -> None:
    own, plain = OwnRowHashes(device), RowHashes(torch.device("cpu"))
    factors = plain.factors.numpy().astype(np.uint64)
    for count in SIZES:
        words = _words(count, dtype)
        found = own.of_words(words.to(device)).cpu()
        assert torch.equal(found, plain.of_words(words))
        wide = np.zeros(-(-count // ROW) * ROW, np.uint64)
        wide[:count] = words.numpy().astype(np.int64).astype(np.uint64)
        want = (wide.reshape(-1, ROW) * factors).sum(axis=1, dtype=np.uint64)
        assert found.numpy().astype(np.uint64).tolist() == want.tolist()


def test_a_row_is_the_sum_of_pythons_integers(device: torch.device) -> None:
    words, own = _words(ROW + 10, torch.int32), OwnRowHashes(device)
    factors, values = own.factors.tolist(), words.tolist()
    for row, got in enumerate(own.of_words(words.to(device)).tolist()):
        want = sum(f * w for f, w in zip(factors, values[row * ROW : (row + 1) * ROW])) % (1 << 64)
        assert got % (1 << 64) == want


def test_memory_that_is_not_aligned(device: torch.device) -> None:
    """Tensors that begin anywhere in a flat buffer."""
    for dtype in WORDS:
        words = _words(3 * ROW, dtype)
        whole = words.to(device)
        for start in (1, 2, 3, 4, 5):
            found = OwnRowHashes(device).of_words(whole[start:])
            assert torch.equal(found.cpu(), RowHashes(torch.device("cpu")).of_words(words[start:]))


def test_one_changed_bit_shows_whatever_the_dtype(device: torch.device) -> None:
    own = OwnRowHashes(device)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        flat = torch.zeros(2 * ROW + 8, device=device).to(dtype)
        before = own(flat)
        flat[-1] = 1
        assert (own(flat) != before).tolist() == [False] * (len(before) - 1) + [True]


def test_out_is_filled_and_nothing_is_hashed_of_nothing(device: torch.device) -> None:
    own, words = OwnRowHashes(device), _words(2 * ROW, torch.int32).to(device)
    out = torch.zeros(2, dtype=torch.int64, device=device)
    assert own.of_words(words, out) is out and torch.equal(out, own.of_words(words))
    assert own.of_words(words[:0]).numel() == 0


def test_refusals(device: torch.device) -> None:
    own, words = OwnRowHashes(device), _words(20, torch.int32).to(device)
    for broken, text in (((words.float(),), "int32, int16 or int8"), ((words[::2],), "not contiguous"),
                         ((words, own.factors[:2]), "out")):
        with pytest.raises(RuntimeError, match=text):
            own.of_words(*broken)


def test_opcheck(device: torch.device) -> None:
    out = torch.zeros(1, dtype=torch.int64, device=device)
    words = _words(20, torch.int32).to(device)
    torch.library.opcheck(torch.ops.megatron_port.row_hashes_, (out, words, OwnRowHashes(device).factors))


def test_a_run_takes_them_unless_own_kernels_are_off() -> None:
    cpu = torch.device("cpu")
    assert type(hashes_of(BackendConfig())(cpu)) is OwnRowHashes
    assert type(hashes_of(BackendConfig(own_kernels="off"))(cpu)) is RowHashes
