"""Actions and schedules: passes of micro-batches through chunks, in an order for each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from megatron_port.core.dist.mesh import Topology


class Kind(Enum):
    """Kind of computation that an action is."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of the input and of the weights."""
    INPUT = "I"
    """Backward pass of the input alone (and of what is cheap: biases, norms)."""
    WEIGHT = "W"
    """Backward pass of the linears' weights alone, after ``INPUT``."""


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch through one chunk of a stage."""

    kind: Kind
    micro_batch: int
    chunk: int = 0
    fills: bool = field(default=False, compare=False)
    """WEIGHT only: its products are computed while the pass before it exchanges rows of experts, and after that pass
    those that are left (``pipeline.zero_bubble``)."""

    def __str__(self) -> str:
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{self.kind.value}{self.micro_batch}{chunk}" + ("+" if self.fills else "")


@dataclass(frozen=True)
class Span:
    """A pass with its start and end, in the unit of the costs."""

    action: Action
    start: float
    end: float
    beside: float = 0.0
    """Seconds of a weight pass that ran before ``start``, beside the exchanges that it fills."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """The passes of every stage of a pipeline, for one step.

    Made once and compared by identity: results derived from it are looked up every step, and hashing a hundred thousand
    passes would cost more than deriving them."""

    name: str
    grid: Topology
    """Only ``pp``, ``vp`` and ``folded`` count: which chunk of the model lies where."""
    micro_batches: int
    plans: tuple[tuple[Action, ...], ...]
    """By stage."""

    @property
    def stages(self) -> int:
        """Number of stages, p."""
        return self.grid.pp

    @property
    def forward_only(self) -> bool:
        """Whether it is an evaluation, without backward passes."""
        return all(action.kind is Kind.FORWARD for action in self.plans[0])

    @property
    def splits_backward(self) -> bool:
        """Whether some backward passes leave the weight gradients to separate passes."""
        return any(action.kind is Kind.WEIGHT for action in self.plans[0])

    def before(self, stage: int, action: Action) -> tuple[int, Action] | None:
        """Return the (stage, action) in another chunk of the model whose result ``action`` takes, or None."""
        if action.kind is Kind.WEIGHT:
            return None
        virtual = self.grid.virtual_stage(stage, action.chunk) + (-1 if action.kind is Kind.FORWARD else 1)
        if not 0 <= virtual < self.grid.virtual_stages:
            return None
        other, chunk = self.grid.holder(virtual)
        return other, Action(action.kind, action.micro_batch, chunk)

    def after(self, stage: int, action: Action) -> tuple[int, Action] | None:
        """Return the (stage, action) in another chunk of the model that takes the result of ``action``, or None."""
        if action.kind is Kind.WEIGHT:
            return None
        virtual = self.grid.virtual_stage(stage, action.chunk) + (1 if action.kind is Kind.FORWARD else -1)
        if not 0 <= virtual < self.grid.virtual_stages:
            return None
        other, chunk = self.grid.holder(virtual)
        return other, Action(action.kind, action.micro_batch, chunk)


def most_held(actions: Sequence[Action]) -> dict[int, int]:
    """Return how many micro-batches at most are between the forward and the backward pass of each chunk of a stage."""
    held: dict[int, int] = {}
    most: dict[int, int] = {}
    for action in actions:
        if action.kind is not Kind.WEIGHT:
            held[action.chunk] = held.get(action.chunk, 0) + (1 if action.kind is Kind.FORWARD else -1)
            most[action.chunk] = max(most.get(action.chunk, 0), held[action.chunk])
    return most
