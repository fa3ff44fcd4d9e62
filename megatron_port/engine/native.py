"""The native engine: schedules as data, ZeRO-1 and ZeRO-2 that overlap with compute, every layout and dtype.

It needs nothing but torch, runs in fp64 for proofs, and on one process it is
the reference that every layout of either engine is compared with.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron_port.config.schema import RunConfig
from megatron_port.data.batch import MicroBatch
from megatron_port.data.objective import Objective
from megatron_port.engine import native_state
from megatron_port.engine.api import NO_LIMITS, EvalResult, StepLimits, StepResult
from megatron_port.engine.loss_reduction import (
    device_sums,
    global_count,
    global_samples,
    loss_weight,
    reduced_auxiliary,
    refused_loss,
    shared_sums,
    term_counts,
)
from megatron_port.engine.module import buffer_pieces, load_buffers, recorded_parameters, zero_moments
from megatron_port.engine.native_gradients import GradientSink, ShardTarget
from megatron_port.engine.native_passes import Passes, StepWork, reserve_swap, unit_uses
from megatron_port.engine.native_update import make_update
from megatron_port.engine.probe import Probe
from megatron_port.engine.step_graphs import Recorder, Reduced, StepGraphs, cuda_recorder
from megatron_port.engine.step_inputs import StepInputs
from megatron_port.errors import ConfigError
from megatron_port.optim.average import WeightAverage
from megatron_port.optim.bucket_memory import Bucket
from megatron_port.optim.clipping import NormStatistics
from megatron_port.optim.gradients import global_square_norm, owned_gradients
from megatron_port.optim.loss_scale import LossScaler
from megatron_port.optim.masks import GradientMasks
from megatron_port.optim.rules import rule_of
from megatron_port.optim.sharded import ShardedParameters
from megatron_port.optim.state_check import Damage, StateCheck, check_of
from megatron_port.optim.step_values import StepNumbers, StepValues
from megatron_port.optim.unit_gather import WeightSharding
from megatron_port.parallel.buffers import recorded_buffers
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.linear_kernels import QuantizedWeightCache
from megatron_port.parallel.mesh import REPLICAS, SHARDED
from megatron_port.parallel.random import sample_keys
from megatron_port.parallel.record import ParameterRecord
from megatron_port.parallel.state import StatePiece, StateReader
from megatron_port.parallel.step import AuxiliarySums, StepShared, StepSlot, Tallies
from megatron_port.pipeline.boundary import Boundary
from megatron_port.pipeline.filling import fillers
from megatron_port.pipeline.runner import Runner
from megatron_port.pipeline.schedules import forward_only, make_schedule
from megatron_port.pipeline.transfer import StageLink
from megatron_port.runtime.progress import OPTIMIZER, REDUCE, ProgressTracker

REDUCE_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes of gradients between replicas; None: that of their sums (fp32; fp64 in fp64 runs)."""
GradientHook = Callable[[list[tuple[ParameterRecord, torch.Tensor]]], None]


def _record_weights(check: StateCheck, sharded: weakref.ref[ShardedParameters], bucket: Bucket) -> None:
    """Record a bucket's weights for the state check, once they have come from the other replicas."""
    alive = sharded()
    if check.recording and alive is not None:
        check.record([alive.weight_tensor(bucket)])


class NativeEngine:
    """Engine (``engine.api.Engine``) without DeepSpeed. ``chunks``: this rank's stage modules, one per virtual stage.

    ``objective``: what the step's mean divides by, and which frozen weights the run's checkpoints do not hold.
    ``on_gradients`` sees every final gradient (summed over dp, unclipped, unscaled); costs a gather of all of them.
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
        self.runner = Runner(StageLink(ctx), self.progress)
        self.parameters = recorded_parameters(self.stage)
        self.buffers = recorded_buffers(self.stage)
        self.sharded = ShardedParameters(
            self._by_unit(), ctx, wide=torch.float64 if dtype == torch.float64 else torch.float32,
            split_state=config.layout.zero_stage > 0, capacity=config.layout.reduce_bucket_size,
            reduce_dtype=REDUCE_DTYPES[config.precision.grad_reduce_dtype],
            shard_gradients=self._shards_gradients(), rule=rule_of(config.optimizer), shared=self._shared(),
            sharding=self._weight_sharding(), offload=config.offload,
        )
        self.values = StepValues(ctx.device)
        gradients = GradientSink(self.sharded, together=optimizer_provider == "own")
        self.target = ShardTarget(gradients, self.sharded, self.values.loss_factor)
        self.quantized_weight_cache = QuantizedWeightCache()
        for _, p in self.parameters:
            p.wgrad_accumulator = self.target.accumulator  # type: ignore[attr-defined]  # see parallel.linear
            p.quantized_weight_cache = self.quantized_weight_cache  # type: ignore[attr-defined]  # see parallel.linear_kernels
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(gradients.hook(p))
        for chunk in self.chunks:
            for unit in chunk.units:
                self.sharded.wait_before(unit)
        self.update = make_update(optimizer_provider, self.sharded, config.optimizer, seed=config.seed)
        self._in_norm = owned_gradients(
            ((p.record, p.gradient) for p in self.sharded.pieces), ctx, spread=self.sharded.spread
        )
        self.masks = GradientMasks((), config.sparsity)
        self.norms = NormStatistics(config.optimizer)
        self.average = WeightAverage(self.sharded, config.optimizer.ema_decay) if config.optimizer.ema_decay else None
        self.scaler = LossScaler(config.precision)
        self.on_gradients: GradientHook | None = None
        self.auxiliary = AuxiliarySums(self.chunks[0].auxiliary_names, ctx.device)
        self.tallies = Tallies(self.chunks[0].tally_specs, ctx.device)
        self._losses: list[torch.Tensor] = []
        self._totals: dict[str, torch.Tensor] = {}
        self.state_check = check_of(config, ctx)
        self.gradient_check = self.sharded.check
        self.gradient_check.interval = self.state_check.interval
        self._differing = 0
        # Not a bound method: see GradientSink.
        recording, sharded = self.state_check, weakref.ref(self.sharded)
        self.sharded.on_gathered = lambda bucket: _record_weights(recording, sharded, bucket)
        self.graphs: StepGraphs | None = None
        if config.backend.graphs == "step":
            self.record_steps(cuda_recorder(config, ctx, optimizer_provider))

    def _shards_gradients(self) -> bool:
        """Whether gradient sums are sharded: from ZeRO stage 2 on. Where the schedule splits backward passes, stage 3
        keeps whole sums, as stage 1 does.

        Raises ConfigError for stage 2 with such a schedule, each part of whose passes it would reduce by itself.
        ``config.checks`` knows the package's own schedules, not a plugin's.
        """
        layout, batch, topology = self.config.layout, self.config.batch, self.ctx.topology
        if layout.zero_stage < 2:
            return False
        count = max(batch.global_batch_size // (batch.micro_batch_size * self.ctx.size("dp")), 1)
        schedule = make_schedule(layout.pipeline_schedule, topology.pp, count, layout.virtual_pipeline_size)
        sharded = self.ctx.size(*SHARDED) > 1
        if schedule.splits_backward and layout.zero_stage == 2 and sharded:
            raise ConfigError(
                f'layout.zero_stage 2 with pipeline_schedule "{schedule.name}": its backward passes are split in two; '
                "use zero_stage 1"
            )
        return not schedule.splits_backward

    def _weight_sharding(self) -> WeightSharding | None:
        """How stage 3 shards the weights; None: another stage.

        Raises ConfigError where a chunk has parameters outside its units, which would never be gathered.
        """
        if self.config.layout.zero_stage < 3:
            return None
        topology, ends, at = self.ctx.topology, [], 0
        for c, units in enumerate(self._by_unit()):
            if units[0]:
                raise ConfigError(
                    f"layout.zero_stage 3: {units[0][0][0].name} is a parameter of a chunk and of none of its units, "
                    "by which weights are gathered; put it into a unit, or use zero_stage 2"
                )
            virtual = topology.virtual_stage(self.ctx.coords.pp, c)
            ends += [at + 1] if virtual == 0 else []
            at += len(units)
            further = sum(getattr(unit, "training_only", False) for unit in self.chunks[c].units)
            ends += [at - further - 1] if virtual == topology.virtual_stages - 1 else []
        host = self.config.offload.weights == "cpu"
        return WeightSharding(ends, keep=self.config.layout.reshard == "step", on_host=host)

    def _by_unit(self) -> list[list[list[tuple[ParameterRecord, nn.Parameter]]]]:
        """Return the parameters of each unit of each chunk, each with the first unit that has it: a table that
        embedding and head share is in two. What is in no unit of a chunk comes before them."""
        seen: set[int] = set()
        out = []
        for chunk in self.chunks:
            inside = {id(p) for unit in chunk.units for p in unit.parameters()}
            groups = [[(r, p) for r, p in recorded_parameters(chunk) if id(p) not in inside]]
            groups += [recorded_parameters(unit) for unit in chunk.units]
            units = []
            for pairs in groups:
                units.append([(record, p) for record, p in pairs if id(p) not in seen])
                seen.update(id(p) for _, p in pairs)
            out.append(units)
        return out

    def _shared(self) -> list[nn.Parameter]:
        """Parameters that several units of this rank use."""
        units = [{id(p) for p in unit.parameters()} for chunk in self.chunks for unit in chunk.units]
        return [p for _, p in self.parameters if sum(id(p) in unit for unit in units) > 1]

    def record_steps(self, recorder: Recorder) -> None:
        """Record steps and replay them, from the fourth on (``step_graphs``). Before the first step."""
        self.graphs = StepGraphs(recorder, self.ctx.device)
        self.gradient_check.recorded = True
        self.sharded.on_gathered = lambda bucket: None  # recorded with the rest of the state, once all are gathered

    def _run(
        self, micro_batches: Sequence[MicroBatch], step: int, *, probe: Probe | None = None,
        keys: Sequence[torch.Tensor] = (),
    ) -> Passes:
        """Run the step's schedule, or an evaluation's where no gradients are wanted. ``keys``: of a recorded step."""
        values = self.values if keys else self.values.host
        shared = StepShared(
            loss_factor=values.loss_factor, sample_factor=values.sample_factor, global_tokens=values.tokens)
        count, layout = len(micro_batches), self.config.layout
        if torch.is_grad_enabled():
            schedule = make_schedule(
                layout.pipeline_schedule, self.ctx.topology.pp, count, layout.virtual_pipeline_size,
                exchanges=self.ctx.topology.ep > 1,
            )
            reserve_swap(self.chunks, schedule.plans[self.ctx.coords.pp])
            shared = replace(
                shared, term_counts=term_counts(micro_batches, self.objective, self.ctx), auxiliary=self.auxiliary,
                tallies=self.tallies,
            )
        else:
            schedule = forward_only(self.ctx.topology, count)
        passes = Passes(
            self.chunks, self.ctx, self.step_slot, self.progress,
            StepWork(micro_batches=micro_batches, step=step, shared=shared, keys=keys), self.target, probe=probe,
            filled_by=fillers(schedule.plans[self.ctx.coords.pp]),
        )
        sizes, length = [len(b.sample_ids) for b in micro_batches], self.config.model.seq_length
        if self.sharded.unit_gather is not None:
            self.sharded.unit_gather.plan(unit_uses(self.chunks, schedule.plans[self.ctx.coords.pp]))
        boundaries = {size: Boundary.of(self.chunks[0].boundary(size, length)) for size in set(sizes)}
        # Copies that lasted through the step would be whole weights again.
        whole = self.sharded.unit_gather is None or self.sharded.unit_gather.keep
        with self.quantized_weight_cache.active() if whole else nullcontext():
            self.runner.run(schedule, passes, lambda m: boundaries[sizes[m]])
        return passes

    def train_step(
        self, micro_batches: Sequence[MicroBatch], *, step: int, lr: float, limits: StepLimits = NO_LIMITS,
        probe: Probe | None = None,
    ) -> StepResult:
        """Take one optimizer step (``engine.api.Engine``)."""
        if not self.stage.training:  # walking through all modules takes as long as a layer's launches
            self.stage.train()
        self.stream.enabled = True
        self.progress.at(REDUCE, "tokens of the step")
        tokens = global_count(
            micro_batches, self.objective, self.ctx, seq_length=self.config.model.seq_length
        )
        used_scale, (largest_loss, largest_norm) = self.scaler.scale, limits.largest
        mean, deviation = self.norms.now
        self.values.set(StepNumbers(
            lr=lr, loss_factor=used_scale * loss_weight(tokens), tokens=tokens,
            sample_factor=used_scale / global_samples(micro_batches, self.ctx),
            replica_tokens=tokens / self.ctx.size(*REPLICAS), scale=used_scale, largest_loss=largest_loss,
            largest_norm=largest_norm, norm_mean=mean, norm_deviation=deviation,
        ))
        graphs = self.graphs
        if graphs is None or probe is not None or self.on_gradients is not None:
            if graphs is not None:
                graphs.release()  # the recordings' memory is needed
            reduced = self._reduce(micro_batches, step, probe=probe)
            self._verify_state()
            outcome = self._apply(reduced)
        else:
            self.sharded.gathers_itself()
            keys = [sample_keys(self.config.seed, step, b.sample_ids) for b in micro_batches]
            reduced = graphs.gradients(micro_batches, keys, self._reduce_recorded)
            self._verify_state()
            self.gradient_check.verify_recorded()
            outcome = graphs.update(lambda: self._apply(reduced))
        self._losses = reduced.losses
        if graphs is None:
            self._record_state(gathering=self.sharded.shards > 1 and self.sharded.unit_gather is None)
            self.sharded.start_gather()
        else:
            self.sharded.defer_gather()
            self._record_state(gathering=False)
        # The step's one host synchronisation (one more for each mask's count and torch's AdamW).
        total, count, grad_norm, skipped, self._differing, *added = outcome.tolist()
        loss, finite = total / max(count, 1.0), math.isfinite(grad_norm)
        if probe is None:
            self.scaler.account(loss, grad_norm, applied=not skipped)
            if not skipped:
                self.norms.account(grad_norm)
        return StepResult(
            loss=loss, tokens=round(count), grad_norm=grad_norm if finite else None, skipped=bool(skipped),
            loss_scale=used_scale, auxiliary=dict(zip(self.auxiliary.names, added)),
            tallies={name: total.cpu() for name, total in self._totals.items()},
        )

    def _reduce_recorded(self, inputs: StepInputs) -> Reduced:
        """Gather the weights and compute gradients: the work of a recorded step before its update."""
        self.sharded.start_gather()
        return self._reduce(inputs.batches, -1, keys=inputs.keys)

    def _reduce(
        self, micro_batches: Sequence[MicroBatch], step: int, *, probe: Probe | None = None,
        keys: Sequence[torch.Tensor] = (),
    ) -> Reduced:
        """Compute the gradients of a step, summed over all ranks, and their norm."""
        at = self.progress.at
        # A replay wants to see this rank's own gradients before any sum.
        self.sharded.begin(len(micro_batches), early=probe is None)
        self.auxiliary.reset()
        self.tallies.reset()
        with nullcontext() if probe is None else probe.watch(self.stage):
            passes = self._run(micro_batches, step, probe=probe, keys=keys)
        if probe is not None:
            probe.own_gradients(self.sharded.local_gradients())
        at(REDUCE, "gradients over the replicas, partial and tied ones over tp and the stages")
        self.sharded.finish()
        if self.masks.some:
            self.gradient_check.release(self.sharded.trained)
            self.masks.apply()
            self.gradient_check.record(self.sharded.trained)
        if self.on_gradients is not None:
            scale = self.scaler.scale
            self.on_gradients([(record, g / scale) for record, g in self.sharded.whole_gradients()])
        at(REDUCE, "loss of the step")
        sums = device_sums([passes.total, self.values.replica_tokens], self.ctx)
        auxiliary = reduced_auxiliary(self.auxiliary, self.ctx)
        veto = refused_loss(sums, self.values.largest_loss) if probe is None else torch.ones((), device=sums.device)
        at(OPTIMIZER, "gradient norm and update")
        square = global_square_norm(self._in_norm, self.ctx, self.update.square_norm)
        return Reduced(passes.losses, sums, auxiliary, veto, square)

    def _apply(self, reduced: Reduced) -> torch.Tensor:
        """Update; return (loss, tokens, norm, whether nothing happened, damaged rows, auxiliary sums …), float64."""
        self.gradient_check.verify()
        norm, refused = self.update.step(reduced.square, self.values, veto=reduced.veto)
        if self.average is not None:
            self.average.update(refused)
        self._totals = self.tallies.totals(self.ctx.world_group) if self.tallies.specs else {}
        if self._totals:
            for chunk in self.chunks:
                chunk.after_update(self._totals, refused)
        return torch.stack([
            *reduced.sums, norm.double(), refused.double(),
            (self.state_check.differing + self.gradient_check.differing).double(), *reduced.auxiliary,
        ])

    def _record_state(self, *, gathering: bool) -> None:
        """Hash what this rank owns, after an update; its weights too, unless a gather is still to bring them."""
        if self.state_check.begin():
            self.sharded.settle_state()
            self.state_check.record(self.sharded.owned_tensors())
            if self.graphs is not None and not gathering:
                self.sharded.wait()
            # Experts that no other rank holds are not gathered.
            here = [b for b in self.sharded.buckets if not gathering or b.plan.frozen or b.shards == 1]
            self.state_check.record(self.sharded.weight_tensor(b) for b in here)

    def _verify_state(self) -> None:
        if self.state_check.recorded:
            self.sharded.settle_state()
            self.state_check.verify()

    def record_state(self) -> None:
        self.sharded.wait()
        self._record_state(gathering=False)

    def state_damage(self, *, now: bool = False) -> Damage | None:
        """What changed since the last update; see ``engine.api.Engine``."""
        if now:
            self.sharded.wait()
            self._verify_state()
            self._differing = int(self.state_check.differing)
        if not self._differing:
            return None
        reduced = self.gradient_check.damage()  # first: the ranks whose copies differ meet
        return self.state_check.damage() or reduced

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
        self.stage.eval()
        self.stream.enabled = False
        self.progress.at(REDUCE, "tokens of the batch")
        tokens = global_count(
            micro_batches, self.objective, self.ctx, seq_length=self.config.model.seq_length
        )
        self.values.set(StepNumbers(tokens=tokens))
        passes = self._run(micro_batches, 0)
        self._losses = passes.losses
        self.progress.at(REDUCE, "loss of the batch")
        self.stream.enabled = True
        loss_sum, count = shared_sums([passes.total, tokens / self.ctx.size(*REPLICAS)], self.ctx)
        return EvalResult(loss_sum=loss_sum, tokens=round(count))

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Compute with the weights that evaluations are of; see ``engine.api.Engine``."""
        wanted = self.average is not None and self.config.optimizer.ema_evaluate
        return self.average.as_weights() if wanted and self.average is not None else nullcontext()

    def named_parameters(self) -> Iterator[tuple[ParameterRecord, nn.Parameter]]:
        """Yield this rank's parameters. Under ZeRO stage 3 collective, and a parameter's values are there until the
        next one is asked for."""
        yield from self.sharded.named_weights()

    def state_pieces(self) -> Iterator[StatePiece]:
        """Yield the buffers, and the pieces of masters and optimizer state, that this rank owns."""
        yield from buffer_pieces(self.buffers, self.ctx)
        yield from native_state.state_pieces(self.sharded)

    def scalar_state(self) -> dict[str, float | int]:
        """Optimizer steps taken, and the loss scale."""
        return {"optimizer_steps": self.update.steps, **self.norms.state(), **self.scaler.state()}

    @torch.no_grad()
    def load_state(self, read: StateReader, scalars: dict[str, float | int]) -> None:
        """Set masters, weights, optimizer state and counters. Each rank reads its own slices, without communication."""
        with self.objective.add_frozen(read) as whole:
            native_state.load_state(self.sharded, self.parameters, whole)
            self.masks = GradientMasks(zip(self.sharded.owners, self.sharded.pieces), self.config.sparsity)
            load_buffers(self.buffers, whole)
        if self.sharded.unit_gather is not None:
            self.sharded.unit_gather.release()
        if self.sharded.offload is not None:
            self.sharded.offload.on_final = self.masks.apply_to
            self.sharded.offload.changed()
        self.update.restore(int(scalars.get("optimizer_steps", 0)))
        self.norms.load(scalars)
        if self.average is not None:
            self.average.restore(self.update.steps)
        self.scaler.load(scalars)
        self._record_state(gathering=False)

    def load_weights(self, read: StateReader) -> None:
        """Set weights and buffers; optimizer state and counters start afresh."""
        self.load_state(zero_moments(read), {})
