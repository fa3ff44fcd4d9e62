"""Options of single optimizer rules, ``[optimizer.NAME]``; docs/optimizers.md has their formulas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron_port.core.config.ranges import Fraction, NonNegative, Positive, Ratio, between


@dataclass(frozen=True, kw_only=True)
class SGDOptions:
    """Stochastic gradient descent with momentum, as torch.optim.SGD: its weight decay is added to the gradient."""

    momentum: Fraction = 0.9
    """Factor of the momentum; 0: none, and no state."""
    dampening: NonNegative = 0.0
    """Share of the gradient that the momentum leaves out."""
    nesterov: bool = False
    """Look ahead by one step of the momentum."""


@dataclass(frozen=True, kw_only=True)
class AdagradOptions:
    """Adagrad, as torch.optim.Adagrad, which has no momentum."""

    momentum: Fraction = 0.0
    """Decay of a running mean of the updates; 0: none. 4 bytes per parameter."""
    initial_accumulator: NonNegative = 0.0
    """Initial value of the sums of squared gradients."""


@dataclass(frozen=True, kw_only=True)
class AdafactorOptions:
    """Adafactor, as torch.optim.Adafactor, which is always relative and has no momentum."""

    momentum: Fraction = 0.0
    """Decay of a running mean of the updates, the paper's first moment; 0: none. 4 bytes per parameter."""
    relative: bool = True
    """Multiply optimizer.lr, of which 1/√step is the largest, by a parameter's root mean square; false: the learning
    rate is AdamW's."""

    beta2_decay: Annotated[float, between(-1, 0)] = -0.8
    """The second moments are averaged by 1 - step ** beta2_decay."""
    eps_variance: NonNegative = 0.0
    """Lower bound of the root of the estimated second moment; 0: the spacing of the master's dtype at 1."""
    eps_scale: NonNegative = 1e-3
    """With relative: lower bound of a parameter's root mean square."""
    clip_update: Ratio = 1.0
    """Largest root mean square of an update before the learning rate."""


@dataclass(frozen=True, kw_only=True)
class CAMEOptions:
    """CAME (Luo et al., arXiv 2307.02047)."""

    beta3: Fraction = 0.9999
    """Decay of the instability of the update, where beta2 is that of the second moment."""
    eps_square: Positive = 1e-30
    """Added to squared gradients."""
    eps_instability: Positive = 1e-16
    """Added to squared deviations of the update from its momentum."""
    clip_update: Positive = 1.0
    """Largest root mean square of an update before the momentum."""


@dataclass(frozen=True, kw_only=True)
class MuonOptions:
    """Muon for the matrices of layers, as torch.optim.Muon; AdamW for all else, with the fields of [optimizer]."""

    momentum: Fraction = 0.95
    """Decay of the momentum of matrices."""
    nesterov: bool = True
    """Orthogonalise the gradient and the momentum together."""
    ns_steps: Annotated[int, between(1, 99)] = 5
    """Newton-Schulz iterations."""
    adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """Factor of the learning rate by a matrix of r rows and c columns: original (the root of max(1, r/c)) |
    match_rms_adamw (0.2 times the root of max(r, c), so that AdamW's learning rates and weight decays serve)"""
    lr_factor: Positive = 1.0
    """Learning rate of matrices, as a multiple of optimizer.lr, by which all else is updated."""


@dataclass(frozen=True, kw_only=True)
class LAMBOptions:
    """LAMB (You et al., arXiv 1904.00962)."""

    adapts_vectors: bool = False
    """Scale the updates of biases and norms by their trust ratios too; false: those are AdamW's."""


