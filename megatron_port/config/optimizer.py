"""The optimizer part of a run file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron_port.config.ranges import CountOrZero, Fraction, NonNegative, Positive
from megatron_port.config.rule_options import (
    AdafactorOptions,
    CAMEOptions,
    LAMBOptions,
    MuonOptions,
    SGDOptions,
)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer's rule and its learning-rate schedule."""

    name: str = "adamw"
    """adamw (Loshchilov & Hutter, arXiv 1711.05101); with engine native also lion, sgd, adagrad, adafactor, came, sm3,
    lamb, muon, or a rule that a plugin registers (docs/optimizers.md)"""
    lr: Positive = 3e-4
    """Peak learning rate."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end of the decay."""
    beta1: Fraction = 0.9
    """Decay of the first moment."""
    beta2: Fraction = 0.95
    """Decay of the second moment, where the rule has one."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegative = 0.1
    """On matrices and embeddings; never on biases and norms."""
    clip_grad: NonNegative = 1.0
    """Largest global gradient norm; 0: no clipping."""
    decay: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"] = "cosine"
    """Shape of the learning rate's decay after the warmup: cosine | linear | constant | wsd (stay at lr, then fall to
    min_lr in the last wsd_steps) | inverse_sqrt (lr times the root of warmup_steps / step)"""
    wsd_shape: Literal["linear", "sqrt", "cosine"] = "sqrt"
    """With decay = "wsd", how it falls: linear | sqrt (1 - √x, arXiv 2405.18392) | cosine"""
    wsd_steps: CountOrZero = 0
    """With decay = "wsd": steps of the fall, which ends at decay_steps; 0: a fifth of those after the warm-up."""
    warmup_steps: CountOrZero = 0
    """Steps of linear warm-up from 0."""
    decay_steps: CountOrZero = 0
    """Step at which min_lr is reached; 0: training.steps."""
    sgd: SGDOptions = field(default_factory=SGDOptions)
    """Options of name = "sgd"."""
    adafactor: AdafactorOptions = field(default_factory=AdafactorOptions)
    """Options of name = "adafactor"."""
    came: CAMEOptions = field(default_factory=CAMEOptions)
    """Options of name = "came"."""
    lamb: LAMBOptions = field(default_factory=LAMBOptions)
    """Options of name = "lamb"."""
    muon: MuonOptions = field(default_factory=MuonOptions)
    """Options of name = "muon"."""
