"""Gradients of looked-up rows: sums of each token's rows, whatever their order, added to the named rows alone."""

from __future__ import annotations

import pytest
import torch
from reference import DTYPES
from torch import Tensor

from megatron_port.core.layers.linear import torch_add_rows
from megatron_port.ext.kernels.ops.optimizer import add_rows_

# (rows, columns, table rows): one of each, whole vectors and none, more columns than a block takes at once, runs that
# cross none, one and many multiples of 32, tokens of one kind alone.
SHAPES = [(1, 1, 1), (5, 24, 3), (70, 13, 9), (33, 64, 1), (200, 40, 2), (129, 8, 1000), (64, 2304, 5), (300, 7, 40)]


def _inputs(n: int, cols: int, table: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """A table's sums, tokens and their rows' gradients."""
    g = torch.Generator().manual_seed(n * 10007 + cols)
    tokens = torch.randint(0, table, (n,), generator=g)
    tokens[: n // 2] = tokens[0]  # one that is in half of the rows
    rows = torch.randn(n, cols, generator=g, dtype=torch.float64).to(dtype)
    total = torch.randn(table, cols, generator=g)
    return total.to(device), tokens[torch.randperm(n, generator=g)].to(device), rows.to(device)


def _check(found: Tensor, total: Tensor, tokens: Tensor, rows: Tensor, what: str) -> None:
    exact = total.double().index_add(0, tokens, rows.double())
    size = total.double().abs().index_add(0, tokens, rows.double().abs())
    worst = float(((found.double() - exact).abs() / size.clamp_min(1e-30)).max())
    assert worst < 4e-7, f"{what}: off by {worst:.1e} of the sum of magnitudes"
    named = torch.zeros(len(total), dtype=torch.bool, device=total.device).index_fill(0, tokens, True)
    assert torch.equal(found[~named], total[~named]), f"{what}: rows that no token names have changed"


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_those_of_fp64(device: torch.device, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        total, tokens, rows = _inputs(*shape, dtype, device)
        found, again = total.clone(), total.clone()
        add_rows_(found, tokens, rows)
        add_rows_(again, tokens, rows)
        _check(found, total, tokens, rows, f"{shape}")
        assert torch.equal(found, again), f"{shape}: other bits the second time"


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_torchs_version(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        total, tokens, rows = _inputs(*shape, dtype, torch.device("cpu"))
        found = total.to(torch.promote_types(dtype, torch.float32), copy=True)
        torch_add_rows(found, tokens, rows)
        _check(found.float(), total, tokens, rows, f"{shape}")


def test_memory_that_no_vector_load_fits(device: torch.device) -> None:
    total, tokens, rows = _inputs(70, 16, 5, torch.bfloat16, device)
    whole = torch.zeros(rows.numel() + 1, dtype=rows.dtype, device=device)
    view = whole[1:].view(rows.shape).copy_(rows)
    aligned, other = total.clone(), total.clone()
    add_rows_(aligned, tokens, rows)
    add_rows_(other, tokens, view)
    assert torch.equal(aligned, other)


def test_the_bits_are_those_of_every_library(built: object, device: torch.device) -> None:
    """On a CPU and on warps of 32 and 64 lanes an id's rows are added up in one order."""
    total, tokens, rows = _inputs(200, 40, 3, torch.bfloat16, device)
    found, wanted = total.clone(), total.double()
    add_rows_(found, tokens, rows)
    for token in tokens.unique().tolist():
        begin, sums = int((tokens < token).sum()), torch.zeros(40, device=device)
        of_token = rows[tokens == token].float()
        ends = [0, *range(32 - begin % 32, len(of_token), 32), len(of_token)]
        for first, end in zip(ends, ends[1:]):
            part = torch.zeros(40, device=device)
            for row in of_token[first:end]:
                part = part + row
            sums = sums + part
        wanted[token] = (total[token] + sums).double()
    assert torch.equal(found.double(), wanted)


def test_no_rows(device: torch.device) -> None:
    total = torch.ones(3, 16, device=device)
    add_rows_(total, torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, 16, device=device))
    assert bool((total == 1).all())


def test_opcheck(device: torch.device) -> None:
    total, tokens, rows = _inputs(9, 16, 4, torch.float32, device)
    ids, order = torch.sort(tokens, stable=True)
    torch.library.opcheck(torch.ops.megatron_port.add_rows_, (total, rows, order, ids))


@pytest.mark.parametrize("broken, text", [
    (lambda t, r, o, i: (t.double(), r, o, i), "total has another dtype"),
    (lambda t, r, o, i: (t[:, :-1].contiguous(), r, o, i), "total must be"),
    (lambda t, r, o, i: (t, r, o.int(), i), "order has another dtype"),
    (lambda t, r, o, i: (t, r, o, i[:-1]), "ids has 8 elements, not 9"),
])
def test_refusals(device: torch.device, broken: object, text: str) -> None:
    total, tokens, rows = _inputs(9, 16, 4, torch.float32, device)
    ids, order = torch.sort(tokens, stable=True)
    with pytest.raises(RuntimeError, match=text):
        torch.ops.megatron_port.add_rows_(*broken(total, rows, order, ids))  # type: ignore[operator]
    if device.type == "cpu":
        for wrong, what in ((ids + 4, "no row of the table"), (ids.flip(0), "ascend")):
            with pytest.raises(RuntimeError, match=what):
                torch.ops.megatron_port.add_rows_(total, rows, order, wrong)
