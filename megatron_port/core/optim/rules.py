"""Optimizer rules: the state of each parameter, and the update of a parameter and its state.

A rule is a formula and nothing else. Which rank owns which elements, the reduction of gradients, clipping, the loss
scale, skipped steps, the rounding of masters into weights and checkpoints are the engine's; they hold for every rule.

A rule says what its update needs to see, and is defined on the *logical* tensor, without padding. So its result does
not depend on how parameters are split over ranks:

* :class:`ElementwiseRule`: one element at a time; the engine may give it any range of any parameter.
* :class:`BlockRule`: whole blocks of neighbouring elements of a row, such as those with one scale in 8-bit state; no
  block is ever cut.
* ``optim.sums.SumsRule``: sums or maxima over rows, columns or whole matrices, which the engine reduces over the ranks.
* ``rules.matrices.MatrixRule``: whole matrices, which the engine brings together on one rank each.

docs/optimizers.md says how each is written and served.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from math import lcm, prod
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import torch

from megatron_port.core.config.optimizer import INHERITED, ParameterGroup, parameter_class
from megatron_port.core.config.rule_options import AdagradOptions, SGDOptions
from megatron_port.core.config.schema import OptimizerConfig, RunConfig
from megatron_port.core.dist.record import WEIGHT, ParameterRecord, record_of
from megatron_port.core.errors import ConfigError
from megatron_port.core.optim.buckets import ALIGN, BucketPlan, ShardRange, shard_ranges
from megatron_port.core.registry import OPTIMIZERS

if TYPE_CHECKING:
    from megatron_port.core.optim.bucket_memory import StateShard


@dataclass(frozen=True)
class UpdateSettings:
    """Hyperparameters of one update of one parameter."""

    step: int
    """Number of this update, counted from 1; skipped steps do not count."""
    lr: float
    """Learning rate of this step."""
    weight_decay: float
    """0 for parameters that do not decay (biases and norms)."""
    beta1: float
    beta2: float
    eps: float
    seed: int = 0
    """Seed of the run; it keys random draws, such as those of stochastic rounding."""


@dataclass(frozen=True)
class StateKind:
    """A state tensor of a parameter.

    ``of``: what each of its elements belongs to.

    * ``element``: an element of the parameter, whose shape it has;
    * ``block``: ``block`` neighbouring elements of a row: the last dimension is that much shorter;
    * ``row``: a row (along the last dimension), which is left out of the shape;
    * ``column``: a column of a matrix; the last dimension but one is left out. Further dimensions in front are a stack
      of matrices.

    State of elements and blocks is divided like the parameter itself; that of rows and columns is held by every rank
    that has a part of them, and one of these saves it.
    """

    name: str
    of: Literal["element", "block", "row", "column"] = "element"
    dtype: torch.dtype | None = None
    """None: as wide as the master (fp32; fp64 in an fp64 run)."""
    block: int = 1

    @property
    def divided(self) -> bool:
        """Whether ranks that divide a parameter's elements divide it too."""
        return self.of in ("element", "block")

    def _reduced(self, sizes: Sequence[int]) -> tuple[int, ...]:
        if self.of == "block":
            return (*sizes[:-1], sizes[-1] // self.block)
        kept = self._kept(len(sizes))
        return tuple(sizes[d] for d in kept)

    def _kept(self, dims: int) -> list[int]:
        """Dimensions of a parameter that the state has."""
        dropped = {"row": dims - 1, "column": dims - 2}.get(self.of)
        return [d for d in range(dims) if d != dropped]

    def shape(self, record: ParameterRecord) -> tuple[int, ...]:
        """Return the logical shape."""
        return self._reduced(record.shape)

    def place(self, record: ParameterRecord) -> ParameterRecord:
        """Return the record of the state: its logical shape and this rank's slice of it.

        Raises:
            ConfigError: a block of elements would be cut, because a rank holds a part of a row that is no multiple.
        """
        if self.of == "element":
            return record
        if self.of == "block" and (record.local_shape[-1] % self.block or record.offset[-1] % self.block):
            raise ConfigError(
                f"{record.name}: {self.name} has a value for each block of {self.block} elements of a row, and this "
                f"rank holds {record.local_shape[-1]} of a row's {record.shape[-1]}; choose a "
                "layout.tensor_parallel_size that leaves multiples, or another optimizer"
            )
        at = {d: i for i, d in enumerate(self._kept(len(record.shape)))}
        local = record.local_shape if self.divided else record.extent  # nobody reduces padding
        return replace(
            record, shape=self.shape(record), local_shape=self._reduced(local), offset=self._reduced(record.offset),
            extent=self._reduced(record.extent),
            shards=tuple(replace(s, dim=at[s.dim]) for s in record.shards if s.dim in at),
        )


class OptimizerRule(ABC):
    """Interface of a rule. Instances hold no state of a run, so one serves all parameters."""

    @property
    def formula(self) -> OptimizerRule:
        """The rule that updates, of whatever kind it is: itself, unless this one only adds state."""
        return self

    @property
    def alignment(self) -> int:
        """Elements: every parameter starts, and every rank's share ends, at a multiple in the flat memory."""
        return ALIGN

    @abstractmethod
    def kinds(self, record: ParameterRecord) -> tuple[str, ...]:
        """Return the names of the state tensors of a parameter.

        May depend on the parameter's name, global shape and decay class, not on this rank's slice of it.
        """

    def state(self, record: ParameterRecord) -> tuple[StateKind, ...]:
        """Return the state tensors of a parameter, in the order of :meth:`kinds`: by default each has the parameter's
        shape and is as wide as its master."""
        return tuple(StateKind(name) for name in self.kinds(record))

    def configured(self, config: OptimizerConfig) -> OptimizerRule:
        """Return the rule with the options of a configuration; by default itself."""
        return self


class ElementwiseRule(OptimizerRule):
    """A rule that updates each element from that element's gradient and state alone."""

    @abstractmethod
    def update_(
        self, master: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: UpdateSettings
    ) -> None:
        """Update ``master`` and ``state`` in place.

        Args:
            master: 1-D range of a parameter, fp32 (fp64 in an fp64 run).
            gradient: the same range of its gradient, without loss scale and after clipping; may be overwritten.
            state: one tensor for each of :meth:`kinds`, of the same range; zeros before the first update.
            settings: hyperparameters of this update.
        """

    def update_piece(self, piece: StateShard, settings: UpdateSettings) -> None:
        """Update a piece in place."""
        self.update_(piece.master, piece.gradient, piece.state, settings)


class BlockRule(OptimizerRule):
    """A rule that updates whole blocks of ``block`` neighbouring elements of a row.

    A parameter whose logical rows are no multiple of the block must have other state than such of blocks; :meth:`state`
    sees the logical shape only, so that every layout agrees. Where a rank would hold a part of a row that is no
    multiple, the layout is refused.
    """

    block: int

    @property
    def alignment(self) -> int:
        """Elements: a multiple of the block, so that none is in two ranks' shares."""
        return lcm(ALIGN, self.block)

    def kinds(self, record: ParameterRecord) -> tuple[str, ...]:
        """Return the names of :meth:`state`."""
        return tuple(kind.name for kind in self.state(record))

    @abstractmethod
    def state(self, record: ParameterRecord) -> tuple[StateKind, ...]:
        """Return the state tensors of a parameter: of elements, in any dtype, and of blocks."""

    @abstractmethod
    def update_(self, piece: StateShard, settings: UpdateSettings) -> None:
        """Update ``piece.master`` and ``piece.state`` in place from ``piece.gradient``, which may be overwritten.

        The piece is elements [start, start + n) of the flattened local tensor of ``piece.record``; where its state is
        of blocks, start is a multiple of the block, and so is n unless the tensor ends there. Everything is zero before
        the first update.
        """

    def update_piece(self, piece: StateShard, settings: UpdateSettings) -> None:
        """Update a piece in place."""
        self.update_(piece, settings)


class AdamW(OptimizerRule):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101). Each engine brings its own implementations of the update."""

    KINDS = ("exp_avg", "exp_avg_sq")
    """First and second moment."""

    def kinds(self, record: ParameterRecord) -> tuple[str, ...]:
        """Return the names of both moments, for every parameter."""
        return self.KINDS


ADAMW = AdamW()
AVERAGE = StateKind("ema")
"""Averaged weights (``weights.masks``), a state tensor of every parameter beside those of the rule."""


@dataclass(frozen=True)
class Averaged(OptimizerRule):
    """A rule whose parameters also have an average, behind the state tensors of the rule itself."""

    rule: OptimizerRule

    @property
    def formula(self) -> OptimizerRule:
        """The rule that updates."""
        return self.rule.formula

    @property
    def alignment(self) -> int:
        """Elements, as the rule's own."""
        return self.rule.alignment

    def kinds(self, record: ParameterRecord) -> tuple[str, ...]:
        """Return the names of the rule's state tensors and of the average."""
        return (*self.rule.kinds(record), AVERAGE.name)

    def state(self, record: ParameterRecord) -> tuple[StateKind, ...]:
        """Return the rule's state tensors and the average."""
        return (*self.rule.state(record), AVERAGE)


def rule_of(config: OptimizerConfig) -> OptimizerRule:
    """Return the rule that ``optimizer.name`` stands for, with its options.

    Raises:
        ConfigError: there is none of that name, or a plugin's is no OptimizerRule.
    """
    rule = OPTIMIZERS.get(config.name, OptimizerRule)  # type: ignore[type-abstract]  # only isinstance is asked
    rule = rule.configured(config)
    return Averaged(rule) if config.ema_decay else rule


def state_kinds(rule: OptimizerRule, records: Iterable[ParameterRecord]) -> dict[str, tuple[str, ...]]:
    """Return, by canonical name, the kinds of tensors that a checkpoint holds of each parameter and buffer."""
    return {r.name: (WEIGHT, *rule.kinds(r)) if r.kind == WEIGHT else (r.kind,) for r in records}


def state_shapes(rule: OptimizerRule, records: Iterable[ParameterRecord]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return, by canonical name and kind, the logical shapes of state that has another shape than its parameter."""
    found = {
        r.name: {kind.name: kind.shape(r) for kind in rule.state(r) if kind.of != "element"}
        for r in records if r.kind == WEIGHT
    }
    return {name: shapes for name, shapes in found.items() if shapes}


def state_bytes(rule: OptimizerRule, record: ParameterRecord, wide: int = 4) -> float:
    """Return the bytes of state for each element of a parameter, by logical shapes."""
    total = sum(prod(k.shape(record)) * (wide if k.dtype is None else k.dtype.itemsize) for k in rule.state(record))
    return total / max(record.numel, 1)


def mixed_kinds(kinds: Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[str]]:
    """Return ``kinds`` (by name) where two names differ in theirs, else an empty mapping: what a manifest declares."""
    return kinds if len({frozenset(each) for each in kinds.values()}) > 1 else {}


# Rules that update each element by itself: Lion, stochastic gradient descent with momentum, Adagrad.
#
# Arithmetic is in the master's dtype, in torch's ops; of one element it is the same whatever range it is in.

MOMENTUM = "momentum_buffer"
"""Kind of a momentum, as torch.optim calls it."""


class Lion(ElementwiseRule):
    """Lion (Chen et al., arXiv 2302.06675): steps of one size, in the direction of the momentum's sign.

    ``u = sign(beta1 m + (1 - beta1) g)``, ``p -= lr (u + weight_decay p)``, ``m = beta2 m + (1 - beta2) g``.
    """

    def kinds(self, record: ParameterRecord) -> tuple[str, ...]:
        """Return the momentum, for every parameter."""
        return ("exp_avg",)

    def update_(
        self, master: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: UpdateSettings
    ) -> None:
        momentum = state["exp_avg"]
        direction = torch.lerp(gradient, momentum, settings.beta1).sign_()
        master.mul_(1.0 - settings.lr * settings.weight_decay).sub_(direction, alpha=settings.lr)
        momentum.lerp_(gradient, 1.0 - settings.beta2)


@dataclass(frozen=True)
class SGD(ElementwiseRule):
    """Stochastic gradient descent with momentum, by the formula of torch.optim.SGD: weight decay is added to the
    gradient. ``optimizer.lr`` is some hundred times AdamW's."""

    options: SGDOptions = field(default_factory=SGDOptions)

    def configured(self, config: OptimizerConfig) -> SGD:
        """Return the rule with ``[optimizer.sgd]``."""
        return SGD(config.sgd)

    def kinds(self, record: ParameterRecord) -> tuple[str, ...]:
        """Return the momentum, if there is one."""
        return (MOMENTUM,) if self.options.momentum else ()

    def update_(
        self, master: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: UpdateSettings
    ) -> None:
        options = self.options
        if settings.weight_decay:
            gradient.add_(master, alpha=settings.weight_decay)
        if options.momentum:
            # torch's first momentum is the gradient itself, without dampening.
            damped = 1.0 - options.dampening if settings.step > 1 else 1.0
            momentum = state[MOMENTUM].mul_(options.momentum).add_(gradient, alpha=damped)
            gradient = gradient.add_(momentum, alpha=options.momentum) if options.nesterov else momentum
        master.sub_(gradient, alpha=settings.lr)


@dataclass(frozen=True)
class Adagrad(ElementwiseRule):
    """Adagrad (Duchi et al., 2011), by the formula of torch.optim.Adagrad: weight decay is added to the gradient.

    With momentum, ``m = momentum m + (1 - momentum) g / (√sum + eps)`` is the update, as in the runs that SM3's paper
    (arXiv 1901.11150) compares with.
    """

    options: AdagradOptions = field(default_factory=AdagradOptions)

    def configured(self, config: OptimizerConfig) -> Adagrad:
        """Return the rule with ``[optimizer.adagrad]``."""
        return Adagrad(config.adagrad)

    def kinds(self, record: ParameterRecord) -> tuple[str, ...]:
        """Return the sum of squared gradients, for every parameter, and the mean of updates, if there is one."""
        return ("sum", "exp_avg") if self.options.momentum else ("sum",)

    def update_(
        self, master: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: UpdateSettings
    ) -> None:
        options, total = self.options, state["sum"]
        if settings.weight_decay:
            gradient.add_(master, alpha=settings.weight_decay)
        if options.initial_accumulator and settings.step == 1:
            total.fill_(options.initial_accumulator)
        root = total.addcmul_(gradient, gradient).sqrt().add_(settings.eps)
        if options.momentum:
            mean = state["exp_avg"].lerp_(gradient.div_(root), 1.0 - options.momentum)
            master.sub_(mean, alpha=settings.lr)
        else:
            master.addcdiv_(gradient, root, value=-settings.lr)


LION, MOMENTUM_SGD, ADAGRAD = Lion(), SGD(), Adagrad()


# Learning rates and weight decays by parameter (``[[optimizer.groups]]``, and muP's), as fields of the records.

T = TypeVar("T")


class GroupSettings(NamedTuple):
    """Settings in which groups of parameters differ."""

    lr_factor: float
    weight_decay: float


def set_parameter_groups(parameters: Iterable[torch.Tensor], config: RunConfig) -> None:
    """Write each parameter's learning-rate factor and weight decay into its record.

    muP (Tensor Programs V, arXiv 2203.03466, Adam): matrices, whose inputs grow with the width, learn at 1/m of the
    rate; their decay is m times as large, so that what a step takes from a weight stays that of the narrow model.
    """
    optimizer, width = config.optimizer, config.model.width_factor
    if not optimizer.groups and width == 1.0:
        return
    for parameter in parameters:
        record = record_of(parameter)
        group = next((g for g in optimizer.groups if g.has(record.name)), None)
        factor, decay = (group.lr_factor, group.weight_decay) if group is not None else (1.0, INHERITED)
        if decay == INHERITED:
            decay = optimizer.weight_decay if record.decay else 0.0
        if parameter_class(record.name) == "matrix":
            factor, decay = factor / width, decay * width
        parameter.record = replace(record, lr_factor=factor, weight_decay=decay)  # type: ignore[attr-defined]


def settings_in(record: ParameterRecord, weight_decay: float) -> GroupSettings:
    """Return the settings of a parameter. ``weight_decay``: of parameters that decay and are in no group."""
    if record.weight_decay is None:
        return GroupSettings(record.lr_factor, weight_decay if record.decay else 0.0)
    return GroupSettings(record.lr_factor, record.weight_decay)


def grouped(pairs: Iterable[tuple[ParameterRecord, T]], weight_decay: float) -> dict[GroupSettings, list[T]]:
    """Return what belongs to each parameter by settings, those of decaying matrices first."""
    out: dict[GroupSettings, list[T]] = {GroupSettings(1.0, weight_decay): [], GroupSettings(1.0, 0.0): []}
    for record, one in pairs:
        out.setdefault(settings_in(record, weight_decay), []).append(one)
    return {settings: found for settings, found in out.items() if found}


def check_groups(groups: Sequence[ParameterGroup], names: Iterable[str]) -> None:
    """Raise ConfigError naming the first group that has no parameter, or none that no group before it has."""
    left = list(names)
    known = ", ".join(left[:3])
    for number, group in enumerate(groups, 1):
        rest = [name for name in left if not group.has(name)]
        if len(rest) == len(left):
            raise ConfigError(
                f"optimizer.groups, group {number}: no parameter matches {group.match!r} that no group before it has; "
                f"the model has {known}, ... (megatron-port checkpoint inspect lists them)"
            )
        left = rest


# The numbers in which one optimizer step differs from the next, for kernels to read on the device.
#
# What a kernel takes by value is fixed when its launch is recorded (a CUDA graph); what it reads from memory is the
# replayed step's own. One copy per step brings all of them, and no kernel is launched for a single number.

@dataclass(frozen=True)
class StepNumbers:
    """The numbers of a step, as the host knows them."""

    lr: float = 0.0
    """Learning rate."""
    loss_factor: float = 1.0
    """Factor of the loss in the backward pass: loss scale over the tokens of the step."""
    sample_factor: float = 1.0
    """Factor of a term that is a mean over the step's samples: loss scale over their number."""
    tokens: float = 0.0
    """Loss tokens of the step over all replicas."""
    replica_tokens: float = 0.0
    """This replica's share of them."""
    scale: float = 1.0
    """Loss scale."""
    largest_loss: float = sys.float_info.max
    """Largest mean loss with which the update is applied; finite."""
    largest_norm: float = sys.float_info.max
    """Largest gradient norm with which the update is applied; finite."""
    norm_mean: float = 0.0
    """Mean of earlier gradient norms, and their standard deviation, for adaptive clipping (``optim.gradients``)."""
    norm_deviation: float = sys.float_info.max


class StepValues:
    """The step's numbers as float64 scalars at fixed addresses on the device. ``host``: the numbers themselves."""

    def __init__(self, device: torch.device) -> None:
        self.host = StepNumbers()
        self._all = torch.zeros(11, dtype=torch.float64, device=device)
        (
            self.lr, self.loss_factor, self.sample_factor, self.tokens, self.replica_tokens, _, self.largest_loss,
            self.largest_norm, self.norm_mean, self.norm_deviation, self.inv_scale,
        ) = self._all.unbind()

    def set(self, numbers: StepNumbers) -> None:
        """Set the numbers of the step that begins. The host does not wait for the device."""
        if not (math.isfinite(numbers.largest_loss) and math.isfinite(numbers.largest_norm)):
            raise ValueError(f"the limits of a step must be finite numbers: {numbers}")
        self.host = numbers
        values = torch.tensor([*astuple(numbers), 1.0 / numbers.scale], dtype=torch.float64)
        # From pageable memory the copy would wait for all that the device has to do.
        self._all.copy_(values.pin_memory() if self._all.is_cuda else values, non_blocking=True)


# Where the optimizer's state of a bucket lies: one flat tensor for each kind, and the range of each parameter in it.
#
# State of elements and blocks follows the bucket: where all parameters have a kind, it lies as the masters do. Where
# only
# some have it, theirs alone takes memory. State of rows and columns is small, and every rank of a bucket holds it for
# all
# of the bucket's parameters.

@dataclass(frozen=True)
class StateRange:
    """Elements [start, start + numel) of the flattened state of parameter ``index``, from ``at`` on in the flat tensor.

    ``start`` counts in this rank's tensor of the state (``StateKind.place``).
    """

    index: int
    start: int
    numel: int
    at: int

    @property
    def span(self) -> slice:
        """Place in the flat tensor."""
        return slice(self.at, self.at + self.numel)


@dataclass(frozen=True)
class StateLayout:
    """Flat tensor of one kind: ``numel`` elements, and the ranges in it, in the order of the bucket."""

    kind: StateKind
    numel: int
    ranges: tuple[StateRange, ...]


def state_layouts(
    plan: BucketPlan, shard: int, records: Sequence[ParameterRecord], rule: OptimizerRule
) -> list[StateLayout]:
    """Return the layouts of all kinds that parameters of a bucket have, on the rank that holds ``shard`` of it.

    Raises:
        ConfigError: a rank's slice of a parameter would cut a block (``StateKind.place``).
    """
    kinds = {slot.index: rule.state(records[slot.index]) for slot in plan.slots}
    owned = shard_ranges(plan, shard=shard)
    out = []
    for kind in dict.fromkeys(kind for each in kinds.values() for kind in each):
        for slot in plan.slots:
            if kind in kinds[slot.index]:
                kind.place(records[slot.index])  # refuses what it cannot hold, alike on every shard
        if kind.divided:
            having = [f for f in owned if kind in kinds[f.index]]
            everywhere = all(kind in each for each in kinds.values())
            out.append(_aligned(plan, shard, kind, having) if everywhere else _packed(kind, having))
        else:
            having_all = [slot.index for slot in plan.slots if kind in kinds[slot.index]]
            out.append(_whole(kind, having_all, records))
    return out


def _aligned(plan: BucketPlan, shard: int, kind: StateKind, owned: Sequence[ShardRange]) -> StateLayout:
    """The layout of the masters, padding included."""
    size, b = plan.numel // plan.shards, kind.block
    ranges = [StateRange(f.index, f.start // b, -(-f.numel // b), (f.at - shard * size) // b) for f in owned]
    return StateLayout(kind, size // b, tuple(ranges))


def _packed(kind: StateKind, owned: Sequence[ShardRange]) -> StateLayout:
    ranges, end = [], 0
    for f in owned:
        numel = -(-f.numel // kind.block)
        ranges.append(StateRange(f.index, f.start // kind.block, numel, end))
        end += -(-numel // ALIGN) * ALIGN
    return StateLayout(kind, end, tuple(ranges))


def _whole(kind: StateKind, indices: Sequence[int], records: Sequence[ParameterRecord]) -> StateLayout:
    ranges, end = [], 0
    for index in indices:
        numel = prod(kind.place(records[index]).local_shape)
        ranges.append(StateRange(index, 0, numel, end))
        end += -(-numel // ALIGN) * ALIGN
    return StateLayout(kind, end, tuple(ranges))
