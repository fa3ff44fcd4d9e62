"""Rows of tokens at the places of their experts: the bits of torch's ops, whatever is dropped, empty or poisoned."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from reference import DTYPES
from torch import Tensor

from megatron_port.ext.experts.experts import ExpertOps, torch_experts
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels.choose_experts import own_experts

NAN = float("nan")
# (tokens, k, columns, share of copies dropped): one row and column, whole vectors and none, more than a lane or a chunk
# takes at once, more rows per token than the gradient keeps at once.
SHAPES = [(1, 1, 1, 0.0), (5, 2, 24, 0.3), (37, 8, 130, 0.2), (3, 1, 7, 0.0), (16, 4, 512, 0.5), (9, 12, 2056, 0.1),
          (4, 32, 72, 0.0), (6, 3, 64, 1.0)]


@dataclass
class Case:
    """Tokens x and their sum's gradient, rows y at their experts, and the indices between the two."""

    x: Tensor
    y: Tensor
    grad: Tensor
    source: Tensor
    place: Tensor
    weight: Tensor


def case(tokens: int, k: int, cols: int, dropped: float, dtype: torch.dtype, device: torch.device) -> Case:
    g = torch.Generator().manual_seed(tokens * 10007 + cols)
    copies = torch.randperm(tokens * k, generator=g)
    copies = copies[torch.rand(copies.shape, generator=g) >= dropped]
    place = torch.full((tokens * k,), -1)
    place[copies] = torch.arange(copies.numel())

    def matrix(rows: int) -> Tensor:
        spread = torch.randint(-6, 6, (rows, 1), generator=g).double().exp2()
        return (torch.randn(rows, cols, generator=g, dtype=torch.float64) * spread).to(dtype).to(device)

    weight = torch.rand(tokens, k, generator=g).to(device)
    return Case(matrix(tokens), matrix(copies.numel()), matrix(tokens), (copies // k).to(device),
                place.view(tokens, k).to(device), weight)


def assert_inner_products(found: Tensor, c: Case) -> None:
    """Each within what float sums of so many products may miss, and 0 for what was dropped."""
    rows = c.y.new_zeros((1, c.y.shape[1])) if not len(c.y) else c.y
    products = c.grad.double().unsqueeze(1) * rows.double()[c.place.clamp_min(0)]
    wanted, size = products.sum(-1), products.abs().sum(-1)
    here = c.place >= 0
    assert found.dtype == torch.float32 and bool((found[~here] == 0).all())
    assert bool(((found.double() - wanted).abs()[here] <= 1e-6 * size[here] + 1e-30).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_have_the_bits_of_torchs(device: torch.device, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        c = case(*shape, dtype, device)
        assert torch.equal(own_experts.gather_rows(c.x, c.source), c.x[c.source]), shape
        for weight in (None, c.weight):
            mine = own_experts.sum_rows(c.y, c.place, weight)
            assert torch.equal(mine, torch_experts.sum_rows(c.y, c.place, weight)), (shape, weight is None)
        (dy, dweight), (torchs, other) = (
            ops.sum_rows_backward(c.grad, c.y, c.place, c.weight) for ops in (own_experts, torch_experts))
        assert torch.equal(dy, torchs), shape
        assert_inner_products(dweight, c)
        assert_inner_products(other, c)


@pytest.mark.parametrize("ops", [own_experts, torch_experts], ids=["own", "torch"])
def test_sums_are_added_in_their_order_and_rounded_once(device: torch.device, ops: ExpertOps) -> None:
    """An order, a product or a rounding that differs shows in these numbers."""
    y = torch.tensor([[2.0**24], [1.0], [1.0], [-(2.0**24)], [NAN]], device=device)
    in_order = torch.tensor([[0, 1, 2, 3], [1, 2, 0, 3], [3, 0, -1, 1]], device=device)
    assert ops.sum_rows(y, in_order, None).flatten().tolist() == [0.0, 2.0, 1.0]
    weight = torch.tensor([[1.0, 1 + 2.0**-12]], device=device)  # a fused sum keeps what the product's rounding drops
    rows = torch.tensor([[-(1 + 2.0**-11)], [1 + 2.0**-12]], device=device)
    assert float(ops.sum_rows(rows, torch.tensor([[0, 1]], device=device), weight)) == 0.0
    half = torch.tensor([[1.0], [2.0**-8], [2.0**-8]], device=device).bfloat16()
    assert float(ops.sum_rows(half, torch.tensor([[0, 1, 2]], device=device), None)) == 1 + 2.0**-7
    minus = torch.tensor([[-0.0]], device=device)
    assert ops.sum_rows(minus, torch.tensor([[0]], device=device), None).signbit().item() is False


@pytest.mark.parametrize("ops", [own_experts, torch_experts], ids=["own", "torch"])
def test_nothing_to_move(device: torch.device, ops: ExpertOps) -> None:
    none = torch.empty(0, dtype=torch.int64, device=device)
    x, weight = torch.randn(3, 16, device=device), torch.rand(3, 2, device=device)
    dropped = torch.full((3, 2), -1, device=device)
    assert ops.gather_rows(x, none).shape == (0, 16) == ops.gather_rows(x[:0], none).shape
    assert torch.equal(ops.sum_rows(x[:0], dropped, weight), torch.zeros_like(x))
    assert ops.sum_rows(x[:0], dropped[:0], weight[:0]).shape == (0, 16)
    dy, dweight = ops.sum_rows_backward(x, x[:0], dropped, weight)
    assert dy.shape == (0, 16) and torch.equal(dweight, torch.zeros(3, 2, device=device))


@pytest.mark.parametrize("dtype", DTYPES)
def test_poisoned_rows_and_memory_that_no_vector_fits(device: torch.device, dtype: torch.dtype) -> None:
    """Rows that no index names are NaN and read by nobody; a row of 8 begins between two vectors."""
    c = case(9, 3, 8, 0.3, dtype, device)
    memory = torch.full((1 + 8 * (len(c.y) + 5),), NAN, dtype=dtype, device=device)
    y = memory[1:].view(-1, 8)
    y[: len(c.y)] = c.y
    assert torch.equal(own_experts.sum_rows(y, c.place, c.weight), own_experts.sum_rows(c.y, c.place, c.weight))
    assert torch.equal(own_experts.gather_rows(y, c.place[c.place >= 0]), c.y[c.place[c.place >= 0]])
    found = own_experts.sum_rows_backward(c.grad, y[: len(c.y)], c.place, c.weight)
    for mine, wanted in zip(found, own_experts.sum_rows_backward(c.grad, c.y, c.place, c.weight)):
        assert torch.allclose(mine, wanted, rtol=1e-5)


def test_nothing_is_written_beyond_the_rows(own: Path, built: Path) -> None:
    """Through the C ABI, with NaN before and after what is written."""
    c = case(7, 2, 40, 0.4, torch.float32, torch.device("cpu"))
    tokens, rows = len(c.x), len(c.y)
    library = kernels.library_path("cpu", own)[0]
    for path in (library, *(built / f"libmp_emulated{lanes}.so" for lanes in (32, 64))):
        call = partial(_call_between_guards, ctypes.CDLL(str(path)))
        call("mp_gather_rows", (rows, 40), (c.x, c.source), (rows, 40), named=tokens)
        call("mp_sum_rows", (tokens, 40, 2), (c.y, c.place, c.weight), (tokens, 40), named=rows)
        call("mp_sum_rows_backward", (tokens, 40, 2), (c.grad, c.y, c.place, c.weight), (rows, 40), (tokens, 2),
             named=rows)


def _call_between_guards(
    library: ctypes.CDLL, name: str, sizes: tuple[int, ...], inputs: tuple[Tensor, ...], *shapes: tuple[int, ...],
    named: int,
) -> None:
    rooms = [torch.full((shape[0] + 2, *shape[1:]), NAN) for shape in shapes]
    arguments = [ctypes.c_void_p(t.data_ptr()) for t in (*inputs, *(room[1:] for room in rooms))]
    given = [ctypes.c_void_p(None), ctypes.c_int32(0), *map(ctypes.c_int64, sizes), *arguments, ctypes.c_int64(named)]
    assert getattr(library, name)(*given) == 0
    for room in rooms:
        assert bool(room[0].isnan().all() & room[-1].isnan().all()) and not bool(room[1:-1].isnan().any())


def test_large_rows_go_past_the_caches_with_the_same_bits(own: Path) -> None:
    """More than 8 MiB, on one thread and two; the last columns are less than a chunk."""
    kernels.load("cpu")
    c = case(6000, 1, 800, 0.1, torch.bfloat16, torch.device("cpu"))
    threads, seen = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            seen.append((own_experts.gather_rows(c.x, c.source), own_experts.sum_rows(c.y, c.place, c.weight),
                         *own_experts.sum_rows_backward(c.grad, c.y, c.place, c.weight)))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *seen))
    assert torch.equal(seen[0][0], c.x[c.source])
    assert torch.equal(seen[0][1], torch_experts.sum_rows(c.y, c.place, c.weight))
    assert torch.equal(seen[0][2], torch_experts.sum_rows_backward(c.grad, c.y, c.place, c.weight)[0])


def test_opcheck(own: Path) -> None:
    kernels.load("cpu")
    c = case(5, 2, 16, 0.2, torch.float32, torch.device("cpu"))
    ops = torch.ops.megatron_port
    torch.library.opcheck(ops.gather_rows, (c.x, c.source))
    torch.library.opcheck(ops.sum_rows, (c.y, c.place, c.weight))
    torch.library.opcheck(ops.sum_rows, (c.y, c.place, None))
    torch.library.opcheck(ops.sum_rows_backward, (c.grad, c.y, c.place, c.weight))


@pytest.mark.parametrize("call, text", [
    (lambda o, c: o.gather_rows(c.x.t(), c.source), "not contiguous"),
    (lambda o, c: o.gather_rows(c.x.double(), c.source), "float32, float16 and bfloat16"),
    (lambda o, c: o.gather_rows(c.x, c.source.int()), "source has another dtype"),
    (lambda o, c: o.sum_rows(c.y, c.place, c.weight[:-1]), "weight has 8 elements, not 10"),
    (lambda o, c: o.sum_rows(c.y, c.place.view(-1), None), r"place must be \[tokens, k\] with k from 1 to 32"),
    (lambda o, c: o.sum_rows_backward(c.grad[:, 1:].contiguous(), c.y, c.place, c.weight), "grad must be"),
])
def test_refusals(device: torch.device, call: Callable[..., object], text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        call(torch.ops.megatron_port, case(5, 2, 16, 0.0, torch.float32, device))


@pytest.mark.parametrize("call, text", [
    (lambda o, c: o.gather_rows(c.x, c.source + 1), r"source has 5 at \d+, which is not from 0 to 4"),
    (lambda o, c: o.sum_rows(c.y, c.place - 2, None), r"place has -2 at \d+, which is not from -1 to 9"),
    (lambda o, c: o.sum_rows(c.y[:-1], c.place, None), "place has 9 at"),
    (lambda o, c: o.sum_rows_backward(c.grad, c.y, c.place.clamp_min(1), c.weight), "place names row 1 twice"),
    (lambda o, c: o.sum_rows_backward(c.grad, c.y, c.place - (c.place == 9).long() * 10, c.weight), "9 of 10 rows"),
])
def test_indices_are_looked_at_on_a_cpu(own: Path, call: Callable[..., object], text: str) -> None:
    kernels.load("cpu")
    c = case(5, 2, 16, 0.0, torch.float32, torch.device("cpu"))
    with pytest.raises(RuntimeError, match=text):
        call(torch.ops.megatron_port, c)
