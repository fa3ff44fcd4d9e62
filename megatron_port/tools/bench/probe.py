"""What one node does, measured on all its ranks at once, as in training: products by shape, memory, collectives.

Every rank calls :func:`measure` with the same arguments; the times that come back are alike on all: of kernels the
mean over the ranks, of collectives the slowest.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_port.core.config.schema import ModelConfig
from megatron_port.tools.bench.clock import device_seconds, load_share, seconds_of
from megatron_port.tools.bench.exchanges import CollectiveTime, collective_times
from megatron_port.tools.bench.passes import product_seconds
from megatron_port.tools.plan.kernel_table import Entry

Shape = tuple[int, int, int]
"""Rows, columns, inner of a product."""


@dataclass(frozen=True)
class ProductTime:
    """[rows, inner] × [inner, columns]."""

    rows: int
    columns: int
    inner: int
    dtype: str
    seconds: float
    op: str = "product"
    """product | product-input | product-weight: see ``plan.kernel_table``"""

    @property
    def tflops(self) -> float:
        """2 · rows · columns · inner operations per product, 10^12 a second."""
        return 2.0 * self.rows * self.columns * self.inner / self.seconds / 1e12


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
    """Forward products of linear layers."""
    backward: list[ProductTime] = field(default_factory=list)
    """Their backward ones."""
    entries: list[Entry] = field(default_factory=list)
    """Further measurements: passes over memory, attention, the host."""
    load: float = 1.0
    """Rate of large products in steady work over their rate in a burst; what ``products`` and ``backward`` have."""
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
    """Matmul shapes to measure: a row with a growing inner dimension, squares, and those of the model's layers and head
    at one sample and, on a CPU, at four."""
    unit = 4096 if kind != "cpu" else 256
    out = [(unit, unit, inner) for inner in (64, 128, 256, 512, 1024, 2048, 4096, 8192) if inner <= 8 * unit]
    out += [(n, n, n) for n in ((1024, 2048, 8192) if kind != "cpu" else (64, 128, 512))]
    for t in tensor if model is not None else ():
        assert model is not None
        h, d, f = model.hidden_size, model.head_size, model.ffn_size
        first = f * (2 if model.gated else 1)
        heads = (model.num_attention_heads + 2 * model.kv_heads) * d
        outputs = [(heads // t, h), (h, model.num_attention_heads * d // t), (first // t, h), (h, f // t),
                   (model.vocab_size // t, h)]
        layer = [(s, *rest) for s in (model.seq_length, 4 * model.seq_length)[: 2 if kind == "cpu" else 1]
                 for rest in outputs]
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
    wanted = [(shape, dtype) for dtype in dtypes for shape in shapes]
    times = [t for shape, dtype in wanted for t in product_seconds(shape, dtype, device, budget_s)]
    small = torch.ones(16, device=device)
    launch = device_seconds(lambda: small.add(1.0), device, budget_s)
    size = 256 << 20 if device.type == "cuda" else 64 << 20
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    copy = seconds_of(lambda: target.copy_(source), device, budget_s=4 * budget_s)
    repeats = [product_seconds(shapes[0], dtypes[0], device, budget_s / 4)[0] for _ in range(8)]
    attention = _attention(device, budget_s) if device.type == "cuda" else []
    load = load_share(_large_product(device), lambda: target.copy_(source), device)
    mine = torch.tensor([*times, launch, copy, load, *attention], dtype=torch.float64)
    spread = torch.tensor([sum(repeats), sum(r * r for r in repeats)], dtype=torch.float64)
    if ranks > 1:
        dist.all_reduce(mine)
        dist.all_reduce(spread)
        mine /= ranks
    values = mine.tolist()
    found.load = values[len(times) + 2]
    for (shape, dtype), *seconds in zip(wanted, values[::3], values[1::3], values[2::3]):
        rows, columns, inner = shape
        one, two, three = (value / found.load for value in seconds)
        found.products.append(ProductTime(*shape, dtype, one))
        found.backward += [
            ProductTime(rows, inner, columns, dtype, two, "product-input"),
            ProductTime(inner, columns, rows, dtype, three, "product-weight"),
        ]
    found.launch_s, found.stream = values[len(times)], 2.0 * size / values[len(times) + 1]
    if attention:
        operations = _attention_operations()
        found.attention = (operations / values[-2], 2.5 * operations / values[-1])
    total, count = spread[0].item(), 8 * ranks
    mean = total / count
    found.jitter = math.sqrt(max(spread[1].item() / count - mean * mean, 0.0)) / mean
    if ranks > 1:
        found.collectives = collective_times(device, ranks, budget_s)
    return found


def _large_product(device: torch.device) -> Callable[[], object]:
    """A product as large as those of large models, of random numbers."""
    side = 8192 if device.type == "cuda" else 64
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    return partial(torch.mm, a, b, out=torch.empty_like(a))


_ATTENTION = (2, 16, 2048, 128)
"""Batch, heads, sequence, head size."""


def _attention_operations() -> float:
    b, heads, s, d = _ATTENTION
    return 4.0 * b * heads * s * s * d / 2  # two products, the causal half


def _attention(device: torch.device, budget_s: float) -> list[float]:
    """Seconds of the forward and of the backward."""
    q, k, v = (torch.randn(_ATTENTION, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    grad = torch.randn(_ATTENTION, device=device, dtype=torch.bfloat16)

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    once = device_seconds(forward, device, budget_s)
    both = device_seconds(lambda: torch.autograd.grad(forward(), (q, k, v), grad), device, budget_s)
    return [once, max(both - once, 1e-9)]


def _reserved(device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free - torch.cuda.memory_reserved(device))
    return int(psutil.Process(os.getpid()).memory_info().rss)
