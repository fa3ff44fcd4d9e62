"""DeepSpeed's pipeline engine, with the parts overridden that are wrong or unaware of our parameter records.

Checked against DeepSpeed 0.19.8, the version that is pinned; everything that
touches its insides is here and in ``deepspeed_state``.

* The dispatch table holds unbound functions, so overriding a method is not
  enough: the table is rebuilt below.
* Tied gradients are looked up where they are (``grad``, ``grad_accum`` or the
  bf16 optimizer's buffer); DeepSpeed reads ``weight.grad``, which is None with
  fp16 and fp32 accumulation, and then never sums them.
* Gradients that are partial over tp are summed before ZeRO's reduction.
* fp16: DeepSpeed changes the loss scale before it divides the gradient by it,
  so the step at which the scale grows is halved. The scale is changed after
  the step here, by the same ``LossScaler`` that the native engine uses.
* The loss is not divided by the number of micro-batches: the engine that owns this one divides by tokens.
* Its optimizers know one reason to skip an update, a norm that is not finite.
  The torch optimizer inside, which they call once norm and clipping are done,
  is asked by ``skip_step_when`` whether it may.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

from megatron_port.core.dist.context import ParallelContext
from megatron_port.core.dist.mesh import REPLICAS
from megatron_port.core.dist.progress import BACKWARD, DATA, FORWARD, OPTIMIZER, REDUCE, TRANSFER, ProgressTracker
from megatron_port.core.dist.record import ParameterRecord, record_of


def skip_step_when(inner: torch.optim.Optimizer, refused: Callable[[], bool]) -> None:
    """Let ``inner.step`` do nothing where ``refused()``. Its owner then publishes and gathers weights that are as
    they were, and clears gradients as after any step."""
    real = inner.step

    def step(*args: Any, **kwargs: Any) -> Any:
        return None if refused() else real(*args, **kwargs)

    inner.step = step  # type: ignore[method-assign]


class SingleStagePipelineModule(PipelineModule):  # type: ignore[misc] # DeepSpeed has no types
    """A PipelineModule whose layer i is our stage i: how layers are split is decided in one place, not here."""

    def __init__(self, stage: nn.Module, ctx: ParallelContext, loss_fn: Callable[..., torch.Tensor]) -> None:
        t = ctx.topology

        def build() -> nn.Module:
            return stage

        with torch.no_grad():
            super().__init__(
                layers=[LayerSpec(_ModuleHolder, build) for _ in range(t.pp)],
                topology=PipeModelDataParallelTopology(num_pp=t.pp, num_mp=t.tp, num_dp=t.dp * t.cp),
                loss_fn=loss_fn,
                partition_method="uniform",
                activation_checkpoint_interval=0,
            )
        for p in self.parameters():
            record = record_of(p)
            # Its norm counts a parameter on every tp rank if split, on tp rank 0 otherwise, and never if "replicated".
            split = record.split_dim is not None
            p.tensor_model_parallel = split
            owned = record.is_owned(ctx.mesh, ctx.rank, spread=ctx.mesh.factors(*REPLICAS))
            p.ds_pipe_replicated = (split and not owned) or not record.tied_primary


class _ModuleHolder(nn.Module):
    """Holder of an existing stage: LayerSpec builds modules by class."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stage = build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.stage(x)
        return out


PHASES: dict[type, tuple[str, str]] = {
    schedule.LoadMicroBatch: (DATA, "micro-batch in buffer"),
    schedule.ForwardPass: (FORWARD, "micro-batch in buffer"),
    schedule.BackwardPass: (BACKWARD, "micro-batch in buffer"),
    schedule.SendActivation: (TRANSFER, "send an activation"),
    schedule.RecvActivation: (TRANSFER, "receive an activation"),
    schedule.SendGrad: (TRANSFER, "send a gradient"),
    schedule.RecvGrad: (TRANSFER, "receive a gradient"),
    schedule.ReduceGrads: (REDUCE, "gradients over dp"),
    schedule.ReduceTiedGrads: (REDUCE, "tied and partial gradients"),
    schedule.OptimizerStep: (OPTIMIZER, "gradient norm and update"),
}
"""Instruction → phase and operation that the progress tells."""


def _in_phase(phase: str, operation: str, execute: Callable[..., None]) -> Callable[..., None]:
    """Wrap an instruction so that it first reports its phase."""

    def instruction(self: RecordedPipelineEngine, *args: Any, **kwargs: Any) -> None:
        self.progress.at(phase, operation, kwargs.get("buffer_id", -1))
        execute(self, *args, **kwargs)

    return instruction


class RecordedPipelineEngine(PipelineEngine):  # type: ignore[misc] # DeepSpeed has no types
    """Calls back around each pass, around gradient reduction and before the update."""

    progress: ProgressTracker
    around_forward: Callable[[int], AbstractContextManager[None]]
    reduce_shared_gradients: Callable[[list[tuple[ParameterRecord, torch.Tensor]]], None]
    before_update: Callable[[], None]
    after_backward: Callable[[int, torch.Tensor | None], None]
    """Called with the micro-batch and the gradient that goes to the stage before."""
    in_backward = False

    def held_gradients(self) -> list[torch.Tensor | None]:
        """Return what each parameter has accumulated so far, where that is known."""
        if isinstance(self.optimizer, BF16_Optimizer):
            return [getattr(p, "_hp_grad", None) for p in self.module.parameters()]
        return [self.optimizer.get_param_gradient_attribute(p) for p in self.module.parameters()]

    def recorded_gradients(self) -> list[tuple[ParameterRecord, torch.Tensor]]:
        """(record, accumulated gradient) of every parameter, in the buffer that ZeRO will reduce."""
        out = []
        for p in self.module.parameters():
            if isinstance(self.optimizer, BF16_Optimizer):
                grad = getattr(p, "_hp_grad", None)
            else:
                grad = self.optimizer.get_param_gradient_attribute(p)
            if grad is None:
                raise RuntimeError(f"{record_of(p).name} received no gradient in this step")
            out.append((record_of(p), grad))
        return out

    def _exec_forward_pass(self, buffer_id: int) -> None:
        with self.around_forward(self.forward_count):
            self.forward_count += 1
            super()._exec_forward_pass(buffer_id)

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step; 1 during a backward pass, where DeepSpeed divides the loss by it."""
        return 1 if self.in_backward else int(super().gradient_accumulation_steps())

    def _exec_backward_pass(self, buffer_id: int) -> None:
        self.in_backward = True
        try:
            super()._exec_backward_pass(buffer_id)
        finally:
            self.in_backward = False
        received = None if self.is_first_stage() else self.pipe_buffers["inputs"][buffer_id]
        self.after_backward(self.backward_count, getattr(received, "grad", None))
        self.backward_count += 1

    def _exec_reduce_tied_grads(self) -> None:
        self.reduce_shared_gradients(self.recorded_gradients())

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        self.before_update()
        super()._exec_optimizer_step(lr_kwargs)

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        self.forward_count = self.backward_count = 0
        super()._exec_schedule(pipe_schedule)

    def _aggregate_total_loss(self) -> torch.Tensor:
        """Do nothing: the loss is summed once, over tokens, by the engine that owns this one."""
        return torch.zeros((), device=self.device)

    _INSTRUCTION_MAP = {  # noqa: RUF012
        instruction: _in_phase(*PHASES[instruction], execute) if instruction in PHASES else execute
        for instruction, execute in {
            **PipelineEngine._INSTRUCTION_MAP,
            schedule.ForwardPass: _exec_forward_pass,
            schedule.BackwardPass: _exec_backward_pass,
            schedule.ReduceTiedGrads: _exec_reduce_tied_grads,
            schedule.OptimizerStep: _exec_optimizer_step,
        }.items()
    }
