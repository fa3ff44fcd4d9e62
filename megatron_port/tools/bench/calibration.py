"""From measurements of one node to the TOML that a run extends. Pure.

A cluster that has a ``[hardware]`` section gets a ``[calibration]``: three factors, measured over planned. One that
has none (a machine with only CPUs) gets a whole ``[hardware]`` section.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_port.core.config.checks import resolve
from megatron_port.core.config.dump import toml_value
from megatron_port.core.config.layout import with_values
from megatron_port.core.config.schema import CalibrationConfig, ClusterConfig, HardwareConfig, ModelConfig, RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.rank import DeviceInfo
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.run.build import build_engine
from megatron_port.tools.bench.measure import (
    DTYPES,
    CollectiveTime,
    collective_times,
    device_seconds,
    load_share,
    mean_over_ranks,
    overlap_share,
    product_seconds,
    seconds_of,
)
from megatron_port.tools.plan.case import Case, Entry, KernelTable, Machine, band, case_of, held_out_errors
from megatron_port.tools.plan.layer import layer_products, start_seconds
from megatron_port.tools.plan.rates import Links, Rates, span
from megatron_port.tools.plan.step import optimizer_seconds

# What one node does, measured on all its ranks at once, as in training: products by shape, memory, collectives.
#
# Every rank calls :func:`measure` with the same arguments; the times that come back are alike on all: of kernels the
# mean over the ranks, of collectives the slowest.

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
    """product | product-input | product-weight: see ``plan.case``"""

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
# timed in models wide enough that its products leave nothing of the host's own data in a core's cache, as in a run;
# the products are measured by themselves and taken off.
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
    # What is measured is the host's work, of which a replayed graph has none.
    run = RunConfig(cluster=config.cluster, backend=replace(config.backend, graphs="off"), model=model)
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


FILLS = (0, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
WIDTH = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Fit:
    """Result of a calibration: the machine with it, and its errors."""

    machine: Machine
    """The planner's machine with it."""
    fresh: bool
    """A whole [hardware] section was made; otherwise a [calibration]."""
    product_error: float
    """Median of |planned ÷ measured − 1| over the products afterwards."""


def planned_product(machine: Machine, p: ProductTime) -> float:
    """Seconds that the planner gives a product."""
    return Rates.of(machine).product(p.rows, p.columns, p.inner, width=WIDTH[p.dtype])


def _ratio(pairs: Iterable[tuple[float, float]]) -> float:
    """Median of first ÷ second, in the logarithm."""
    return math.exp(statistics.median(math.log(a / b) for a, b in pairs))


def ring_fit(times: list[CollectiveTime], ranks: int) -> tuple[float, float]:
    """Return (bytes per second and direction of a rank, seconds of a hop) of a ring through all-reduce times.

    time = 2(r−1)/r · size / bandwidth + 2(r−1) · hop, as ``plan.rates`` has it: the bandwidth from the largest buffer,
    the hop from the smallest.
    """
    mine = sorted((t for t in times if t.kind == "all-reduce"), key=lambda t: t.size)
    small, large = mine[0], mine[-1]
    share = 2 * (ranks - 1) / ranks
    slope = max(large.seconds - small.seconds, 1e-9) / (large.size - small.size)
    bandwidth = share / slope
    hop = max(small.seconds - share * small.size / bandwidth, 0.0) / (2 * (ranks - 1))
    return bandwidth, hop


def calibrated(cluster: ClusterConfig, hardware: HardwareConfig, found: Measured, *, source: str) -> Fit:
    """Factors for a described cluster."""
    plain = Machine(cluster=cluster, hardware=hardware, calibration=CalibrationConfig())
    half = [p for p in found.products if WIDTH[p.dtype] == 2]
    matmul = _ratio((planned_product(plain, p), p.seconds) for p in half)
    memory = found.stream / (hardware.memory_bandwidth_gb * 1e9 * hardware.memory_efficiency)
    network = 1.0
    if found.ranks > 1:
        network = _network_factor(plain, found)
    factors = CalibrationConfig(
        matmul_scale=_rounded(matmul), memory_scale=_rounded(memory), network_scale=_rounded(network),
        overlap_share=_rounded(overlap_share(found.collectives)), source=source,
    )
    machine = replace(plain, calibration=factors)
    return Fit(machine, False, _error(machine, half))


def kernel_entries(found: Measured, *, source: str) -> list[Entry]:
    """The measurements as a table that the planner interpolates in (``plan.case``)."""
    out = [
        Entry(p.op, "", p.dtype, (p.rows, p.columns, p.inner), p.tflops, source)
        for p in (*found.products, *found.backward) if p.dtype != "fp16"
    ]
    out.append(Entry("stream", "", "", (64e6,), found.stream / 1e9, source))
    out += [replace(e, source=source) for e in found.entries]
    out += [
        Entry(t.kind, "", "", (t.ranks(found.ranks), t.size), t.size / t.seconds / 1e9, source)
        for t in found.collectives
    ]
    out += [
        Entry(f"{t.kind}-hidden", "", "", (found.ranks, t.size), max(overlap_share([t]), 1e-3), source)
        for t in found.collectives if t.kind != "transfer"
    ]
    return out


def held_out_band(machine: Machine, found: Measured) -> float:
    """Share within which two thirds of the products lie when each is foretold from the others."""
    errors: list[float] = []
    for op, dtype in {(p.op, p.dtype) for p in (*found.products, *found.backward)}:
        def formula(shape: tuple[float, ...], dtype: str = dtype) -> float:
            rows, columns, inner = (int(n) for n in shape)
            planned = planned_product(machine, ProductTime(rows, columns, inner, dtype, 1.0))
            return 2e-12 * rows * columns * inner / planned

        entries = [e for e in kernel_entries(found, source="") if e.op == op and e.dtype == dtype]
        errors += held_out_errors(entries, formula)
    return band(errors)


def held_out_passes(found: Measured) -> float:
    """Predict passes over memory and attention likewise, each size from the op's other sizes."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for e in found.entries:
        groups.setdefault((e.op, e.provider, e.dtype), []).append(e)
    errors = []
    for (op, provider, dtype), entries in groups.items():
        for i, e in enumerate(entries if len(entries) > 1 else ()):
            others = KernelTable([*entries[:i], *entries[i + 1 :]])
            one = len(e.shape) == 1
            rate = others.rate(op, dtype, *e.shape) if one else others.curve(op, provider, dtype, *e.shape)
            errors.append((rate or e.rate) / e.rate - 1)
    return band(errors)


def held_out_collectives(machine: Machine, found: Measured) -> float:
    """Predict collectives likewise, each size from the others."""
    links, errors = Links.of(machine), list[float]()
    bandwidth = links.local_bandwidth(span(machine, max(found.ranks, 1), 1))
    for kind in {t.kind for t in found.collectives} - {"transfer"}:
        entries = [e for e in kernel_entries(found, source="") if e.op == kind]

        def rate(shape: tuple[float, ...], kind: str = kind) -> float:
            rounds = 2 if kind == "all-reduce" else 1
            return shape[1] / links.within(shape[1], int(shape[0]), bandwidth, rounds) / 1e9

        errors += held_out_errors(entries, rate)
    return band(errors)


def _network_factor(machine: Machine, found: Measured) -> float:
    """Measured over planned bandwidth of the largest collectives; their hops, which the factor leaves alone, apart."""
    most = max(t.size for t in found.collectives)
    silent = replace(machine, hardware=replace(machine.hardware, node_latency_us=0.0, network_latency_us=0.0))
    group = span(machine, found.ranks, 1)

    def pair(t: CollectiveTime) -> tuple[float, float]:
        kind = "all-reduce" if t.kind == "all-reduce" else "half"
        bare = Links.of(silent).collective(t.size, group, kind=kind)
        hops = Links.of(machine).collective(t.size, group, kind=kind) - bare
        return bare, max(t.seconds - hops, 0.05 * t.seconds)

    return _ratio(pair(t) for t in found.collectives if 2 * t.size > most and t.kind != "transfer")


def described(cluster: ClusterConfig, found: Measured, *, source: str) -> Fit:
    """A whole description of a machine that had none: every number measured."""
    best = {
        dtype: max((p.tflops for p in found.products if p.dtype == dtype), default=0.0)
        for dtype in ("bf16", "fp16", "fp32")
    }
    half = max(best["bf16"], best["fp16"])
    bandwidth, hop = ring_fit(found.collectives, found.ranks) if found.ranks > 1 else (found.stream, found.launch_s)
    attention = found.attention or (0.0, 0.0)
    starts = any(e.op == "host" for e in found.entries)  # then a kernel's start is part of the host's time
    is_host = found.kind == "cpu" and starts
    hardware = HardwareConfig(
        device=found.device, is_host=is_host,
        matmul_tflops=_rounded(half or best["fp32"]), fp32_matmul_tflops=_rounded(best["fp32"]), compute_units=1,
        tile_rows=64, tile_columns=64, inner_fill=0,
        launch_us=0.0 if is_host else _rounded(found.launch_s * 1e6),
        memory_bandwidth_gb=_rounded(found.stream / 1e9), memory_efficiency=1.0,
        attention_forward_tflops=_rounded(attention[0] / 1e12), attention_backward_tflops=_rounded(attention[1] / 1e12),
        reserved_gb=_rounded(found.reserved_bytes / 1e9), fragmentation=0.0, node_gb=_rounded(bandwidth / 1e9),
        node_efficiency=1.0, node_latency_us=_rounded(hop * 1e6), jitter=_rounded(min(found.jitter, 0.25)),
    )
    cluster = replace(
        cluster, gpus_per_node=found.ranks, memory_gb=cluster.memory_gb or _rounded(found.memory_bytes / 1e9),
        peak_tflops=cluster.peak_tflops or _rounded(max(best.values())),
    )
    calibration = CalibrationConfig(overlap_share=_rounded(overlap_share(found.collectives)), source=source)
    machine = Machine(cluster=cluster, hardware=hardware, calibration=calibration)
    fills = [replace(machine, hardware=replace(hardware, inner_fill=fill)) for fill in FILLS]
    machine = min(fills, key=lambda m: _error(m, found.products))
    return Fit(machine, True, _error(machine, found.products))


def _error(machine: Machine, products: list[ProductTime]) -> float:
    return statistics.median(abs(planned_product(machine, p) / p.seconds - 1) for p in products)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def to_toml(fit: Fit, found: Measured, *, extends: str, table_name: str = "") -> str:
    """The file: what a run extends, with the measurements as comments.

    ``table_name``: the file that has them as a table.
    """
    m = fit.machine
    lines = [
        f"# Measured by megatron-port bench calibrate: {found.ranks} rank{'s' if found.ranks > 1 else ''} of "
        f"{found.device} ({found.kind}) on one node, all at work; torch {found.torch}.",
        f"# A run extends this file instead of {extends}.",
        f"extends = {toml_value(extends)}", "",
    ]
    if fit.fresh:
        lines += ["[cluster]", f"gpus_per_node = {m.cluster.gpus_per_node}  # ranks that were measured together",
                  f"memory_gb = {m.cluster.memory_gb}  # of a rank", f"peak_tflops = {m.cluster.peak_tflops}  # no "
                  "datasheet: the best rate measured", "", "[hardware]"]
        plain = HardwareConfig()
        lines += [f"{name} = {toml_value(value)}" for name, value in vars(m.hardware).items()
                  if value != getattr(plain, name)]
        lines.append("")
    else:
        lines += ["[calibration]", f"matmul_scale = {m.calibration.matmul_scale}",
                  f"memory_scale = {m.calibration.memory_scale}",
                  f"network_scale = {m.calibration.network_scale}  # from the links within the node"]
    if fit.fresh and (table_name or m.calibration.overlap_share != 1.0):
        lines.append("[calibration]")
    if m.calibration.overlap_share != 1.0:
        lines.append(f"overlap_share = {m.calibration.overlap_share}  # of collectives, behind products beside them")
    lines += [f"table = {toml_value(table_name)}"] if table_name else []
    lines += [f"source = {toml_value(m.calibration.source)}", ""] if table_name or not fit.fresh else []
    return "\n".join([*lines, *(f"# {line}".rstrip() for line in table(fit, found))]) + "\n"


def table(fit: Fit, found: Measured) -> list[str]:
    """Every measurement beside what the planner says with this description."""
    m = fit.machine
    out = ["rows x columns x inner     dtype  measured TFLOP/s  planned"]
    for p in found.products:
        operations = 2.0 * p.rows * p.columns * p.inner / 1e12
        out.append(f"{f'{p.rows} x {p.columns} x {p.inner}':<26} {p.dtype:<5} {p.tflops:>17.4g} "
                   f"{operations / planned_product(m, p):>8.4g}")
    out.append(f"median error of the products {fit.product_error:.1%}; memory {found.stream / 1e9:.4g} GB/s; "
               f"a small kernel {found.launch_s * 1e6:.3g} us; spread of equal work {found.jitter:.2%}")
    if found.load < 1.0:
        out.append(f"products as in a step's steady load, {found.load:.1%} of a burst's rate")
    out.append(
        f"held out: two thirds of the products within {held_out_band(m, found):.1%} of what the others foretell, of "
        f"passes and attention {held_out_passes(found):.1%}, of collectives {held_out_collectives(m, found):.1%}"
    )
    for e in found.entries:
        shape = "x".join(f"{size:g}" for size in e.shape)
        out.append(f"{e.op:<20} {shape:>14} {e.dtype:<5} {e.rate:>10.4g}")
    if found.attention:
        out.append(f"attention, causal half: forward {found.attention[0] / 1e12:.4g}, backward "
                   f"{found.attention[1] / 1e12:.4g} TFLOP/s")
    if found.collectives:
        links, group = Links.of(m), span(m, found.ranks, 1)
        out.append(f"collectives of {found.ranks} ranks      bytes  measured us  planned us  hidden behind a product")
        for t in found.collectives:
            if t.kind == "transfer":
                out.append(f"{t.kind:<16} {t.size:>14,} {t.seconds * 1e6:>12.4g}")
                continue
            kind = "all-reduce" if t.kind == "all-reduce" else "half"
            planned = links.collective(t.size, group, kind=kind)
            out.append(f"{t.kind:<16} {t.size:>14,} {t.seconds * 1e6:>12.4g} {planned * 1e6:>11.4g}  "
                       f"{overlap_share([t]):.0%}")
    return out
