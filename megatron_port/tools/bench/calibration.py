"""From measurements of one node to the TOML that a run extends. Pure.

A cluster that has a ``[hardware]`` section gets a ``[calibration]``: three factors, measured over planned. One that
has none (a machine with only CPUs) gets a whole ``[hardware]`` section.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron_port.core.config.dump import toml_value
from megatron_port.core.config.schema import CalibrationConfig, ClusterConfig, HardwareConfig
from megatron_port.tools.bench.exchanges import CollectiveTime, overlap_share
from megatron_port.tools.bench.probe import Measured, ProductTime
from megatron_port.tools.plan.case import Machine
from megatron_port.tools.plan.kernel_table import Entry, KernelTable, band, held_out_errors
from megatron_port.tools.plan.links import Links, span
from megatron_port.tools.plan.rates import Rates

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

    time = 2(r−1)/r · size / bandwidth + 2(r−1) · hop, as ``plan.links`` has it: the bandwidth from the largest buffer,
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
    """The measurements as a table that the planner interpolates in (``plan.kernel_table``)."""
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
