"""The operations of a layer, stated once as a list. Plain Python, without torch.

A spec lists what it does (``LayerSpec.ops``), and three interpreters read the list: the forward pass and the recompute
tape (``model.program``), and the planner's meter (``plan.meter``). An operation that is stated here is therefore run,
recomputed and planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Site = Literal["input", "norm1", "qkv", "core", "residual", "norm2", "hidden", "activation", "output"]
"""Names of what a layer's operations leave behind: each its result, where a later operation saves it, and what the
operation itself saves beside its arguments (statistics, masks, scores).

======== ==================================================================== ==================
site     operation                                                            its result is read by
======== ==================================================================== ==================
input    the layer before                                                     norm1
norm1    norm of the input                                                    projection
qkv      projection to queries, keys and values; their norms and rotation     core
core     scores, softmax, product with the values                             output projection
residual output projection, its sum over ranks, bias, dropout, addition       norm2
norm2    norm of the residual stream                                          up projection
hidden   up projection                                                        activation
activation  GeLU or SwiGLU                                                    down projection
output   down projection, its sum over ranks, bias, dropout, addition         the layer after
======== ==================================================================== ==================
"""


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation of a layer on values that have names. A value is a tensor, or a tuple of tensors, each of which is
    an argument of its own to the operations that read it."""

    kind: str
    """Finds the planner's rule (``plan.meter``); kinds that it does not know state their memory below."""
    run: str
    """Dotted path from the layer's module to what computes it, e.g. ``mlp.up``."""
    site: Site
    """Name under which what it leaves behind is kept, recomputed, swapped or partitioned."""
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    part: Any = None
    """Spec of what computes it."""
    features: float = 0.0
    """Elements per token of the tensor that an operation without a rule writes, on all tensor-parallel ranks together,
    in the compute dtype."""
    keeps: tuple[str, ...] = ()
    """Values that the backward pass of an operation without a rule reads, among those that it reads and writes."""
    beside: float = 0.0
    """Elements per token that an operation without a rule keeps beside those, counted as ``features``."""
    scratch: tuple[float, float] = (0.0, 0.0)
    """Elements per token in fp32 or fp64, counted as ``features``, that an operation without a rule needs in passing:
    forward, and backward."""
    scratch_rows: int = 0
    """Positions of each sequence that need them at once; 0: all."""
    holds: tuple[str, ...] = ()
    """Values that stay until it has run although it does not read them, as a function's variables do."""


INPUT = "x"
"""Name of a layer's input."""


class Uses(Protocol):
    """Names of the values that an operation has to do with."""

    @property
    def reads(self) -> tuple[str, ...]: ...
    @property
    def writes(self) -> tuple[str, ...]: ...
    @property
    def holds(self) -> tuple[str, ...]: ...


def last_uses(ops: Sequence[Uses]) -> list[tuple[str, ...]]:
    """Return the values that nobody uses after each operation; the result of the last is used by the caller."""
    last = {name: i for i, op in enumerate(ops) for name in (*op.writes, *op.reads, *op.holds)}
    result = ops[-1].writes
    return [tuple(name for name, at in last.items() if at == i and name not in result) for i in range(len(ops))]
