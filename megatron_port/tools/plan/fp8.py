"""What this program's 8-bit products (precision.fp8) add to a plan: passes over memory, and copies of the weights.

torch's casts are its ops, one after the other: an operand is read for its largest element (2 bytes per element),
multiplied (2 + 2) and rounded (2 + 1); for a product that sums over its other dimension it is transposed in 8 bits
(1 + 1). Own casts read it for its largest element (2), and once more for the values and, in the same pass, their
transpose (2 + 1 + 1); rows stay in registers in between (2 + 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_port.tools.plan.case import Case
from megatron_port.tools.plan.elements import stage_kinds
from megatron_port.tools.plan.rates import Rates


@dataclass(frozen=True)
class Casts:
    """A provider's casts of a bf16 operand, each (bytes per element, kernels launched)."""

    tensor: tuple[float, int]
    """With one scale."""
    both: tuple[float, int]
    """With one scale, and transposed."""
    again: tuple[float, int]
    """Transposed alone, its scale known."""
    rows: tuple[float, int]
    """With a scale for each row."""
    columns: tuple[float, int]
    """Transposed, with a scale for each column."""


TORCH = Casts(tensor=(9.0, 7), both=(11.0, 8), again=(9.0, 4), rows=(9.0, 8), columns=(11.0, 9))
OWN = Casts(tensor=(5.0, 2), both=(6.0, 2), again=(3.0, 1), rows=(3.0, 1), columns=(5.0, 3))
WIDE_SUM = 16.0
"""Bytes an element of a weight gradient: an fp32 product is written, read and added to the sum in a pass of its own."""

MatmulShapes = Sequence[tuple[float, float, float]]
"""[rows, columns, inner] of each linear's forward product."""


def cast_seconds(case: Case, rates: Rates, products: MatmulShapes) -> tuple[float, float]:
    """Seconds of a layer's casts in a forward and in a backward of one micro-batch.

    The weights', made once per step, are shared among its micro-batches. Without the sum of ``WIDE_SUM``.
    """
    casts = OWN if case.quantise == "own" else TORCH
    count, share = len(products), 1 / case.micro_batches
    inputs, gradients = sum(r * k for r, _, k in products), sum(r * c for r, c, _ in products)
    weights = sum(c * k for _, c, k in products)

    def seconds(*made: tuple[tuple[float, int], float, float]) -> float:
        """Return the seconds of casts, each (cast, elements, share of them that a micro-batch pays for)."""
        return sum(part * rates.stream(cast[0] * elements, cast[1] * count) for cast, elements, part in made)

    if case.fp8 == "rowwise":
        return (
            seconds((casts.rows, inputs, 1.0), (casts.rows, weights, share)),
            seconds((casts.rows, gradients, 1.0), (casts.columns, weights, share)),
        )
    return (
        seconds((casts.tensor, inputs, 1.0), (casts.both, weights, share)),
        seconds((casts.both, gradients, 1.0), (casts.again, inputs, 1.0)),
    )


def copy_bytes(case: Case, stage: int) -> float:
    """Return the bytes of the 8-bit copies of a stage's linear weights, plain and transposed, held during a step."""
    if case.fp8 == "none":
        return 0.0
    held = 0.0
    for layer, count in stage_kinds(case, stage):
        products = (linear.product(case.tp) for linear in layer.linears)
        held += count * sum(outputs * inputs for outputs, inputs in products)
    return 2.0 * held
