"""Bias, dropout and residual add: masks equal to those of core/layers/dropout.py bit for bit, values, gradients."""

from __future__ import annotations

import random

import pytest
import torch
from reference import DTYPES, compare, random_shapes
from torch.utils.checkpoint import checkpoint

from megatron_port.core.dist.positions import Positions
from megatron_port.core.layers.dropout import DropoutStream, drop_threshold, keep_mask, op_key
from megatron_port.ext.kernels.ops.norm import bias_dropout_add

# 4104 columns: more than one strip of columns in half precision, 2051: not in vectors.
SHAPES = random_shapes(3, 20, wide=(4104, 2051))
EDGES = (0, -1, 1, (1 << 63) - 1, -(1 << 63))
IDS = (3, 1 << 33, 17, 4, 9)


def _own_mask(
    device: torch.device, dtype: torch.dtype, keys: torch.Tensor, key2: int, p: float, seq: int, count: int,
    **place: int,
) -> torch.Tensor:
    x = torch.ones(seq, keys.numel(), count, dtype=dtype, device=device)
    return bias_dropout_add(x, None, torch.zeros_like(x), keys.to(device), op_key=key2, p=p, **place).cpu() != 0


def _torch_mask(
    keys: torch.Tensor, key2: int, p: float, seq: int, count: int, *, seq_offset: int, width: int, width_offset: int
) -> torch.Tensor:
    row = torch.arange(seq_offset, seq_offset + seq).view(-1, 1, 1)
    return keep_mask(keys.view(1, -1, 1), key2, drop_threshold(p), row, width=width, offset=width_offset, count=count)


def test_the_mask_is_that_of_torch(device: torch.device) -> None:
    draw = random.Random(11)
    whole = lambda: draw.choice([draw.choice(EDGES), draw.getrandbits(64) - (1 << 63)])  # noqa: E731
    for case in range(120):
        batch, seq = draw.randint(1, 4), draw.randint(1, 7)
        keys = torch.tensor([whole() for _ in range(batch)], dtype=torch.int64)
        count = draw.choice([draw.randint(1, 70), 8 * draw.randint(1, 12)])
        before, after = (draw.choice([0, draw.randint(0, 20), 4 * draw.randint(0, 6)]) for _ in range(2))
        place = {"seq_offset": draw.choice([0, draw.randint(0, 1 << 20), (1 << 50) + draw.randint(0, 99)]),
                 "width": before + count + after, "width_offset": before}
        key2, p = whole(), draw.choice([0.1, 0.5, 2**-16, 0.9999999, draw.random()])
        own = _own_mask(device, DTYPES[case % 3], keys, key2, p, seq, count, **place)
        wanted = _torch_mask(keys, key2, p, seq, count, **place)
        assert torch.equal(own, wanted), f"{batch=} {seq=} {count=} {place=} {key2=} {p=}"


def test_the_whole_and_its_slices_have_one_mask(device: torch.device) -> None:
    keys = torch.tensor([5, -7, 1 << 62])
    whole = _own_mask(device, torch.bfloat16, keys, 99, 0.4, 12, 40, seq_offset=0, width=40, width_offset=0)
    for s0, s1, w0, w1, b0, b1 in ((3, 9, 0, 40, 0, 3), (0, 12, 8, 24, 1, 3), (5, 6, 13, 14, 2, 3)):
        part = _own_mask(device, torch.bfloat16, keys[b0:b1], 99, 0.4, s1 - s0, w1 - w0, seq_offset=s0, width=40,
                         width_offset=w0)
        assert torch.equal(part, whole[s0:s1, b0:b1, w0:w1])


class Case:
    """Own and eager function of one random case; p, the place of the slice and the batch differ by case."""

    def __init__(self, case: int, rows: int, cols: int, device: torch.device) -> None:
        batch = case % len(IDS) + 1
        self.p = (0.3, 0.0, 0.1)[case % 3]
        self.start, self.place = 3 * case, {"width": cols + 2 * case, "width_offset": case}
        self.streams = {}
        for where in (torch.device("cpu"), device):  # the exact result is computed on a CPU
            self.streams[where.type] = DropoutStream(1, where)
            self.streams[where.type].set_micro_batch(case, IDS[:batch])
        stream = self.streams[device.type]
        self.keys = stream.sample_keys(self.p)
        self.shape = ((rows + batch - 1) // batch, batch, cols)
        self.name = f"{self.shape} p={self.p}"

    def own(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
        return bias_dropout_add(x, bias, residual, self.keys, op_key=op_key("mlp"), p=self.p, seq_offset=self.start,
                                **self.place)

    def eager(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
        stream = self.streams[x.device.type]
        out = stream.dropout(x if bias is None else x + bias, self.p, op="mlp",
                             positions=Positions.contiguous(len(x), self.start), **self.place)
        return out if residual is None else residual + out


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(device: torch.device, dtype: torch.dtype) -> None:
    """Against DropoutStream of the torch provider, with and without dropout, bias and residual."""
    for number, (rows, cols) in enumerate(SHAPES):
        case = Case(number, rows, cols, device)
        g = torch.Generator().manual_seed(number)
        x, residual = (torch.randn(case.shape, generator=g, dtype=torch.float64) * 2 for _ in range(2))
        bias = torch.randn(cols, generator=g, dtype=torch.float64)
        for given in ((x, bias, residual), (x, None, residual), (x, bias, None)):
            what = f"{case.name} {[i is not None for i in given]}"
            compare(case.own, case.eager, given, dtype, device, what=what)


def test_without_dropout_the_gradient_is_passed_on(device: torch.device) -> None:
    x, residual = (torch.randn(3, 2, 8, device=device, requires_grad=True) for _ in range(2))
    none = torch.empty(0, dtype=torch.int64, device=device)
    out = bias_dropout_add(x, None, residual, none, op_key=1, p=0.0, seq_offset=0, width=8, width_offset=0)
    dout = torch.randn_like(out)
    dx, dresidual = torch.autograd.grad(out, (x, residual), dout)
    assert dx.data_ptr() == dout.data_ptr() == dresidual.data_ptr()


def _loss_and_gradients(device: torch.device, *, again: bool) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    x, residual = (torch.randn(45, 4, 96, generator=g).bfloat16().to(device).requires_grad_() for _ in range(2))
    bias = torch.randn(96, generator=g).bfloat16().to(device).requires_grad_()
    keys = torch.tensor([1, 2, -3, 4], device=device)

    def layer(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return bias_dropout_add(x * x, bias, residual, keys, op_key=7, p=0.2, seq_offset=0, width=96, width_offset=0)

    y = checkpoint(layer, x, bias, residual, use_reentrant=False) if again else layer(x, bias, residual)
    return [y.detach(), *torch.autograd.grad((y.float() ** 2).sum(), (x, bias, residual))]


def test_recompute_gives_the_same_bits(device: torch.device) -> None:
    first = _loss_and_gradients(device, again=False)
    assert all(map(torch.equal, first, _loss_and_gradients(device, again=True)))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert all(map(torch.equal, first, _loss_and_gradients(device, again=False)))
    finally:
        torch.set_num_threads(threads)


def test_an_empty_tensor(device: torch.device) -> None:
    x = torch.empty(0, 2, 8, device=device, requires_grad=True)
    bias = torch.ones(8, device=device, requires_grad=True)
    keys = torch.tensor([1, 2], device=device)
    out = bias_dropout_add(x, bias, None, keys, op_key=7, p=0.2, seq_offset=0, width=8, width_offset=0)
    out.sum().backward()
    assert out.shape == x.shape and bias.grad is not None and torch.equal(bias.grad, torch.zeros_like(bias))


@pytest.mark.parametrize("threshold", [0, 20000])
def test_opcheck(device: torch.device, threshold: int) -> None:
    x, residual = (torch.randn(3, 2, 8, device=device, requires_grad=True) for _ in range(2))
    bias, keys = torch.randn(8, device=device, requires_grad=True), torch.tensor([5, -6], device=device)
    mask = (-(1 << 62), threshold, 3, 16, 8)
    for some in ((bias, residual), (None, residual), (bias, None)):
        torch.library.opcheck(torch.ops.megatron_port.bias_dropout_add_forward, (x, *some, keys, *mask))
    dout = x.detach()
    for has_bias in (True, False):
        torch.library.opcheck(torch.ops.megatron_port.bias_dropout_add_backward, (dout, keys, *mask, has_bias))


@pytest.mark.parametrize("change, text", [
    ({"x": lambda x: x.transpose(0, 1)}, "not contiguous"),
    ({"x": lambda x: x.double()}, "float32, float16 and bfloat16"),
    ({"x": lambda x: x.reshape(6, 8)}, r"\[s, b, h\]"),
    ({"bias": lambda b: b.bfloat16()}, "different dtypes"),
    ({"bias": lambda b: b[:-1].contiguous()}, r"bias must be \[h\]"),
    ({"residual": lambda r: r[:-1].contiguous()}, "residual and x differ in shape"),
    ({"keys": lambda k: k[:-1].contiguous()}, "keys has 1 elements, not 2"),
    ({"keys": lambda k: k.int()}, "keys has another dtype"),
    ({"width": lambda w: w - 1}, "at most width"),
])
def test_refusals(device: torch.device, change: dict[str, object], text: str) -> None:
    given: dict[str, object] = {
        "x": torch.randn(3, 2, 8, device=device), "bias": torch.randn(8, device=device),
        "residual": torch.randn(3, 2, 8, device=device), "keys": torch.tensor([1, 2], device=device),
        "op_key": 1, "p": 0.1, "seq_offset": 0, "width": 16, "width_offset": 8,
    }
    given |= {name: how(given[name]) for name, how in change.items()}  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=text):
        bias_dropout_add(**given)  # type: ignore[arg-type]
