"""The DeepSpeed engine: 1F1B and ZeRO-1 of the pinned DeepSpeed, driven by our stage, records and batches."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.objective import Objective
from megatron_port.core.dist.collectives import Buffered, recorded_buffers, to_device_async
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import REPLICAS
from megatron_port.core.dist.process import REDUCE, ProgressTracker
from megatron_port.core.dist.record import ParameterRecord, StatePiece, StateReader
from megatron_port.core.engine.api import NO_LIMITS, EvalResult, StepLimits, StepProbe, StepResult
from megatron_port.core.engine.loss_reduction import (
    device_sums,
    global_count,
    global_samples,
    loss_weight,
    reduced_auxiliary,
    shared_sums,
)
from megatron_port.core.engine.module import buffer_pieces, load_buffers, recorded_parameters, zero_moments
from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.core.layers.step import AuxiliarySums, ModuleSums, StepShared, StepSlot, Tallies
from megatron_port.core.optim.gradients import LossScaler
from megatron_port.core.optim.rules import grouped
from megatron_port.core.optim.state_watch import Damage
from megatron_port.core.registry import STEP_PARTS
from megatron_port.ext.deepspeed.prepare import prepare_deepspeed
from megatron_port.ext.deepspeed.reduction import reduce_partial_gradients, reduce_tied_gradients_first

# The JSON that DeepSpeed wants, generated from our configuration and locked to what is right.
#
# Nobody writes it by hand: a second source of truth is how the batch that is
# asked for and the batch that is trained come to differ. Each locked value says
# what goes wrong without it (measured on DeepSpeed 0.19.8).

def deepspeed_config(config: RunConfig, *, replicas: int, micro_batches: int) -> dict[str, Any]:
    """DeepSpeed's configuration for ``micro_batches`` micro-batches on each of ``replicas`` of the weights.

    Ranks that share the positions of a sequence are replicas of their own to it; its batch size, of which it only
    checks that it is the product, counts a sample on each of them.

    Raises ConfigError for what this engine cannot do right.
    """
    layout, precision, batch = config.layout, config.precision, config.batch
    problems = []
    if precision.dtype not in ("fp32", "bf16", "fp16"):
        problems.append(f'precision.dtype "{precision.dtype}" needs engine = "native"; DeepSpeed\'s masters are fp32')
    if layout.zero_stage != 1:
        problems.append(
            f"layout.zero_stage {layout.zero_stage} with engine = \"deepspeed\": use 1 (its stage 0 drops replicated "
            "parameters from the gradient norm under pipeline parallelism and counts tied ones twice), or "
            'engine = "native"'
        )
    if layout.virtual_pipeline_size != 1 or layout.pipeline_schedule != "1f1b":
        problems.append(
            f'pipeline_schedule "{layout.pipeline_schedule}" with virtual_pipeline_size '
            f'{layout.virtual_pipeline_size}: DeepSpeed runs "1f1b" with 1; use those or engine = "native"'
        )
    if problems:
        raise ConfigError(problems)
    out: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": micro_batches,
        "train_batch_size": batch.micro_batch_size * micro_batches * replicas,
        "steps_per_print": 10**12,
        "gradient_clipping": config.optimizer.clip_grad,
        "zero_optimization": {
            "stage": 1,
            # Ignored with a warning under a PipelineModule.
            "overlap_comm": False,
            "reduce_bucket_size": 50_000_000,
            "allgather_bucket_size": 500_000_000,
        },
        "zero_allow_untested_optimizer": True,
        # Otherwise half-precision gradients are summed over replicas in half precision.
        "communication_data_type": "fp32",
        # A mean would need a loss multiplied by dp: a backward pass in half precision rounds at other places for a dp
        # that is no power of two (measured at dp 3, bf16: gradients 5e-2 to 2e-1 from those of one process).
        "gradient_allreduce_op": "sum",
        "data_types": {"grad_accum_dtype": "fp32"},
        "pipeline": {
            # Reentrant recompute gives the embedding no gradient at pp 1 and crashes at pp 2; ours is used instead.
            "use_reentrant": False,
            "activation_checkpoint_interval": 0,
            # Both assume activations equal on all tp ranks: silently wrong with sequence parallelism.
            "pipe_partitioned": False,
            "grad_partitioned": False,
        },
    }
    if precision.dtype == "bf16":
        out["bf16"] = {"enabled": True}
    if precision.dtype == "fp16":
        out["fp16"] = {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 0,
            "loss_scale_window": precision.loss_scale_window,
            "hysteresis": precision.loss_scale_hysteresis,
            "min_loss_scale": precision.min_loss_scale,
        }
    return out


GradientHook = Callable[[list[tuple[ParameterRecord, torch.Tensor]]], None]


class DeepSpeedEngine:
    """Engine (``engine.api.Engine``) that runs our stage in DeepSpeed's pipeline engine.

    The loss given to DeepSpeed is divided by the step's global token count, and gradients are summed over
    micro-batches and replicas, so the backward pass starts from the same factor as on one process. Its own division
    by the number of micro-batches and its average over replicas are off: undoing them in the loss rounds half
    precision at other places wherever their product is no power of two.
    """

    def __init__(
        self,
        stage: Any,
        config: RunConfig,
        ctx: ParallelContext,
        step_slot: StepSlot,
        *,
        dtype: torch.dtype,
        objective: Objective,
        optimizer_provider: str = "torch",
        progress: ProgressTracker | None = None,
    ) -> None:
        for module in stage.modules():
            if not isinstance(module, Buffered) and (bare := recorded_buffers(module, below=False)):
                raise ConfigError(
                    f"engine deepspeed casts the float32 buffer {bare[0][0].name} to precision.dtype, because "
                    f'{type(module).__name__} is no parallel.buffers.Buffered; make it one, or set engine = "native"'
                )
        prepare_deepspeed()
        from megatron_port.ext.deepspeed import deepspeed_pipeline
        from megatron_port.ext.deepspeed import deepspeed_pipeline as deepspeed_state

        self._state = deepspeed_state
        self.stage, self.config, self.ctx, self.dtype = stage, config, ctx, dtype
        self.step_slot, self.stream = step_slot, step_slot.stream
        self.objective = objective
        self.scaler = LossScaler(config.precision)
        self.on_gradients: GradientHook | None = None
        self.progress = progress or ProgressTracker()
        self._batches: Sequence[MicroBatch] = ()
        self._step = 0
        self._loss_factor = 1.0
        self.sums = ModuleSums(
            AuxiliarySums(stage.auxiliary_names, ctx.device), Tallies(stage.tally_specs, ctx.device)
        )
        self.buffers = recorded_buffers(stage)
        self._samples = 1
        self._auxiliary: dict[str, float] = {}
        self._losses: list[torch.Tensor] = []
        self._limits = NO_LIMITS
        self._probe: StepProbe | None = None
        self._tokens = 0.0
        self._loss_sum = self._counted = 0.0
        self._skipped = False
        self.state_check: Any = STEP_PARTS.function("state check")(config, ctx)
        self._differing = 0.0
        self._loss_total = torch.zeros((), dtype=torch.float64, device=ctx.device)
        micro_batches = config.batch.global_batch_size // (config.batch.micro_batch_size * ctx.size("dp"))
        settings = deepspeed_config(config, replicas=ctx.size(*REPLICAS), micro_batches=micro_batches)
        self.engine = self._initialize(deepspeed_pipeline, settings, optimizer_provider)
        self.parameters = recorded_parameters(self.stage)
        self._copies = self.stage.weight_copies
        for _, p in self.parameters if self._copies is not None else ():
            self._copies.attach(p)
        self.engine.progress = self.progress
        self.engine.around_forward = self._around_forward
        self.engine.after_backward = self._after_backward
        self.engine.reduce_shared_gradients = self._reduce_shared
        self.engine.before_update = self._before_update
        # Our LossScaler changes the scale, after the step; see deepspeed_pipeline.
        self.engine.optimizer._update_scale = lambda overflow=False: None
        deepspeed_pipeline.skip_step_when(self.engine.optimizer.optimizer, self._may_not_update)
        self._push_scale()

    def _initialize(self, pipeline: Any, settings: dict[str, Any], optimizer_provider: str) -> Any:
        """Build DeepSpeed's objects; its start-up chatter goes to debug logging."""
        import deepspeed
        from deepspeed.runtime.config import DeepSpeedConfig

        # PipelineModule reads it from the environment only to pick a device, which the context already did.
        os.environ["LOCAL_RANK"] = str(self.ctx.device.index or 0)
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        chatter = io.StringIO()
        with contextlib.redirect_stdout(chatter):
            deepspeed.init_distributed(dist_init_required=False)
            module = pipeline.SingleStagePipelineModule(self.stage, self.ctx, self._loss)
            optimizer = self._build_optimizer(optimizer_provider)
            engine = pipeline.RecordedPipelineEngine(
                args=None, model=module, optimizer=optimizer, mpu=module.mpu(), dist_init_required=False,
                config=settings, config_class=DeepSpeedConfig(settings, module.mpu()),
            )
        logging.getLogger("megatron_port").debug("%s", chatter.getvalue())
        if engine.gradient_average:  # an unknown key is ignored, and every gradient would be divided by dp
            raise EnvironmentFault(
                f"DeepSpeed {deepspeed.__version__} cannot sum gradients over replicas (gradient_allreduce_op); "
                "install the version that constraints/ pins"
            )
        return engine

    def _build_optimizer(self, provider: str) -> torch.optim.Optimizer:
        cfg = self.config.optimizer
        pairs = recorded_parameters(self.stage)
        groups = [
            {"params": found, "weight_decay": settings.weight_decay, "lr_factor": settings.lr_factor}
            for settings, found in grouped(pairs, cfg.weight_decay).items()
        ]
        common: dict[str, Any] = {"lr": cfg.lr, "betas": (cfg.beta1, cfg.beta2), "eps": cfg.eps}
        if provider == "deepspeed":
            from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

            cpu = self.ctx.device.type == "cpu"
            optimizer: torch.optim.Optimizer = (
                DeepSpeedCPUAdam(groups, adamw_mode=True, **common) if cpu
                else FusedAdam(groups, adam_w_mode=True, **common)
            )
            return optimizer
        if provider == "apex":
            from apex.optimizers import FusedAdam as ApexAdam

            optimizer = ApexAdam(groups, adam_w_mode=True, **common)
            return optimizer
        if provider != "torch":
            raise ValueError(f"unknown optimizer provider {provider!r}")
        return torch.optim.AdamW(groups, foreach=True, **common)

    @property
    def _divisor(self) -> float:
        """Factor by which DeepSpeed multiplies the loss and divides the gradient."""
        return self.scaler.scale if self.dtype == torch.float16 else 1.0

    def _push_scale(self) -> None:
        if self.dtype == torch.float16:
            self.engine.optimizer.loss_scaler.cur_scale = self._divisor

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """DeepSpeed's loss function, called once per micro-batch, in order."""
        index = len(self._losses)
        mask = self._batches[index].loss_mask
        loss = self.stage.loss_sum(logits, labels, to_device_async(mask, logits.device) if mask is not None else None)
        self._losses.append(loss.detach())
        self._loss_total += self._losses[-1]
        if self._probe is not None:
            self._probe.loss(index, loss)
        out: torch.Tensor = loss * self._loss_factor
        return out

    @contextlib.contextmanager
    def _around_forward(self, index: int) -> Iterator[None]:
        batch = self._batches[index]
        training = self.stream.enabled
        shared = StepShared(
            loss_factor=self._loss_factor * self._divisor, sample_factor=self._divisor / self._samples,
            global_tokens=self._tokens, auxiliary=self.sums.auxiliary if training else None,
            tallies=self.sums.tallies if training else None,
        )
        self.step_slot.announce(
            self._step, batch.sample_ids, shared, document_starts=batch.document_starts, division=batch.division
        )
        with contextlib.nullcontext() if self._probe is None else self._probe.forward(index):
            yield

    def _after_backward(self, index: int, sent: torch.Tensor | None) -> None:
        if self._probe is not None:
            self._probe.after_backward(index, [*self.engine.held_gradients(), sent])

    def _reduce_shared(self, grads: list[tuple[ParameterRecord, torch.Tensor]]) -> None:
        if self._probe is not None:
            self._probe.local_gradients(grads)
        reduce_partial_gradients(grads, self.ctx)
        reduce_tied_gradients_first(grads, self.ctx)

    def _before_update(self) -> None:
        """Check the state that is about to change; share the loss, so that the update can depend on it; show the final
        gradients to whoever asked.

        ``on_gradients`` gets them summed over replicas and unscaled; costs a collective per tensor.
        """
        self.state_check.verify()
        sums = device_sums([self._loss_total, self._tokens / self.ctx.size(*REPLICAS)], self.ctx)
        auxiliary = reduced_auxiliary(self.sums.auxiliary, self.ctx)
        # The step's host synchronisation before the norm: all numbers in one copy.
        numbers = torch.stack([*sums, self.state_check.differing.double(), *auxiliary.double()]).tolist()
        self._loss_sum, self._counted, self._differing = numbers[:3]
        self._auxiliary = dict(zip(self.sums.auxiliary.names, numbers[3:]))
        if self.on_gradients is None:
            return
        scale = self._divisor
        self.on_gradients(
            [(r, p.get_full_hp_grad().view(p.shape) / scale) for r, p in self.parameters]  # type: ignore[attr-defined]
        )

    def _begin(self, micro_batches: Sequence[MicroBatch], step: int) -> Iterator[tuple[Any, ...]]:
        self._batches, self._step, self._losses = micro_batches, step, []
        self._loss_total.zero_()
        self.sums.reset()
        self._samples = global_samples(micro_batches, self.ctx)
        return iter([(b.tokens, b.labels) for b in micro_batches])

    def _may_not_update(self) -> bool:
        """Return whether the update is skipped, once norm and loss are known; alike on all ranks."""
        largest_loss, largest_norm = self._limits.largest
        fits = self._mean_loss <= largest_loss and float(self.engine.optimizer._global_grad_norm) <= largest_norm
        self._skipped = self._probe is not None or not fits
        return self._skipped

    @property
    def _mean_loss(self) -> float:
        return self._loss_sum / max(self._counted, 1.0)

    def train_step(
        self, micro_batches: Sequence[MicroBatch], *, step: int, lr: float, limits: StepLimits = NO_LIMITS,
        probe: StepProbe | None = None,
    ) -> StepResult:
        """Take one optimizer step (``engine.api.Engine``)."""
        count = len(micro_batches)
        if count != self.engine.micro_batches:
            each = self.config.batch.micro_batch_size * self.ctx.size(*REPLICAS)  # as DeepSpeed counts
            self.engine.set_train_batch_size(count * each)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]
        self.stream.enabled = True
        self.progress.at(REDUCE, "tokens of the step")
        tokens = global_count(
            micro_batches, self.objective, self.ctx, seq_length=self.config.model.seq_length
        )
        self._loss_factor = loss_weight(tokens)
        self._tokens, self._limits, self._probe, self._skipped = tokens, limits, probe, False
        used_scale = self.scaler.scale
        # Weights change at the batch's very end, after its passes.
        watching = contextlib.nullcontext() if probe is None else probe.watch(self.stage)
        with self._copying(), watching:
            self.engine.train_batch(self._begin(micro_batches, step))
        self._probe = None
        self.hash_state()
        overflow = bool(self.engine.optimizer.overflow)
        totals = self.sums.tallies.totals(self.ctx.world_group) if self.sums.tallies.specs else {}
        if totals:
            skipped = torch.tensor(float(overflow or self._skipped))
            self.stage.after_update(totals, to_device_async(skipped, self.ctx.device))
        norm = math.inf if overflow else float(self.engine.get_global_grad_norm())
        if probe is None:
            self.scaler.account(self._mean_loss, norm, applied=not (overflow or self._skipped))
            self._push_scale()
        return StepResult(
            loss=self._mean_loss, tokens=round(self._counted), grad_norm=None if overflow else norm,
            skipped=overflow or self._skipped, loss_scale=used_scale, auxiliary=self._auxiliary,
            tallies={name: total.cpu() for name, total in totals.items()},
        )

    @property
    def state_check_interval(self) -> int:
        """Updates between checks of the state; see ``engine.api.Engine``."""
        return int(self.state_check.interval)

    def _copying(self, *, backward: bool = True) -> contextlib.AbstractContextManager[None]:
        """Keep a step's 8-bit copies of the weights, where layers make any."""
        return contextlib.nullcontext() if self._copies is None else self._copies.active(backward=backward)

    def hash_state(self) -> None:
        """Hash what this rank holds; see ``engine.api.Engine``. After an update its weights have been gathered."""
        if self.state_check.begin():
            self.state_check.record(self._state.state_tensors(self.engine.optimizer))

    def state_damage(self, *, now: bool = False) -> Damage | None:
        """What changed since the last update; see ``engine.api.Engine``."""
        if now:
            self.state_check.verify()
            self._differing = float(self.state_check.differing)
        found: Damage | None = self.state_check.damage() if self._differing else None
        return found

    def micro_batch_losses(self) -> Sequence[torch.Tensor]:
        """Scalars, last stage only; see ``engine.api.Engine``."""
        return self._losses

    def nonfinite_gradients(self) -> list[str]:
        """Return nothing: DeepSpeed clears gradients with the step."""
        return []

    def eval_step(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        """Forward only; see ``engine.api.Engine``."""
        self.stream.enabled = False
        self._loss_factor = 1.0
        self._tokens = global_count(
            micro_batches, self.objective, self.ctx, seq_length=self.config.model.seq_length
        )
        with self._copying(backward=False):
            self.engine.eval_batch(
                self._begin(micro_batches, 0), reduce_output=None, bcast_loss=False,
                num_micro_batches=len(micro_batches),
            )
        self.stream.enabled = True
        total, counted = shared_sums([self._loss_total, self._tokens / self.ctx.size(*REPLICAS)], self.ctx)
        return EvalResult(loss_sum=total, tokens=round(counted))

    def evaluated_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context of nothing: config.checks refuses averages for this engine."""
        return contextlib.nullcontext()

    def named_parameters(self) -> Iterator[tuple[ParameterRecord, nn.Parameter]]:
        """This rank's parameters."""
        yield from self.parameters

    def state_pieces(self) -> Iterator[StatePiece]:
        """Yield the buffers that this rank owns, and the ranges of masters and moments that ZeRO-1 gave it."""
        yield from buffer_pieces(self.buffers, self.ctx)
        yield from self._state.state_pieces(self.engine.optimizer, self.ctx)

    def scalar_state(self) -> dict[str, float | int]:
        """Optimizer steps taken, and the loss scale."""
        return {"optimizer_steps": self._state.optimizer_steps(self.engine.optimizer), **self.scaler.state()}

    def load_state(self, read: StateReader, scalars: dict[str, float | int]) -> None:
        """Set masters, weights, moments and counters."""
        self._state.load_state(self.engine.optimizer, read, int(scalars.get("optimizer_steps", 0)))
        load_buffers(self.buffers, read)
        self.scaler.load(scalars)
        self._push_scale()
        self.hash_state()

    def load_weights(self, read: StateReader) -> None:
        """Set weights; moments and counters start afresh."""
        self.load_state(zero_moments(read), {})
