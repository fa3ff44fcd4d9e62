"""What one node does, measured on all its ranks at once, as in training: products by shape, memory, collectives.

Every rank calls :func:`measure` with the same arguments; the times that come back are alike on all: of kernels the
mean over the ranks, of collectives the slowest.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_port.core.config.checks import resolve
from megatron_port.core.config.layout import with_values
from megatron_port.core.config.schema import ModelConfig, RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.rank import DeviceInfo
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.run.build import build_engine
from megatron_port.tools.bench.clock import device_seconds, load_share, seconds_of
from megatron_port.tools.bench.exchanges import CollectiveTime, collective_times
from megatron_port.tools.bench.passes import DTYPES, mean_over_ranks, product_seconds
from megatron_port.tools.plan.case import Case, Machine, case_of
from megatron_port.tools.plan.kernel_table import Entry
from megatron_port.tools.plan.layer import layer_products, start_seconds
from megatron_port.tools.plan.rates import Rates
from megatron_port.tools.plan.step import optimizer_seconds

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


# Seconds of the host: steps of the program on a few tokens of small models, and of one with more weights. No run that
# is to be planned is among them.
#
# On a GPU the models are so small that the device waits for the host. On a CPU, which computes as well, a layer is
# timed
# in models wide enough that its products leave nothing of the host's own data in a core's cache, as in a run; the
# products are measured by themselves and taken off.
#
# A step of m micro-batches takes S + m (B + L · layers): S for the step (norm, update, hashes of the state, which grow
# with the weights), B for each micro-batch, L for each of its layers.

FEW, MANY = 1, 5
"""Layers of the two small models."""
LENGTH = 8
SMALL, WIDE, WIDEST = 32, 256, 512
"""Hidden sizes."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step with no micro-batch, and of each micro-batch."""

    fixed: float
    micro_batch: float


def _config(config: RunConfig, layers: int, hidden: int, dtype: str, policy: str = "none") -> RunConfig:
    """A run of one process on this machine with a model of these sizes."""
    model = ModelConfig(
        name="host", num_layers=layers, hidden_size=hidden, num_attention_heads=2, vocab_size=256, seq_length=LENGTH,
        hidden_dropout=0.0, attention_dropout=0.0,
    )
    run = RunConfig(cluster=config.cluster, backend=config.backend, model=model)
    return resolve(with_values(run, {
        "engine": "native", "batch.micro_batch_size": 1, "batch.global_batch_size": 4, "precision.dtype": dtype,
        "layout.zero_stage": 1, "layout.data_parallel_size": 1, "activations.policy": policy,
    }), 1)


def step_time(config: RunConfig, device: DeviceInfo, budget_s: float) -> StepTime:
    """Median times of steps of two and of four micro-batches, taken apart."""
    dtype = DTYPES[config.precision.dtype]
    providers = choose_providers(config.backend, device, dtype, engine="native")
    engine = build_engine(config, ParallelContext.single(device.torch_device), providers)
    tokens = torch.arange(LENGTH).expand(1, LENGTH).contiguous()
    times: dict[int, list[float]] = {2: [], 4: []}
    ends, step = time.perf_counter() + budget_s, 0
    while len(times[2]) < 6 or time.perf_counter() < ends:
        for count, found in times.items():
            batches = [MicroBatch(sample_ids=(i,), tokens=tokens, labels=tokens) for i in range(count)]
            started = time.perf_counter()
            engine.train_step(batches, step=step, lr=1e-4)  # its loss is a number: the device has finished
            found.append(time.perf_counter() - started)
            step += 1
    two, four = (statistics.median(found[2:]) for found in times.values())
    return StepTime(max(2 * two - four, 0.0), (four - two) / 2)


def host_entries(
    config: RunConfig, device: DeviceInfo, machine: Machine, dtype: str, ranks: int, budget_s: float
) -> list[Entry]:
    """The host's seconds as a table's entries, the mean over the ranks, all of which call this."""
    small = [_config(config, layers, SMALL, dtype) for layers in (FEW, MANY)]
    wide = [_config(config, layers, WIDE, dtype) for layers in (FEW, MANY)]
    again = _config(config, MANY, SMALL if device.is_gpu else WIDE, dtype, "full")
    runs = [*small, *(small if device.is_gpu else wide), again, _config(config, 2, WIDEST, dtype)]
    found = [step_time(one, device, (4 if one in small else 10) * budget_s) for one in runs]
    fixed = mean_over_ranks([one.fixed for one in found], ranks)
    passes = mean_over_ranks([one.micro_batch for one in found], ranks)
    forward, backward = mean_over_ranks(_products(wide[0], device, dtype, budget_s), ranks)
    layer = max((passes[3] - passes[2]) / (MANY - FEW) - forward - backward, 1e-9)
    repeated = max((passes[4] - passes[3]) / MANY - forward, 1e-9)
    micro_batch = passes[0] - FEW * (passes[1] - passes[0]) / (MANY - FEW)
    cases, counted = [_case(runs[i]) for i in (0, -1)], replace(
        Rates.of(machine), memory=1.0, launch=0.0, table=None, host=1.0
    )
    calls = sum(start_seconds(cases[0], model_spec(cases[0].model).layers[0], counted))
    few, many = (optimizer_seconds(case, counted) for case in cases)  # at a byte a second: their bytes
    update = max((fixed[-1] - fixed[0]) / (many - few), 1e-15)
    entries = [
        Entry("host", "", "", (1,), 1e-6 * calls / layer),
        Entry("host-recompute", "", "", (1,), 1e-6 / repeated),
        Entry("host-micro-batch", "", "", (1,), 1e-6 / max(micro_batch, 1e-9)),
        Entry("host-step", "", "", (1,), 1e-6 / max(fixed[0] - few * update, 1e-9)),
    ]
    # On a GPU the small models' updates are launches; a large one's is a pass over memory, which is measured as such.
    return entries if device.is_gpu else [*entries, Entry("update", "", dtype, (many,), 1e-9 / update)]


def _products(config: RunConfig, device: DeviceInfo, dtype: str, budget_s: float) -> list[float]:
    """Seconds of a layer's products in a forward and in a backward pass; 0 on a GPU, where the host starts them."""
    if device.is_gpu:
        return [0.0, 0.0]
    case = _case(config)
    shapes = layer_products(case, model_spec(case.model).layers[0])
    found = [product_seconds((int(r), int(c), int(k)), dtype, device.torch_device, budget_s) for r, c, k in shapes]
    return [sum(one for one, *_ in found), sum(two + three for _, two, three in found)]


def _case(config: RunConfig) -> Case:
    return case_of(config, 1)[0]
