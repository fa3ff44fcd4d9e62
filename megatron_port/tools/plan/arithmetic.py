"""The arithmetic one does on the back of an envelope, each with its formula, none with a machine's constants.

They are what ``plan --explain`` prints, beside the planner's own numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SECONDS_A_DAY = 86400.0


def training_flops(parameters: float, tokens: float) -> float:
    """6·N·T: two operations per weight and token forward, four backward; attention not counted."""
    return 6.0 * parameters * tokens


def days(flops: float, *, peak: float, utilisation: float, devices: int) -> float:
    """Time = FLOPs / (peak × MFU × devices), in days; ``peak`` in FLOP/s."""
    return flops / (peak * utilisation * devices) / SECONDS_A_DAY


def bubble_fraction(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle over useful time of a pipeline, (p − 1) / (m·v)."""
    return (stages - 1) / (micro_batches * chunks)


def widest_tensor_parallelism(hidden: int, *, peak: float, link: float, width: int = 2) -> float:
    """Largest t at which a link keeps up: (2·3·h/t) / bytes ≥ peak / link, so t ≤ 6·h / bytes · link / peak.

    ``peak``: FLOP/s of a device; ``link``: bytes/s of a device, one direction; ``width``: bytes of an element.
    """
    return 6 * hidden / width * link / peak


def layer_activations(
    *, sequence: int, batch: int, hidden: int, heads: int, tensor: int = 1, sequence_parallel: bool = False,
    scores: bool = True,
) -> float:
    """Bytes of a layer's activations in 16 bits (arXiv 2205.05198): s·b·h·(10 + 24/t + 5·a·s/(h·t)), or
    with sequence parallelism s·b·h/t·(34 + 5·a·s/h); ``scores`` False: selective recompute or fused attention."""
    extra = 5.0 * heads * sequence / hidden if scores else 0.0
    factor = (34 + extra) / tensor if sequence_parallel else 10 + (24 + extra) / tensor
    return sequence * batch * hidden * factor


@dataclass(frozen=True)
class SimpleMemory:
    """Bytes of a whole model in training, nothing split."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """All four."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def devices(self, memory: float) -> int:
        """Devices of ``memory`` bytes that hold it, split evenly."""
        return math.ceil(self.total / memory)


def simple_memory(parameters: float, *, layers: int, hidden: int, sequence: int, batch: int) -> SimpleMemory:
    """16-bit weights and gradients, 12 bytes for Adam (fp32 master, two moments), activations of 34·s·b·h per layer."""
    return SimpleMemory(
        weights=2 * parameters, gradients=2 * parameters, optimizer=12 * parameters,
        activations=34.0 * sequence * batch * hidden * layers,
    )
