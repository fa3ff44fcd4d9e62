"""Operations of a model's layers as the program runs them, forward and backward: products, passes over memory,
attention.

Each is measured on many sets of operands in turn, with autograd where the model has it, whose results wait for their
backward passes as those of a model's layers do. So weights, sums of gradients, what was saved and the memory of results
are in no cache, as in a run. On a CPU a product makes the input of a pass, or its output's gradient, just before it,
and leaves of it in the caches what it leaves there in a run; there a rate is that of what a pass over ``STEP`` times
as much takes longer, so the host's part of a call, which is measured apart, is not in it. A GPU's times have none.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.layers.cross_entropy import vocab_parallel_cross_entropy
from megatron_port.core.layers.linear_kernels import PLAIN
from megatron_port.core.layers.providers import Providers
from megatron_port.tools.bench.clock import queued_seconds, seconds_of
from megatron_port.tools.plan.kernel_table import Entry

STEP = 4
SIZES = {"cpu": (1 << 15, 1 << 17, 1 << 19, 1 << 21), "cuda": (1 << 20, 1 << 22, 1 << 24, 1 << 26)}
"""Elements of a pass's output."""
COLD = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Bytes that are used in turn: more than the last cache holds."""
MOST_SETS = {"cpu": 512, "cuda": 32}
"""On a GPU what a stream queues."""
HEADS = (64, 128)
"""Head sizes of attention on a GPU, beside the model's: at 64 it does little more than half the rate of 128."""
INNER = 256
"""Inner size of the products that make inputs."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PRODUCTS = ("product", "product-input", "product-weight")
Make = Callable[[int], tuple[Callable[..., Tensor], list[Tensor]]]


@dataclass(frozen=True)
class Pass:
    """A pass: how it is made for so many elements, and the bytes for an element that the planner counts."""

    name: str
    make: Make
    """Elements → the function, and the operands that want a gradient."""
    forward: float
    backward: float


def mean_over_ranks(values: Sequence[float], ranks: int) -> list[float]:
    """The mean of each value over the ranks."""
    mine = torch.tensor(values, dtype=torch.float64)
    if ranks > 1:
        dist.all_reduce(mine)
    out: list[float] = (mine / ranks).tolist()
    return out


def product_seconds(
    shape: tuple[int, int, int], dtype: str, device: torch.device, budget_s: float
) -> tuple[float, float, float]:
    """Seconds of a linear layer's product [rows, inner] x [inner, columns], its input's and its weight's gradient.

    The last is added to a sum in full width.
    """
    rows, columns, inner = shape
    kind, generator = DTYPES[dtype], torch.Generator(device).manual_seed(1)  # zeros would draw less power

    def random(*size: int) -> Tensor:
        return torch.randn(*size, device=device, generator=generator).to(kind)

    x, grad, weight = random(rows, inner), random(rows, columns), random(columns, inner)
    once = seconds_of(lambda: PLAIN.forward(x, weight, weight, None), device, budget_s=0.0)
    count = _sets((columns * inner + rows * max(columns, inner)) * kind.itemsize, once, budget_s / 2, device)
    inputs, weights = [x.clone() for _ in range(count)], [weight.clone() for _ in range(count)]
    sums = [torch.zeros(columns, inner, device=device) for _ in range(count)]
    outs: list[Tensor | None] = [None] * count

    def forward(i: int) -> None:
        outs[i] = PLAIN.forward(inputs[0], weights[i], weights[i], None)[0]

    def grad_of_input(i: int) -> None:
        outs[i] = PLAIN.dgrad(grad, weights[i], weights[i])

    def grad_of_weight(i: int) -> None:
        PLAIN.wgrad_accumulate(sums[i], grad, inputs[i], None)

    one, two, three = (
        _in_turn(work, count, device, budget_s / 2) for work in (forward, grad_of_input, grad_of_weight)
    )
    return one, two, three


def _kind(device: torch.device) -> str:
    return "cuda" if device.type == "cuda" else "cpu"


def _sets(size: int, once: float, budget_s: float, device: torch.device) -> int:
    """Sets of operands of so many bytes each that no cache holds all of, or as many as a third of the budget is enough
    for when one takes ``once`` seconds."""
    return min(max(COLD[_kind(device)] // size, 4), max(int(budget_s / 3 / once), 4),
               MOST_SETS[_kind(device)])


@torch.no_grad()
def _in_turn(work: Callable[[int], object], count: int, device: torch.device, budget_s: float) -> float:
    """Median seconds of a call over rounds of one call for each of ``count`` sets of operands; after a first one."""
    samples: list[float] = []
    ends = time.perf_counter() + budget_s
    while len(samples) < 3 or time.perf_counter() < ends:
        if device.type != "cpu":
            samples.append(queued_seconds([partial(work, i) for i in range(count)])[0])
            continue
        started = time.perf_counter()
        for i in range(count):
            work(i)
        samples.append((time.perf_counter() - started) / count)
    return statistics.median(samples[1:])


def _warmed(
    works: Sequence[Callable[[], object]], warm: Callable[[int], object], device: torch.device
) -> float:
    """Mean seconds of a call of each of ``works``: of the device, on a CPU after what makes its input."""
    seconds = 0.0
    if device.type != "cpu":
        return queued_seconds(works)[0]
    for i, work in enumerate(works):
        warm(i)
        started = time.perf_counter()
        work()
        seconds += time.perf_counter() - started
    return seconds / len(works)


def _producer(like: Tensor) -> Callable[[Tensor], object]:
    """Return the function that writes a product [rows, columns] over a contiguous tensor like this one, [rows, ...]."""
    rows = like.shape[0] * like.shape[1]
    columns = like.numel() // rows
    left = torch.randn(rows, INNER, device=like.device).to(like.dtype)
    right = [torch.randn(INNER, columns, device=like.device).to(like.dtype) for _ in range(8)]
    turn = itertools.cycle(right)
    return lambda out: torch.mm(left, next(turn), out=out.detach().view(rows, columns))


def both_ways(make: Make, size: int, device: torch.device, budget_s: float) -> tuple[float, float]:
    """Median seconds of a forward and of a backward pass over ``size`` elements."""
    fn, operands = make(size)
    gradient = torch.ones_like(fn(*operands))
    once = 4 * seconds_of(lambda: fn(*operands), device, budget_s=0.0)  # with the backward pass and what makes inputs
    count = _sets(2 * (gradient.nbytes + operands[0].nbytes), once, budget_s, device)
    sets = [[operands[0].clone().requires_grad_(), *(x.requires_grad_() for x in operands[1:])] for _ in range(count)]
    make_input, make_gradient = _producer(operands[0]), _producer(gradient)
    forward, backward = list[float](), list[float]()
    outs, ends = list[Tensor](), time.perf_counter() + budget_s
    while len(forward) < 3 or time.perf_counter() < ends:
        works = [lambda one=one: outs.append(fn(*one)) for one in sets]
        forward.append(_warmed(works, lambda i: make_input(sets[i][0]), device))
        backs = [lambda: outs.pop().backward(gradient)] * count
        backward.append(_warmed(backs, lambda i: make_gradient(gradient), device))
        for one in sets:
            for x in one:
                x.grad = None
    return statistics.median(forward[1:]), statistics.median(backward[1:])


def passes_of(model: ModelConfig, providers: Providers, dtype: torch.dtype, device: torch.device) -> list[Pass]:
    """The element-wise passes of a model's layers and its loss."""
    w, h, f, v = dtype.itemsize, model.hidden_size, model.ffn_size, model.vocab_size
    approximate = model.activation == "gelu_tanh"

    def random(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=dtype)

    def norm(n: int) -> tuple[Callable[..., Tensor], list[Tensor]]:
        kernel = providers.rms_norm if model.normalization == "rmsnorm" else providers.layer_norm
        bias = [] if model.normalization == "rmsnorm" else [random(h)]
        return (
            lambda x, weight, *more: kernel(x, None, weight, more[0] if more else None, model.norm_epsilon)[0],
            [random(max(n // h, 1), 1, h), random(h), *bias],
        )

    def add(n: int) -> tuple[Callable[..., Tensor], list[Tensor]]:
        kernel, keys = providers.bias_dropout_add, torch.zeros(1, dtype=torch.int64, device=device)
        operands = [random(max(n // h, 1), 1, h), random(h), random(max(n // h, 1), 1, h)]
        if kernel is None:
            return lambda x, bias, residual: residual + (x + bias), operands
        return lambda x, bias, residual: kernel(
            x, bias, residual, keys, op_key=1, p=0.0, seq_offset=0, width=h, width_offset=0
        ), operands

    def activation(n: int) -> tuple[Callable[..., Tensor], list[Tensor]]:
        rows = max(n // f, 1)
        if model.gated:
            return providers.swiglu, [random(rows, 1, 2 * f)]
        return lambda x, bias: providers.bias_gelu(x, bias, approximate=approximate), [random(rows, 1, f), random(f)]

    def loss(n: int) -> tuple[Callable[..., Tensor], list[Tensor]]:
        rows = max(n // v, 1)
        labels = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        return lambda x: vocab_parallel_cross_entropy(
            x.view_as(x), labels, offset=0, extent=v, group=None, ops=providers.cross_entropy
        ), [random(rows, 1, v)]

    gates = 2 if model.gated else 1
    return [
        Pass("norm", norm, 2 * w, 4 * w), Pass("add", add, 3 * w, 2 * w),
        Pass("activation", activation, (gates + 1) * w, (2 * gates + 1) * w), Pass("loss", loss, 22, 14),
    ]


def attention_of(
    model: ModelConfig, providers: Providers, length: int, dtype: torch.dtype, device: torch.device
) -> Make:
    """Causal attention of samples of ``length`` positions from the packed projection: samples → what runs, operands."""
    groups, d = model.kv_heads, model.head_size
    rows = model.num_attention_heads // groups + 2

    def attend(y: Tensor) -> Tensor:
        if providers.packed_attention is not None:
            return providers.packed_attention(y)
        return providers.attention(*providers.split_rotary(y, None, None), dropout=None, mask=None)

    def make(samples: int) -> tuple[Callable[..., Tensor], list[Tensor]]:
        return attend, [torch.randn(length, samples, groups, rows, d, device=device, dtype=dtype)]

    return make


def _times(
    model: ModelConfig, providers: Providers, dtype: str, device: torch.device, budget_s: float
) -> Iterator[tuple[str, tuple[float, ...], float, float]]:
    """(op, its shape and what the planner counts there, seconds), forward and backward in turn."""
    kind = DTYPES[dtype]
    for one in passes_of(model, providers, kind, device):
        for size in SIZES[_kind(device)]:
            forward, backward = both_ways(one.make, size, device, budget_s)
            yield f"{one.name}-forward", (size * one.forward,), size * one.forward, forward
            yield f"{one.name}-backward", (size * one.backward,), size * one.backward, backward
    s, heads = model.seq_length, {model.head_size, *(HEADS if device.type != "cpu" else ())}
    for d, length in itertools.product(sorted(heads), (max(s // 2, 16), s, 2 * s)):
        sized = replace(model, head_dim=d)
        for samples in (1, STEP):
            operations = 2.0 * model.num_attention_heads * samples * length * length * d
            make = attention_of(sized, providers, length, kind, device)
            forward, backward = both_ways(make, samples, device, budget_s)
            yield "attention-forward", (length, d), operations, forward
            yield "attention-backward", (length, d), 2.5 * operations, backward


def pass_entries(
    model: ModelConfig, providers: Providers, dtype: str, device: torch.device, ranks: int, budget_s: float
) -> list[Entry]:
    """Rates of the passes of ``model`` in one dtype, the mean over the ranks, all of which call this."""
    found = list(_times(model, providers, dtype, device, budget_s))
    seconds = mean_over_ranks([one[3] for one in found], ranks)
    out, last, alone = [], dict[tuple[str, tuple[float, ...]], tuple[float, float]](), device.type != "cpu"
    for (op, shape, work, _), now in zip(found, seconds):
        attention = op.startswith("attention")
        key = (op, shape if attention else ())
        if key in last or (alone and not attention):
            less, before = (0.0, 0.0) if alone else last[key]
            rate = (work - less) / max(now - before, 1e-9) / (1e12 if attention else 1e9)
            out.append(Entry(op, "here" if attention else "", dtype, shape, rate))
        last[key] = work, now
    return out
