"""Half precision: is a layout's run within what rounding may do to it?

Three questions, each with its bounds (``parity.comparison``): is the first step that of one process which rounds where
the layout does, are the steps after it as near to that process as its own reordered sums are to one another, and is
that process itself near to the plain one and to fp32? Without the last, an error that the layout and the emulation
have in common would be seen by neither.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_port.core.config.schema import RunConfig
from megatron_port.tools.parity.comparison import (
    FIRST_STEP,
    FP32,
    ROUNDOFF,
    SPREAD_FACTOR,
    Deviation,
    Run,
    compare,
    distances,
    first_step,
    spread,
)
from megatron_port.tools.parity.reduction_order import ORDERS


@dataclass(frozen=True)
class SingleRuns:
    """Runs of one process that half precision is judged by; what is not needed is not run."""

    rounding_there: Run
    """Rounds where the layout does."""
    ordered: Callable[[int], Sequence[Run]]
    """The first so many of ``reorder.ORDERS``."""
    plain: Callable[[], Run]
    """Cuts no sum; its first step."""
    fp32: Callable[[], Run]
    """Its first step."""
    noisy: Callable[[], Sequence[Run]]
    """First steps with random errors instead of rounding (``parity.rounding_noise``)."""


def within_rounding(config: RunConfig, other: Run, single: SingleRuns) -> list[Deviation]:
    """Return every deviation of a layout's run in half precision (or of free-running steps in fp32), with its bound.
    ``config``: with that layout.

    Norms at the ends of branches make large what rounding leaves of them: there a first step outside its bounds is held
    to the distances of the reference, as divided sequences are, whose sums nothing emulates.

    The spread only grows with each run that it is measured with, and is never under fp32's bounds: once nothing is over
    it the verdict is that of all eight, and the others are not run. Products in 8 bits have the spread alone: ranks
    scale their pieces by themselves.
    """
    dtype, model, reference = config.precision.dtype, config.model, single.rounding_there
    first = FIRST_STEP.get(dtype, FP32)
    floor = replace(FP32, key_bias=first.key_bias)
    out, exact = [], config.precision.fp8 == "none"
    apart = config.layout.context_parallel_size > 1
    if exact and not apart:
        out += compare(first_step(reference), first_step(other), first, model)
        if model.norm_placement != "pre" and not all(d.ok for d in out):
            apart, out = True, []
    free: list[Deviation] = []
    alike = all(d.ok for d in out)  # else the verdict stands, and what later steps make of it says nothing
    for measured in (0, 3, 5, len(ORDERS)) if alike else ():
        bound = spread(single.ordered(measured), model, name=dtype, floor=floor).scaled(SPREAD_FACTOR)
        what = f"the spread of {measured} orders" if measured else "fp32's bounds"
        free = compare(reference, other, replace(bound, name=f"all steps, {SPREAD_FACTOR:g} x {what}"), model)
        if all(d.ok for d in free):
            break
    out += free
    if dtype in ROUNDOFF and exact:
        noise = functools.cache(lambda: (single.fp32(), single.noisy()))
        held = [(reference, "the reference"), *([(other, "the layout")] if apart else [])]
        for start, rule in ((single.plain(), "from the plain process"), (single.fp32(), "from fp32")):
            for run, name in held:
                out += distances(start, run, dtype, model, rule=f"{name}, {rule}", noise=noise)
    return out
