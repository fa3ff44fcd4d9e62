"""Optimizer rules: the state of each parameter, and the update of a parameter and its state.

A rule is a formula and nothing else. Sharding, reduction, clipping, loss scaling, skipped steps, the rounding of
masters and checkpoints are the engine's, alike for every rule.

A rule states what its update needs to see, and is defined on the *logical* tensor, without padding. So its result does
not depend on how parameters are split over ranks:

* :class:`ElementwiseRule`: one element at a time; the engine may give it any range of any parameter.
* :class:`BlockRule`: whole blocks of neighbouring elements of a row, such as those with one scale in 8-bit state; no
  block is ever cut.
* kinds of ``ext.rules``: ``SumsRule`` sees sums or maxima over rows, columns or whole matrices, which are reduced over
  the ranks; ``MatrixRule`` sees whole matrices, which are brought together on one rank each.

docs/optimizers.md says how each is written and served.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import lcm
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import torch

from megatron_port.core.config.schema import OptimizerConfig
from megatron_port.core.dist.record import WEIGHT, ParameterRecord
from megatron_port.core.errors import ConfigError
from megatron_port.core.registry import OPTIMIZERS, STEP_PARTS

if TYPE_CHECKING:
    from megatron_port.core.optim.buckets import StateShard

ALIGN = 64
"""Elements: every parameter starts at a multiple, so that vector loads of the kernels are aligned in every dtype."""


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

    ``of``: what it has one value for.

    * ``element``: each element of the parameter, whose shape it has;
    * ``block``: each ``block`` neighbouring elements of a row: the last dimension is that much shorter;
    * ``row``: each row: the last dimension is left out;
    * ``column``: each column of a matrix: the last dimension but one is left out. Dimensions in front of the two are a
      stack of matrices.

    State of elements and blocks is sharded like the parameter; every rank that has a part of a row or column holds its
    state, and one of them saves it.
    """

    name: str
    of: Literal["element", "block", "row", "column"] = "element"
    dtype: torch.dtype | None = None
    """None: the master's (fp32; fp64 in an fp64 run)."""
    block: int = 1

    @property
    def divided(self) -> bool:
        """Whether it is sharded with the parameter's elements."""
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
            ConfigError: a rank's part of a row is no multiple of the block, which would be cut.
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
        local = record.local_shape if self.divided else record.extent  # padding has no row or column state
        return replace(
            record, shape=self.shape(record), local_shape=self._reduced(local), offset=self._reduced(record.offset),
            extent=self._reduced(record.extent),
            shards=tuple(replace(s, dim=at[s.dim]) for s in record.shards if s.dim in at),
        )


class OptimizerRule(ABC):
    """Interface of a rule. Instances hold no state of a run, so one serves all parameters."""

    @property
    def formula(self) -> OptimizerRule:
        """The rule that updates: itself, unless this one wraps another to add state."""
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
        """Return the state tensors of a parameter, in the order of :meth:`kinds`: by default of the parameter's shape
        and the master's dtype."""
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

    A parameter whose logical rows are no multiple of the block must have state of elements; :meth:`state` may depend on
    the logical shape only, so that every layout agrees. A layout that gives a rank part of a block is refused.
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


def rule_of(config: OptimizerConfig) -> OptimizerRule:
    """Return the rule that ``optimizer.name`` stands for, with its options.

    Raises:
        ConfigError: there is none of that name, or a plugin's is no OptimizerRule.
    """
    rule = OPTIMIZERS.get(config.name, OptimizerRule)  # type: ignore[type-abstract]  # only isinstance is asked
    rule = rule.configured(config)
    if config.ema_decay:
        rule = STEP_PARTS.function("rule with averaged weights")(rule)
    return rule


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


def mixed_kinds(kinds: Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[str]]:
    """Return ``kinds`` (by name) where two names differ in theirs, else an empty mapping: what a manifest declares."""
    return kinds if len({frozenset(each) for each in kinds.values()}) > 1 else {}


# Learning rates and weight decays by parameter (``[[optimizer.groups]]``, and muP's), as fields of the records.

T = TypeVar("T")


class GroupSettings(NamedTuple):
    """Settings in which groups of parameters differ."""

    lr_factor: float
    weight_decay: float


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


# Numbers that differ from step to step, for kernels to read on the device.
#
# What a kernel takes by value is fixed when its launch is captured (a CUDA graph); what it reads from memory is the
# replayed step's own. One copy per step brings all of them, and no kernel is launched for a single number.

@dataclass(frozen=True)
class StepNumbers:
    """The numbers of a step, on the host."""

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
    """The step's numbers as float64 scalars at fixed addresses on the device; ``host``: the same on the host."""

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
