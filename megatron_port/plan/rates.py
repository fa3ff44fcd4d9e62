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
from dataclasses import dataclass
from functools import lru_cache

from megatron_port.plan.case import Machine
from megatron_port.plan.kernel_table import KernelTable

BLOCK = 128
"""Positions of a block of a fused attention kernel (FlashAttention-2: 128 x 64 or 128 x 128)."""
LENGTH = 2048
"""Positions that a cluster's attention rates are of."""
CACHE_SHARE = 0.75
"""Share of a small tile's additional reads that the L2 cache and the overlap with arithmetic hide (unverified)."""


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
    """What was measured, where it is used instead of or beside the formulas."""

    @classmethod
    def of(cls, machine: Machine) -> Rates:
        """Rates of a machine's device."""
        h, k = machine.hardware, machine.calibration
        return cls(
            matmul=h.matmul_tflops * 1e12 * k.matmul_scale, fp8=h.fp8_matmul_tflops * 1e12 * k.matmul_scale,
            fp8_exact=h.fp8_matmul_tflops * 1e12 * k.matmul_scale * h.fp8_exact_share,
            units=h.compute_units, tile=(h.tile_rows, h.tile_columns), fill=h.inner_fill,
            attention_forward=h.attention_forward_tflops * 1e12,
            attention_backward=h.attention_backward_tflops * 1e12,
            launch=h.launch_us * 1e-6, epilogue_overlap=h.epilogue_overlap,
            memory=h.memory_bandwidth_gb * 1e9 * h.memory_efficiency * k.memory_scale,
            fp32=h.fp32_matmul_tflops * 1e12 * k.matmul_scale, host=h.host_us * 1e-6,
            attention_scale=k.attention_scale, table=machine.table,
        )

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

    def stream(self, size: float, kernels: int = 1) -> float:
        """Seconds to move ``size`` bytes in ``kernels`` kernels."""
        return size / self.memory + kernels * self.launch

    def dropout(self, elements: float, width: int) -> float:
        """Seconds to draw a mask for so many elements and apply it, ``width`` bytes moved for each: random numbers take
        longer than the bytes where the table has their rate."""
        found = self.table.group("dropout") if self.table is not None else []
        return max(self.stream(elements * width), elements / (found[0].rate * 1e9) if found else 0.0)

    def product(
        self, rows: float, columns: float, inner: float, *, width: int = 2, batch: float = 1, exact: bool = False
    ) -> float:
        """Seconds of ``batch`` products [rows, inner] x [inner, columns]; ``width``: bytes of an element (1: fp8).

        ``exact``: fp8 sums are kept in fp32, as those of gradients are, which slows some devices.
        """
        peak = (self.fp8_exact if exact else self.fp8) if width == 1 else 0.0
        return _product(self, math.ceil(rows), math.ceil(columns), math.ceil(inner), width, batch, peak)


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
            best = max(best, whole / (waves * rates.units) * rate)
    return best * inner / (inner + rates.fill)


@lru_cache(maxsize=65536)
def _product(rates: Rates, rows: int, columns: int, inner: int, width: int, batch: float, fp8: float) -> float:
    if not rows or not columns or not inner:
        return 0.0
    ratio = _measured(rates, rows, columns, inner, width) if rates.table is not None and batch == 1 else 1.0
    return _analytic(rates, rows, columns, inner, width, batch, fp8) / ratio


DTYPES = {1: "fp8", 2: "bf16", 4: "fp32"}


def _measured(rates: Rates, rows: int, columns: int, inner: int, width: int) -> float:
    """Measured over planned rate of a product; 1 where the table has nothing near."""
    def formula(shape: tuple[float, ...]) -> float:
        r, c, k = (int(x) for x in shape)
        return 2.0 * r * c * k / _analytic(rates, r, c, k, width, 1, rates.fp8) / 1e12

    assert rates.table is not None
    return rates.table.ratio("product", "", DTYPES.get(width, ""), (rows, columns, inner), formula) or 1.0


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
