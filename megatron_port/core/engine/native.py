"""The native engine: pipeline schedules as data, ZeRO that overlaps with compute, every layout and dtype.

It needs nothing but torch, runs in fp64 for proofs, and on one process it is
the reference that every layout of either engine is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.objective import Objective
from megatron_port.core.dist.collectives import recorded_buffers
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import REPLICAS
from megatron_port.core.dist.process import REDUCE, ProgressTracker
from megatron_port.core.dist.record import ParameterRecord, StatePiece, StateReader
from megatron_port.core.engine import native_state
from megatron_port.core.engine.api import NO_LIMITS, EvalResult, StepLimits, StepProbe, StepResult
from megatron_port.core.engine.loss_reduction import global_count, shared_sums
from megatron_port.core.engine.module import buffer_pieces, load_buffers, recorded_parameters, zero_moments
from megatron_port.core.engine.native_passes import ForwardBackward, GradientSink, ShardTarget, Stages
from megatron_port.core.engine.native_state import shard_parameters
from megatron_port.core.engine.native_step import (
    ApplyUpdate,
    Average,
    CapturedParts,
    Count,
    GradientHook,
    GradNorm,
    HashState,
    Masks,
    Reduce,
    RunPasses,
    Show,
    StepPart,
    StepParts,
    StepState,
    SumLoss,
    VerifyState,
    run_parts,
)
from megatron_port.core.engine.native_update import make_update
from megatron_port.core.layers.step import AuxiliarySums, ModuleSums, StepSlot, Tallies
from megatron_port.core.optim.gradients import LossScaler, NormStatistics
from megatron_port.core.optim.rules import StepNumbers, StepValues
from megatron_port.core.optim.state_watch import Damage, StateWatch
from megatron_port.core.registry import STEP_PARTS


class NativeEngine:
    """Engine (``engine.api.Engine``) without DeepSpeed. ``chunks``: this rank's stage modules, one per virtual stage.

    ``objective``: the loss's denominator, and the frozen weights that the run's checkpoints do not hold.
    A step is a list of parts (``native_step``): those of ``StepParts.plain``, unless steps are captured (CUDA graphs).
    """

    def __init__(
        self, chunks: Sequence[Any], config: RunConfig, ctx: ParallelContext, step_slot: StepSlot, *,
        dtype: torch.dtype, objective: Objective, optimizer_provider: str = "torch",
        progress: ProgressTracker | None = None,
    ) -> None:
        self.objective = objective
        self.chunks, self.config, self.ctx, self.dtype = list(chunks), config, ctx, dtype
        self.step_slot, self.stream = step_slot, step_slot.stream
        self.stage: nn.Module = self.chunks[0] if len(self.chunks) == 1 else nn.ModuleList(self.chunks)
        self.progress = progress or ProgressTracker()
        self.parameters = recorded_parameters(self.stage)
        self.buffers = recorded_buffers(self.stage)
        self.sharded = shard_parameters(self.chunks, config, ctx, dtype)
        self.values = StepValues(ctx.device)
        self.sums = ModuleSums(
            AuxiliarySums(self.chunks[0].auxiliary_names, ctx.device), Tallies(self.chunks[0].tally_specs, ctx.device)
        )
        sink = STEP_PARTS.function("own gradient accumulation") if optimizer_provider == "own" else GradientSink
        gradients: GradientSink = sink(self.sharded)
        self.target = ShardTarget(gradients, self.sharded, self.values.loss_factor)
        self.forward_backward = ForwardBackward(
            Stages(self.chunks, ctx, step_slot, self.progress), config, objective, self.target, self.sharded,
            self.values, self.sums,
        )
        self._attach(gradients)
        self.update = make_update(optimizer_provider, self.sharded, config.optimizer, seed=config.seed)
        self.norms, self.scaler = NormStatistics(), LossScaler(config.precision)
        if config.optimizer.clip_zscore:
            self.norms = STEP_PARTS.function("adaptive clipping")(config.optimizer)
        self.average: Average | None = None
        if config.optimizer.ema_decay:
            self.average = STEP_PARTS.function("average of weights")(self.sharded, config.optimizer.ema_decay)
        self._losses: list[torch.Tensor] = []
        self.watch: StateWatch = self.sharded.watch
        if config.numerics.state_check_interval:
            self.watch = self.sharded.watch = STEP_PARTS.function("state watch")(config, self.sharded)
        self._differing = 0
        self.captured: CapturedParts | None = None
        self.parts = self._make_parts()
        if config.backend.graphs == "step":
            self.capture_steps(STEP_PARTS.function("graph capturer")(config, ctx, optimizer_provider))

    def _attach(self, gradients: GradientSink) -> None:
        """Register the hooks: gradients are added to the engine's sums, forward passes wait for gathered weights."""
        copies = self.forward_backward.weight_copies
        for _, p in self.parameters:
            p.wgrad_accumulator = self.target.accumulator  # type: ignore[attr-defined]  # see layers.linear
            if copies is not None:
                copies.attach(p)
            if p.requires_grad:
                if hasattr(torch.Tensor, "grad_dtype"):  # a torch without it rounds to the parameter's
                    p.grad_dtype = None  # any: a sum over rows is added without being rounded
                p.register_post_accumulate_grad_hook(gradients.hook(p))
        for chunk in self.chunks:
            for unit in chunk.units:
                self.sharded.wait_before(unit)

    def _make_parts(self) -> StepParts:
        """Return the parts of a step."""
        sharded, ctx, progress = self.sharded, self.ctx, self.progress
        count = Count(self.forward_backward, ctx, self.config.model.seq_length, self.values, self.scaler, self.norms,
                      progress)
        self._masks: Masks | None = None
        if self.config.sparsity.enabled:
            self._masks = STEP_PARTS.function("gradient masks")(sharded, self.config.sparsity)
        self._show = Show(sharded, self.scaler)
        gradients: list[StepPart] = [
            RunPasses(self.forward_backward, sharded, self.sums, self.stage), Reduce(sharded, progress),
            *([] if self._masks is None else [self._masks]), self._show,
            SumLoss(ctx, self.values, self.sums, progress), GradNorm(sharded, ctx, self.update, progress),
        ]
        apply = ApplyUpdate(self.update, self.values, self.average, self.chunks, self.sums, sharded)
        return StepParts(count, gradients, VerifyState(self.watch), apply, HashState(self.watch))

    @property
    def on_gradients(self) -> GradientHook | None:
        """Hook that sees every final gradient (reduced, unclipped, unscaled); costs a gather of all of them."""
        return self._show.hook

    @on_gradients.setter
    def on_gradients(self, hook: GradientHook | None) -> None:
        self._show.hook = hook

    def set_objective(self, objective: Objective) -> None:
        """Train and evaluate by another objective from now on, which adds nothing to the model; alike on all ranks."""
        self.objective = self.forward_backward.objective = objective
        for chunk in self.chunks:
            chunk.objective = objective
        self.sums.auxiliary = AuxiliarySums(objective.sums, self.ctx.device)

    def capture_steps(self, capturer: Any) -> None:
        """Capture the fourth step as CUDA graphs, by a ``kernels.step_graphs.GraphCapturer``, and replay them from then
        on. To be called before the first step."""
        self.captured = STEP_PARTS.function("captured steps")(capturer, self.sharded, seed=self.config.seed)
        self.watch.replays()

    def train_step(
        self, micro_batches: Sequence[MicroBatch], *, step: int, lr: float, limits: StepLimits = NO_LIMITS,
        probe: StepProbe | None = None,
    ) -> StepResult:
        """Take one optimizer step (``engine.api.Engine``)."""
        if not self.stage.training:  # train() walks all modules, as long as a layer's launches take
            self.stage.train()
        self.stream.enabled = True
        for batch in micro_batches:
            batch.check_ids(self.config.model.vocab_size)
        state = StepState(micro_batches, step, lr=lr, limits=limits)
        plain = self.parts if probe is None else STEP_PARTS.function("probed step")(self.parts, probe)
        replayed, captured = probe is None and self.on_gradients is None, self.captured
        run_parts(plain.plain(self.sharded) if captured is None else captured.parts(plain, replayed=replayed), state)
        return self.read_result(state, replay=probe is not None)

    def read_result(self, state: StepState, *, replay: bool = False) -> StepResult:
        """Return what a step came to, when all of its parts have run. ``replay``: its update was not applied."""
        self._losses = state.losses
        # The step's one host synchronisation (one more for each mask's count and torch's AdamW).
        tallies = {name: total.to("cpu", non_blocking=True) for name, total in state.totals.items()}
        found, auxiliary = state.read_outcome()
        self._differing, used_scale = int(found.differing), self.scaler.scale
        loss, finite = found.loss_sum / max(found.counted, 1.0), math.isfinite(found.norm)
        if not replay:
            self.scaler.account(loss, found.norm, applied=not found.skipped)
            if not found.skipped:
                self.norms.account(found.norm)
        return StepResult(
            loss=loss, tokens=round(found.counted), grad_norm=found.norm if finite else None,
            skipped=bool(found.skipped), loss_scale=used_scale,
            auxiliary=dict(zip(self.sums.auxiliary.names, auxiliary)),
            tallies=tallies,
        )

    @property
    def state_check_interval(self) -> int:
        """Updates between checks of the state; see ``engine.api.Engine``."""
        return self.watch.interval

    def hash_state(self) -> None:
        self.sharded.wait()
        self.watch.hash_state()

    def state_damage(self, *, now: bool = False) -> Damage | None:
        """Return what changed since the last update; see ``engine.api.Engine``."""
        if now:
            self.sharded.wait()
            self._differing = int(self.watch.verify_state())
        return self.watch.damage() if self._differing else None

    def micro_batch_losses(self) -> Sequence[torch.Tensor]:
        """Scalars, last stage only; see ``engine.api.Engine``."""
        return self._losses

    def nonfinite_gradients(self) -> list[str]:
        """Names of this rank's shards whose gradient is not finite (``engine.api.Engine``)."""
        bad = [p.record.name for p in self.sharded.pieces if not bool(torch.isfinite(p.gradient).all())]
        return list(dict.fromkeys(bad))

    @torch.no_grad()
    def eval_step(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        """Forward only; see ``engine.api.Engine``."""
        for batch in micro_batches:
            batch.check_ids(self.config.model.vocab_size)
        if self.captured is not None:  # beside the graphs' memory that of an evaluation may not fit
            self.captured.graphs.release_memory()
        self.stage.eval()
        self.stream.enabled = False
        self.progress.at(REDUCE, "tokens of the batch")
        tokens = global_count(micro_batches, self.objective, self.ctx, seq_length=self.config.model.seq_length)
        self.values.set(StepNumbers(tokens=tokens))
        passes = self.forward_backward.run(micro_batches, 0)
        self._losses = passes.losses
        self.progress.at(REDUCE, "loss of the batch")
        self.stream.enabled = True
        loss_sum, count = shared_sums([passes.total, tokens / self.ctx.size(*REPLICAS)], self.ctx)
        return EvalResult(loss_sum=loss_sum, tokens=round(count))

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Evaluate the averaged weights where that is asked for; see ``engine.api.Engine``."""
        wanted = self.average is not None and self.config.optimizer.ema_evaluate
        return self.average.as_weights() if wanted and self.average is not None else nullcontext()

    def named_parameters(self) -> Iterator[tuple[ParameterRecord, nn.Parameter]]:
        """Yield this rank's parameters. Under ZeRO stage 3 collective, and a parameter's weights stay gathered only
        until the next one is asked for."""
        yield from self.sharded.named_weights()

    def state_pieces(self) -> Iterator[StatePiece]:
        """Yield the buffers, and the pieces of masters and optimizer state, that this rank owns."""
        yield from buffer_pieces(self.buffers, self.ctx)
        yield from native_state.state_pieces(self.sharded)

    def scalar_state(self) -> dict[str, float | int]:
        """Return the optimizer steps taken, and the loss scale."""
        return {"optimizer_steps": self.update.steps, **self.norms.state(), **self.scaler.state()}

    @torch.no_grad()
    def load_state(self, read: StateReader, scalars: dict[str, float | int]) -> None:
        """Set masters, weights, optimizer state and counters. Each rank reads its own slices, without communication."""
        with self.objective.add_frozen(read) as whole:
            native_state.load_state(self.sharded, self.parameters, whole)
            load_buffers(self.buffers, whole)
        masks = self._masks
        if masks is not None:
            masks.loaded()
        self.sharded.loaded(on_final=(lambda bucket: None) if masks is None else masks.apply_to)
        self.update.restore(int(scalars.get("optimizer_steps", 0)))
        self.norms.load(scalars)
        if self.average is not None:
            self.average.restore(self.update.steps)
        self.scaler.load(scalars)
        self.watch.hash_state()

    def load_weights(self, read: StateReader) -> None:
        """Set weights and buffers; optimizer state and counters start afresh."""
        self.load_state(zero_moments(read), {})
