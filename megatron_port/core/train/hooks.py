"""Hooks of the training loop, and the state that hooks and loop share.

The loop takes steps. All else that a run does (checks, evaluations, saves, reports) is a :class:`LoopHook` in one list
(``run.trainer``), which is asked in its order. A plugin adds one by ``registry.LOOP_HOOKS`` and ``training.hooks``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.process import EXIT_CODES, ProgressTracker, name_of
from megatron_port.core.dist.rank import DeviceInfo, Fence, ProcessInfo
from megatron_port.core.engine.api import Engine, StepLimits, StepResult

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from megatron_port.core.checkpoint.writer import Committer
    from megatron_port.core.data.loader import Loaders
    from megatron_port.core.dist.groups import ParallelContext
    from megatron_port.core.io.logging import Logger
    from megatron_port.core.layers.providers import Providers
    from megatron_port.core.optim.schedules import BatchSchedule
    from megatron_port.core.optim.state_watch import Damage


@dataclass(frozen=True)
class Session:
    """One rank of a run, ready to build its model."""

    config: RunConfig
    """Resolved: no derived size is 0."""
    info: ProcessInfo
    device: DeviceInfo
    ctx: ParallelContext
    providers: Providers
    logger: Logger
    progress: ProgressTracker = field(default_factory=ProgressTracker)
    """Current phase and operation of this rank; engines, loop and checkpoints write it."""
    store: Store | None = None
    """In which the ranks met."""
    fence: Fence = field(default_factory=Fence)
    """Asked before anything in the run's folder is changed; a lease of it on rank 0 of a run."""
    plans_activations: bool = False
    """``activations.layers`` were found when the session opened; the run's folder may hold those of its first start."""

    @property
    def cpu_group(self) -> dist.ProcessGroup | None:
        """Group of all ranks for CPU tensors (gloo beside NCCL); None for a single process without a group."""
        return dist.group.WORLD if dist.is_initialized() else None

    @property
    def is_rank_zero(self) -> bool:
        """Whether this rank reports."""
        return self.info.rank == 0


@dataclass
class Progress:
    """Counters of a run; they are kept nowhere else."""

    step: int = 0
    """Optimizer steps done."""
    samples: int = 0
    """Samples consumed."""
    skipped: int = 0
    """Steps whose update was not applied."""


class StepGuard(Protocol):
    """Detects steps that cannot be trusted (``health.numerics``); its state is the same on every rank."""

    anomaly_steps: list[int]
    """Steps (1 is the first) at which an anomaly was met lately."""
    anomalies_total: int

    @property
    def steps_in_a_row(self) -> int:
        """Return the number of anomalies at consecutive steps, the last one included."""

    def position(self, first_sample: int) -> int:
        """Return where in the data's order a step begins whose first sample is ``first_sample`` of those trained on."""

    def limits(self) -> StepLimits:
        """Return the limits of the next step."""

    def judge(self, result: StepResult, limits: StepLimits) -> str:
        """Return why a step cannot be trusted; empty: it can."""

    def count_anomaly(self, step: int) -> bool:
        """Count an anomaly at ``step``; return whether there were too many."""

    def accept(self, result: StepResult) -> None:
        """Take a step without anomaly into the medians."""

    def leave_out(self, first: int, count: int) -> None:
        """Take a whole step's samples, by their position, out of the order."""

    def state(self) -> dict[str, Any]:
        """Return the state for checkpoints."""

    def load(self, state: Mapping[str, Any], *, medians_only: bool = False) -> None:
        """Load a result of ``state``."""


@dataclass(frozen=True)
class Anomaly:
    """Anomaly of a step, as every rank knows it."""

    step: int
    """As in metrics.jsonl: 1 is the first."""
    reason: str
    verdict: str
    """transient | reproducible"""
    first: int
    """First sample of the step, by position in the data's order."""
    count: int
    summary: str
    """One line for people."""


@dataclass
class LoopState:
    """One rank's run, as the loop and its hooks see it. Hooks are made before the engine is."""

    session: Session
    config: RunConfig
    batches: BatchSchedule
    loaders: Loaders
    numerics: StepGuard
    """Limits of a step, and which samples are left out."""
    committer: Committer
    """Order of the run's commits."""
    checkpoints: Sequence[Path]
    """Checkpoints to start from, best first; empty: afresh."""
    choices: tuple[tuple[str, ...], ...]
    """Activations that each layer does not keep (``memory.sites``)."""
    progress: Progress = field(default_factory=Progress)
    engine: Engine = field(init=False)
    hooks: Sequence[LoopHook] = ()
    """In the order in which the loop asks them."""
    damage: Damage | None = None
    """State of this rank that something other than an update has changed."""
    base: dict[str, Any] | None = None
    """Which weights are frozen (``weights.readers``)."""
    learns_from: Mapping[str, Any] = field(default_factory=dict)
    """Sources of the run's loss beside the corpora (``data.objective.Objective.identity``)."""
    validation_loss: float | None = None
    """Mean loss of the last evaluation."""

    @property
    def ctx(self) -> ParallelContext:
        """Groups of ranks."""
        return self.session.ctx


@dataclass
class TakenStep:
    """An optimizer step that has just been taken; the counters include it already."""

    step: int
    """Optimizer steps done: 1 for the first, as in metrics.jsonl."""
    result: StepResult
    micro_batches: Sequence[MicroBatch]
    """This rank's samples."""
    first: int
    """First sample of the step, by position in the data's order."""
    size: int
    """Samples of the step, over all replicas."""
    lr: float
    limits: StepLimits
    seconds: float
    """From the fetch of its samples to the end of its update."""
    reason: str = ""
    """Why the step cannot be trusted; empty: it can."""
    too_many: bool = False
    """As many anomalies as ``numerics.max_anomalies`` have been met."""
    anomaly: Anomaly | None = None
    """Findings about a step that cannot be trusted, for the hooks after recovery."""


@dataclass(frozen=True)
class Ending:
    """End of a run that no error ended."""

    level: int
    """Stop level that the ranks agreed on (``dist.process``); 0: none."""
    stopped: bool
    """A signal stopped the run before ``training.steps``."""
    local_signal: str | None
    """Signal that this rank got."""

    @property
    def signal_name(self) -> str:
        """Signal that stopped the run; empty: none."""
        return name_of(self.level) if self.stopped else ""

    @property
    def exit_code(self) -> int:
        """Exit code of the run."""
        return EXIT_CODES[self.level if self.stopped else 0]


class LoopHook:
    """Something that a run does beside its steps; by default nothing. One object per rank, made before the engine.

    All ranks have the same hooks and call them in the same order, so any method may be collective. What a method raises
    ends the run; it must be raised on every rank (``dist.agree.agreed``).

    A step asks in this order: ``around_step``, ``before_step``, ``after_train_step``, ``after_step`` (where the hook
    that reports asks each for ``measure``); then the ranks agree whether to continue, and each hook that is ``due``
    acts. That agreement is why a hook has two methods after a step: what cannot be undone (a save, a rewind) belongs
    into ``act``. Steps count from 1, as in metrics.jsonl; only ``before_step`` is given the engine's number, from 0.
    An anomaly has no method of its own: ``run.hooks`` fills ``TakenStep.anomaly`` before later hooks see the step, and
    a return to a checkpoint is enclosed by ``before_rewind`` and ``begin``.
    """

    def __init__(self, state: LoopState) -> None:
        self.state = state

    def begin(self, *, again: bool = False) -> None:
        """Start at ``state.progress.step``: the engine has its weights. ``again``: after a rewind."""

    def around_step(self, step: int) -> AbstractContextManager[None]:
        """Return a context for step ``step`` (from 1), samples and ``after_step`` of all hooks included."""
        return nullcontext()

    def before_step(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Prepare a step (from 0, as the engine counts). Counts into the step's seconds."""

    def after_train_step(self) -> None:
        """Take what the engine's step left. Counts into the step's seconds."""

    def measure(self, taken: TakenStep) -> Mapping[str, float | int | bool | None]:
        """Return numbers for the step's line in metrics.jsonl, under declared names (``telemetry.step_metrics``)."""
        return {}

    def after_step(self, taken: TakenStep) -> None:
        """Look at a step, before the ranks agree to continue."""

    def due(self, step: int) -> bool:
        """Return whether to act after ``step`` steps; alike on all ranks. Asked at 0 too, where a run starts afresh."""
        return False

    def act(self) -> None:
        """Do what is due."""

    def before_rewind(self) -> None:
        """Let go of what belongs to the steps that will be taken again."""

    def before_save(self) -> None:
        """Refuse a save by raising, or bring to disk what belongs to it."""

    def finish(self, ending: Ending) -> None:
        """Do what the last step is followed by."""

    def close(self, ending: Ending | None) -> None:
        """Release everything. None: an error ends the run, and nothing here may be collective."""


def every(interval: int, step: int) -> bool:
    """Return whether ``step`` is a multiple of ``interval`` and not 0; never where the interval is 0."""
    return interval > 0 and step > 0 and step % interval == 0
