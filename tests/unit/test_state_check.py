"""Hashes of the state between updates: every single bit counts and is named, several words are still found."""

from __future__ import annotations

import pytest
import torch

from megatron_port.core.dist.row_hashes import ROW, RowHashes
from megatron_port.core.optim.state_watch import StateEntry, StateTensor
from megatron_port.ext.health.state_check import StateCheck, chosen_interval

CPU = torch.device("cpu")


def state(dtype: torch.dtype, numel: int = 3 * ROW + 128, kind: str = "weight") -> StateTensor:
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype)
    return StateTensor(kind, flat, (
        StateEntry(0, 100, "a", 0), StateEntry(128, numel - 320, "b", 7), StateEntry(numel - 128, 90, "c", 0),
    ))


def flip(flat: torch.Tensor, element: int, bit: int) -> None:
    words = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    top = 8 * flat.element_size() - 1
    words[element] ^= -(1 << top) if bit == top else 1 << bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_one_flipped_bit_is_found_and_named(dtype: torch.dtype) -> None:
    t = state(dtype)
    check = StateCheck(CPU, 1)
    assert check.begin()
    check.record([t])
    check.verify()
    assert int(check.differing) == 0 and check.damage() is None
    seen, last = 0, t.flat.numel() - 128
    for element, name, index in ((0, "a", 0), (99, "a", 99), (128, "b", 7), (2 * ROW + 1, "b", 2 * ROW - 120),
                                 (last + 89, "c", 89)):
        for bit in range(8 * dtype.itemsize):
            flip(t.flat, element, bit)
            check.verify()
            seen += 1
            assert int(check.differing) == seen
            assert str(check.damage()) == f"the weight of {name} (element {index}, bit {bit})"
            flip(t.flat, element, bit)
    check.verify()
    assert int(check.differing) == seen and check.damage() is None


def test_several_words_and_several_tensors_are_found() -> None:
    weight, moment = state(torch.float32), state(torch.float32, kind="exp_avg")
    check = StateCheck(CPU, 1)
    check.begin()
    check.record([weight, moment])
    # What a plain sum or an exclusive or would miss: two equal changes, a swap.
    moment.flat[[200, 201]] = moment.flat[[201, 200]]
    check.verify()
    assert str(check.damage()) == "the exp_avg of a or b"
    weight.flat[5 + ROW] += 1.0
    weight.flat[5 + 2 * ROW] += 1.0
    check.verify()
    text = str(check.damage())
    assert text.startswith("the weight of b (element") and "3 blocks of 16384 bytes are damaged in all" in text
    padded = StateTensor("fp32 master", torch.zeros(192), (StateEntry(0, 64, "a", 0),))
    check = StateCheck(CPU, 1)
    check.begin()
    check.record([padded])
    padded.flat[100] = 1.0
    check.verify()
    assert str(check.damage()) == "the fp32 master of padding behind a"


def test_odd_tails_and_lengths_are_hashed_whole() -> None:
    rows = RowHashes(CPU)
    for numel in (1, 2, 3, ROW - 1, ROW, ROW + 1, 40 * ROW + 5):
        for dtype in (torch.bfloat16, torch.float32):
            flat = torch.zeros(numel, dtype=dtype)
            before = rows(flat)
            flat[-1] = 1.0
            assert len(before) >= 1 and int((rows(flat) != before).sum()) == 1


def test_the_oracle_of_the_hash() -> None:
    """Against Python's own integers."""
    rows, flat = RowHashes(CPU), torch.randn(ROW + 10, generator=torch.Generator().manual_seed(2))
    words = flat.view(torch.int32).tolist()
    factors = rows.factors.tolist()
    assert all(f % 2 for f in factors) and len(set(factors)) == ROW
    for row, got in enumerate(rows(flat).tolist()):
        want = sum(f * w for f, w in zip(factors, words[row * ROW : (row + 1) * ROW])) % (1 << 64)
        assert got % (1 << 64) == want


def test_the_interval_counts_updates_and_what_is_forgotten_is_not_checked() -> None:
    check = StateCheck(CPU, 3)
    assert [check.begin() for _ in range(6)] == [False, False, True, False, False, True]
    assert [StateCheck(CPU, 0).begin() for _ in range(3)] == [False] * 3
    t = state(torch.float32)
    check.record([t])
    check.begin()
    t.flat[0] += 1
    check.verify()
    assert int(check.differing) == 0


def test_the_interval_that_is_chosen() -> None:
    """On a GPU about 1 % of a step, whatever its tokens; never less than every update where that is cheap."""
    gpu = torch.device("cuda")
    assert [chosen_interval(n, tokens=1, device=gpu) for n in (0, 1, 7)] == [0, 1, 7]
    assert chosen_interval(-1, tokens=1, device=CPU) == 1
    assert [chosen_interval(-1, tokens=n, device=gpu) for n in (1 << 20, 750_000, 8192)] == [1, 1, 92]


def test_what_was_found_stays_readable_after_the_update_that_follows() -> None:
    """Engines hash the new state before the host learns of damage to the old one."""
    check, t = StateCheck(CPU, 1), state(torch.float32)
    check.begin()
    check.record([t])
    flip(t.flat, 130, 22)
    check.verify()
    t.flat.mul_(0.5)
    check.begin()
    check.record([t])
    assert int(check.differing) == 1 and str(check.damage()) == "the weight of b (element 9, bit 22)"
