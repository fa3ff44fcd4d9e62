"""What one node does, measured on all its ranks at once, as in training: products by shape, memory, collectives.

Every rank calls :func:`measure` with the same arguments; the times that come back are alike on all: of kernels the
mean over the ranks, of collectives the slowest.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_port.bench.clock import seconds_of
from megatron_port.config.schema import ModelConfig
from megatron_port.parallel.compat import all_gather_single, reduce_scatter_single
from megatron_port.preflight.exchange import meet, synchronize

Shape = tuple[int, int, int]
"""Rows, columns, inner of a product."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class ProductTime:
    """[rows, inner] × [inner, columns]."""

    rows: int
    columns: int
    inner: int
    dtype: str
    seconds: float

    @property
    def tflops(self) -> float:
        """2 · rows · columns · inner operations per product, 10^12 a second."""
        return 2.0 * self.rows * self.columns * self.inner / self.seconds / 1e12


@dataclass(frozen=True)
class CollectiveTime:
    """A collective over all ranks; ``size``: bytes of the whole buffer."""

    kind: str
    """all-reduce | all-gather | reduce-scatter"""
    size: int
    seconds: float


@dataclass
class Measured:
    """One node."""

    host: str
    device: str
    kind: str
    """cpu | cuda | rocm"""
    ranks: int
    torch: str
    products: list[ProductTime] = field(default_factory=list)
    launch_s: float = 0.0
    """One small kernel after the other."""
    stream: float = 0.0
    """Bytes a second of a large copy, read and written bytes counted."""
    attention: tuple[float, float] | None = None
    """Fused causal attention, forward and backward, operations of the causal half a second; None: not measured."""
    collectives: list[CollectiveTime] = field(default_factory=list)
    memory_bytes: int = 0
    """Memory of a rank's device; on a CPU, the host's divided by its ranks."""
    reserved_bytes: int = 0
    """Held before anything is allocated: the process on a CPU, the driver on a GPU."""
    jitter: float = 0.0
    """Spread (one sigma, share) of equal work over ranks and repetitions."""


def shapes_of(kind: str, model: ModelConfig | None, tensor: Sequence[int]) -> list[Shape]:
    """LinearKernels to measure: a row with a growing inner dimension, squares, and those of the model's layers."""
    unit = 4096 if kind != "cpu" else 256
    out = [(unit, unit, inner) for inner in (64, 128, 256, 512, 1024, 2048, 4096, 8192) if inner <= 8 * unit]
    out += [(n, n, n) for n in ((1024, 2048, 8192) if kind != "cpu" else (64, 128, 512))]
    for t in tensor if model is not None else ():
        assert model is not None
        h, d, f = model.hidden_size, model.head_size, model.ffn_size
        first = f * (2 if model.gated else 1)
        heads = (model.num_attention_heads + 2 * model.kv_heads) * d
        s = model.seq_length
        layer = [(s, heads // t, h), (s, h, model.num_attention_heads * d // t), (s, first // t, h), (s, h, f // t)]
        out += [shape for shape in layer if kind != "cpu" or math.prod(shape) <= 2**28]
    return list(dict.fromkeys(shape for shape in out if min(shape) > 0))


def measure(
    *, device: torch.device, kind: str, name: str, ranks: int, memory_bytes: int, shapes: Sequence[Shape],
    dtypes: Sequence[str], budget_s: float = 0.15,
) -> Measured:
    """Measure this rank and combine over all."""
    found = Measured(
        host=platform.node(), device=name, kind=kind, ranks=ranks, torch=torch.__version__,
        memory_bytes=memory_bytes if kind != "cpu" else memory_bytes // ranks, reserved_bytes=_reserved(device),
    )
    times = [_product(shape, dtype, device, budget_s) for dtype in dtypes for shape in shapes]
    small = torch.ones(16, device=device)
    launch = seconds_of(lambda: small.add(1.0), device, budget_s=budget_s)
    size = 256 << 20 if device.type == "cuda" else 64 << 20
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    copy = seconds_of(lambda: target.copy_(source), device, budget_s=4 * budget_s)
    repeats = [_product(shapes[0], dtypes[0], device, budget_s / 4) for _ in range(8)]
    attention = _attention(device, budget_s) if device.type == "cuda" else []
    mine = torch.tensor([*times, launch, copy, *attention], dtype=torch.float64)
    spread = torch.tensor([sum(repeats), sum(r * r for r in repeats)], dtype=torch.float64)
    if ranks > 1:
        dist.all_reduce(mine)
        dist.all_reduce(spread)
        mine /= ranks
    values = mine.tolist()
    wanted = [(shape, dtype) for dtype in dtypes for shape in shapes]
    found.products = [ProductTime(*shape, dtype, t) for (shape, dtype), t in zip(wanted, values)]
    found.launch_s, found.stream = values[len(times)], 2.0 * size / values[len(times) + 1]
    if attention:
        operations = _attention_operations()
        found.attention = (operations / values[-2], 2.5 * operations / values[-1])
    total, count = spread[0].item(), 8 * ranks
    mean = total / count
    found.jitter = math.sqrt(max(spread[1].item() / count - mean * mean, 0.0)) / mean
    if ranks > 1:
        found.collectives = list(_collectives(device, ranks, budget_s))
    return found


def _product(shape: Shape, dtype: str, device: torch.device, budget_s: float) -> float:
    rows, columns, inner = shape
    generator = torch.Generator(device).manual_seed(1)  # zeros would draw less power, and run faster
    a = torch.randn(rows, inner, device=device, generator=generator).to(DTYPES[dtype])
    b = torch.randn(inner, columns, device=device, generator=generator).to(DTYPES[dtype])
    out = torch.empty(rows, columns, device=device, dtype=DTYPES[dtype])
    return seconds_of(lambda: torch.mm(a, b, out=out), device, budget_s=budget_s)


_ATTENTION = (2, 16, 2048, 128)
"""Batch, heads, sequence, head size."""


def _attention_operations() -> float:
    b, heads, s, d = _ATTENTION
    return 4.0 * b * heads * s * s * d / 2  # two products, the causal half


def _attention(device: torch.device, budget_s: float) -> list[float]:
    """Seconds of the forward and of the backward."""
    q, k, v = (torch.randn(_ATTENTION, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> None:
        forward().sum().backward()

    once = seconds_of(forward, device, budget_s=budget_s)
    return [once, max(seconds_of(both, device, budget_s=budget_s) - once, 1e-9)]


def _collectives(device: torch.device, ranks: int, budget_s: float) -> Iterator[CollectiveTime]:
    """All-reduce, all-gather and reduce-scatter of fp32 buffers, small to large; as many calls on each rank."""
    sizes = (4 << 10, 256 << 10, 4 << 20, 64 << 20) if device.type == "cuda" else (4 << 10, 64 << 10, 1 << 20, 8 << 20)
    for size in sizes:
        whole = torch.ones(size // 4 // ranks * ranks, device=device)
        part = torch.ones(whole.numel() // ranks, device=device)
        works: dict[str, Callable[[], object]] = {
            "all-reduce": partial(dist.all_reduce, whole),
            "all-gather": partial(all_gather_single, whole, part),
            "reduce-scatter": partial(reduce_scatter_single, part, whole),
        }
        for kind, work in works.items():
            yield CollectiveTime(kind, whole.numel() * 4, _agreed_seconds(work, device, budget_s))
            whole.fill_(1.0)


def _agreed_seconds(work: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Seconds of a collective: all ranks make as many calls as the slowest of them can afford; the slowest counts."""
    def timed(calls: int) -> float:
        synchronize(device)
        meet()
        started = time.perf_counter()
        for _ in range(calls):
            work()
        synchronize(device)
        mine = torch.tensor([(time.perf_counter() - started) / calls], dtype=torch.float64)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        return float(mine)

    once = max(timed(2), 1e-6)
    calls = max(2, min(200, int(budget_s / 3 / once)))
    return sorted(timed(calls) for _ in range(3))[1]


def _reserved(device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free - torch.cuda.memory_reserved(device))
    return int(psutil.Process(os.getpid()).memory_info().rss)
