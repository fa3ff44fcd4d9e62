"""How long one kernel takes: products by shape, streaming by bytes, fused attention by operations.

A product of [rows, inner] by [inner, columns] runs as output tiles, one a compute unit
at a time. Three losses are counted, each with a physical cause:

* waves: ceil(tiles / units) rounds of tiles run, the last one partly empty, and edge tiles are padded;
* filling and emptying a tile's pipeline: inner / (inner + fill);
* smaller tiles, which a library takes where they waste less, read more for each operation:
  (1/rows + 1/columns) of the large tile over that of the small one bounds their rate, softened by the cache.

The time is the larger of that and of the operands' bytes at the achieved memory bandwidth (roofline). Where a block
computes one tile and ends (before Hopper), nothing is multiplied while tiles are written: reading hides behind the
arithmetic, but writing comes on top where it takes longer than a tile's pipeline to fill. It is what an attention
product of 64 to 128 inner steps mostly does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from megatron_port.tools.plan.case import Machine
from megatron_port.tools.plan.kernel_table import KernelTable

BLOCK = 128
"""Positions of a block of a fused attention kernel (FlashAttention-2: 128 x 64 or 128 x 128)."""
LENGTH = 2048
"""Positions that a cluster's attention rates are of."""
CACHE_SHARE = 0.75
"""Share of a small tile's additional reads that the L2 cache and the overlap with arithmetic hide (unverified)."""


CORE_INNER = 64
"""Rows, columns and inner dimension of the products that stand for the core of a mixer without a rate of its own."""


@dataclass(frozen=True)
class Rates:
    """Rates that one device of a cluster achieves, after calibration: FLOP/s, bytes/s, seconds."""

    matmul: float
    fp8: float
    units: int
    tile: tuple[int, int]
    fill: int
    attention_forward: float
    attention_backward: float
    launch: float
    memory: float
    epilogue_overlap: bool = False
    """A tile is written while the next one is multiplied."""
    fp8_exact: float = 0.0
    """``fp8`` where sums are kept in fp32."""
    fp32: float = 0.0
    """0: a quarter of ``matmul``."""
    attention_scale: float = 1.0
    host: float = 0.0
    """Seconds of the host for one operation; 0: not known."""
    table: KernelTable | None = None
    """Measured operations, used instead of or beside the formulas."""

    @classmethod
    def of(cls, machine: Machine) -> Rates:
        """Rates of a machine's device."""
        h, k, table = machine.hardware, machine.calibration, machine.table
        host = _seconds_of_a(table, "host")
        return cls(
            matmul=h.matmul_tflops * 1e12 * k.matmul_scale, fp8=h.fp8_matmul_tflops * 1e12 * k.matmul_scale,
            fp8_exact=h.fp8_matmul_tflops * 1e12 * k.matmul_scale * h.fp8_exact_share,
            units=h.compute_units, tile=(h.tile_rows, h.tile_columns), fill=h.inner_fill,
            attention_forward=h.attention_forward_tflops * 1e12,
            attention_backward=h.attention_backward_tflops * 1e12,
            launch=h.launch_us * 1e-6, epilogue_overlap=h.epilogue_overlap,
            memory=h.memory_bandwidth_gb * 1e9 * h.memory_efficiency * k.memory_scale,
            fp32=h.fp32_matmul_tflops * 1e12 * k.matmul_scale, host=host or h.host_us * 1e-6,
            attention_scale=k.attention_scale, table=table,
        )

    @property
    def host_recompute(self) -> float:
        """Seconds of the host for running a layer's forward pass again; 0: not known."""
        return _seconds_of_a(self.table, "host-recompute")

    @property
    def host_micro_batch(self) -> float:
        """Seconds of the host for a micro-batch beyond its layers: embedding, head, loss, schedule; 0: not known."""
        return _seconds_of_a(self.table, "host-micro-batch")

    @property
    def host_step(self) -> float:
        """Seconds of the host for a step beyond its micro-batches; 0: not known."""
        return _seconds_of_a(self.table, "host-step")

    def attention(self, provider: str, length: float, head: float) -> tuple[float, float]:
        """FLOP/s of fused attention's forward and backward over the operations of the causal half.

        From the table, by the provider's own curve. Else the cluster's one number, which is of ``LENGTH`` positions,
        by how much of the blocks of ``BLOCK`` positions on the diagonal is masked.
        """
        if self.table is not None:
            forward = self.table.curve("attention-forward", provider, "", length, head)
            backward = self.table.curve("attention-backward", provider, "", length, head)
            if forward and backward:
                return forward * 1e12 * self.attention_scale, backward * 1e12 * self.attention_scale
        shape = self.attention_scale * (1 + BLOCK / LENGTH) / (1 + BLOCK / max(length, 1.0))
        return self.attention_forward * shape, self.attention_backward * shape

    def attention_here(self, dtype: str, length: float, head: float) -> tuple[float, float] | None:
        """FLOP/s of the attention that the program takes on this machine, as it was measured; None: it was not."""
        if self.table is None or not self.table.has("attention-forward", "here", dtype):
            return None
        forward, backward = (
            self.table.curve(f"attention-{way}", "here", dtype, length, head) for way in ("forward", "backward")
        )
        return None if not forward or not backward else (forward * 1e12, backward * 1e12)

    def stream(self, size: float, kernels: int = 1) -> float:
        """Seconds to move ``size`` bytes in ``kernels`` kernels."""
        return size / self.memory + kernels * self.launch

    def dropout(self, elements: float, width: int) -> float:
        """Seconds to draw a mask for so many elements and apply it, ``width`` bytes moved for each: random numbers take
        longer than the bytes where the table has their rate."""
        found = self.table.group("dropout") if self.table is not None else []
        return max(self.stream(elements * width), elements / (found[0].rate * 1e9) if found else 0.0)

    def measured(self, op: str, dtype: str) -> bool:
        """Whether the table has an op's rate."""
        return self.table is not None and bool(self.table.group(op, "", dtype))

    def passes(self, sizes: Mapping[str, float], kernels: int, dtype: str) -> float:
        """Seconds of passes over memory, op → bytes: at its own rate where that was measured, else at a copy's."""
        seconds, unknown = 0.0, 0.0
        for op, size in sizes.items():
            rate = None if self.table is None else self.table.rate(op, dtype, size)
            if rate is None:
                unknown += size
            else:
                seconds += size / (rate * 1e9)
        return seconds + self.stream(unknown, kernels)

    def adds_gradient(self, width: int) -> bool:
        """Whether the measured products of weights' gradients add them to their sums."""
        return self.table is not None and self.table.has("product-weight", "", DTYPES.get(width, ""))

    def product(
        self, rows: float, columns: float, inner: float, *, width: int = 2, batch: float = 1, exact: bool = False,
        op: str = "product",
    ) -> float:
        """Seconds of ``batch`` products [rows, inner] x [inner, columns]; ``width``: bytes of an element (1: fp8).

        ``exact``: fp8 sums are kept in fp32, as those of gradients are, which slows some devices. ``op``: which of a
        linear layer's, product | product-input | product-weight, where they were measured apart.
        """
        peak = (self.fp8_exact if exact else self.fp8) if width == 1 else 0.0
        return _product(self, math.ceil(rows), math.ceil(columns), math.ceil(inner), width, batch, peak, op)

    def core(self, operations: float, width: int) -> tuple[float, float]:
        """Estimate the seconds of the forward and the backward pass of so many operations between projections that are
        no attention, as square products of ``CORE_INNER``."""
        each = self.product(CORE_INNER, CORE_INNER, CORE_INNER, width=width, batch=operations / (2 * CORE_INNER**3))
        return each, 2 * each


def efficiency(rates: Rates, rows: int, columns: int, inner: int, batch: float = 1) -> float:
    """Share of the device's best matmul rate that this shape allows, over the best of the library's tiles."""
    large = rates.tile
    best = 0.0
    for shrink_rows, shrink_columns in ((1, 1), (2, 1), (1, 2), (2, 2), (4, 2)):
        r, c = max(large[0] // shrink_rows, 32), max(large[1] // shrink_columns, 32)
        for a, b in ((r, c), (c, r)):
            tiles = math.ceil(rows / a) * math.ceil(columns / b) * batch
            whole = rows * columns * batch / (a * b)
            waves = math.ceil(tiles / rates.units)
            reads = (1 / large[0] + 1 / large[1]) / (1 / a + 1 / b)
            rate = reads + (1 - reads) * CACHE_SHARE
            if rates.epilogue_overlap:
                steps = waves * inner
                rate *= steps / (steps + rates.fill * large[0] * large[1] / (a * b))
            best = max(best, whole / (waves * rates.units) * rate)
    return best if rates.epilogue_overlap else best * inner / (inner + rates.fill)


@lru_cache(maxsize=65536)
def _product(
    rates: Rates, rows: int, columns: int, inner: int, width: int, batch: float, fp8: float, op: str
) -> float:
    if not rows or not columns or not inner:
        return 0.0
    ratio = _measured(rates, rows, columns, inner, width, op) if rates.table is not None and batch == 1 else 1.0
    return _analytic(rates, rows, columns, inner, width, batch, fp8) / ratio


DTYPES = {1: "fp8", 2: "bf16", 4: "fp32"}


def _seconds_of_a(table: KernelTable | None, op: str) -> float:
    """Seconds of one call of an op whose rate is in 10^6 a second; 0: not measured."""
    rate = None if table is None else table.rate(op, "", 1.0)
    return 1e-6 / rate if rate else 0.0


def _measured(rates: Rates, rows: int, columns: int, inner: int, width: int, op: str) -> float:
    """Measured over planned rate of a product; 1 where the table has nothing near."""
    def formula(shape: tuple[float, ...]) -> float:
        r, c, k = (int(x) for x in shape)
        return 2.0 * r * c * k / _analytic(rates, r, c, k, width, 1, rates.fp8) / 1e12

    assert rates.table is not None
    dtype = DTYPES.get(width, "")
    op = op if rates.table.has(op, "", dtype) else "product"
    return rates.table.ratio(op, "", dtype, (rows, columns, inner), formula) or 1.0


def _analytic(rates: Rates, rows: int, columns: int, inner: int, width: int, batch: float, fp8: float) -> float:
    peak = fp8 if width == 1 else rates.matmul
    if width >= 4:  # no 16-bit tensor rate: fp32 a quarter of it, roughly, and fp64 half of that
        peak = (rates.fp32 or rates.matmul / 4) / (width // 4)
    flops = 2.0 * rows * columns * inner * batch
    read, written = batch * width * (rows * inner + inner * columns), batch * max(width, 2) * rows * columns
    share = efficiency(rates, rows, columns, inner, batch)
    if rates.epilogue_overlap or not rates.fill:
        return max(flops / (peak * share), (read + written) / rates.memory) + rates.launch
    multiplied = flops / (peak * share) * inner / (inner + rates.fill)  # without filling a tile's pipeline
    filled = multiplied * rates.fill / inner
    return max(multiplied, read / rates.memory) + max(filled, written / rates.memory) + rates.launch
