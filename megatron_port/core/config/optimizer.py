"""The optimizer part of a run file: rule, learning rate over the steps and by parameter, clipping, averaged weights."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Literal

from megatron_port.core.config.conflicts import Rule, Table
from megatron_port.core.config.ranges import CountOrZero, Fraction, NonNegative, Positive, Ratio, at_least, between
from megatron_port.core.registry import FALLING

if TYPE_CHECKING:
    from megatron_port.core.config.schema import RunConfig


# Options of single optimizer rules, ``[optimizer.NAME]``; docs/optimizers.md has their formulas.

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


CLASSES = ("embedding", "head", "matrix", "norm", "bias", "other")
"""Classes of parameters, by which a group may name its own (``parameter_class``)."""
INHERITED = -1.0
"""``ParameterGroup.weight_decay`` of a group that leaves it as it is."""


def parameter_class(name: str) -> str:
    """Return the class of a parameter by its canonical name: ``embedding`` (tokens, positions, and the head's matrix
    where the two are tied), ``head``, ``bias``, ``norm``, ``matrix`` (of attention, MLP, experts and routers), or
    ``other`` (attention sinks, the router's balance)."""
    *parents, last = name.split(".")
    if parents and parents[0] in ("embedding", "head"):
        return parents[0]
    if last == "bias":
        return "bias"
    if parents and re.search(r"norm\d?$", parents[-1]):
        return "norm"
    return "matrix" if last in ("weight", "lora_a", "lora_b") else "other"


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters with a learning rate or a weight decay of their own."""

    match: str
    """A class (embedding, head, matrix, norm, bias, other), or a pattern of canonical names (layers.*.mlp.down.*)."""
    lr_factor: NonNegative = 1.0
    """Factor on the learning rate; 0: these parameters stay as they are."""
    weight_decay: Annotated[float, at_least(INHERITED)] = INHERITED
    """In place of optimizer.weight_decay, also on parameters that would have none; -1: as without the group."""

    def has(self, name: str) -> bool:
        """Return whether a parameter is in the group."""
        return parameter_class(name) == self.match if self.match in CLASSES else fnmatchcase(name, self.match)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer's rule, its learning rate, and what is done with gradients before and with weights after it."""

    name: str = "adamw"
    """adamw (Loshchilov & Hutter, arXiv 1711.05101); with engine native also adamw-bf16 and adamw-8bit (the same with
    narrower moments), lion, sgd, adagrad, adafactor, came, sm3, lamb, muon, or a rule that a plugin registers
    (docs/optimizers.md)"""
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
    """On matrices and embeddings; on biases and norms only in a group that gives them one."""
    clip_grad: NonNegative = 1.0
    """Largest global gradient norm; 0: no clipping."""
    clip_value: NonNegative = 0.0
    """Largest absolute value of an element of the gradient, after the norm is clipped (engine native); 0: no limit."""
    clip_zscore: NonNegative = 0.0
    """Adaptive clipping (ZClip, arXiv 2504.02507; engine native): a norm that lies z > this many standard deviations
    above the running mean of norms is clipped to mean + this² / z deviations (docs/optimizers.md); 0: off. 2.5 is
    the paper's."""
    clip_decay: Fraction = 0.97
    """With clip_zscore: decay of the running mean and variance."""
    clip_warmup: Annotated[int, at_least(2)] = 25
    """With clip_zscore: updates that mean and variance are first taken from; until then clip_grad alone clips."""
    decay: str = "cosine"
    """Shape of the learning rate's decay after the warmup: cosine | linear | constant | wsd (stay at lr, then fall to
    min_lr in the last wsd_steps) | inverse_sqrt (lr times the root of warmup_steps / step) | a plugin's"""
    wsd_shape: Literal["linear", "sqrt", "cosine"] = "sqrt"
    """With decay = "wsd", how it falls: linear | sqrt (1 - √x, arXiv 2405.18392) | cosine"""
    wsd_steps: CountOrZero = 0
    """With decay = "wsd": steps of the fall, which ends at decay_steps; 0: a fifth of those after the warm-up."""
    warmup_steps: CountOrZero = 0
    """Steps of linear warm-up from 0."""
    decay_steps: CountOrZero = 0
    """Step at which min_lr is reached; 0: training.steps."""
    groups: tuple[ParameterGroup, ...] = ()
    """Tables [[optimizer.groups]]: match (a class: embedding, head, matrix, norm, bias, other; or a pattern of
    canonical names), lr_factor (1.0), weight_decay (-1.0: unchanged). The first that has a parameter counts."""
    ema_decay: Fraction = 0.0
    """Decay of a running mean of the weights after each update, in the masters' precision (engine native), which
    checkpoints hold; 0: none. 4 bytes per parameter."""
    ema_evaluate: bool = False
    """Evaluate with the averaged weights of ema_decay."""
    sgd: SGDOptions = field(default_factory=SGDOptions)
    """Options of name = "sgd"."""
    adagrad: AdagradOptions = field(default_factory=AdagradOptions)
    """Options of name = "adagrad"."""
    adafactor: AdafactorOptions = field(default_factory=AdafactorOptions)
    """Options of name = "adafactor"."""
    came: CAMEOptions = field(default_factory=CAMEOptions)
    """Options of name = "came"."""
    lamb: LAMBOptions = field(default_factory=LAMBOptions)
    """Options of name = "lamb"."""
    muon: MuonOptions = field(default_factory=MuonOptions)
    """Options of name = "muon"."""


def _schedule(config: RunConfig) -> list[str]:
    o = config.optimizer
    end = o.decay_steps or config.training.steps
    name = "optimizer.decay_steps" if o.decay_steps else "training.steps"
    if o.decay in FALLING and o.warmup_steps >= end > 0:
        return [f"optimizer.warmup_steps {o.warmup_steps} is not below {name} {end}; use e.g. {end // 10}"]
    return [
        f"optimizer.warmup_steps {o.warmup_steps} and wsd_steps {o.wsd_steps} are more than {name} {end}; use "
        f"wsd_steps of at most {end - o.warmup_steps}"
    ] if o.decay == "wsd" and o.warmup_steps + o.wsd_steps > end else []


def _groups(config: RunConfig) -> list[str]:
    groups, out = config.optimizer.groups, []
    for number, group in enumerate(groups, 1):
        where = f"optimizer.groups, group {number}"
        if not group.match.strip():
            out.append(f"{where} has no match; give a class ({', '.join(CLASSES)}) or a pattern of canonical names")
        if group.lr_factor < 0:
            out.append(f"{where} ({group.match}): lr_factor is {group.lr_factor}; it must be at least 0")
        if group.weight_decay < 0 and group.weight_decay != INHERITED:
            out.append(
                f"{where} ({group.match}): weight_decay is {group.weight_decay}; it must be at least 0, or -1 to leave "
                "it as it is"
            )
    names = [group.match for group in groups]
    return out + [
        f"optimizer.groups has {name!r} twice, of which the first alone would count; leave one out"
        for name in dict.fromkeys(names) if names.count(name) > 1
    ]


CONFLICTS = (
    Table(rows=(
        Rule(lambda c: 0 < c.optimizer.lr < c.optimizer.min_lr,
             "optimizer.min_lr {c.optimizer.min_lr} is above lr {c.optimizer.lr}; use a value from 0 to "
             "{c.optimizer.lr}"),
        Rule(lambda c: c.optimizer.decay != "wsd" and c.optimizer.wsd_steps,
             'optimizer.wsd_steps {c.optimizer.wsd_steps} is of decay = "wsd", and decay is "{c.optimizer.decay}"; '
             "leave it out"),
        Rule(lambda c: c.optimizer.ema_evaluate and not c.optimizer.ema_decay,
             "optimizer.ema_evaluate needs averaged weights; set ema_decay, e.g. 0.999"),
    ), more=(_schedule, _groups)),
)
