"""What this program's 8-bit products (precision.fp8) add to a plan: passes over memory, and copies of the weights.

The casts are torch's ops, one after the other: an operand is read for its largest element (2 bytes an element),
multiplied (2 + 2) and rounded (2 + 1); for a product that sums over its other dimension it is transposed in 8 bits
(1 + 1).
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_port.plan.case import Case
from megatron_port.plan.rates import Rates

QUANTISE = 9.0
"""Bytes an element."""
WITH_SCALE = 7.0
"""Bytes an element whose scale is known."""
TRANSPOSE = 2.0
LAUNCHES = 8
"""Of quantising an operand: three passes and the scale's arithmetic."""
WIDE_SUM = 16.0
"""Bytes an element of a weight gradient: an fp32 product is written, read and added to the sum in a pass of its own."""

Products = Sequence[tuple[float, float, float]]
"""[rows, columns, inner] of each linear's forward product."""


def cast_seconds(case: Case, rates: Rates, products: Products) -> tuple[float, float]:
    """Seconds of a layer's casts in a forward and in a backward of one micro-batch.

    The weights', made once a step, are shared among its micro-batches. Without the sum of ``WIDE_SUM``.
    """
    inputs = sum(r * k for r, _, k in products)
    gradients = sum(r * c for r, c, _ in products)
    weights = sum(c * k for _, c, k in products) / case.micro_batches
    count = len(products)
    forward = rates.stream(QUANTISE * (inputs + weights), LAUNCHES * count)
    if case.fp8 == "rowwise":
        moved = QUANTISE * gradients + (QUANTISE + TRANSPOSE) * weights
        return forward, rates.stream(moved, LAUNCHES * count)
    moved = (QUANTISE + TRANSPOSE) * gradients + (WITH_SCALE + TRANSPOSE) * inputs + TRANSPOSE * weights
    return forward, rates.stream(moved, 2 * LAUNCHES * count)


def copy_bytes(case: Case, stage: int) -> float:
    """Of the weights of a stage's linears in 8 bits, as they are and transposed, held while a step's passes run."""
    m = case.model
    qkv = m.head_size * (2 * m.num_attention_heads + 2 * m.kv_heads)
    mlp = m.ffn_size * (3 if m.activation == "swiglu" else 2)
    return 2.0 * case.stage_layers(stage) * m.hidden_size * (qkv + mlp) / case.tp if case.fp8 != "none" else 0.0
