"""Bias, dropout, residual add and the norm that follows in one op: the bits of two, and the exact gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from reference import DTYPES, compare, random_shapes
from torch.utils.checkpoint import checkpoint

from megatron_port.core.dist.positions import Positions
from megatron_port.core.layers.dropout import DropoutStream, op_key
from megatron_port.ext.kernels.ops import norm
from megatron_port.ext.kernels.ops.norm import bias_dropout_add, bias_dropout_add_norm

EPS = 1e-5
# In half precision 4104 columns are two pieces a thread backward, 9000 more than the backward kernel takes (the ops one
# after the other), 17000 more than the forward kernel does; 2051 go element by element. (197, 40): several slots.
SHAPES = [*random_shapes(8, 12, wide=(4104, 9000, 17000, 2051)), (197, 40), (130, 65), (97, 520)]
IDS = (3, 1 << 33, 17)


class Case:
    """Both ways of one random case; p, bias, norm, start and batch differ by case."""

    def __init__(self, case: int, rows: int, cols: int, device: torch.device) -> None:
        self.batch = case % len(IDS) + 1
        self.p, self.rms, self.start = (0.3, 0.0, 0.1)[case % 3], case % 2 == 1, 3 * case
        self.streams = {}
        for where in (torch.device("cpu"), device):  # the exact result is computed on a CPU
            self.streams[where.type] = DropoutStream(1, where)
            self.streams[where.type].set_micro_batch(case, IDS[: self.batch])
        self.keys = self.streams[device.type].sample_keys(self.p)
        self.shape = ((rows + self.batch - 1) // self.batch, self.batch, cols)
        self.name = f"{self.shape} p={self.p} rms={self.rms}"

    def inputs(self) -> list[torch.Tensor]:
        """x, its bias, residual, the norm's weight and bias in fp64."""
        g = torch.Generator().manual_seed(sum(self.shape))
        make = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
        cols = self.shape[2]
        return [make(*self.shape) * 2 + 0.5, make(cols), make(*self.shape), 1 + 0.3 * make(cols), make(cols)]

    def own(
        self, x: torch.Tensor, x_bias: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        return bias_dropout_add_norm(
            x, x_bias, residual, self.keys, weight, bias, op_key=op_key("attention"), p=self.p, seq_offset=self.start,
            eps=EPS, rms=self.rms,
        )

    def apart(
        self, x: torch.Tensor, x_bias: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        total = bias_dropout_add(
            x, x_bias, residual, self.keys, op_key=op_key("attention"), p=self.p, seq_offset=self.start,
            width=x.shape[2], width_offset=0,
        )
        return norm.fork(total, weight, bias, EPS, rms=self.rms)

    def eager(
        self, x: torch.Tensor, x_bias: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        stream = self.streams[x.device.type]
        total = residual + stream.dropout(
            x if x_bias is None else x + x_bias, self.p, op="attention",
            positions=Positions.contiguous(len(x), self.start),
        )
        if self.rms:
            return F.rms_norm(total, weight.shape, weight, EPS), total
        return F.layer_norm(total, weight.shape, weight, bias, EPS), total

    def choose(self, values: list[torch.Tensor], *, x_bias: bool) -> list[torch.Tensor | None]:
        """The inputs of this case's norm, with and without the bias of x."""
        return [values[0], values[1] if x_bias else None, *values[2 : 4 if self.rms else 5]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(device: torch.device, dtype: torch.dtype) -> None:
    """Against torch's ops in fp64."""
    for number, (rows, cols) in enumerate(SHAPES):
        case = Case(number, rows, cols, device)
        for x_bias in (True, False):
            given = case.choose(case.inputs(), x_bias=x_bias)
            compare(case.own, case.eager, given, dtype, device, what=f"{case.name} {x_bias=}")


def _results(
    function: Callable[..., tuple[torch.Tensor, ...]], given: list[torch.Tensor | None], dtype: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor]:
    """Outputs, then gradients of the inputs that are there."""
    leaves = [None if x is None else x.to(device, dtype).requires_grad_() for x in given]
    out = function(*leaves)
    g = torch.Generator().manual_seed(3)
    grads = [torch.randn(o.shape, generator=g, dtype=torch.float64).to(device, dtype) for o in out]
    present = [x for x in leaves if x is not None]
    return [*(o.detach() for o in out), *torch.autograd.grad(out, present, grads)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_are_those_of_the_two_ops(device: torch.device, dtype: torch.dtype) -> None:
    """Sum, norm, and the gradients of x, of the residual and of the norm's parameters; that of x's bias is summed over
    other slots of rows on a GPU."""
    for number, (rows, cols) in enumerate(SHAPES):
        case = Case(number, rows, cols, device)
        given = case.choose(case.inputs(), x_bias=True)
        own, apart = (_results(f, given, dtype, device) for f in (case.own, case.apart))
        for i, (a, b) in enumerate(zip(own, apart)):
            if i != 3:  # of x's bias
                assert torch.equal(a, b), f"{case.name} {dtype} result {i}"


def test_only_the_sum_or_only_the_norm_is_used(device: torch.device) -> None:
    case = Case(0, 6, 24, device)
    for used in (0, 1):
        ways = []
        for way in (case.own, case.apart):
            leaves = [x.float().to(device).requires_grad_() for x in case.inputs()]
            way(*leaves)[used].square().sum().backward()
            ways.append([leaf.grad for leaf in leaves[:3]])
        for a, b in zip(*ways):
            assert a is not None and b is not None
            torch.testing.assert_close(a, b)


def test_recompute_gives_the_same_bits(device: torch.device) -> None:
    case = Case(0, 50, 96, device)
    given = case.choose(case.inputs(), x_bias=True)
    again = lambda *inputs: checkpoint(case.own, *inputs, use_reentrant=False)  # noqa: E731
    ways = [_results(f, given, torch.bfloat16, device) for f in (case.own, case.own, again)]
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*ways))


def test_no_rows_give_zeros(device: torch.device) -> None:
    case = Case(0, 0, 24, device)
    leaves = [x.float().to(device).requires_grad_() for x in case.inputs()]
    y, total = case.own(*leaves)
    (y.sum() + total.sum()).backward()
    for leaf in (leaves[1], leaves[3], leaves[4]):
        assert leaf.grad is not None and torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_opcheck(device: torch.device) -> None:
    ops = torch.ops.megatron_port
    x, residual = (torch.randn(3, 2, 8, device=device, requires_grad=True) for _ in range(2))
    row, keys = torch.randn(8, device=device, requires_grad=True), torch.tensor([5, -6], device=device)
    for threshold, x_bias, rms in ((0, row, False), (20000, None, True), (20000, row, False)):
        mask = (keys, -(1 << 62), threshold, 3)
        torch.library.opcheck(
            ops.residual_norm_forward, (x, x_bias, residual, *mask, row, None if rms else row, EPS, rms)
        )
        with torch.no_grad():
            y, total, mean, rstd = ops.residual_norm_forward(x, x_bias, residual, *mask, row, None, EPS, rms)
            torch.library.opcheck(
                ops.residual_norm_backward,
                (y, total, total, *mask, row.detach(), mean, rstd, rms, not rms, x_bias is not None),
            )


@pytest.mark.parametrize("change, text", [
    ({"x": lambda x: x.transpose(0, 1)}, "not contiguous"),
    ({"x": lambda x: x.reshape(6, 8)}, r"\[s, b, h\]"),
    ({"x_bias": lambda b: b.bfloat16()}, "different dtypes"),
    ({"x_bias": lambda b: b[:-1].contiguous()}, r"x_bias must be \[h\]"),
    ({"bias": lambda b: b[:-1].contiguous()}, r"bias must be \[h\]"),
    ({"weight": lambda w: w[:-1].contiguous()}, r"weight must be \[h\]"),
    ({"residual": lambda r: r[:-1].contiguous()}, "residual and x differ in shape"),
    ({"keys": lambda k: k[:-1].contiguous()}, "keys has 1 elements, not 2"),
])
def test_refusals(device: torch.device, change: dict[str, object], text: str) -> None:
    given: dict[str, object] = {
        "x": torch.randn(3, 2, 8, device=device), "x_bias": torch.randn(8, device=device),
        "residual": torch.randn(3, 2, 8, device=device), "keys": torch.tensor([1, 2], device=device),
        "weight": torch.randn(8, device=device), "bias": torch.randn(8, device=device), "op_key": 1, "p": 0.1,
        "seq_offset": 0, "eps": EPS, "rms": False,
    }
    given |= {name: how(given[name]) for name, how in change.items()}  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=text):
        bias_dropout_add_norm(**given)  # type: ignore[arg-type]
