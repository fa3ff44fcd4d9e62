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
from megatron_port.core.dist.collectives import all_gather_single, reduce_scatter_single
from megatron_port.core.layers.cross_entropy import vocab_parallel_cross_entropy
from megatron_port.core.layers.linear import PLAIN
from megatron_port.core.layers.providers import Providers
from megatron_port.tools.plan.case import Entry
from megatron_port.tools.preflight.exchange import meet, synchronize

# How long a piece of work takes on this rank's device.
# How long a piece of work takes on this rank's device.

BUDGET_S = 0.15
SAMPLES = 5
SPIN_HZ = 2.1e9
"""Upper limit of the clock that a plug counts: too high a value only makes it longer."""
LOAD_S, ROUND_S, AHEAD = 1.5, 0.01, 8
"""Seconds of steady work, of products in a round of it, and rounds that are queued at once."""
CLOCK_PRODUCTS = 0.7
"""Share of a training step that products take: 0.68 of the kernels' time in a step of GPT-2 XL on an H200."""
CALL_S = 4e-4
"""More than the host takes to launch a call, its backward pass included."""


def seconds_of(work: Callable[[], object], device: torch.device, *, budget_s: float = BUDGET_S) -> float:
    """Median seconds of one call over ``SAMPLES`` samples, all of which take about ``budget_s``; after a warm-up."""
    work()
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    once = max(time.perf_counter() - started, 1e-7)
    calls = max(1, int(budget_s / SAMPLES / once))
    samples = []
    for _ in range(SAMPLES):
        started = time.perf_counter()
        for _ in range(calls):
            work()
        synchronize(device)
        samples.append((time.perf_counter() - started) / calls)
    return statistics.median(samples)


def device_seconds(work: Callable[[], object], device: torch.device, budget_s: float = BUDGET_S) -> float:
    """Median seconds that the device takes for one call, not the host to launch it; on a CPU the same."""
    if device.type == "cpu":
        return seconds_of(work, device, budget_s=budget_s)
    work()
    count = max(4, min(32, int(budget_s / SAMPLES / max(queued_seconds([work])[0], 1e-7))))
    return statistics.median(queued_seconds([work] * count)[0] for _ in range(SAMPLES))


def load_share(product: Callable[[], object], other: Callable[[], object], device: torch.device) -> float:
    """Rate of ``product`` in a GPU's steady work, over its rate in a burst; 1 on a CPU.

    Large products draw more than the power limit allows, and after some 0.1 s the clock falls: 8192^3 on an H200 from
    790 to 680 TFLOP/s. In training they have about ``PRODUCTS`` of the time, kernels that wait for memory the rest, and
    the limit holds for both together. So the two take turns for ``LOAD_S``, and the second half counts.
    """
    if device.type == "cpu":
        return 1.0
    burst, beside = device_seconds(product, device), device_seconds(other, device)
    count = max(1, round(ROUND_S / burst))
    pauses = max(1, round(count * burst * (1 - CLOCK_PRODUCTS) / CLOCK_PRODUCTS / beside))
    seconds, ends = list[float](), time.perf_counter() + LOAD_S
    while time.perf_counter() < ends or len(seconds) < 2 * AHEAD:
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(AHEAD)]
        for start, end in marks:
            start.record()
            for _ in range(count):
                product()
            end.record()
            for _ in range(pauses):
                other()
        torch.cuda.synchronize()
        seconds += [start.elapsed_time(end) / 1e3 / count for start, end in marks]
    return min(burst / statistics.median(seconds[len(seconds) // 2 :]), 1.0)


def queued_seconds(calls: Sequence[Callable[[], object]], plug_s: float = 0.0) -> tuple[float, float]:
    """Return (device, host) seconds of one of the calls on a GPU.

    A kernel that spins for ``plug_s`` (0: ``CALL_S`` per call) occupies the device while the host queues all calls; the
    events stand around these alone, so the device goes from one to the next without waiting for the host. With their
    kernels they must fit the stream's queue, about 1,000.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(int((plug_s or CALL_S * len(calls)) * SPIN_HZ))
    start.record()
    began = time.perf_counter()
    for call in calls:
        call()
    host = (time.perf_counter() - began) / len(calls)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / len(calls), host


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


# Collectives of a node as a run has them: after products that all ranks compute, and beside such products.
#
# Ranks that only wait for one another, call after call, are in step and have their cores to themselves. In a run each
# comes from its own arithmetic; on a CPU the library's threads then take cores from it. So a collective's time is
# that of a product and the collective less that of the product, and what products hide of it is measured too.

ROUNDS = 5
EXCHANGE_SIZES = {
    "cpu": (4 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20),
    "cuda": (4 << 10, 256 << 10, 4 << 20, 64 << 20),
}
SIDE = {"cpu": 512, "cuda": 4096}
"""Sides of the square product beside collectives, which takes about as long as a collective of an activation."""


@dataclass(frozen=True)
class CollectiveTime:
    """A collective over all ranks; ``size``: bytes of the whole buffer."""

    kind: str
    """all-reduce | all-gather | reduce-scatter | transfer (from one rank to another)"""
    size: int
    seconds: float
    """Seconds of the collective after products."""
    hidden: float = 0.0
    """Seconds of these that products beside it hide (negative: both together take longer than one by one)."""
    product: float = 0.0
    """Seconds of those products, about as long as the collective."""

    def ranks(self, group: int) -> int:
        """Ranks that took part of a group of so many."""
        return 2 if self.kind == "transfer" else group


def collective_times(device: torch.device, ranks: int, budget_s: float) -> list[CollectiveTime]:
    """All-reduce, all-gather and reduce-scatter of fp32 buffers, small to large; as many calls on each rank."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    side = SIDE[kind]
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    if kind == "cuda":
        a, b = a.bfloat16(), b.bfloat16()
    product = partial(torch.mm, a, b, out=torch.empty_like(a))
    out = []
    for size in EXCHANGE_SIZES[kind]:
        whole = torch.zeros(size // 4 // ranks * ranks, device=device)
        part = torch.zeros(whole.numel() // ranks, device=device)
        works: dict[str, Callable[..., dist.Work]] = {
            "all-reduce": partial(dist.all_reduce, whole, async_op=True),
            "all-gather": partial(all_gather_single, whole, part, async_op=True),
            "reduce-scatter": partial(reduce_scatter_single, part, whole, async_op=True),
        }
        out += [_measured(name, whole.numel() * 4, work, product, device, budget_s) for name, work in works.items()]
        if ranks % 2 == 0:
            out.append(_transfer(whole, product, device, budget_s))
    return out


def _transfer(x: torch.Tensor, product: Callable[[], object], device: torch.device, budget_s: float) -> CollectiveTime:
    """A tensor from one rank of a pair to the other, which waits for it, as a stage does: half of what two products
    and two transfers, there and back, take longer than two products."""
    rank, y = dist.get_rank(), torch.empty_like(x)
    peer = rank ^ 1

    def there_and_back() -> None:
        arrives = dist.irecv(y, peer)
        assert arrives is not None
        if rank > peer:
            arrives.wait()
        product()
        leaves = dist.isend(x, peer)
        assert leaves is not None
        if rank < peer:
            arrives.wait()
        leaves.wait()

    both = agreed_seconds(there_and_back, device, 2)
    calls = max(4, min(200, int(4 * budget_s / ROUNDS / max(both, 1e-6))))
    rounds = [[agreed_seconds(one, device, calls) for one in (product, there_and_back)] for _ in range(ROUNDS)]
    alone, cycle = map(statistics.median, zip(*rounds))
    return CollectiveTime("transfer", x.numel() * 4, max(cycle / 2 - alone, 1e-7), 0.0, alone)


def _measured(
    kind: str, size: int, work: Callable[[], dist.Work], product: Callable[[], object], device: torch.device,
    budget_s: float,
) -> CollectiveTime:
    def products() -> None:
        for _ in range(count):
            product()

    def after() -> None:
        products()
        work().wait()

    def beside() -> None:
        started = work()
        products()
        started.wait()

    count = 1
    first = agreed_seconds(product, device, 4)
    count = max(1, round((agreed_seconds(after, device, 4) - first) / max(first, 1e-6)))
    both = agreed_seconds(after, device, 2)
    calls = max(4, min(200, int(4 * budget_s / ROUNDS / max(both, 1e-6))))
    rounds = [  # in turn, so that what else the machine does is in all of them
        [agreed_seconds(one, device, calls) for one in (products, after, beside)] for _ in range(ROUNDS)
    ]
    alone, one_by_one, together = map(statistics.median, zip(*rounds))
    return CollectiveTime(kind, size, max(one_by_one - alone, 1e-7), one_by_one - together, alone)


def agreed_seconds(work: Callable[[], object], device: torch.device, calls: int) -> float:
    """Mean seconds of a call on the slowest rank, which all make as often."""
    synchronize(device)
    meet()
    started = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize(device)
    mine = torch.tensor([(time.perf_counter() - started) / calls], dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return float(mine)


def overlap_share(times: list[CollectiveTime]) -> float:
    """Share of what products can hide of collectives that they do hide, between 0 and 1."""
    together = [t for t in times if t.kind != "transfer"]
    possible = sum(min(t.seconds, t.product) for t in together)
    return min(max(sum(t.hidden for t in together) / possible, 0.0), 1.0) if possible else 1.0
